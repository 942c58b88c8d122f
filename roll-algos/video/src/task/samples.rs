//! Evaluated clips as files: `samples/MOMENT/SET-000.mp4`, or `.png` if a clip has one frame.

use std::path::PathBuf;

use roll_core::{Error, Result, Video};
use roll_external::files::write_atomically_with;
use roll_media::{ReadOptions, clip_file, read_video};
use roll_train::results::scores::SetName;
use roll_train::results::{PROMPT, SetLabels, folder};
use roll_train::run_dir::RunDir;

/// Copies the clips of one moment to another.
pub(super) fn copy_samples(dir: &RunDir, from: &str, to: &str) -> Result<()> {
    let (from, to) = (folder(dir, from)?, folder(dir, to)?);
    for entry in std::fs::read_dir(&from).map_err(Error::file("list the clips in", &from))? {
        let entry = entry.map_err(Error::file("list the clips in", &from))?;
        write_atomically_with(&to.join(entry.file_name()), |copy| {
            std::io::copy(&mut std::fs::File::open(entry.path())?, copy).map(drop)
        })?;
    }
    Ok(())
}

/// The file of a clip, without extension; creates its folder.
pub(super) fn clip_stem(dir: &RunDir, moment: &str, set: SetName, i: usize, labels: &SetLabels) -> Result<PathBuf> {
    Ok(folder(dir, moment)?.join(format!("{}-{i:03}", labels.of(set))))
}

/// The file of a sample prompt's video, without extension; creates its folder.
pub(super) fn prompt_stem(dir: &RunDir, moment: &str, i: usize) -> Result<PathBuf> {
    Ok(folder(dir, moment)?.join(format!("{PROMPT}{i:03}")))
}

/// Reads the videos of one set that were saved at a moment; a process before this one may have generated them. A clip
/// without a file is `None`.
pub(super) fn read_saved(
    dir: &RunDir,
    moment: &str,
    set: SetName,
    count: usize,
    labels: &SetLabels,
) -> Result<Vec<Option<Video>>> {
    (0..count).map(|i| read_clip(dir, moment, set, i, labels)).collect()
}

/// Reads one video of a moment; `None` without a file.
pub(super) fn read_clip(
    dir: &RunDir,
    moment: &str,
    set: SetName,
    i: usize,
    labels: &SetLabels,
) -> Result<Option<Video>> {
    let file = clip_file(&clip_stem(dir, moment, set, i, labels)?);
    file.map(|path| read_video(path, &ReadOptions::default())).transpose()
}
