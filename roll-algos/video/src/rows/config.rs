//! The section `data` of a configuration.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use roll_core::keys::check_ranges;
use roll_core::{Error, Result, VideoUnit};
use roll_media::{Decoder, check_size};
use roll_train::progress::counted;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The samples of a clip that is longer than `num_frames`: `head`, or one of the others with its number, as in
/// `{uniform: 3}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Windows {
    /// One sample: the first frames.
    #[default]
    Head,
    /// N samples at equal distances, the first at the start of the clip and the last at its end.
    Uniform(#[schemars(range(min = 2))] usize),
    /// A sample every N frames, as long as it lies within the clip.
    Sliding(#[schemars(range(min = 1))] usize),
}

/// Training data: a table with the column `prompt` (optionally `video`, `image` or `input_image`, `end_image`,
/// `weight`, and `mask`), and the files it names; a directory of videos with a caption each; or a text file of prompts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Path of the table: CSV (with commas, semicolons or tabs), JSON lines, or a JSON list of objects. Or path of a
    /// directory of videos, each with its prompt in a `.txt` of the same name. Or path of a `.txt` with one prompt per
    /// line. A row without a `video` is a prompt, for algorithms that generate their videos. `null`: no data, which
    /// algorithms that train on clips or prompts reject.
    pub metadata: Option<PathBuf>,
    /// Directory that the file names in `metadata` are relative to. `null`: the directory of the metadata file.
    pub base_path: Option<PathBuf>,
    /// Upper limit on the pixels of a frame; larger frames are scaled down to about this many.
    #[schemars(range(min = 1))]
    pub max_pixels: usize,
    /// Height of every frame in pixels, a multiple of the model's unit (16; 32 for TI2V-5B). Requires `width`; the two
    /// replace `max_pixels`.
    #[schemars(range(min = 1))]
    pub height: Option<usize>,
    /// Width of every frame in pixels, a multiple of the model's unit. Requires `height`.
    #[schemars(range(min = 1))]
    pub width: Option<usize>,
    /// Upper limit on the frames taken from a clip, and the frames generated for a row without one. The number is always
    /// one more than a multiple of the model's unit (4). A model of pictures takes one frame, whatever this number is.
    #[schemars(range(min = 1))]
    pub num_frames: usize,
    /// The samples of a clip that has more than `num_frames` frames. Clips of `evaluation.metadata` have one sample.
    pub windows: Windows,
    /// Frames per second at which clips are sampled: the frames shown at those times, which also holds for clips of
    /// variable frame rate. At most 240; a rate above the file's repeats frames. `null`: every frame of the file.
    #[schemars(range(max = 240), extend("exclusiveMinimum" = 0))]
    pub fps: Option<f64>,
    /// Ratios of width to height, from 0.05 to 20, e.g. 1.78 for 16:9. Each clip is cropped to the nearest ratio and
    /// scaled to about `max_pixels` (smaller clips are not enlarged), and the samples of a micro-batch have one shape.
    /// Excludes `height` and `width`. An empty list: each clip keeps its own ratio.
    #[schemars(inner(range(min = 0.05, max = 20)))]
    pub bucket_ratios: Vec<f64>,
    /// Numbers of frames, each one more than a multiple of the model's unit (4) and at most `num_frames`. Each clip is
    /// cut to the largest number that it has enough frames for, and the samples of a micro-batch have one shape. An
    /// empty list: each clip keeps its length, up to `num_frames`.
    #[schemars(inner(range(min = 1)))]
    pub bucket_frames: Vec<usize>,
    /// Shuffle the rows anew in each pass, keyed by `seed`.
    pub shuffle: bool,
    /// Reaction to a row whose files cannot be read, or to a clip of a directory without its caption: `error` or
    /// `skip`.
    pub on_bad_sample: OnBadSample,
    /// Decoder of videos: `own` (H.264 in MP4 and MOV), `ffmpeg` (the program, which must be in the PATH together with
    /// `ffprobe`), or `auto` (`own` where it can read the file, else ffmpeg).
    pub decoder: Decoder,
    /// Number of batches that are prefetched while a step runs; their memory is in addition to `cache_bytes`.
    #[schemars(range(max = MAX_PREFETCH))]
    pub prefetch: usize,
    /// Passes over the metadata in one epoch (`dataset_repeat` in DiffSynth-Studio).
    #[schemars(range(min = 1))]
    pub repeat: u64,
    /// Upper limit, in bytes, on the decoded clips that are cached in memory.
    pub cache_bytes: usize,
    /// Directory in which latents, text embeddings and targets of rewards are cached, for this run and later ones;
    /// several runs and ranks may share it. `none`: each run computes them anew. `auto`: the directory in the
    /// environment variable `ROLL_CACHE` (or `none`), else `roll` in `XDG_CACHE_HOME` or `~/.cache`.
    pub cache_dir: CacheDir,
    /// Upper limit, in bytes, on the contents of `cache_dir`; the least recently used files are deleted first.
    pub cache_limit: u64,
}

/// The location of cached encodings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CacheDir {
    /// The directory that the environment selects.
    #[default]
    Auto,
    /// No cache.
    Off,
    /// This directory.
    At(PathBuf),
}

impl Serialize for CacheDir {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Auto => "auto".serialize(serializer),
            Self::Off => "none".serialize(serializer),
            Self::At(path) => path.serialize(serializer),
        }
    }
}

impl JsonSchema for CacheDir {
    fn schema_name() -> Cow<'static, str> {
        "CacheDir".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"const": "auto"}, {"const": "none"}, {"type": "string"}]})
    }
}

impl<'de> Deserialize<'de> for CacheDir {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Ok(match Option::<String>::deserialize(deserializer)?.as_deref() {
            Some("auto") => Self::Auto,
            None | Some("none" | "null" | "") => Self::Off,
            Some(path) => Self::At(path.into()),
        })
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
            windows: Windows::Head,
            fps: None,
            bucket_ratios: Vec::new(),
            bucket_frames: Vec::new(),
            shuffle: true,
            on_bad_sample: OnBadSample::Error,
            decoder: Decoder::Auto,
            prefetch: 1,
            repeat: 1,
            cache_bytes: 1 << 30,
            cache_dir: CacheDir::Auto,
            cache_limit: 20 << 30,
        }
    }
}

impl DataConfig {
    /// Returns the configuration with each of its paths mapped by `resolve`.
    pub fn resolved(&self, resolve: impl Fn(&Path) -> PathBuf) -> Self {
        let resolve_option = |path: &Option<PathBuf>| path.as_deref().map(&resolve);
        Self {
            metadata: resolve_option(&self.metadata),
            base_path: resolve_option(&self.base_path),
            cache_dir: match &self.cache_dir {
                CacheDir::At(path) => CacheDir::At(resolve(path)),
                other => other.clone(),
            },
            ..self.clone()
        }
    }

    /// Checks ranges and mutually exclusive values; errors name the key in the section `data`.
    pub fn check(&self) -> Result<()> {
        check_ranges("data", self)?;
        if self.fps.is_some_and(|fps| !fps.is_finite()) {
            return Err(Error::config("data.fps", "expected a finite number"));
        }
        self.check_size()?;
        self.check_buckets()
    }

    fn check_size(&self) -> Result<()> {
        match (self.height, self.width) {
            (Some(_), None) => Err(Error::config("data.height", "needs data.width beside it")),
            (None, Some(_)) => Err(Error::config("data.width", "needs data.height beside it")),
            (Some(height), Some(width)) => {
                check_size(width, height).map_err(|problem| Error::config("data.height", problem))
            }
            (None, None) => Ok(()),
        }
    }

    /// Checks that sizes and lengths are multiples of the model's `unit`; errors name the key.
    pub fn check_unit(&self, unit: VideoUnit) -> Result<()> {
        for (key, value, unit) in [("data.height", self.height, unit.height), ("data.width", self.width, unit.width)] {
            if let Some(value) = value
                && value % unit != 0
            {
                let near = (value / unit * unit).max(unit);
                let problem = format!("the model takes multiples of {unit}, such as {near}; found {value}");
                return Err(Error::config(key, problem));
            }
        }
        if let Some(frames) = self.bucket_frames.iter().find(|n| unit.frames_within(**n) != **n) {
            let problem = format!("the model takes {}; found {frames}", unit.possible_frames());
            return Err(Error::config("data.bucket_frames", problem));
        }
        Ok(())
    }

    /// Returns a note if the model's unit reduces the frames of a clip to fewer than a configured `num_frames`.
    pub fn unit_note(&self, unit: VideoUnit) -> Option<String> {
        let (wanted, usable_frames) = (self.num_frames, unit.frames_within(self.num_frames));
        (usable_frames != wanted && wanted != Self::default().num_frames).then(|| {
            format!(
                "`data.num_frames: {wanted}`: at most {} of a clip; the model takes {}",
                counted(usable_frames as u64, "frame"),
                unit.possible_frames()
            )
        })
    }

    fn check_buckets(&self) -> Result<()> {
        if !self.bucket_ratios.is_empty() && self.height.is_some() {
            return Err(Error::config("data.bucket_ratios", "`data.height` and `data.width` fix the ratio already"));
        }
        if let Some(frames) = self.bucket_frames.iter().find(|n| **n > self.num_frames) {
            let problem = format!("expected numbers from 1 to `data.num_frames` ({}), found {frames}", self.num_frames);
            return Err(Error::config("data.bucket_frames", problem));
        }
        Ok(())
    }
}

/// Maximum number of prefetched batches; more would only take memory.
const MAX_PREFETCH: usize = 16;

/// Reaction to a row whose files cannot be read, or to a clip of a directory without its caption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnBadSample {
    /// End the run with an error that names the row and the file.
    #[default]
    Error,
    /// Skip the row, count it and log it once.
    Skip,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key that `check` rejects after `change`.
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
    fn rejects_out_of_range_values_by_key() {
        let key = |key: &str| Some(format!("data.{key}"));
        assert_eq!(refused(|_| {}), None);
        assert_eq!(refused(|c| (c.height, c.width) = (Some(64), Some(96))), None);
        assert_eq!(refused(|c| c.max_pixels = 0), key("max_pixels"));
        assert_eq!(refused(|c| c.num_frames = 0), key("num_frames"));
        assert_eq!(refused(|c| c.repeat = 0), key("repeat"));
        assert_eq!(refused(|c| c.height = Some(64)), key("height"));
        assert_eq!(refused(|c| c.width = Some(64)), key("width"));
        assert_eq!(refused(|c| (c.height, c.width) = (Some(64), Some(0))), key("width"));
        assert_eq!(refused(|c| c.prefetch = 17), key("prefetch"));
        assert_eq!(refused(|c| c.bucket_ratios = vec![1.0, f64::NAN]), key("bucket_ratios.1"));
        let fixed = |c: &mut DataConfig| {
            (c.height, c.width) = (Some(64), Some(64));
            c.bucket_ratios = vec![1.0];
        };
        assert_eq!(refused(fixed), key("bucket_ratios"));
        assert_eq!(refused(|c| c.bucket_frames = vec![85]), key("bucket_frames"));
        assert_eq!(refused(|c| c.bucket_frames = vec![0]), key("bucket_frames.0"));
        for (height, width) in [(65536, 65536), (1 << 40, 1 << 40), (20_000, 16), (8192, 8192)] {
            assert_eq!(refused(|c| (c.height, c.width) = (Some(height), Some(width))), key("height"));
        }
        for fps in [0.0, -1.0, f64::INFINITY, 1000.0] {
            assert_eq!(refused(|c| c.fps = Some(fps)), key("fps"));
        }
    }

    #[test]
    fn rejects_sizes_the_model_does_not_support() {
        let sized = DataConfig { height: Some(64), width: Some(112), ..DataConfig::default() };
        let told = |config: &DataConfig, unit| config.check_unit(unit).err().map(|e| e.to_string());
        let wide = VideoUnit { height: 32, width: 32, frames: 4, most_frames: None };
        assert_eq!(told(&sized, VideoUnit::default()), None);
        let problem = told(&sized, wide).unwrap_or_default();
        assert!(problem.contains("data.width") && problem.contains("multiples of 32, such as 96"), "{problem}");
        let lengths = DataConfig { bucket_frames: vec![81, 16], ..DataConfig::default() };
        let problem = told(&lengths, wide).unwrap_or_default();
        assert!(problem.contains("data.bucket_frames") && problem.contains("found 16"), "{problem}");
        assert!(told(&lengths, VideoUnit { frames: 3, ..wide }).is_some());
        assert_eq!(told(&lengths, VideoUnit { frames: 1, ..wide }), None);
        let note = |num_frames| DataConfig { num_frames, ..DataConfig::default() }.unit_note(wide);
        assert_eq!(note(81), None);
        assert!(
            note(10).is_some_and(|note| note.contains("`data.num_frames: 10`") && note.contains("at most 9 frames"))
        );
        let pictures = VideoUnit { frames: 1, most_frames: Some(1), ..wide };
        assert_eq!([0, 1, 81].map(|frames| pictures.frames_within(frames)), [0, 1, 1]);
        let note = |num_frames| DataConfig { num_frames, ..DataConfig::default() }.unit_note(pictures);
        assert_eq!(note(DataConfig::default().num_frames), None);
        assert!(note(5).is_some_and(|note| note.contains("at most 1 frame of a clip; the model takes pictures")));
    }
}
