//! Options of the model `z_image`.

use std::path::PathBuf;

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Result, When};
use roll_network::comma_list::{self, split};
use roll_network::lora::{AdapterSources, LoraRequest};
use roll_network::options::{KeepAttention, Placement, VaeDType};
use roll_network::precision::{ComputeDType, Products, WeightsDType};
use roll_network::trainable::{Trainable, check_alpha};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// Options of the model `z_image`. Those that `wan2_2` has mean the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ZImageOptions {
    /// Directory of Z-Image or Z-Image-Turbo as published (`transformer`, `vae`, `text_encoder`, `tokenizer`,
    /// `scheduler`), or the name of a published model, downloaded where it is missing: `Tongyi-MAI/Z-Image-Turbo`.
    pub model_path: Option<PathBuf>,
    /// The transformer: a file of diffusers or of ComfyUI, an index of shards, or a directory. Default: that of
    /// `model_path`.
    pub dit_path: Option<PathBuf>,
    /// The VAE, by the names of diffusers or of FLUX (`ae.safetensors`). Default: that of `model_path`.
    pub vae_path: Option<PathBuf>,
    /// The text encoder, a Qwen3: a file, an index of shards, or a directory. Default: that of `model_path`.
    pub text_encoder_path: Option<PathBuf>,
    /// The text encoder's `tokenizer.json`, or its directory. Default: that of `model_path`.
    pub tokenizer_path: Option<PathBuf>,
    /// List of the layers that carry the LoRA, as endings of their names: a YAML list or a text with commas. Default:
    /// the layers of `lora_checkpoint`, or `to_q,to_k,to_v,to_out.0,w1,w2,w3` without it.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub lora_target_modules: Option<String>,
    /// Rank of the LoRA; 0 trains every weight instead. Default: the rank of `lora_checkpoint`, or 32 without it.
    pub lora_rank: Option<usize>,
    /// Numerator of the LoRA's scale `lora_alpha / lora_rank`. Default: that of `lora_checkpoint`, or the rank without
    /// it.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lora_alpha: Option<f64>,
    /// LoRA to start from, in any convention: a file, a run (its newest checkpoint), or the directory of a checkpoint
    /// or of a PEFT adapter. The adapters of a list are added up, and `FILE=0.8` sets a strength. A file with all
    /// weights of the transformer replaces them, and every weight is trained.
    pub lora_checkpoint: Option<AdapterSources>,
    /// LoRA in the frozen weights, such as an adapter that undoes the distillation of Turbo during training: it is
    /// merged when the weights are read, and the trained LoRA comes on top and is saved alone. Named like
    /// `lora_checkpoint`.
    pub base_lora: Option<AdapterSources>,
    /// Recompute activations block by block in the backward pass instead of keeping them.
    pub use_gradient_checkpointing: bool,
    /// Recompute in the same way, but keep the inputs of the blocks in host memory until the backward pass.
    pub use_gradient_checkpointing_offload: bool,
    /// Keep the results of attention on the device until the backward pass, which then recomputes everything else of a
    /// block. `auto`: on a GPU whose memory is known, if those of all trained steps fit, by the estimate of `roll
    /// plan`; elsewhere `false`.
    pub keep_attention: KeepAttention,
    /// Dtype of frozen weights: `f32`, `bf16`, or `auto` (bf16 on GPUs, the file's dtype on the CPU). With `auto`, the
    /// time embedding and the final layer of an f32 file stay f32 on GPUs, and matrices that a file has in fp8 or int8,
    /// with scales, stay so. `int8` and `fp8` quantise the matrices of the blocks when they are loaded, with one scale
    /// per row: half the memory of bf16.
    pub weights_dtype: WeightsDType,
    /// Dtype of matrix products and attention: `f32`, or `bf16` accumulated in f32. `auto`: bf16 if the weights are
    /// bf16 and the device is a GPU. Embeddings, final layer, norms, residuals, the weights of adapters and gradients
    /// are always f32.
    pub compute_dtype: ComputeDType,
    /// Products with frozen fp8 weights (e4m3): `auto` decodes the weights and multiplies in `compute_dtype`; `fp8`
    /// rounds the other operand to fp8 as well, and sums in f32.
    pub products: Products,
    /// Location of the transformer's frozen weights: `resident` on the device; `streamed` from their files block by
    /// block; `host`: in host memory; `sharded` between the ranks. `auto` is resident unless the strategy requires
    /// otherwise.
    pub weight_store: Placement,
    /// Dtype of the VAE's decoder. With `bf16`, weights and activations are rounded and products accumulate in f32;
    /// latents, norms, attention, the layer that produces the picture, and the encoder stay f32.
    pub vae_dtype: VaeDType,
}

/// Rank of a LoRA that does not start from a file.
const DEFAULT_RANK: usize = 32;
/// Layers of a LoRA that does not start from a file.
const DEFAULT_TARGETS: &str = "to_q,to_k,to_v,to_out.0,w1,w2,w3";
/// Weights of the published transformers.
const WEIGHTS: u64 = 6_154_908_736;
/// Bytes per weight in full fine-tuning: parameter, gradient and two moments, all f32.
const TRAINED_BYTES: u64 = 16;

impl Default for ZImageOptions {
    fn default() -> Self {
        Self {
            model_path: None,
            dit_path: None,
            vae_path: None,
            text_encoder_path: None,
            tokenizer_path: None,
            lora_target_modules: None,
            lora_rank: None,
            lora_alpha: None,
            lora_checkpoint: None,
            base_lora: None,
            use_gradient_checkpointing: true,
            use_gradient_checkpointing_offload: false,
            keep_attention: KeepAttention::Auto,
            weights_dtype: WeightsDType::Auto,
            compute_dtype: ComputeDType::Auto,
            products: Products::Auto,
            weight_store: Placement::Auto,
            vae_dtype: VaeDType::Auto,
        }
    }
}

impl ZImageOptions {
    /// Fails on values that can only be mistakes.
    pub fn check(&self) -> Result<()> {
        check_alpha(self.lora_alpha)
    }

    /// The trained part if it does not start from a file.
    pub fn trainable(&self) -> Trainable {
        match self.lora_rank.unwrap_or(DEFAULT_RANK) {
            0 => Trainable::Full,
            rank => {
                Trainable::Lora { rank, alpha: self.lora_alpha.unwrap_or(rank as f64), targets: self.lora_targets() }
            }
        }
    }

    /// The layers of a LoRA that does not start from a file.
    pub fn lora_targets(&self) -> Vec<String> {
        split(self.lora_target_modules.as_deref().unwrap_or(DEFAULT_TARGETS))
    }

    /// The keys about the LoRA, to compare with its file.
    pub(crate) fn lora_request(&self) -> LoraRequest {
        let targets = self.lora_target_modules.as_deref().map(split);
        LoraRequest { rank: self.lora_rank, alpha: self.lora_alpha, targets }
    }

    /// The option `keep_attention`, or `false` if no block is recomputed, because the option has no effect then.
    pub(crate) fn effective_keep_attention(&self) -> KeepAttention {
        let recomputes_blocks = self.use_gradient_checkpointing || self.use_gradient_checkpointing_offload;
        if recomputes_blocks { self.keep_attention } else { KeepAttention::Of(false) }
    }
}

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Model, name: "z_image", idle: roll_network::trainable::IDLE_KEYS, more: Some(notes) }
}

/// Notes on keys of the section `model` that have no effect, and on the memory of full fine-tuning.
fn notes(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let of = |key: &str| config.value(&format!("model.{key}"));
    let is_false = |key: &str| of(key) == Some(&Json::Bool(false));
    let mut notes = Vec::new();
    if is_false("use_gradient_checkpointing") && is_false("use_gradient_checkpointing_offload") {
        notes.extend(config.idle(&[IdleKeys {
            keys: &["model.keep_attention"],
            when: When::Always,
            because: "without `model.use_gradient_checkpointing` nothing is recomputed",
        }]));
    }
    if of("lora_rank") == Some(&Json::from(0)) {
        notes.push(format!(
            "`model.lora_rank: 0`: every weight is trained, with {TRAINED_BYTES} bytes of parameters, gradient and \
             optimizer each (Z-Image: {} GB); `model.lora_rank: {DEFAULT_RANK}` trains a LoRA instead",
            WEIGHTS * TRAINED_BYTES / 1_000_000_000,
        ));
    }
    Ok(notes)
}
