//! Partial results of measurements on disk: a process that continues a run does not compute them again.
//!
//! `evaluations/step-000050/NAME.json` holds a result. Results of other parameters, options or data have another key
//! and are computed again.

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

/// Number of parameters that are read at a time. A larger tensor is read whole.
const VALUES_OF_PART: usize = 1 << 24;

/// The results of one step that are on disk.
pub struct PartialResults<'a> {
    dir: &'a RunDir,
    step: u64,
    /// See [`key`].
    key: String,
}

/// The contents of a file: a result, and a hash of all that it depends on.
#[derive(Serialize, Deserialize)]
struct KeyedResult<T> {
    key: String,
    result: T,
}

/// A hash of everything that all results of a step depend on: the parameters, and the settings of all components. All
/// ranks must call it.
pub fn key(config: &RunConfig, checks: &[&RewardComponent], model: &mut dyn Model) -> Result<String> {
    let settings = (
        (config.seed, config.noise_seed, &config.backend),
        (&config.algo, &config.model, &config.reward, &config.env),
        checks,
    );
    let mut settings =
        serde_json::to_value(settings).map_err(Error::failed("the configuration cannot be written as JSON"))?;
    // The order in which options were set does not matter.
    settings.sort_all_objects();
    let mut fingerprint = Fingerprint::new("evaluation, checks apart")
        .text("version", env!("CARGO_PKG_VERSION"))
        .text("settings", settings);
    for_each_part(model, VALUES_OF_PART, |values| fingerprint = fingerprint.clone().f32s("parameters", values))?;
    Ok(fingerprint.finish())
}

/// Deletes the results of the steps up to `last_step`, because a checkpoint has them.
pub fn remove_up_to(dir: &RunDir, last_step: u64) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(dir.evaluations()) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let step = path.file_name().and_then(|name| parse_step_name(name.to_str()?));
        if step.is_some_and(|step| step <= last_step) {
            std::fs::remove_dir_all(&path).map_err(Error::file("delete", path))?;
        }
    }
    // Fails if results of later steps are left.
    let _ = std::fs::remove_dir(dir.evaluations());
    Ok(())
}

impl<'a> PartialResults<'a> {
    /// The results of `step` whose common dependencies have the hash `key`.
    pub fn new(dir: &'a RunDir, step: u64, key: String) -> Self {
        Self { dir, step, key }
    }

    /// The hash of all that every result of the step depends on.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The result `name`, which depends on `key`; `None` if it is missing, has another key or cannot be read.
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

    /// The file of the result `name`.
    fn path(&self, name: &str) -> PathBuf {
        self.dir.evaluations().join(step_name(self.step)).join(format!("{name}.json"))
    }
}
