//! Videos side by side: the same clips at several moments of one run, or at the end of several.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::checkpoint::parse_step_name;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use roll_core::{Error, Result};

use super::escaped;
use super::source::Source;

/// Clips shown at most.
const CLIPS: usize = 8;
/// Moments shown at most, beside reference and before.
const MOMENTS: usize = 4;
/// Bytes of videos in one page; beyond them only the paths stand there.
const BYTES: u64 = 64 << 20;
/// Names of samples of training begin so; the others are clips of `evaluation`.
const TRAINING: &str = "sample-";

/// A column of videos: heading, and path by the clip's name.
type Column = (String, BTreeMap<String, PathBuf>);

/// The section; empty when no run has videos.
pub fn section(runs: &[Source]) -> Result<String> {
    let mut budget = BYTES;
    let mut html = String::new();
    let columns = match runs {
        [run] => moments(run)?,
        runs => ends(runs)?,
    };
    let clips = columns.iter().flat_map(|(_, videos)| videos.keys().cloned()).collect::<BTreeSet<_>>();
    if !clips.is_empty() {
        html += "<h2>Before and after</h2>\n<p>Same prompt, first frame and noise in every row. <i>unseen</i> clips were \
                 not trained on.</p>\n";
        // `unseen` says most; it is last in the alphabet.
        let shown: Vec<String> = clips.iter().rev().take(CLIPS).cloned().collect();
        html += &table(&columns, &shown, &mut budget)?;
        if clips.len() > shown.len() {
            let _ = writeln!(html, "<p>{} more clips are in <code>samples/</code>.</p>", clips.len() - shown.len());
        }
    }
    for run in runs {
        let steps = step_folders(&run.path)?;
        let samples: Vec<Column> = steps
            .iter()
            .map(|(step, path)| Ok((format!("step {step}"), videos(path, true)?)))
            .collect::<Result<_>>()?;
        let samples: Vec<Column> = samples.into_iter().filter(|(_, videos)| !videos.is_empty()).collect();
        if samples.is_empty() {
            continue;
        }
        let of = if runs.len() > 1 { format!(" of {}", escaped(&run.name)) } else { String::new() };
        let _ = writeln!(html, "<h2>Samples of training{of}</h2>\n<div class=\"strip\">");
        for (step, videos) in spread(samples, MOMENTS + 2) {
            for (name, path) in videos.iter().take(2) {
                let sample = name.trim_start_matches(TRAINING);
                let sample = sample.parse().map_or(sample.to_string(), |n: u64| n.to_string());
                let _ =
                    writeln!(html, "<figure><figcaption>{}, sample {}</figcaption>", escaped(&step), escaped(&sample));
                html += &video(path, &mut budget)?;
                html += "</figure>\n";
            }
        }
        html += "</div>\n";
    }
    Ok(html)
}

/// Reference, before, and the evaluations of one run.
fn moments(run: &Source) -> Result<Vec<Column>> {
    let folder = |name: &str| videos(&run.path.join("samples").join(name), false);
    let mut evaluations: Vec<Column> = Vec::new();
    for (step, path) in step_folders(&run.path)? {
        evaluations.push((format!("step {step}"), videos(&path, false)?));
    }
    evaluations.retain(|(_, videos)| !videos.is_empty());
    if evaluations.is_empty() {
        evaluations.push(("after".into(), folder("after")?));
    }
    let mut columns = vec![("reference".to_string(), folder("reference")?), ("before".into(), folder("before")?)];
    columns.extend(spread(evaluations, MOMENTS));
    columns.retain(|(_, videos)| !videos.is_empty());
    Ok(columns)
}

/// Reference and before of the first run that has them, and the end of each.
fn ends(runs: &[Source]) -> Result<Vec<Column>> {
    let folder = |run: &Source, name: &str| videos(&run.path.join("samples").join(name), false);
    let mut columns = Vec::new();
    for name in ["reference", "before"] {
        for run in runs {
            let found = folder(run, name)?;
            if !found.is_empty() {
                columns.push((name.to_string(), found));
                break;
            }
        }
    }
    for run in runs {
        columns.push((run.name.clone(), folder(run, "after")?));
    }
    columns.retain(|(_, videos)| !videos.is_empty());
    Ok(columns)
}

/// At most `count` of them: the first, the last, and those between at equal distances.
fn spread<T>(items: Vec<T>, count: usize) -> Vec<T> {
    let n = items.len();
    if n <= count || count < 2 {
        return items;
    }
    let kept: BTreeSet<usize> = (0..count).map(|i| i * (n - 1) / (count - 1)).collect();
    items.into_iter().enumerate().filter(|(i, _)| kept.contains(i)).map(|(_, item)| item).collect()
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

/// The MP4 files of a folder by name: samples of training, or clips of `evaluation`.
fn videos(folder: &Path, training: bool) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for path in entries(folder)? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
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

fn table(columns: &[Column], clips: &[String], budget: &mut u64) -> Result<String> {
    let mut html = String::from("<div class=\"wide\"><table class=\"videos\"><tr><th></th>");
    for (heading, _) in columns {
        let _ = write!(html, "<th>{}</th>", escaped(heading));
    }
    html += "</tr>\n";
    for clip in clips {
        let _ = write!(html, "<tr><th>{}</th>", escaped(clip));
        for (_, videos) in columns {
            html += "<td>";
            if let Some(path) = videos.get(clip) {
                html += &video(path, budget)?;
            }
            html += "</td>";
        }
        html += "</tr>\n";
    }
    Ok(html + "</table></div>\n")
}

/// The video itself while there is room, else its path.
fn video(path: &Path, budget: &mut u64) -> Result<String> {
    let size = std::fs::metadata(path).map_err(Error::file("read", path))?.len();
    if size > *budget {
        return Ok(format!("<code>{}</code> (too large to show here)", escaped(&path.display().to_string())));
    }
    *budget -= size;
    let bytes = std::fs::read(path).map_err(Error::file("read", path))?;
    Ok(format!(
        "<video muted loop autoplay playsinline preload=\"auto\" src=\"data:video/mp4;base64,{}\"></video>",
        STANDARD.encode(bytes)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_spread_from_first_to_last() {
        assert_eq!(spread((0..10).collect(), 4), [0, 3, 6, 9]);
        assert_eq!(spread((0..3).collect(), 4), [0, 1, 2]);
        assert!(spread(Vec::<u8>::new(), 4).is_empty());
    }
}
