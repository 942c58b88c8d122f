//! Downloads the missing files of a published model into the Hugging Face cache.
//!
//! The server is not trusted: nothing that it sends becomes a path unchecked, the token is sent to the endpoint only,
//! and a connection without data for [`SILENCE`] is closed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use roll_core::Fault;
use roll_external::Fingerprint;
use serde::Deserialize;
use ureq::{Body, http::Response};

use super::{HubError, Remote, repository_name, snapshot, stays_inside};

/// A server that sends no data for this time counts as hung.
const SILENCE: Duration = Duration::from_secs(60);
/// Attempts per file. Each attempt resumes the previous one.
const ATTEMPTS: usize = 5;
/// Maximal number of redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// Maximal size of the list of a model's files, in bytes.
const MAX_LIST: u64 = 64 << 20;
/// Maximal length of a hash that names a blob or a commit.
const MAX_HASH: usize = 128;
/// Maximal number of file names in an error.
const MAX_LISTED: usize = 20;
/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;
/// Waiting time before the first retry. It doubles with each further retry.
const FIRST_RETRY_WAIT: Duration = Duration::from_millis(400);
/// Progress is logged for files of at least this size, in bytes.
const LOGGED_FROM: u64 = 50_000_000;
/// Name of the file in a model's cache directory that lists the patterns whose download is incomplete.
const UNFINISHED: &str = ".roll-unfinished";

// Status codes of HTTP.
const OK: u16 = 200;
const PARTIAL_CONTENT: u16 = 206;
const UNAUTHORIZED: u16 = 401;
const FORBIDDEN: u16 = 403;
const NOT_FOUND: u16 = 404;
const REQUEST_TIMEOUT: u16 = 408;
const RANGE_NOT_SATISFIABLE: u16 = 416;
const TOO_MANY_REQUESTS: u16 = 429;
/// The refusals after which a request is repeated. [`RANGE_NOT_SATISFIABLE`] is the answer if a part was longer than
/// the file; that part has been removed by then.
const WORTH_A_RETRY: [u16; 3] = [REQUEST_TIMEOUT, RANGE_NOT_SATISFIABLE, TOO_MANY_REQUESTS];

type Result<T, E = ureq::Error> = std::result::Result<T, E>;

/// A download of a model's files into a cache.
pub(super) struct Download<'a> {
    remote: &'a Remote,
    /// `ORG/NAME`.
    model: &'a str,
    /// Patterns that must match at least one file each.
    needed: &'a [&'a str],
    /// Patterns of optional files.
    optional: &'a [&'a str],
    /// The model's directory in the cache.
    repository: PathBuf,
    agent: ureq::Agent,
}

/// A model on the server.
#[derive(Deserialize)]
struct ModelInfo {
    /// The commit.
    sha: String,
    /// All files of the model.
    siblings: Vec<ModelFile>,
}

#[derive(Deserialize)]
struct ModelFile {
    /// The file's path in the model.
    rfilename: String,
}

impl<'a> Download<'a> {
    pub(super) fn new(
        remote: &'a Remote,
        cache: &Path,
        model: &'a str,
        needed: &'a [&'a str],
        optional: &'a [&'a str],
    ) -> Self {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_connect(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .user_agent(concat!("roll/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        Self { remote, model, needed, optional, repository: cache.join(repository_name(model)), agent }
    }

    /// Returns whether an earlier download of these patterns is incomplete.
    pub(super) fn is_unfinished(&self) -> bool {
        let unfinished = self.unfinished();
        self.needed.iter().any(|pattern| unfinished.contains(*pattern))
    }

    /// Downloads the files that the cache lacks, from the revision of the cached snapshot, or from `main`.
    ///
    /// Only one process downloads a model at a time. A process that had to wait returns without a download if `is_done`
    /// returns true after the wait.
    pub(super) fn run(&self, is_done: impl Fn() -> Result<bool, HubError>) -> Result<(), HubError> {
        let cache_error = |e: io::Error| self.failed(self.model, e.into());
        fs::create_dir_all(self.repository.join("refs")).map_err(cache_error)?;
        let lock = File::create(self.repository.join(".roll-lock")).map_err(cache_error)?;
        if lock.try_lock().is_err() {
            tracing::info!(model = self.model, "waiting for another process that downloads this model");
            lock.lock().map_err(cache_error)?;
            if is_done()? {
                return Ok(());
            }
        }
        let cached_snapshot = snapshot(&self.repository);
        let revision = cached_snapshot.as_deref().and_then(Path::file_name);
        let revision = revision.map_or("main".into(), |name| name.to_string_lossy());
        let (commit, names) = self.list(&revision).map_err(|e| self.failed(self.model, e))?;
        self.check_needed(&names)?;
        let mut unfinished = self.unfinished();
        unfinished.extend(self.needed.iter().map(|pattern| pattern.to_string()));
        if cached_snapshot.is_none() {
            // A new snapshot will contain only the files that are requested now. A later request for all files (`**`)
            // must not take it for complete.
            unfinished.insert("**".into());
        }
        self.write_unfinished(&unfinished).map_err(cache_error)?;
        let snapshot = self.repository.join("snapshots").join(&commit);
        let is_wanted = |name: &str| self.needed.iter().chain(self.optional).any(|pattern| matches(pattern, name));
        for name in names.iter().filter(|name| is_wanted(name) && !snapshot.join(name).exists()) {
            let file = format!("{}/{name}", self.model);
            self.fetch_with_retries(&commit, name).map_err(|e| self.failed(&file, e))?;
        }
        fs::write(self.repository.join("refs/main"), &commit).map_err(cache_error)?;
        unfinished.retain(|pattern| !self.needed.contains(&pattern.as_str()));
        self.write_unfinished(&unfinished).map_err(cache_error)
    }

    /// Fails unless each needed pattern matches one of the model's files, `names`.
    fn check_needed(&self, names: &[String]) -> Result<(), HubError> {
        let Some(pattern) = self.needed.iter().find(|pattern| !names.iter().any(|name| matches(pattern, name))) else {
            return Ok(());
        };
        let listed = names[..names.len().min(MAX_LISTED)].join(", ");
        let Remote { endpoint, .. } = self.remote;
        let message = format!("the model `{}` at {endpoint} has no file `{pattern}`; it has: {listed}", self.model);
        Err(HubError::user(message))
    }

    /// Returns the commit of a revision and the names of its files. Names that lead out of the snapshot or contain
    /// control characters are left out.
    fn list(&self, revision: &str) -> Result<(String, Vec<String>)> {
        let url = format!("{}/api/models/{}/revision/{revision}", self.remote.endpoint, self.model);
        let (mut response, _) = self.get(&url, None)?;
        let json = response.body_mut().with_config().limit(MAX_LIST).read_to_vec()?;
        let info: ModelInfo = serde_json::from_slice(&json).map_err(|e| invalid(&format!("list of files: {e}")))?;
        if !is_plain(&info.sha) {
            return Err(invalid("commit"));
        }
        let is_usable = |name: &String| stays_inside(name) && !name.contains(char::is_control);
        let names = info.siblings.into_iter().map(|file| file.rfilename).filter(is_usable);
        Ok((info.sha, names.collect()))
    }

    /// Downloads one file, with retries that resume the download.
    fn fetch_with_retries(&self, commit: &str, name: &str) -> Result<()> {
        let mut attempt = 1;
        while let Err(error) = self.fetch(commit, name) {
            let is_refused =
                matches!(error, ureq::Error::StatusCode(code @ 400..500) if !WORTH_A_RETRY.contains(&code));
            if attempt == ATTEMPTS || is_refused {
                return Err(error);
            }
            tracing::warn!(model = self.model, file = name, "the download stopped and is tried again: {error}");
            std::thread::sleep(FIRST_RETRY_WAIT * (1u32 << (attempt - 1)));
            attempt += 1;
        }
        Ok(())
    }

    /// Downloads one file into the blobs and links it in the snapshot. An earlier partial download is resumed.
    fn fetch(&self, commit: &str, name: &str) -> Result<()> {
        let blobs = self.repository.join("blobs");
        fs::create_dir_all(&blobs)?;
        let part_name = unique_name(commit, name);
        let part = blobs.join(format!("{part_name}.part"));
        // The last byte is requested again, so that a part that is already complete is no special case.
        let requested_start = fs::metadata(&part).map_or(0, |part| part.len().saturating_sub(1));
        let url = format!("{}/{}/resolve/{commit}/{}", self.remote.endpoint, self.model, in_url(name));
        let (response, etag) = self.get(&url, Some(requested_start)).inspect_err(|error| {
            if matches!(error, ureq::Error::StatusCode(RANGE_NOT_SATISFIABLE)) {
                let _ = fs::remove_file(&part); // it is longer than the file
            }
        })?;
        let (start, size) = range(&response, requested_start).ok_or_else(|| invalid("range of bytes"))?;
        // As in the Python library, a blob is named by the ETag of its file.
        let etag = etag.as_deref().map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
        let etag = etag.filter(|etag| is_plain(etag));
        let blob = blobs.join(etag.unwrap_or(&part_name));
        if fs::metadata(&blob).map_or(true, |blob| blob.len() != size) {
            self.receive(response, &part, start, size, name)?;
            check_hash(&part, etag)?;
            fs::rename(&part, &blob)?;
        }
        let link = self.repository.join("snapshots").join(commit).join(name);
        fs::create_dir_all(link.parent().unwrap_or(&self.repository))?;
        let _ = fs::remove_file(&link); // a dangling link
        let depth = Path::new(name).components().filter(|c| matches!(c, Component::Normal(_))).count();
        let target = PathBuf::from("../".repeat(depth + 1)).join("blobs").join(blob.file_name().unwrap_or_default());
        #[cfg(unix)]
        let linked = std::os::unix::fs::symlink(target, link);
        // Where links cannot be created, the snapshot contains the file itself.
        #[cfg(not(unix))]
        let linked = std::os::windows::fs::symlink_file(target, &link).or_else(|_| fs::rename(blob, link));
        Ok(linked?)
    }

    /// Sends a GET request, for the bytes from `start` on if it is given. Returns the response and the ETag that the
    /// endpoint sent. Follows redirects: paths of the endpoint with the token, other servers without the token.
    fn get(&self, url: &str, start: Option<u64>) -> Result<(Response<Body>, Option<String>)> {
        let (mut url, mut token, mut etag) = (url.to_string(), self.remote.token.as_ref(), None);
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&url);
            if let Some(start) = start {
                request = request.header("Range", format!("bytes={start}-"));
            }
            if let Some(token) = token {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let response = request.call()?;
            let is_redirection = response.status().is_redirection();
            let location = if is_redirection { header(&response, "location") } else { None };
            if let Some(path) = location.filter(|to| to.starts_with('/') && !to.starts_with("//")) {
                // The third slash of `https://SERVER/...` ends the address of the server.
                let server_length = url.match_indices('/').nth(2).map_or(url.len(), |(at, _)| at);
                url = format!("{}{path}", &url[..server_length]);
                continue;
            }
            // The endpoint sends the hash of a large file, which another server has, as `x-linked-etag`.
            etag = etag.or(header(&response, "x-linked-etag").or(header(&response, "etag")).map(String::from));
            match (location, response.status().as_u16()) {
                // Another server.
                (Some(elsewhere), _) => (url, token) = (elsewhere.into(), None),
                // No byte at 0: the file is empty.
                (None, RANGE_NOT_SATISFIABLE) if start == Some(0) => return Ok((response, etag)),
                (None, code @ 300..) => return Err(ureq::Error::StatusCode(code)),
                (None, _) => return Ok((response, etag)),
            }
        }
        Err(ureq::Error::TooManyRedirects)
    }

    /// Writes the body to `part` from byte `start` on. Fails unless the file has `size` bytes in the end. `name` is for
    /// the log.
    fn receive(&self, mut response: Response<Body>, part: &Path, start: u64, size: u64, name: &str) -> Result<()> {
        let megabytes = size / 1_000_000;
        tracing::info!(model = self.model, file = name, megabytes, "downloading");
        let mut file = File::options().create(true).write(true).truncate(false).open(part)?;
        file.set_len(start)?;
        file.seek(SeekFrom::End(0))?;
        // At most one byte more than expected is read, which is enough to detect an excess.
        let mut body = response.body_mut().as_reader().take((size - start).saturating_add(1));
        let (mut received, mut chunk) = (start, vec![0; CHUNK]);
        loop {
            let length = match body.read(&mut chunk) {
                Ok(0) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(length) => length,
                Err(error) => return Err(error.into()),
            };
            file.write_all(&chunk[..length])?;
            let tenths = |bytes: u64| bytes.min(size) / (size / 10).max(1);
            let tenths_before = tenths(received);
            received += length as u64;
            if size >= LOGGED_FROM && tenths(received) > tenths_before {
                tracing::info!(model = self.model, file = name, "{}0 % of {megabytes} MB", tenths(received));
            }
        }
        if received > size {
            fs::remove_file(part)?;
        }
        if received != size {
            return Err(invalid(&format!("number of bytes: expected {size}, received {received}")));
        }
        Ok(file.sync_all()?)
    }

    /// Returns the patterns whose download is incomplete.
    fn unfinished(&self) -> BTreeSet<String> {
        let text = fs::read_to_string(self.repository.join(UNFINISHED)).unwrap_or_default();
        text.lines().map(Into::into).collect()
    }

    /// Writes the patterns whose download is incomplete; without patterns, removes their file.
    fn write_unfinished(&self, patterns: &BTreeSet<String>) -> io::Result<()> {
        let path = self.repository.join(UNFINISHED);
        let lines: Vec<&str> = patterns.iter().map(String::as_str).collect();
        if lines.is_empty() { fs::remove_file(path) } else { fs::write(path, lines.join("\n")) }
    }

    /// Wraps the error of a download of `what`, and adds a remedy.
    fn failed(&self, what: &str, source: ureq::Error) -> HubError {
        let Remote { endpoint, token } = self.remote;
        let (fault, remedy) = match (&source, token) {
            (ureq::Error::StatusCode(UNAUTHORIZED | FORBIDDEN), None) => {
                let licence = format!("accept the licence at {endpoint}/{} and set HF_TOKEN", self.model);
                (Fault::User, format!("{endpoint} requires a token, or has no such model; {licence}"))
            }
            (ureq::Error::StatusCode(UNAUTHORIZED | FORBIDDEN), Some(_)) => {
                (Fault::User, format!("the token does not allow it; accept the licence at {endpoint}/{}", self.model))
            }
            (ureq::Error::StatusCode(NOT_FOUND), _) => (Fault::User, format!("{endpoint} has no such model or file")),
            _ => {
                let resume = "the part that was downloaded is kept, and the next attempt resumes it";
                (Fault::Failure, format!("{resume}; HF_HUB_OFFLINE=1 disables downloads"))
            }
        };
        HubError { message: format!("cannot download {what}: {remedy}"), fault, source: Some(Box::new(source)) }
    }
}

/// Returns whether `pattern` matches the file `name`. `*` matches within a folder, `**` across folders.
fn matches(pattern: &str, name: &str) -> bool {
    let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
    let pattern = pattern.trim_start_matches("./");
    pattern == name || glob::Pattern::new(pattern).is_ok_and(|p| p.matches_with(name, options))
}

/// Returns the path of a file as part of an address: each byte other than letters, digits and `-._~/` is written as `%`
/// and its hexadecimal code.
fn in_url(name: &str) -> String {
    let is_unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let escaped = |byte| if is_unreserved(byte) { char::from(byte).into() } else { format!("%{byte:02X}") };
    name.bytes().map(escaped).collect()
}

/// Returns the name of a partial file. The contents of a file never change within a commit.
fn unique_name(commit: &str, name: &str) -> String {
    Fingerprint::new("file").text("commit", commit).text("name", name).finish()
}

/// Returns whether a hash that the server sent can be the name of a file or of a directory.
fn is_plain(hash: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !hash.is_empty() && hash.len() <= MAX_HASH && hash.chars().all(is_allowed)
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Returns the position in the file of a body's first byte, and the size of the whole file. `None` unless the body
/// begins at `start` or is the whole file.
fn range(response: &Response<Body>, start: u64) -> Option<(u64, u64)> {
    match response.status().as_u16() {
        // The server does not support ranges.
        OK => Some((0, response.body().content_length()?)),
        PARTIAL_CONTENT => {
            let (bytes, size) = header(response, "content-range")?.strip_prefix("bytes ")?.split_once('/')?;
            let size = size.parse().ok()?;
            let begins_at_start = bytes.split('-').next()?.parse() == Ok(start);
            (begins_at_start && start < size).then_some((start, size))
        }
        // An empty file, see [`Download::get`].
        RANGE_NOT_SATISFIABLE => Some((0, 0)),
        _ => None,
    }
}

/// Checks the contents of a file if its ETag is a SHA-256, as for every large file. If the contents have another
/// SHA-256, the file is removed and this fails.
fn check_hash(file: &Path, etag: Option<&str>) -> Result<()> {
    let is_sha256 = |etag: &&str| etag.len() == 64 && etag.bytes().all(|b| b.is_ascii_hexdigit());
    let Some(expected) = etag.filter(is_sha256) else { return Ok(()) };
    let (found, _) = roll_external::sha256(File::open(file)?)?;
    if found == expected {
        return Ok(());
    }
    fs::remove_file(file)?;
    Err(invalid(&format!("file: expected the SHA-256 {expected}, found {found}")))
}

/// The error for an invalid answer of the server.
fn invalid(what: &str) -> ureq::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server sent an invalid {what}")).into()
}

#[cfg(test)]
#[path = "download_tests.rs"]
mod tests;
