//! The section `data` of a configuration.

use std::path::{Path, PathBuf};

use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::resize::DIVISOR;

/// Training data: a `metadata.csv` or `metadata.jsonl` with columns `video` and `prompt` (optionally `image` or
/// `input_image`, and `end_image`), and the files it names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Path of the CSV or JSONL file. Default: `null`, which algorithms that train on clips refuse.
    pub metadata: Option<PathBuf>,
    /// Directory that the file names in `metadata` are relative to. Default: `null`, the directory of that file.
    pub base_path: Option<PathBuf>,
    /// Upper limit on the pixels of a frame; larger frames are scaled down to about this many. At least 1. Default:
    /// 230400 (480 * 480), as in ROLL.
    pub max_pixels: usize,
    /// Height of every frame in pixels, a multiple of 16. Needs `width`; the two replace `max_pixels`. Default: `null`.
    pub height: Option<usize>,
    /// Width of every frame in pixels, a multiple of 16. Needs `height`. Default: `null`.
    pub width: Option<usize>,
    /// Upper limit on the frames taken from a clip. The number taken is always one more than a multiple of 4. At least
    /// 1. Default: 81.
    pub num_frames: usize,
    /// Frames per second at which clips are sampled. Above 0. Default: `null`, every frame of the file is taken.
    pub fps: Option<f64>,
    /// Ratios of width to height, from 0.05 to 20, for instance 1.78 for 16:9. Each clip is cropped to the nearest one
    /// and scaled to about `max_pixels` (a smaller clip is not scaled up), and the samples of a micro-batch have one
    /// shape. Excludes `height` and `width`. Default: an empty list, each clip keeps its own ratio.
    pub bucket_ratios: Vec<f64>,
    /// Numbers of frames, each one more than a multiple of 4 and at most `num_frames`. Each clip is cut to the largest
    /// number that it has frames for, and the samples of a micro-batch have one shape. Default: an empty list, each
    /// clip keeps its length, up to `num_frames`.
    pub bucket_frames: Vec<usize>,
    /// Draw the rows in another order in each pass, keyed by `seed`. Default: true.
    pub shuffle: bool,
    /// What to do with a row whose files cannot be read: `error` or `skip`. Default: `error`.
    pub on_bad_sample: OnBadSample,
    /// Passes over the metadata in one epoch (`dataset_repeat` in DiffSynth-Studio). At least 1. Default: 1.
    pub repeat: u64,
    /// Upper limit, in bytes, on the decoded clips that are kept in memory. Default: 1073741824 (1 GiB).
    pub cache_bytes: usize,
    /// Directory in which latents, text embeddings and targets of rewards are kept, for this run and later ones; several
    /// runs and ranks may share it. Default: `null`, each run computes them anew.
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

impl DataConfig {
    /// Checks ranges and values that exclude one another; errors name the key in the section `data`.
    pub fn check(&self) -> Result<()> {
        for (key, count) in [
            ("data.max_pixels", self.max_pixels as u64),
            ("data.num_frames", self.num_frames as u64),
            ("data.repeat", self.repeat),
        ] {
            if count == 0 {
                return Err(Error::config(key, "expected at least 1, found 0"));
            }
        }
        self.check_size()?;
        self.check_buckets()?;
        match self.fps {
            Some(fps) if !(fps.is_finite() && fps > 0.0) => {
                Err(Error::config("data.fps", "expected a positive number"))
            }
            _ => Ok(()),
        }
    }

    fn check_size(&self) -> Result<()> {
        let (height, width) = match (self.height, self.width) {
            (None, None) => return Ok(()),
            (Some(height), Some(width)) => (height, width),
            (Some(_), None) => return Err(Error::config("data.height", "needs data.width beside it")),
            (None, Some(_)) => return Err(Error::config("data.width", "needs data.height beside it")),
        };
        for (key, value) in [("data.height", height), ("data.width", width)] {
            if value == 0 || value % DIVISOR != 0 {
                return Err(Error::config(key, format!("expected a multiple of {DIVISOR}, found {value}")));
            }
        }
        Ok(())
    }

    fn check_buckets(&self) -> Result<()> {
        if let Some(ratio) = self.bucket_ratios.iter().find(|r| !(0.05..=20.0).contains(*r)) {
            let problem = format!("expected ratios of width to height, as 1.78 for 16:9, found {ratio}");
            return Err(Error::config("data.bucket_ratios", problem));
        }
        if !self.bucket_ratios.is_empty() && self.height.is_some() {
            return Err(Error::config("data.bucket_ratios", "`data.height` and `data.width` fix the ratio already"));
        }
        if let Some(frames) = self.bucket_frames.iter().find(|n| **n % 4 != 1 || **n > self.num_frames) {
            let problem = format!(
                "expected numbers one more than a multiple of 4, of at most `data.num_frames` ({}), found {frames}",
                self.num_frames
            );
            return Err(Error::config("data.bucket_frames", problem));
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The key that `check` refuses after `change`.
    fn refused(change: impl FnOnce(&mut DataConfig)) -> Option<String> {
        let mut config = DataConfig::default();
        change(&mut config);
        match config.check() {
            Err(Error::Config { key, .. }) => Some(key),
            Err(other) => Some(other.to_string()),
            Ok(()) => None,
        }
    }

    #[test]
    fn values_out_of_range_are_refused_by_their_key() {
        let key = |key: &str| Some(format!("data.{key}"));
        assert_eq!(refused(|_| {}), None);
        assert_eq!(refused(|c| (c.height, c.width) = (Some(64), Some(96))), None);
        assert_eq!(refused(|c| c.max_pixels = 0), key("max_pixels"));
        assert_eq!(refused(|c| c.num_frames = 0), key("num_frames"));
        assert_eq!(refused(|c| c.repeat = 0), key("repeat"));
        assert_eq!(refused(|c| c.height = Some(64)), key("height"));
        assert_eq!(refused(|c| c.width = Some(64)), key("width"));
        assert_eq!(refused(|c| (c.height, c.width) = (Some(64), Some(100))), key("width"));
        assert_eq!(refused(|c| c.bucket_ratios = vec![1.0, f64::NAN]), key("bucket_ratios"));
        let fixed = |c: &mut DataConfig| {
            (c.height, c.width) = (Some(64), Some(64));
            c.bucket_ratios = vec![1.0];
        };
        assert_eq!(refused(fixed), key("bucket_ratios"));
        assert_eq!(refused(|c| c.bucket_frames = vec![81, 16]), key("bucket_frames"));
        assert_eq!(refused(|c| c.bucket_frames = vec![85]), key("bucket_frames"));
        for fps in [0.0, -1.0, f64::INFINITY] {
            assert_eq!(refused(|c| c.fps = Some(fps)), key("fps"));
        }
    }
}
