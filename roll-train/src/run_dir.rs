//! The directory of one run: which files it has, who may write it, and whose run its checkpoints belong to.
//!
//! ```text
//! <run>/.lock                                when the process that writes the run was started
//!       config.yaml                          the resolved configuration
//!       evaluations/                         results of an evaluation that is under way
//!       metrics.jsonl                        one object per step
//!       events.out.tfevents.*                the metrics for TensorBoard, and sample videos
//!       samples/step-000025/                 generated videos
//!       votes/                               clips that people compare, questions and answers
//!       checkpoints/step-000025/             see [`crate::checkpoint`]
//!       summary.json                         written at the end
//! ```

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use roll_core::{Error, Result};
use roll_external::files::{self, is_temporary, write_atomically};

use crate::checkpoint::{self, Checkpoint, RunIdentity};
use crate::config::RunConfig;
use crate::signature;

/// Name of the file with the resolved configuration.
const CONFIG: &str = "config.yaml";

/// Files and directories by which a run directory is recognized: it has at least one of them.
const TRACES: [&str; 4] = [CONFIG, "metrics.jsonl", "summary.json", "checkpoints"];

/// Largest file that is read as `.lock`. It holds one number.
const MAX_LOCK_BYTES: u64 = 64;

/// Files and directories that the steps of a run extend or delete.
const WRITTEN_ENTRIES: [&str; 6] =
    ["checkpoints", "samples", "evaluations", "votes", "metrics.jsonl", "trajectories.jsonl"];

/// Keeps other processes from writing a run, see [`RunDir::lock`].
#[derive(Debug)]
pub struct RunLock {
    /// The open directory. The operating system's lock ends when it is closed.
    _directory: Option<File>,
    /// The file that names this process.
    lock_file: PathBuf,
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // If the file stays, it names a process that does not hold the lock, and only the lock counts.
        let _ = fs::remove_file(&self.lock_file);
    }
}

/// When a process started, in clock ticks since the system started. `process` is its number, or "self". A later process
/// may get the same number, but not the same start. `None` if `/proc` does not list the process.
pub fn process_start(process: &str) -> Option<u64> {
    let text = fs::read_to_string(Path::new("/proc").join(process).join("stat")).ok()?;
    // The second field is the name of the program. It is in brackets, and may have spaces and brackets itself.
    let (_, fields_from_third) = text.rsplit_once(')')?;
    // The start is the 22nd field.
    fields_from_third.split_whitespace().nth(22 - 3)?.parse().ok()
}

/// The directory of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
    /// Whether [`RunDir::create`] made the directory, or found it empty.
    is_new: bool,
}

impl RunDir {
    /// Makes the directory, or takes an existing one that holds no run yet. Fails if it holds a run, because two runs
    /// in one directory would mix their metrics.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        Self::check_creation(&path)?;
        let is_new = fs::read_dir(&path).map_or(true, |mut entries| entries.next().is_none());
        let run = Self { path, is_new };
        fs::create_dir_all(&run.path).map_err(Error::file("create the run directory", &run.path))?;
        Ok(run)
    }

    /// Fails if [`RunDir::create`] would refuse the directory. Creates nothing.
    pub fn check_creation(path: &Path) -> Result<()> {
        let run = Self { path: path.into(), is_new: false };
        if let Some(trace) = run.trace() {
            let problem = format!("already holds a run (it has {trace}); choose another directory, or resume that run");
            return Err(Error::bad_file(run.path, problem));
        }
        run.refuse_links()?;
        files::check_directory(path)
    }

    /// Opens the directory of an existing run. Fails if it does not exist, or if parts of it are links.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let run = Self { path: path.into(), is_new: false };
        if run.trace().is_none() {
            let checkpoints = run.path.parent().filter(|parent| parent.ends_with("checkpoints"));
            let problem = match checkpoints.and_then(Path::parent) {
                Some(run_of_checkpoint) => format!(
                    "is a checkpoint: a run goes on from the newest one of its directory, {}; move newer ones away to \
                     go on from this one",
                    run_of_checkpoint.display()
                ),
                None => "holds no run (neither config.yaml nor checkpoints/ is there)".into(),
            };
            return Err(Error::bad_file(run.path, problem));
        }
        run.refuse_links()?;
        Ok(run)
    }

    /// Whether the directory at `path` has a file that only runs write.
    pub fn has_run(path: &Path) -> bool {
        Self { path: path.into(), is_new: false }.trace().is_some()
    }

    /// The run directories at `path`: `path` itself if it is the directory of a run, else the runs in the directories
    /// directly below it, by name. Without any run, `path` alone is returned, because a run may begin there later.
    pub fn runs_at(path: &Path) -> Vec<PathBuf> {
        if Self::has_run(path) {
            return vec![path.into()];
        }
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        let mut runs: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| Self::has_run(path)).collect();
        runs.sort();
        if runs.is_empty() { vec![path.into()] } else { runs }
    }

    /// Whether the file at `path`, or the one that it links to, is the `config.yaml` of a run directory: whether
    /// metrics, a summary or checkpoints are next to it.
    pub fn is_config_of_run(path: &Path) -> bool {
        let is_next_to_trace =
            |path: &Path| TRACES.iter().filter(|name| **name != CONFIG).any(|name| path.with_file_name(name).exists());
        let is_of_run = |path: &Path| path.ends_with(CONFIG) && is_next_to_trace(path);
        is_of_run(path) || path.canonicalize().is_ok_and(|path| is_of_run(&path))
    }

    /// Keeps other processes from writing this run until the lock is dropped or this process ends, however it ends.
    /// Fails if another process holds the lock. On file systems without locks, nothing keeps other processes away.
    pub fn lock(&self) -> Result<RunLock> {
        // Only on Unix can a directory be opened and locked.
        if !cfg!(unix) {
            return Ok(RunLock { _directory: None, lock_file: self.lock_path() });
        }
        let directory = File::open(&self.path).map_err(Error::file("open the run directory", &self.path))?;
        if let Err(TryLockError::WouldBlock) = directory.try_lock() {
            return Err(Error::bad_file(&self.path, "another process is writing this run; wait for it, or stop it"));
        }
        if let Some(start) = process_start("self") {
            write_atomically(&self.lock_path(), format!("{start}\n").as_bytes())?;
        }
        Ok(RunLock { _directory: Some(directory), lock_file: self.lock_path() })
    }

    /// The start of the process that locked this run last, as [`process_start`] returns it; `None` if the file `.lock`
    /// does not name it. That process may have ended: the file alone does not mean that the run is locked.
    pub fn locked_by(&self) -> Option<u64> {
        let path = self.lock_path();
        files::refuse_links(&self.path, &path).ok()?;
        files::read_text(&path, MAX_LOCK_BYTES).ok()?.trim().parse().ok()
    }

    fn lock_path(&self) -> PathBuf {
        self.path.join(".lock")
    }

    /// The directories whose entries runs write and delete, besides checkpoints.
    fn written_folders(&self) -> [PathBuf; 3] {
        [self.path.join("samples"), self.path.join("votes"), self.evaluations()]
    }

    /// Fails if something that the run writes or deletes is a link, since the run would then change files elsewhere.
    fn refuse_links(&self) -> Result<()> {
        for name in WRITTEN_ENTRIES {
            files::refuse_links(&self.path, &self.path.join(name))?;
        }
        // Entries of these directories, such as the folders of steps, must not be links either.
        for folder in self.written_folders().into_iter().chain([self.checkpoints()]) {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                files::refuse_links(&folder, &entry.path())?;
            }
        }
        Ok(())
    }

    /// Deletes files that killed processes left half written. Must be called only while the run is locked.
    pub fn remove_leftovers(&self) -> Result<()> {
        checkpoint::remove_leftovers(&self.checkpoints())?;
        remove_temporary_files(&self.path)?;
        for folder in self.written_folders() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                remove_temporary_files(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Deletes the directory of a run that failed before the end of its first step. A directory that held something
    /// before [`RunDir::create`], or that has metrics or checkpoints, stays.
    pub fn discard_beginning(&self) -> Result<()> {
        if !self.is_new || self.metrics_path().exists() || self.checkpoints().exists() {
            return Ok(());
        }
        match fs::remove_dir_all(&self.path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::file("delete", &self.path)(e)),
            _ => Ok(()),
        }
    }

    /// The first of [`TRACES`] that the directory has.
    fn trace(&self) -> Option<&'static str> {
        TRACES.into_iter().find(|name| self.path.join(name).exists())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.yaml`.
    pub fn config_path(&self) -> PathBuf {
        self.path.join(CONFIG)
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

    /// Writes the configuration `yaml` to `config.yaml`, with the fingerprint of the configuration that the run began
    /// with, and with a signature. The fingerprint is taken from the existing file, or else from the newest checkpoint,
    /// or else computed from `yaml`.
    pub fn write_config(&self, yaml: &str) -> Result<()> {
        let checkpoints = checkpoint::list(&self.checkpoints())?;
        let of_newest_checkpoint = || {
            let mut newest_first = checkpoints.iter().rev();
            let run = newest_first.find_map(|(_, path)| Checkpoint::open(path).ok()?.manifest().run.clone())?;
            Some(run.configuration)
        };
        let first_fingerprint = self.first_fingerprint().or_else(of_newest_checkpoint);
        let first_fingerprint = first_fingerprint.unwrap_or_else(|| signature::fingerprint(yaml));
        write_atomically(&self.config_path(), signature::signed(yaml, &first_fingerprint).as_bytes())
    }

    /// The fingerprint of the configuration that the run began with; `None` if `config.yaml` does not name it.
    fn first_fingerprint(&self) -> Option<String> {
        let text = files::read_text(&self.config_path(), files::MAX_TEXT).ok()?;
        signature::first_fingerprint(&text).map(String::from)
    }

    /// The identity of the run, which its checkpoints have in their manifests.
    pub(crate) fn identity(&self, config: &RunConfig) -> Option<RunIdentity> {
        Some(RunIdentity {
            name: config.experiment().into(),
            algorithm: config.algo.name.clone(),
            configuration: self.first_fingerprint()?,
        })
    }

    /// Fails if the manifest of a checkpoint names another run or algorithm.
    pub(crate) fn check_own(&self, checkpoint: &Checkpoint, config: &RunConfig) -> Result<()> {
        let Some(found) = checkpoint.manifest().run.as_ref() else { return Ok(()) };
        let first_fingerprint = self.first_fingerprint().unwrap_or_else(|| found.configuration.clone());
        if found.algorithm == config.algo.name && found.configuration == first_fingerprint {
            return Ok(());
        }
        /// Number of digits of a fingerprint in a message.
        const SHOWN_DIGITS: usize = 12;
        let short = |fingerprint: &str| fingerprint.chars().take(SHOWN_DIGITS).collect::<String>();
        let (checkpoint_path, run_path) = (checkpoint.path().display(), self.path.display());
        let problem = format!(
            "is of another run: expected one of `{}` by `{}` that began with configuration {}, found `{}` by `{}` \
             with {}. Move it out of {run_path}; to train on from its weights, begin a new run with \
             `--set model.lora_checkpoint={checkpoint_path}`",
            config.experiment(),
            config.algo.name,
            short(&first_fingerprint),
            found.name,
            found.algorithm,
            short(&found.configuration)
        );
        Err(Error::bad_file(checkpoint.path(), problem))
    }

    /// Writes `summary.json`.
    pub fn write_summary(&self, summary: &serde_json::Value) -> Result<()> {
        write_atomically(&self.summary_path(), format!("{summary:#}\n").as_bytes())
    }
}

/// Deletes the files in a directory that a killed process was writing.
fn remove_temporary_files(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if is_temporary(&entry.file_name().to_string_lossy()) && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            fs::remove_file(entry.path()).map_err(Error::file("delete", entry.path()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_a_directory_with_a_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let run = RunDir::create(&path).unwrap();
        assert!(RunDir::open(&path).is_err());
        RunDir::create(&path).unwrap();
        run.write_config("seed: 1\n").unwrap();
        let message = RunDir::create(&path).unwrap_err().to_string();
        assert!(message.contains("config.yaml") && message.contains("a/b"), "{message}");
        RunDir::open(&path).unwrap();
    }

    #[test]
    fn discards_only_the_beginning_of_a_new_run() {
        let dir = tempfile::tempdir().unwrap();
        let begin = |name: &str| {
            let run = RunDir::create(dir.path().join(name)).unwrap();
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
        let run = RunDir::create(dir.path()).unwrap();
        run.write_config("seed: 1\n").unwrap();
        fs::write(dir.path().join(".config.yaml.7-0.tmp"), "se").unwrap();
        fs::create_dir_all(run.checkpoints().join(".step-000003.7-1.tmp/trainer")).unwrap();
        let samples = dir.path().join("samples/step-000006");
        fs::create_dir_all(&samples).unwrap();
        fs::write(samples.join(".train-000.mp4.7-20.tmp"), "vid").unwrap();
        fs::write(samples.join("train-000.mp4"), "video").unwrap();
        let lock = run.lock().unwrap();
        if cfg!(unix) {
            assert!(run.lock().unwrap_err().to_string().contains("another process"));
        }
        run.remove_leftovers().unwrap();
        if cfg!(target_os = "linux") {
            assert_eq!(run.locked_by(), process_start(&std::process::id().to_string()));
            assert!(run.locked_by().is_some() && run.locked_by() != process_start("1"));
        }
        assert_eq!(fs::read_dir(run.checkpoints()).unwrap().count(), 0);
        let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.retain(|name| name != ".lock");
        assert_eq!(names.len(), 3, "{names:?}");
        assert_eq!(fs::read_dir(&samples).unwrap().count(), 1);
        drop(lock);
        assert_eq!(run.locked_by(), None);
        run.lock().unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn links_to_other_places_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir_all(elsewhere.join("step-000001")).unwrap();
        for (i, name) in
            ["checkpoints", "samples", "samples/before", "evaluations", "metrics.jsonl", "checkpoints/step-000001"]
                .into_iter()
                .enumerate()
        {
            let run = RunDir::create(dir.path().join(i.to_string())).unwrap();
            run.write_config("seed: 1\n").unwrap();
            let link = run.path().join(name);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
            let message = RunDir::open(run.path()).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains("symbolic link"), "{message}");
            fs::remove_file(run.config_path()).unwrap();
            assert!(RunDir::create(run.path()).is_err(), "{name}");
        }
        // The run directory itself may be one.
        let run = RunDir::create(dir.path().join("run")).unwrap();
        run.write_config("seed: 1\n").unwrap();
        std::os::unix::fs::symlink(run.path(), dir.path().join("latest")).unwrap();
        RunDir::open(dir.path().join("latest")).unwrap();
    }
}
