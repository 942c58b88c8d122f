//! One file of a published model, from the server into the cache.
//!
//! The crate `hf-hub` would name files of the cache as the server does, and hand the token on where it is sent. Here no
//! word of the server becomes a path, the token goes to the endpoint alone, and a server that says nothing for
//! [`SILENCE`] is given up.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::ApiError;
use roll_external::Fingerprint;
use ureq::Body;
use ureq::http::Response;

/// A server that sends nothing for so long has hung.
pub(super) const SILENCE: Duration = Duration::from_secs(60);
/// Names of blobs are at most so long; an ETag is a hash.
const MAX_NAME: usize = 128;
/// Redirects within the endpoint, as from a model's old name to its new one.
const MAX_MOVES: usize = 5;
/// Bytes between two reports of how far it is.
const PIECE: usize = 1 << 20;

type Result<T> = std::result::Result<T, ApiError>;

/// How files are asked for.
pub(super) struct Fetcher {
    /// Follows redirects, without the token.
    free: ureq::Agent,
    /// Follows none.
    bound: ureq::Agent,
    token: Option<String>,
    /// The model's directory in the cache.
    repository: PathBuf,
}

/// Facts of a file that the server reports.
struct About {
    /// Where it is, after redirects within the endpoint.
    url: String,
    /// The name of its blob.
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

    /// Downloads the file at `url`, on from where an earlier attempt left it, and gives it the name `name` in the
    /// snapshot `commit`; both stay inside the cache. `told` hears the size, and how many bytes are there.
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

    /// Asks for the first byte: with it the server tells the facts of the file.
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

    /// An answer that is no error.
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

    /// Adds to the file `part` the bytes that it lacks.
    fn complete(&self, about: &About, part: &Path, mut told: impl FnMut(u64, u64)) -> Result<()> {
        let mut there = fs::metadata(part).map_or(0, |found| found.len());
        if there > about.size {
            there = 0;
        }
        let file =
            |append: bool| OpenOptions::new().create(true).append(append).write(true).truncate(!append).open(part);
        if there == about.size {
            // Whole already, or empty.
            file(there > 0)?;
            return Ok(());
        }
        let mut response = self.ask(&self.free, &about.url, &format!("bytes={there}-"), true)?;
        // A server that does not know ranges sends everything.
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
        // One byte more than it should send is enough to know.
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

/// The bytes of the whole, of an answer with a part of it.
fn size(response: &Response<Body>) -> Result<u64> {
    let range = header(response, "content-range").and_then(|range| range.rsplit_once('/')?.1.parse().ok());
    range.ok_or(ApiError::InvalidHeader("content-range"))
}

/// Name of an ETag's blob: the ETag, as everybody does, where that is a plain name, else its hash.
fn blob_name(etag: &str) -> String {
    let name = etag.trim_start_matches("W/").trim_matches('"');
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    match !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(plain) {
        true => name.into(),
        false => Fingerprint::new("etag").text("etag", etag).finish(),
    }
}

/// Makes `place` a link to the blob, `depth` names below its snapshot; where links cannot be made the blob moves there.
fn link(blob: &Path, place: &Path, depth: usize) -> io::Result<()> {
    if place.exists() {
        return Ok(());
    }
    // A link to a blob that is gone.
    let _ = fs::remove_file(place);
    let target = PathBuf::from("../".repeat(depth + 1)).join("blobs").join(blob.file_name().unwrap_or_default());
    #[cfg(unix)]
    let placed = std::os::unix::fs::symlink(target, place);
    #[cfg(not(unix))]
    let placed = std::os::windows::fs::symlink_file(target, place).or_else(|_| fs::rename(blob, place));
    placed
}
