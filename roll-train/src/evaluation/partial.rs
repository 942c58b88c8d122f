//! Results of an evaluation that is under way, on disk: a process that goes on does not do them again.
//!
//! `evaluations/step-000050/unseen-003.json` holds the numbers of a clip, `samples/.../unseen-003.mp4` its video.
//! Results of other parameters, options or data have another key and are computed again.

use std::path::{Path, PathBuf};

use roll_core::{Error, Evaluated, Model, Result, Sample, Validation};
use roll_data::write_mp4;
use roll_external::Fingerprint;
use roll_external::files::{self, write_atomically};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Clip, SetName};
use crate::checkpoint::{parse_step_name, step_name};
use crate::config::RunConfig;
use crate::results::{SetLabels, clip_path};
use crate::run_dir::RunDir;

/// Parameters are read in parts of at most about this many.
const PART: usize = 1 << 24;

/// Results of one step, of one state of the model.
pub(crate) struct Kept<'a> {
    dir: &'a RunDir,
    step: u64,
    /// The folders of `samples` that the videos go to: "before", "after", "step-000050".
    moments: Vec<String>,
    labels: &'a SetLabels,
    key: String,
}

/// A file of results.
#[derive(Serialize, Deserialize)]
struct File<T> {
    key: String,
    result: T,
}

/// Contents of a clip's file.
#[derive(Serialize, Deserialize)]
struct KeptClip {
    clip: Clip,
    has_video: bool,
}

/// Contents of a validation's file: bits of the metrics, as JSON has no NaN.
#[derive(Serialize, Deserialize)]
struct KeptValidation {
    metrics: Vec<(String, u64)>,
    records: Vec<serde_json::Value>,
}

/// Everything that results depend on: the parameters, and the settings of all parts. All ranks must call it.
pub(crate) fn key(config: &RunConfig, model: &mut dyn Model) -> Result<String> {
    let parts = (
        (config.seed, config.noise_seed, &config.backend),
        (&config.algo, &config.model, &config.reward, &config.env),
        &config.evaluation.check,
    );
    let mut settings =
        serde_json::to_value(parts).map_err(Error::failed("the configuration cannot be written as JSON"))?;
    // The order in which options were said means nothing.
    settings.sort_all_objects();
    let mut key = Fingerprint::new("evaluation, checks apart")
        .text("version", env!("CARGO_PKG_VERSION"))
        .text("settings", settings);
    let lengths: Vec<usize> = model.parameters().iter().map(|spec| spec.len()).collect();
    let Some(parts) = model.parts() else {
        let mut values = vec![0.0; lengths.iter().sum()];
        model.read_parameters(&mut values)?;
        return Ok(key.f32s("parameters", &values).finish());
    };
    let mut values = Vec::new();
    let mut first = 0;
    while first < lengths.len() {
        let mut end = first + 1;
        let mut length = lengths[first];
        while end < lengths.len() && length + lengths[end] <= PART {
            length += lengths[end];
            end += 1;
        }
        values.resize(length, 0.0);
        parts.read_part(first..end, &mut values)?;
        key = key.f32s("parameters", &values);
        first = end;
    }
    Ok(key.finish())
}

/// Deletes the files of the steps up to `step`: a checkpoint has their contents.
pub(crate) fn forget(dir: &RunDir, step: u64) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(dir.evaluations()) else { return Ok(()) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let of = path.file_name().and_then(|name| parse_step_name(name.to_str()?));
        if of.is_some_and(|of| of <= step) {
            std::fs::remove_dir_all(&path).map_err(Error::file("delete", path))?;
        }
    }
    let _ = std::fs::remove_dir(dir.evaluations()); // goes when it is empty
    Ok(())
}

impl<'a> Kept<'a> {
    /// An evaluation of `step`, with videos in the folders `moments`.
    pub fn new(dir: &'a RunDir, step: u64, moments: Vec<String>, labels: &'a SetLabels, key: String) -> Self {
        Self { dir, step, moments, labels, key }
    }

    /// The numbers of a clip whose video is there too.
    pub fn find(&self, set: SetName, i: usize, sample: &Sample) -> Option<Clip> {
        let KeptClip { clip, has_video } = read(&self.path(&clip_name(set, i)), &self.clip_key(sample))?;
        let there = !has_video || self.moments.iter().all(|m| self.video(m, set, i).is_ok_and(|path| path.is_file()));
        there.then_some(clip)
    }

    /// Writes video and numbers of a clip, the numbers last.
    pub fn keep(&self, set: SetName, i: usize, sample: &Sample, evaluated: &Evaluated) -> Result<()> {
        for moment in &self.moments {
            if let Some(video) = &evaluated.video {
                write_mp4(self.video(moment, set, i)?, video)?;
            }
        }
        let kept = KeptClip { clip: Clip::of(evaluated), has_video: evaluated.video.is_some() };
        write(&self.path(&clip_name(set, i)), self.clip_key(sample), kept)
    }

    /// The validation of this step.
    pub fn find_validation(&self) -> Option<Validation> {
        let KeptValidation { metrics, records } = read(&self.path("validation"), &self.key)?;
        let metrics = metrics.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect();
        Some(Validation { metrics, records })
    }

    /// Writes the validation of this step.
    pub fn keep_validation(&self, validation: &Validation) -> Result<()> {
        let metrics = validation.metrics.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect();
        let kept = KeptValidation { metrics, records: validation.records.clone() };
        write(&self.path("validation"), self.key.clone(), kept)
    }

    fn clip_key(&self, sample: &Sample) -> String {
        let mut key = Fingerprint::new("clip").text("evaluation", &self.key).text("index", sample.index);
        key = key.text("prompt", &sample.prompt).tensor("video", sample.video.frames());
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

/// The value of a file under `key`. A file that cannot be read is as good as none.
fn read<T: DeserializeOwned>(path: &Path, key: &str) -> Option<T> {
    let file: File<T> = serde_json::from_slice(&files::read(path, files::MAX_TEXT).ok()?).ok()?;
    (file.key == key).then_some(file.result)
}

fn write<T: Serialize>(path: &Path, key: String, result: T) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(Error::file("create the directory", folder))?;
    let json = serde_json::to_vec(&File { key, result })
        .map_err(Error::failed("the result of an evaluation cannot be written as JSON"))?;
    write_atomically(path, &json)
}
