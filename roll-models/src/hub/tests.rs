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
fn the_snapshot_of_main_is_found_in_the_cache() {
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
fn a_local_folder_comes_first() {
    let dir = tempfile::tempdir().unwrap();
    touch(dir.path().join("cache/models--o--n/snapshots/x/vae.pth"));
    assert!(hub(dir.path()).files("o/n", "vae.pth").unwrap()[0].ends_with("snapshots/x/vae.pth"));
    touch(dir.path().join("models/o/n/vae.pth"));
    assert_eq!(hub(dir.path()).files("o/n", "vae.pth").unwrap(), [dir.path().join("models/o/n/vae.pth")]);
}

#[test]
fn a_model_that_is_not_there_says_where_was_looked_and_what_to_download() {
    let dir = tempfile::tempdir().unwrap();
    let message = hub(dir.path()).files("Wan-AI/Wan2.2", "Wan2.1_VAE.pth").unwrap_err().to_string();
    for part in ["models/Wan-AI/Wan2.2", "models--Wan-AI--Wan2.2", "hf download Wan-AI/Wan2.2", "Wan2.1_VAE.pth"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn no_identifier_leads_out_of_the_cache() {
    let hub = Hub { caches: vec!["/".into()], folders: vec!["/".into()], remote: None };
    for (model, pattern) in [("etc", "x"), ("../etc", "x"), ("a/b/c", "x"), ("a/b", "../x"), ("a/b", "/x"), ("a/", "x")]
    {
        assert!(matches!(hub.files(model, pattern), Err(HubError::Identifier { .. })), "{model}:{pattern}");
    }
}

#[test]
fn the_environment_is_read_in_the_order_of_hugging_face() {
    let with = |vars: &'static [(&str, &str)]| {
        Hub::from_lookup(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v))).caches
    };
    assert_eq!(with(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h"), ("HOME", "/u")]), [PathBuf::from("/c")]);
    assert_eq!(with(&[("HF_HOME", "/h"), ("HOME", "/u")]), [PathBuf::from("/h/hub")]);
    assert_eq!(with(&[("HOME", "/u")]), [PathBuf::from("/u/.cache/huggingface/hub")]);
}

#[test]
fn downloads_are_off_where_the_environment_says_so() {
    let with = |vars: &'static [(&str, &str)]| {
        Hub::from_lookup(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v))).remote
    };
    assert_eq!(with(&[]).is_some(), cfg!(feature = "hub"));
    for off in ["1", "true", "YES", "on"] {
        let offline: &'static [(&str, &str)] = Box::leak(Box::new([("HF_HUB_OFFLINE", off)]));
        assert_eq!(with(offline), None, "{off}");
    }
    if let Some(remote) = with(&[("HF_ENDPOINT", "https://mirror.example/"), ("HF_TOKEN", " secret\n")]) {
        assert_eq!((remote.endpoint.as_str(), remote.token.as_deref()), ("https://mirror.example", Some("secret")));
        assert!(!format!("{remote:?}").contains("secret"));
    }
}

#[test]
fn the_token_is_read_from_the_file_of_the_login() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("token"), "of the login\n").unwrap();
    let home = home.path().to_path_buf();
    let token = Hub::from_lookup(|name| (name == "HF_HOME").then(|| home.clone())).remote.and_then(|r| r.token);
    assert_eq!(token.as_deref(), cfg!(feature = "hub").then_some("of the login"));
}

#[test]
fn a_directory_counts_where_it_has_what_is_needed() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = dir.path().join("cache/models--o--n/snapshots/x");
    touch(snapshot.join("sub/tokenizer.json"));
    let hub = hub(dir.path());
    assert!(has(&snapshot, &["**/tokenizer.json"]) && has(&snapshot, &["**"]));
    assert!(!has(&snapshot, &["tokenizer.json"]) && !has(&snapshot, &["**", "config.json"]));
    // The directory is returned although a file is missing, because downloads are disabled. Its reader names the
    // missing file.
    assert_eq!(hub.directory("o/n", &["config.json"], &[]).unwrap(), snapshot);
}
