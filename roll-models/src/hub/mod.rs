//! Published models: in the Hugging Face cache, in DiffSynth's folder, and on the Hugging Face hub.
//!
//! A model that is on this machine is used as it is, without a request. With the cargo feature `hub` the files that are
//! missing are downloaded into the cache, unless `HF_HUB_OFFLINE` is set.

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

/// The server of models, where the environment names no other.
const ENDPOINT: &str = "https://huggingface.co";

/// Where the files of published models are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hub {
    /// Hugging Face caches: each holds `models--ORG--NAME/{refs/main, snapshots/HASH/...}`.
    pub caches: Vec<PathBuf>,
    /// Plain folders: each holds `ORG/NAME/...`.
    pub folders: Vec<PathBuf>,
    /// Where missing files are downloaded from, into the first of the caches; `None` downloads nothing.
    pub remote: Option<Remote>,
}

/// A server of models.
#[derive(Clone, PartialEq, Eq)]
pub struct Remote {
    /// Its address, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Sent with every request; models with a licence to accept need it.
    pub token: Option<String>,
}

// A token does not belong in a log.
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
        /// Its fault.
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
        /// The files that are needed.
        pattern: String,
        /// Every place that was looked at.
        looked: Vec<PathBuf>,
        /// Where the user may put the files.
        folder: PathBuf,
    },
    /// The model has no file that is asked for.
    #[error("the model `{model}` at {endpoint} has no file `{pattern}`; it has: {}", found.join(", "))]
    NoSuchFile {
        /// `ORG/NAME`.
        model: String,
        /// The server that was asked.
        endpoint: String,
        /// The files that were asked for.
        pattern: String,
        /// Its files, the first of them where there are many.
        found: Vec<String>,
    },
    /// A file was not downloaded whole.
    #[error("cannot download {what}: {hint}")]
    Download {
        /// The model, or one of its files.
        what: String,
        /// The remedy.
        hint: String,
        /// Who can put it right.
        fault: Fault,
        /// The fault.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

impl Hub {
    /// Reads the places from the environment.
    /// - Cache: `HF_HUB_CACHE`, else `HF_HOME/hub`, else `XDG_CACHE_HOME/huggingface/hub`, else
    ///   `~/.cache/huggingface/hub`.
    /// - Folder: `DIFFSYNTH_MODEL_BASE_PATH`, else `./models`.
    /// - Downloads: from `HF_ENDPOINT`, else <https://huggingface.co>, with `HF_TOKEN`, else with the token of
    ///   `hf auth login`; none where `HF_HUB_OFFLINE` is `1`.
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

    /// The weight files of `model` (`ORG/NAME`) that match `pattern`, sorted: those of the first place that has any.
    /// Where no place has, or an earlier download of them did not end, they are downloaded.
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

    /// The directory of `model` (`ORG/NAME`): that of the first place that has files for all patterns of `needed`.
    /// Where no place has, those that match `needed` and `also` are downloaded. `**` matches any folders.
    pub fn directory(&self, model: &str, needed: &[&str], also: &[&str]) -> Result<PathBuf, HubError> {
        let whole = |root: &Path| has(root, needed).then(|| root.to_path_buf());
        self.found(model, needed, also, whole).or_else(|e| {
            // Nothing could be downloaded: a directory that lacks something is still the best answer.
            let roots = self.roots(model)?;
            roots.into_iter().find(|root| self.remote.is_none() && root.is_dir()).ok_or(e)
        })
    }

    /// The result of `find` at the first place where it has one, before or after a download.
    fn found<T>(
        &self,
        model: &str,
        needed: &[&str],
        also: &[&str],
        find: impl Fn(&Path) -> Option<T>,
    ) -> Result<T, HubError> {
        // Anew each time: a download makes a new snapshot.
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

    /// Every directory that may hold the files of `model`, whether it exists or not.
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

/// The snapshot that `refs/main` names, or the only one there is.
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

/// Whether `root` is a directory with files for all patterns of `needed`.
fn has(root: &Path, needed: &[&str]) -> bool {
    let escaped = glob::Pattern::escape(&root.to_string_lossy());
    let any = |pattern: &&str| {
        let pattern = if *pattern == "**" { "**/*" } else { pattern };
        glob::glob(&format!("{escaped}/{pattern}")).is_ok_and(|found| found.flatten().any(|path| path.is_file()))
    };
    root.is_dir() && needed.iter().all(any)
}

/// Whether a path of a file or an identifier stays below the directory it is joined to.
fn stays_inside(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir))
}

impl From<HubError> for roll_core::Error {
    fn from(e: HubError) -> Self {
        let fault = if let HubError::Download { fault, .. } = &e { *fault } else { Fault::User };
        roll_core::Error::component(fault, e)
    }
}
