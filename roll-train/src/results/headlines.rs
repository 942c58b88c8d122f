//! `headlines.json`: the algorithm's headline metrics, for plots and reports made without the algorithm.

use roll_core::{Error, Headline, Result};
use roll_external::files::write_atomically;

use super::read_optional_json;
use crate::run_dir::RunDir;

/// The file in the run directory.
pub const FILE: &str = "headlines.json";

/// Writes the headline metrics of a run.
pub fn write(dir: &RunDir, headlines: &[Headline]) -> Result<()> {
    let json = serde_json::to_vec_pretty(headlines)
        .map_err(|e| Error::Misuse(format!("the headline metrics cannot be written as JSON: {e}")))?;
    write_atomically(&dir.path().join(FILE), &json)
}

/// Reads the headline metrics of a run; empty if the file is missing, as in runs of older versions.
pub fn read(dir: &RunDir) -> Result<Vec<Headline>> {
    let headlines = read_optional_json(&dir.path().join(FILE), "a list of headline metrics")?;
    Ok(headlines.unwrap_or_default())
}
