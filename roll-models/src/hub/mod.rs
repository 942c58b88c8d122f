//! Locates the files of published models in the Hugging Face cache, in DiffSynth's folder, and on the Hugging Face hub.
//!
//! A model that is on this machine is used without a request to the server. If the cargo feature `hub` is on and
//! `HF_HUB_OFFLINE` is not set, missing files are downloaded into the cache.

#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
mod fetch;
#[cfg(test)]
mod tests;

use std::path::{Component, Path, PathBuf};

use roll_core::Fault;
use roll_external::files;

use crate::weights::expand_glob;

/// The default server of models.
const ENDPOINT: &str = "https://huggingface.co";

/// The places of published models' files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hub {
    /// Hugging Face caches. Each contains `models--ORG--NAME/{refs/main, snapshots/HASH/...}`.
    pub caches: Vec<PathBuf>,
    /// Plain folders. Each contains `ORG/NAME/...`.
    pub folders: Vec<PathBuf>,
    /// Server that missing files are downloaded from, into the first cache. `None` disables downloads.
    pub remote: Option<Remote>,
}

/// A server of models.
#[derive(Clone, PartialEq, Eq)]
pub struct Remote {
    /// The server's address, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Access token, which is sent with every request to `endpoint`. Models with a licence to accept require one.
    pub token: Option<String>,
}

// Debug output does not contain the token, because it may be logged.
impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("endpoint", &self.endpoint).field("token", &self.token.is_some()).finish()
    }
}

/// A model cannot be found or downloaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The identifier is not `ORG/NAME` or `ORG/NAME:PATTERN`.
    #[error("`{id}`: expected ORG/NAME or ORG/NAME:PATTERN, such as Wan-AI/Wan2.2-I2V-A14B:Wan2.1_VAE.pth; {problem}")]
    Identifier {
        /// The identifier.
        id: String,
        /// What is wrong with the identifier.
        problem: String,
    },
    /// No file of the model matches.
    #[error(
        "`{model}:{pattern}` is not on this machine; looked in {}; download it with \
         `hf download {model} --include \"{pattern}\"` where there is a network, or put the files into {}",
        list(looked),
        folder.display()
    )]
    NotFound {
        /// `ORG/NAME`.
        model: String,
        /// Pattern of the files.
        pattern: String,
        /// Directories that were searched.
        looked: Vec<PathBuf>,
        /// Folder into which the user may copy the files.
        folder: PathBuf,
    },
    /// The model on the server has no file that matches.
    #[error("the model `{model}` at {endpoint} has no file `{pattern}`; it has: {}", found.join(", "))]
    NoSuchFile {
        /// `ORG/NAME`.
        model: String,
        /// The server's address.
        endpoint: String,
        /// Pattern of the files.
        pattern: String,
        /// The model's files; only the first of a long list.
        found: Vec<String>,
    },
    /// A download failed.
    #[error("cannot download {what}: {hint}")]
    Download {
        /// The model, or one of its files.
        what: String,
        /// The remedy.
        hint: String,
        /// Whether the user or the server is at fault.
        fault: Fault,
        /// The error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

impl Hub {
    /// Reads the places from environment variables.
    /// - Cache: `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `HF_HOME/hub`, else
    ///   `XDG_CACHE_HOME/huggingface/hub`, else `~/.cache/huggingface/hub`.
    /// - Folder: `DIFFSYNTH_MODEL_BASE_PATH`, else `./models`.
    /// - Server: `HF_ENDPOINT`, else <https://huggingface.co>; token: `HF_TOKEN`, else the token of `hf auth login`.
    ///   `HF_HUB_OFFLINE` (`1`, `true`, `yes` or `on`) disables downloads.
    pub fn from_env() -> Self {
        Self::from_lookup(|name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from))
    }

    fn from_lookup(var: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let text = |name: &str| var(name).map(|value| value.to_string_lossy().trim().to_string());
        let home = var("HF_HOME")
            .or_else(|| Some(var("XDG_CACHE_HOME")?.join("huggingface")))
            .or_else(|| Some(var("HOME")?.join(".cache/huggingface")));
        let cache = var("HF_HUB_CACHE")
            .or_else(|| var("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| home.as_ref().map(|home| home.join("hub")));
        let folder = var("DIFFSYNTH_MODEL_BASE_PATH").unwrap_or_else(|| "models".into());
        let offline = text("HF_HUB_OFFLINE").is_some_and(|v| ["1", "true", "yes", "on"].contains(&&*v.to_lowercase()));
        let remote = (cfg!(feature = "hub") && !offline).then(|| {
            let login = || files::read_text(&home.as_ref()?.join("token"), files::MAX_TEXT).ok();
            Remote {
                endpoint: text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into()).trim_end_matches('/').into(),
                token: text("HF_TOKEN").or_else(login).map(|t| t.trim().to_string()).filter(|t| !t.is_empty()),
            }
        });
        Self { caches: cache.into_iter().collect(), folders: vec![folder], remote }
    }

    /// Returns the files of `model` (`ORG/NAME`) that match `pattern`, sorted, from the first place that has any. Files
    /// are downloaded if no place has any, or if an earlier download of this pattern is incomplete.
    pub fn files(&self, model: &str, pattern: &str) -> Result<Vec<PathBuf>, HubError> {
        if !stays_inside(pattern) {
            return Err(HubError::Identifier {
                id: format!("{model}:{pattern}"),
                problem: "the pattern must be relative, without `..`".into(),
            });
        }
        let find = |root: &Path| {
            let escaped = glob::Pattern::escape(&root.to_string_lossy());
            expand_glob(&format!("{escaped}/{pattern}")).ok()
        };
        self.found(model, &[pattern], &[], find)
    }

    /// Returns the directory of `model` (`ORG/NAME`) in the first place that has files for all patterns of `needed`. If
    /// no place has, files that match `needed` or `also` are downloaded. `**` matches any folders.
    pub fn directory(&self, model: &str, needed: &[&str], also: &[&str]) -> Result<PathBuf, HubError> {
        let whole = |root: &Path| has(root, needed).then(|| root.to_path_buf());
        self.found(model, needed, also, whole).or_else(|e| {
            // An incomplete directory is returned if downloads are disabled; its reader names the missing file.
            let roots = self.roots(model)?;
            roots.into_iter().find(|root| self.remote.is_none() && root.is_dir()).ok_or(e)
        })
    }

    /// Returns the result of `find` for the first place that has one, before or after a download.
    fn found<T>(
        &self,
        model: &str,
        needed: &[&str],
        also: &[&str],
        find: impl Fn(&Path) -> Option<T>,
    ) -> Result<T, HubError> {
        // Places are listed again for each search, because a download may create a snapshot.
        let here = || Ok::<_, HubError>(self.roots(model)?.iter().find_map(|root| find(root)));
        #[cfg(feature = "hub")]
        if let (Some(remote), Some(cache)) = (&self.remote, self.caches.first()) {
            let download = download::Download { remote, cache, model, needed, also };
            let ready = || Ok(here()?.filter(|_| !download.is_unfinished()));
            if let Some(found) = ready()? {
                return Ok(found);
            }
            download.run(|| Ok(ready()?.is_some()))?;
        }
        #[cfg(not(feature = "hub"))]
        let _ = also;
        match here()? {
            Some(found) => Ok(found),
            None => Err(self.not_found(model, &needed.join(" "), self.roots(model)?)),
        }
    }

    fn not_found(&self, model: &str, pattern: &str, looked: Vec<PathBuf>) -> HubError {
        let folder = self.folders.first().cloned().unwrap_or_else(|| "models".into()).join(model);
        HubError::NotFound { model: model.into(), pattern: pattern.into(), looked, folder }
    }

    /// Returns every directory that may contain the files of `model`, existing or not.
    fn roots(&self, model: &str) -> Result<Vec<PathBuf>, HubError> {
        let bad = |problem: &str| HubError::Identifier { id: model.into(), problem: problem.into() };
        let (org, name) = model.split_once('/').ok_or_else(|| bad("there is no `/`"))?;
        let plain = |s: &str| !s.is_empty() && !s.contains(['/', '\\']) && s != "." && s != "..";
        if !plain(org) || !plain(name) {
            return Err(bad("ORG and NAME must be plain names"));
        }
        let mut roots: Vec<PathBuf> = self.folders.iter().map(|f| f.join(org).join(name)).collect();
        for cache in &self.caches {
            let repository = cache.join(format!("models--{org}--{name}"));
            roots.push(snapshot(&repository).unwrap_or_else(|| repository.join("snapshots")));
        }
        Ok(roots)
    }
}

/// Returns the snapshot that `refs/main` names, or the only snapshot.
fn snapshot(repository: &Path) -> Option<PathBuf> {
    let snapshots = repository.join("snapshots");
    if let Ok(hash) = files::read_text(&repository.join("refs/main"), files::MAX_TEXT) {
        let hash = hash.trim();
        return stays_inside(hash).then(|| snapshots.join(hash));
    }
    let mut found = std::fs::read_dir(snapshots).ok()?.flatten().map(|entry| entry.path()).filter(|p| p.is_dir());
    match (found.next(), found.next()) {
        (Some(only), None) => Some(only),
        _ => None,
    }
}

/// Returns whether `root` is a directory with files for all patterns of `needed`.
fn has(root: &Path, needed: &[&str]) -> bool {
    let escaped = glob::Pattern::escape(&root.to_string_lossy());
    let any = |pattern: &&str| {
        let pattern = if *pattern == "**" { "**/*" } else { pattern };
        glob::glob(&format!("{escaped}/{pattern}")).is_ok_and(|found| found.flatten().any(|path| path.is_file()))
    };
    root.is_dir() && needed.iter().all(any)
}

/// Returns whether a relative path stays below the directory that it is joined to.
fn stays_inside(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir))
}

impl From<HubError> for roll_core::Error {
    fn from(e: HubError) -> Self {
        let fault = if let HubError::Download { fault, .. } = &e { *fault } else { Fault::User };
        roll_core::Error::component(fault, e)
    }
}
