//! `trajectories.jsonl`: what an agent saw and did, one episode a line.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use roll_core::files::write_atomically;
use roll_core::{Error, Result};

use crate::run_dir::RunDir;

const FILE: &str = "trajectories.jsonl";

/// Appends episodes; the file is made with the first one.
pub(crate) struct Trajectories {
    /// Only rank 0 writes.
    path: Option<PathBuf>,
    file: Option<File>,
}

/// The file in `dir`, when there is one.
pub fn written(dir: &RunDir) -> Option<PathBuf> {
    Some(dir.path().join(FILE)).filter(|path| path.is_file())
}

impl Trajectories {
    /// Those of the run in `dir`.
    pub fn new(dir: Option<&RunDir>) -> Self {
        Self { path: dir.map(|dir| dir.path().join(FILE)), file: None }
    }

    /// Leaves of an earlier process what belongs to the first `done` steps, with the validation after the last of them
    /// only when that was `validated` to its end.
    pub fn begin(&mut self, done: u64, validated: bool) -> Result<()> {
        let Some(path) = self.path.as_ref().filter(|path| path.is_file()) else { return Ok(()) };
        let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
        let belongs = |line: &&str| -> bool {
            // The last line of a process that was killed may be cut off.
            let Ok(episode) = serde_json::from_str::<serde_json::Value>(line) else { return false };
            let validation = episode["kind"] == "validation";
            let step = episode["step"].as_u64().unwrap_or(u64::MAX);
            // A run that begins again validates again.
            done > 0 && (step < done || (step == done && (validated || !validation)))
        };
        let kept: String = text.lines().filter(belongs).map(|line| format!("{line}\n")).collect();
        write_atomically(path, kept.as_bytes())
    }

    /// Adds one line per record; they are in the file when this returns.
    pub fn write(&mut self, records: &[serde_json::Value]) -> Result<()> {
        let Some(path) = self.path.as_ref().filter(|_| !records.is_empty()) else { return Ok(()) };
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let opened = OpenOptions::new().create(true).append(true).open(path);
                none.insert(opened.map_err(Error::file("open", path))?)
            }
        };
        let lines: String = records.iter().map(|r| format!("{r}\n")).collect();
        file.write_all(lines.as_bytes()).map_err(Error::file("write", path))
    }
}
