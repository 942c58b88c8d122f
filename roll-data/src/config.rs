//! The section `data` of a configuration.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Training data: a `metadata.csv` or `metadata.jsonl` with columns `video` and `prompt` (optionally `image` or
/// `input_image`, and `end_image`), and the files it names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Path of the CSV or JSONL file.
    pub metadata: Option<PathBuf>,
    /// Directory that the file names in it start from. `null`: the directory of the file itself.
    pub base_path: Option<PathBuf>,
    /// Frames with more pixels than this are scaled down to about as many (480 * 480 in the reference).
    pub max_pixels: usize,
    /// Height of every frame, a multiple of 16; with `width` it overrides `max_pixels`.
    pub height: Option<usize>,
    /// Width of every frame, a multiple of 16.
    pub width: Option<usize>,
    /// Frames taken of a clip, at most. The number taken is always one more than a multiple of 4.
    pub num_frames: usize,
    /// Take frames at this rate instead of every frame.
    pub fps: Option<f64>,
    /// Clips are cropped to the nearest of these ratios of width to height (of `max_pixels` pixels, smaller ones of as many
    /// as they have), and the samples of a micro-batch have one shape. Empty: each clip keeps its own ratio.
    pub bucket_ratios: Vec<f64>,
    /// Clips are cut to the longest of these numbers of frames (each one more than a multiple of 4) that they have, and
    /// the samples of a micro-batch have one shape. Empty: each clip keeps its length, up to `num_frames`.
    pub bucket_frames: Vec<usize>,
    /// Draw the rows in another order each pass, keyed by `seed`.
    pub shuffle: bool,
    /// What to do with a row whose files cannot be read.
    pub on_bad_sample: OnBadSample,
    /// How often an epoch goes over the metadata (`dataset_repeat` in DiffSynth-Studio).
    pub repeat: u64,
    /// Bytes of decoded clips kept in memory.
    pub cache_bytes: usize,
    /// Directory that latents, text embeddings and the rewards' targets are kept in, for this run and later ones; several
    /// runs and ranks may share it. `null`: they are computed anew by each run.
    pub cache_dir: Option<PathBuf>,
}

impl DataConfig {
    /// With its paths from `base`.
    pub fn resolved(&self, base: impl Fn(&Path) -> PathBuf) -> Self {
        let of = |path: &Option<PathBuf>| path.as_deref().map(&base);
        Self {
            metadata: of(&self.metadata),
            base_path: of(&self.base_path),
            cache_dir: of(&self.cache_dir),
            ..self.clone()
        }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            metadata: None,
            base_path: None,
            max_pixels: 480 * 480,
            height: None,
            width: None,
            num_frames: 81,
            fps: None,
            bucket_ratios: Vec::new(),
            bucket_frames: Vec::new(),
            shuffle: true,
            on_bad_sample: OnBadSample::Error,
            repeat: 1,
            cache_bytes: 1 << 30,
            cache_dir: None,
        }
    }
}

/// What to do with a row whose files cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadSample {
    /// End the run with an error that names the row and the file.
    #[default]
    Error,
    /// Leave out the row, count it and log it once.
    Skip,
}
