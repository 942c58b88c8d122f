//! The checkpoint of `roll init-tiny` and LoRA files of this crate, run by diffusers itself.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use burn_tensor::DType;
use roll_core::{Adapter, Conditioning, Grad, Noise, Purpose, StateDict, Tensor, Timestep, flat};
use roll_network::lora::{Convention, Layer, Lora, Names, WriteOptions, write_lora};
use roll_network::new_checkpoint::save;
use roll_network::tokenizer::Tokenizer;
use roll_network::weights::Checkpoint;
use roll_z_image::dit::{Dit, Trainable};
use roll_z_image::init_tiny::init_tiny;
use roll_z_image::text::{MAX_TOKENS, PromptEncoder, TextEncoder, read_config};
use roll_z_image::vae::{Vae, VaeConfig};

/// Exit code of the script without the packages.
const MISSING: i32 = 77;
/// Greatest difference, relative to the largest value.
const TOLERANCE: f32 = 1e-4;

/// A sigma that is no multiple of anything in the network.
const SIGMA: f64 = 0.37;
const RANK: usize = 4;

#[test]
fn diffusers_computes_the_same_picture_and_the_same_velocity_with_every_lora_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    init_tiny(&model, 5).unwrap();
    let device = roll_backends::device("flex").unwrap();
    let noise = Noise::new(6);
    let weights = |name: &str| Checkpoint::open(model.join(name)).unwrap();

    let tokenizer = Tokenizer::load(&model.join("tokenizer/tokenizer.json")).unwrap();
    let config = read_config(&model.join("text_encoder/config.json")).unwrap();
    let encoder =
        TextEncoder::streamed(config, &weights("text_encoder/model.safetensors"), DType::F32, &device).unwrap();
    let prompts = PromptEncoder { tokenizer, encoder, max_tokens: MAX_TOKENS };
    let caption = prompts.encode(&["a portrait".to_string()]).unwrap().remove(0);

    let state = weights("transformer/diffusion_pytorch_model.safetensors").all().unwrap();
    let mut dit = Dit::new(&state, None, DType::F32, &device).unwrap();
    let shape = [dit.config().channels, 1, 8, 12];
    let latents = noise.normal(Purpose::Synthetic, 0, 0, &shape).unwrap();
    let conditioning = Conditioning {
        context: caption.clone(),
        channels: None,
        image_tokens: None,
        first_frame: None,
        latent_shape: shape,
    };
    let targets = ["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"].map(String::from).to_vec();
    let trainable = Trainable::Lora { rank: RANK, alpha: 3.0, targets };
    dit.add_trainable(&trainable, &noise, &StateDict::new()).unwrap();
    let parameters = dit.parameters().unwrap().clone();
    let specs = parameters.specs();
    let count = specs.iter().map(roll_core::ParameterSpec::len).sum();
    let values = noise.normal(Purpose::Synthetic, 0, 1, &[count]).unwrap();
    let values: Vec<f32> = values.f32s().unwrap().iter().map(|value| 0.1 * value).collect();
    parameters.write(&values).unwrap();
    let velocity =
        |adapter| dit.velocity(&latents, Timestep(1000.0 * SIGMA), &conditioning, adapter, Grad::Skip).unwrap().0;

    let trained = lora_of(&flat::to_state(specs, &values).unwrap(), dit.lora_scale());
    for (name, lora, convention) in [
        ("lora_diffusers", &trained, Convention::Diffusers),
        ("lora_comfyui", &trained, Convention::ComfyUi),
        ("lora_kohya", &trained, Convention::Kohya),
    ] {
        let options = WriteOptions { convention, names: Names::Official };
        write_lora(lora, options, &BTreeMap::new(), &dir.path().join(format!("{name}.safetensors"))).unwrap();
    }
    let inputs = BTreeMap::from([
        ("latents".to_string(), latents.clone()),
        ("caption".to_string(), caption.clone()),
        ("t".to_string(), Tensor::new(vec![(1.0 - SIGMA) as f32], [1]).unwrap()),
    ]);
    save(&dir.path().join("inputs.safetensors"), &inputs.into_iter().collect()).unwrap();

    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/scripts/zimage_lora.py");
    let output = match Command::new(python).arg(script).arg(dir.path()).output() {
        Ok(output) if output.status.code() != Some(MISSING) => output,
        _ => roll_testing::skip!("no Python with diffusers and PEFT", needs = "diffusers"),
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}{text}", String::from_utf8_lossy(&output.stdout));
    println!("{}", String::from_utf8_lossy(&output.stdout));

    let outputs = Checkpoint::open(dir.path().join("outputs.safetensors")).unwrap().all().unwrap();
    let json = std::fs::read_to_string(model.join("vae/config.json")).unwrap();
    let config = VaeConfig::parse(&json, Path::new("config.json")).unwrap();
    let state = weights("vae/diffusion_pytorch_model.safetensors").all().unwrap();
    let (picture, _) = Vae::new(config, &state, &device).unwrap().decode(&latents, Grad::Skip).unwrap();
    let (base, with_lora) = (velocity(Adapter::Off), velocity(Adapter::On));
    assert!(difference(&base, &with_lora) > 100.0 * TOLERANCE, "the LoRA has an effect");
    for (name, theirs) in &outputs {
        let ours = match name.as_str() {
            "base" => &base,
            "picture" => &picture,
            "caption" => &caption,
            _ => &with_lora,
        };
        let found = difference(ours, theirs);
        println!("{name}: {found:e}");
        assert!(found < TOLERANCE, "{name}: {found:e}");
    }
    assert_eq!(outputs.len(), 3 + 3, "{:?}", outputs.keys());
}

/// The adapter of trained parameters, with names of the checkpoint.
fn lora_of(parameters: &StateDict, scale: f64) -> Lora {
    let mut layers = BTreeMap::new();
    for (name, down) in parameters {
        let Some(layer) = name.strip_suffix(".lora_A.weight") else { continue };
        let up = parameters[&format!("{layer}.lora_B.weight")].clone();
        let alpha = Some(scale * down.shape()[0] as f64);
        layers.insert(layer.to_string(), Layer { down: down.clone(), up, alpha, bias: None });
    }
    Lora { layers, ..Lora::default() }
}

/// The greatest difference, relative to the largest value of `expected`.
fn difference(found: &Tensor, expected: &Tensor) -> f32 {
    let (found, expected) = (found.to_f32_vec(), expected.to_f32_vec());
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let greatest = found.iter().zip(&expected).fold(0.0_f32, |greatest, (a, b)| greatest.max((a - b).abs()));
    greatest / largest
}
