//! `headlines.json`: the algorithm's headline metrics, for plots and reports made without the algorithm.

use roll_core::{Error, Headline, Result};
use roll_external::files::{self, write_atomically};

use crate::run_dir::RunDir;

const FILE: &str = "headlines.json";

/// Writes the headline metrics of a run.
pub fn write(dir: &RunDir, headlines: &[Headline]) -> Result<()> {
    let json = serde_json::to_vec_pretty(headlines)
        .map_err(|e| Error::Misuse(format!("the headline metrics cannot be written as JSON: {e}")))?;
    write_atomically(&dir.path().join(FILE), &json)
}

/// Reads the headline metrics of a run; empty if the file is missing, as in runs of older versions.
pub fn read(dir: &RunDir) -> Result<Vec<Headline>> {
    let path = dir.path().join(FILE);
    match files::read(&path, files::MAX_TEXT) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::file("read", path)(e)),
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|e| Error::bad_file(path, format!("no list of headline metrics: {e}"))),
    }
}
