//! The network: hidden states, token statistics with their pullback, and one step of generation.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use burn_tensor::{DType, Device, Tensor as Burn};
use roll_backends::{
    BlockMatrix, Chain, Memory, NdTensor, Parameters, Resident, Segment, Snapshot, Weight, WeightStore, to_host,
    weights,
};
use roll_core::{Adapter, Error, Grad, Noise, ParameterSpec, Pullback, Result, StateDict, Tensor, TokenStats};
use roll_network::trainable::{Trainable, lora_parameters};

use super::block::{Block, Embedding, FinalNorm, ForwardPass, rotary_tables};
use super::cache::{Cache, CachedTokens};
use super::config::{LmConfig, Rope};
use super::head::{self, Head, HeadWeight};
use super::integers;
use super::loaded::decoded;
use super::packed::{Batch, Packed};
use super::pictures::{PictureTokens, is_picture};

/// A decoder-only language model.
pub struct Network {
    config: LmConfig,
    /// The frozen weights.
    store: Arc<dyn WeightStore>,
    /// The trainable parameters: adapters, or a copy of every weight.
    parameters: Option<Parameters>,
    /// Those of [`Adapter::Start`], if training starts from a file.
    start: Option<Arc<Start>>,
    lora_scale: f64,
    /// Dtype of matrix products.
    products: DType,
    /// What a recorded pass keeps for its pullback.
    memory: Memory,
    /// The tokens that represent pictures, if the model reads them.
    pub(super) pictures: Option<Arc<dyn PictureTokens>>,
}

/// The trained parameters at the start of training.
struct Start {
    /// All values, in the order of the parameters.
    values: Vec<f32>,
    /// On the device, from the first pass that uses them.
    uploaded: OnceLock<Parameters>,
}

impl Network {
    /// Creates a network from weights under their Hugging Face names, stored as `dtype`. Fails if a weight is missing
    /// or has another shape. Weights that the network does not have are ignored, including an output layer that the
    /// configuration ties.
    pub fn new(config: LmConfig, state: &StateDict, dtype: DType, device: &Device) -> Result<Self> {
        let (no_matrices, keeps_quantised) = (BTreeMap::new(), true);
        Self::with_quantised(config, state, no_matrices, keeps_quantised, dtype, device)
    }

    /// Like [`Network::new`], with some matrices in quantised blocks. They stay quantised if `keeps_quantised`.
    /// Otherwise they are decoded and stored as `dtype`, one after the other.
    pub fn with_quantised(
        config: LmConfig,
        state: &StateDict,
        mut quantised: BTreeMap<String, BlockMatrix>,
        keeps_quantised: bool,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut weights = HashMap::new();
        for (name, shape) in config.weights() {
            let weight = match (quantised.remove(&name), state.get(&name)) {
                (Some(matrix), _) if keeps_quantised => Weight::from_blocks(matrix, device),
                (Some(matrix), _) => Weight::new(&decoded(&matrix)?, dtype, device),
                (None, Some(tensor)) => Weight::new(tensor, dtype, device),
                (None, None) => return Err(Error::Misuse(format!("the weight `{name}` is missing"))),
            };
            if weight.shape() != shape {
                return Err(Error::shape(&name, format!("{shape:?}, as config.json has it"), weight.shape()));
            }
            weights.insert(name, weight);
        }
        Ok(Self::with_store(config, Arc::new(Resident::from_weights(weights, device))))
    }

    /// Creates a network without frozen weights. It computes once all weights are trained, but has no reference policy.
    pub fn without_weights(config: LmConfig, device: &Device) -> Self {
        Self::with_store(config, Arc::new(Resident::from_weights(HashMap::new(), device)))
    }

    /// Creates a network whose frozen weights lie in `store` under their Hugging Face names, e.g. one that streams them.
    /// Shapes are not checked.
    pub fn with_store(config: LmConfig, store: Arc<dyn WeightStore>) -> Self {
        let (products, memory) = (DType::F32, Memory::default());
        Self { config, store, parameters: None, start: None, lora_scale: 1.0, products, memory, pictures: None }
    }

    /// Sets the dtype of matrix products: f32 (the default), or bf16 accumulated in f32. Logits are f32.
    pub fn with_products(mut self, products: DType) -> Self {
        self.products = products;
        self
    }

    /// Sets what a recorded pass keeps for its pullback.
    pub fn with_memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
    }

    /// Adds trainable parameters. Full training starts from the weights in `base`. The frozen weights, if there are
    /// any, stay as the reference policy.
    pub fn add_trainable(&mut self, trainable: &Trainable, noise: &Noise, base: &StateDict) -> Result<()> {
        let (specs, values) = match trainable {
            Trainable::Frozen => {
                self.parameters = None;
                return Ok(());
            }
            Trainable::Lora { .. } | Trainable::Layers { .. } => {
                let (specs, values) = adapters(&self.config, trainable, noise)?;
                self.lora_scale = trainable.lora_scale();
                (specs, values)
            }
            Trainable::Full => {
                let (mut specs, mut values) = (Vec::new(), Vec::new());
                for (name, shape) in self.config.weights() {
                    let Some(value) = base.get(&name) else {
                        return Err(Error::Misuse(format!("full training needs the weight `{name}`")));
                    };
                    values.push(value.to_f32_vec());
                    specs.push(ParameterSpec { name, shape });
                }
                (specs, values)
            }
        };
        self.parameters = Some(Parameters::new(specs, values, self.store.device()));
        Ok(())
    }

    /// Returns a copy that updates do not change: it shares the frozen weights and copies the trained ones.
    pub fn snapshot(&self) -> Result<Self> {
        let copied = |trained: &Parameters| {
            let specs = trained.specs().to_vec();
            let mut flat = vec![0.0; specs.iter().map(ParameterSpec::len).sum()];
            trained.read(&mut flat)?;
            Ok::<_, Error>(self.upload(specs, &flat))
        };
        Ok(Self {
            config: self.config.clone(),
            store: self.store.clone(),
            parameters: self.parameters.as_ref().map(copied).transpose()?,
            start: self.start.clone(),
            lora_scale: self.lora_scale,
            products: self.products,
            memory: self.memory,
            pictures: self.pictures.clone(),
        })
    }

    /// Sets the values of the trained parameters under [`Adapter::Start`], in the order of the parameters. Without them,
    /// it is the same as [`Adapter::Off`].
    pub fn start_from(&mut self, values: Vec<f32>) {
        self.start = Some(Arc::new(Start { values, uploaded: OnceLock::new() }));
    }

    /// Creates parameters on the device from the values of all, one after another.
    fn upload(&self, specs: Vec<ParameterSpec>, flat: &[f32]) -> Parameters {
        let mut rest = flat;
        let values = specs.iter().map(|spec| {
            let (values, others) = rest.split_at(spec.len());
            rest = others;
            values.to_vec()
        });
        let values = values.collect();
        Parameters::new(specs, values, self.store.device())
    }

    /// Architecture of the network.
    pub fn config(&self) -> &LmConfig {
        &self.config
    }

    /// Trainable parameters, if there are any.
    pub fn parameters(&self) -> Option<&Parameters> {
        self.parameters.as_ref()
    }

    /// Size of the frozen weights in bytes.
    pub fn frozen_bytes(&self) -> Result<usize> {
        Ok(self.store.segment("")?.values().map(Weight::size).sum())
    }

    /// Scale `alpha / rank` of the LoRA.
    pub fn lora_scale(&self) -> f64 {
        self.lora_scale
    }

    /// Computes the log-probability and entropy of each `wanted` token given the tokens before it; see
    /// [`roll_core::LanguageModel::evaluate`].
    pub fn evaluate(
        &self,
        tokens: &Tensor,
        mask: &Tensor,
        wanted: &Tensor,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)> {
        let batch = self.batch(tokens, mask)?;
        let predictions = batch.predictions(wanted)?;
        let trainable = self.trainable(adapter)?;
        let parameters = trainable.as_ref().map(|s| s.parameters().clone());
        let head = self.head(trainable.as_ref())?;
        let device = self.store.device().clone();
        // Without parameters, a pullback has nothing to return.
        let grad_of_chain = if parameters.is_some() { grad } else { Grad::Skip };

        // The hidden states that predict a token, among those of all tokens.
        let predicting_rows = integers(predictions.rows.clone(), &device);
        let (predicting, token_count, record) = if batch.packed.is_empty() {
            (Burn::zeros([0, self.config.dim], (&device, DType::F32)), 0, None)
        } else {
            let pass = self.pass(&batch.packed, trainable, NO_CACHE)?;
            let (hidden, record) = chain(&pass).forward(
                self.unused_state(),
                Vec::new(),
                grad_of_chain,
                self.memory,
                TRACK_SHARED,
                parameters.clone(),
            )?;
            let hidden = hidden.rank::<2>()?;
            let token_count = hidden.dims()[0];
            (hidden.select(0, predicting_rows.clone()), token_count, record)
        };
        let (statistics, head_record) = head::evaluate(predicting, head, &predictions.targets)?;
        let stats = TokenStats {
            log_probs: batch.spread(&statistics.log_probs, &predictions)?,
            entropy: batch.spread(&statistics.entropy, &predictions)?,
        };
        // Log-probabilities and entropies, stacked.
        let shape = [2, batch.rows, batch.columns.saturating_sub(1)];
        let dim = self.config.dim;
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |cotangent: &Tensor| {
                if cotangent.shape() != shape {
                    return Err(Error::shape("cotangent of token statistics", format!("{shape:?}"), cotangent.shape()));
                }
                // The input, tokens, has no gradient; gradients of parameters accumulate in the network.
                let no_gradient = Tensor::new(Vec::<f32>::new(), [0])?;
                let Some(record) = record else { return Ok(no_gradient) };
                let (d_log_probs, d_entropy) = cotangent.f32s()?.split_at(shape[1] * shape[2]);
                let packed = |values: &[f32]| predictions.places.iter().map(|p| values[*p]).collect::<Vec<_>>();
                let d_predicting = head_record.pull(&packed(d_log_probs), &packed(d_entropy), parameters.as_ref())?;
                let zeros = Burn::zeros([token_count, dim], (&device, DType::F32));
                let d_hidden =
                    zeros.select_assign(0, predicting_rows, d_predicting, burn_tensor::IndexingUpdateOp::Add);
                record.pull(d_hidden.into())?;
                Ok(no_gradient)
            })
        });
        Ok((stats, pullback))
    }

    /// Computes all logits, `[B, L, V]`, 0 at padding. For small vocabularies and tests; [`Network::evaluate`] never
    /// holds all of them.
    pub fn logits(&self, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
        let batch = self.batch(tokens, mask)?;
        let trainable = self.trainable(adapter)?;
        let head = self.head(trainable.as_ref())?;
        let values = if batch.packed.is_empty() {
            Vec::new()
        } else {
            let hidden = self.hidden(&self.pass(&batch.packed, trainable, NO_CACHE)?)?;
            to_host(head.logits(hidden)?)?.to_f32_vec()
        };
        batch.spread_rows(&values, self.config.vocab)
    }

    /// Computes the hidden states after the final norm, f32 `[B, L, D]`, 0 at padding.
    pub fn hidden_states(&self, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
        let batch = self.batch(tokens, mask)?;
        let values = if batch.packed.is_empty() {
            Vec::new()
        } else {
            let pass = self.pass(&batch.packed, self.trainable(adapter)?, NO_CACHE)?;
            to_host(self.hidden(&pass)?)?.to_f32_vec()
        };
        batch.spread_rows(&values, self.config.dim)
    }

    /// Computes the hidden states after the first `blocks` blocks, before the final norm: f32 `[B, L, D]`, 0 at padding.
    /// Later blocks do not run and their weights are not read. Fails if the network has fewer blocks.
    pub fn states_after(&self, blocks: usize, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
        if blocks > self.config.layers {
            let problem = format!("expected at most the model's {} blocks, found {blocks}", self.config.layers);
            return Err(Error::Misuse(problem));
        }
        let batch = self.batch(tokens, mask)?;
        let values = if batch.packed.is_empty() {
            Vec::new()
        } else {
            let pass = self.pass(&batch.packed, self.trainable(adapter)?, NO_CACHE)?;
            let chain = Chain::new(embedding_and_blocks(&pass, blocks));
            let state = self.unused_state();
            let (states, _) = chain.forward(state, Vec::new(), Grad::Skip, self.memory, TRACK_SHARED, None)?;
            to_host(states.rank::<2>()?)?.to_f32_vec()
        };
        batch.spread_rows(&values, self.config.dim)
    }

    /// Returns the logits after the last token of each sequence of `packed`, `[sequences, V]`. `tokens` says where the
    /// tokens of `packed` belong in `cache`: their keys and values are added to it, those of earlier tokens read from
    /// it.
    pub(super) fn next_logits(
        &self,
        packed: &Packed,
        cache: &Arc<Cache>,
        tokens: CachedTokens,
        trainable: Option<&Snapshot>,
    ) -> Result<Tensor> {
        self.check(packed)?;
        let hidden = self.hidden(&self.pass(packed, trainable.cloned(), Some((cache.clone(), tokens)))?)?;
        let last_rows: Vec<i64> = packed.spans.iter().map(|s| s.end as i64 - 1).collect();
        let last_hidden = hidden.select(0, integers(last_rows, self.store.device()));
        to_host(self.head(trainable)?.next_logits(last_hidden)?)
    }

    /// The frozen weights.
    pub(super) fn store(&self) -> &Arc<dyn WeightStore> {
        &self.store
    }

    /// What a recorded pass keeps for its pullback.
    pub(super) fn memory(&self) -> Memory {
        self.memory
    }

    /// Device of the weights.
    pub(super) fn device(&self) -> &Device {
        self.store.device()
    }

    /// Dtype of matrix products, and of cached keys and values.
    pub(super) fn products(&self) -> DType {
        self.products
    }

    /// Returns the trainable parameters that take part in a pass with `adapter`: the present ones, those at the start, or
    /// none. Fails if there would be none and the frozen weights were not kept.
    pub(super) fn trainable(&self, adapter: Adapter) -> Result<Option<Snapshot>> {
        let Some(parameters) = &self.parameters else { return Ok(None) };
        match (adapter, &self.start) {
            (Adapter::On, _) => Ok(Some(parameters.snapshot())),
            (Adapter::Start, Some(start)) => {
                let upload = || self.upload(parameters.specs().to_vec(), &start.values);
                Ok(Some(start.uploaded.get_or_init(upload).snapshot()))
            }
            _ if self.store.shape(self.config.head_weight()).is_none() => {
                let problem = "the weights that training starts from were not kept, because the algorithm's options \
                               need no reference policy: it cannot be evaluated";
                Err(Error::Unsupported(problem.into()))
            }
            (Adapter::Start, None) | (Adapter::Off, _) => Ok(None),
        }
    }

    /// Returns the hidden states after the final norm, `[N, D]`, without recording them.
    fn hidden(&self, pass: &Arc<ForwardPass>) -> Result<Burn<2>> {
        let (hidden, _) =
            chain(pass).forward(self.unused_state(), Vec::new(), Grad::Skip, self.memory, TRACK_SHARED, None)?;
        hidden.rank::<2>()
    }

    /// The first state of the chain, which [`Embedding`] ignores.
    pub(super) fn unused_state(&self) -> NdTensor {
        NdTensor::from(Burn::<1>::zeros([1], (self.store.device(), DType::F32)))
    }

    /// The inputs of a forward pass over `packed`.
    pub(super) fn pass(
        &self,
        packed: &Packed,
        trainable: Option<Snapshot>,
        cache: Option<(Arc<Cache>, CachedTokens)>,
    ) -> Result<Arc<ForwardPass>> {
        let device = self.store.device();
        let tables = |rope: &Rope| rotary_tables(rope, self.config.head_dim, &packed.positions, device);
        let rope = match &self.pictures {
            Some(pictures) if !packed.places.is_empty() => pictures.rope(&packed.places),
            _ => tables(&self.config.rope),
        };
        let window_rope = self.config.window_rope.as_ref().map(tables);
        self.pass_with(packed, trainable, cache, rope, window_rope)
    }

    /// Packs `tokens` under `mask`; see [`Batch::new`]. A model that reads pictures places the tokens, too.
    fn batch(&self, tokens: &Tensor, mask: &Tensor) -> Result<Batch> {
        let mut batch = Batch::new(tokens, mask)?;
        self.check(&batch.packed)?;
        for span in batch.packed.spans.clone() {
            let ids: Vec<u32> = batch.packed.ids[span].iter().map(|id| *id as u32).collect();
            if let Some(mut places) = self.places(&ids)? {
                places.truncate(ids.len());
                batch.packed.places.extend(places);
            }
        }
        Ok(batch)
    }

    /// The inputs of a forward pass over `packed` with these rotary tables; see [`ForwardPass`].
    pub(super) fn pass_with(
        &self,
        packed: &Packed,
        trainable: Option<Snapshot>,
        cache: Option<(Arc<Cache>, CachedTokens)>,
        rope: (Burn<2>, Burn<2>),
        window_rope: Option<(Burn<2>, Burn<2>)>,
    ) -> Result<Arc<ForwardPass>> {
        let word = |id: &i64| if is_picture(*id) { 0 } else { *id };
        Ok(Arc::new(ForwardPass {
            config: self.config.clone(),
            store: self.store.clone(),
            trainable,
            lora_scale: self.lora_scale,
            products: self.products,
            ids: integers(packed.ids.iter().map(word).collect(), self.store.device()),
            pictures: self.picture_rows(packed)?,
            spans: packed.spans.clone(),
            rope,
            window_rope,
            cache,
        }))
    }

    /// The output layer, with its trained weight if it is among the trainable parameters.
    fn head(&self, trainable: Option<&Snapshot>) -> Result<Head> {
        let name = self.config.head_weight();
        let trainable = trainable.map(|all| all.segment(name)).transpose()?;
        let weight = match trainable.as_ref().and_then(|s| s.get(name)) {
            Some((index, shape, value)) => HeadWeight::Trained(value.clone().reshape([shape[0], shape[1]]), index),
            None => {
                // Segments are named by the prefix of their weights, `lm_head.`.
                let prefix = &name[..name.len() - "weight".len()];
                HeadWeight::Frozen(weights::get(&self.store.segment(prefix)?, name)?.clone())
            }
        };
        Ok(Head { weight, softcap: self.config.logit_softcap, products: self.products })
    }

    /// Fails on ids outside the vocabulary and on sequences longer than the context.
    pub(super) fn check(&self, packed: &Packed) -> Result<()> {
        let is_word = |id: i64| (0..self.config.vocab as i64).contains(&id);
        let is_known = |id: i64| is_word(id) || (self.pictures.is_some() && is_picture(id));
        if let Some(id) = packed.ids.iter().find(|id| !is_known(**id)) {
            return Err(Error::Misuse(format!("the token id {id} is outside the vocabulary of {}", self.config.vocab)));
        }
        match packed.positions.iter().max() {
            Some(last) if *last >= self.config.context => Err(Error::Unsupported(format!(
                "a sequence of {} tokens is longer than the model's context of {}",
                last + 1,
                self.config.context
            ))),
            _ => Ok(()),
        }
    }
}

/// The chain has no inputs that its segments share, so it tracks none.
const TRACK_SHARED: bool = false;

/// The cache of a pass over whole sequences.
const NO_CACHE: Option<(Arc<Cache>, CachedTokens)> = None;

/// Returns names and shapes, then the initial values, of the adapters that `trainable` requests.
pub(super) fn adapters(
    config: &LmConfig,
    trainable: &Trainable,
    noise: &Noise,
) -> Result<(Vec<ParameterSpec>, Vec<Vec<f32>>)> {
    lora_parameters(
        // Adapters of the output layer and of the embedding would have no effect.
        config.weights().into_iter().filter(|(name, _)| name.starts_with("model.layers.")).collect(),
        trainable,
        noise,
        &format!("layers of a block: {}", config.linear_layers().replace(',', ", ")),
    )
}

/// The segments of a forward pass: embedding, blocks, final norm.
fn chain(pass: &Arc<ForwardPass>) -> Chain {
    let mut segments = embedding_and_blocks(pass, pass.config.layers);
    segments.push(Arc::new(FinalNorm(pass.clone())));
    Chain::new(segments)
}

/// The embedding and the first `blocks` blocks of a forward pass.
fn embedding_and_blocks(pass: &Arc<ForwardPass>, blocks: usize) -> Vec<Arc<dyn Segment>> {
    let mut segments: Vec<Arc<dyn Segment>> = vec![Arc::new(Embedding(pass.clone()))];
    for index in 0..blocks {
        segments.push(Arc::new(Block { index, pass: pass.clone() }));
    }
    segments
}
