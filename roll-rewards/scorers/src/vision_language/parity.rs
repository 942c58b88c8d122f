//! Parity of the preparation of frames with the published code: `videoalign_tiny` and `hpsv3_tiny`, made by
//! the original classes on tiny networks. Every size and option comes from the files.

use std::path::{Path, PathBuf};

use roll_core::{Tensor, Video, VisionLanguageFacts};
use roll_weights::WeightFile;
use serde_json::Value as Json;

use super::sampling::Sampling;
use super::{PixelLimits, Pixels};

/// Data of one tiny reward.
pub struct Fixture {
    directory: PathBuf,
    /// `config` of `config.json`.
    pub config: Json,
    /// Greatest difference relative to the largest value of a tensor.
    pub tolerance: f64,
}

impl Fixture {
    pub fn open(name: &str) -> Self {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
        let whole: Json =
            serde_json::from_str(&std::fs::read_to_string(directory.join("config.json")).unwrap()).unwrap();
        let tolerance = whole["suggested_tolerance_rel_to_max"].as_f64().unwrap();
        Self { config: whole["config"].clone(), tolerance, directory }
    }

    pub fn text(&self, file: &str) -> String {
        std::fs::read_to_string(self.path(file)).unwrap()
    }

    pub fn json(&self, file: &str) -> Json {
        serde_json::from_str(&self.text(file)).unwrap()
    }

    pub fn path(&self, file: &str) -> String {
        self.directory.join(file).to_str().unwrap().into()
    }

    pub fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    pub fn tensor(&self, file: &str, name: &str) -> Tensor {
        WeightFile::open(self.path(file)).unwrap().tensor(name).unwrap()
    }

    /// A tensor of the outputs: the one that was computed in f64 (and is read as f32) if there is one.
    pub fn output(&self, name: &str) -> Vec<f64> {
        let exact = WeightFile::open(self.path("outputs_f64.safetensors")).unwrap();
        floats(&exact.tensor(name).unwrap_or_else(|_| self.tensor("outputs.safetensors", name)))
    }

    pub fn limits(&self) -> PixelLimits {
        PixelLimits { min: self.size("min_pixels"), max: self.size("max_pixels") }
    }

    /// Clip or picture `name` of the inputs.
    pub fn video(&self, name: &str, fps: f64) -> Video {
        Video::new(self.tensor("inputs.safetensors", name), fps).unwrap()
    }

    pub fn facts(&self) -> VisionLanguageFacts {
        VisionLanguageFacts {
            patch: self.size("patch_size"),
            patch_frames: 2,
            merge: self.size("merge_size"),
            width: 1,
            vocabulary: 1,
            image_token: 0,
            video_token: 0,
            vision_start: 0,
            vision_end: 0,
        }
    }

    /// Fails unless `found` is within the fixture's tolerance of `expected`.
    #[track_caller]
    pub fn check(&self, name: &str, found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len(), "{name}");
        let largest = expected.iter().fold(0.0f64, |a, b| a.max(b.abs()));
        let worst = found.iter().zip(expected).fold(0.0f64, |a, (f, e)| a.max((f - e).abs()));
        assert!(worst <= self.tolerance * largest, "{name}: {worst:e} of {largest}");
    }
}

pub fn floats(tensor: &Tensor) -> Vec<f64> {
    tensor.to_f32_vec().into_iter().map(f64::from).collect()
}

/// The resized frames, and the network's input up to the order of its values.
fn check_pixels(fixture: &Fixture, name: &str, pixels: &Pixels, frames: usize) {
    let resized: Vec<f64> = pixels.resized().unwrap().into_iter().map(f64::from).collect();
    // A picture is repeated here, and stored once.
    let stored = fixture.output(&format!("{name}.resized_float"));
    assert_eq!(resized.len() * frames, stored.len() * frames.next_multiple_of(2), "{name}");
    fixture.check(name, &resized[..stored.len()], &stored);
    let sorted = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values
    };
    let input = sorted(floats(&pixels.medium(1.0).unwrap().pixels));
    let rows = sorted(floats(&fixture.tensor("outputs.safetensors", &format!("{name}.pixel_values_float"))));
    fixture.check(&format!("{name} as patches"), &input, &rows);
}

#[test]
fn frames_are_sampled_as_in_the_original() {
    let cases = Fixture::open("videoalign_tiny").json("cases.json");
    for case in cases["frames"].as_array().unwrap() {
        let (total, fps) = (case["total"].as_u64().unwrap() as usize, case["source_fps"].as_f64().unwrap());
        let sampling = match (case["nframes"].as_u64(), case["fps"].as_f64()) {
            (Some(count), _) => Sampling::Count(count as usize),
            (None, rate) => Sampling::Rate(rate.unwrap()),
        };
        let expected: Option<Vec<usize>> = serde_json::from_value(case["indices"].clone()).unwrap();
        assert_eq!(sampling.indices(total, fps), expected, "{total} at {fps}");
    }
}

#[test]
fn pictures_are_fitted_as_in_the_original() {
    for name in ["videoalign_tiny", "hpsv3_tiny"] {
        for case in Fixture::open(name).json("cases.json")["smart_resize"].as_array().unwrap() {
            let size = |key: &str| case[key].as_u64().unwrap() as usize;
            let limits = PixelLimits { min: size("min_pixels"), max: size("max_pixels") };
            let fitted = limits.fit([size("height"), size("width")], size("factor")).unwrap();
            let expected: [usize; 2] = serde_json::from_value(case["resized"].clone()).unwrap();
            // The original returns a side of 0 for one strip, and then fails.
            assert_eq!(fitted, expected.map(|side| side.max(size("factor"))), "{case}");
        }
    }
    let limits = PixelLimits { min: 1, max: 1000 };
    assert!(limits.fit([1, 201], 28).is_err() && limits.fit([0, 5], 28).is_err());
}

#[test]
fn prepared_clips_agree_with_the_original() {
    let fixture = Fixture::open("videoalign_tiny");
    let rates: Vec<f64> = serde_json::from_value(fixture.config["source_fps"].clone()).unwrap();
    for (i, fps) in rates.into_iter().enumerate() {
        let (name, video) = (format!("clip{i}"), fixture.video(&format!("clip{i}.frames"), fps));
        let sampling = Sampling::Rate(fixture.config["target_fps"].as_f64().unwrap());
        let frames = sampling.indices(video.dims()[0], fps).unwrap();
        let indices = fixture.tensor("outputs.safetensors", &format!("{name}.frame_index"));
        let as_integers: Vec<i64> = frames.iter().map(|frame| *frame as i64).collect();
        assert_eq!(as_integers, indices.as_slice::<i64>().unwrap());
        let count = frames.len();
        let pixels = Pixels::new(&video, frames, fixture.limits(), &fixture.facts()).unwrap();
        check_pixels(&fixture, &name, &pixels, count);
    }
}

#[test]
fn prepared_pictures_agree_with_the_original() {
    let fixture = Fixture::open("hpsv3_tiny");
    for i in 0..fixture.json("prompts.json")["prompts"].as_array().unwrap().len() {
        let name = format!("image{i}");
        let pixels = Pixels::new(&fixture.video(&name, 1.0), vec![0], fixture.limits(), &fixture.facts()).unwrap();
        check_pixels(&fixture, &name, &pixels, 1);
    }
}
