//! Checkpoints that are whole or not there.
//!
//! A checkpoint is a directory `step-000025` with files and a `manifest.json` that holds the size and SHA-256 of each.
//! The directory is written under another name, synced, and renamed into place; the manifest is its last file. So a run
//! killed at any instant leaves only whole checkpoints and directories that are not checkpoints.
//!
//! ```
//! use roll_train::checkpoint::{Checkpoint, CheckpointWriter};
//!
//! # fn main() -> roll_core::Result<()> {
//! let directory = std::env::temp_dir().join(format!("roll-doc-{}", std::process::id()));
//! let mut writer = CheckpointWriter::begin(&directory, 25)?;
//! writer.add_bytes("trainer/state.json", br#"{"step": 25}"#)?;
//! let written = writer.finish(serde_json::Value::Null)?;
//!
//! let checkpoint = Checkpoint::open(directory.join("step-000025"))?;
//! checkpoint.verify()?; // hashes of all files
//! assert_eq!(checkpoint, written);
//! assert_eq!(checkpoint.step(), 25);
//!
//! std::fs::write(checkpoint.file("trainer/state.json")?, br#"{"step": 52}"#).expect("the file can be written");
//! assert!(checkpoint.verify().is_err(), "one that was changed from outside is found out");
//! # std::fs::remove_dir_all(&directory).expect("the directory can be deleted");
//! # Ok(())
//! # }
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use roll_core::{Error, Result};
use roll_external::files::{self, sync_directory, temporary_beside};

/// Name of the manifest in a checkpoint's directory.
const MANIFEST: &str = "manifest.json";
/// Version of the layout that this module writes, and the only one that it reads.
const FORMAT: u32 = 1;
/// Beginning of the names of checkpoints' directories.
const STEP_PREFIX: &str = "step-";
/// Largest file that is read as a manifest. Manifests are far smaller.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// Size and hash of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Number of bytes.
    pub size: u64,
    /// SHA-256 of the contents, in lower-case hexadecimal.
    pub sha256: String,
}

/// The run that wrote a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunIdentity {
    /// Name of the experiment.
    pub name: String,
    /// Name of the algorithm.
    pub algorithm: String,
    /// SHA-256 of the configuration that the run began with.
    pub configuration: String,
}

/// The contents of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this layout.
    pub format: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Version of roll that wrote the checkpoint.
    pub version: String,
    /// The run that wrote the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunIdentity>,
    /// Files by name relative to the directory, `/`-separated.
    pub files: BTreeMap<String, FileRecord>,
    /// Data that the caller of [`CheckpointWriter::finish`] adds, such as `{"world_size": 1}`.
    #[serde(default)]
    pub info: serde_json::Value,
}

/// Writes one checkpoint. A writer that is dropped before [`CheckpointWriter::finish`] deletes what it has written.
#[derive(Debug)]
pub struct CheckpointWriter {
    /// The directory while it is written.
    temporary: PathBuf,
    /// The directory of the finished checkpoint.
    target: PathBuf,
    step: u64,
    run: Option<RunIdentity>,
    files: BTreeMap<String, FileRecord>,
}

impl CheckpointWriter {
    /// Begins the checkpoint of `step` in the directory `checkpoints`, which is created if it does not exist.
    pub fn begin(checkpoints: &Path, step: u64) -> Result<Self> {
        let target = checkpoints.join(step_name(step));
        let temporary = temporary_beside(&target);
        fs::create_dir_all(&temporary).map_err(Error::file("create the directory", &temporary))?;
        Ok(Self { temporary, target, step, run: None, files: BTreeMap::new() })
    }

    /// Sets the run that the manifest names.
    pub fn set_run(&mut self, run: RunIdentity) {
        self.run = Some(run);
    }

    /// Adds a file that holds `bytes`. `name` may have directories: `trainer/optimizer.safetensors`.
    pub fn add_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.add_file(name, |path| fs::write(path, bytes).map_err(Error::file("write", path)))
    }

    /// Adds a file. `write` is called with its path, and must create it there.
    pub fn add_file(&mut self, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        if !is_inside(name) || name == MANIFEST || self.files.contains_key(name) {
            return Err(Error::Misuse(format!("`{name}` cannot be the name of a file in a checkpoint")));
        }
        let path = self.temporary.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(Error::file("create the directory", parent))?;
        }
        write(&path)?;
        let file = File::open(&path).map_err(Error::file("read", &path))?;
        file.sync_all().map_err(Error::file("sync", &path))?;
        let record = record_of(&path)?;
        self.files.insert(name.into(), record);
        Ok(())
    }

    /// Writes the manifest and moves the checkpoint into place. A checkpoint of the same step is replaced.
    pub fn finish(mut self, info: serde_json::Value) -> Result<Checkpoint> {
        let manifest = Manifest {
            format: FORMAT,
            step: self.step,
            version: env!("CARGO_PKG_VERSION").into(),
            run: self.run.take(),
            files: std::mem::take(&mut self.files),
            info,
        };
        for directory in directories(&self.temporary, &manifest) {
            sync_directory(&directory)?;
        }
        self.write_manifest(&manifest)?;
        self.move_into_place()?;
        Ok(Checkpoint { path: self.target.clone(), manifest })
    }

    /// Writes the manifest into the temporary directory.
    fn write_manifest(&self, manifest: &Manifest) -> Result<()> {
        let text =
            serde_json::to_string_pretty(manifest).map_err(Error::failed("the manifest cannot be written as JSON"))?;
        let path = self.temporary.join(MANIFEST);
        File::create(&path)
            .and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })
            .map_err(Error::file("write", &path))?;
        sync_directory(&self.temporary)
    }

    /// Renames the temporary directory to the directory of the checkpoint. An older one is deleted.
    fn move_into_place(&self) -> Result<()> {
        if self.target.exists() {
            let old = temporary_beside(&self.target);
            fs::rename(&self.target, &old).map_err(Error::file("replace the checkpoint", &self.target))?;
            fs::rename(&self.temporary, &self.target).map_err(Error::file("write the checkpoint", &self.target))?;
            fs::remove_dir_all(&old).map_err(Error::file("delete the old checkpoint", &old))?;
        } else {
            fs::rename(&self.temporary, &self.target).map_err(Error::file("write the checkpoint", &self.target))?;
        }
        sync_directory(self.target.parent().unwrap_or(Path::new(".")))
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        // After `finish`, which has renamed the directory, there is nothing to delete.
        let _ = fs::remove_dir_all(&self.temporary);
    }
}

/// A checkpoint on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// Reads the manifest of the checkpoint at `path` and checks that every file exists and has its size. Hashes are
    /// checked by [`Checkpoint::verify`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let manifest = read_manifest(&path)?;
        for (name, record) in &manifest.files {
            let file = path.join(name);
            files::refuse_links(&path, &file)?;
            let found = fs::metadata(&file).map_err(Error::file("read the checkpoint's file", &file))?.len();
            if found != record.size {
                return Err(Error::bad_file(file, format!("expected {} bytes, found {found}", record.size)));
            }
        }
        Ok(Self { path, manifest })
    }

    /// Checks the hash of every file.
    pub fn verify(&self) -> Result<()> {
        for (name, record) in &self.manifest.files {
            let path = self.path.join(name);
            let found = record_of(&path)?;
            if &found != record {
                let problem =
                    "its contents have changed since they were written (SHA-256 differs): use another checkpoint";
                return Err(Error::bad_file(path, problem));
            }
        }
        Ok(())
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The path of a file in the checkpoint. Fails if the manifest has no such file.
    pub fn file(&self, name: &str) -> Result<PathBuf> {
        match self.manifest.files.contains_key(name) {
            true => Ok(self.path.join(name)),
            false => Err(Error::bad_file(&self.path, format!("the checkpoint has no file `{name}`"))),
        }
    }

    /// The bytes of a file in the checkpoint.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.file(name)?;
        files::read(&path, u64::MAX).map_err(Error::file("read", path))
    }
}

/// Reads the manifest of the checkpoint at `path`. Fails if its layout is another, if its step is not the one in the
/// directory's name, or if it names a file outside of the directory.
fn read_manifest(path: &Path) -> Result<Manifest> {
    let manifest_path = path.join(MANIFEST);
    let size =
        fs::metadata(&manifest_path).map_err(Error::file("read the checkpoint's manifest", &manifest_path))?.len();
    if size > MAX_MANIFEST_BYTES {
        return Err(Error::bad_file(manifest_path, format!("{size} bytes are too many for a manifest")));
    }
    let text = files::read(&manifest_path, MAX_MANIFEST_BYTES).map_err(Error::file("read", &manifest_path))?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|e| Error::bad_file(&manifest_path, format!("no manifest: {e}")))?;
    if manifest.format != FORMAT {
        let problem = format!("expected layout {FORMAT} of checkpoints, found {}", manifest.format);
        return Err(Error::bad_file(manifest_path, problem));
    }
    if let Some(step_of_name) = path.file_name().and_then(|name| parse_step_name(name.to_str()?))
        && step_of_name != manifest.step
    {
        let problem = format!("expected step {step_of_name}, found {}", manifest.step);
        return Err(Error::bad_file(manifest_path, problem));
    }
    if let Some(name) = manifest.files.keys().find(|name| !is_inside(name)) {
        return Err(Error::bad_file(manifest_path, format!("the file name `{name}` leaves the checkpoint")));
    }
    Ok(manifest)
}

/// Steps and directories of the checkpoints in the directory `checkpoints`, oldest first; empty if it does not exist.
pub fn list(checkpoints: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(checkpoints) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::file("list the checkpoints in", checkpoints))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::file("list the checkpoints in", checkpoints))?;
        if let Some(step) = entry.file_name().to_str().and_then(parse_step_name) {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// The newest checkpoint whose files all verify. Newer checkpoints that do not verify are passed over with a warning.
pub fn newest_whole(checkpoints: &Path) -> Result<Option<Checkpoint>> {
    for (_, path) in list(checkpoints)?.into_iter().rev() {
        let verified = Checkpoint::open(&path).and_then(|checkpoint| {
            checkpoint.verify()?;
            Ok(checkpoint)
        });
        match verified {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(e) => tracing::warn!("checkpoint {} is not whole and is passed over: {e}", path.display()),
        }
    }
    Ok(None)
}

/// Deletes all but the newest `keep` checkpoints. At least one is kept.
pub fn prune(checkpoints: &Path, keep: usize) -> Result<()> {
    let all = list(checkpoints)?;
    let surplus = all.len().saturating_sub(keep.max(1));
    for (_, path) in &all[..surplus] {
        // Renamed first, because a half-deleted directory must not look like a checkpoint.
        let doomed = temporary_beside(path);
        fs::rename(path, &doomed).map_err(Error::file("delete the checkpoint", path))?;
        fs::remove_dir_all(&doomed).map_err(Error::file("delete the checkpoint", path))?;
    }
    Ok(())
}

/// Deletes the directories that killed writers left in `checkpoints`. Must be called only while no other process writes
/// there.
pub fn remove_leftovers(checkpoints: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(checkpoints) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_of_checkpoint = name.strip_prefix('.').is_some_and(|name| name.starts_with(STEP_PREFIX));
        if files::is_temporary(&name) && is_of_checkpoint {
            let path = entry.path();
            fs::remove_dir_all(&path).map_err(Error::file("delete", path))?;
        }
    }
    Ok(())
}

/// Whether `name` is a relative path that stays inside of a checkpoint: it has no `..` and no root.
fn is_inside(name: &str) -> bool {
    !name.is_empty()
        && !name.contains('\\')
        && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// The directories that hold the manifest's files, each once: `root` and directories below it.
fn directories(root: &Path, manifest: &Manifest) -> BTreeSet<PathBuf> {
    let mut directories = BTreeSet::new();
    for name in manifest.files.keys() {
        // The first ancestor is the file itself, the last one is empty: `root`.
        directories.extend(Path::new(name).ancestors().skip(1).map(|parent| root.join(parent)));
    }
    directories
}

/// The size and hash of the file at `path`.
fn record_of(path: &Path) -> Result<FileRecord> {
    let file = files::open(path).map_err(Error::file("read", path))?;
    let (sha256, size) = roll_external::sha256(file).map_err(Error::file("read", path))?;
    Ok(FileRecord { size, sha256 })
}

/// The name of a checkpoint's directory: `step-000025`. Names sort by step up to a million steps.
pub fn step_name(step: u64) -> String {
    format!("{STEP_PREFIX}{step:06}")
}

/// The step of a name that [`step_name`] made; `None` for any other name, such as `step-25`.
pub fn parse_step_name(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(STEP_PREFIX)?;
    let step = digits.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, step: u64) -> Checkpoint {
        let mut writer = CheckpointWriter::begin(dir, step).unwrap();
        writer.add_bytes("adapter.safetensors", format!("weights {step}").as_bytes()).unwrap();
        writer
            .add_file("trainer/state.json", |path| fs::write(path, "{}").map_err(Error::file("write", path)))
            .unwrap();
        writer.finish(serde_json::json!({"world_size": 1})).unwrap()
    }

    #[test]
    fn reads_back_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let written = write(dir.path(), 25);
        let read = Checkpoint::open(dir.path().join("step-000025")).unwrap();
        assert_eq!(read, written);
        read.verify().unwrap();
        assert_eq!(read.read("adapter.safetensors").unwrap(), b"weights 25");
        assert_eq!(read.manifest().info["world_size"], 1);
        assert!(read.file("other").is_err());
        let hash = &read.manifest().files["trainer/state.json"].sha256;
        assert_eq!(hash, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a");
    }

    #[test]
    fn an_unfinished_checkpoint_is_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), 25);
        let mut writer = CheckpointWriter::begin(dir.path(), 50).unwrap();
        writer.add_bytes("adapter.safetensors", b"half").unwrap();
        assert_eq!(list(dir.path()).unwrap().len(), 1);
        std::mem::forget(writer); // as if killed
        assert_eq!(newest_whole(dir.path()).unwrap().unwrap().step(), 25);
        remove_leftovers(dir.path()).unwrap();
        drop(CheckpointWriter::begin(dir.path(), 75).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn newest_whole_skips_damaged_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        for step in [25, 50, 75, 100] {
            write(dir.path(), step);
        }
        fs::write(dir.path().join("step-000100/adapter.safetensors"), "Weights 100").unwrap();
        fs::write(dir.path().join("step-000075/adapter.safetensors"), "weights").unwrap();
        fs::write(dir.path().join("step-000050/manifest.json"), "{\"format\":1").unwrap();
        assert_eq!(newest_whole(dir.path()).unwrap().unwrap().step(), 25);
        // One that says that it is of another step.
        fs::rename(dir.path().join("step-000025"), dir.path().join("step-000060")).unwrap();
        assert!(newest_whole(dir.path()).unwrap().is_none());
        fs::rename(dir.path().join("step-000060"), dir.path().join("step-000025")).unwrap();
        #[cfg(unix)]
        {
            let state = dir.path().join("step-000025/trainer");
            fs::rename(&state, dir.path().join("moved")).unwrap();
            std::os::unix::fs::symlink(dir.path().join("moved"), &state).unwrap();
            assert!(newest_whole(dir.path()).unwrap().is_none(), "a link");
            fs::remove_file(&state).unwrap();
            fs::rename(dir.path().join("moved"), &state).unwrap();
        }
        fs::remove_file(dir.path().join("step-000025/trainer/state.json")).unwrap();
        assert!(newest_whole(dir.path()).unwrap().is_none());
        assert!(newest_whole(&dir.path().join("none")).unwrap().is_none());
    }

    #[test]
    fn a_manifest_cannot_name_files_outside() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), 1).path().to_path_buf();
        for name in ["../../secret", "/etc/passwd", "a/../../b"] {
            let text =
                serde_json::json!({"format": 1, "step": 1, "version": "", "files": {name: {"size": 1, "sha256": ""}}});
            fs::write(path.join(MANIFEST), text.to_string()).unwrap();
            assert!(Checkpoint::open(&path).unwrap_err().to_string().contains("leaves the checkpoint"));
            assert!(CheckpointWriter::begin(dir.path(), 2).unwrap().add_bytes(name, b"").is_err());
        }
    }

    #[test]
    fn prune_keeps_the_newest_and_a_step_can_be_rewritten() {
        let dir = tempfile::tempdir().unwrap();
        for step in [5, 10, 100, 15, 100] {
            write(dir.path(), step);
        }
        prune(dir.path(), 2).unwrap();
        let steps: Vec<u64> = list(dir.path()).unwrap().into_iter().map(|(s, _)| s).collect();
        assert_eq!(steps, [15, 100]);
        prune(dir.path(), 0).unwrap();
        assert_eq!(newest_whole(dir.path()).unwrap().unwrap().step(), 100);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn step_names_parse_back() {
        for step in [0, 25, 999_999, 12_345_678] {
            assert_eq!(parse_step_name(&step_name(step)), Some(step));
        }
        for name in ["step-25", "step--00025", "step-000025.old", ".step-000025.tmp", "step-99999999999999999999"] {
            assert_eq!(parse_step_name(name), None, "{name}");
        }
    }
}
