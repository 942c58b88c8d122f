//! Evaluated clips as MP4 files: `samples/MOMENT/SET-000.mp4`. A moment is `reference`, `before`, `step-000025` or
//! `after`.

use std::path::PathBuf;

use roll_core::{Error, Result, Video};
use roll_data::{ReadOptions, read_video};
use roll_external::files::write_atomically_with;

use super::labels::SetLabels;
use super::scores::SetName;
use crate::run_dir::RunDir;

/// Beginning of the names of videos of sample prompts.
pub const PROMPT: &str = "prompt-";

/// The folder of a moment's clips; creates it.
pub fn folder(dir: &RunDir, moment: &str) -> Result<PathBuf> {
    let folder = dir.path().join("samples").join(moment);
    std::fs::create_dir_all(&folder).map_err(Error::file("create the directory", &folder))?;
    Ok(folder)
}

/// Copies the clips of one moment to another.
pub fn copy_samples(dir: &RunDir, from: &str, to: &str) -> Result<()> {
    let (from, to) = (folder(dir, from)?, folder(dir, to)?);
    for entry in std::fs::read_dir(&from).map_err(Error::file("list the clips in", &from))? {
        let entry = entry.map_err(Error::file("list the clips in", &from))?;
        write_atomically_with(&to.join(entry.file_name()), |copy| {
            std::io::copy(&mut std::fs::File::open(entry.path())?, copy).map(drop)
        })?;
    }
    Ok(())
}

/// The file of a clip; creates its folder.
pub fn clip_path(dir: &RunDir, moment: &str, name: SetName, i: usize, labels: &SetLabels) -> Result<PathBuf> {
    Ok(folder(dir, moment)?.join(format!("{}-{i:03}.mp4", labels.of(name))))
}

/// The file of a sample prompt's video; creates its folder.
pub fn prompt_path(dir: &RunDir, moment: &str, i: usize) -> Result<PathBuf> {
    Ok(folder(dir, moment)?.join(format!("{PROMPT}{i:03}.mp4")))
}

/// Reads the videos of the `count` clips of a set that were saved at a moment, perhaps by an earlier process. A clip
/// without a file is `None`.
pub fn read_saved(
    dir: &RunDir,
    moment: &str,
    name: SetName,
    count: usize,
    labels: &SetLabels,
) -> Result<Vec<Option<Video>>> {
    (0..count).map(|i| read_clip(dir, moment, name, i, labels)).collect()
}

/// Reads one video of a moment; `None` without a file.
pub fn read_clip(dir: &RunDir, moment: &str, name: SetName, i: usize, labels: &SetLabels) -> Result<Option<Video>> {
    let path = clip_path(dir, moment, name, i, labels)?;
    path.is_file().then(|| read_video(&path, &ReadOptions::default())).transpose()
}
