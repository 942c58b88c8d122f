//! Videos side by side: the same clips at several moments of one run, or at the end of several runs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use minijinja::{Value, context};
use roll_core::{Error, Result};
use roll_external::files;

use super::run_files::RunFiles;
use crate::checkpoint::parse_step_name;
use crate::results::PROMPT;

/// The table shows at most this many clips.
const CLIPS: usize = 8;
/// The table shows at most this many moments besides reference and before.
const MOMENTS: usize = 4;
/// A page contains at most this many bytes of videos, and the paths of the others.
pub const BYTES: u64 = 64 << 20;
/// Names of samples of training begin so; other names are of clips of `evaluation`.
const TRAINING: &str = "sample-";

/// A heading, and the paths of videos by the names of their clips.
type Column = (String, BTreeMap<String, PathBuf>);

/// Clips of evaluations, of one run at several moments or of several runs at their ends: headings of the columns, rows
/// of a name and a video per column, and the number of clips that are not shown. `budget`: the bytes of videos that
/// still fit into the page.
pub fn clips(runs: &[RunFiles], budget: &mut u64) -> Result<Value> {
    let columns = match runs {
        [run] => moments(run)?,
        runs => ends(runs)?,
    };
    let names: BTreeSet<&String> = columns.iter().flat_map(|(_, videos)| videos.keys()).collect();
    let (prompts, clips): (Vec<&String>, Vec<&String>) =
        names.iter().copied().partition(|name| name.starts_with(PROMPT));
    let mut rows = Vec::new();
    // `unseen`, the most important set, is last in the alphabet.
    for name in clips.iter().rev().take(CLIPS).chain(prompts.iter().take(CLIPS)) {
        let shown = |(_, videos): &Column| videos.get(*name).map(|path| video(path, budget)).transpose();
        let videos = columns.iter().map(shown).collect::<Result<Vec<Option<Value>>>>()?;
        rows.push(context! { name => prompt(runs, name).unwrap_or_else(|| name.to_string()), videos });
    }
    let more = names.len() - rows.len();
    let headings: Vec<&String> = columns.iter().map(|(heading, _)| heading).collect();
    Ok(context! { headings, rows, more })
}

/// The text of a sample prompt, by the name of its videos.
fn prompt(runs: &[RunFiles], name: &str) -> Option<String> {
    let i: usize = name.strip_prefix(PROMPT)?.parse().ok()?;
    let key = format!("evaluation.prompts.{i}.prompt");
    runs.iter().find_map(|run| serde_json::from_str(run.settings.get(&key)?).ok())
}

/// Sample videos that a run saved during training: two of each step, of some of the steps.
pub fn training_samples(run: &RunFiles, budget: &mut u64) -> Result<Vec<Value>> {
    let mut steps = Vec::new();
    for (step, path) in step_folders(&run.path)? {
        steps.push((step, videos(&path, true)?));
    }
    steps.retain(|(_, videos)| !videos.is_empty());
    let mut samples = Vec::new();
    for (step, videos) in spread(steps, MOMENTS + 2) {
        for (name, path) in videos.iter().take(2) {
            let name = name.trim_start_matches(TRAINING);
            let name = name.parse().map_or(name.to_string(), |n: u64| n.to_string());
            samples.push(context! { step, name, video => video(path, budget)? });
        }
    }
    Ok(samples)
}

/// Reference, before, and the evaluations of one run.
fn moments(run: &RunFiles) -> Result<Vec<Column>> {
    let mut evaluations: Vec<Column> = Vec::new();
    for (step, path) in step_folders(&run.path)? {
        evaluations.push((format!("step {step}"), videos(&path, false)?));
    }
    evaluations.retain(|(_, videos)| !videos.is_empty());
    if evaluations.is_empty() {
        evaluations.push(("after".into(), moment(run, "after")?));
    }
    let mut columns =
        vec![("reference".to_string(), moment(run, "reference")?), ("before".into(), moment(run, "before")?)];
    columns.extend(spread(evaluations, MOMENTS));
    columns.retain(|(_, videos)| !videos.is_empty());
    Ok(columns)
}

/// Reference and before of the first run that has them, and the end of each run.
fn ends(runs: &[RunFiles]) -> Result<Vec<Column>> {
    let mut columns = Vec::new();
    for name in ["reference", "before"] {
        for run in runs {
            let videos = moment(run, name)?;
            if !videos.is_empty() {
                columns.push((name.to_string(), videos));
                break;
            }
        }
    }
    for run in runs {
        columns.push((run.name.clone(), moment(run, "after")?));
    }
    columns.retain(|(_, videos)| !videos.is_empty());
    Ok(columns)
}

/// At most `count` of the items: the first, the last, and some at equal distances between them.
fn spread<T>(items: Vec<T>, count: usize) -> Vec<T> {
    let n = items.len();
    if n <= count || count < 2 {
        return items;
    }
    let chosen: BTreeSet<usize> = (0..count).map(|i| i * (n - 1) / (count - 1)).collect();
    items.into_iter().enumerate().filter(|(i, _)| chosen.contains(i)).map(|(_, item)| item).collect()
}

fn step_folders(run: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut folders = Vec::new();
    for path in entries(&run.join("samples"))? {
        if let Some(step) = path.file_name().and_then(|n| n.to_str()).and_then(parse_step_name) {
            folders.push((step, path));
        }
    }
    folders.sort();
    Ok(folders)
}

/// The videos of evaluated clips at a moment of a run.
fn moment(run: &RunFiles, name: &str) -> Result<BTreeMap<String, PathBuf>> {
    videos(&run.path.join("samples").join(name), false)
}

/// The MP4 files of a folder by name: samples of training, or clips of `evaluation`.
fn videos(folder: &Path, training: bool) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for path in entries(folder)? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        files::refuse_links(folder, &path)?;
        let is_video = path.extension().is_some_and(|e| e == "mp4") && !name.starts_with('.');
        if is_video && name.starts_with(TRAINING) == training {
            found.insert(name, path);
        }
    }
    Ok(found)
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    match std::fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::file("list", folder)(e)),
        Ok(entries) => Ok(entries.flatten().map(|entry| entry.path()).collect()),
    }
}

/// The path of a video, and its bytes as Base64 if they fit into the budget.
fn video(path: &Path, budget: &mut u64) -> Result<Value> {
    let size = std::fs::metadata(path).map_err(Error::file("read", path))?.len();
    let mut data = None;
    if size <= *budget {
        *budget -= size;
        let bytes = files::read(path, BYTES).map_err(Error::file("read", path))?;
        // Base64 has no characters to escape but `/`, which would take five times the room.
        data = Some(Value::from_safe_string(STANDARD.encode(bytes)));
    }
    Ok(context! { path => path.display().to_string(), data })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_keeps_first_and_last() {
        assert_eq!(spread((0..10).collect(), 4), [0, 3, 6, 9]);
        assert_eq!(spread((0..3).collect(), 4), [0, 1, 2]);
        assert!(spread(Vec::<u8>::new(), 4).is_empty());
    }
}
