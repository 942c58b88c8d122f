//! Reads the files of a run for the report. Any of them may be missing, since the run may not have ended.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::checkpoint::{self, Checkpoint};
use crate::config::ConfigLayers;
use crate::metrics::read_jsonl;
use crate::run_dir::RunDir;
use crate::signature;
use roll_core::{Error, Headline, Result};
use roll_external::files;
use serde_json::{Map, Value};

use crate::results::record::{self, Record};
use crate::results::{headlines, progress_file, read_optional_json};

/// The contents of a run directory. The contents of missing files are empty.
pub struct RunFiles {
    /// Name of the directory.
    pub name: String,
    pub path: PathBuf,
    /// The lines of `metrics.jsonl`.
    pub rows: Vec<Map<String, Value>>,
    /// The text of `config.yaml`, without its signature.
    pub config: String,
    /// The values of `config.yaml`, as one line of YAML each, by dotted key.
    pub settings: BTreeMap<String, String>,
    /// `summary.json`; `None` until the run has ended.
    pub summary: Option<Map<String, Value>>,
    /// `headlines.json`.
    pub headlines: Vec<Headline>,
    /// The newer one of the records in the newest checkpoint and in `progress.json`.
    pub record: Record,
    /// The figures of `summary.json`, or the figures of `progress.json` until the run has ended.
    pub figures: Map<String, Value>,
}

impl RunFiles {
    /// A run that has only metrics.
    #[cfg(test)]
    pub fn of_rows(rows: Value) -> Self {
        Self { rows: serde_json::from_value(rows).unwrap_or_default(), ..Self::empty(Path::new("")) }
    }

    /// The contents of a run directory that has no files.
    pub fn empty(path: &Path) -> Self {
        Self {
            name: directory_name(path),
            path: path.to_path_buf(),
            rows: Vec::new(),
            config: String::new(),
            settings: BTreeMap::new(),
            summary: None,
            headlines: Vec::new(),
            record: Record::default(),
            figures: Map::new(),
        }
    }

    /// Reads the files in the run directory `path`.
    pub fn read(path: &Path) -> Result<Self> {
        let dir = RunDir::open(path)?;
        // Links are refused, because the run may be another person's: a link could bring any file of this machine onto
        // a page that is passed on.
        for file in [
            dir.config_path(),
            dir.metrics_path(),
            dir.summary_path(),
            path.join(headlines::FILE),
            path.join(progress_file::FILE),
        ] {
            files::refuse_links(path, &file)?;
        }
        let config = match files::read_text(&dir.config_path(), files::MAX_TEXT) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => signature::unsigned(&text.map_err(Error::file("read", dir.config_path()))?).to_string(),
        };
        let rows = match dir.metrics_path().exists() {
            true => read_jsonl(&dir.metrics_path())?,
            false => Vec::new(),
        };
        // Hashes are not checked, because that would read gigabytes of weights.
        let newest_checkpoint =
            checkpoint::list(&dir.checkpoints())?.into_iter().rev().find_map(|(_, path)| Checkpoint::open(path).ok());
        let saved_record = match newest_checkpoint {
            Some(checkpoint) => record::read_record(&checkpoint)?,
            None => Record::default(),
        };
        let progress = progress_file::read(path)?.unwrap_or_default();
        let summary: Option<Map<String, Value>> = read_optional_json(&dir.summary_path(), "a JSON object")?;
        Ok(Self {
            settings: settings(&config),
            headlines: headlines::read(&dir)?,
            rows,
            config,
            figures: summary.clone().unwrap_or_else(|| progress.figures.into_iter().collect()),
            summary,
            record: if progress.record.seconds >= saved_record.seconds { progress.record } else { saved_record },
            ..Self::empty(path)
        })
    }

    /// The value of a configuration key, if it is a number.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.settings.get(key)?.parse().ok()
    }

    /// Whether the configuration has a value at a key, which may be the key of a section or of a list.
    pub fn has(&self, key: &str) -> bool {
        let is_empty = |value: &String| matches!(value.as_str(), "null" | "[]" | "{}" | "\"\"");
        let has_value = self.settings.get(key).is_some_and(|value| !is_empty(value));
        has_value || self.settings.keys().any(|other| other.strip_prefix(key).is_some_and(|rest| rest.starts_with('.')))
    }

    /// The step of the next evaluation; `None` if the run has ended, has no step left, or has no set number of steps.
    pub fn next_evaluation(&self) -> Option<u64> {
        let (done, wanted) = self.steps();
        let end = wanted.filter(|end| done < *end && self.summary.is_none())?;
        match self.number("evaluation.every").unwrap_or_default() as u64 {
            // Only the last step is evaluated.
            0 => Some(end),
            every => Some(((done / every + 1) * every).min(end)),
        }
    }

    /// The last step that is logged, and the number of steps in the configuration.
    pub fn steps(&self) -> (u64, Option<u64>) {
        let done = self.rows.iter().filter_map(|row| row.get("step")?.as_u64()).max().unwrap_or(0);
        (done, self.number("steps").map(|steps| steps as u64))
    }

    /// The values of a metric, in the order of the steps.
    pub fn values(&self, metric: &str) -> Vec<f64> {
        self.rows.iter().filter_map(|row| row.get(metric)?.as_f64()).collect()
    }
}

/// The last name in `path`, also if `path` is `.` or ends in `..`.
fn directory_name(path: &Path) -> String {
    let full = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    full.file_name().unwrap_or(full.as_os_str()).to_string_lossy().into_owned()
}

/// The values of a configuration by dotted key. Options of components are not checked. Empty if this version cannot
/// read the configuration.
fn settings(yaml: &str) -> BTreeMap<String, String> {
    let loaded = ConfigLayers::new().text("config.yaml", yaml).and_then(|layers| layers.load(None));
    let listing = loaded.and_then(|loaded| loaded.listing()).unwrap_or_default();
    listing.into_iter().map(|entry| (entry.key, entry.value)).collect()
}
