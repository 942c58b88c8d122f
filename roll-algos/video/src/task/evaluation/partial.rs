//! Partial results of an evaluation: `evaluations/step-000050/unseen-003.json` holds the numbers of a clip,
//! `samples/.../unseen-003.mp4` (or `.png`) its video.

use std::path::PathBuf;

use roll_core::{Evaluated, Result, Sample, SampleVideo};
use roll_external::Fingerprint;
use roll_media::{clip_file, write_clip};
use roll_train::results::SetLabels;
use roll_train::results::scores::{Clip, SetName};
use roll_train::run_dir::RunDir;
use roll_train::task::PartialResults;
use serde::{Deserialize, Serialize};

use crate::task::samples;

/// The results of the evaluation of one step that are on disk.
pub(crate) struct PartialClips<'a> {
    results: PartialResults<'a>,
    dir: &'a RunDir,
    /// The folders of `samples` that the videos go to: "before", "after", "step-000050".
    moments: Vec<String>,
    labels: &'a SetLabels,
}

/// Contents of a clip's file.
#[derive(Serialize, Deserialize)]
struct ClipResult {
    clip: Clip,
    has_video: bool,
}

impl<'a> PartialClips<'a> {
    /// An evaluation of `step`, with videos in the folders `moments`.
    pub fn new(dir: &'a RunDir, step: u64, moments: Vec<String>, labels: &'a SetLabels, key: String) -> Self {
        Self { results: PartialResults::new(dir, step, key), dir, moments, labels }
    }

    /// Reads the numbers of a clip; `None` if these or any of its videos are missing.
    pub fn read_clip(&self, set: SetName, i: usize, sample: &Sample) -> Option<Clip> {
        let ClipResult { clip, has_video } = self.results.read(&clip_name(set, i), &self.clip_key(sample))?;
        let is_complete = !has_video
            || self.moments.iter().all(|m| self.video_stem(m, set, i).is_ok_and(|stem| clip_file(&stem).is_some()));
        is_complete.then_some(clip)
    }

    /// Writes video and numbers of a clip, the numbers last.
    pub fn write_clip(&self, set: SetName, i: usize, sample: &Sample, evaluated: &Evaluated) -> Result<()> {
        for moment in &self.moments {
            if let Some(video) = &evaluated.video {
                write_clip(&self.video_stem(moment, set, i)?, video)?;
            }
        }
        let result = ClipResult { clip: Clip::of(evaluated), has_video: evaluated.video.is_some() };
        self.results.write(&clip_name(set, i), self.clip_key(sample), result)
    }

    /// The key of a clip's results: a hash of the evaluation and of the sample.
    fn clip_key(&self, sample: &Sample) -> String {
        let mut key = Fingerprint::new("clip").text("evaluation", self.results.key()).text("index", sample.index);
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

    /// The file of a clip's video.
    fn video_stem(&self, moment: &str, set: SetName, i: usize) -> Result<PathBuf> {
        samples::clip_stem(self.dir, moment, set, i, self.labels)
    }
}

/// The name of a clip's file without its ending: `unseen-003`.
fn clip_name(set: SetName, i: usize) -> String {
    let set = match set {
        SetName::Train => "train",
        SetName::Unseen => "unseen",
    };
    format!("{set}-{i:03}")
}
