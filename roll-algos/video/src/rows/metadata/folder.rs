//! Metadata from a directory of videos, each with its prompt in a `.txt` file.

use std::path::{Path, PathBuf};

use roll_core::{Error, Result};
use roll_media::{is_animated, is_resource_fork};

use super::super::config::OnBadSample;
use super::{MAX_PROMPT_BYTES, MetadataRow, text_of};

/// Maximum number of missing prompt files that an error names.
const MAX_NAMES_IN_ERROR: usize = 5;
/// File extensions of clips.
const VIDEOS: [&str; 21] = [
    "mp4", "m4v", "mov", "mkv", "webm", "avi", "gif", "mpg", "mpeg", "ts", "m2ts", "flv", "wmv", "ogv", "3gp", "mxf",
    "vob", "mts", "asf", "f4v", "dv",
];
/// File extensions of pictures. An animated one is a clip; a still one is a clip of one frame in a directory without
/// other clips, next to which it may be a preview.
const PICTURES: [&str; 7] = ["webp", "png", "apng", "avif", "heif", "jpg", "jpeg"];

/// Metadata tables that an error points to if the directory has one.
const TABLES: [&str; 4] = ["metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.json"];

/// The videos in `directory`, or its pictures if it has no videos, sorted by name, without the files that macOS writes
/// beside them (`._a.mp4`). A directory without either is an error.
pub(super) fn videos(directory: &Path) -> Result<Vec<PathBuf>> {
    let (mut videos, mut pictures) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(directory).map_err(Error::file("list", directory))? {
        let path = entry.map_err(Error::file("list", directory))?.path();
        let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
        let extension = extension.as_str();
        let is_picture = PICTURES.contains(&extension);
        if !(is_picture || VIDEOS.contains(&extension)) || !path.is_file() || is_resource_fork(&path) {
            continue;
        }
        match is_picture && !is_animated(&path) {
            true => pictures.push(path),
            false => videos.push(path),
        }
    }
    if videos.is_empty() {
        videos = pictures;
    }
    videos.sort();
    if videos.is_empty() {
        let problem = "a directory without videos or pictures; expected a directory of them, each with its prompt in a .txt \
                       of the same name, a table (CSV, TSV, JSON lines or a JSON list with `video` and `prompt`), or a .txt \
                       of prompts";
        return Err(Error::bad_file(directory, format!("{problem}{}", table_hint(directory))));
    }
    Ok(videos)
}

/// Lists the videos in `directory`, sorted by name, with the text of the `.txt` file of the same name as prompt. If
/// bad samples are skipped, a video whose prompt file is missing or unreadable becomes a row with the reason in
/// `no_prompt`; otherwise it is an error. A directory in which no video has a prompt file is always an error.
pub(super) fn rows(directory: &Path, on_bad_sample: OnBadSample) -> Result<Vec<MetadataRow>> {
    let videos = videos(directory)?;
    let prompt_file = |video: &PathBuf| video.with_extension("txt");
    let missing: Vec<_> = videos.iter().map(prompt_file).filter(|file| !file.is_file()).collect();
    let skips = on_bad_sample == OnBadSample::Skip;
    let some_are_left = missing.len() < videos.len();
    if !missing.is_empty() && (!skips || !some_are_left) {
        let names = missing.iter().take(MAX_NAMES_IN_ERROR).filter_map(|path| path.file_name());
        let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
        let more = if missing.len() > MAX_NAMES_IN_ERROR { ", ..." } else { "" };
        let skip = if some_are_left { "; `data.on_bad_sample: skip` leaves them out" } else { "" };
        let problem = format!(
            "{} of its {} videos have no prompt beside them: expected {}{more}{skip}{}",
            missing.len(),
            videos.len(),
            names.join(", "),
            table_hint(directory)
        );
        return Err(Error::bad_file(directory, problem));
    }
    let read = |video: PathBuf| {
        let file = prompt_file(&video);
        match prompt_in(&file) {
            Ok(prompt) => Ok(row(video, prompt, None)),
            Err(_) if skips && !file.exists() => {
                let reason = format!("{} is not there", file.display());
                Ok(row(video, String::new(), Some(reason)))
            }
            Err(error) if skips => Ok(row(video, String::new(), Some(error.chain()))),
            Err(error) => Err(error),
        }
    };
    videos.into_iter().map(read).collect()
}

/// A hint that names the table in the directory, or an empty string.
fn table_hint(directory: &Path) -> String {
    let table = TABLES.iter().map(|name| directory.join(name)).find(|table| table.is_file());
    table.map(|table| format!("; {} is there: name that file instead", table.display())).unwrap_or_default()
}

/// The prompt in a file, on one line.
pub(super) fn prompt_in(prompt_file: &Path) -> Result<String> {
    let text = text_of(prompt_file, MAX_PROMPT_BYTES as u64, "a prompt")?;
    // Line breaks are treated as wrapping, not as part of the prompt.
    let lines: Vec<&str> = text.trim_start_matches('\u{feff}').lines().map(str::trim).collect();
    Ok(lines.join(" ").trim().into())
}

fn row(video: PathBuf, prompt: String, no_prompt: Option<String>) -> MetadataRow {
    MetadataRow { prompt, no_prompt, video: Some(video), ..Default::default() }
}
