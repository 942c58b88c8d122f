//! Adapters from one run to the next and to `roll generate`: rank, layers, alpha and expert come from their files.

mod base_lora;
mod files;
mod generation;
mod names;
mod policy;

use std::collections::BTreeMap;
use std::path::PathBuf;

use roll_core::{
    Adapter, BuildContext, ConditionInput, DiffusionModel, Grad, Model, Noise, Purpose, Result, StateDict, Timestep,
};
use roll_network::weights::save_safetensors;
use roll_wan::init_tiny::{WanKind, init_tiny};
use roll_wan::{Wan, WanOptions, loading};
use serde_json::Value;

use crate::world::World;

/// A tiny checkpoint, and the options that open it.
struct Tiny {
    dir: tempfile::TempDir,
    options: WanOptions,
}

impl Tiny {
    fn new(kind: WanKind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files = init_tiny(dir.path().join("tiny"), kind, 3).unwrap();
        let options = WanOptions {
            model_paths: Some(files.model_paths.into()),
            tokenizer_path: Some(files.tokenizer),
            ..WanOptions::default()
        };
        Self { dir, options }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The model with these options changed.
    fn open(&self, changes: Value) -> Result<Wan> {
        let mut options = serde_json::to_value(&self.options).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            options[key] = value.clone();
        }
        let options: WanOptions = serde_json::from_value(options).unwrap();
        let base_dir = self.dir.path().into();
        loading::open(&options, &BuildContext { seed: 1, base_dir, ..BuildContext::new("flex") })
    }

    fn refused(&self, changes: Value) -> String {
        self.open(changes).err().unwrap().chain()
    }

    /// A model that was trained, and its files in `directory`.
    fn trained(&self, directory: &str, options: Value) -> Wan {
        let mut model = self.open(options).unwrap();
        let values = Noise::new(5).normal(Purpose::Synthetic, 0, 0, &[model.parameter_count()]).unwrap();
        model.write_parameters(&values.f32s().unwrap().iter().map(|v| 0.1 * v).collect::<Vec<_>>()).unwrap();
        std::fs::create_dir_all(self.path(directory)).unwrap();
        for (name, state) in model.export_adapter().unwrap() {
            let file = self.path(directory).join(format!("{name}.safetensors"));
            save_safetensors(file, &state, &BTreeMap::new()).unwrap();
        }
        model
    }
}

fn parameters(model: &Wan) -> BTreeMap<String, Vec<f32>> {
    let mut values = vec![0.0; model.parameter_count()];
    model.read_parameters(&mut values).unwrap();
    let state = roll_core::flat::to_state(model.parameters(), &values).unwrap();
    state.into_iter().map(|(name, tensor)| (name, tensor.to_f32_vec())).collect()
}

pub fn picture(world: &World, name: &str, value: f32) {
    let frame = roll_core::Video::new(roll_core::Tensor::full([1, 3, 64, 64], value), 8.0).unwrap();
    let frames = roll_media::write_pngs(world.path("picture"), &frame).unwrap();
    std::fs::rename(&frames[0], world.path(name)).unwrap();
}

/// Arguments of `roll generate` for a small video.
fn generate<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["generate", "--output", output, "--steps", "1", "--frames", "5"];
    arguments.extend(["--height", "64", "--width", "64", "--set", "model.model_paths=tiny/wan22_paths.json"]);
    arguments.extend(["--set", "model.tokenizer_path=tiny/google/umt5-xxl"]);
    arguments.extend(more);
    arguments
}

const PROMPT: [&str; 4] = ["--prompt", "a face", "--image", "0.png"];

/// A LoRA as LightX2V publishes them for Wan2.2 I2V: `lora_down`, `lora_up` and `alpha`, whole differences, and layers of
/// an image encoder that the model does not have.
pub fn distillation() -> StateDict {
    let noise = |which: u64, shape: &[usize]| {
        let values = Noise::new(4).normal(Purpose::Synthetic, which, 0, shape).unwrap();
        roll_core::Tensor::new(values.f32s().unwrap().iter().map(|v| 0.1 * v).collect::<Vec<_>>(), shape).unwrap()
    };
    let mut state = StateDict::new();
    for (i, layer) in ["blocks.0.self_attn.q", "blocks.1.ffn.0", "blocks.0.cross_attn.k_img"].into_iter().enumerate() {
        let (name, out) = (format!("diffusion_model.{layer}"), if layer.contains("ffn") { 128 } else { 64 });
        state.insert(format!("{name}.lora_down.weight"), noise(2 * i as u64, &[4, 64]));
        state.insert(format!("{name}.lora_up.weight"), noise(2 * i as u64 + 1, &[out, 4]));
        state.insert(format!("{name}.alpha"), roll_core::Tensor::scalar(8.0));
        state.insert(format!("{name}.diff_b"), noise(20 + i as u64, &[out]));
    }
    state.insert("diffusion_model.blocks.1.cross_attn.norm_k.diff".into(), noise(30, &[64]));
    state.insert("diffusion_model.blocks.1.diff_m".into(), noise(31, &[1, 6, 64]));
    state
}

/// The low-noise velocity of some latents, bit by bit.
fn velocity(model: &mut Wan, adapter: Adapter) -> Vec<u8> {
    let image = Some(roll_core::Tensor::zeros([3, 32, 32]));
    let input = ConditionInput { prompt: "a face".into(), image, frames: 5, size: [32, 32], ..Default::default() };
    let conditioning = model.encode(&input).unwrap();
    let x = Noise::new(1).normal(Purpose::Synthetic, 0, 0, &conditioning.latent_shape).unwrap();
    let (v, _) = model.velocity(&x, Timestep(300.0), &conditioning, adapter, Grad::Skip).unwrap();
    v.as_bytes().to_vec()
}
