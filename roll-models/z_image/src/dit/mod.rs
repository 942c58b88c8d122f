//! The Z-Image diffusion transformer: the velocity of latents of one frame, and its pullback.
//!
//! [`Dit::velocities`] embeds the time and refines the captions (`block.rs`), then runs patch embedding, noise refiners,
//! joint blocks and the final layer as a chain with gradient checkpointing. Names follow the published checkpoints,
//! which are those of diffusers; `keys.rs` reads ComfyUI's single files.
//!
//! Samples of a batch may have captions of different lengths: their tokens are the rows of one matrix, and attention
//! runs within each sample, so that nothing is masked.

mod batch;
mod block;
mod config;

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{DType, Device};
use roll_backends::ops::KeptAttention;
use roll_backends::{Chain, NdTensor, Parameters, Resident, Segment, Tape, WeightStore, to_device, to_host, vjp};
use roll_core::{
    Adapter, Communicator, Conditioning, Grad, Noise, ParameterSpec, Pullback, Result, StateDict, Tensor, Timestep,
    VelocityInput,
};
use roll_network::pass::of_one;
pub use roll_network::pass::{PassMemory, PassSettings};
pub use roll_network::trainable::Trainable;
use roll_network::trained::Trained;

pub use block::Probe;
pub use config::{DitConfig, FINAL_LAYER, PATCH, PATCH_EMBEDDING};

use batch::Batch;
use block::{Block, FinalLayer, Join, Pass, PatchEmbedding};

/// Prefixes of the weights that stay f32 by default: the time embedding, which affects every block, and the final layer.
pub const F32_PREFIXES: [&str; 2] = ["t_embedder.", "all_final_layer."];

/// Prefixes of the weights that are read before the chain.
const EMBEDDING_PREFIXES: [&str; 4] = ["t_embedder.", "cap_embedder.", "cap_pad_token", "context_refiner."];

/// Linear layers, for error messages.
const LAYER_EXAMPLES: &str = "layers of a block: attention.to_q, attention.to_k, attention.to_v, attention.to_out.0, \
                              feed_forward.w1, feed_forward.w2, feed_forward.w3";

/// Z-Image's transformer.
pub struct Dit {
    config: DitConfig,
    /// The frozen weights.
    store: Arc<dyn WeightStore>,
    /// The trained parameters.
    trained: Trained,
    settings: PassSettings,
    probe: Option<Probe>,
}

impl Dit {
    /// Creates a transformer with resident weights (diffusers names), stored as `dtype`. For `axes` see
    /// [`DitConfig::from_shapes`], whose errors it returns.
    pub fn new(state: &StateDict, axes: Option<[usize; 3]>, dtype: DType, device: &Device) -> Result<Self> {
        let shapes: BTreeMap<_, _> = state.iter().map(|(k, t)| (k.clone(), t.shape().to_vec())).collect();
        let config = DitConfig::from_shapes(&shapes, axes)?;
        Ok(Self::with_store(config, Arc::new(Resident::new(state, dtype, device))))
    }

    /// Creates a transformer with the weights of a store.
    pub fn with_store(config: DitConfig, store: Arc<dyn WeightStore>) -> Self {
        Self { config, store, trained: Trained::default(), settings: PassSettings::default(), probe: None }
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

    /// Shards the weights between `ranks` if all of them are trained.
    pub fn sharding_weights(mut self, ranks: Arc<dyn Communicator>) -> Self {
        self.trained.shard(ranks);
        self
    }

    /// Whether the trained parameters are adapters.
    pub fn trains_adapters(&self) -> bool {
        self.trained.is_adapter()
    }

    /// Passes intermediate values to `probe`.
    pub fn with_probe(mut self, probe: Probe) -> Self {
        self.probe = Some(probe);
        self
    }

    /// Adds trainable parameters. Adapters do not change the network at first. `base` contains the initial weights of
    /// full fine-tuning.
    ///
    /// # Errors
    /// Fails if a target names no linear layer, or `base` has not all weights.
    pub fn add_trainable(&mut self, trainable: &Trainable, noise: &Noise, base: &StateDict) -> Result<()> {
        self.trained.choose(trainable, self.config.weights(), LAYER_EXAMPLES, noise, base, self.store.device())
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

    /// Sets the parameters of [`Adapter::Start`], by name. The device holds them from the first pass that uses them.
    pub fn start_from(&mut self, state: StateDict) {
        self.trained.start_from(state);
    }

    /// Computes the velocity (noise - clean) at `latents`, `[C, 1, H, W]`. The context of `conditioning` is the caption
    /// features, `[L, text_dim]`. The pullback returns the cotangent of the latents and, with [`Adapter::On`],
    /// accumulates parameter gradients.
    pub fn velocity(
        &self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        self.velocity_keeping(VelocityInput { latents, timestep, conditioning }, adapter, grad, self.settings.kept)
    }

    /// Computes a velocity like [`Dit::velocity`]. `kept` is what this pass keeps until its pullback.
    pub fn velocity_keeping(
        &self,
        input: VelocityInput<'_>,
        adapter: Adapter,
        grad: Grad,
        kept: PassMemory,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let (velocities, pullback) = self.velocities_keeping(&[input], adapter, grad, kept)?;
        of_one(velocities, pullback, input.latents.shape())
    }

    /// Computes the velocities of `inputs`, whose latents have the same shape, as one batch: `[B, C, 1, H, W]`. The
    /// pullback takes and returns cotangents of this shape.
    ///
    /// # Errors
    /// Fails if latents or caption features do not fit the network, and on errors of the weight store.
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
        let snapshot = self.trained.snapshot(adapter, &device)?;
        let parameters = snapshot.as_ref().map(|snapshot| snapshot.parameters().clone());
        let trains = |of: &dyn Fn(&str) -> bool| {
            grad.is_on() && parameters.as_ref().is_some_and(|all| all.specs().iter().any(|spec| of(&spec.name)))
        };
        // The embeddings need gradients only if their own weights are trained.
        let trains_embeddings = trains(&|name| EMBEDDING_PREFIXES.iter().any(|prefix| name.starts_with(prefix)));
        let trains_modulation = trains_embeddings || trains(&|name| name.contains("adaLN_modulation"));
        let pass = Arc::new(Pass {
            config: self.config.clone(),
            store: self.store.clone(),
            trainable: snapshot,
            trains_all_weights: self.trained.is_full(),
            lora_scale: self.trained.lora_scale(),
            products: self.settings.products,
            fp8: self.settings.fp8_products,
            activations: self.settings.activations_on(&device),
            trains_modulation,
            batch: Batch::new(inputs, &self.config, &device)?,
            probe: self.probe.clone(),
        });

        let tape = if trains_embeddings { Tape::on() } else { Tape::off() };
        let (shared, recorded_embeddings) = vjp(&[], tape, |_, tape| pass.embed(tape))?;
        let state = NdTensor::from(to_device::<2>(&pass.batch.patches, &device)?);
        let chain = chain_of_segments(&pass, kept.keeps_attention && grad.is_on());
        let (out, record) = chain.forward(state, shared, grad, kept.memory, trains_embeddings, parameters.clone())?;
        let shape = pass.batch.shape;
        let velocities = shape.to_latents(&to_host(out.rank::<2>()?)?)?;
        let pullback = record.map(|record| {
            Pullback::new(move |cotangents: &Tensor| {
                let d_out = to_device::<2>(&shape.to_tokens(cotangents)?, &device)?.into();
                let (d_patches, d_shared) = record.pull(d_out)?;
                if trains_embeddings {
                    recorded_embeddings.pull(d_shared, parameters.as_ref());
                }
                shape.to_latents(&to_host(d_patches.rank::<2>()?)?)
            })
        });
        Ok((velocities, pullback))
    }
}

/// The segments of a pass. With `keeps_attention`, each block keeps the results of its attention.
fn chain_of_segments(pass: &Arc<Pass>, keeps_attention: bool) -> Chain {
    let block = |group: &str, index: usize, is_joint: bool| -> Arc<dyn Segment> {
        let kept = if keeps_attention { pass.batch.shape.samples } else { 0 };
        let kept = (0..kept).map(|_| KeptAttention::default()).collect();
        Arc::new(Block { pass: pass.clone(), name: format!("{group}.{index}"), is_joint, kept })
    };
    let mut segments: Vec<Arc<dyn Segment>> = vec![Arc::new(PatchEmbedding(pass.clone()))];
    segments.extend((0..pass.config.noise_refiners).map(|i| block("noise_refiner", i, false)));
    segments.push(Arc::new(Join(pass.clone())));
    segments.extend((0..pass.config.layers).map(|i| block("layers", i, true)));
    segments.push(Arc::new(FinalLayer(pass.clone())));
    Chain::new(segments).with_input_dtype(pass.products)
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
