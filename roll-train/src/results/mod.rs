//! Results of a run: the files of its directory besides checkpoints and `summary.json`.
//!
//! | File | Written by | When |
//! |---|---|---|
//! | `config.yaml` | `journal` | before the first evaluation |
//! | `evaluations/step-000025/*.json` | the task | with each clip or validation; removed once a checkpoint has it |
//! | `headlines.json` | [`headlines`], through `journal` | once, after the first step |
//! | `progress.json` | `progress_file`, through `journal` | with the first step and each evaluation |
//! | `metrics.jsonl`, `events.out.tfevents.*` | [`crate::metrics`], through `journal` | with each step |
//! | `trajectories.jsonl` | [`trajectories`], through `journal` | with each step of an agent, and each validation |
//! | `samples/step-000025/sample-*.mp4` (`.png` for one frame) | `journal` | with each step that has sample videos |
//! | `samples/{reference,before,step-000025,after}/*.mp4` (`.png`) | the task, in the folders of `samples` | with each evaluation |
//! | `curves.svg` | [`curves`], drawn by [`plot`] | at the end |
//! | `comparison.mp4` (more than one frame), `comparison.png` | the task | at the end of a run with evaluations |
//! | `report.html` | [`report`] | at the end, and by `roll report` |
//!
//! Headlines are the metrics to show first. `figures` computes the changes of [`scores`] between the evaluations in a
//! run's [`record`]. These changes are part of `summary.json`, which [`crate::trainer`] writes.

pub mod curves;
pub mod headlines;
pub mod plot;
pub mod record;
pub mod report;
pub mod scores;
pub mod trajectories;

mod figures;
mod journal;
mod labels;
mod progress_file;
mod samples;

use std::path::{Path, PathBuf};

use roll_core::{Error, Headline, Result};
use roll_external::files;
use serde::de::DeserializeOwned;

use crate::run_dir::RunDir;

pub use figures::metrics;
pub(crate) use figures::{figures, lines};
pub use journal::Journal;
pub use labels::SetLabels;
pub use samples::{PROMPT, folder};

/// Reads a JSON file; `None` if it does not exist. `contents` names its contents in errors, such as "a JSON object".
fn read_optional_json<T: DeserializeOwned>(path: &Path, contents: &str) -> Result<Option<T>> {
    match files::read(path, files::MAX_TEXT) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::file("read", path)(e)),
        Ok(bytes) => {
            let problem = |e| Error::bad_file(path, format!("expected {contents}: {e}"));
            serde_json::from_slice(&bytes).map(Some).map_err(problem)
        }
    }
}

/// Writes the curves of a run that logged metrics. Returns their name and path.
pub(crate) fn write_curves(dir: &RunDir, headlines: &[Headline]) -> Result<Option<(&'static str, PathBuf)>> {
    if !dir.metrics_path().exists() {
        return Ok(None);
    }
    Ok(Some(("curves", curves::write(dir, headlines)?)))
}

/// Writes the report of a run. Returns its name and path.
pub(crate) fn write_report(dir: &RunDir) -> Result<(&'static str, PathBuf)> {
    let page = dir.path().join("report.html");
    report::write(&page, &[dir.path().to_path_buf()])?;
    Ok(("report", page))
}
