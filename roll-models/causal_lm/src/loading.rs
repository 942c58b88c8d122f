//! The options of the model `causal_lm`, and the construction of the model from them.

use std::path::PathBuf;
use std::sync::Arc;

use burn_tensor::DType;
use roll_backends::{Backend, Memory};
use roll_core::{BuildContext, Error, LanguageModel, Message, Noise, Options, Result, ResultExt, flat};
use roll_network::comma_list::{self, split};
use roll_network::hub::Hub;
use roll_network::lora::{AdapterSources, InitialAdapter, LoraRequest};
use roll_network::precision::{ComputeDType, DeviceTraits, WeightsDType};
use roll_network::tokenizer::Tokenizer;
use roll_network::trainable::{Trainable, check_alpha, kept_for_pullback};
use roll_network::weights::stored_dtype;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::config::LmConfig;
use super::loaded::{LoadedModel, decode};
use super::model::{CausalLm, Origin};
use super::network::Network;
use super::pictures::PictureTokens;
use super::source;

/// Options of the model `causal_lm`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CausalLmOptions {
    /// Hugging Face directory: `config.json`, safetensors (one file, or shards with their index), `tokenizer.json`, and
    /// a chat template in `chat_template.jinja` or `tokenizer_config.json`. Or a GGUF file, which holds all of it.
    /// Or a published model, downloaded where it is missing: `Qwen/Qwen2.5-0.5B-Instruct`, or `ORG/NAME:FILE.gguf`.
    /// `null`: the built-in small model.
    pub model_path: Option<PathBuf>,
    /// Layers that carry the LoRA, by the ends of their names: a YAML list, or comma-separated text. Default:
    /// those of `lora_checkpoint`; without that key, all linear layers of the blocks.
    #[serde(deserialize_with = "comma_list::optional")]
    #[schemars(schema_with = "comma_list::optional_schema")]
    pub lora_target_modules: Option<String>,
    /// Rank of the LoRA; 0 trains every weight instead. Default: that of `lora_checkpoint`; without that key, 32.
    pub lora_rank: Option<usize>,
    /// LoRA scale numerator. Default: that of `lora_checkpoint`; without that key, the rank.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lora_alpha: Option<f64>,
    /// LoRA to start from, in any convention: a file, the directory of a checkpoint, of a run (its newest checkpoint)
    /// or of a PEFT adapter. Several in a list are added up; `FILE=0.8` gives one a strength of 0.8. A file with all
    /// weights of the model replaces those of `model_path`, and every weight is trained.
    pub lora_checkpoint: Option<AdapterSources>,
    /// Recompute activations block by block in the backward pass instead of holding them.
    pub use_gradient_checkpointing: bool,
    /// Recompute in the same way, but keep the inputs of the blocks in host memory until the backward pass.
    pub use_gradient_checkpointing_offload: bool,
    /// Storage of frozen weights: `f32`, `bf16`, or `auto`: bf16 on GPUs, as in the file on the CPU (quantised weights
    /// of a GGUF file stay quantised).
    pub weights_dtype: WeightsDType,
    /// Precision of matrix products and attention: `f32`, or `bf16` with sums in f32. `auto`: bf16 if the
    /// weights are bf16 and the device is a GPU, else f32. Norms, residuals, adapters' weights and gradients are f32
    /// either way.
    pub compute_dtype: ComputeDType,
    /// Maximum number of tokens in a sequence. Default: the model's context length.
    pub max_length: Option<usize>,
    /// Maximum number of sequences generated at a time: when one ends, the next takes its place. The texts do not
    /// depend on it. It bounds the memory for their logits. Keys and values are cached for all sequences of a rollout,
    /// because conversations keep them for their next turn.
    pub rows_at_once: usize,
    /// Further variables that the chat template reads: `{enable_thinking: false}` for Qwen3. Any other variable that it
    /// does not read is an error.
    pub chat_template_args: Options,
    /// Tokens that end an answer, besides those that the model's files name: `["<|im_end|>"]` for a base model of Qwen,
    /// whose chat template ends turns with it. A checkpoint of all weights names them in its `generation_config.json`.
    pub end_tokens: Vec<String>,
}

impl Default for CausalLmOptions {
    fn default() -> Self {
        Self {
            model_path: None,
            lora_target_modules: None,
            lora_rank: None,
            lora_alpha: None,
            lora_checkpoint: None,
            use_gradient_checkpointing: true,
            use_gradient_checkpointing_offload: false,
            weights_dtype: WeightsDType::Auto,
            compute_dtype: ComputeDType::Auto,
            max_length: None,
            rows_at_once: ROWS_AT_ONCE,
            chat_template_args: Options::new(),
            end_tokens: Vec::new(),
        }
    }
}

impl CausalLmOptions {
    /// Returns `config` with the context length of `max_length`. Fails on invalid options.
    pub(super) fn checked(&self, mut config: LmConfig) -> Result<LmConfig> {
        check_alpha(self.lora_alpha)?;
        if let Some(length) = self.max_length {
            if length == 0 || length > config.context {
                let problem = format!("expected 1 to {}, the model's context; found {length}", config.context);
                return Err(Error::config("model.max_length", problem));
            }
            config.context = length;
        }
        if self.weights_dtype.eight_bits().is_some() {
            let problem =
                "expected auto, f32 or bf16: a language model has eight-bit weights (Q8_0) only from a GGUF file";
            return Err(Error::config("model.weights_dtype", problem));
        }
        match self.rows_at_once {
            0 => Err(Error::config("model.rows_at_once", "expected at least 1, found 0")),
            _ => Ok(config),
        }
    }

    /// Returns the ids of `end_tokens`.
    fn end_ids(&self, config: &LmConfig, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
        let id_of = |token: &String| {
            let id = tokenizer.and_then(|tokenizer| tokenizer.id(token)).filter(|id| (*id as usize) < config.vocab);
            id.ok_or_else(|| {
                let problem =
                    format!("expected tokens of the model's tokenizer, such as `<|im_end|>`; found `{token}`");
                Error::config("model.end_tokens", problem)
            })
        };
        self.end_tokens.iter().map(id_of).collect()
    }

    /// What is trained without `lora_checkpoint`.
    pub(super) fn trainable(&self, config: &LmConfig) -> Trainable {
        match self.lora_rank.unwrap_or(RANK) {
            0 => Trainable::Full,
            rank => Trainable::Lora {
                rank,
                alpha: self.lora_alpha.unwrap_or(rank as f64),
                targets: split(self.lora_target_modules.as_deref().unwrap_or(config.linear_layers())),
            },
        }
    }

    /// Returns whether the quantised matrices of a file stay quantised. Only the backend `flex` multiplies by quantised
    /// blocks; the others would decode a matrix at every use.
    pub(super) fn keeps_quantised(&self, backend: Backend) -> bool {
        self.weights_dtype == WeightsDType::Auto && backend == Backend::Flex
    }

    pub(super) fn memory(&self) -> Memory {
        kept_for_pullback(self.use_gradient_checkpointing, self.use_gradient_checkpointing_offload)
    }
}

/// Default rank of a LoRA.
const RANK: usize = 32;
/// Default number of sequences that are generated at a time.
const ROWS_AT_ONCE: usize = 256;

/// Opens the model that `options` describe.
pub fn open(options: &CausalLmOptions, context: &BuildContext) -> Result<CausalLm> {
    let located = match &options.model_path {
        Some(name) => Some(source::locate(name, context.resolve(name), &Hub::of(context))?),
        None => None,
    };
    let loaded = match &located {
        Some(path) => source::open(path, context.headers_only)?,
        None => source::built_in()?,
    };
    // `model_path` is a published name if the model was located somewhere else, in the hub's cache.
    let published = options.model_path.clone().filter(|name| located.as_ref() != Some(&context.resolve(name)));
    // A checkpoint of all weights is a model of its own, and gets the other files of its origin.
    let origin = |trains_all: bool| source::origin(located.as_deref(), published, trains_all);
    opened(options, context, loaded, None, origin)
}

/// Applies `options` to a model whose files are read. `pictures` are the tokens of pictures, if the network reads them;
/// `origin` returns the origin of the files, with the contents of those that a checkpoint needs if its argument is true,
/// because all weights are trained.
pub fn opened(
    options: &CausalLmOptions,
    context: &BuildContext,
    loaded: LoadedModel,
    pictures: Option<Arc<dyn PictureTokens>>,
    origin: impl FnOnce(bool) -> Result<Origin>,
) -> Result<CausalLm> {
    let device = roll_backends::device(&context.backend)?;
    let LoadedModel { config, mut state, mut quantised, tokenizer, template, location } = loaded;
    let mut config = options.checked(config)?;
    config.add_end_ids(options.end_ids(&config, tokenizer.as_ref())?);
    let has_arguments = !options.chat_template_args.is_empty();
    let template = match template {
        Some(template) if has_arguments => Some(template.with_arguments(options.chat_template_args.clone())?),
        None if has_arguments => {
            return Err(Error::config(
                "model.chat_template_args",
                "the model has no chat template that would read them",
            ));
        }
        template => template,
    };
    let reading = || format!("reading {location}");
    // The final norm represents the file: it is never quantised, and has the dtype of the other unquantised weights.
    let stored = state.get("model.norm.weight").map_or(DType::F32, stored_dtype);
    let traits = DeviceTraits::of(&device);
    let dtype = options.weights_dtype.of(stored, traits)?;
    let initial = initial_adapter(options, context, &config)?;
    let trainable = initial.as_ref().map_or_else(|| options.trainable(&config), |initial| initial.trainable.clone());
    let (trainable, initial) = if context.headers_only && trainable == Trainable::Full {
        // With `headers_only`, a configuration is only checked, and weights are placeholders. Training all of them would
        // still allocate parameters and gradients: a LoRA of rank 1 takes their place.
        let targets = split(config.linear_layers());
        (Trainable::Lora { rank: 1, alpha: 1.0, targets }, None)
    } else {
        (trainable, initial)
    };
    let keeps_quantised = options.keeps_quantised(Backend::of(&context.backend)?);
    // Full training needs decoded weights in any case; the quantised ones, where they are kept too, are the frozen
    // reference policy.
    let trains_all = trainable == Trainable::Full;
    if trains_all {
        decode(&mut state, &quantised)?;
        if !keeps_quantised {
            quantised.clear();
        }
    }
    let mut origin = origin(trains_all)?;
    if trains_all && !options.end_tokens.is_empty() {
        origin.set_end_ids(&config.end_ids)?;
    }
    let network = if context.headers_only || (trains_all && !context.needs_reference) {
        Network::without_weights(config, &device)
    } else {
        Network::with_quantised(config, &state, quantised, keeps_quantised, dtype, &device).while_doing(reading)?
    };
    let network = match pictures {
        Some(pictures) => network.with_pictures(pictures),
        None => network,
    };
    let mut network = network.with_memory(options.memory()).with_products(options.compute_dtype.of(dtype, traits)?);
    network.add_trainable(&trainable, &Noise::new(context.seed), &state).in_section("model")?;
    if let (Some(initial), Some(parameters)) = (&initial, network.parameters()) {
        let is_frozen = |name: &&String| origin.frozen.contains_key(*name);
        let trained = initial.parameters.iter().filter(|(name, _)| !is_frozen(name));
        let trained = trained.map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
        let values = flat::from_state(parameters.specs(), &trained);
        let values = values.while_doing(|| "`model.lora_checkpoint`".into())?;
        parameters.write(&values)?;
        network.start_from(values);
    }
    let model = CausalLm::new(network, tokenizer, template).while_doing(reading)?;
    if let Some(problem) = unended_turn(&model) {
        tracing::warn!("{location}: {problem}");
    }
    Ok(model.with_rows_at_once(options.rows_at_once).with_origin(origin))
}

/// Returns a warning if the chat template ends an answer with a token that does not end one for the model, as in many
/// base models: its answers would go on to the limit, even after training. `None` for a model without a chat template.
fn unended_turn(model: &CausalLm) -> Option<String> {
    const ANSWER: &str = "answer";
    let messages = [Message::new("user", "question"), Message::new("assistant", ANSWER)];
    let continue_as_assistant = false;
    let text = model.render_chat(&messages, continue_as_assistant).ok()?;
    let (_, after) = text.rsplit_once(ANSWER)?;
    let ids = model.tokenize(after.trim_start()).ok()?;
    let ends = model.end_tokens();
    if ids.iter().any(|id| ends.contains(id)) {
        return None;
    }
    let known: Vec<String> = ends.iter().filter_map(|id| model.detokenize(&[*id]).ok()).collect();
    let (id, found, advice) = match ids.first() {
        Some(id) => {
            let token = model.detokenize(&[*id]).ok()?;
            (
                format!(" the id {id}"),
                format!("`{token}`"),
                format!("Name it in `model.end_tokens: [\"{token}\"]`, or "),
            )
        }
        None => (" its id".into(), "nothing".into(), "To end them, ".into()),
    };
    Some(format!(
        "the chat template ends a turn with {found}, which is not among the tokens that end an answer (`{}`): answers go \
         on to the limit. {}add{id} to `eos_token_id` in generation_config.json, beside the weights",
        known.join("`, `"),
        advice
    ))
}

/// Reads the adapters of `lora_checkpoint`.
pub(super) fn initial_adapter(
    options: &CausalLmOptions,
    context: &BuildContext,
    config: &LmConfig,
) -> Result<Option<InitialAdapter>> {
    let Some(sources) = &options.lora_checkpoint else { return Ok(None) };
    let adapters = sources.open(|path| context.resolve(path)).while_doing(|| "`model.lora_checkpoint`".into())?;
    // Adapters of video models may be for the high-noise or the low-noise expert. Such an adapter is refused, unless only
    // its file name suggests it: there, `high` may mean something else.
    if let Some(adapter) = adapters.iter().find(|adapter| adapter.expert.is_some() && !adapter.expert_from_file_name) {
        let problem = "is an adapter for one of the two experts of a video model: a language model has none";
        return Err(Error::bad_file(&adapter.path, problem));
    }
    let weights = config.weights();
    let layers = weights.iter().filter(|(name, shape)| name.starts_with("model.layers.") && shape.len() == 2);
    let layers: Vec<String> = layers.filter_map(|(name, _)| Some(name.strip_suffix(".weight")?.into())).collect();
    let targets = options.lora_target_modules.as_deref().map(split);
    let request = LoraRequest { rank: options.lora_rank, alpha: options.lora_alpha, targets };
    let initial = InitialAdapter::new(adapters, &request, &layers).in_section("model")?;
    initial.check_weights(&weights).in_section("model")?;
    Ok(Some(initial))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn tokens_that_end_an_answer_may_be_named() {
        let dir = tempfile::tempdir().unwrap();
        source::write_built_in(dir.path()).unwrap();
        let file = dir.path().join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let end = config["eos_token_id"].as_u64().unwrap() as u32;
        config["eos_token_id"] = 0.into();
        std::fs::write(&file, config.to_string()).unwrap();
        let open = |end_tokens: &[&str], rank: usize| {
            let options = CausalLmOptions {
                model_path: Some(dir.path().into()),
                lora_rank: Some(rank),
                end_tokens: end_tokens.iter().map(|token| (*token).into()).collect(),
                ..CausalLmOptions::default()
            };
            super::open(&options, &BuildContext::new("flex"))
        };
        let token = open(&[], 1).unwrap().detokenize(&[end]).unwrap();
        let problem = unended_turn(&open(&[], 1).unwrap()).unwrap();
        assert!(problem.contains(&format!("`model.end_tokens: [\"{token}\"]`")), "{problem}");
        let named = open(&[&token], 0).unwrap();
        assert_eq!((named.end_tokens(), unended_turn(&named)), (vec![0, end], None));
        // A checkpoint of all weights opens with them.
        let exported = roll_core::Model::export_adapter(&named).unwrap();
        let beside = roll_core::header::take(&mut exported["model"].clone()).unwrap();
        let text = &beside[&format!("{}generation_config.json", roll_core::header::BESIDE)];
        let written: serde_json::Value = serde_json::from_str(text).unwrap();
        assert_eq!(written, serde_json::json!({ "eos_token_id": [0, end] }));
        let problem = open(&["<nosuch>"], 1).err().unwrap().to_string();
        assert!(problem.contains("model.end_tokens") && problem.contains("<nosuch>"), "{problem}");
    }

    #[test]
    fn errors_of_unknown_layers_and_eight_bits_name_the_key() {
        let parsed = |targets: serde_json::Value| {
            let options = serde_json::json!({"lora_rank": 2, "lora_target_modules": targets});
            roll_core::parse_options::<CausalLmOptions>("model", options.as_object().unwrap()).unwrap()
        };
        let list = parsed(serde_json::json!(["q_proj", "nosuch"]));
        assert_eq!(list, parsed(serde_json::json!("q_proj,nosuch")));
        let context = BuildContext::new("flex");
        let message = open(&list, &context).err().unwrap().chain();
        assert!(message.contains("`model.lora_target_modules`") && message.contains("`nosuch`"), "{message}");
        let eight_bits = CausalLmOptions { weights_dtype: WeightsDType::Int8, ..CausalLmOptions::default() };
        let message = open(&eight_bits, &context).err().unwrap().chain();
        assert!(message.contains("`model.weights_dtype`") && message.contains("GGUF"), "{message}");
    }
}
