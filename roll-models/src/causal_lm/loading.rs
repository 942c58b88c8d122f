//! From options to a model: where it comes from, what is trained, on which device.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn::tensor::DType;
use roll_backends::Memory;
use roll_core::registry::{default_options, parse_options};
use roll_core::{BuildContext, Error, Factory, Model, Noise, Options, Registration, Result, ResultExt};
use serde::{Deserialize, Serialize};

use super::model::CausalLm;
use super::network::Network;
use super::parts::Parts;
use super::source;
use crate::comma_list::{self, split};
use crate::hub::Hub;
use crate::precision::{ComputeDType, WeightsDType};
use crate::trainable::Trainable;
use crate::weights::{Checkpoint, stored_dtype};

/// Options of the model `causal_lm`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CausalLmOptions {
    /// Hugging Face directory: `config.json`, safetensors (one file, or shards with their index), `tokenizer.json`, and
    /// a chat template in `chat_template.jinja` or `tokenizer_config.json`. Or a GGUF file, which holds all of it.
    /// Or a published model, downloaded where it is missing: `Qwen/Qwen2.5-0.5B-Instruct`, or `ORG/NAME:FILE.gguf`.
    /// `null`: the small model that is built in.
    pub model_path: Option<PathBuf>,
    /// Layers that carry the LoRA, by the end of their name: a list of YAML, or a text with commas.
    #[serde(deserialize_with = "comma_list::required")]
    pub lora_target_modules: String,
    /// Rank of the LoRA; 0 trains every weight instead.
    pub lora_rank: usize,
    /// LoRA scale numerator; the rank unless given.
    pub lora_alpha: Option<f64>,
    /// LoRA file to start from.
    pub lora_checkpoint: Option<PathBuf>,
    /// Recompute activations block by block in the backward pass instead of holding them.
    pub use_gradient_checkpointing: bool,
    /// Keep the inputs of the blocks in host memory meanwhile.
    pub use_gradient_checkpointing_offload: bool,
    /// Storage of frozen weights: `auto` (as in the file), `f32`, `bf16`.
    pub weights_dtype: WeightsDType,
    /// Precision of matrix products and attention: `f32`, or `bf16` with sums in f32. `auto`: bf16 where the
    /// weights are and the device is a GPU. Norms, residuals, adapters' weights and gradients are f32 either way.
    pub compute_dtype: ComputeDType,
    /// Most tokens of a sequence; the model's own context unless given.
    pub max_length: Option<usize>,
}

impl Default for CausalLmOptions {
    fn default() -> Self {
        Self {
            model_path: None,
            lora_target_modules: "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj".into(),
            lora_rank: 32,
            lora_alpha: None,
            lora_checkpoint: None,
            use_gradient_checkpointing: true,
            use_gradient_checkpointing_offload: false,
            weights_dtype: WeightsDType::Auto,
            compute_dtype: ComputeDType::Auto,
            max_length: None,
        }
    }
}

impl CausalLmOptions {
    /// What is trained.
    fn trainable(&self) -> Trainable {
        match self.lora_rank {
            0 => Trainable::Full,
            rank => Trainable::Lora {
                rank,
                alpha: self.lora_alpha.unwrap_or(rank as f64),
                targets: split(&self.lora_target_modules),
            },
        }
    }

    fn memory(&self) -> Memory {
        match (self.use_gradient_checkpointing, self.use_gradient_checkpointing_offload) {
            (_, true) => Memory::Offload,
            (true, false) => Memory::Recompute,
            (false, false) => Memory::Hold,
        }
    }
}

roll_core::inventory::submit! {
    Registration {
        name: "causal_lm",
        summary: "Language models: Qwen2, Qwen2.5, Qwen3, Llama",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<CausalLmOptions>,
        factory: Factory::Model(make),
        planner: None,
    }
}

fn make(options: &Options, context: &BuildContext) -> Result<Box<dyn Model>> {
    Ok(Box::new(open(&parse_options("model", options)?, context)?))
}

/// Opens the model that `options` describe.
pub fn open(options: &CausalLmOptions, context: &BuildContext) -> Result<CausalLm> {
    let device = roll_backends::device(&context.backend)?;
    let Parts { mut config, state, tokenizer, template, place } = match &options.model_path {
        Some(path) => source::open(&source::locate(path, context.resolve(path), &Hub::from_env())?)?,
        None => source::built_in()?,
    };
    if let Some(length) = options.max_length {
        if length == 0 || length > config.context {
            let problem = format!("expected 1 to {}, the model's context; found {length}", config.context);
            return Err(Error::config("model.max_length", problem));
        }
        config.context = length;
    }
    let reading = || format!("reading {place}");
    let stored = state.get("model.norm.weight").map_or(DType::F32, stored_dtype);
    let dtype = options.weights_dtype.of(stored, &device)?;
    let mut network = Network::new(config, &state, dtype, &device)
        .while_doing(reading)?
        .with_memory(options.memory())
        .with_products(options.compute_dtype.of(dtype, &device)?);
    network.train(&options.trainable(), &Noise::new(context.seed), &state).in_section("model")?;
    let mut model = CausalLm::new(network, tokenizer, template).while_doing(reading)?;
    if let Some(path) = &options.lora_checkpoint {
        let path = context.resolve(path);
        let files = BTreeMap::from([(model.adapter_file().to_string(), Checkpoint::open(&path)?.all()?)]);
        model.import_adapter(&files).while_doing(|| format!("reading {}", path.display()))?;
    }
    Ok(model)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn lists_are_those_of_yaml_and_unknown_layers_are_refused_by_their_key() {
        let parsed = |targets: serde_json::Value| {
            let options = serde_json::json!({"lora_rank": 2, "lora_target_modules": targets});
            parse_options::<CausalLmOptions>("model", options.as_object().unwrap()).unwrap()
        };
        let list = parsed(serde_json::json!(["q_proj", "nosuch"]));
        assert_eq!(list, parsed(serde_json::json!("q_proj,nosuch")));
        let context = BuildContext { backend: "flex".into(), seed: 0, base_dir: ".".into(), placement: None };
        let message = open(&list, &context).err().unwrap().chain();
        assert!(message.contains("`model.lora_target_modules`") && message.contains("`nosuch`"), "{message}");
    }
}
