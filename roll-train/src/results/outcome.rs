//! What a run leaves for people: figures before and after, curves, videos side by side, one page with everything.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::metrics::read_jsonl;
use crate::run_dir::RunDir;
use roll_core::files::write_atomically;
use roll_core::{Error, Evaluated, Headline, HeldOut, Result};
use roll_data::{Picture, ReadOptions, encode_png, read_video, write_mp4};
use serde_json::{Value, json};

use super::SetLabels;
use super::curves::{self, Curves};
use super::record::{Record, Validated};
use super::{comparison, plot, report};
use crate::evaluation::{self, Change, Evaluator, Generated, Results, SetName};

/// Metrics of an evaluation: `eval/unseen`, `eval/unseen_check`, `eval/unseen_kl`.
pub fn metrics(results: &Results, labels: &SetLabels) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    for (name, clips) in results {
        let label = labels.of(*name);
        let values = [
            (format!("eval/{label}"), evaluation::mean_score(clips, 0)),
            (format!("eval/{label}_check"), evaluation::mean_score(clips, 1)),
            (format!("eval/{label}_kl"), evaluation::mean_kl(clips)),
        ];
        metrics.extend(values.into_iter().filter_map(|(name, value)| Some((name, value?))));
    }
    metrics
}

fn ends(record: &Record) -> Option<(&Results, &Results)> {
    match record.evaluations.as_slice() {
        [first, .., last] => Some((&first.results, &last.results)),
        _ => None,
    }
}

/// Each set before and after, by the reward (0) or by what is measured only (1).
fn changes(record: &Record, labels: &SetLabels) -> Vec<(String, Change)> {
    let Some((before, after)) = ends(record) else { return Vec::new() };
    let mut changes = Vec::new();
    for (reward, suffix) in [(0, ""), (1, "_check")] {
        for (name, clips) in before {
            if let Some(change) = evaluation::change(clips, evaluation::of(after, *name), reward) {
                changes.push((format!("{}{suffix}", labels.of(*name)), change));
            }
        }
    }
    changes
}

/// Mean divergence of the trained model from the base, over all evaluated clips.
fn kl(record: &Record) -> Option<f64> {
    evaluation::mean_kl(ends(record)?.1.iter().flat_map(|(_, clips)| clips))
}

/// A quantity on data held out, before and after.
struct ValidationChange<'a> {
    held_out: &'a HeldOut,
    before: f64,
    after: f64,
}

fn validation_changes<'a>(record: &Record, headlines: &'a [Headline]) -> Vec<ValidationChange<'a>> {
    let [first, .., last] = record.validations.as_slice() else { return Vec::new() };
    let of = |validated: &Validated, metric: &str| validated.metrics.get(metric).copied().flatten();
    let held_out = headlines.iter().filter_map(|headline| headline.held_out.as_ref());
    held_out
        .filter_map(|held_out| {
            let (before, after) = (of(first, &held_out.metric)?, of(last, &held_out.metric)?);
            Some(ValidationChange { held_out, before, after })
        })
        .collect()
}

/// Figures for `summary.json`: `success_before` and `success_after` of an agent; `unseen_before`, `unseen_after`, `unseen_gain` (with its confidence interval), the same
/// for each set and for the rewards that are measured only, and `kl` after training.
pub fn figures(record: &Record, headlines: &[Headline], labels: &SetLabels) -> BTreeMap<String, Value> {
    let mut figures = BTreeMap::new();
    for ValidationChange { held_out, before, after } in validation_changes(record, headlines) {
        figures.insert(format!("{}_before", held_out.label), json!(before));
        figures.insert(format!("{}_after", held_out.label), json!(after));
    }
    for (name, change) in changes(record, labels) {
        figures.insert(format!("{name}_before"), json!(change.before));
        figures.insert(format!("{name}_after"), json!(change.after));
        figures.insert(format!("{name}_gain"), json!(change.gain));
        figures.insert(format!("{name}_clips"), json!(change.clips));
        figures.insert(format!("{name}_missing"), json!(change.missing));
    }
    if let Some(kl) = kl(record) {
        figures.insert("kl".into(), json!(kl));
    }
    figures
}

/// The same as lines for people.
pub fn lines(record: &Record, headlines: &[Headline], labels: &SetLabels) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for ValidationChange { held_out, before, after } in validation_changes(record, headlines) {
        lines.push((held_out.label.clone(), format!("{before:.3} -> {after:.3}, on {}", held_out.data)));
    }
    for (name, Change { clips, missing, before, after, gain }) in changes(record, labels) {
        let [low, high] = gain.ci95;
        let gone = if missing > 0 { format!(", {missing} without a score") } else { String::new() };
        lines.push((
            name.replace('_', " "),
            format!("{before:.3} -> {after:.3}, {:+.3} (95 % {low:+.3} to {high:+.3}; {clips} clips{gone})", gain.mean),
        ));
    }
    if let Some(kl) = kl(record) {
        lines.push(("kl".into(), format!("{kl:.3e}")));
    }
    lines
}

/// Writes what was generated at one moment to `samples/MOMENT`.
pub fn save_clips(dir: &RunDir, moment: &str, generated: &Generated, labels: &SetLabels) -> Result<()> {
    for (name, evaluated) in generated {
        for (i, video) in evaluated.iter().enumerate().filter_map(|(i, e)| Some((i, e.video.as_ref()?))) {
            write_mp4(clip_path(&folder(dir, moment)?, *name, i, labels), video)?;
        }
    }
    Ok(())
}

/// Writes the clips themselves to `samples/reference`.
pub fn save_references(dir: &RunDir, evaluator: &Evaluator, labels: &SetLabels) -> Result<()> {
    for name in [SetName::Train, SetName::Unseen] {
        for (i, sample) in evaluator.samples(name).iter().enumerate() {
            write_mp4(clip_path(&folder(dir, "reference")?, name, i, labels), &sample.video)?;
        }
    }
    Ok(())
}

fn folder(dir: &RunDir, moment: &str) -> Result<PathBuf> {
    let folder = dir.path().join("samples").join(moment);
    std::fs::create_dir_all(&folder).map_err(Error::file("create the directory", &folder))?;
    Ok(folder)
}

fn clip_path(folder: &Path, name: SetName, i: usize, labels: &SetLabels) -> PathBuf {
    folder.join(format!("{}-{i:03}.mp4", labels.of(name)))
}

/// Clips of a moment from their files: the process that generated them may be another.
fn saved_clips(dir: &RunDir, moment: &str, name: SetName, count: usize, labels: &SetLabels) -> Result<Vec<Evaluated>> {
    let folder = folder(dir, moment)?;
    let read = |i: usize| -> Result<Evaluated> {
        let path = clip_path(&folder, name, i, labels);
        let video = if path.is_file() { Some(read_video(&path, &ReadOptions::default())?) } else { None };
        Ok(Evaluated { origin: String::new(), scores: Vec::new(), kl: 0.0, video })
    };
    (0..count).map(read).collect()
}

/// Writes curves, comparison and report; returns name and path of what a person would open.
pub fn write(
    dir: &RunDir,
    record: &Record,
    evaluator: Option<&Evaluator>,
    headlines: &[Headline],
    labels: &SetLabels,
) -> Result<Vec<(&'static str, PathBuf)>> {
    let mut written = Vec::new();
    let path = dir.path().join("curves.png");
    let rows = read_jsonl(&dir.metrics_path())?;
    plot::write(&path, &curves::main_panels(&[Curves { name: "", rows: &rows }], headlines))?;
    written.push(("curves", path));
    if let (Some((before, _)), Some(evaluator)) = (ends(record), evaluator) {
        written.extend(["before", "after"].map(|moment| (moment, dir.path().join("samples").join(moment))));
        let shown = before.last().map_or(SetName::Train, |(name, _)| *name);
        let samples = evaluator.samples(shown);
        let clips = |moment: &str| saved_clips(dir, moment, shown, samples.len(), labels);
        let (before, after) = (clips("before")?, clips("after")?);
        if let Some(grid) = comparison::grid(samples, &before, &after)? {
            let path = dir.path().join("comparison.mp4");
            write_mp4(&path, &grid)?;
            written.push(("comparison", path));
            let last = Picture::from_frame(&grid, grid.dims()[0] - 1);
            write_atomically(&dir.path().join("comparison.png"), &encode_png(&last)?)?;
        }
    }
    let page = dir.path().join("report.html");
    report::write(&page, &[dir.path().to_path_buf()])?;
    written.push(("report", page));
    Ok(written)
}
