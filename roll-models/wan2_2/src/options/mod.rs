//! Options of the Wan models.

mod memory;
mod model_paths;
mod notes;
mod vae;

use std::path::PathBuf;

use roll_core::{Error, Result, ResultExt};
use roll_network::comma_list::{self, split};
use roll_network::lora::{AdapterSources, LoraRequest};
use roll_network::precision::{ComputeDType, Products, WeightsDType};
use roll_network::trainable::{Trainable, check_alpha};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::vae::Tiling;

pub use self::memory::IdleExpert;
pub use self::model_paths::{ModelPaths, PathEntry};
pub use self::vae::{Checkpoints, TileSize};
pub use roll_network::options::{KeepAttention, Placement, VaeDType};

/// Options of the model `wan2_2`. Names and defaults follow the reference implementation where it has the option.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WanOptions {
    /// JSON file that lists the weight files (`wan22_paths.json`), a directory in the official or the diffusers layout,
    /// or the list itself: of files, globs, directories, and lists of the shards of one network.
    pub model_paths: Option<ModelPaths>,
    /// List of `ORG/NAME:PATTERN` entries: files in the Hugging Face cache. Missing files are downloaded.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub model_id_with_origin_paths: Option<String>,
    /// Directory of the UMT5 `tokenizer.json`.
    pub tokenizer_path: Option<PathBuf>,
    /// List of the experts that are trained: `dit` (high noise), `dit2` (low noise). Lists among these options are YAML
    /// lists or texts with commas. Default: the experts of `lora_checkpoint`, or `dit2` without it.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub trainable_models: Option<String>,
    /// List of the experts that carry the LoRA. Default: those of `trainable_models`.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub lora_base_model: Option<String>,
    /// List of the layers that carry the LoRA, as endings of their names. Default: the layers of `lora_checkpoint`, or
    /// `q,k,v,o,ffn.0,ffn.2` without it.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub lora_target_modules: Option<String>,
    /// Rank of the LoRA; 0 trains every weight of the experts instead. Default: the rank of `lora_checkpoint`, or 32
    /// without it.
    pub lora_rank: Option<usize>,
    /// Numerator of the LoRA's scale `lora_alpha / lora_rank`. Default: that of `lora_checkpoint`, or the rank without
    /// it.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lora_alpha: Option<f64>,
    /// LoRA to start from, in any convention: a file, a run (its newest checkpoint), or the directory of a checkpoint
    /// or of a PEFT adapter; `HIGH,LOW` or a map `{dit: HIGH, dit2: LOW}` for both experts. The adapters of a list are
    /// added up, and `FILE=0.8` sets a strength. A file with all weights of an expert replaces those of
    /// `model_paths`, and every weight is trained.
    pub lora_checkpoint: Option<AdapterSources>,
    /// LoRA in the frozen weights, such as a distillation LoRA for few steps: it is merged when the weights are read,
    /// and the trained LoRA comes on top and is saved alone. Named like `lora_checkpoint`: a file, `HIGH,LOW` or a map
    /// for two experts, a list, strengths. Differences of whole parameters (`.diff`, `.diff_b`, `.diff_m`) are merged,
    /// too. Weights that their file has in eight bits take none.
    pub base_lora: Option<AdapterSources>,
    /// Recompute activations block by block in the backward pass instead of keeping them.
    pub use_gradient_checkpointing: bool,
    /// Keep the inputs of the blocks in host memory until the backward pass: on a GPU whose memory is known, those of the
    /// passes that do not fit on it.
    pub use_gradient_checkpointing_offload: bool,
    /// Keep the results of self-attention on the device until the backward pass, which then recomputes everything else
    /// of a block. Faster where attention dominates; memory for each trained step: `layers x tokens x dim` numbers in the
    /// dtype of products (A14B, 81 frames of 480x480: 7.9 GB). `auto`: on a GPU whose memory is known, if those of all
    /// trained steps fit, by the estimate of `roll plan`; elsewhere `false`.
    pub keep_attention: KeepAttention,
    /// List of the inputs in addition to the prompt: `input_image`, `end_image`.
    #[serde(deserialize_with = "comma_list::required")]
    #[schemars(schema_with = "comma_list::required_schema")]
    pub extra_inputs: String,
    /// Dtype of frozen weights: `f32`, `bf16`, or `auto` (bf16 on GPUs, the file's dtype on the CPU). With `auto`, the
    /// time embedding and the head of an f32 file stay f32 on GPUs, and matrices that a file has in fp8 or int8, with
    /// scales, stay so. `int8` and `fp8` quantise the matrices of the blocks when they are loaded, with one scale per
    /// row: half the memory of bf16.
    pub weights_dtype: WeightsDType,
    /// Dtype of matrix products and attention: `f32`, or `bf16` accumulated in f32. `auto`: bf16 if the weights are
    /// bf16 and the device is a GPU. Embeddings, head, norms, residuals, the weights of adapters and gradients are
    /// always f32. With bf16, the inputs of blocks that are kept for the backward pass are bf16; on `libtorch-cuda`
    /// also the values between the layers of a block.
    pub compute_dtype: ComputeDType,
    /// Products with frozen fp8 weights (e4m3): `auto` decodes the weights and multiplies in `compute_dtype`. `fp8`
    /// rounds the other operand to fp8 as well, with one scale per row (token), and sums in f32, both for values and for
    /// their gradients. The products of the LoRA, and attention, stay in `compute_dtype`. `fp8` needs
    /// `weights_dtype: fp8` or files in e4m3, and `libtorch-cuda` on a GPU of compute capability 8.9 or newer; the CPU
    /// emulates it, which is slower.
    pub products: Products,
    /// Location of the experts' frozen weights: `resident` on the device; `streamed` from their files block by block;
    /// `host`: in host memory, which is faster than files; `sharded` between the ranks (including trained weights, if
    /// all are trained). `auto` is resident unless the strategy requires otherwise (`strategy.stage: 3`,
    /// `strategy.offload_param`).
    pub weight_store: Placement,
    /// Location of the weights of the expert that is not in use, if weights are resident. `keep`: on the device.
    /// `host`: in host memory. `drop`: freed, and read from the files again (one copy less, and ranks share the
    /// system's page cache). `auto`: on the CPU `keep`; on a GPU `drop` (or `host` if the weights are converted to
    /// another dtype, or have LoRAs of `base_lora` merged in), unless both experts take at most half of the memory and
    /// its size is known.
    pub idle_expert: IdleExpert,
    /// Number of attention heads, if neither the weights' width nor a `config.json` next to them determines it.
    pub num_heads: Option<usize>,
    /// Timesteps at or above `boundary * 1000` use `dit`. Default: 0.9 for I2V, 0.875 for T2V.
    pub boundary: Option<f64>,
    /// Old name of `algo.shift`, which takes precedence if both are set.
    pub shift: Option<f64>,
    /// Tiles in which the VAE encodes and decodes: `[height, width]` in latent pixels, together with `vae_tile_stride`;
    /// `none` processes whole frames. `auto`: whole frames on the CPU; the largest tiles that fit on a GPU whose memory
    /// is known.
    pub vae_tile_size: TileSize,
    /// Distance between tiles, `[height, width]` in latent pixels.
    pub vae_tile_stride: Option<[usize; 2]>,
    /// Greatest number of feature-cache checkpoints that the decoder's backward pass keeps. Fewer checkpoints need less
    /// memory and more recomputation; results are the same. `auto`: 4 on the CPU; on a GPU whose memory is known, the
    /// number that fits into half of the remaining memory. With `model.use_gradient_checkpointing_offload` they are
    /// kept in host memory, and their number is what fits into half of its free part.
    pub vae_checkpoints: Checkpoints,
    /// Dtype of the VAE's decoder. With `bf16`, weights and activations are rounded and products accumulate in f32;
    /// latents, attention, the layer that produces the frames, and the encoder stay f32. On `libtorch-cuda`,
    /// convolutions in `f32` use TF32 unless the environment sets `NVIDIA_TF32_OVERRIDE=0`.
    pub vae_dtype: VaeDType,
}

/// Rank of a LoRA that does not start from a file.
const DEFAULT_RANK: usize = 32;
/// Layers of a LoRA that does not start from a file.
const DEFAULT_TARGETS: &str = "q,k,v,o,ffn.0,ffn.2";
/// Possible inputs in addition to the prompt.
const INPUTS: [&str; 2] = ["input_image", "end_image"];

impl Default for WanOptions {
    fn default() -> Self {
        Self {
            model_paths: None,
            model_id_with_origin_paths: None,
            tokenizer_path: None,
            trainable_models: None,
            lora_base_model: None,
            lora_target_modules: None,
            lora_rank: None,
            lora_alpha: None,
            lora_checkpoint: None,
            base_lora: None,
            use_gradient_checkpointing: true,
            use_gradient_checkpointing_offload: false,
            keep_attention: KeepAttention::Auto,
            extra_inputs: "input_image".into(),
            weights_dtype: WeightsDType::Auto,
            compute_dtype: ComputeDType::Auto,
            products: Products::Auto,
            weight_store: Placement::Auto,
            idle_expert: IdleExpert::Auto,
            num_heads: None,
            boundary: None,
            shift: None,
            vae_tile_size: TileSize::Auto,
            vae_tile_stride: None,
            vae_checkpoints: Checkpoints::Auto,
            vae_dtype: VaeDType::Auto,
        }
    }
}

impl WanOptions {
    /// Fails on values that can only be mistakes.
    pub fn check(&self) -> Result<()> {
        check_alpha(self.lora_alpha)?;
        match split(&self.extra_inputs).iter().find(|input| !INPUTS.contains(&input.as_str())) {
            Some(unknown) => {
                let problem =
                    format!("`{unknown}` is not an input; there are {}", INPUTS.map(|i| format!("`{i}`")).join(", "));
                Err(Error::config("model.extra_inputs", problem))
            }
            None => Ok(()),
        }
    }

    /// The experts that the configuration selects for training, and the key that selects them. `None` if no key does.
    pub fn named_experts(&self) -> Result<Option<(&'static str, Vec<String>)>> {
        let (key, list) = match (&self.lora_base_model, &self.trainable_models) {
            (Some(list), _) => ("model.lora_base_model", list),
            (None, Some(list)) => ("model.trainable_models", list),
            (None, None) => return Ok(None),
        };
        let names = split(list);
        match names.iter().find(|name| !["dit", "dit2"].contains(&name.as_str())) {
            Some(unknown) => {
                Err(Error::config(key, format!("`{unknown}` is not an expert; there are `dit` and `dit2`")))
            }
            None => Ok(Some((key, names))),
        }
    }

    /// Names of the experts to train. `has_dit2` says whether the checkpoint has a second expert; `with_adapter` are
    /// the experts that `lora_checkpoint` is for.
    pub fn trained_experts(&self, has_dit2: bool, with_adapter: &[&str]) -> Result<Vec<String>> {
        let Some((key, names)) = self.named_experts()? else {
            return Ok(match (with_adapter, has_dit2) {
                // Neither a key nor an adapter selects experts: the low-noise expert, or the only one.
                ([], true) => vec!["dit2".into()],
                ([], false) => vec!["dit".into()],
                (experts, _) => experts.iter().map(|name| name.to_string()).collect(),
            });
        };
        if names.iter().any(|n| n == "dit2") && !has_dit2 {
            if names.len() > 1 {
                return Err(Error::config(key, "this checkpoint has one expert, `dit`; `dit2` is not there"));
            }
            tracing::warn!("this checkpoint has one expert: `dit` is trained, although `{key}` says `dit2`");
            return Ok(vec!["dit".into()]);
        }
        Ok(names)
    }

    /// The trained part of `expert` if the experts `trained` are trained and no expert starts from a file.
    pub fn trainable(&self, trained: &[String], expert: &str) -> Trainable {
        let rank = self.lora_rank.unwrap_or(DEFAULT_RANK);
        match (trained.iter().any(|name| name == expert), rank) {
            (false, _) => Trainable::Frozen,
            (true, 0) => Trainable::Full,
            (true, rank) => {
                Trainable::Lora { rank, alpha: self.lora_alpha.unwrap_or(rank as f64), targets: self.lora_targets() }
            }
        }
    }

    /// The layers of a LoRA that does not start from a file.
    pub fn lora_targets(&self) -> Vec<String> {
        split(self.lora_target_modules.as_deref().unwrap_or(DEFAULT_TARGETS))
    }

    /// The keys about the LoRA, to compare with its file.
    pub(super) fn lora_request(&self) -> LoraRequest {
        let targets = self.lora_target_modules.as_deref().map(split);
        LoraRequest { rank: self.lora_rank, alpha: self.lora_alpha, targets }
    }

    /// The option `keep_attention`, or `false` if no block is recomputed, because the option has no effect then.
    pub(super) fn effective_keep_attention(&self) -> KeepAttention {
        let recomputes_blocks = self.use_gradient_checkpointing || self.use_gradient_checkpointing_offload;
        if recomputes_blocks { self.keep_attention } else { KeepAttention::Of(false) }
    }

    /// The tiles of the VAE in the options; `None` for `auto` and for whole frames.
    pub(super) fn tiling(&self) -> Result<Option<Tiling>> {
        match (self.vae_tile_size, self.vae_tile_stride) {
            (TileSize::Of(size), Some(stride)) => {
                let tiling = Tiling { size, stride };
                tiling.check().in_section("model")?;
                Ok(Some(tiling))
            }
            (TileSize::Auto | TileSize::Whole, None) => Ok(None),
            _ => Err(Error::config("model.vae_tile_size", "needs `vae_tile_stride` beside it, and the reverse")),
        }
    }

    /// Whether the configuration requests this input in addition to the prompt.
    pub fn wants(&self, input: &str) -> bool {
        split(&self.extra_inputs).iter().any(|i| i == input)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::parse_options;
    use serde_json::json;

    use super::*;

    pub(super) fn parsed(options: serde_json::Value) -> Result<WanOptions> {
        parse_options("model", options.as_object().unwrap())
    }

    #[test]
    fn lists_are_yaml_lists_or_texts_with_commas() {
        let text = parsed(json!({
            "trainable_models": "dit,dit2", "lora_base_model": null, "lora_target_modules": "q,k",
            "extra_inputs": "input_image,end_image", "model_id_with_origin_paths": "o/n:a*,o/n:b",
        }));
        let list = parsed(json!({
            "trainable_models": ["dit", "dit2"], "lora_target_modules": ["q", " k"],
            "extra_inputs": ["input_image", "end_image"], "model_id_with_origin_paths": ["o/n:a*", "o/n:b"],
        }));
        let (text, list) = (text.unwrap(), list.unwrap());
        assert_eq!(text, list);
        assert_eq!(list.trained_experts(true, &[]).unwrap(), ["dit", "dit2"]);
        assert_eq!((list.lora_targets(), list.wants("end_image")), (vec!["q".into(), "k".into()], true));
        let base = parsed(json!({"lora_base_model": ["dit"]})).unwrap();
        assert_eq!(base.trained_experts(true, &[]).unwrap(), ["dit"]);
    }

    #[test]
    fn errors_name_keys_that_are_not_lists() {
        for (options, key) in [
            (json!({"trainable_models": 3}), "model.trainable_models"),
            (json!({"extra_inputs": null}), "model.extra_inputs"),
            (json!({"lora_base_model": ["dit", 2]}), "model.lora_base_model"),
            (json!({"lora_target_modules": ["q,k"]}), "model.lora_target_modules"),
        ] {
            let message = parsed(options).unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
    }

    #[test]
    fn trainable_part_of_an_expert_follows_the_options() {
        let options = WanOptions { lora_rank: Some(4), ..WanOptions::default() };
        let trained = ["dit2".to_string()];
        assert_eq!(options.trainable(&trained, "dit"), Trainable::Frozen);
        let expected = Trainable::Lora { rank: 4, alpha: 4.0, targets: options.lora_targets() };
        assert_eq!(options.trainable(&trained, "dit2"), expected);
        assert_eq!(WanOptions { lora_rank: Some(0), ..options }.trainable(&trained, "dit2"), Trainable::Full);
    }

    #[test]
    fn trained_experts_are_named_or_of_the_adapter_or_dit2() {
        let both = ["dit", "dit2"];
        let options = WanOptions::default();
        assert_eq!(options.trained_experts(true, &[]).unwrap(), ["dit2"]);
        assert_eq!(options.trained_experts(false, &[]).unwrap(), ["dit"]);
        assert_eq!(options.trained_experts(true, &["dit"]).unwrap(), ["dit"]);
        let named = WanOptions { trainable_models: Some("dit,dit2".into()), ..options };
        assert_eq!(named.trained_experts(true, &["dit"]).unwrap(), both);
        assert!(named.trained_experts(false, &[]).is_err());
    }
}
