//! Recognises the networks of Wan by the keys of their weights, renames the keys to the official ones, and reads what
//! the weights do not contain: the number of heads, the length of prompts.

use burn_tensor::DType;
use roll_backends::EightBits;
use roll_network::lora::is_lora_key;
use roll_network::names::{self, Direction};
use roll_network::weights::{Checkpoint, WeightsError, is_auxiliary};

use super::dit::DitConfig;

/// A kind of network in the Wan family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Component {
    /// Transformer: the only one or one of two experts.
    Dit,
    /// VAE of Wan2.1 and of Wan2.2-A14B: 16 channels, stride 4 x 8 x 8.
    Vae21,
    /// VAE of Wan2.2-TI2V-5B: 48 channels, stride 4 x 16 x 16.
    Vae22,
    /// UMT5 text encoder.
    TextEncoder,
    /// CLIP image encoder of Wan2.1 I2V.
    Clip,
    /// A LoRA adapter.
    Lora,
}

impl std::fmt::Display for Component {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Dit => "transformer",
            Self::Vae21 => "Wan2.1 VAE",
            Self::Vae22 => "Wan2.2 VAE",
            Self::TextEncoder => "UMT5 text encoder",
            Self::Clip => "CLIP image encoder",
            Self::Lora => "LoRA adapter",
        })
    }
}

/// Prefixes that training code and other programs put before all keys.
const WRAPPERS: &[&str] =
    &["state_dict.", "model_state.", "model.diffusion_model.", "diffusion_model.", "model.", "module."];

/// Components, how their keys are named, and the keys that identify them. All keys of a row must be present. The first
/// row that fits decides.
const SIGNATURES: &[(Component, Naming, &[&str])] = &[
    (Component::Clip, Naming::Official, &["visual.patch_embedding.weight", "visual.pre_norm.weight"]),
    (Component::Dit, Naming::Official, &["patch_embedding.weight", "head.modulation"]),
    (Component::Dit, Naming::Other, &["patch_embedding.weight", "condition_embedder.time_proj.weight"]),
    (Component::TextEncoder, Naming::Official, &["token_embedding.weight", "blocks.0.attn.q.weight"]),
    (Component::TextEncoder, Naming::Other, &["encoder.block.0.layer.0.SelfAttention.q.weight"]),
    (Component::Vae22, Naming::Official, &["conv2.weight", "encoder.downsamples.0.downsamples.0.residual.2.weight"]),
    (Component::Vae21, Naming::Official, &["conv2.weight", "encoder.downsamples.0.residual.2.weight"]),
    (Component::Vae22, Naming::Other, &["post_quant_conv.weight", "encoder.down_blocks.0.resnets.0.conv1.weight"]),
    (Component::Vae21, Naming::Other, &["post_quant_conv.weight", "encoder.down_blocks.0.conv1.weight"]),
];

/// Which names a checkpoint's keys have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Naming {
    /// The names of the official repositories.
    Official,
    /// The names of diffusers or transformers.
    Other,
}

/// Recognises the network in `checkpoint`, and returns the checkpoint under official names. Prefixes such as
/// `state_dict.` are removed, names of diffusers and transformers are translated, and the scales of eight-bit weights
/// are left out.
///
/// If names are translated, fails on a key without an official name. A checkpoint with official names may have further
/// keys, which are kept; [`dit_config`] refuses the keys of a variant of the transformer.
pub fn recognise(checkpoint: Checkpoint) -> Result<(Component, Checkpoint), WeightsError> {
    if checkpoint.keys().any(is_lora_key) {
        return Ok((Component::Lora, checkpoint));
    }
    let checkpoint = without_scales(without_wrappers(checkpoint)?)?;
    let signature = SIGNATURES.iter().find(|(_, _, keys)| keys.iter().all(|key| checkpoint.contains(key)));
    let Some(&(component, naming, _)) = signature else {
        let found: Vec<String> = checkpoint.keys().take(3).map(|k| format!("`{k}`")).collect();
        let found = if found.is_empty() { "none at all".into() } else { found.join(", ") };
        return Err(WeightsError::Unrecognised {
            path: checkpoint.path().into(),
            expected: "the weights of a Wan transformer, VAE, UMT5 or CLIP encoder",
            found,
        });
    };
    match naming {
        Naming::Official => Ok((component, checkpoint)),
        Naming::Other => Ok((component, translate(checkpoint, component)?)),
    }
}

/// The sizes of a transformer. Without `heads`, the number of attention heads is read by [`heads`].
pub fn dit_config(checkpoint: &Checkpoint, heads: Option<usize>) -> roll_core::Result<DitConfig> {
    checkpoint.keys().try_for_each(|key| checkpoint.refuse_packed(key))?;
    DitConfig::from_shapes(&checkpoint.shapes(), heads.or_else(|| self::heads(checkpoint)))
}

/// The number of attention heads of a transformer: `num_heads` (official) or `num_attention_heads` (diffusers) in the
/// `config.json` next to the file, or `num_heads` in its metadata. The weights themselves do not contain it.
pub fn heads(checkpoint: &Checkpoint) -> Option<usize> {
    configured_number(checkpoint, &["num_heads", "num_attention_heads"])
}

/// The number under one of `keys` in the `config.json` next to the file, or under the first of `keys` in the file's
/// metadata.
fn configured_number(checkpoint: &Checkpoint, keys: &[&str]) -> Option<usize> {
    let config = checkpoint.config_json();
    let in_config = |key: &&str| usize::try_from(config.as_ref()?.get(*key)?.as_u64()?).ok();
    keys.iter().find_map(in_config).or_else(|| checkpoint.metadata().get(keys[0])?.parse().ok())
}

/// The dtype of a transformer's dense weights on the device: bf16 if the file has bf16, f32 otherwise.
pub fn dit_dtype(checkpoint: &Checkpoint) -> DType {
    match checkpoint.info("blocks.0.self_attn.q.weight").and_then(|info| info.dtype) {
        Some(roll_core::DType::Bf16) => DType::BF16,
        _ => DType::F32,
    }
}

/// The format of the matrices of a transformer's blocks, if its file has them in eight bits.
pub fn eight_bits(checkpoint: &Checkpoint) -> Option<EightBits> {
    checkpoint.eight_bits("blocks.0.self_attn.q.weight")
}

/// The number of rows of the text embedding: `text_len` in the `config.json` next to the file or in its metadata.
pub fn text_len(checkpoint: &Checkpoint) -> Option<usize> {
    configured_number(checkpoint, &["text_len"]).filter(|n| *n > 0)
}

/// Removes the prefixes of [`WRAPPERS`] from all keys.
fn without_wrappers(mut checkpoint: Checkpoint) -> Result<Checkpoint, WeightsError> {
    while let Some(wrapper) = WRAPPERS.iter().find(|w| checkpoint.keys().any(|key| key.starts_with(*w))) {
        // Keys without the prefix are dropped: next to a wrapped dictionary there are only optimizer states, counters
        // and the like.
        checkpoint = checkpoint.rename(|key| key.strip_prefix(wrapper).map(str::to_string))?;
    }
    Ok(checkpoint)
}

/// Removes the scales of eight-bit weights: [`Checkpoint`] finds the scale of a weight by itself.
fn without_scales(checkpoint: Checkpoint) -> Result<Checkpoint, WeightsError> {
    if !checkpoint.keys().any(is_auxiliary) {
        return Ok(checkpoint);
    }
    checkpoint.rename(|key| (!is_auxiliary(key)).then(|| key.to_string()))
}

/// Renames the keys of diffusers or transformers to the official ones.
fn translate(checkpoint: Checkpoint, component: Component) -> Result<Checkpoint, WeightsError> {
    // transformers stores the embedding under two names; newer versions store it only under this second name.
    let second_name = "encoder.embed_tokens.weight";
    let has_both_names = component == Component::TextEncoder && checkpoint.contains("shared.weight");
    let rename = |key: &str| match component {
        _ if key == second_name => Some("token_embedding.weight".to_string()),
        Component::Dit => names::dit(key, Direction::ToOfficial),
        Component::Vae21 => names::vae_21(key, Direction::ToOfficial),
        Component::Vae22 => names::vae_22(key, Direction::ToOfficial),
        Component::TextEncoder => names::umt5(key, Direction::ToOfficial),
        Component::Clip | Component::Lora => Some(key.to_string()),
    };
    if let Some(key) = checkpoint.keys().find(|key| rename(key).is_none()) {
        let problem = format!("expected the keys of a {component} of diffusers or transformers, found `{key}`");
        return Err(WeightsError::invalid(checkpoint.path(), problem));
    }
    checkpoint.rename(|key| if has_both_names && key == second_name { None } else { rename(key) })
}
