//! Writes small Wan checkpoints with random weights, in the layout of the official repositories, for trying a
//! configuration and for tests.

use std::path::{Path, PathBuf};

use roll_core::{DType, Noise, Result, StateDict, Tensor};
use roll_network::new_checkpoint::{
    RANDOM_WEIGHTS, SMALL_DEVIATION, TinyCheckpoint, drawn_state, make_directory, preserving_deviation, save, write,
};

use super::clip::ClipConfig;
use super::dit::DitConfig;
use super::init::{write_experts, write_paths};
use super::tokenizer::{PROMPT_TOKENS, tiny_tokenizer_json, tiny_vocabulary};
use super::umt5::Umt5Config;
use super::vae::{VaeConfig, VaeVersion};

pub use super::kind::WanKind;

/// Paths that [`init_tiny`] returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TinyFiles {
    /// `wan22_paths.json`: the value of `model_paths`.
    pub model_paths: PathBuf,
    /// Directory of `tokenizer.json`: the value of `tokenizer_path`.
    pub tokenizer: PathBuf,
}

/// Writes a checkpoint of `kind` with weights drawn from `seed` into `directory`, which is created if it is missing.
/// Existing files are overwritten; `wan22_paths.json` is written last.
pub fn init_tiny(directory: impl AsRef<Path>, kind: WanKind, seed: u64) -> Result<TinyFiles> {
    let directory = directory.as_ref();
    let (noise, config) = (Noise::new(seed), dit_config(kind));
    let weights = |expert| dit_state(&noise, &config, expert);
    let mut listed = write_experts(directory, kind, &config, PROMPT_TOKENS, weights)?;
    save(&directory.join(T5), &umt5_state(&noise, &umt5_config())?)?;
    listed.push(T5.into());
    let vae = format!("{}.safetensors", kind.vae_file());
    save(&directory.join(&vae), &vae_state(kind, seed)?)?;
    listed.push(vae);
    if kind.has_clip() {
        save(&directory.join(CLIP), &clip_state(&noise, &clip_config())?)?;
        listed.push(CLIP.into());
    }
    let tokenizer = directory.join("google/umt5-xxl");
    make_directory(&tokenizer)?;
    write(&tokenizer.join("tokenizer.json"), &tiny_tokenizer_json())?;
    Ok(TinyFiles { model_paths: write_paths(directory, &listed)?, tokenizer })
}

/// Submits the small checkpoint of a kind to the inventory.
macro_rules! submit {
    ($kind:expr, $name:literal, $about:literal) => {
        roll_core::inventory::submit! {
            TinyCheckpoint {
                kind: $name,
                about: $about,
                write: |directory, seed| Ok(init_tiny(directory, $kind, seed)?.lines()),
            }
        }
    };
}

submit!(WanKind::I2v, "i2v", "Image to video, two experts, 16 latent channels");
submit!(WanKind::T2v, "t2v", "Text to video, two experts, 16 latent channels");
submit!(WanKind::Ti2v, "ti2v", "Text and image to video, one expert, 48 latent channels");
submit!(
    WanKind::I2v21,
    "i2v21",
    "Image to video as in Wan2.1: one expert, 16 latent channels, and a CLIP image encoder"
);

impl TinyFiles {
    /// The lines that `roll init-tiny` prints.
    fn lines(&self) -> Vec<String> {
        vec![
            format!("model.model_paths     {}", self.model_paths.display()),
            format!("model.tokenizer_path  {}", self.tokenizer.display()),
            RANDOM_WEIGHTS.into(),
        ]
    }
}

// File names of the official repositories.
const T5: &str = "models_t5_umt5-xxl-enc-bf16.safetensors";
const CLIP: &str = "models_clip_open-clip-xlm-roberta-large-vit-huge-14-onlyvisual.safetensors";

/// Standard deviation of the CLIP encoder's class token and positions. Patch embeddings have a deviation of about 1.
const CLIP_POSITION_DEVIATION: f32 = 0.3;
/// Factor of the weights of the VAE's last layer, with which few pixels are clamped.
const LAST_LAYER_FACTOR: f32 = 0.6;

/// The sizes of the transformer: as small as the network allows, with the channels of the real model.
pub fn dit_config(kind: WanKind) -> DitConfig {
    let (in_channels, out_channels) = kind.channels();
    DitConfig {
        dim: 64,
        in_channels,
        out_channels,
        patch: [1, 2, 2],
        text_dim: umt5_config().dim,
        freq_dim: 256,
        ffn_dim: 128,
        layers: 2,
        heads: 2,
        image_dim: kind.has_clip().then(|| clip_config().dim),
    }
}

/// The sizes of the CLIP image encoder: one head of the official width, and four patches.
fn clip_config() -> ClipConfig {
    ClipConfig { dim: 80, patch: 14, grid: 2, ffn_dim: 160, layers: 2, heads: 1 }
}

/// The sizes of the text encoder.
fn umt5_config() -> Umt5Config {
    Umt5Config { vocab: tiny_vocabulary(), dim: 32, attention_dim: 32, ffn_dim: 64, heads: 4, buckets: 32, layers: 2 }
}

/// The sizes of the VAE: few channels, with the latents and strides of the real VAE.
pub fn vae_config(kind: WanKind) -> VaeConfig {
    let (version, dim, z_dim) = match kind {
        WanKind::I2v | WanKind::T2v | WanKind::I2v21 => (VaeVersion::V2_1, 6, 16),
        WanKind::Ti2v => (VaeVersion::V2_2, 4, 48),
    };
    VaeConfig {
        version,
        encoder_dim: dim,
        decoder_dim: dim,
        z_dim,
        dim_mult: vec![1, 2, 4, 4],
        num_res_blocks: 2,
        temporal_downsample: vec![false, true, true],
    }
}

/// A VAE with random weights. The last layer's weights are scaled by [`LAST_LAYER_FACTOR`].
fn vae_state(kind: WanKind, seed: u64) -> Result<StateDict> {
    let mut state = vae_config(kind).random_state(seed)?;
    if let Some(last) = state.get_mut("decoder.head.2.weight") {
        let smaller = last.f32s()?.iter().map(|v| LAST_LAYER_FACTOR * v).collect();
        *last = Tensor::new::<f32>(smaller, last.shape().to_vec())?;
    }
    Ok(state)
}

// Numbers of networks for `drawn_state`. The transformers have 0 and 1, by the expert.
const T5_NETWORK: u64 = 2;
const CLIP_NETWORK: u64 = 3;

/// The weights of a transformer. Every linear layer preserves the variance of its input, so the velocity is of order
/// one.
fn dit_state(noise: &Noise, config: &DitConfig, expert: u64) -> Result<StateDict> {
    let deviation_of_modulation = 1.0 / (config.dim as f32).sqrt();
    drawn_state(noise, expert, &config.weights(), |key, shape| match key {
        _ if key.ends_with("modulation") => (0.0, deviation_of_modulation),
        _ if key.contains("norm") && key.ends_with("weight") => (1.0, SMALL_DEVIATION),
        _ if key.ends_with("bias") => (0.0, SMALL_DEVIATION),
        _ => (0.0, preserving_deviation(shape)),
    })
}

/// The weights of the CLIP image encoder.
fn clip_state(noise: &Noise, config: &ClipConfig) -> Result<StateDict> {
    drawn_state(noise, CLIP_NETWORK, &config.weights(), |key, shape| match key {
        _ if key.contains("norm") && key.ends_with("weight") => (1.0, SMALL_DEVIATION),
        _ if key.ends_with("bias") => (0.0, SMALL_DEVIATION),
        _ if key.ends_with("embedding") => (0.0, CLIP_POSITION_DEVIATION),
        _ => (0.0, preserving_deviation(shape)),
    })
}

/// The weights of the text encoder, in bf16, as the file's name says. T5 does not scale its attention scores, so the
/// query weights are smaller.
fn umt5_state(noise: &Noise, config: &Umt5Config) -> Result<StateDict> {
    let head_dim = (config.attention_dim / config.heads) as f32;
    let state = drawn_state(noise, T5_NETWORK, &config.weights(), |key, shape| match key {
        _ if key.contains("norm") => (1.0, SMALL_DEVIATION),
        _ if key.contains("embedding") => (0.0, 1.0),
        _ if key.ends_with("attn.q.weight") => (0.0, preserving_deviation(shape) / head_dim.sqrt()),
        _ => (0.0, preserving_deviation(shape)),
    })?;
    state.into_iter().map(|(key, tensor)| Ok((key, tensor.to_float(DType::Bf16)?))).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{Adapter, Conditioning, Grad, Purpose, Timestep};

    use super::super::clip::Clip;
    use super::super::components::{Component, heads};
    use super::super::dit::Dit;
    use super::super::paths::ComponentFiles;
    use super::super::tokenizer::Tokenizer;
    use super::super::umt5::Umt5;
    use super::super::vae::{Chunking, Vae};
    use super::*;

    fn deviation(values: &[f32]) -> f64 {
        (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
    }

    #[test]
    fn velocities_and_embeddings_of_each_kind_are_of_order_one() {
        for (kind, experts, channels, vae) in [
            (WanKind::I2v, 2, 20, Component::Vae21),
            (WanKind::T2v, 2, 0, Component::Vae21),
            (WanKind::Ti2v, 1, 0, Component::Vae22),
            (WanKind::I2v21, 1, 20, Component::Vae21),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let written = init_tiny(dir.path(), kind, 1).unwrap();
            let files = ComponentFiles::from_json(&written.model_paths).unwrap();
            assert_eq!(1 + usize::from(files.dit2.is_some()), experts);
            assert_eq!(files.vae_kind, vae);
            assert_eq!(files.tokenizer.as_deref(), Some(written.tokenizer.join("tokenizer.json").as_path()));

            let device = roll_backends::device("flex").unwrap();
            let ids = Tokenizer::load(&written.tokenizer).unwrap().encode("a man talks", PROMPT_TOKENS).unwrap();
            let text_encoder = Umt5::streamed(files.text_encoder.as_ref().unwrap(), &device).unwrap();
            let context = text_encoder.encode(&ids, PROMPT_TOKENS).unwrap();
            let order = deviation(&context.f32s().unwrap()[..ids.len() * 32]);
            assert!((0.3..3.0).contains(&order), "text embedding {order}");

            assert_eq!(heads(&files.dit), Some(2));
            let state = files.dit.all().unwrap();
            let dit = Dit::new(&state, heads(&files.dit), burn_tensor::DType::F32, &device).unwrap();
            assert_eq!(dit.config(), &dit_config(kind));
            let c = dit.config().out_channels;
            let noise = Noise::new(2);
            let latents = noise.normal(Purpose::Synthetic, 0, 0, &[c, 3, 8, 8]).unwrap();
            let extra = noise.normal(Purpose::Synthetic, 0, 1, &[channels, 3, 8, 8]).unwrap();
            let picture = noise.normal(Purpose::Synthetic, 0, 2, &[3, 64, 64]).unwrap();
            let clip = files.clip.as_ref().map(|file| Clip::streamed(file, None, &device).unwrap());
            assert_eq!(clip.is_some(), kind.has_clip());
            let conditioning = Conditioning {
                context,
                channels: (channels > 0).then_some(extra),
                image_tokens: clip.map(|clip| clip.encode(&picture).unwrap()),
                first_frame: None,
                latent_shape: [c, 3, 8, 8],
            };
            let (velocity, _) =
                dit.velocity(&latents, Timestep(900.0), &conditioning, Adapter::Off, Grad::Skip).unwrap();
            let order = deviation(velocity.f32s().unwrap());
            assert!((0.3..3.0).contains(&order), "{kind:?}: velocity {order}");
        }
    }

    #[test]
    fn files_depend_on_the_seed_and_the_expert() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        init_tiny(a.path(), WanKind::I2v, 7).unwrap();
        init_tiny(b.path(), WanKind::I2v, 7).unwrap();
        let read = |dir: &Path, name: &str| std::fs::read(dir.join(name)).unwrap();
        let names = ["high_noise_model", "low_noise_model"]
            .map(|folder| format!("{folder}/diffusion_pytorch_model.safetensors"));
        for name in names.iter().map(String::as_str).chain([T5, "Wan2.1_VAE.safetensors", "wan22_paths.json"]) {
            assert_eq!(read(a.path(), name), read(b.path(), name), "{name}");
        }
        assert_ne!(read(a.path(), &names[0]), read(a.path(), &names[1]));
        init_tiny(b.path(), WanKind::I2v, 8).unwrap();
        assert_ne!(read(a.path(), T5), read(b.path(), T5));
    }

    #[test]
    fn decoded_frames_are_neither_clamped_nor_blank() {
        for kind in [WanKind::I2v, WanKind::Ti2v] {
            let dir = tempfile::tempdir().unwrap();
            let files = ComponentFiles::from_json(init_tiny(dir.path(), kind, 1).unwrap().model_paths).unwrap();
            let device = roll_backends::device("flex").unwrap();
            let vae = Vae::load(&files.vae.all().unwrap(), &device).unwrap();
            assert_eq!(vae.config(), &vae_config(kind));
            let latents = Noise::new(2).normal(Purpose::Synthetic, 0, 0, &[vae_config(kind).z_dim, 2, 4, 4]).unwrap();
            let (frames, _) = vae.decode(&latents, &Chunking::default(), Grad::Skip).unwrap();
            let frames = frames.f32s().unwrap();
            let outside = frames.iter().filter(|v| v.abs() > 1.0).count() as f64 / frames.len() as f64;
            assert!((0.05..1.0).contains(&deviation(frames)), "{kind:?}: {}", deviation(frames));
            assert!(outside < 0.2, "{kind:?}: {outside} of the pixels are outside [-1, 1]");
        }
    }
}
