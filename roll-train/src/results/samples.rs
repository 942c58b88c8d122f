//! Evaluated clips and sample videos as files: `samples/MOMENT/NAME.mp4`, or `.png` for one frame. A moment is `reference`, `before`,
//! `step-000025` or `after`.

use std::path::PathBuf;

use roll_core::{Error, Result};

use crate::run_dir::RunDir;

/// Beginning of the names of videos of sample prompts.
pub const PROMPT: &str = "prompt-";

/// The folder of a moment's clips; creates it.
pub fn folder(dir: &RunDir, moment: &str) -> Result<PathBuf> {
    let folder = dir.path().join("samples").join(moment);
    std::fs::create_dir_all(&folder).map_err(Error::file("create the directory", &folder))?;
    Ok(folder)
}
