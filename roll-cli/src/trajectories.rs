//! `trajectories.jsonl`: what an agent saw and did, one episode a line.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use roll_core::run_dir::RunDir;
use roll_core::{Error, Result};

/// Appends episodes; the file is made with the first one.
pub struct Trajectories {
    /// Only rank 0 writes.
    path: Option<PathBuf>,
    file: Option<File>,
}

impl Trajectories {
    /// Those of the run in `dir`.
    pub fn new(dir: Option<&RunDir>) -> Self {
        Self { path: dir.map(|dir| dir.path().join("trajectories.jsonl")), file: None }
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

    /// The file, when there is one.
    pub fn path(&self) -> Option<PathBuf> {
        self.path.clone().filter(|_| self.file.is_some())
    }
}
