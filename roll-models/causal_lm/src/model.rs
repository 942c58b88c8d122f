//! The language model behind the traits of roll-core: network, tokenizer and chat template.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use roll_backends::Parameters;
use roll_core::{
    Adapter, DeviceUpdates, Error, Generation, Grad, GradientSink, LanguageModel, Message, Model, ParameterParts,
    ParameterSpec, Picture, Pullback, Result, Sampling, StateDict, Tensor, TokenStats, flat, header,
};
use roll_network::tokenizer::Tokenizer;

use super::adapter::{self, Module};
use super::chat::ChatTemplate;
use super::generate::{Endings, generate};
use super::network::Network;
use super::pictures::{with_pictures, without_squares};
use super::prefixes::Prefixes;

/// A causal language model.
pub struct CausalLm {
    network: Network,
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<Arc<ChatTemplate>>,
    /// Keys and values of the latest turns of conversations.
    prefixes: Arc<Prefixes>,
    /// Maximal number of rows that are generated at a time.
    rows_at_once: usize,
    origin: Arc<Origin>,
}

/// The files that a model was opened from.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// Path or published name under which other programs find the model.
    pub base: Option<String>,
    /// Text files that other programs need beside the weights: configuration, tokenizer, chat template. Checkpoints of
    /// a full training contain them.
    pub files: BTreeMap<String, String>,
    /// Frozen tensors that checkpoints of a full training contain beside the trained ones, so that each is a model of
    /// its own.
    pub frozen: StateDict,
    /// Module that holds the blocks in the programs that load an adapter: `model` for a language model,
    /// `model.language_model` for one that reads pictures.
    pub module: Module,
}

impl Origin {
    /// Sets the tokens that end an answer, in the `generation_config.json`.
    pub(super) fn set_end_ids(&mut self, ids: &[u32]) -> Result<()> {
        const FILE: &str = "generation_config.json";
        let invalid = |e: serde_json::Error| Error::bad_file(FILE, e.to_string());
        let text = self.files.get(FILE).map_or("{}", String::as_str);
        let mut fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).map_err(invalid)?;
        fields.insert("eos_token_id".into(), ids.into());
        self.files.insert(FILE.into(), serde_json::to_string_pretty(&fields).map_err(invalid)?);
        Ok(())
    }
}

impl CausalLm {
    /// Creates a model around a network whose trainable parameters are already chosen.
    ///
    /// Fails if the tokenizer has ids without an embedding. Ids of added tokens are excepted, because Gemma 3's small
    /// models have an added token for images without an embedding; [`LanguageModel::tokenize`] refuses a text with it.
    pub fn new(network: Network, tokenizer: Option<Tokenizer>, template: Option<ChatTemplate>) -> Result<Self> {
        let vocab = network.config().vocab;
        if let Some(found) = tokenizer.as_ref().map(Tokenizer::base_vocabulary).filter(|found| *found > vocab) {
            return Err(Error::Unsupported(format!(
                "the tokenizer has {found} ids, the model {vocab} embeddings: they do not belong together"
            )));
        }
        let (tokenizer, template) = (tokenizer.map(Arc::new), template.map(Arc::new));
        let (prefixes, origin) = (Arc::default(), Arc::default());
        Ok(Self { network, tokenizer, template, prefixes, rows_at_once: usize::MAX, origin })
    }

    /// Sets the files that the model was opened from.
    pub fn with_origin(self, origin: Origin) -> Self {
        Self { origin: Arc::new(origin), ..self }
    }

    /// Sets the maximal number of rows that are generated at a time. Without it, there is no limit.
    pub fn with_rows_at_once(mut self, rows: usize) -> Self {
        self.rows_at_once = rows;
        self
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns whether only adapters are trained.
    fn is_lora(&self) -> bool {
        self.parameters().iter().all(|s| s.name.contains(".lora_"))
    }

    /// Returns the name of the file that [`Model::export_adapter`] returns.
    pub fn adapter_file(&self) -> &'static str {
        if self.is_lora() { "adapter_model" } else { "model" }
    }

    /// Applies `f` to the trainable parameters. A network without trainable parameters accepts only a caller's list of
    /// length 0: `count` is that length.
    fn with_parameters(&self, count: usize, f: impl FnOnce(&Parameters) -> Result<()>) -> Result<()> {
        match (self.network.parameters(), count) {
            (Some(parameters), _) => f(parameters),
            (None, 0) => Ok(()),
            (None, _) => Err(Error::shape("flat parameters", "[0]", &[count])),
        }
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        let missing =
            || Error::Unsupported("this model has no tokenizer: put its tokenizer.json beside the weights".into());
        self.tokenizer.as_deref().ok_or_else(missing)
    }
}

impl Model for CausalLm {
    fn parameters(&self) -> &[ParameterSpec] {
        self.network.parameters().map(Parameters::specs).unwrap_or_default()
    }

    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.with_parameters(out.len(), |parameters| parameters.read(out))
    }

    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.prefixes.clear();
        self.with_parameters(values.len(), |parameters| parameters.write(values))
    }

    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.with_parameters(add_into.len(), |parameters| parameters.take_gradients(add_into))
    }

    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        if self.network.parameters().is_some() { Some(self) } else { None }
    }

    fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
        Some(self)
    }

    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        let Some(parameters) = self.network.parameters() else { return Ok(BTreeMap::new()) };
        let mut state = flat::to_state(parameters.specs(), &flat::read(self)?)?;
        if self.is_lora() {
            let base = self.origin.base.as_deref();
            state = adapter::to_file(state, parameters.specs(), self.network.lora_scale(), base, self.origin.module)?;
        } else {
            let files = self.origin.files.iter();
            let files_beside = files.map(|(name, text)| (format!("{}{name}", header::BESIDE), text.clone()));
            // transformers refuses a file whose header names no framework.
            let framework = [("format".to_string(), "pt".to_string())];
            header::put(&mut state, files_beside.chain(framework).collect())?;
            state.extend(self.origin.frozen.clone());
        }
        Ok(BTreeMap::from([(self.adapter_file().to_string(), state)]))
    }

    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        self.prefixes.clear();
        let Some(parameters) = self.network.parameters() else { return Ok(()) };
        let name = self.adapter_file();
        let file = files.get(name).ok_or_else(|| {
            let found = files.keys().cloned().collect::<Vec<_>>().join(", ");
            Error::Unsupported(format!("the adapter has no file `{name}`; it has: {found}"))
        })?;
        let mut state = if self.is_lora() { adapter::from_file(file) } else { file.clone() };
        state.retain(|name, _| !self.origin.frozen.contains_key(name));
        parameters.write(&flat::from_state(parameters.specs(), &state)?)
    }
}

impl ParameterParts for CausalLm {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.with_parameters(out.len(), |parameters| parameters.read_part(which, out))
    }

    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()> {
        self.prefixes.clear();
        self.with_parameters(values.len(), |parameters| parameters.write_part(which, values))
    }

    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        self.with_parameters(add_into.len(), |parameters| parameters.take_gradients_part(which, add_into))
    }

    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        let Some(parameters) = self.network.parameters() else { return false };
        // The gradient of a tied embedding comes in two parts, from the output layer and from the embedding.
        let config = self.network.config();
        let in_two_parts = if config.tied { parameters.position(config.head_weight()) } else { None };
        let first_position = 0;
        parameters.deliver_gradients(sink, first_position, in_two_parts);
        true
    }

    fn device_updates(&self) -> Option<Box<dyn DeviceUpdates>> {
        let prefixes = self.prefixes.clone();
        Parameters::device_updates_after(move || prefixes.clear(), self.network.parameters())
    }
}

impl LanguageModel for CausalLm {
    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        let (tokenizer, vocab) = (self.tokenizer()?, self.network.config().vocab);
        let ids = tokenizer.encode(text)?;
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            let token = tokenizer.token(*id).unwrap_or_default();
            let problem = format!(
                "the text has the token `{token}` (id {id}), for which the model, with {vocab} embeddings, has none: \
                 remove it from the text"
            );
            return Err(Error::Unsupported(problem));
        }
        Ok(ids)
    }

    fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        let tokenizer = self.tokenizer()?;
        match self.network.pictures.as_ref() {
            Some(pictures) => without_squares(tokens, pictures.delimiters(), |ids| tokenizer.decode(ids)),
            None => tokenizer.decode(tokens),
        }
    }

    fn tokenize_with_pictures(&self, text: &str, pictures: &[Picture]) -> Result<Vec<u32>> {
        match (self.network.pictures.as_ref(), pictures) {
            (Some(source), _) => with_pictures(text, pictures, source.as_ref(), |words| self.tokenize(words)),
            (None, []) => self.tokenize(text),
            (None, _) => Err(Error::Unsupported(
                "the model `causal_lm` reads no pictures, and some are shown: expected `qwen_vl` as `model.name`"
                    .into(),
            )),
        }
    }

    fn forget_pictures(&self) {
        if let Some(pictures) = &self.network.pictures {
            pictures.forget();
        }
    }

    fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        let missing = || {
            Error::Unsupported("this model has no chat template: put a chat_template.jinja beside its weights".into())
        };
        self.template.as_ref().ok_or_else(missing)?.render(messages, continue_as_assistant)
    }

    fn render_chat_with_tools(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
        continue_as_assistant: bool,
    ) -> Result<Option<String>> {
        let template = self.template.as_ref().filter(|template| template.supports_tools());
        template.map(|template| template.render_with_tools(messages, tools, continue_as_assistant)).transpose()
    }

    fn end_tokens(&self) -> Vec<u32> {
        self.network.config().end_ids.clone()
    }

    fn context_length(&self) -> usize {
        self.network.config().context
    }

    fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>> {
        let decode = |tokens: &[u32]| self.detokenize(tokens);
        let endings = Endings { ids: &self.network.config().end_ids, decode: &decode };
        generate(&self.network, prompts, sampling, &endings, &self.prefixes, self.rows_at_once)
    }

    fn snapshot(&self) -> Result<Box<dyn LanguageModel + Send>> {
        Ok(Box::new(Self {
            network: self.network.snapshot()?,
            tokenizer: self.tokenizer.clone(),
            template: self.template.clone(),
            prefixes: Arc::default(),
            rows_at_once: self.rows_at_once,
            origin: self.origin.clone(),
        }))
    }

    fn hidden_states(&mut self, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
        self.prefixes.clear();
        self.network.hidden_states(tokens, mask, adapter)
    }

    fn evaluate(
        &mut self,
        tokens: &Tensor,
        mask: &Tensor,
        wanted: &Tensor,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)> {
        // The rollout is over; the recorded pass needs its memory.
        self.prefixes.clear();
        self.network.evaluate(tokens, mask, wanted, adapter, grad)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use burn_tensor::DType;
    use rand_distr::{Distribution, StandardNormal};
    use roll_backends::optimizer::AdamW;
    use roll_core::{Noise, OptimizerConfig, Purpose};

    use super::super::cache::{Cache, Prefix};
    use super::super::config::LmConfig;
    use super::*;
    use roll_network::trainable::Trainable;

    fn adapters() -> Trainable {
        Trainable::Lora { rank: 2, alpha: 2.0, targets: vec!["q_proj".to_string()] }
    }

    /// A small policy whose trained parameters have random values.
    fn policy(trainable: &Trainable) -> CausalLm {
        let config = LmConfig::parse(
            br#"{"model_type": "qwen3", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4,
                 "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": true}"#,
        )
        .unwrap();
        let mut rng = Noise::new(3).generator(Purpose::Parameters, 0, 0);
        let mut draw = |shape: &[usize]| -> Vec<f32> {
            (0..shape.iter().product()).map(|_| 0.4 * Distribution::<f32>::sample(&StandardNormal, &mut rng)).collect()
        };
        let mut state = StateDict::new();
        for (name, shape) in config.weights() {
            state.insert(name, Tensor::new(draw(&shape), shape).unwrap());
        }
        let device = roll_backends::device("flex").unwrap();
        let mut network = Network::new(config, &state, DType::F32, &device).unwrap();
        network.add_trainable(trainable, &Noise::new(1), &state).unwrap();
        let mut policy = CausalLm::new(network, None, None).unwrap();
        let values = draw(&[policy.parameter_count()]);
        policy.write_parameters(&values).unwrap();
        policy
    }

    /// The statistics of `wanted` tokens, and the gradient of their sum weighted by `cotangent`.
    fn evaluated(policy: &mut CausalLm, wanted: [u8; 12], cotangent: &[f32]) -> ([Vec<f32>; 2], Vec<f32>) {
        let tensor = |values: [u8; 12]| Tensor::new(values.to_vec(), [2, 6]).unwrap();
        let ids = Tensor::new(vec![3i64, 1, 4, 1, 5, 9, 2, 6, 5, 3, 0, 0], [2, 6]).unwrap();
        let mask = tensor([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]);
        let (stats, pullback) = policy.evaluate(&ids, &mask, &tensor(wanted), Adapter::On, Grad::Record).unwrap();
        pullback.unwrap().pull(&Tensor::new(cotangent.to_vec(), [2, 2, 5]).unwrap()).unwrap();
        let mut gradient = vec![0.0; policy.parameter_count()];
        policy.take_gradients(&mut gradient).unwrap();
        ([stats.log_probs, stats.entropy].map(|values| values.f32s().unwrap().to_vec()), gradient)
    }

    #[test]
    fn wanted_tokens_have_the_statistics_and_gradients_of_a_pass_over_all() {
        let wanted = [0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1];
        // Of the wanted tokens, one is the first of its row and two are padding.
        let places = [1, 2, 6];
        let cotangent: Vec<f32> = (0..20).map(|i| (f64::from(i) * 0.7).sin() as f32).collect();
        let cotangent_of_places: Vec<f32> =
            (0..20).map(|i| if places.contains(&(i % 10)) { cotangent[i] } else { 0.0 }).collect();
        for trainable in [adapters(), Trainable::Full] {
            let mut policy = policy(&trainable);
            let (expected, expected_gradient) = evaluated(&mut policy, [1; 12], &cotangent_of_places);
            let (found, gradient) = evaluated(&mut policy, wanted, &cotangent);
            for (found, expected) in found.iter().zip(&expected) {
                for (place, value) in found.iter().enumerate() {
                    let expected = if places.contains(&place) { expected[place] } else { 0.0 };
                    assert!((value - expected).abs() < 1e-6, "{place}: {value}, expected {expected}");
                }
            }
            let largest = expected_gradient.iter().fold(0.0f32, |most, g| most.max(g.abs()));
            let differences = gradient.iter().zip(&expected_gradient).map(|(a, b)| (a - b).abs());
            assert!(largest > 0.1 && differences.fold(0.0, f32::max) < 1e-6 * largest, "{trainable:?}");
            // Nothing is wanted: nothing has a gradient.
            let ([log_probs, entropy], gradient) = evaluated(&mut policy, [0; 12], &cotangent);
            assert!([log_probs, entropy, gradient].concat().iter().all(|value| *value == 0.0));
        }
    }

    #[test]
    fn the_start_of_training_is_a_policy_of_its_own() {
        let mut policy = policy(&adapters());
        let log_probs = |policy: &mut CausalLm, adapter: Adapter| {
            let tokens = Tensor::new(vec![1i64, 5, 3, 7], [1, 4]).unwrap();
            let mask = Tensor::new(vec![1u8; 4], [1, 4]).unwrap();
            policy.evaluate(&tokens, &mask, &mask, adapter, Grad::Skip).unwrap().0.log_probs.to_f32_vec()
        };
        let (base, start) = (log_probs(&mut policy, Adapter::Off), log_probs(&mut policy, Adapter::On));
        assert_eq!(log_probs(&mut policy, Adapter::Start), base, "training starts from the base");
        let mut values = vec![0.0; policy.parameter_count()];
        policy.read_parameters(&mut values).unwrap();
        policy.network.start_from(values.clone());
        values.iter_mut().for_each(|value| *value += 0.5);
        policy.write_parameters(&values).unwrap();
        assert_eq!(log_probs(&mut policy, Adapter::Start), start);
        assert!(log_probs(&mut policy, Adapter::On) != start && log_probs(&mut policy, Adapter::Off) == base);
    }

    #[test]
    fn added_tokens_without_an_embedding_are_refused_where_a_text_has_them() {
        let with = |count: u32| {
            // The letters from a on, and a token after them.
            let letters = (0..count).map(|id| (char::from(b'a' + id as u8).to_string(), id));
            let vocab = serde_json::to_string(&letters.collect::<BTreeMap<_, _>>()).unwrap();
            let json = format!(
                r#"{{"version": "1.0", "added_tokens": [{{"id": {count}, "content": "<image>", "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}}], "normalizer": null,
                "pre_tokenizer": null, "post_processor": null, "decoder": null,
                "model": {{"type": "BPE", "vocab": {vocab}, "merges": []}}}}"#
            );
            let tokenizer = Tokenizer::parse(json.as_bytes()).unwrap();
            let network = policy(&adapters()).network;
            CausalLm::new(network, Some(tokenizer), None)
        };
        let model = with(12).unwrap();
        assert_eq!(model.tokenize("al").unwrap(), [0, 11]);
        let problem = model.tokenize("a<image>").unwrap_err().to_string();
        assert!(problem.contains("`<image>` (id 12)") && problem.contains("12 embeddings"), "{problem}");
        assert_eq!(with(11).unwrap().tokenize("<image>").unwrap(), [11]);
        let problem = with(13).err().unwrap().to_string();
        assert!(problem.contains("do not belong together"), "{problem}");
    }

    #[test]
    fn updates_clear_the_prefixes() {
        let policy = policy(&adapters());
        let mut updates = policy.device_updates().unwrap();
        let update = AdamW::new(&OptimizerConfig::default()).coefficients(1, 0.0, [1.0; 2]);
        for (updated, found) in [(false, Some(2)), (true, None)] {
            let begin_turn = |seed| policy.prefixes.begin_turn(seed, &[&[1, 2, 3]], || Cache::new(2, DType::F32));
            begin_turn(1);
            policy.prefixes.keep(vec![1, 2], Prefix { prompt: 0..0, slot: Some(0), tail: 2 });
            begin_turn(2);
            if updated {
                updates.update(&update).unwrap();
            }
            assert_eq!(policy.prefixes.take(&[1, 2, 3]).map(|prefix| prefix.len()), found);
        }
    }
}
