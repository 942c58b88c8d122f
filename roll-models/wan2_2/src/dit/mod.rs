//! The Wan diffusion transformer: the velocity of video latents, and its pullback.
//!
//! It covers I2V and T2V (one timestep for all tokens), TI2V-5B (timestep zero for the tokens of the known first frame)
//! and the CLIP branch of Wan2.1 I2V. [`Dit::velocities`] runs `block.rs` as a chain with gradient checkpointing; names
//! and order follow the official `wan/modules/model.py`.

mod batch;
mod block;
mod config;
pub mod embed;
mod rope;
#[cfg(test)]
mod tests;

use roll_network::pass::of_one;
pub use roll_network::pass::{PassMemory, PassSettings};
pub use roll_network::trainable::Trainable;
use roll_network::trained::Trained;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{DType, Device, Tensor as Burn};
use roll_backends::ops::{KeptAttention, TokenRanks};
use roll_backends::{
    Chain, NdTensor, Parameters, Resident, Segment, Snapshot, Tape, WeightStore, to_device, to_host, vjp,
};
use roll_core::{
    Adapter, Communicator, Conditioning, Error, Grad, Noise, ParameterSpec, Pullback, Result, StateDict, Tensor,
    Timestep, VelocityInput,
};

pub use block::{Block, Pass, Probe};
pub use config::DitConfig;
pub use roll_network::patch::{Grid, Order};
pub use rope::rotary_tables;

use batch::{Batch, BatchShape};
use block::{Head, PatchEmbedding};

/// Prefixes of the weights that stay f32 by default: the time embedding, which affects every block, and the head.
pub const F32_PREFIXES: [&str; 3] = ["time_embedding.", "time_projection.", "head."];

/// Prefixes of the weights of the embeddings, which all blocks share.
const EMBEDDING_PREFIXES: [&str; 3] = ["time_", "text_", "img_"];

/// Linear layers, for error messages.
const LAYER_EXAMPLES: &str = "layers of a block: self_attn.q, ..., ffn.0, ffn.2";

/// A transformer: the only one or one of two experts.
pub struct Dit {
    config: DitConfig,
    /// The frozen weights.
    store: Arc<dyn WeightStore>,
    /// The trained parameters.
    trained: Trained,
    /// The ranks between which the tokens of a pass are sharded.
    token_ranks: Option<Arc<TokenRanks>>,
    settings: PassSettings,
    probe: Option<Probe>,
    rotary: Rotary,
}

/// Cache of the rotary tables of the last pass, on the device. A run has few shapes, a trajectory has one shape.
#[derive(Default)]
struct Rotary(Mutex<Option<(BatchShape, [Burn<2>; 2])>>);

impl Rotary {
    fn tables(&self, shape: BatchShape, head_dim: usize, device: &Device) -> Result<[Burn<2>; 2]> {
        // A poisoned lock is harmless, because the tables are replaced in one assignment.
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((cached_shape, tables)) = &*cached
            && *cached_shape == shape
        {
            return Ok(tables.clone());
        }
        let (cos, sin) = shape.rotary_tables(head_dim)?;
        let tables = [to_device(&cos, device)?, to_device(&sin, device)?];
        *cached = Some((shape, tables.clone()));
        Ok(tables)
    }
}

impl Dit {
    /// Creates a transformer with resident weights (official names), stored as `dtype`. For `heads` see
    /// [`DitConfig::from_shapes`].
    pub fn new(state: &StateDict, heads: Option<usize>, dtype: DType, device: &Device) -> Result<Self> {
        let shapes: BTreeMap<_, _> = state.iter().map(|(k, t)| (k.clone(), t.shape().to_vec())).collect();
        let config = DitConfig::from_shapes(&shapes, heads)?;
        Ok(Self::with_store(config, Arc::new(Resident::new(state, dtype, device))))
    }

    /// Creates a transformer with the weights of a store.
    pub fn with_store(config: DitConfig, store: Arc<dyn WeightStore>) -> Self {
        Self {
            config,
            store,
            trained: Trained::default(),
            token_ranks: None,
            settings: PassSettings::default(),
            probe: None,
            rotary: Rotary::default(),
        }
    }

    /// Sets how passes compute and what recorded passes keep.
    pub fn with_settings(mut self, settings: PassSettings) -> Self {
        self.settings = settings;
        self
    }

    /// The settings of passes.
    pub fn settings(&self) -> PassSettings {
        self.settings
    }

    /// Passes intermediate values to `probe`.
    pub fn with_probe(mut self, probe: Probe) -> Self {
        self.probe = Some(probe);
        self
    }

    /// Shards the weights between `ranks` if all of them are trained ([`Parameters::sharded`]). Adapters are small and
    /// are replicated on every rank.
    pub fn sharding_weights(mut self, ranks: Arc<dyn Communicator>) -> Self {
        self.trained.shard(ranks);
        self
    }

    /// Shards the tokens of every pass between `ranks` (sequence parallelism). Each rank computes self-attention for
    /// its heads and everything else for its tokens, so the number of ranks must divide the heads.
    ///
    /// All ranks must make the same passes with the same inputs. Each rank receives the whole velocity and the whole
    /// cotangent of the latents. The parameter gradients of a rank cover its own tokens; the whole gradient is the sum
    /// over ranks, in their order.
    pub fn sharding_tokens(mut self, ranks: Arc<dyn Communicator>) -> Self {
        self.token_ranks = (ranks.world_size() > 1).then(|| Arc::new(TokenRanks::new(ranks)));
        self
    }

    /// Number of ranks between which the tokens of a pass are sharded.
    pub fn token_ranks(&self) -> usize {
        self.token_ranks.as_ref().map_or(1, |group| group.count())
    }

    /// Adds trainable parameters. Adapters do not change the network at first: A is uniform in +-1/sqrt(in), as in
    /// PEFT, and B is zero. `base` contains the initial weights of full fine-tuning.
    pub fn add_trainable(&mut self, trainable: &Trainable, noise: &Noise, base: &StateDict) -> Result<()> {
        let mut weights = self.config.weights();
        if *trainable == Trainable::Full {
            // Parameters are in the order of the forward pass, so that a pullback fills their gradients from the last
            // to the first.
            weights.sort_by_key(|(name, _)| segment_number(name));
        }
        self.trained.choose(trainable, weights, LAYER_EXAMPLES, noise, base, self.store.device())
    }

    /// Sizes of the network.
    pub fn config(&self) -> &DitConfig {
        &self.config
    }

    /// Trainable parameters, if there are any.
    pub fn parameters(&self) -> Option<&Parameters> {
        self.trained.parameters()
    }

    /// Scale of the adapters, `alpha / rank`.
    pub fn lora_scale(&self) -> f64 {
        self.trained.lora_scale()
    }

    /// Computes the velocity at `latents`, `[C, T, H, W]`. The pullback returns the cotangent of the latents and, with
    /// [`Adapter::On`], accumulates parameter gradients.
    pub fn velocity(
        &self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let input = VelocityInput { latents, timestep, conditioning };
        let (velocities, pullback) = self.velocities(&[input], adapter, grad)?;
        of_one(velocities, pullback, latents.shape())
    }

    /// Computes the velocities of `inputs`, whose latents have the same shape, as one batch: `[B, C, T, H, W]`. The
    /// pullback takes and returns cotangents of this shape. In linear layers, the tokens of all samples are the rows of
    /// one matrix.
    pub fn velocities(
        &self,
        inputs: &[VelocityInput<'_>],
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.velocities_keeping(inputs, adapter, grad, self.settings.kept)
    }

    /// Computes velocities like [`Dit::velocities`]. `kept` is what this pass keeps until its pullback.
    pub fn velocities_keeping(
        &self,
        inputs: &[VelocityInput<'_>],
        adapter: Adapter,
        grad: Grad,
        kept: PassMemory,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let device = self.store.device().clone();
        let batch = Batch::new(inputs, &self.config)?;
        // This rank's tokens: all, unless they are sharded.
        let own_tokens = self.own_tokens(&batch)?;
        let snapshot = self.trained.snapshot(adapter, &device)?;
        // The embeddings need gradients only if their own weights are trained.
        let parameters = snapshot.as_ref().map(|snapshot| snapshot.parameters().clone());
        let trains_embeddings =
            grad.is_on() && parameters.as_ref().is_some_and(|parameters| has_embedding(parameters.specs()));
        let pass = Arc::new(self.new_pass(&batch, &own_tokens, snapshot, trains_embeddings)?);

        let tape = if trains_embeddings { Tape::on() } else { Tape::off() };
        let (shared, recorded_embeddings) = vjp(&[], tape, |_, tape| embed_all(&pass, tape, &batch, &device))?;

        let state = NdTensor::from(own_tokens.select(to_device::<2>(&batch.tokens, &device)?));
        let chain = chain_of_segments(&pass, kept.keeps_attention && grad.is_on());
        let (out, record) = chain.forward(state, shared, grad, kept.memory, trains_embeddings, parameters.clone())?;
        let velocities = batch.shape.to_latents(&own_tokens.gather(to_host(out.rank::<2>()?)?)?, Order::ChannelLast)?;

        let shape = batch.shape;
        let channels = self.config.out_channels;
        let pullback = record.map(|record| {
            Pullback::new(move |cotangents: &Tensor| {
                let d_velocity_tokens = shape.to_tokens(cotangents, Order::ChannelLast)?;
                let d_out = own_tokens.select(to_device::<2>(&d_velocity_tokens, &device)?).into();
                let (d_tokens, d_shared) = record.pull(d_out)?;
                if trains_embeddings {
                    recorded_embeddings.pull(d_shared, parameters.as_ref());
                }
                let d_tokens = own_tokens.gather(to_host(d_tokens.rank::<2>()?)?)?;
                // The conditioning channels, which come after the latents, need no cotangent.
                first_channels(&shape.to_latents(&d_tokens, Order::ChannelFirst)?, channels)
            })
        });
        Ok((velocities, pullback))
    }

    /// The state of a pass over this rank's tokens of `batch`.
    fn new_pass(
        &self,
        batch: &Batch,
        own_tokens: &OwnTokens,
        trainable: Option<Snapshot>,
        trains_embeddings: bool,
    ) -> Result<Pass> {
        let device = self.store.device();
        let tables = self.rotary.tables(batch.shape, self.config.head_dim(), device)?;
        let [cos, sin] = tables.map(|table| own_tokens.select(table));
        Ok(Pass {
            config: self.config.clone(),
            store: self.store.clone(),
            trainable,
            trains_all_weights: self.trained.is_full(),
            lora_scale: self.trained.lora_scale(),
            products: self.settings.products,
            fp8: self.settings.fp8_products,
            activations: self.settings.activations_on(device),
            rope: (cos, sin),
            samples: batch.shape.samples,
            groups: own_tokens.groups(&batch.groups),
            trains_modulation: self.trained.is_full() || trains_embeddings,
            image_rows: batch.image_rows,
            token_ranks: self.token_ranks.clone(),
            probe: self.probe.clone(),
        })
    }

    /// Sets the parameters of [`Adapter::Start`], by name. The device holds them from the first pass that uses them.
    pub fn start_from(&mut self, state: StateDict) {
        self.trained.start_from(state);
    }

    /// The tokens that this rank computes. Fails if the number of ranks does not divide tokens and heads.
    fn own_tokens(&self, batch: &Batch) -> Result<OwnTokens> {
        let tokens = batch.tokens.shape()[0];
        let Some(group) = self.token_ranks.clone() else { return Ok(OwnTokens { rows: 0..tokens, group: None }) };
        let (count, heads) = (group.count(), self.config.heads);
        if batch.shape.samples != 1 {
            let problem = "tokens are sharded between ranks for one sample at a time";
            return Err(Error::Unsupported(problem.into()));
        }
        if !tokens.is_multiple_of(count) || !heads.is_multiple_of(count) {
            return Err(Error::Unsupported(format!(
                "{count} ranks cannot divide {tokens} tokens and {heads} heads into equal parts: take a number of \
                 ranks that divides both, or another size of the video"
            )));
        }
        let tokens_per_rank = tokens / count;
        let start = group.rank() * tokens_per_rank;
        Ok(OwnTokens { rows: start..start + tokens_per_rank, group: Some(group) })
    }
}

/// Whether a weight of the embeddings is among the parameters `specs`.
fn has_embedding(specs: &[ParameterSpec]) -> bool {
    let is_embedding = |name: &str| EMBEDDING_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    specs.iter().any(|spec| is_embedding(&spec.name))
}

/// The tokens that this rank computes.
struct OwnTokens {
    /// Their rows in the matrix of all tokens.
    rows: Range<usize>,
    /// The ranks between which the tokens are sharded; `None` if this rank computes all tokens.
    group: Option<Arc<TokenRanks>>,
}

impl OwnTokens {
    /// Selects this rank's rows from a matrix of all tokens.
    fn select(&self, all: Burn<2>) -> Burn<2> {
        match self.group {
            Some(_) => all.narrow(0, self.rows.start, self.rows.len()),
            None => all,
        }
    }

    /// Number of this rank's tokens in each group. `sizes` are the numbers of all tokens in each group.
    fn groups(&self, sizes: &[usize]) -> Vec<usize> {
        let mut start = 0;
        let own_size = |size: &usize| {
            let group = start..start + size;
            start = group.end;
            group.end.min(self.rows.end).saturating_sub(group.start.max(self.rows.start))
        };
        sizes.iter().map(own_size).collect()
    }

    /// Gathers the matrix of all tokens from the rows of every rank.
    fn gather(&self, own: Tensor) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(own) };
        // Fails if an all-to-all failed during the pass.
        group.check()?;
        let shape = [own.shape()[0] * group.count(), own.shape()[1]];
        Tensor::new(group.all_gather(own.f32s()?)?, shape)
    }
}

/// Position of a weight's segment in a pass: embeddings, patch embedding, blocks, head.
fn segment_number(name: &str) -> usize {
    const BEFORE_BLOCKS: [&str; 4] = ["time_", "text_embedding.", "img_emb.", "patch_embedding."];
    if let Some(position) = BEFORE_BLOCKS.iter().position(|prefix| name.starts_with(prefix)) {
        return position;
    }
    let block_number = || name.strip_prefix("blocks.")?.split('.').next()?.parse::<usize>().ok();
    // A name outside the blocks is the head's.
    block_number().map_or(usize::MAX, |block| BEFORE_BLOCKS.len() + block)
}

/// The segments of a pass. With `keeps_attention`, each block keeps the result of its self-attention.
fn chain_of_segments(pass: &Arc<Pass>, keeps_attention: bool) -> Chain {
    let mut segments: Vec<Arc<dyn Segment>> = vec![Arc::new(PatchEmbedding(pass.clone()))];
    for index in 0..pass.config.layers {
        segments.push(Arc::new(Block {
            index,
            pass: pass.clone(),
            kept: keeps_attention.then(KeptAttention::default),
        }));
    }
    segments.push(Arc::new(Head(pass.clone())));
    Chain::new(segments).with_input_dtype(pass.products)
}

/// Computes the shared tensors of the chain, in the order of [`block::shared`].
fn embed_all(pass: &Pass, tape: &Tape, batch: &Batch, device: &Device) -> Result<Vec<NdTensor>> {
    let sinusoid = embed::sinusoid(&batch.timesteps, pass.config.freq_dim, device);
    let (time, modulation) = pass.scoped("time_", DType::F32, tape, |scope| embed::time(scope, sinusoid))?;
    let context = to_device::<2>(&batch.context, device)?;
    let mut context = pass.scoped("text_embedding.", DType::F32, tape, |scope| embed::text(scope, context))?;
    if let Some(tokens) = &batch.image_tokens {
        let tokens = to_device::<2>(tokens, device)?;
        let image = pass.scoped("img_emb.", DType::F32, tape, |scope| embed::image(scope, tokens))?;
        context = pass.interleaved(image, context);
    }
    Ok(vec![time.into(), modulation.into(), context.into()])
}

/// Selects the first `channels` channels of each latent in a batch.
fn first_channels(stack: &Tensor, channels: usize) -> Result<Tensor> {
    let [count, all, t, h, w] = *stack.shape() else {
        return Err(Error::shape("latents", "[B, C, T, H, W]", stack.shape()));
    };
    let volume = t * h * w;
    let by_sample = stack.f32s()?.chunks_exact(all * volume);
    let selected: Vec<f32> = by_sample.flat_map(|sample| &sample[..channels * volume]).copied().collect();
    Tensor::new(selected, [count, channels, t, h, w])
}

/// Names, shapes and initial values of the adapters for a transformer of these sizes; see
/// [`roll_network::trainable::lora_parameters`].
pub fn lora_parameters(
    config: &DitConfig,
    trainable: &Trainable,
    noise: &Noise,
) -> Result<(Vec<ParameterSpec>, Vec<Vec<f32>>)> {
    roll_network::trainable::lora_parameters(config.weights(), trainable, noise, LAYER_EXAMPLES)
}
