//! Metadata from a directory of videos, each with its prompt in a `.txt` file.

use std::path::{Path, PathBuf};

use roll_core::{Error, Result};

use super::{MetadataRow, text_of};
use crate::config::OnBadSample;

/// Maximum size of a caption; typical ones have a few hundred bytes.
const MAX_CAPTION_BYTES: u64 = super::MAX_PROMPT_BYTES as u64;
/// Maximum number of missing captions that an error names.
const NAMED: usize = 5;
/// File extensions of clips.
const VIDEOS: [&str; 18] = [
    "mp4", "m4v", "mov", "mkv", "webm", "avi", "gif", "mpg", "mpeg", "ts", "m2ts", "flv", "wmv", "ogv", "3gp", "mxf",
    "vob", "mts",
];

/// Names of tables that may be in the same directory.
const TABLES: [&str; 4] = ["metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.json"];

/// Lists the videos in `directory`, sorted by name, with the text of the `.txt` file of the same name as prompt. A
/// video without caption is a row with a reason if bad samples are skipped, else an error. It is always an error if no
/// video has a caption.
pub(super) fn rows(directory: &Path, on_bad_sample: OnBadSample) -> Result<Vec<MetadataRow>> {
    let mut videos: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(Error::file("list", directory))? {
        let path = entry.map_err(Error::file("list", directory))?.path();
        let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
        if VIDEOS.contains(&extension.as_str()) && path.is_file() {
            videos.push(path);
        }
    }
    videos.sort();
    if videos.is_empty() {
        let problem = "a directory without videos; expected a directory of videos, each with its prompt in a .txt of the \
                       same name, a table (CSV, TSV, JSON lines or a JSON list with `video` and `prompt`), or a .txt \
                       of prompts";
        return Err(Error::bad_file(directory, format!("{problem}{}", table_beside(directory))));
    }
    let caption = |video: &PathBuf| video.with_extension("txt");
    let missing: Vec<_> = videos.iter().map(caption).filter(|caption| !caption.is_file()).collect();
    let skips = on_bad_sample == OnBadSample::Skip;
    let some_are_left = missing.len() < videos.len();
    if !missing.is_empty() && (!skips || !some_are_left) {
        let names = missing.iter().take(NAMED).filter_map(|path| path.file_name());
        let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
        let more = if missing.len() > NAMED { ", ..." } else { "" };
        let skip = match missing.len() < videos.len() {
            true => "; `data.on_bad_sample: skip` leaves them out",
            false => "",
        };
        let problem = format!(
            "{} of its {} videos have no prompt beside them: expected {}{more}{skip}{}",
            missing.len(),
            videos.len(),
            names.join(", "),
            table_beside(directory)
        );
        return Err(Error::bad_file(directory, problem));
    }
    let read = |video: PathBuf| {
        let caption = caption(&video);
        match text(&caption) {
            Ok(prompt) => Ok(row(video, prompt, None)),
            Err(_) if skips && !caption.exists() => {
                let reason = format!("{} is not there", caption.display());
                Ok(row(video, String::new(), Some(reason)))
            }
            Err(error) if skips => Ok(row(video, String::new(), Some(error.chain()))),
            Err(error) => Err(error),
        }
    };
    videos.into_iter().map(read).collect()
}

/// A hint that names the table in the directory, or an empty string.
fn table_beside(directory: &Path) -> String {
    let table = TABLES.iter().map(|name| directory.join(name)).find(|table| table.is_file());
    table.map(|table| format!("; {} is there: name that file instead", table.display())).unwrap_or_default()
}

/// Reads the prompt from a caption file.
fn text(caption: &Path) -> Result<String> {
    let text = text_of(caption, MAX_CAPTION_BYTES, "a prompt")?;
    // Line breaks are treated as wrapping, not as part of the prompt.
    let lines: Vec<&str> = text.trim_start_matches('\u{feff}').lines().map(str::trim).collect();
    Ok(lines.join(" ").trim().into())
}

fn row(video: PathBuf, prompt: String, no_prompt: Option<String>) -> MetadataRow {
    MetadataRow { prompt, no_prompt, video: Some(video), ..Default::default() }
}
