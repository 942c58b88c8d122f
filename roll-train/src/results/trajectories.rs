//! `trajectories.jsonl`: the episodes of an agent, and answers of validations, one JSON object for each line.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use roll_core::{Error, Result};
use roll_external::files::{self, write_atomically};

use crate::run_dir::RunDir;

/// The file in the run directory.
const FILE: &str = "trajectories.jsonl";

/// Appends episodes. The first one creates the file.
pub(crate) struct Trajectories {
    /// The file's path; `None` on all ranks but 0, which write nothing.
    path: Option<PathBuf>,
    /// `None` until the first episode is written.
    file: Option<File>,
}

/// The path of the file, if the run has one.
pub fn existing_file(dir: &RunDir) -> Option<PathBuf> {
    let path = dir.path().join(FILE);
    path.is_file().then_some(path)
}

impl Trajectories {
    /// The file of the run in `dir`.
    pub fn new(dir: Option<&RunDir>) -> Self {
        Self { path: dir.map(|dir| dir.path().join(FILE)), file: None }
    }

    /// Removes the episodes of earlier processes that this process plays again, since it continues after step
    /// `last_step`. These are all episodes of later steps, and the episodes of the validation after `last_step`, unless
    /// that validation was completed (`is_last_step_validated`).
    pub fn begin(&mut self, last_step: u64, is_last_step_validated: bool) -> Result<()> {
        let Some(path) = self.path.as_ref().filter(|path| path.is_file()) else { return Ok(()) };
        let text = files::read_text(path, u64::MAX).map_err(Error::file("read", path))?;
        let is_kept = |line: &&str| -> bool {
            // A killed process may leave half a line at the end.
            let Ok(episode) = serde_json::from_str::<serde_json::Value>(line) else { return false };
            let is_of_validation = episode["kind"] == "validation";
            let step = episode["step"].as_u64().unwrap_or(u64::MAX);
            // A run that starts from step 0 keeps nothing, since it validates again.
            last_step > 0 && (step < last_step || (step == last_step && (is_last_step_validated || !is_of_validation)))
        };
        let kept: String = text.lines().filter(is_kept).map(|line| format!("{line}\n")).collect();
        write_atomically(path, kept.as_bytes())
    }

    /// Appends one line per record, without buffering.
    pub fn write(&mut self, records: &[serde_json::Value]) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let Some(path) = &self.path else { return Ok(()) };
        let file = match &mut self.file {
            Some(file) => file,
            no_file => {
                let opened = OpenOptions::new().create(true).append(true).open(path);
                no_file.insert(opened.map_err(Error::file("open", path))?)
            }
        };
        let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
        file.write_all(lines.as_bytes()).map_err(Error::file("write", path))
    }
}
