//! Writes a small Z-Image checkpoint with random weights, in the layout of the published diffusers directories, for
//! trying a configuration and for tests.

use std::path::Path;

use roll_causal_lm::LmConfig;
use roll_core::{DType, Error, Noise, Result, StateDict};
use roll_network::byte_level;
use roll_network::new_checkpoint::{
    RANDOM_WEIGHTS, SMALL_DEVIATION, TinyCheckpoint, drawn_state, make_directory, preserving_deviation, save, write,
};
use serde_json::{Value, json};

use crate::dit::{DitConfig, PATCH};
use crate::vae::VaeConfig;

roll_core::inventory::submit! {
    TinyCheckpoint {
        kind: "z_image",
        about: "Text to picture as in Z-Image: a diffusers directory, 16 latent channels",
        write: |directory, seed| {
            init_tiny(directory, seed)?;
            Ok(vec![format!("model.model_path      {}", directory.display()), RANDOM_WEIGHTS.into()])
        },
    }
}

/// The special tokens of Qwen3's chat template.
const SPECIAL_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// Shift of the schedule, that of Z-Image-Turbo.
const SHIFT: f64 = 3.0;
/// Base of the rotary frequencies of the published transformers.
const ROPE_THETA: f64 = 256.0;
/// Largest positions of the three axes in the published `config.json`.
const AXES_LENS: [usize; 3] = [1536, 512, 512];
/// Longest sequence of the text encoder, in tokens.
const CONTEXT: usize = 1024;

// Numbers of networks for `drawn_state`. The VAE draws from its own purpose.
const DIT_NETWORK: u64 = 0;
const TEXT_NETWORK: u64 = 1;

/// Sizes and weights of the three networks of a checkpoint, and the words of its tokenizer.
pub struct Networks {
    /// The sizes of the transformer.
    pub dit: DitConfig,
    /// The weights of the transformer, diffusers names.
    pub dit_state: StateDict,
    /// The sizes of the autoencoder.
    pub vae: VaeConfig,
    /// The weights of the autoencoder, diffusers names.
    pub vae_state: StateDict,
    /// The `config.json` of the text encoder, a Qwen3.
    pub text: Value,
    /// The weights of the text encoder, Hugging Face's names.
    pub text_state: StateDict,
    /// Texts that are one token each, besides the bytes and the special tokens.
    pub words: Vec<String>,
}

impl Networks {
    /// Writes a diffusers directory, which is created if it is missing. Existing files are overwritten;
    /// `model_index.json` is written last.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub fn write(&self, directory: &Path) -> Result<()> {
        let part = |name: &str, files: &[(&str, Value)]| {
            let folder = directory.join(name);
            make_directory(&folder)?;
            files.iter().try_for_each(|(file, contents)| write(&folder.join(file), &format!("{contents:#}\n")))
        };
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        part("scheduler", &[("scheduler_config.json", scheduler_json())])?;
        part(
            "tokenizer",
            &[
                ("tokenizer.json", byte_level::tokenizer_json(&SPECIAL_TOKENS, &words)),
                ("tokenizer_config.json", tokenizer_config_json()),
            ],
        )?;
        part("text_encoder", &[("config.json", self.text.clone())])?;
        save(&directory.join("text_encoder/model.safetensors"), &self.text_state)?;
        part("vae", &[("config.json", vae_json(&self.vae))])?;
        save(&directory.join("vae/diffusion_pytorch_model.safetensors"), &self.vae_state)?;
        part("transformer", &[("config.json", dit_json(&self.dit))])?;
        save(&directory.join("transformer/diffusion_pytorch_model.safetensors"), &self.dit_state)?;
        part(".", &[("model_index.json", index_json())])
    }
}

/// Number of ids of a tokenizer with these further words.
pub fn vocabulary(words: usize) -> usize {
    byte_level::BYTES + SPECIAL_TOKENS.len() + words
}

/// Writes a checkpoint with weights drawn from `seed` into `directory`, which is created if it is missing.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn init_tiny(directory: impl AsRef<Path>, seed: u64) -> Result<()> {
    let noise = Noise::new(seed);
    let (dit, vae) = (dit_config(), vae_config());
    let text = text_json(vocabulary(0), TEXT_DIM, 2 * TEXT_DIM, 3);
    let text_config = LmConfig::parse(text.to_string().as_bytes()).map_err(Error::Misuse)?;
    let networks = Networks {
        dit_state: dit_state(&noise, &dit)?,
        vae_state: vae.random_state(seed)?,
        text_state: text_state(&noise, &text_config)?,
        dit,
        vae,
        text,
        words: Vec::new(),
    };
    networks.write(directory.as_ref())
}

/// Width of the text encoder.
const TEXT_DIM: usize = 32;

/// The sizes of the transformer: a width that diffusers can load, with the channels of the real model.
pub fn dit_config() -> DitConfig {
    sized(64, 2, 2, TEXT_DIM)
}

/// The sizes of a transformer. What diffusers hard-codes has its values: frequencies, hidden width of the time
/// embedding, and a modulation no wider than the residual stream.
pub fn sized(dim: usize, heads: usize, layers: usize, text_dim: usize) -> DitConfig {
    const MODULATION: usize = 256;
    let head_dim = dim / heads;
    DitConfig {
        dim,
        channels: 16,
        text_dim,
        freq_dim: 256,
        time_dim: 1024,
        modulation_dim: dim.min(MODULATION),
        ffn_dim: dim * 8 / 3,
        layers,
        noise_refiners: 1,
        context_refiners: 1,
        heads,
        axes: [head_dim / 4, head_dim / 8 * 3, head_dim / 8 * 3],
    }
}

/// The sizes of the VAE: few channels, with the latents and the stride of the real VAE.
pub fn vae_config() -> VaeConfig {
    VaeConfig {
        block_out_channels: vec![8, 8, 16, 16],
        layers_per_block: 1,
        norm_num_groups: 4,
        ..VaeConfig::default()
    }
}

/// The weights of a transformer. Every linear layer preserves the variance of its input, so the velocity is of order
/// one.
fn dit_state(noise: &Noise, config: &DitConfig) -> Result<StateDict> {
    drawn_state(noise, DIT_NETWORK, &config.weights(), |key, shape| match key {
        _ if key.ends_with("pad_token") => (0.0, 1.0),
        _ if shape.len() == 1 && key.ends_with("weight") => (1.0, SMALL_DEVIATION),
        _ if key.ends_with("bias") => (0.0, SMALL_DEVIATION),
        _ => (0.0, preserving_deviation(shape)),
    })
}

/// The weights of the text encoder, in bf16 as published.
fn text_state(noise: &Noise, config: &LmConfig) -> Result<StateDict> {
    let state = drawn_state(noise, TEXT_NETWORK, &config.weights(), |key, shape| match key {
        _ if shape.len() == 1 => (1.0, SMALL_DEVIATION),
        _ if key.contains("embed_tokens") => (0.0, 1.0),
        _ => (0.0, preserving_deviation(shape)),
    })?;
    state.into_iter().map(|(key, tensor)| Ok((key, tensor.to_float(DType::Bf16)?))).collect()
}

/// The `config.json` of a Qwen3 with heads of 16, of which two share keys and values.
pub fn text_json(vocabulary: usize, dim: usize, ffn_dim: usize, layers: usize) -> Value {
    const HEAD_DIM: usize = 16;
    let heads = dim / HEAD_DIM;
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": ffn_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads.div_ceil(2),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": false,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": true,
        "max_position_embeddings": CONTEXT,
        "torch_dtype": "bfloat16",
    })
}

/// The `config.json` of diffusers' `ZImageTransformer2DModel`.
fn dit_json(config: &DitConfig) -> Value {
    json!({
        "_class_name": "ZImageTransformer2DModel",
        "all_patch_size": [PATCH[1]],
        "all_f_patch_size": [1],
        "in_channels": config.channels,
        "dim": config.dim,
        "n_layers": config.layers,
        "n_refiner_layers": config.noise_refiners,
        "n_heads": config.heads,
        "n_kv_heads": config.heads,
        "norm_eps": 1e-5,
        "qk_norm": true,
        "cap_feat_dim": config.text_dim,
        "rope_theta": ROPE_THETA,
        "t_scale": 1000.0,
        "axes_dims": config.axes,
        "axes_lens": AXES_LENS,
    })
}

/// The `config.json` of diffusers' `AutoencoderKL`.
fn vae_json(config: &VaeConfig) -> Value {
    let stages = config.block_out_channels.len();
    json!({
        "_class_name": "AutoencoderKL",
        "act_fn": "silu",
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": config.latent_channels,
        "block_out_channels": config.block_out_channels,
        "layers_per_block": config.layers_per_block,
        "norm_num_groups": config.norm_num_groups,
        "down_block_types": vec!["DownEncoderBlock2D"; stages],
        "up_block_types": vec!["UpDecoderBlock2D"; stages],
        "mid_block_add_attention": true,
        "use_quant_conv": false,
        "use_post_quant_conv": false,
        "force_upcast": true,
        "sample_size": 1024,
        "scaling_factor": config.scaling_factor,
        "shift_factor": config.shift_factor,
    })
}

/// The `scheduler_config.json`.
fn scheduler_json() -> Value {
    json!({
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": SHIFT,
        "use_dynamic_shifting": false,
    })
}

/// The `tokenizer_config.json`. Its chat template is the part of Qwen3's that a prompt uses.
fn tokenizer_config_json() -> Value {
    let template = "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + \
                    '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
                    {%- if enable_thinking is defined and enable_thinking is false %}\
                    {{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}";
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "right",
        "chat_template": template,
    })
}

/// The `model_index.json` of diffusers' `ZImagePipeline`.
fn index_json() -> Value {
    json!({
        "_class_name": "ZImagePipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{Adapter, Conditioning, Grad, Purpose, Timestep};
    use roll_network::tokenizer::Tokenizer;
    use roll_network::weights::Checkpoint;

    use super::*;
    use crate::dit::Dit;
    use crate::text::{MAX_TOKENS, PromptEncoder, TextEncoder, read_config};
    use crate::vae::Vae;

    fn deviation(values: &[f32]) -> f64 {
        (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
    }

    #[test]
    fn features_velocities_and_pictures_of_a_written_checkpoint_are_of_order_one() {
        let dir = tempfile::tempdir().unwrap();
        init_tiny(dir.path(), 1).unwrap();
        let device = roll_backends::device("flex").unwrap();
        let weights = |name: &str| Checkpoint::open(dir.path().join(name)).unwrap();
        let dtype = burn_tensor::DType::F32;

        let config = read_config(&dir.path().join("text_encoder/config.json")).unwrap();
        let encoder =
            TextEncoder::streamed(config, &weights("text_encoder/model.safetensors"), dtype, &device).unwrap();
        let tokenizer = Tokenizer::load(&dir.path().join("tokenizer/tokenizer.json")).unwrap();
        assert_eq!(tokenizer.vocabulary(), vocabulary(0));
        let prompts = PromptEncoder { tokenizer, encoder, max_tokens: MAX_TOKENS };
        let features = prompts.encode(&["a portrait".to_string()]).unwrap().remove(0);
        assert!((0.3..6.0).contains(&deviation(features.f32s().unwrap())), "{}", deviation(features.f32s().unwrap()));

        let state = weights("transformer/diffusion_pytorch_model.safetensors").all().unwrap();
        let dit = Dit::new(&state, None, dtype, &device).unwrap();
        assert_eq!(dit.config(), &dit_config());
        let latents = Noise::new(2).normal(Purpose::Synthetic, 0, 0, &[16, 1, 8, 8]).unwrap();
        let conditioning = Conditioning {
            context: features,
            channels: None,
            image_tokens: None,
            first_frame: None,
            latent_shape: [16, 1, 8, 8],
        };
        let (velocity, _) = dit.velocity(&latents, Timestep(900.0), &conditioning, Adapter::Off, Grad::Skip).unwrap();
        assert!((0.3..3.0).contains(&deviation(velocity.f32s().unwrap())), "{}", deviation(velocity.f32s().unwrap()));

        let json = std::fs::read_to_string(dir.path().join("vae/config.json")).unwrap();
        let config = VaeConfig::parse(&json, Path::new("config.json")).unwrap();
        assert_eq!(config, vae_config());
        let state = weights("vae/diffusion_pytorch_model.safetensors").all().unwrap();
        let vae = Vae::new(config, &state, &device).unwrap();
        let (picture, _) = vae.decode(&latents, Grad::Skip).unwrap();
        let pixels = picture.f32s().unwrap();
        assert!((0.05..1.5).contains(&deviation(pixels)), "{}", deviation(pixels));
    }

    #[test]
    fn files_depend_on_the_seed_alone() {
        let dirs = [1, 1, 2].map(|seed| {
            let dir = tempfile::tempdir().unwrap();
            init_tiny(dir.path(), seed).unwrap();
            dir
        });
        for part in ["transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model"] {
            let [a, b, c] =
                dirs.each_ref().map(|dir| std::fs::read(dir.path().join(format!("{part}.safetensors"))).unwrap());
            assert!(a == b && a != c, "{part}");
        }
    }
}
