//! Downloads from a local server that answers like the Hugging Face hub.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::Hub;
use super::*;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";
const MODEL: &str = "org/name";

/// Behaviour of the server.
#[derive(Clone, Default)]
struct Behaviour {
    /// Token that requests must have.
    token: Option<String>,
    /// Whether ranges are ignored and the whole file is sent.
    ignores_ranges: bool,
    /// Number of bytes of a file after which the connection is closed, the first time.
    breaks_after: Option<usize>,
    /// ETag of every file, instead of the file's own.
    etag: Option<&'static str>,
    /// Address that requests for files are redirected to.
    redirects_to: Option<String>,
    /// Whether requests for the list of files are redirected there too.
    redirects_list: bool,
    /// Number of bytes that are appended to every file.
    extra_bytes: usize,
}

/// A request: its path and its range.
type Request = (String, Option<String>);

struct Server {
    endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
    /// The tokens of the requests.
    tokens: Arc<Mutex<Vec<String>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    fn start(files: &[(&str, Vec<u8>)], behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let files: Vec<(String, Vec<u8>)> =
            files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect();
        let log = requests.clone();
        let tokens = Arc::new(Mutex::new(Vec::new()));
        let seen = tokens.clone();
        // The thread ends with the test process.
        std::thread::spawn(move || {
            let mut behaviour = behaviour;
            for stream in listener.incoming().flatten() {
                let _ = answer(stream, &files, &mut behaviour, (&log, &seen));
            }
        });
        Self { endpoint, requests, tokens }
    }

    fn hub(&self, cache: &Path) -> Hub {
        let remote = Remote { endpoint: self.endpoint.clone(), token: None };
        Hub { caches: vec![cache.into()], folders: Vec::new(), remote: Some(remote) }
    }

    /// Returns the paths of downloaded files.
    fn downloads(&self) -> Vec<String> {
        let requests = locked(&self.requests);
        let bodies = requests.iter().filter(|(_, range)| range.is_some());
        bodies.map(|(path, _)| path.clone()).collect()
    }
}

fn answer(
    mut stream: TcpStream,
    files: &[(String, Vec<u8>)],
    behaviour: &mut Behaviour,
    (log, tokens): (&Mutex<Vec<Request>>, &Mutex<Vec<String>>),
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    let path = request.split(' ').nth(1).unwrap_or_default().to_string();
    let (mut range, mut token) = (None, None);
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        match name.to_lowercase().as_str() {
            "range" => range = Some(value.to_string()),
            "authorization" => token = Some(value.to_string()),
            _ => {}
        }
    }
    locked(log).push((path.clone(), range.clone()));
    locked(tokens).extend(token.clone());
    let mut reply = |status: &str, headers: &str, body: &[u8], length: usize| {
        let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n");
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)
    };
    if behaviour.token.as_ref().is_some_and(|wanted| token != Some(format!("Bearer {wanted}"))) {
        return reply("401 Unauthorized", "", b"", 0);
    }
    if let Some(to) = behaviour.redirects_to.as_ref().filter(|_| behaviour.redirects_list) {
        return reply("302 Found", &format!("Location: {to}{path}\r\n"), b"", 0);
    }
    if path == format!("/api/models/{MODEL}/revision/main") || path == format!("/api/models/{MODEL}/revision/{SHA}") {
        let siblings: Vec<_> = files.iter().map(|(name, _)| serde_json::json!({ "rfilename": name })).collect();
        let body = serde_json::json!({ "sha": SHA, "siblings": siblings }).to_string();
        return reply("200 OK", "Content-Type: application/json\r\n", body.as_bytes(), body.len());
    }
    let file = path.strip_prefix(&format!("/{MODEL}/resolve/{SHA}/"));
    let asked = |name: &str| file == Some(&name.replace(' ', "%20").replace('#', "%23").replace('?', "%3F"));
    let Some((number, (_, bytes))) = files.iter().enumerate().find(|(_, (name, _))| asked(name)) else {
        return reply("404 Not Found", "", b"", 0);
    };
    let etag = behaviour.etag.map_or(format!("etag{number}"), Into::into);
    let about = format!("ETag: \"{etag}\"\r\nX-Repo-Commit: ../../../out\r\n");
    if let Some(to) = &behaviour.redirects_to {
        return reply("302 Found", &format!("{about}Location: {to}{path}\r\n"), b"", 0);
    }
    let (from, to) = match range.as_deref().and_then(|r| r.strip_prefix("bytes=")).and_then(|r| r.split_once('-')) {
        Some((from, to)) => (from.parse().unwrap_or(0), to.parse().map_or(bytes.len(), |to: usize| to + 1)),
        None => (0, bytes.len()),
    };
    if from >= bytes.len() {
        return reply("416 Range Not Satisfiable", &about, b"", 0);
    }
    let about = format!("{about}Content-Range: bytes {from}-{}/{}\r\n", to - 1, bytes.len());
    if behaviour.ignores_ranges {
        return reply("200 OK", &about, bytes, bytes.len());
    }
    let more = [&bytes[from..to], &vec![0; if to == bytes.len() { behaviour.extra_bytes } else { 0 }]].concat();
    let body = more.as_slice();
    match behaviour.breaks_after.take_if(|_| body.len() > 1) {
        Some(after) => reply("206 Partial Content", &about, &body[..after], body.len()),
        None => reply("206 Partial Content", &about, body, body.len()),
    }
}

fn bytes(seed: u8) -> Vec<u8> {
    (0..2000u32).map(|i| (i * 7 + u32::from(seed)) as u8).collect()
}

fn files() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("high/a-1.safetensors", bytes(1)),
        ("high/a-2.safetensors", bytes(2)),
        ("low/a-1.safetensors", bytes(3)),
        ("config.json", b"{}".to_vec()),
    ]
}

fn blob(cache: &Path, name: &str) -> PathBuf {
    cache.join("models--org--name/blobs").join(name)
}

fn part(cache: &Path, name: &str) -> PathBuf {
    blob(cache, &format!("{}.part", unique_name(SHA, name)))
}

#[test]
fn downloads_missing_files_once_into_the_layout_of_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&files(), Behaviour::default());
    let hub = server.hub(cache.path());
    let found = hub.files(MODEL, "./high/a*.safetensors").unwrap();
    let snapshot = cache.path().join("models--org--name/snapshots").join(SHA);
    assert_eq!(found, [snapshot.join("high/a-1.safetensors"), snapshot.join("high/a-2.safetensors")]);
    assert_eq!(fs::read(&found[0]).unwrap(), bytes(1));
    assert_eq!(fs::read(&found[1]).unwrap(), bytes(2));
    assert_eq!(fs::read_to_string(cache.path().join("models--org--name/refs/main")).unwrap(), SHA);
    assert_eq!(server.downloads().len(), 2);

    let requests = locked(&server.requests).len();
    assert_eq!(hub.files(MODEL, "high/a*.safetensors").unwrap(), found);
    let offline = Hub { remote: None, ..hub.clone() };
    assert_eq!(offline.files(MODEL, "high/a*.safetensors").unwrap(), found);
    assert_eq!(locked(&server.requests).len(), requests);

    // The rest of the same snapshot is downloaded, and no file twice.
    assert_eq!(hub.directory(MODEL, &["**"], &[]).unwrap(), snapshot);
    assert_eq!(server.downloads().len(), 4);
    assert_eq!(fs::read(snapshot.join("low/a-1.safetensors")).unwrap(), bytes(3));
}

#[test]
fn downloads_only_needed_and_optional_files_of_a_directory() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&files(), Behaviour::default());
    let directory = server.hub(cache.path()).directory(MODEL, &["config.json"], &["low/*", "*.jinja"]).unwrap();
    assert!(directory.join("config.json").exists() && directory.join("low/a-1.safetensors").exists());
    assert!(!directory.join("high").exists());
}

#[test]
fn resumes_a_partial_file() {
    let cache = tempfile::tempdir().unwrap();
    fs::create_dir_all(blob(cache.path(), "")).unwrap();
    fs::write(part(cache.path(), "config.json"), b"{").unwrap();
    fs::write(part(cache.path(), "low/a-1.safetensors"), &bytes(3)[..700]).unwrap();
    let server = Server::start(&files(), Behaviour::default());
    let found = server.hub(cache.path()).files(MODEL, "low/a-1.safetensors").unwrap();
    assert_eq!(fs::read(&found[0]).unwrap(), bytes(3));
    let requests = locked(&server.requests);
    assert!(
        requests.iter().any(|(path, range)| path.contains("low") && range.as_deref() == Some("bytes=699-")),
        "{requests:?}"
    );
}

#[test]
fn resumes_after_a_broken_connection() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&files(), Behaviour { breaks_after: Some(1200), ..Behaviour::default() });
    let found = server.hub(cache.path()).files(MODEL, "low/a-1.safetensors").unwrap();
    assert_eq!(fs::read(&found[0]).unwrap(), bytes(3));
    let ranges: Vec<_> = locked(&server.requests).iter().filter_map(|(_, range)| range.clone()).collect();
    assert!(ranges.contains(&"bytes=1199-".to_string()), "{ranges:?}");
}

#[test]
fn partial_files_that_cannot_be_resumed_are_replaced() {
    for contents in [bytes(3), [bytes(3), bytes(3)].concat()] {
        let cache = tempfile::tempdir().unwrap();
        fs::create_dir_all(blob(cache.path(), "")).unwrap();
        fs::write(part(cache.path(), "low/a-1.safetensors"), contents).unwrap();
        let server = Server::start(&files(), Behaviour::default());
        let found = server.hub(cache.path()).files(MODEL, "low/a-1.safetensors").unwrap();
        assert_eq!(fs::read(&found[0]).unwrap(), bytes(3));
    }
    // This server sends everything again. Appending it would make the file too long.
    let cache = tempfile::tempdir().unwrap();
    fs::create_dir_all(blob(cache.path(), "")).unwrap();
    fs::write(part(cache.path(), "low/a-1.safetensors"), &bytes(3)[..700]).unwrap();
    let server = Server::start(&files(), Behaviour { ignores_ranges: true, ..Behaviour::default() });
    let found = server.hub(cache.path()).files(MODEL, "low/a-1.safetensors").unwrap();
    assert_eq!(fs::read(&found[0]).unwrap(), bytes(3));
}

#[test]
fn completes_an_interrupted_download_of_several_files() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&files(), Behaviour::default());
    let hub = server.hub(cache.path());
    let found = hub.files(MODEL, "high/*.safetensors").unwrap();
    fs::remove_file(&found[1]).unwrap();
    let repository = cache.path().join("models--org--name");
    assert_eq!(fs::read_to_string(repository.join(UNFINISHED)).unwrap(), "**");
    fs::write(repository.join(UNFINISHED), "**\nhigh/*.safetensors").unwrap();
    assert_eq!(hub.files(MODEL, "high/*.safetensors").unwrap(), found);
    hub.directory(MODEL, &["**"], &[]).unwrap();
    assert!(!repository.join(UNFINISHED).exists());
}

#[test]
fn concurrent_downloads_of_the_same_files_happen_once() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&files(), Behaviour::default());
    let hub = server.hub(cache.path());
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..4).map(|_| scope.spawn(|| hub.files(MODEL, "high/*.safetensors").unwrap().len())).collect();
        assert!(all.into_iter().all(|thread| thread.join().unwrap() == 2));
    });
    assert_eq!(server.downloads().len(), 2);
}

#[test]
fn token_is_sent_and_its_absence_explained() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&files(), Behaviour { token: Some("secret".into()), ..Behaviour::default() });
    let hub = server.hub(cache.path());
    let error = hub.files(MODEL, "config.json").unwrap_err();
    assert!(error.fault == Fault::User, "{error:?}");
    assert!(error.to_string().contains("HF_TOKEN"), "{error}");
    let remote = |token: &str| Some(Remote { endpoint: server.endpoint.clone(), token: Some(token.into()) });
    let error =
        Hub { remote: remote("wrong"), ..hub.clone() }.files(MODEL, "low/*.safetensors").unwrap_err().to_string();
    assert!(error.contains("licence") && !error.contains("wrong"), "{error}");
    assert_eq!(Hub { remote: remote("secret"), ..hub }.files(MODEL, "low/*.safetensors").unwrap().len(), 1);
}

#[test]
fn error_names_what_the_server_lacks() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&files(), Behaviour::default());
    let error = server.hub(cache.path()).files(MODEL, "Wan2.1_VAE.pth").unwrap_err().to_string();
    for part in [MODEL, "Wan2.1_VAE.pth", &server.endpoint, "high/a-1.safetensors"] {
        assert!(error.contains(part), "{error}");
    }
    let error = server.hub(cache.path()).files("org/other", "x.pth").unwrap_err();
    assert!(error.fault == Fault::User, "{error:?}");
    let unreachable = Remote { endpoint: "http://127.0.0.1:9".into(), token: None };
    let error = Hub { remote: Some(unreachable), ..server.hub(cache.path()) }.files("org/third", "x.pth").unwrap_err();
    assert!(error.fault == Fault::Failure, "{error:?}");
}

#[test]
fn file_names_of_a_server_stay_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let names = ["../../../out.safetensors", "/tmp/out.safetensors", "a/../../out.safetensors", "in.safetensors"];
    let server = Server::start(&names.map(|name| (name, bytes(1))), Behaviour::default());
    let directory = server.hub(cache.path()).directory(MODEL, &["**"], &[]).unwrap();
    let found: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(found, ["in.safetensors"]);
    assert!(server.downloads().iter().all(|path| path.ends_with("/in.safetensors")));
}

#[test]
fn etags_and_commits_of_a_server_stay_in_the_cache() {
    for etag in ["../../../../out", "/tmp/roll-out", "..", "a/b", "x.part", ""] {
        let cache = tempfile::tempdir().unwrap();
        let inside = cache.path().join("deep/in/cache");
        let server = Server::start(&files(), Behaviour { etag: Some(etag), ..Behaviour::default() });
        let found = server.hub(&inside).files(MODEL, "low/a-1.safetensors").unwrap();
        assert_eq!(fs::read(&found[0]).unwrap(), bytes(3));
        // The file is one of the blobs, whatever the ETag is, and no other file was created.
        let real = found[0].canonicalize().unwrap();
        assert_eq!(real.parent().unwrap(), inside.join("models--org--name/blobs").canonicalize().unwrap());
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1, "{etag}");
        assert_eq!(fs::read_dir(cache.path().join("deep/in")).unwrap().count(), 1, "{etag}");
        assert!(!Path::new("/tmp/roll-out").exists());
    }
}

#[test]
fn token_is_not_sent_to_other_servers() {
    let (cache, store) = (tempfile::tempdir().unwrap(), Server::start(&files(), Behaviour::default()));
    let behaviour =
        Behaviour { token: Some("secret".into()), redirects_to: Some(store.endpoint.clone()), ..Behaviour::default() };
    let server = Server::start(&files(), behaviour);
    let remote = Some(Remote { endpoint: server.endpoint.clone(), token: Some("secret".into()) });
    let hub = Hub { remote, ..server.hub(cache.path()) };
    let found = hub.files(MODEL, "low/a-1.safetensors").unwrap();
    assert_eq!(fs::read(&found[0]).unwrap(), bytes(3));
    assert!(!locked(&server.tokens).is_empty() && !store.downloads().is_empty());
    assert!(locked(&store.tokens).is_empty());
}

#[test]
fn token_is_not_sent_to_another_port_that_lists_the_files() {
    let (cache, store) = (tempfile::tempdir().unwrap(), Server::start(&files(), Behaviour::default()));
    let redirects_to = Some(store.endpoint.clone());
    let server = Server::start(&[], Behaviour { redirects_to, redirects_list: true, ..Behaviour::default() });
    let remote = Some(Remote { endpoint: server.endpoint.clone(), token: Some("secret".into()) });
    let hub = Hub { remote, ..server.hub(cache.path()) };
    hub.files(MODEL, "low/a-1.safetensors").unwrap();
    assert!(!locked(&server.tokens).is_empty() && !locked(&store.requests).is_empty());
    assert!(locked(&store.tokens).is_empty());
}

#[test]
fn names_with_spaces_are_downloaded_and_those_with_control_characters_left_out() {
    let cache = tempfile::tempdir().unwrap();
    let names = ["a b#?.txt", "a\0b.txt", "\u{1b}]0;x.txt", "a\nb.txt"];
    let server = Server::start(&names.map(|name| (name, bytes(1))), Behaviour::default());
    let directory = server.hub(cache.path()).directory(MODEL, &["**"], &[]).unwrap();
    let found: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(found, ["a b#?.txt"]);
}

#[test]
fn rejects_and_removes_a_file_longer_than_announced() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&files(), Behaviour { extra_bytes: 1000, ..Behaviour::default() });
    let error = server.hub(cache.path()).files(MODEL, "config.json").unwrap_err();
    assert!(error.fault == Fault::Failure, "{error:?}");
    assert_eq!(fs::read_dir(blob(cache.path(), "")).unwrap().count(), 0);
}

#[test]
fn checks_the_sha256_that_an_etag_of_a_large_file_is() {
    let hash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    for (etag, contents, matches) in [(hash, &b""[..], true), (hash, b"x", false), ("etag", b"x", true)] {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), contents).unwrap();
        assert_eq!(check_hash(file.path(), Some(etag)).is_ok(), matches);
        assert_eq!(file.path().exists(), matches);
    }
}
