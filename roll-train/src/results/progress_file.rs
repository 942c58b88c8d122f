//! `progress.json`: the record and the figures of a run after its newest evaluation. The report of an unfinished run is
//! made from it, because the newest checkpoint may be older, or there may be none yet.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{Error, Headline, Result};
use roll_external::files::write_atomically;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::labels::SetLabels;
use super::record::Record;
use super::{figures, read_optional_json};
use crate::run_dir::RunDir;

/// The file in the run directory.
pub const FILE: &str = "progress.json";

/// The contents of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ProgressFile {
    /// The record of the run.
    pub record: Record,
    /// Figures as in `summary.json`.
    pub figures: BTreeMap<String, Value>,
}

/// Writes the file.
pub(crate) fn write(dir: &RunDir, record: &Record, headlines: &[Headline], labels: &SetLabels) -> Result<()> {
    let progress = ProgressFile { record: record.clone(), figures: figures::figures(record, headlines, labels) };
    let json =
        serde_json::to_vec(&progress).map_err(Error::failed("the record of the run cannot be written as JSON"))?;
    write_atomically(&dir.path().join(FILE), &json)
}

/// Reads the file; `None` if the run has none.
pub fn read(run: &Path) -> Result<Option<ProgressFile>> {
    read_optional_json(&run.join(FILE), "the record of a run")
}
