//! Writes a small Qwen2-VL with random weights, in the layout of the published directories, for trying a configuration and
//! for tests. It is of a size that learns in minutes on two cores.

use std::path::Path;

use roll_core::{Error, Noise, Result, StateDict, Tensor};
use roll_network::byte_level;
use roll_network::new_checkpoint::{
    RANDOM_WEIGHTS, SMALL_DEVIATION, TinyCheckpoint, drawn_state, make_directory, preserving_deviation, save, write,
};
use serde_json::{Value, json};

use super::config::{PATCH_EMBEDDING, QwenVlConfig, VisionConfig};

roll_core::inventory::submit! {
    TinyCheckpoint {
        kind: "qwen_vl",
        about: "A language model that sees pictures, as in Qwen2-VL: a Hugging Face directory, patches of 14 x 14 pixels",
        write: |directory, seed| {
            init_tiny(directory, seed)?;
            Ok(vec![format!("model.model_path      {}", directory.display()), RANDOM_WEIGHTS.into()])
        },
    }
}

/// The special tokens of Qwen2-VL. Their ids follow those of the bytes.
const SPECIAL_TOKENS: [&str; 8] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
];
/// Widths of the language model and of the vision tower.
const DIM: usize = 64;
/// Side of a patch, and patches along each side of a square, as published.
const PATCH: usize = 14;
const MERGE: usize = 2;
/// Bounds of a picture in pixels: from 4 to 256 squares.
const PIXELS: [usize; 2] = [56 * 56, 448 * 448];
/// Base of the rotary frequencies. The columns of a picture turn the slowest third of them: with a larger base, the few
/// columns of a small picture would have nearly equal angles.
const ROPE_THETA: f64 = 10.0;
/// Number of the network for `drawn_state`.
const NETWORK: u64 = 0;
/// Deviation of the embeddings, which are the output layer too: logits of order one, so that all tokens are likely.
const EMBEDDING_DEVIATION: f32 = 0.1;
/// What layers that add to the residual stream have of a deviation that preserves the variance.
const BRANCH: f32 = 0.3;

/// Turns in the form of ChatML, which the published models read.
const CHAT_TEMPLATE: &str = "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + \
                             '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ \
                             '<|im_start|>assistant\n' }}{%- endif %}";

/// Writes a checkpoint with weights drawn from `seed` into `directory`, which is created if it is missing.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn init_tiny(directory: &Path, seed: u64) -> Result<()> {
    let config = config_json();
    let parsed = QwenVlConfig::parse(config.to_string().as_bytes(), None).map_err(Error::Misuse)?;
    make_directory(directory)?;
    for (file, contents) in [
        ("config.json", config),
        ("generation_config.json", json!({"eos_token_id": [id("<|im_end|>"), id("<|endoftext|>")]})),
        ("preprocessor_config.json", preprocessor_json()),
        ("tokenizer.json", byte_level::tokenizer_json(&SPECIAL_TOKENS, &[])),
        ("tokenizer_config.json", tokenizer_config_json()),
    ] {
        write(&directory.join(file), &format!("{contents:#}\n"))?;
    }
    write(&directory.join("chat_template.jinja"), CHAT_TEMPLATE)?;
    save(&directory.join("model.safetensors"), &state(&Noise::new(seed), &parsed)?)
}

/// Id of a special token.
fn id(token: &str) -> usize {
    byte_level::BYTES + SPECIAL_TOKENS.iter().position(|special| *special == token).unwrap_or(0)
}

/// The weights. Every branch adds little to the residual stream at first, so that a picture's squares keep their colours
/// on the way to the language model.
fn state(noise: &Noise, config: &QwenVlConfig) -> Result<StateDict> {
    let mut shapes = config.vision.weights(config.text.dim);
    shapes.extend(config.text.weights());
    let branches = ["attn.proj.weight", "mlp.fc2.weight", "o_proj.weight", "down_proj.weight"];
    let mut state = drawn_state(noise, NETWORK, &shapes, |key, shape| match key {
        _ if key.ends_with("bias") => (0.0, SMALL_DEVIATION),
        _ if shape.len() == 1 => (1.0, SMALL_DEVIATION),
        _ if key.contains("embed_tokens") => (0.0, EMBEDDING_DEVIATION),
        _ if branches.iter().any(|branch| key.ends_with(branch)) => (0.0, BRANCH * preserving_deviation(shape)),
        _ => (0.0, preserving_deviation(shape)),
    })?;
    if let Some(drawn) = state.get(PATCH_EMBEDDING) {
        let smooth = smooth_filters(&config.vision, drawn)?;
        state.insert(PATCH_EMBEDDING.into(), smooth);
    }
    Ok(state)
}

/// Filters of patches that are constant in each quarter of a colour, as the coarse ones of trained towers: the first
/// drawn weight of a quarter is that of all its pixels.
fn smooth_filters(vision: &VisionConfig, drawn: &Tensor) -> Result<Tensor> {
    let (patch, half) = (vision.patch, vision.patch.div_ceil(2));
    let values = drawn.f32s()?;
    let quarter = |at: usize| at / half * half;
    let smooth = (0..values.len()).map(|i| {
        let (plane, y, x) = (i / (patch * patch), i / patch % patch, i % patch);
        // Both frames of a picture are the same.
        let first_frame = plane / vision.patch_frames * vision.patch_frames;
        values[(first_frame * patch + quarter(y)) * patch + quarter(x)]
    });
    // The shape of the convolution in published files.
    let shape = [drawn.shape()[0], 3, vision.patch_frames, patch, patch];
    Tensor::new(smooth.collect::<Vec<f32>>(), shape)
}

/// The `config.json` in the layout of the published Qwen2-VL.
fn config_json() -> Value {
    json!({
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": byte_level::BYTES + SPECIAL_TOKENS.len(),
        "hidden_size": DIM,
        "intermediate_size": 2 * DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": true,
        "torch_dtype": "float32",
        "eos_token_id": id("<|im_end|>"),
        "bos_token_id": id("<|endoftext|>"),
        "vision_start_token_id": id("<|vision_start|>"),
        "vision_end_token_id": id("<|vision_end|>"),
        "vision_token_id": id("<|vision_pad|>"),
        "image_token_id": id("<|image_pad|>"),
        "video_token_id": id("<|video_pad|>"),
        "vision_config": {
            "depth": 2, "embed_dim": DIM, "num_heads": 4, "mlp_ratio": 2, "hidden_size": DIM, "in_channels": 3,
            "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "hidden_act": "quick_gelu",
        },
    })
}

/// The `preprocessor_config.json`, with the colours' statistics of the published one.
fn preprocessor_json() -> Value {
    let [min_pixels, max_pixels] = PIXELS;
    json!({
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "image_mean": [0.481_454_66, 0.457_827_5, 0.408_210_73],
        "image_std": [0.268_629_54, 0.261_302_58, 0.275_777_11],
    })
}

/// The `tokenizer_config.json`.
fn tokenizer_config_json() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
    })
}
