//! Model files that are already on this machine: the Hugging Face cache, and DiffSynth's folder.

use std::path::{Component, Path, PathBuf};

use crate::weights::expand_glob;

/// Where files of published models may lie. Nothing is downloaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hub {
    /// Hugging Face caches: each holds `models--ORG--NAME/{refs/main, snapshots/HASH/...}`.
    pub caches: Vec<PathBuf>,
    /// Plain folders: each holds `ORG/NAME/...`.
    pub folders: Vec<PathBuf>,
}

/// A model cannot be found on this machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The identifier is not `ORG/NAME` or `ORG/NAME:PATTERN`.
    #[error("`{id}`: expected ORG/NAME or ORG/NAME:PATTERN, such as Wan-AI/Wan2.2-I2V-A14B:Wan2.1_VAE.pth; {problem}")]
    Identifier {
        /// What was given.
        id: String,
        /// What is wrong with it.
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
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

impl Hub {
    /// What the environment says: `HF_HUB_CACHE`, else `HF_HOME/hub`, else `XDG_CACHE_HOME/huggingface/hub`, else
    /// `~/.cache/huggingface/hub`; and `DIFFSYNTH_MODEL_BASE_PATH`, else `./models`.
    pub fn from_env() -> Self {
        Self::from_lookup(|name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from))
    }

    fn from_lookup(var: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let cache = var("HF_HUB_CACHE")
            .or_else(|| var("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| Some(var("HF_HOME")?.join("hub")))
            .or_else(|| Some(var("XDG_CACHE_HOME")?.join("huggingface/hub")))
            .or_else(|| Some(var("HOME")?.join(".cache/huggingface/hub")));
        let folder = var("DIFFSYNTH_MODEL_BASE_PATH").unwrap_or_else(|| "models".into());
        Self { caches: cache.into_iter().collect(), folders: vec![folder] }
    }

    /// The files of `model` (`ORG/NAME`) that match `pattern`, sorted: those of the first place that has any.
    pub fn files(&self, model: &str, pattern: &str) -> Result<Vec<PathBuf>, HubError> {
        if !stays_inside(pattern) {
            return Err(HubError::Identifier {
                id: format!("{model}:{pattern}"),
                problem: "the pattern must be relative, without `..`".into(),
            });
        }
        let roots = self.roots(model)?;
        for root in &roots {
            let escaped = glob::Pattern::escape(&root.to_string_lossy());
            if let Ok(found) = expand_glob(&format!("{escaped}/{pattern}")) {
                return Ok(found);
            }
        }
        Err(self.not_found(model, pattern, roots))
    }

    /// The directory of `model`: that of the first place that has one.
    pub fn directory(&self, model: &str) -> Result<PathBuf, HubError> {
        let roots = self.roots(model)?;
        match roots.iter().find(|root| root.is_dir()) {
            Some(root) => Ok(root.clone()),
            None => Err(self.not_found(model, "*", roots)),
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
    if let Ok(hash) = std::fs::read_to_string(repository.join("refs/main")) {
        let hash = hash.trim();
        return stays_inside(hash).then(|| snapshots.join(hash));
    }
    let mut found = std::fs::read_dir(snapshots).ok()?.flatten().map(|entry| entry.path()).filter(|p| p.is_dir());
    match (found.next(), found.next()) {
        (Some(only), None) => Some(only),
        _ => None,
    }
}

/// Whether a path of a file or an identifier stays below the directory it is joined to.
fn stays_inside(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir))
}

impl From<HubError> for roll_core::Error {
    fn from(e: HubError) -> Self {
        roll_core::Error::component(roll_core::Fault::User, e)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn touch(path: PathBuf) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"").unwrap();
    }

    fn hub(root: &Path) -> Hub {
        Hub { caches: vec![root.join("cache")], folders: vec![root.join("models")] }
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
        let hub = Hub { caches: vec!["/".into()], folders: vec!["/".into()] };
        for (model, pattern) in
            [("etc", "x"), ("../etc", "x"), ("a/b/c", "x"), ("a/b", "../x"), ("a/b", "/x"), ("a/", "x")]
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
}
