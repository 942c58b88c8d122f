//! Partial results of an evaluation on disk: a process that continues a run does not compute them again.
//!
//! `evaluations/step-000050/unseen-003.json` holds the numbers of a clip, `samples/.../unseen-003.mp4` its video.
//! Results of other parameters, options or data have another key and are computed again.

use std::path::{Path, PathBuf};

use roll_core::{Error, Evaluated, Model, Result, RewardComponent, Sample, SampleVideo, Validation};
use roll_data::write_mp4;
use roll_external::Fingerprint;
use roll_external::files::{self, write_atomically};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Clip, SetName};
use crate::checkpoint::{parse_step_name, step_name};
use crate::config::RunConfig;
use crate::parameters::for_each_part;
use crate::results::{SetLabels, clip_path};
use crate::run_dir::RunDir;

/// Parameters are read in parts of at most about this many values.
const PART: usize = 1 << 24;

/// The results of the evaluation of one step that are on disk.
pub(crate) struct PartialResults<'a> {
    dir: &'a RunDir,
    step: u64,
    /// The folders of `samples` that the videos go to: "before", "after", "step-000050".
    moments: Vec<String>,
    labels: &'a SetLabels,
    key: String,
}

/// A result, and the key of all that it depends on.
#[derive(Serialize, Deserialize)]
struct KeyedResult<T> {
    key: String,
    result: T,
}

/// Contents of a clip's file.
#[derive(Serialize, Deserialize)]
struct ClipResult {
    clip: Clip,
    has_video: bool,
}

/// Contents of a validation's file: bits of metrics and losses, as JSON has no NaN.
#[derive(Serialize, Deserialize)]
struct ValidationResult {
    metrics: Vec<(String, u64)>,
    records: Vec<serde_json::Value>,
    losses: Vec<u64>,
}

/// Everything that results depend on: the parameters, and the settings of all parts. All ranks must call it.
pub(crate) fn key(config: &RunConfig, checks: &[&RewardComponent], model: &mut dyn Model) -> Result<String> {
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
pub(crate) fn remove_up_to(dir: &RunDir, step: u64) -> Result<()> {
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
    /// An evaluation of `step`, with videos in the folders `moments`.
    pub fn new(dir: &'a RunDir, step: u64, moments: Vec<String>, labels: &'a SetLabels, key: String) -> Self {
        Self { dir, step, moments, labels, key }
    }

    /// The numbers of a clip whose video is there too.
    pub fn read_clip(&self, set: SetName, i: usize, sample: &Sample) -> Option<Clip> {
        let ClipResult { clip, has_video } = read(&self.path(&clip_name(set, i)), &self.clip_key(sample))?;
        let is_complete =
            !has_video || self.moments.iter().all(|m| self.video(m, set, i).is_ok_and(|path| path.is_file()));
        is_complete.then_some(clip)
    }

    /// Writes video and numbers of a clip, the numbers last.
    pub fn write_clip(&self, set: SetName, i: usize, sample: &Sample, evaluated: &Evaluated) -> Result<()> {
        for moment in &self.moments {
            if let Some(video) = &evaluated.video {
                write_mp4(self.video(moment, set, i)?, video)?;
            }
        }
        let result = ClipResult { clip: Clip::of(evaluated), has_video: evaluated.video.is_some() };
        write(&self.path(&clip_name(set, i)), self.clip_key(sample), result)
    }

    pub fn read_validation(&self) -> Option<Validation> {
        let ValidationResult { metrics, records, losses } = read(&self.path("validation"), &self.key)?;
        let metrics = metrics.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
        Some(Validation { metrics, records, losses: losses.into_iter().map(f64::from_bits).collect() })
    }

    pub fn write_validation(&self, validation: &Validation) -> Result<()> {
        let metrics = validation.metrics.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect();
        let losses = validation.losses.iter().map(|loss| loss.to_bits()).collect();
        let result = ValidationResult { metrics, records: validation.records.clone(), losses };
        write(&self.path("validation"), self.key.clone(), result)
    }

    fn clip_key(&self, sample: &Sample) -> String {
        let mut key = Fingerprint::new("clip").text("evaluation", &self.key).text("index", sample.index);
        key = key.text("prompt", &sample.prompt);
        if !sample.columns.is_empty() {
            key = key.text("columns", format_args!("{:?}", sample.columns));
        }
        key = match &sample.video {
            SampleVideo::Clip(clip) => key.tensor("video", clip.frames()),
            SampleVideo::Shape(dims) => key.text("shape", format_args!("{dims:?}")),
        };
        for (name, picture) in [("image", &sample.image), ("end image", &sample.end_image)] {
            if let Some(picture) = picture {
                key = key.tensor(name, picture);
            }
        }
        key.finish()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.evaluations().join(step_name(self.step)).join(format!("{name}.json"))
    }

    fn video(&self, moment: &str, set: SetName, i: usize) -> Result<PathBuf> {
        clip_path(self.dir, moment, set, i, self.labels)
    }
}

fn clip_name(set: SetName, i: usize) -> String {
    let set = match set {
        SetName::Train => "train",
        SetName::Unseen => "unseen",
    };
    format!("{set}-{i:03}")
}

/// The result in a file; `None` if it has another key or cannot be read.
fn read<T: DeserializeOwned>(path: &Path, key: &str) -> Option<T> {
    let file: KeyedResult<T> = serde_json::from_slice(&files::read(path, files::MAX_TEXT).ok()?).ok()?;
    (file.key == key).then_some(file.result)
}

fn write<T: Serialize>(path: &Path, key: String, result: T) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(Error::file("create the directory", folder))?;
    let json = serde_json::to_vec(&KeyedResult { key, result })
        .map_err(Error::failed("the result of an evaluation cannot be written as JSON"))?;
    write_atomically(path, &json)
}
