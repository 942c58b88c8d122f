//! Reference data of one tiny network: every size and option comes from its files.

use std::path::{Path, PathBuf};

use roll_backends::Backend;
use roll_core::{BuildContext, Medium, StateDict, Tensor};
use roll_network::precision::{ComputeDType, WeightsDType};
use roll_network::weights::Checkpoint;
use serde_json::Value;

use crate::config::VisionConfig;
use crate::patches::{Grid, PatchOrder};
use crate::{QwenVl, QwenVlOptions};

/// Times its own measured f32 error that a tensor may differ by, and the floor of that, relative to its largest value.
const ERROR_FACTOR: f64 = 8.0;
const ERROR_FLOOR: f64 = 1e-6;
/// Number of values of a tensor from which on its measured error is used alone.
const FEW: usize = 16;
/// Norm of the difference of a tensor, relative to its norm, where weights and products are bf16: twelve times the
/// distance of neighbouring bf16 numbers.
const BF16_ERROR: f64 = 12.0 / 256.0;
/// That of a gradient, which passes both networks twice: 0.098 was measured on flex.
const BF16_GRADIENT: f64 = 3.0 * BF16_ERROR;

pub struct Fixture {
    pub directory: PathBuf,
    pub json: Value,
    pub inputs: StateDict,
    /// Outputs, in f64 (rounded to f32) where the fixture has them so.
    pub outputs: StateDict,
}

/// A text of a case, with its media.
pub struct Text {
    pub tokens: Vec<u32>,
    pub media: Vec<Medium>,
    /// For each medium: the tensor of the inputs that holds its patches, and its rows there.
    pub sources: Vec<(String, std::ops::Range<usize>)>,
    /// The row in the batch, and the number of padding tokens on its left.
    pub row: usize,
    pub padding: usize,
    /// Number of tokens of the answer.
    pub answer: usize,
}

impl Fixture {
    pub fn all() -> Vec<Self> {
        ["qwen2vl_tiny", "qwen25vl_tiny"].map(Self::named).into()
    }

    pub fn named(name: &str) -> Self {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let read = |file: &str| Checkpoint::open(directory.join(file)).unwrap().all().unwrap();
        let json = serde_json::from_slice(&std::fs::read(directory.join("config.json")).unwrap()).unwrap();
        let mut outputs = read("outputs.safetensors");
        outputs.extend(read("outputs_f64.safetensors"));
        Self { inputs: read("inputs.safetensors"), outputs, json, directory }
    }

    pub fn options(&self, dtype: &str) -> QwenVlOptions {
        let (weights_dtype, compute_dtype) = match dtype {
            "bf16" => (WeightsDType::Bf16, ComputeDType::Bf16),
            _ => (WeightsDType::F32, ComputeDType::F32),
        };
        QwenVlOptions {
            model_path: Some(self.directory.join("model.safetensors")),
            config_path: Some(self.directory.join("hf_config.json")),
            weights_dtype,
            compute_dtype,
            ..QwenVlOptions::default()
        }
    }

    pub fn open(&self, backend: &str, dtype: &str) -> QwenVl {
        crate::open("model", &self.options(dtype), &BuildContext::new(backend)).unwrap()
    }

    pub fn cases(&self) -> Vec<String> {
        self.json["config"]["grids"].as_object().unwrap().keys().cloned().collect()
    }

    fn integers(&self, name: &str) -> Vec<i64> {
        self.inputs[name].as_slice::<i64>().unwrap().to_vec()
    }

    /// The texts of a case.
    pub fn texts(&self, case: &str, model: &QwenVl) -> Vec<Text> {
        let ids = self.integers(&format!("{case}.input_ids"));
        let mask = self.integers(&format!("{case}.attention_mask"));
        let answers = self.integers(&format!("{case}.answer"));
        let columns = ids.len() / answers.len();
        // The next picture and the next clip: number, first row of patches.
        let mut next = [(0, 0), (0, 0)];
        let rows = answers.iter().enumerate().map(|(row, answer)| {
            let places = row * columns..(row + 1) * columns;
            let padding = mask[places.clone()].iter().filter(|kept| **kept == 0).count();
            let tokens: Vec<u32> = ids[places][padding..].iter().map(|id| *id as u32).collect();
            let (mut media, mut sources, mut at) = (Vec::new(), Vec::new(), 0);
            while at < tokens.len() {
                let facts = &model.config().facts;
                let kind = [facts.image_token, facts.video_token].iter().position(|id| *id == tokens[at]);
                let Some(kind) = kind else {
                    at += 1;
                    continue;
                };
                let medium = self.medium(case, kind, &mut next[kind], model);
                at += facts.tokens_of(medium.0.pixels.shape()).unwrap();
                media.push(medium.0);
                sources.push(medium.1);
            }
            Text { tokens, media, sources, row, padding, answer: *answer as usize }
        });
        rows.collect()
    }

    /// A picture (`kind` 0) or a clip (1).
    fn medium(
        &self,
        case: &str,
        kind: usize,
        (number, first_row): &mut (usize, usize),
        model: &QwenVl,
    ) -> (Medium, (String, std::ops::Range<usize>)) {
        let grids = self.integers(&format!("{case}.{}_grid_thw", ["image", "video"][kind]));
        let [steps, rows, columns] = [0, 1, 2].map(|axis| grids[*number * 3 + axis] as usize);
        let grid = Grid { steps, rows, columns };
        let source = format!("{case}.{}", ["pixel_values", "pixel_values_videos"][kind]);
        let range = *first_row..*first_row + steps * rows * columns;
        let seconds = self.inputs.get(&format!("{case}.second_per_grid_ts")).filter(|_| kind == 1);
        let seconds_per_step = seconds.map_or(1.0, |all| f64::from(all.f32s().unwrap()[*number]));
        *number += 1;
        *first_row = range.end;
        let vision = &model.config().vision;
        let values = vision.patch_values();
        let patches = &self.inputs[&source].f32s().unwrap()[range.start * values..range.end * values];
        let shape = [steps * vision.patch_frames, 3, rows * vision.patch, columns * vision.patch];
        let pixels = token_order(vision, grid).scatter(vision, &[&shape], patches).remove(0);
        (Medium { pixels: Tensor::new(pixels, shape).unwrap(), seconds_per_step }, (source, range))
    }

    /// Fails unless `found` is near the tensor `name` of the outputs.
    pub fn compare(&self, name: &str, found: &[f32], expected: &[f32], setting: &str) {
        assert_eq!(found.len(), expected.len(), "{name}");
        if setting.ends_with("bf16") {
            return compare_narrow(name, found, expected, setting);
        }
        let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let error = found.iter().zip(expected).fold(0f32, |error, (a, b)| error.max((a - b).abs()));
        let measured = self.json["tolerance"][name]["f32_vs_f64_rel_to_max"].as_f64().unwrap();
        // The measured error of a few numbers may be small by chance.
        let suggested = self.json["suggested_tolerance_rel_to_max"].as_f64().unwrap();
        let floor = if expected.len() < FEW { suggested } else { ERROR_FLOOR };
        let tolerance = (ERROR_FACTOR * measured).max(floor);
        let error = f64::from(error) / f64::from(largest.max(f32::MIN_POSITIVE));
        assert!(error <= tolerance, "{name} on {setting}: {error:.2e} of the largest value, at most {tolerance:.2e}");
    }
}

/// Fails unless `found` is `expected` up to the rounding of weights and operands to bf16, as a whole: the error of single
/// elements varies. Tensors of a few numbers are left out, because they follow from others with cancellation.
fn compare_narrow(name: &str, found: &[f32], expected: &[f32], setting: &str) {
    if expected.len() < FEW {
        return;
    }
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let size: f64 = expected.iter().map(|x| square(*x)).sum();
    let error = (error / size).sqrt();
    let tolerance = if name.contains(".grad.") { BF16_GRADIENT } else { BF16_ERROR };
    assert!(error <= tolerance, "{name} on {setting}: {error:.2e} of the norm, at most {tolerance:.2e}");
}

/// The order of the patches in the fixture: that of the tokens.
pub fn token_order(vision: &VisionConfig, grid: Grid) -> PatchOrder {
    PatchOrder::new(&VisionConfig { windows: None, ..vision.clone() }, &[grid])
}

/// The backends of this build that are tested and work here, each with the dtypes that its device has.
pub fn settings() -> Vec<(&'static str, &'static str)> {
    let usable = |backend: &Backend| {
        backend.is_compiled() && roll_testing::is_tested(backend.name()) && backend.check_usable(0).is_ok()
    };
    let mut settings = Vec::new();
    for backend in Backend::ALL.into_iter().filter(usable) {
        settings.push((backend.name(), "f32"));
        if roll_backends::device(backend.name()).unwrap().supports_dtype(burn_tensor::DType::BF16) {
            settings.push((backend.name(), "bf16"));
        }
    }
    settings
}
