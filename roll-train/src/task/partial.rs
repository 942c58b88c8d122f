//! Partial results of measurements on disk: a process that continues a run does not compute them again.
//!
//! `evaluations/step-000050/NAME.json` holds a result. Results of other parameters, options or data have another key and
//! are computed again.

use std::path::{Path, PathBuf};

use roll_core::{Error, Model, Result, RewardComponent};
use roll_external::Fingerprint;
use roll_external::files::{self, write_atomically};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{parse_step_name, step_name};
use crate::config::RunConfig;
use crate::parameters::for_each_part;
use crate::run_dir::RunDir;

/// Parameters are read in parts of at most about this many values.
const PART: usize = 1 << 24;

/// The results of one step that are on disk.
pub struct PartialResults<'a> {
    dir: &'a RunDir,
    step: u64,
    key: String,
}

/// A result, and the key of all that it depends on.
#[derive(Serialize, Deserialize)]
struct KeyedResult<T> {
    key: String,
    result: T,
}

/// Everything that results depend on: the parameters, and the settings of all parts. All ranks must call it.
pub fn key(config: &RunConfig, checks: &[&RewardComponent], model: &mut dyn Model) -> Result<String> {
    let parts = (
        (config.seed, config.noise_seed, &config.backend),
        (&config.algo, &config.model, &config.reward, &config.env),
        checks,
    );
    let mut settings =
        serde_json::to_value(parts).map_err(Error::failed("the configuration cannot be written as JSON"))?;
    // The order in which options were set does not matter.
    settings.sort_all_objects();
    let key = Fingerprint::new("evaluation, checks apart")
        .text("version", env!("CARGO_PKG_VERSION"))
        .text("settings", settings);
    let mut fingerprint = Some(key);
    for_each_part(model, PART, |values| fingerprint = fingerprint.take().map(|key| key.f32s("parameters", values)))?;
    Ok(fingerprint.map(Fingerprint::finish).unwrap_or_default())
}

/// Deletes the files of the steps up to `step`: a checkpoint has their contents.
pub fn remove_up_to(dir: &RunDir, step: u64) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(dir.evaluations()) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let of_step = path.file_name().and_then(|name| parse_step_name(name.to_str()?));
        if of_step.is_some_and(|of_step| of_step <= step) {
            std::fs::remove_dir_all(&path).map_err(Error::file("delete", path))?;
        }
    }
    let _ = std::fs::remove_dir(dir.evaluations()); // goes when it is empty
    Ok(())
}

impl<'a> PartialResults<'a> {
    /// The results of `step` that depend on `key`.
    pub fn new(dir: &'a RunDir, step: u64, key: String) -> Self {
        Self { dir, step, key }
    }

    /// The key of all that every result of the step depends on.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The result `name`; `None` if it is missing, has another key or cannot be read.
    pub fn read<T: DeserializeOwned>(&self, name: &str, key: &str) -> Option<T> {
        let bytes = files::read(&self.path(name), files::MAX_TEXT).ok()?;
        let file: KeyedResult<T> = serde_json::from_slice(&bytes).ok()?;
        (file.key == key).then_some(file.result)
    }

    /// Writes the result `name`, which depends on `key`.
    pub fn write<T: Serialize>(&self, name: &str, key: String, result: T) -> Result<()> {
        let path = self.path(name);
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(Error::file("create the directory", folder))?;
        let json = serde_json::to_vec(&KeyedResult { key, result })
            .map_err(Error::failed("the result of an evaluation cannot be written as JSON"))?;
        write_atomically(&path, &json)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.evaluations().join(step_name(self.step)).join(format!("{name}.json"))
    }
}
