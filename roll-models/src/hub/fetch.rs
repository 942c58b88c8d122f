//! Downloads one file of a published model from the server into the cache.
//!
//! The crate `hf-hub` would name files in the cache as the server asks, and send the token along with redirects. Here,
//! nothing that the server sends becomes a path, the token is sent to the endpoint only, and a connection without data
//! for [`SILENCE`] is closed.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::ApiError;
use roll_external::Fingerprint;
use ureq::Body;
use ureq::http::Response;

/// A server that sends no data for this time counts as hung.
pub(super) const SILENCE: Duration = Duration::from_secs(60);
/// Maximal length of a blob's name. An ETag is a hash.
const MAX_NAME: usize = 128;
/// Maximal number of redirects within the endpoint, such as from a model's old name to its new one.
const MAX_MOVES: usize = 5;
/// Bytes between two progress reports.
const PIECE: usize = 1 << 20;

type Result<T> = std::result::Result<T, ApiError>;

/// Downloads files into one repository of the cache.
pub(super) struct Fetcher {
    /// Follows redirects. The token is not sent to their targets.
    free: ureq::Agent,
    /// Does not follow redirects.
    bound: ureq::Agent,
    token: Option<String>,
    /// The model's directory in the cache.
    repository: PathBuf,
}

/// Metadata of a file on the server.
struct About {
    /// The URL, after redirects within the endpoint.
    url: String,
    /// The name of the file's blob in the cache.
    blob: String,
    size: u64,
}

impl Fetcher {
    pub fn new(repository: PathBuf, token: Option<&str>) -> Self {
        let agent = |redirects| {
            let config = ureq::Agent::config_builder().http_status_as_error(false).max_redirects(redirects);
            let config = config.timeout_connect(Some(SILENCE)).timeout_recv_response(Some(SILENCE));
            config
                .timeout_per_read(Some(SILENCE))
                .user_agent(concat!("roll/", env!("CARGO_PKG_VERSION")))
                .build()
                .into()
        };
        Self { free: agent(10), bound: agent(0), token: token.map(Into::into), repository }
    }

    /// Downloads the file at `url` and links it as `name` in the snapshot `commit`. An earlier partial download is
    /// resumed. `commit` and `name` must be relative paths that stay inside the cache. `told` receives the file's size
    /// and the number of bytes downloaded so far.
    pub fn fetch(&self, url: &str, commit: &str, name: &str, told: impl FnMut(u64, u64)) -> Result<()> {
        let about = self.about(url)?;
        let blobs = self.repository.join("blobs");
        fs::create_dir_all(&blobs)?;
        let blob = blobs.join(&about.blob);
        if fs::metadata(&blob).map_or(true, |found| found.len() != about.size) {
            let part = blob.with_extension("part");
            self.complete(&about, &part, told)?;
            fs::rename(&part, &blob)?;
        }
        let place = self.repository.join("snapshots").join(commit).join(name);
        fs::create_dir_all(place.parent().unwrap_or(&self.repository))?;
        link(&blob, &place, Path::new(name).components().count())?;
        Ok(())
    }

    /// Requests the first byte; the headers of the response contain the file's metadata.
    fn about(&self, url: &str) -> Result<About> {
        let mut url = url.to_string();
        for _ in 0..MAX_MOVES {
            let response = self.ask(&self.bound, &url, "bytes=0-0", true)?;
            let location = header(&response, "location").filter(|_| response.status().is_redirection());
            if let Some(path) = location.filter(|to| to.starts_with('/') && !to.starts_with("//")) {
                let end = url.match_indices('/').nth(2).map_or(url.len(), |(at, _)| at);
                url = format!("{}{path}", &url[..end]);
                continue;
            }
            let etag = header(&response, "x-linked-etag").or(header(&response, "etag"));
            let blob = blob_name(etag.ok_or(ApiError::MissingHeader("etag"))?);
            let size = match location {
                Some(elsewhere) => size(&self.ask(&self.free, elsewhere, "bytes=0-0", false)?)?,
                None => size(&response)?,
            };
            return Ok(About { url, blob, size });
        }
        Err(ApiError::InvalidHeader("location"))
    }

    /// Sends a request. Fails if the status is an error.
    fn ask(&self, agent: &ureq::Agent, url: &str, range: &str, with_token: bool) -> Result<Response<Body>> {
        let mut request = agent.get(url).header("Range", range);
        if let Some(token) = self.token.as_ref().filter(|_| with_token) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let response = request.call().map_err(Box::new)?;
        match response.status().as_u16() {
            // An empty file has no first byte.
            416 if range == "bytes=0-0" => Ok(response),
            code @ 400.. => Err(Box::new(ureq::Error::StatusCode(code)).into()),
            _ => Ok(response),
        }
    }

    /// Appends the missing bytes to the file `part`.
    fn complete(&self, about: &About, part: &Path, mut told: impl FnMut(u64, u64)) -> Result<()> {
        let mut there = fs::metadata(part).map_or(0, |found| found.len());
        if there > about.size {
            there = 0;
        }
        let file =
            |append: bool| OpenOptions::new().create(true).append(append).write(true).truncate(!append).open(part);
        if there == about.size {
            // The file is complete, or empty.
            file(there > 0)?;
            return Ok(());
        }
        let mut response = self.ask(&self.free, &about.url, &format!("bytes={there}-"), true)?;
        // A server without support for ranges sends the whole file.
        let begins =
            header(&response, "content-range").and_then(|range| range.strip_prefix("bytes ")?.split('-').next());
        let goes_on = response.status() == 206 && begins.and_then(|b| b.parse().ok()) == Some(there);
        if !goes_on && response.status() != 200 {
            return Err(ApiError::InvalidResume);
        }
        if !goes_on {
            there = 0;
        }
        let mut file = file(there > 0)?;
        told(about.size, there);
        // At most one byte more than expected is read, which is enough to detect an excess.
        let mut body = response.body_mut().as_reader().take(about.size - there + 1);
        let mut piece = vec![0; PIECE];
        loop {
            let read = match body.read(&mut piece) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            file.write_all(&piece[..read])?;
            there += read as u64;
            told(about.size, there);
        }
        if there > about.size {
            fs::remove_file(part)?;
        }
        match there == about.size {
            true => Ok(file.sync_all()?),
            false => Err(ApiError::InvalidResume),
        }
    }
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Returns the size of the whole file from a response with a part of it.
fn size(response: &Response<Body>) -> Result<u64> {
    let range = header(response, "content-range").and_then(|range| range.rsplit_once('/')?.1.parse().ok());
    range.ok_or(ApiError::InvalidHeader("content-range"))
}

/// Returns the name of the blob for an ETag: the ETag itself, as in `hf-hub`, if it is a plain name, else its hash.
fn blob_name(etag: &str) -> String {
    let name = etag.trim_start_matches("W/").trim_matches('"');
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    match !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(plain) {
        true => name.into(),
        false => Fingerprint::new("etag").text("etag", etag).finish(),
    }
}

/// Creates the link `place` to the blob. `place` lies `depth` path components below its snapshot. On systems where
/// links cannot be created, the blob is moved to `place`.
fn link(blob: &Path, place: &Path, depth: usize) -> io::Result<()> {
    if place.exists() {
        return Ok(());
    }
    // This removes a dangling link.
    let _ = fs::remove_file(place);
    let target = PathBuf::from("../".repeat(depth + 1)).join("blobs").join(blob.file_name().unwrap_or_default());
    #[cfg(unix)]
    let placed = std::os::unix::fs::symlink(target, place);
    #[cfg(not(unix))]
    let placed = std::os::windows::fs::symlink_file(target, place).or_else(|_| fs::rename(blob, place));
    placed
}
