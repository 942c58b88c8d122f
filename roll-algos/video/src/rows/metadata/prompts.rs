//! Prompts in a text file, one per line.

use std::path::Path;

use roll_core::{Error, Result};

use super::MetadataRow;

/// The lines that are not empty, each as a row without a clip.
pub(super) fn rows(path: &Path, text: &str) -> Result<Vec<MetadataRow>> {
    let lines = text.lines().map(str::trim).zip(1..).filter(|(prompt, _)| !prompt.is_empty());
    let rows: Vec<_> =
        lines.map(|(prompt, line)| MetadataRow { line, prompt: prompt.into(), ..Default::default() }).collect();
    match rows.is_empty() {
        true => Err(Error::bad_file(path, "no prompts; expected one per line")),
        false => Ok(rows),
    }
}
