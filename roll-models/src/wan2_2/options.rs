//! What a user can say about a Wan model.

use std::path::PathBuf;

use roll_core::{Error, Result, WeightPlacement};
use serde::{Deserialize, Serialize};

use crate::precision::{ComputeDType, WeightsDType};

/// Options of the model `wan2_2`; names and defaults as in the reference where it has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WanOptions {
    /// JSON file that lists the weight files (`wan22_paths.json`), a single weight file, or a directory in diffusers
    /// layout.
    pub model_paths: Option<PathBuf>,
    /// `ORG/NAME:PATTERN` entries, comma-separated, looked up in the Hugging Face cache.
    pub model_id_with_origin_paths: Option<String>,
    /// Directory of the UMT5 `tokenizer.json`.
    pub tokenizer_path: Option<PathBuf>,
    /// Experts that are trained, comma-separated: `dit` (high noise), `dit2` (low noise).
    pub trainable_models: String,
    /// Experts that carry the LoRA; those of `trainable_models` unless given.
    pub lora_base_model: Option<String>,
    /// Layers that carry the LoRA, by the end of their name, comma-separated.
    pub lora_target_modules: String,
    /// Rank of the LoRA; 0 trains every weight of the experts instead.
    pub lora_rank: usize,
    /// LoRA scale numerator; the rank unless given.
    pub lora_alpha: Option<f64>,
    /// LoRA file to start from.
    pub lora_checkpoint: Option<PathBuf>,
    /// Recompute activations block by block in the backward pass instead of holding them.
    pub use_gradient_checkpointing: bool,
    /// Keep the inputs of the blocks in host memory meanwhile.
    pub use_gradient_checkpointing_offload: bool,
    /// Inputs beside the prompt, comma-separated: `input_image`, `end_image`.
    pub extra_inputs: String,
    /// Storage of frozen weights: `auto` (as in the file), `f32`, `bf16`.
    pub weights_dtype: WeightsDType,
    /// What products of matrices and attention are taken in: `f32`, or `bf16` with sums in f32. `auto`: bf16 where the
    /// weights are and the device is a GPU. Norms, residuals, adapters' weights and gradients are f32 either way.
    pub compute_dtype: ComputeDType,
    /// Where the frozen weights of the experts live: `resident` on the device, `streamed` from their files block by
    /// block, `sharded` over the ranks (weights that are trained too, when all are). `auto` is resident, unless the
    /// strategy says otherwise (`strategy.stage: 3`, `strategy.offload_param`).
    pub weight_store: Placement,
    /// Attention heads, when neither the weights' width nor a `config.json` beside them tells.
    pub num_heads: Option<usize>,
    /// Timesteps at or above `boundary * 1000` use `dit`; 0.9 for I2V and 0.875 for T2V unless given.
    pub boundary: Option<f64>,
    /// Shift of the sigma schedule.
    pub shift: f64,
    /// Decode and encode in tiles: `[height, width]` in latent pixels; needs `vae_tile_stride`.
    pub vae_tile_size: Option<[usize; 2]>,
    /// Distance of the tiles, `[height, width]` in latent pixels.
    pub vae_tile_stride: Option<[usize; 2]>,
    /// Cache checkpoints the decoder's backward pass may hold; fewer need less memory and more recomputation.
    pub vae_checkpoints: usize,
}

/// Where frozen weights live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// As the strategy wants it; resident when it does not care.
    #[default]
    Auto,
    /// On the device, all the time.
    Resident,
    /// In their memory-mapped files; read block by block, one ahead.
    Streamed,
    /// Divided among the ranks; gathered block by block.
    Sharded,
}

impl Placement {
    /// This one, or where it is left open that which the strategy wants.
    pub fn or(self, wanted: Option<WeightPlacement>) -> Self {
        match (self, wanted) {
            (Self::Auto, Some(WeightPlacement::Resident)) => Self::Resident,
            (Self::Auto, Some(WeightPlacement::Streamed)) => Self::Streamed,
            (Self::Auto, Some(WeightPlacement::Sharded)) => Self::Sharded,
            (given, _) => given,
        }
    }

    /// Where the weights are once a model is open.
    pub(super) fn chosen(self) -> WeightPlacement {
        match self {
            Self::Auto | Self::Resident => WeightPlacement::Resident,
            Self::Streamed => WeightPlacement::Streamed,
            Self::Sharded => WeightPlacement::Sharded,
        }
    }
}

impl Default for WanOptions {
    fn default() -> Self {
        Self {
            model_paths: None,
            model_id_with_origin_paths: None,
            tokenizer_path: None,
            trainable_models: "dit2".into(),
            lora_base_model: None,
            lora_target_modules: "q,k,v,o,ffn.0,ffn.2".into(),
            lora_rank: 32,
            lora_alpha: None,
            lora_checkpoint: None,
            use_gradient_checkpointing: true,
            use_gradient_checkpointing_offload: false,
            extra_inputs: "input_image".into(),
            weights_dtype: WeightsDType::Auto,
            compute_dtype: ComputeDType::Auto,
            weight_store: Placement::Auto,
            num_heads: None,
            boundary: None,
            shift: 5.0,
            vae_tile_size: None,
            vae_tile_stride: None,
            vae_checkpoints: 4,
        }
    }
}

impl WanOptions {
    /// The experts to train, by name, given those that the checkpoint holds.
    pub fn trained_experts(&self, present: &[&str]) -> Result<Vec<String>> {
        let (key, list) = match &self.lora_base_model {
            Some(list) => ("model.lora_base_model", list),
            None => ("model.trainable_models", &self.trainable_models),
        };
        let names = split(list);
        if let Some(unknown) = names.iter().find(|n| !["dit", "dit2"].contains(&n.as_str())) {
            return Err(Error::config(key, format!("`{unknown}` is no expert; there are `dit` and `dit2`")));
        }
        if names.iter().any(|n| n == "dit2") && !present.contains(&"dit2") {
            if names.len() > 1 {
                return Err(Error::config(key, "this checkpoint has one expert, `dit`; `dit2` is not there"));
            }
            tracing::warn!("this checkpoint has one expert: `dit` is trained, although `{key}` says `dit2`");
            return Ok(vec!["dit".into()]);
        }
        Ok(names)
    }

    /// The layers that carry the LoRA.
    pub fn lora_targets(&self) -> Vec<String> {
        split(&self.lora_target_modules)
    }

    /// Whether the configuration asks for this input beside the prompt.
    pub fn wants(&self, input: &str) -> bool {
        split(&self.extra_inputs).iter().any(|i| i == input)
    }
}

fn split(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|s| !s.is_empty()).map(Into::into).collect()
}
