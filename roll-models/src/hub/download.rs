//! Downloads into the Hugging Face cache. The crate `hf-hub` lists the files and their URLs; [`Fetcher`] downloads
//! them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use roll_core::Fault;
use roll_external::contain::contain;

use super::fetch::{Fetcher, SILENCE};
use super::{HubError, Remote, snapshot, stays_inside};

/// Attempts per file. Each attempt resumes the previous one.
const ATTEMPTS: usize = 5;
/// Maximal number of file names in an error.
const LISTED: usize = 20;
/// Progress is logged for files of at least this size, in bytes.
const TOLD_FROM: u64 = 50_000_000;

/// A download of a model's files into a cache.
pub(super) struct Download<'a> {
    pub(super) remote: &'a Remote,
    pub(super) cache: &'a Path,
    /// `ORG/NAME`.
    pub(super) model: &'a str,
    /// Patterns that must match at least one file each.
    pub(super) needed: &'a [&'a str],
    /// Patterns of optional files.
    pub(super) also: &'a [&'a str],
}

impl Download<'_> {
    /// Returns whether an earlier download of these patterns is incomplete.
    pub(super) fn is_unfinished(&self) -> bool {
        let unfinished = self.unfinished();
        self.needed.iter().any(|pattern| unfinished.iter().any(|line| line == pattern))
    }

    /// Downloads the files that the cache lacks, from the revision of the cached snapshot, or from `main`. Only one
    /// process downloads at a time; the others wait and then return if `done` returns true.
    pub(super) fn run(&self, done: impl Fn() -> Result<bool, HubError>) -> Result<(), HubError> {
        let local = |e: std::io::Error| self.failed(self.model, e.into());
        fs::create_dir_all(self.repository()).map_err(local)?;
        let lock = File::create(self.repository().join(".roll-lock")).map_err(local)?;
        if lock.try_lock().is_err() {
            tracing::info!(model = self.model, "waiting for another process that downloads this model");
            lock.lock().map_err(local)?;
            if done()? {
                return Ok(());
            }
        }

        let api = ApiBuilder::from_cache(Cache::new(self.cache.into()))
            .with_endpoint(self.remote.endpoint.clone())
            .with_token(self.remote.token.clone())
            .with_user_agent("roll", env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|e| self.failed(self.model, e))?;
        let present = snapshot(&self.repository());
        let revision =
            present.as_deref().and_then(Path::file_name).map_or("main".into(), |hash| hash.to_string_lossy());
        let listed = api.repo(self.at(&revision));
        let silent = |problem| ApiError::IoError(std::io::Error::new(std::io::ErrorKind::TimedOut, problem));
        let info = contain(SILENCE, move || listed.info()).unwrap_or_else(|problem| Err(silent(problem)));
        let info = info.map_err(|e| self.failed(self.model, e))?;
        if !stays_inside(&info.sha) {
            return Err(self.failed(self.model, ApiError::InvalidHeader("sha")));
        }
        let names: Vec<String> = info.siblings.into_iter().map(|s| s.rfilename).filter(|n| stays_inside(n)).collect();
        if let Some(pattern) = self.needed.iter().find(|pattern| !names.iter().any(|name| matches(pattern, name))) {
            return Err(HubError::NoSuchFile {
                model: self.model.into(),
                endpoint: self.remote.endpoint.clone(),
                pattern: (*pattern).into(),
                found: names.into_iter().take(LISTED).collect(),
            });
        }

        // A new snapshot contains only the files requested now, so it is marked as incomplete for `**`.
        let whole = present.is_none().then_some("**");
        self.write_unfinished(
            self.unfinished().into_iter().chain(self.needed.iter().chain(&whole).map(|p| p.to_string())),
        )
        .map_err(local)?;
        // All files are from one commit, even if the branch changes meanwhile.
        let repo = api.repo(self.at(&info.sha));
        let cached = Cache::new(self.cache.into()).repo(self.at(&info.sha)).pointer_path(&info.sha);
        let wanted = |name: &str| self.needed.iter().chain(self.also).any(|pattern| matches(pattern, name));
        let fetcher = Fetcher::new(self.repository(), self.remote.token.as_deref());
        for name in names.iter().filter(|name| wanted(name) && !cached.join(name).exists()) {
            self.fetch(&fetcher, &repo, &info.sha, name)
                .map_err(|e| self.failed(&format!("{}/{name}", self.model), e))?;
        }
        Cache::new(self.cache.into()).model(self.model.into()).create_ref(&info.sha).map_err(local)?;
        let ended = |line: &String| self.needed.iter().any(|pattern| line == pattern);
        self.write_unfinished(self.unfinished().into_iter().filter(|line| !ended(line))).map_err(local)
    }

    /// Downloads one file, with retries that resume the download.
    fn fetch(&self, fetcher: &Fetcher, repo: &ApiRepo, commit: &str, name: &str) -> Result<(), ApiError> {
        let mut attempt = 1;
        loop {
            let mut told = Told::new(self.model, name);
            let fetched = fetcher.fetch(&repo.url(name), commit, name, |size, there| told.tell(size, there));
            let Err(error) = fetched else { return Ok(()) };
            let refused = status(&error).filter(|code| (400..500).contains(code) && ![408, 416, 429].contains(code));
            if attempt == ATTEMPTS || refused.is_some() {
                return Err(error);
            }
            tracing::warn!(model = self.model, file = name, "the download stopped, and is tried again: {error}");
            std::thread::sleep(Duration::from_millis(200 << attempt));
            attempt += 1;
        }
    }

    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.model.into(), RepoType::Model, revision.into())
    }

    fn repository(&self) -> PathBuf {
        self.cache.join(Repo::model(self.model.into()).folder_name())
    }

    /// Returns the patterns whose download is incomplete.
    fn unfinished(&self) -> Vec<String> {
        let text = fs::read_to_string(self.repository().join(UNFINISHED)).unwrap_or_default();
        text.lines().map(Into::into).collect()
    }

    fn write_unfinished(&self, patterns: impl Iterator<Item = String>) -> std::io::Result<()> {
        let mut lines: Vec<String> = patterns.collect();
        lines.sort();
        lines.dedup();
        let path = self.repository().join(UNFINISHED);
        match lines.is_empty() {
            false => fs::write(path, lines.join("\n")),
            true => fs::remove_file(path).or_else(|e| match e.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(e),
            }),
        }
    }

    fn failed(&self, what: &str, source: ApiError) -> HubError {
        let Remote { endpoint, token } = self.remote;
        let (fault, hint) = match (status(&source), token) {
            (Some(401 | 403), None) => {
                let hint = format!(
                    "{endpoint} wants to know who asks, or has no such model; accept the licence at \
                     {endpoint}/{} and set HF_TOKEN",
                    self.model
                );
                (Fault::User, hint)
            }
            (Some(401 | 403), Some(_)) => {
                let hint = format!("the token does not allow it; accept the licence at {endpoint}/{}", self.model);
                (Fault::User, hint)
            }
            (Some(404), _) => (Fault::User, format!("{endpoint} has no such model or file")),
            _ => {
                let hint = "what is there of it is kept, and the next attempt goes on from it; HF_HUB_OFFLINE=1 asks \
                            for nothing";
                (Fault::Failure, hint.into())
            }
        };
        HubError::Download { what: what.into(), hint, fault, source: Box::new(source) }
    }
}

/// Name of the file in a model's cache directory that lists the patterns whose download is incomplete.
const UNFINISHED: &str = ".roll-unfinished";

/// Returns whether `pattern` matches the file `name`. `*` matches within a folder, `**` across folders.
fn matches(pattern: &str, name: &str) -> bool {
    let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
    let pattern = pattern.trim_start_matches("./");
    pattern == name || glob::Pattern::new(pattern).is_ok_and(|p| p.matches_with(name, options))
}

/// Returns the HTTP status of an error response.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(e) => match **e {
            ureq::Error::StatusCode(code) => Some(code),
            _ => None,
        },
        _ => None,
    }
}

/// Logs the progress of a download.
struct Told<'a> {
    model: &'a str,
    file: &'a str,
    begun: bool,
    tenths: u64,
}

impl<'a> Told<'a> {
    fn new(model: &'a str, file: &'a str) -> Self {
        Self { model, file, begun: false, tenths: 0 }
    }

    fn tell(&mut self, size: u64, there: u64) {
        if !std::mem::replace(&mut self.begun, true) {
            tracing::info!(model = self.model, file = self.file, megabytes = size / 1_000_000, "downloading");
        }
        let tenths = if size < TOLD_FROM { 0 } else { there.min(size) / (size / 10) };
        if tenths > self.tenths {
            self.tenths = tenths;
            tracing::info!(model = self.model, file = self.file, "{tenths}0 % of {} MB", size / 1_000_000);
        }
    }
}

#[cfg(test)]
#[path = "download_tests.rs"]
mod tests;
