//! Reference data of one tiny network: every size and option comes from its files.

use std::path::{Path, PathBuf};

use roll_core::{BuildContext, Medium, StateDict, Tensor};
use roll_network::precision::{ComputeDType, WeightsDType};
use roll_network::weights::Checkpoint;
use serde_json::Value;

use crate::config::VisionConfig;
use crate::patches::{Grid, PatchOrder};
use crate::{QwenVl, QwenVlOptions};

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
    /// The row in the batch, and the number of padding tokens on its left.
    pub row: usize,
    pub padding: usize,
}

impl Fixture {
    pub fn all() -> Vec<Self> {
        ["qwen2vl_tiny", "qwen25vl_tiny"].map(Self::named).into()
    }

    pub fn named(name: &str) -> Self {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
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
        let columns = self.outputs[&format!("{case}.position_ids")].shape()[2];
        // The next picture and the next clip: number, first row of patches.
        let mut next = [(0, 0), (0, 0)];
        let rows = (0..ids.len() / columns).map(|row| {
            let places = row * columns..(row + 1) * columns;
            let padding = mask[places.clone()].iter().filter(|kept| **kept == 0).count();
            let tokens: Vec<u32> = ids[places][padding..].iter().map(|id| *id as u32).collect();
            let (mut media, mut at) = (Vec::new(), 0);
            while at < tokens.len() {
                let facts = &model.config().facts;
                let kind = [facts.image_token, facts.video_token].iter().position(|id| *id == tokens[at]);
                let Some(kind) = kind else {
                    at += 1;
                    continue;
                };
                let medium = self.medium(case, kind, &mut next[kind], model);
                at += facts.tokens_of(medium.pixels.shape()).unwrap();
                media.push(medium);
            }
            Text { tokens, media, row, padding }
        });
        rows.collect()
    }

    /// A picture (`kind` 0) or a clip (1).
    fn medium(&self, case: &str, kind: usize, (number, first_row): &mut (usize, usize), model: &QwenVl) -> Medium {
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
        Medium { pixels: Tensor::new(pixels, shape).unwrap(), seconds_per_step }
    }
}

/// The order of the patches in the fixture: that of the tokens.
pub fn token_order(vision: &VisionConfig, grid: Grid) -> PatchOrder {
    PatchOrder::new(&VisionConfig { windows: None, ..vision.clone() }, &[grid])
}
