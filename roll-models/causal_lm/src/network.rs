//! The network: hidden states, token statistics with their pullback, and one step of generation.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

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

/// A decoder-only language model.
pub struct Network {
    config: LmConfig,
    store: Arc<dyn WeightStore>,
    parameters: Option<Parameters>,
    lora_scale: f64,
    products: DType,
    memory: Memory,
}

impl Network {
    /// Creates a network from weights under their Hugging Face names, stored as `dtype`. Fails if one is missing or has
    /// another shape. Other weights are ignored, and so is an output layer that the configuration ties.
    pub fn new(config: LmConfig, state: &StateDict, dtype: DType, device: &Device) -> Result<Self> {
        Self::with_quantised(config, state, BTreeMap::new(), true, dtype, device)
    }

    /// As [`Network::new`], with some matrices in quantised blocks. They stay so if `keeps_quantised`; otherwise each
    /// is stored as `dtype` before the next one is decoded.
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
        Ok(Self::with_store(config, Resident::from_weights(weights, device)))
    }

    /// Creates a network without its weights, which cannot compute: for checks of what belongs to it.
    pub fn without_weights(config: LmConfig, device: &Device) -> Self {
        Self::with_store(config, Resident::from_weights(HashMap::new(), device))
    }

    fn with_store(config: LmConfig, store: Resident) -> Self {
        let (store, products, memory) = (Arc::new(store), DType::F32, Memory::default());
        Self { config, store, parameters: None, lora_scale: 1.0, products, memory }
    }

    /// Sets the dtype of the blocks' matrix products: f32 (the default), or bf16 accumulated in f32. Logits are f32.
    pub fn with_products(mut self, products: DType) -> Self {
        self.products = products;
        self
    }

    /// Sets the memory use of the pullback.
    pub fn with_memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
    }

    /// Adds trainable parameters. Full training starts from the weights in `base`; the frozen ones stay, as the reference
    /// policy.
    pub fn train(&mut self, trainable: &Trainable, noise: &Noise, base: &StateDict) -> Result<()> {
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
                    let value = base.get(&name);
                    let value =
                        value.ok_or_else(|| Error::Misuse(format!("full training needs the weight `{name}`")))?;
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
            let mut flat = flat.into_iter();
            let values = specs.iter().map(|spec| flat.by_ref().take(spec.len()).collect()).collect();
            Ok::<_, Error>(Parameters::new(specs, values, self.store.device()))
        };
        Ok(Self {
            config: self.config.clone(),
            store: self.store.clone(),
            parameters: self.parameters.as_ref().map(copied).transpose()?,
            lora_scale: self.lora_scale,
            products: self.products,
            memory: self.memory,
        })
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

    /// Computes the log-probability and entropy of each token of `tokens` given those before it; see
    /// [`roll_core::LanguageModel::evaluate`].
    pub fn evaluate(
        &self,
        tokens: &Tensor,
        mask: &Tensor,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)> {
        let batch = Batch::new(tokens, mask)?;
        self.check(&batch.packed)?;
        let predictions = batch.predictions();
        let trainable = self.trainable(adapter);
        let parameters = trainable.as_ref().map(|s| s.parameters().clone());
        let head = self.head(trainable.as_ref())?;
        let device = self.store.device().clone();
        // Without parameters, a pullback has nothing to return.
        let recorded = if parameters.is_some() { grad } else { Grad::Skip };

        let rows = integers(predictions.rows.clone(), &device);
        let (predicting, total, record) = match batch.packed.is_empty() {
            true => (Burn::zeros([0, self.config.dim], (&device, DType::F32)), 0, None),
            false => {
                let pass = self.pass(&batch.packed, trainable, None);
                let start = NdTensor::from(Burn::<1>::zeros([1], (&device, DType::F32)));
                let (hidden, record) =
                    chain(&pass).forward(start, Vec::new(), recorded, self.memory, false, parameters.clone())?;
                let hidden = hidden.rank::<2>()?;
                let total = hidden.dims()[0];
                (hidden.select(0, rows.clone()), total, record)
            }
        };
        let (statistics, head_record) = head::evaluate(predicting, head, &predictions.targets)?;
        let stats = TokenStats {
            log_probs: batch.spread(&statistics.log_probs, &predictions)?,
            entropy: batch.spread(&statistics.entropy, &predictions)?,
        };
        let shape = [2, batch.rows, batch.columns.saturating_sub(1)];
        let dim = self.config.dim;
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |cotangent: &Tensor| {
                if cotangent.shape() != shape {
                    return Err(Error::shape("cotangent of token statistics", format!("{shape:?}"), cotangent.shape()));
                }
                let empty = Tensor::new(Vec::<f32>::new(), [0])?;
                let Some(record) = record else { return Ok(empty) };
                let (d_log_probs, d_entropy) = cotangent.f32s()?.split_at(shape[1] * shape[2]);
                let of = |values: &[f32]| predictions.places.iter().map(|p| values[*p]).collect::<Vec<_>>();
                let d = head_record.pull(&of(d_log_probs), &of(d_entropy), parameters.as_ref())?;
                let hidden = Burn::zeros([total, dim], (&device, DType::F32));
                let hidden = hidden.select_assign(0, rows, d, burn_tensor::IndexingUpdateOp::Add);
                record.pull(hidden.into())?;
                Ok(empty)
            })
        });
        Ok((stats, pullback))
    }

    /// Computes all logits, `[B, L, V]`, 0 at padding. For small vocabularies and tests; [`Network::evaluate`] never holds
    /// all of them.
    pub fn logits(&self, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
        let batch = Batch::new(tokens, mask)?;
        self.check(&batch.packed)?;
        let trainable = self.trainable(adapter);
        let head = self.head(trainable.as_ref())?;
        let values = match batch.packed.is_empty() {
            true => Vec::new(),
            false => to_host(head.logits(self.hidden(&self.pass(&batch.packed, trainable, None))?)?)?.to_f32_vec(),
        };
        batch.spread_rows(&values, self.config.vocab)
    }

    /// Computes the hidden states after the final norm, f32 `[B, L, D]`, 0 at padding.
    pub fn hidden_states(&self, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
        let batch = Batch::new(tokens, mask)?;
        self.check(&batch.packed)?;
        let values = match batch.packed.is_empty() {
            true => Vec::new(),
            false => to_host(self.hidden(&self.pass(&batch.packed, self.trainable(adapter), None))?)?.to_f32_vec(),
        };
        batch.spread_rows(&values, self.config.dim)
    }

    /// Returns the logits after the last token of each sequence of `packed`, `[sequences, V]`. Keys and values of earlier
    /// tokens are read from `cache`, and those of the new `tokens` are added to it.
    pub(super) fn next_logits(
        &self,
        packed: &Packed,
        cache: &Arc<Cache>,
        tokens: CachedTokens,
        trainable: Option<&Snapshot>,
    ) -> Result<Tensor> {
        self.check(packed)?;
        let hidden = self.hidden(&self.pass(packed, trainable.cloned(), Some((cache.clone(), tokens))))?;
        let last: Vec<i64> = packed.spans.iter().map(|s| s.end as i64 - 1).collect();
        let last = hidden.select(0, integers(last, self.store.device()));
        to_host(self.head(trainable)?.next_logits(last)?)
    }

    /// Dtype of matrix products, and of cached keys and values.
    pub(super) fn products(&self) -> DType {
        self.products
    }

    /// Returns the present trainable parameters if the adapter is on.
    pub(super) fn trainable(&self, adapter: Adapter) -> Option<Snapshot> {
        self.parameters.as_ref().filter(|_| adapter == Adapter::On).map(Parameters::snapshot)
    }

    fn hidden(&self, pass: &Arc<ForwardPass>) -> Result<Burn<2>> {
        let start = NdTensor::from(Burn::<1>::zeros([1], (self.store.device(), DType::F32)));
        chain(pass).forward(start, Vec::new(), Grad::Skip, self.memory, false, None)?.0.rank::<2>()
    }

    fn pass(
        &self,
        packed: &Packed,
        trainable: Option<Snapshot>,
        cache: Option<(Arc<Cache>, CachedTokens)>,
    ) -> Arc<ForwardPass> {
        let device = self.store.device();
        let tables = |rope: &Rope| rotary_tables(rope, self.config.head_dim, &packed.positions, device);
        Arc::new(ForwardPass {
            config: self.config.clone(),
            store: self.store.clone(),
            trainable,
            lora_scale: self.lora_scale,
            products: self.products,
            ids: integers(packed.ids.clone(), device),
            spans: packed.spans.clone(),
            rope: tables(&self.config.rope),
            window_rope: self.config.window_rope.as_ref().map(tables),
            cache,
        })
    }

    fn head(&self, trainable: Option<&Snapshot>) -> Result<Head> {
        let name = self.config.head_weight();
        let trainable = trainable.map(|all| all.segment(name)).transpose()?;
        let weight = match trainable.as_ref().and_then(|s| s.get(name)) {
            Some((index, shape, value)) => HeadWeight::Trained(value.clone().reshape([shape[0], shape[1]]), index),
            None => {
                let prefix = &name[..name.len() - "weight".len()];
                HeadWeight::Frozen(weights::get(&self.store.segment(prefix)?, name)?.clone())
            }
        };
        Ok(Head { weight, softcap: self.config.logit_softcap })
    }

    /// Fails on ids outside the vocabulary and on sequences longer than the context.
    fn check(&self, packed: &Packed) -> Result<()> {
        if let Some(id) = packed.ids.iter().find(|id| **id < 0 || **id >= self.config.vocab as i64) {
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

/// Returns the names, shapes and initial values of the adapters that `trainable` requests.
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

fn chain(pass: &Arc<ForwardPass>) -> Chain {
    let mut segments: Vec<Arc<dyn Segment>> = vec![Arc::new(Embedding(pass.clone()))];
    for index in 0..pass.config.layers {
        segments.push(Arc::new(Block { index, pass: pass.clone() }));
    }
    segments.push(Arc::new(FinalNorm(pass.clone())));
    Chain::new(segments)
}
