//! Results of a run: the files of its directory besides checkpoints and `summary.json`.
//!
//! | File | Written by | When |
//! |---|---|---|
//! | `config.yaml` | `journal` | before the first evaluation |
//! | `evaluations/step-000025/*.json` | [`crate::evaluation`] | with each clip; removed once a checkpoint has it |
//! | `headlines.json` | [`headlines`], through `journal` | once, after the first step |
//! | `progress.json` | `progress_file`, through `journal` | with the first step and each evaluation |
//! | `metrics.jsonl`, `events.out.tfevents.*` | [`crate::metrics`], through `journal` | with each step |
//! | `trajectories.jsonl` | [`trajectories`], through `journal` | with each step of an agent, and each validation |
//! | `samples/step-000025/sample-*.mp4` | `journal` | with each step that has sample videos |
//! | `samples/{reference,before,step-000025,after}/*.mp4` | `clips` | with each evaluation |
//! | `curves.png` | [`curves`], drawn by [`plot`] | at the end |
//! | `comparison.mp4`, `comparison.png` | `comparison` | at the end of a run with evaluations |
//! | `report.html` | [`report`] | at the end, and by `roll report` |
//!
//! Headlines are the metrics to show first. `figures` computes scores before and after training from the [`record`] in
//! a checkpoint, for `metrics.jsonl` and for `summary.json`, which [`crate::trainer`] writes.

pub mod curves;
pub mod headlines;
pub mod plot;
pub mod record;
pub mod report;
pub mod trajectories;

mod clips;
mod comparison;
mod figures;
mod journal;
mod labels;
mod progress_file;

use std::path::{Path, PathBuf};

use roll_core::{Error, Headline, Result};
use roll_external::files;
use serde::de::DeserializeOwned;

use self::record::Record;
use crate::evaluation::{self, Evaluator};
use crate::run_dir::RunDir;

pub(crate) use clips::{PROMPT, clip_path, copy_samples, prompt_path, read_clip, save_references};
pub(crate) use figures::{figures, lines, metrics};
pub(crate) use journal::Journal;
pub(crate) use labels::SetLabels;

/// Reads a JSON file; `None` if it does not exist. `what` names its contents in errors.
fn read_optional_json<T: DeserializeOwned>(path: &Path, what: &str) -> Result<Option<T>> {
    match files::read(path, files::MAX_TEXT) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::file("read", path)(e)),
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::bad_file(path, format!("expected {what}: {e}")))
        }
    }
}

/// Writes curves, comparison and report at the end of a run. Returns name and path of each result, the folders of
/// samples included, for the summary of the run.
pub(crate) fn write(
    dir: &RunDir,
    record: &Record,
    evaluator: Option<&Evaluator>,
    headlines: &[Headline],
    labels: &SetLabels,
) -> Result<Vec<(&'static str, PathBuf)>> {
    let mut written = Vec::new();
    if dir.metrics_path().exists() {
        written.push(("curves", curves::write(dir, headlines)?));
    }
    if let (Some((before, _)), Some(evaluator)) = (record.first_and_last_evaluation(), evaluator) {
        for moment in ["before", "after"] {
            written.push((moment, clips::folder(dir, moment)?));
        }
        if let Some(shown_set) = evaluation::judged_set(before) {
            written.extend(comparison::write(dir, shown_set, evaluator, labels)?.map(|path| ("comparison", path)));
        }
    }
    let page = dir.path().join("report.html");
    report::write(&page, &[dir.path().to_path_buf()])?;
    written.push(("report", page));
    Ok(written)
}
