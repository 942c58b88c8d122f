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
use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{DType, Device};
use roll_backends::ops::KeptAttention;
use roll_backends::{
    Chain, Memory, NdTensor, Parameters, Resident, Segment, Snapshot, Tape, WeightStore, activation_dtype, to_device,
    to_host, vjp,
};
use roll_core::{
    Adapter, Conditioning, Error, Grad, Noise, ParameterSpec, Pullback, Result, StateDict, Tensor, Timestep,
    VelocityInput,
};
pub use roll_network::trainable::Trainable;

pub use block::Probe;
pub use config::{DitConfig, PATCH, PATCH_EMBEDDING};

use batch::Batch;
use block::{Block, FinalLayer, Join, Pass, PatchEmbedding};

/// Prefixes of the weights that stay f32 by default: the time embedding, which affects every block, and the final layer.
pub const F32_PREFIXES: [&str; 2] = ["t_embedder.", "all_final_layer."];

/// Prefixes of the weights that are read before the chain.
const EMBEDDING_PREFIXES: [&str; 4] = ["t_embedder.", "cap_embedder.", "cap_pad_token", "context_refiner."];

/// Z-Image's transformer.
pub struct Dit {
    config: DitConfig,
    /// The frozen weights.
    store: Arc<dyn WeightStore>,
    /// The trainable parameters: adapters, or every weight.
    parameters: Option<Parameters>,
    /// The parameters of [`Adapter::Start`].
    initial: Option<InitialParameters>,
    trains_all_weights: bool,
    lora_scale: f64,
    products: DType,
    fp8_products: bool,
    /// Dtype between operators, if the user chose one.
    activations: Option<DType>,
    memory: Memory,
    keeps_attention: bool,
    probe: Option<Probe>,
}

/// The trained parameters at the start of training, if they come from a file.
struct InitialParameters {
    state: StateDict,
    /// The parameters on the device, from the first pass that uses them.
    parameters: Mutex<Option<Parameters>>,
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
        Self {
            config,
            store,
            parameters: None,
            initial: None,
            trains_all_weights: false,
            lora_scale: 1.0,
            products: DType::F32,
            fp8_products: false,
            activations: None,
            memory: Memory::default(),
            keeps_attention: false,
            probe: None,
        }
    }

    /// Sets what a recorded pass keeps for its pullback.
    pub fn with_memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
    }

    /// Keeps the results of attention on the device between a recorded pass and its pullback, which recomputes
    /// everything else.
    pub fn keeping_attention(mut self, keeps: bool) -> Self {
        self.keeps_attention = keeps;
        self
    }

    /// Sets the dtype of matrix products: f32 (the default), or bf16 accumulated in f32.
    pub fn with_products(mut self, products: DType) -> Self {
        self.products = products;
        self
    }

    /// Takes products with frozen fp8 weights in fp8 ([`roll_backends::ops::linear_fp8`]).
    pub fn with_fp8_products(mut self, fp8_products: bool) -> Self {
        self.fp8_products = fp8_products;
        self
    }

    /// Sets the dtype of values between the operators of a block: f32 or bf16. The default is
    /// [`roll_backends::activation_dtype`] of device and products.
    pub fn with_activations(mut self, activations: DType) -> Self {
        self.activations = Some(activations);
        self
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
        self.trains_all_weights = *trainable == Trainable::Full;
        match trainable {
            Trainable::Frozen => self.parameters = None,
            Trainable::Lora { .. } | Trainable::Layers { .. } => {
                let (specs, values) = lora_parameters(&self.config, trainable, noise)?;
                self.lora_scale = trainable.lora_scale();
                self.parameters = Some(Parameters::new(specs, values, self.store.device()));
            }
            Trainable::Full => {
                let specs = self.config.weights().into_iter().map(|(name, shape)| ParameterSpec { name, shape });
                self.parameters = Some(self.upload(specs.collect(), base)?);
            }
        }
        Ok(())
    }

    /// Sizes of the network.
    pub fn config(&self) -> &DitConfig {
        &self.config
    }

    /// Trainable parameters, if there are any.
    pub fn parameters(&self) -> Option<&Parameters> {
        self.parameters.as_ref()
    }

    /// Scale of the adapters, `alpha / rank`.
    pub fn lora_scale(&self) -> f64 {
        self.lora_scale
    }

    /// Sets the parameters of [`Adapter::Start`], by name. The device holds them from the first pass that uses them.
    pub fn start_from(&mut self, state: StateDict) {
        self.initial = Some(InitialParameters { state, parameters: Mutex::default() });
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
        let input = VelocityInput { latents, timestep, conditioning };
        let (velocities, pullback) = self.velocities(&[input], adapter, grad)?;
        let (shape, batch_shape) = (latents.shape().to_vec(), velocities.shape().to_vec());
        let pullback = pullback.map(|pullback| {
            Pullback::new(move |cotangent: &Tensor| pullback.pull(&cotangent.reshape(batch_shape)?)?.reshape(shape))
        });
        Ok((velocities.reshape(latents.shape())?, pullback))
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
        let device = self.store.device().clone();
        let snapshot = match adapter {
            Adapter::On => self.parameters.as_ref().map(Parameters::snapshot),
            Adapter::Start => self.initial_snapshot()?,
            Adapter::Off => None,
        };
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
            trains_all_weights: self.trains_all_weights,
            lora_scale: self.lora_scale,
            products: self.products,
            fp8: self.fp8_products,
            activations: self.activations.unwrap_or_else(|| activation_dtype(&device, self.products)),
            trains_modulation,
            batch: Batch::new(inputs, &self.config, &device)?,
            probe: self.probe.clone(),
        });

        let tape = if trains_embeddings { Tape::on() } else { Tape::off() };
        let (shared, recorded_embeddings) = vjp(&[], tape, |_, tape| pass.embed(tape))?;
        let state = NdTensor::from(to_device::<2>(&pass.batch.patches, &device)?);
        let chain = chain_of_segments(&pass, self.keeps_attention && grad.is_on());
        let (out, record) = chain.forward(state, shared, grad, self.memory, trains_embeddings, parameters.clone())?;
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

    /// The parameters of [`Adapter::Start`], which are uploaded now if they are not on the device yet.
    fn initial_snapshot(&self) -> Result<Option<Snapshot>> {
        let (Some(initial), Some(trained)) = (&self.initial, &self.parameters) else { return Ok(None) };
        let mut uploaded = initial.parameters.lock().unwrap_or_else(PoisonError::into_inner);
        if uploaded.is_none() {
            *uploaded = Some(self.upload(trained.specs().to_vec(), &initial.state)?);
        }
        Ok(uploaded.as_ref().map(Parameters::snapshot))
    }

    /// Creates parameters on the device, with the values of `state`. Fails if one is missing.
    fn upload(&self, specs: Vec<ParameterSpec>, state: &StateDict) -> Result<Parameters> {
        let value = |spec: &ParameterSpec| match state.get(&spec.name) {
            Some(value) => Ok(value.to_f32_vec()),
            None => Err(Error::Misuse(format!("training needs the weight `{}`", spec.name))),
        };
        let values = specs.iter().map(value).collect::<Result<_>>()?;
        Ok(Parameters::new(specs, values, self.store.device()))
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
    let examples = "layers of a block: attention.to_q, attention.to_k, attention.to_v, attention.to_out.0, \
                    feed_forward.w1, feed_forward.w2, feed_forward.w3";
    roll_network::trainable::lora_parameters(config.weights(), trainable, noise, examples)
}
