//! Locates the files of published models in the Hugging Face cache, in DiffSynth's folder, and on the Hugging Face hub.
//!
//! A model that is on this machine is used without a request to the server. If the cargo feature `hub` is on and
//! `HF_HUB_OFFLINE` is not set, missing files are downloaded into the cache.

#[cfg(feature = "hub")]
mod download;
#[cfg(test)]
mod tests;

use std::path::{Component, Path, PathBuf};

use roll_core::{BuildContext, Fault};
use roll_external::files;

use crate::weights::expand_glob;

/// The places of published models' files.
#[derive(Clone, Default)]
pub struct Hub {
    /// Hugging Face caches. Each contains `models--ORG--NAME/{refs/main, snapshots/HASH/...}`.
    pub caches: Vec<PathBuf>,
    /// Plain folders. Each contains `ORG/NAME/...`.
    pub folders: Vec<PathBuf>,
    /// Server that missing files are downloaded from, into the first cache. `None` disables downloads.
    pub remote: Option<Remote>,
}

/// A server of models. It does not implement `Debug`, so that the token cannot be logged.
#[derive(Clone)]
pub struct Remote {
    /// The server's address, such as `https://huggingface.co`.
    pub endpoint: String,
    /// Access token, which is sent with every request to `endpoint`. Gated models, whose licence must be accepted,
    /// require one.
    pub token: Option<String>,
}

/// A model cannot be found or downloaded.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct HubError {
    message: String,
    /// Whether the user or the server is at fault.
    pub fault: Fault,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl HubError {
    fn user(message: String) -> Self {
        Self { message, fault: Fault::User, source: None }
    }

    fn identifier(id: &str, problem: &str) -> Self {
        let expected = "expected ORG/NAME or ORG/NAME:PATTERN, such as Wan-AI/Wan2.2-I2V-A14B:Wan2.1_VAE.pth";
        Self::user(format!("`{id}`: {expected}; {problem}"))
    }
}

impl From<HubError> for roll_core::Error {
    fn from(e: HubError) -> Self {
        roll_core::Error::component(e.fault, e)
    }
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

    /// Like [`Hub::from_env`], but without downloads if the component is only opened to be checked.
    pub fn of(context: &BuildContext) -> Self {
        let hub = Self::from_env();
        if context.headers_only { Self { remote: None, ..hub } } else { hub }
    }

    /// Like [`Hub::from_env`], with `var` instead of the environment.
    fn from_lookup(var: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let text = |name: &str| var(name).map(|value| value.to_string_lossy().trim().to_string());
        let home = var("HF_HOME")
            .or_else(|| Some(var("XDG_CACHE_HOME")?.join("huggingface")))
            .or_else(|| Some(var("HOME")?.join(".cache/huggingface")));
        let cache = var("HF_HUB_CACHE")
            .or_else(|| var("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| home.as_ref().map(|home| home.join("hub")));
        let folder = var("DIFFSYNTH_MODEL_BASE_PATH").unwrap_or_else(|| "models".into());
        let is_offline =
            text("HF_HUB_OFFLINE").is_some_and(|v| ["1", "true", "yes", "on"].contains(&&*v.to_lowercase()));
        let remote = (cfg!(feature = "hub") && !is_offline).then(|| {
            let login_token = || files::read_text(&home.as_ref()?.join("token"), files::MAX_TEXT).ok();
            let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
            Remote {
                endpoint: endpoint.trim_end_matches('/').into(),
                token: text("HF_TOKEN").or_else(login_token).map(|t| t.trim().to_string()).filter(|t| !t.is_empty()),
            }
        });
        Self { caches: cache.into_iter().collect(), folders: vec![folder], remote }
    }

    /// Returns the files of `model` (`ORG/NAME`) that match `pattern`, sorted, from the first place with such files.
    /// The files are downloaded if no place has them, or if an earlier download of this pattern is incomplete.
    pub fn files(&self, model: &str, pattern: &str) -> Result<Vec<PathBuf>, HubError> {
        if !stays_inside(pattern) {
            let problem = "the pattern must be relative, without `..`";
            return Err(HubError::identifier(&format!("{model}:{pattern}"), problem));
        }
        self.find(model, &[pattern], &[], |root| expand_glob(&below(root, pattern)).ok())
    }

    /// Returns the directory of `model` (`ORG/NAME`) in the first place that has files for all patterns of `needed`. If
    /// no place has them, the files that match `needed` or `optional` are downloaded. `**` matches any folders.
    pub fn directory(&self, model: &str, needed: &[&str], optional: &[&str]) -> Result<PathBuf, HubError> {
        let if_complete = |root: &Path| has_files(root, needed).then(|| root.to_path_buf());
        self.find(model, needed, optional, if_complete).or_else(|e| {
            // An incomplete directory is returned if downloads are disabled; its reader names the missing file.
            let roots = self.roots(model)?;
            roots.into_iter().find(|root| self.remote.is_none() && root.is_dir()).ok_or(e)
        })
    }

    /// Returns the result of `find_in` for the first place where it finds something; downloads the files if it finds
    /// nothing.
    fn find<T>(
        &self,
        model: &str,
        needed: &[&str],
        optional: &[&str],
        find_in: impl Fn(&Path) -> Option<T>,
    ) -> Result<T, HubError> {
        // Places are listed again for each search, because a download may create a snapshot.
        let search = || Ok::<_, HubError>(self.roots(model)?.iter().find_map(|root| find_in(root)));
        #[cfg(feature = "hub")]
        if let (Some(remote), Some(cache)) = (&self.remote, self.caches.first()) {
            let download = download::Download::new(remote, cache, model, needed, optional);
            let search_complete = || -> Result<Option<T>, HubError> {
                match search()? {
                    Some(_) if download.is_unfinished() => Ok(None),
                    found => Ok(found),
                }
            };
            if let Some(found) = search_complete()? {
                return Ok(found);
            }
            download.run(|| Ok(search_complete()?.is_some()))?;
        }
        #[cfg(not(feature = "hub"))]
        let _ = optional;
        search()?.ok_or_else(|| self.not_found(model, &needed.join(" ")))
    }

    fn not_found(&self, model: &str, pattern: &str) -> HubError {
        let searched: Vec<_> = self.roots(model).into_iter().flatten().map(|p| p.display().to_string()).collect();
        let folder = self.folders.first().map_or(Path::new("models"), PathBuf::as_path).join(model);
        HubError::user(format!(
            "`{model}:{pattern}` is not on this machine; looked in {}; download it with \
             `hf download {model} --include \"{pattern}\"` where there is a network, or put the files into {}",
            searched.join(", "),
            folder.display()
        ))
    }

    /// Returns every directory that may contain the files of `model`, existing or not.
    fn roots(&self, model: &str) -> Result<Vec<PathBuf>, HubError> {
        let (org, name) = model.split_once('/').ok_or_else(|| HubError::identifier(model, "there is no `/`"))?;
        let is_plain = |s: &str| !s.is_empty() && !s.contains(['/', '\\']) && s != "." && s != "..";
        if !is_plain(org) || !is_plain(name) {
            return Err(HubError::identifier(model, "ORG and NAME must be plain names"));
        }
        let mut roots: Vec<PathBuf> = self.folders.iter().map(|f| f.join(org).join(name)).collect();
        for cache in &self.caches {
            let repository = cache.join(repository_name(model));
            roots.push(snapshot(&repository).unwrap_or_else(|| repository.join("snapshots")));
        }
        Ok(roots)
    }
}

/// Returns the name of a model's directory in a cache.
fn repository_name(model: &str) -> String {
    format!("models--{}", model.replace('/', "--"))
}

/// Returns the directory of the snapshot that `refs/main` names; without `refs/main`, of the only snapshot.
fn snapshot(repository: &Path) -> Option<PathBuf> {
    let snapshots = repository.join("snapshots");
    if let Ok(hash) = files::read_text(&repository.join("refs/main"), files::MAX_TEXT) {
        let hash = hash.trim();
        return stays_inside(hash).then(|| snapshots.join(hash));
    }
    let mut found = std::fs::read_dir(snapshots).ok()?.flatten().map(|entry| entry.path()).filter(|p| p.is_dir());
    let first = found.next();
    let is_only = found.next().is_none();
    if is_only { first } else { None }
}

/// Returns whether `root` is a directory with files for all patterns of `needed`.
fn has_files(root: &Path, needed: &[&str]) -> bool {
    let has_file = |pattern: &&str| {
        // In the crate glob, a final `**` matches directories only.
        let pattern = if *pattern == "**" { "**/*" } else { pattern };
        glob::glob(&below(root, pattern)).is_ok_and(|found| found.flatten().any(|path| path.is_file()))
    };
    root.is_dir() && needed.iter().all(has_file)
}

/// Returns the pattern for files below `root`. Special characters in the name of `root` are escaped.
fn below(root: &Path, pattern: &str) -> String {
    format!("{}/{pattern}", glob::Pattern::escape(&root.to_string_lossy()))
}

/// Returns whether a relative path stays below the directory that it is joined to.
fn stays_inside(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir))
}
