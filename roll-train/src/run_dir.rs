//! The directory of one run.
//!
//! ```text
//! <run>/config.yaml                          the resolved configuration
//!       evaluations/                         results of an evaluation that is under way
//!       metrics.jsonl                        one object per step
//!       events.out.tfevents.*                the same for TensorBoard, and sample videos
//!       samples/step-000025/                 generated videos
//!       checkpoints/step-000025/             see [`crate::checkpoint`]
//!       summary.json                         written at the end
//! ```

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use roll_core::{Error, Result};
use roll_external::files::write_atomically;

use crate::checkpoint::{self, step_name};

/// Reaction to a directory that already holds a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is an error.
    Refuse,
    /// The run continues in it.
    Continue,
}

/// See [`RunDir::lock`].
#[derive(Debug)]
pub struct RunLock {
    _directory: Option<File>,
}

/// The directory of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
    /// It did not exist, or was empty.
    is_new: bool,
}

impl RunDir {
    /// Makes the directory, or takes an existing one that holds no run yet. One that does is an error with
    /// [`Existing::Refuse`]: two runs in one directory would mix their metrics.
    pub fn create(path: impl Into<PathBuf>, existing: Existing) -> Result<Self> {
        let path = path.into();
        Self::would_create(&path, existing)?;
        let is_new = fs::read_dir(&path).map_or(true, |mut entries| entries.next().is_none());
        let run = Self { path, is_new };
        fs::create_dir_all(&run.path).map_err(Error::file("create the run directory", &run.path))?;
        Ok(run)
    }

    /// Fails where [`RunDir::create`] would refuse the directory; makes nothing.
    pub fn would_create(path: &Path, existing: Existing) -> Result<()> {
        let run = Self { path: path.into(), is_new: false };
        match run.trace() {
            Some(trace) if existing == Existing::Refuse => {
                let problem =
                    format!("already holds a run (it has {trace}); choose another directory, or resume that run");
                Err(Error::bad_file(run.path, problem))
            }
            _ => Ok(()),
        }
    }

    /// Opens the directory of an existing run. Fails if it does not exist.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let run = Self { path: path.into(), is_new: false };
        match run.trace() {
            Some(_) => Ok(run),
            None => {
                let of = run.path.parent().filter(|parent| parent.ends_with("checkpoints")).and_then(Path::parent);
                let problem = match of {
                    Some(of) => format!(
                        "is a checkpoint: a run goes on from the newest one of its directory, {}; move newer ones away to \
                         go on from this one",
                        of.display()
                    ),
                    None => "holds no run (neither config.yaml nor checkpoints/ is there)".into(),
                };
                Err(Error::bad_file(run.path, problem))
            }
        }
    }

    /// Keeps other processes from writing this run until the lock is dropped or the process ends, however it ends.
    /// Fails when another one holds it. The lock has no effect on file systems without locks.
    pub fn lock(&self) -> Result<RunLock> {
        if !cfg!(unix) {
            return Ok(RunLock { _directory: None }); // directories cannot be opened
        }
        let directory = File::open(&self.path).map_err(Error::file("open the run directory", &self.path))?;
        match directory.try_lock() {
            Err(TryLockError::WouldBlock) => {
                Err(Error::bad_file(&self.path, "another process is writing this run; wait for it, or stop it"))
            }
            _ => Ok(RunLock { _directory: Some(directory) }),
        }
    }

    /// Deletes leftovers of killed writers. Only while the run is locked.
    pub fn remove_leftovers(&self) -> Result<()> {
        checkpoint::remove_leftovers(&self.checkpoints())?;
        let Ok(entries) = fs::read_dir(&self.path) else { return Ok(()) };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with('.') && name.ends_with(".tmp") && entry.file_type().is_ok_and(|t| t.is_file()) {
                fs::remove_file(entry.path()).map_err(Error::file("delete", entry.path()))?;
            }
        }
        Ok(())
    }

    /// Deletes a directory that [`RunDir::create`] made for a run that did not get through its first step. One that
    /// held something before, or has metrics or checkpoints, stays.
    pub fn discard_beginning(&self) -> Result<()> {
        if !self.is_new || self.metrics_path().exists() || self.checkpoints().exists() {
            return Ok(());
        }
        match fs::remove_dir_all(&self.path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::file("delete", &self.path)(e)),
            _ => Ok(()),
        }
    }

    /// The name of a file that only runs write.
    fn trace(&self) -> Option<&'static str> {
        ["config.yaml", "metrics.jsonl", "summary.json", "checkpoints"].into_iter().find(|n| self.path.join(n).exists())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.yaml`.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.yaml")
    }

    /// `metrics.jsonl`.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// `summary.json`.
    pub fn summary_path(&self) -> PathBuf {
        self.path.join("summary.json")
    }

    /// `evaluations/`.
    pub fn evaluations(&self) -> PathBuf {
        self.path.join("evaluations")
    }

    /// `checkpoints/`.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// `samples/step-000025/`, made when it is not there.
    pub fn samples(&self, step: u64) -> Result<PathBuf> {
        let path = self.path.join("samples").join(step_name(step));
        fs::create_dir_all(&path).map_err(Error::file("create the directory", &path))?;
        Ok(path)
    }

    /// Writes `config.yaml`.
    pub fn write_config(&self, yaml: &str) -> Result<()> {
        write_atomically(&self.config_path(), yaml.as_bytes())
    }

    /// Writes `summary.json`.
    pub fn write_summary(&self, summary: &serde_json::Value) -> Result<()> {
        write_atomically(&self.summary_path(), format!("{summary:#}\n").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_a_directory_with_a_run_unless_it_continues() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let run = RunDir::create(&path, Existing::Refuse).unwrap();
        assert!(RunDir::open(&path).is_err());
        RunDir::create(&path, Existing::Refuse).unwrap();
        run.write_config("seed: 1\n").unwrap();
        let message = RunDir::create(&path, Existing::Refuse).unwrap_err().to_string();
        assert!(message.contains("config.yaml") && message.contains("a/b"), "{message}");
        RunDir::create(&path, Existing::Continue).unwrap();
        RunDir::open(&path).unwrap();
    }

    #[test]
    fn discards_only_the_beginning_of_a_new_run() {
        let dir = tempfile::tempdir().unwrap();
        let begin = |name: &str| {
            let run = RunDir::create(dir.path().join(name), Existing::Refuse).unwrap();
            run.write_config("seed: 1\n").unwrap();
            run
        };
        begin("new").discard_beginning().unwrap();
        assert!(!dir.path().join("new").exists());
        fs::create_dir(dir.path().join("mine")).unwrap();
        fs::write(dir.path().join("mine/notes.txt"), "x").unwrap();
        begin("mine").discard_beginning().unwrap();
        let trained = begin("trained");
        fs::write(trained.metrics_path(), "").unwrap();
        trained.discard_beginning().unwrap();
        RunDir::open(trained.path()).unwrap().discard_beginning().unwrap();
        assert!(dir.path().join("mine/notes.txt").exists() && trained.config_path().exists());
    }

    #[test]
    fn the_lock_excludes_other_processes_and_leftovers_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::create(dir.path(), Existing::Refuse).unwrap();
        run.write_config("seed: 1\n").unwrap();
        fs::write(dir.path().join(".config.yaml.7-0.tmp"), "se").unwrap();
        fs::create_dir_all(run.checkpoints().join(".step-000003.7-1.tmp/trainer")).unwrap();
        let lock = run.lock().unwrap();
        if cfg!(unix) {
            assert!(run.lock().unwrap_err().to_string().contains("another process"));
        }
        run.remove_leftovers().unwrap();
        assert_eq!(fs::read_dir(run.checkpoints()).unwrap().count(), 0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        drop(lock);
        run.lock().unwrap();
    }
}
