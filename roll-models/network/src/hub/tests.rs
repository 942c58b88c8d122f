//! Lookup of models on this machine.
#![allow(clippy::unwrap_used)]

use super::*;

fn touch(path: PathBuf) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, b"").unwrap();
}

fn hub(root: &Path) -> Hub {
    Hub { caches: vec![root.join("cache")], folders: vec![root.join("models")], remote: None }
}

#[test]
fn finds_the_snapshot_of_main_in_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let repository = dir.path().join("cache/models--Wan-AI--Wan2.2");
    touch(repository.join("snapshots/old/a.safetensors"));
    touch(repository.join("snapshots/abc123/high/a-2.safetensors"));
    touch(repository.join("snapshots/abc123/high/a-1.safetensors"));
    touch(repository.join("snapshots/abc123/high/a.safetensors.index.json"));
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::write(repository.join("refs/main"), "abc123\n").unwrap();
    let found = hub(dir.path()).files("Wan-AI/Wan2.2", "high/a*.safetensors").unwrap();
    let high = repository.join("snapshots/abc123/high");
    assert_eq!(found, [high.join("a-1.safetensors"), high.join("a-2.safetensors")]);
}

#[test]
fn local_folder_precedes_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    touch(dir.path().join("cache/models--o--n/snapshots/x/vae.pth"));
    assert!(hub(dir.path()).files("o/n", "vae.pth").unwrap()[0].ends_with("snapshots/x/vae.pth"));
    touch(dir.path().join("models/o/n/vae.pth"));
    assert_eq!(hub(dir.path()).files("o/n", "vae.pth").unwrap(), [dir.path().join("models/o/n/vae.pth")]);
}

#[test]
fn error_lists_searched_places_and_the_download_command() {
    let dir = tempfile::tempdir().unwrap();
    let message = hub(dir.path()).files("Wan-AI/Wan2.2", "Wan2.1_VAE.pth").unwrap_err().to_string();
    for part in ["models/Wan-AI/Wan2.2", "models--Wan-AI--Wan2.2", "hf download Wan-AI/Wan2.2", "Wan2.1_VAE.pth"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn rejects_identifiers_that_lead_out_of_the_cache() {
    let hub = Hub { caches: vec!["/".into()], folders: vec!["/".into()], remote: None };
    for (model, pattern) in [("etc", "x"), ("../etc", "x"), ("a/b/c", "x"), ("a/b", "../x"), ("a/b", "/x"), ("a/", "x")]
    {
        let message = hub.files(model, pattern).unwrap_err().to_string();
        assert!(message.contains("expected ORG/NAME"), "{message}");
    }
}

#[test]
fn environment_variables_have_the_precedence_of_hugging_face() {
    let with = |vars: &'static [(&str, &str)]| {
        Hub::from_lookup(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v))).caches
    };
    assert_eq!(with(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h"), ("HOME", "/u")]), [PathBuf::from("/c")]);
    assert_eq!(with(&[("HF_HOME", "/h"), ("HOME", "/u")]), [PathBuf::from("/h/hub")]);
    assert_eq!(with(&[("HOME", "/u")]), [PathBuf::from("/u/.cache/huggingface/hub")]);
}

#[test]
fn offline_variable_disables_downloads() {
    let with = |vars: &'static [(&str, &str)]| {
        Hub::from_lookup(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v))).remote
    };
    assert_eq!(with(&[]).is_some(), cfg!(feature = "hub"));
    for off in ["1", "true", "YES", "on"] {
        let offline: &'static [(&str, &str)] = Box::leak(Box::new([("HF_HUB_OFFLINE", off)]));
        assert!(with(offline).is_none(), "{off}");
    }
    if let Some(remote) = with(&[("HF_ENDPOINT", "https://mirror.example/"), ("HF_TOKEN", " secret\n")]) {
        assert_eq!((remote.endpoint.as_str(), remote.token.as_deref()), ("https://mirror.example", Some("secret")));
    }
}

#[test]
fn token_is_read_from_the_login_file() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("token"), "of the login\n").unwrap();
    let home = home.path().to_path_buf();
    let token = Hub::from_lookup(|name| (name == "HF_HOME").then(|| home.clone())).remote.and_then(|r| r.token);
    assert_eq!(token.as_deref(), cfg!(feature = "hub").then_some("of the login"));
}

#[test]
fn directory_needs_a_file_for_every_pattern() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = dir.path().join("cache/models--o--n/snapshots/x");
    touch(snapshot.join("sub/tokenizer.json"));
    let hub = hub(dir.path());
    assert!(has_files(&snapshot, &["**/tokenizer.json"]) && has_files(&snapshot, &["**"]));
    assert!(!has_files(&snapshot, &["tokenizer.json"]) && !has_files(&snapshot, &["**", "config.json"]));
    // The directory is returned although a file is missing, because downloads are disabled. Its reader names the
    // missing file.
    assert_eq!(hub.directory("o/n", &["config.json"], &[]).unwrap(), snapshot);
}
