//! The segments of the transformer: patch embedding, noise refiners, joining of picture and caption, blocks, final
//! layer; and the embeddings that come before them.

use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use roll_backends::ops::{self, AttentionOptions, KeptAttention};
use roll_backends::{NdTensor, Scope, Segment, Snapshot, Tape, WeightStore, Weights, to_device};
use roll_core::Result;
use roll_network::precision::as_dtype;
use roll_network::timestep::sinusoid;

use super::batch::{Batch, Sequences};
use super::config::{DitConfig, FINAL_LAYER, PATCH_EMBEDDING};

/// Epsilon of the RMS norms.
const EPS: f64 = 1e-5;
/// Epsilon of the layer norm of the final layer.
const FINAL_EPS: f64 = 1e-6;

/// Receives intermediate values of a pass by name; tests compare them.
pub type Probe = Arc<dyn Fn(&str, &Tensor<2>) + Send + Sync>;

/// The state that all segments of one forward pass share.
pub struct Pass {
    pub config: DitConfig,
    /// Frozen weights.
    pub store: Arc<dyn WeightStore>,
    /// Trainable parameters; `None` runs the base model.
    pub trainable: Option<Snapshot>,
    /// Whether every weight is trainable. Frozen weights are then not read.
    pub trains_all_weights: bool,
    /// Scale of the adapters, `alpha / rank`.
    pub lora_scale: f64,
    /// Dtype of the matrix products in blocks; see [`Scope::products`].
    pub products: DType,
    /// Whether products with frozen fp8 weights are taken in fp8; see [`Scope::fp8`].
    pub fp8: bool,
    /// Dtype of the values between the operators of a block. The residual stream is f32.
    pub activations: DType,
    /// Whether gradients flow to the modulations.
    pub trains_modulation: bool,
    pub batch: Batch,
    pub probe: Option<Probe>,
}

/// Indices of the shared tensors of a chain.
pub mod shared {
    /// Embedded timesteps, f32 `[B, modulation_dim]`.
    pub const TIME: usize = 0;
    /// Refined captions, f32 `[filled captions, dim]`.
    pub const CAPTION: usize = 1;
}

impl Pass {
    /// Runs `f` with the weights whose names begin with `prefix`. `products` is the dtype of its matrix products.
    fn scoped<T>(
        &self,
        prefix: &str,
        products: DType,
        tape: &Tape,
        f: impl FnOnce(&Scope<'_>) -> Result<T>,
    ) -> Result<T> {
        let trainable = self.trainable.as_ref().map(|all| all.segment(prefix)).transpose()?;
        let reads_frozen = !self.trains_all_weights || trainable.is_none();
        let weights = if reads_frozen { self.store.segment(prefix)? } else { Weights::default() };
        let (trainable, lora_scale) = (trainable.as_ref(), self.lora_scale);
        f(&Scope { weights: &weights, trainable, lora_scale, tape, products, fp8: self.fp8 })
    }

    /// Computes the shared tensors of the chain, in the order of [`shared`].
    pub fn embed(&self, tape: &Tape) -> Result<Vec<NdTensor>> {
        let device = self.store.device();
        let batch = &self.batch;
        for (name, of) in [("image", &batch.picture), ("caption", &batch.caption), ("unified", &batch.joint)] {
            for (function, table) in ["cos", "sin"].iter().zip(&of.rope) {
                self.probe_value(|| format!("{name}_rope_{function}"), table);
            }
        }
        // In f32: every modulation depends on the time, whose angles reach 1000.
        let time = self.scoped("t_embedder.", DType::F32, tape, |scope| {
            let angles = sinusoid(&self.batch.times, self.config.freq_dim, device);
            scope.linear(ops::silu(scope.linear(angles, "t_embedder.mlp.0")?), "t_embedder.mlp.2")
        })?;
        self.probe_value(|| "t_emb".into(), &time);
        let features = to_device::<2>(&self.batch.captions, device)?;
        let embedded = self.scoped("cap_embedder.", DType::F32, tape, |scope| {
            let gain = scope.weight::<1>("cap_embedder.0.weight")?;
            scope.linear(ops::rms_norm(features, gain, EPS), "cap_embedder.1")
        })?;
        let mut caption =
            self.with_fill(embedded, &self.batch.caption_lengths, &self.batch.caption, "cap_pad_token", tape)?;
        self.probe_value(|| "caption_in".into(), &caption);
        for index in 0..self.config.context_refiners {
            let name = format!("context_refiner.{index}");
            caption = self.scoped(&format!("{name}."), self.products, tape, |scope| {
                self.block(scope, &name, caption, &self.batch.caption, None, &[])
            })?;
        }
        Ok(vec![time.into(), caption.into()])
    }

    /// Inserts fill tokens, the weight `name`, behind each sequence of `x`. The sequences have `lengths` before and the
    /// lengths of `filled` after it.
    fn with_fill(
        &self,
        x: Tensor<2>,
        lengths: &[usize],
        filled: &Sequences,
        name: &str,
        tape: &Tape,
    ) -> Result<Tensor<2>> {
        if lengths == filled.lengths {
            return Ok(x);
        }
        let width = self.config.dim;
        let token = self.scoped(name, DType::F32, tape, |scope| scope.weight::<2>(name))?;
        let (mut start, mut parts) = (0, Vec::new());
        for (length, filled) in lengths.iter().zip(&filled.lengths) {
            parts.push(x.clone().narrow(0, start, *length));
            if filled > length {
                parts.push(token.clone().expand([filled - length, width]));
            }
            start += length;
        }
        Ok(Tensor::cat(parts, 0))
    }

    /// Runs the block `name` on the residual stream `x`. With `time` (`[B, modulation_dim]`, one row per sequence), its
    /// norms are scaled and its updates gated.
    fn block(
        &self,
        scope: &Scope<'_>,
        name: &str,
        x: Tensor<2>,
        sequences: &Sequences,
        time: Option<Tensor<2>>,
        kept: &[KeptAttention],
    ) -> Result<Tensor<2>> {
        let dim = self.config.dim;
        // In f32, like the time embedding.
        let exact = Scope { products: DType::F32, fp8: false, ..*scope };
        let modulation = time.map(|time| exact.linear(time, &format!("{name}.adaLN_modulation.0"))).transpose()?;
        if let Some(modulation) = &modulation {
            self.probe_value(|| format!("{name}.modulation"), modulation);
        }
        // Four parts: scale and gate of attention, then of the feed-forward layer.
        let part = |i: usize| modulation.clone().map(|all| all.narrow(1, i * dim, dim));
        let gain = |norm: &str| scope.weight::<1>(&format!("{name}.{norm}.weight"));

        let h = self.modulated_norm(x.clone(), gain("attention_norm1")?, part(0), sequences);
        let h = self.attention(scope, &format!("{name}.attention"), h, sequences, kept)?;
        self.probe_value(|| format!("{name}.attention_out"), &h);
        let x = self.gated_add(x, ops::rms_norm(h, gain("attention_norm2")?, EPS), part(1), sequences);

        let h = self.modulated_norm(x.clone(), gain("ffn_norm1")?, part(2), sequences);
        let gate = ops::silu(scope.linear(h.clone(), &format!("{name}.feed_forward.w1"))?);
        let h = gate * scope.linear(h, &format!("{name}.feed_forward.w3"))?;
        let h = scope.linear(h, &format!("{name}.feed_forward.w2"))?;
        self.probe_value(|| format!("{name}.feed_forward_out"), &h);
        let x = self.gated_add(x, ops::rms_norm(h, gain("ffn_norm2")?, EPS), part(3), sequences);
        self.probe_value(|| format!("{name}_out"), &x);
        Ok(x)
    }

    /// RMS norm, times `1 + scale` if there is a scale, in the dtype of activations.
    fn modulated_norm(
        &self,
        x: Tensor<2>,
        gain: Tensor<1>,
        scale: Option<Tensor<2>>,
        sequences: &Sequences,
    ) -> Tensor<2> {
        let h = match scale {
            None => ops::rms_norm(x, gain, EPS),
            Some(scale) if sequences.lengths.len() == 1 => {
                let width = scale.dims()[1];
                ops::rms_norm(x, gain * (scale.reshape([width]) + 1.0), EPS)
            }
            Some(scale) => ops::rms_norm(x, gain, EPS) * sequences.expanded(scale + 1.0),
        };
        as_dtype(h, self.activations)
    }

    /// Adds `y`, times the hyperbolic tangent of the gate if there is a gate, to the residual stream.
    fn gated_add(&self, x: Tensor<2>, y: Tensor<2>, gate: Option<Tensor<2>>, sequences: &Sequences) -> Tensor<2> {
        let Some(gate) = gate else { return ops::gated_add(x, y, None) };
        let gate = gate.tanh();
        match self.trains_modulation && sequences.lengths.len() > 1 {
            // The gradient of an expansion is summed over the tokens of a sequence always in the same order.
            true => ops::gated_add(x, y, Some(sequences.expanded(gate))),
            false => ops::gated_add_groups(x, y, gate, &sequences.lengths),
        }
    }

    /// Self-attention within each sequence, with its projections.
    fn attention(
        &self,
        scope: &Scope<'_>,
        name: &str,
        h: Tensor<2>,
        sequences: &Sequences,
        kept: &[KeptAttention],
    ) -> Result<Tensor<2>> {
        let (heads, head_dim) = (self.config.heads, self.config.head_dim());
        let rotated = |part: &str| -> Result<Tensor<2>> {
            let projected = scope.linear(h.clone(), &format!("{name}.to_{part}"))?;
            let [tokens, width] = projected.dims();
            let gain = scope.weight::<1>(&format!("{name}.norm_{part}.weight"))?;
            let normed = ops::rms_norm(projected.reshape([tokens * heads, head_dim]), gain, EPS);
            let [cos, sin] = sequences.rope.clone();
            Ok(ops::rope(normed.reshape([tokens, width]), cos, sin, heads))
        };
        let (q, k, v) = (rotated("q")?, rotated("k")?, scope.linear(h.clone(), &format!("{name}.to_v"))?);
        let attend = |(i, (start, length)): (usize, (usize, usize))| {
            let [q, k, v] = [&q, &k, &v].map(|x| match sequences.lengths.len() {
                1 => x.clone(),
                _ => x.clone().narrow(0, start, length),
            });
            let options =
                AttentionOptions { products: Some(self.products), kept: kept.get(i).cloned(), ..Default::default() };
            ops::attention_with(q, k, v, heads, options)
        };
        let mut attended: Vec<_> = sequences.spans().into_iter().enumerate().map(attend).collect();
        let attended = if attended.len() == 1 { attended.remove(0) } else { Tensor::cat(attended, 0) };
        scope.linear(attended, &format!("{name}.to_out.0"))
    }

    /// Passes an intermediate value to the probe, if there is one.
    fn probe_value(&self, name: impl FnOnce() -> String, value: &Tensor<2>) {
        if let Some(probe) = &self.probe {
            probe(&name(), value);
        }
    }
}

/// Maps patches of latents to tokens of width `dim`, and fills the pictures.
pub struct PatchEmbedding(pub Arc<Pass>);

impl Segment for PatchEmbedding {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let (pass, patches) = (&self.0, state.rank::<2>()?);
        let x = pass.scoped(&format!("{PATCH_EMBEDDING}."), pass.products, tape, |scope| {
            scope.linear(patches, PATCH_EMBEDDING)
        })?;
        let Counts { samples, patches } = pass.counts();
        let x = pass.with_fill(x, &vec![patches; samples], &pass.batch.picture, "x_pad_token", tape)?;
        pass.probe_value(|| "image_in".into(), &x);
        Ok(x.into())
    }
}

/// Numbers of samples, and of patches of each.
struct Counts {
    samples: usize,
    patches: usize,
}

impl Pass {
    fn counts(&self) -> Counts {
        Counts { samples: self.batch.shape.samples, patches: self.batch.shape.grid.tokens() }
    }
}

/// A modulated block: a noise refiner, or a block on the joint sequence.
pub struct Block {
    pub pass: Arc<Pass>,
    /// Name of the block: `noise_refiner.0`, `layers.0`.
    pub name: String,
    /// Whether the block belongs to the joint sequence.
    pub is_joint: bool,
    /// Where a recorded pass keeps the results of attention, one per sequence; empty if it recomputes them.
    pub kept: Vec<KeptAttention>,
}

impl Segment for Block {
    fn forward(&self, state: &NdTensor, shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let (pass, batch) = (&self.pass, &self.pass.batch);
        let sequences = if self.is_joint { &batch.joint } else { &batch.picture };
        let (x, time) = (state.rank::<2>()?, shared[shared::TIME].rank::<2>()?);
        pass.scoped(&format!("{}.", self.name), pass.products, tape, |scope| {
            Ok(pass.block(scope, &self.name, x, sequences, Some(time), &self.kept)?.into())
        })
    }
}

/// Appends the refined caption of each sample to its picture.
pub struct Join(pub Arc<Pass>);

impl Segment for Join {
    fn forward(&self, state: &NdTensor, shared: &[NdTensor], _tape: &Tape) -> Result<NdTensor> {
        let batch = &self.0.batch;
        let (picture, caption) = (state.rank::<2>()?, shared[shared::CAPTION].rank::<2>()?);
        let spans = batch.picture.spans().into_iter().zip(batch.caption.spans());
        let parts = spans.flat_map(|((picture_start, picture_length), (caption_start, caption_length))| {
            [
                picture.clone().narrow(0, picture_start, picture_length),
                caption.clone().narrow(0, caption_start, caption_length),
            ]
        });
        let joint = Tensor::cat(parts.collect(), 0);
        self.0.probe_value(|| "unified_in".into(), &joint);
        Ok(joint.into())
    }
}

/// Maps the picture's tokens to patches of the velocity.
pub struct FinalLayer(pub Arc<Pass>);

impl Segment for FinalLayer {
    fn forward(&self, state: &NdTensor, shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let (pass, x) = (&self.0, state.rank::<2>()?);
        let Counts { samples, patches } = pass.counts();
        let of_picture = |(start, _): (usize, usize)| x.clone().narrow(0, start, patches);
        let picture = Tensor::cat(pass.batch.joint.spans().into_iter().map(of_picture).collect(), 0);
        pass.scoped(&format!("{FINAL_LAYER}."), DType::F32, tape, |scope| {
            let time = ops::silu(shared[shared::TIME].rank::<2>()?);
            let gain = scope.linear(time, &format!("{FINAL_LAYER}.adaLN_modulation.1"))? + 1.0;
            let groups = vec![patches; samples];
            let h = if pass.trains_modulation && samples > 1 {
                let width = gain.dims()[1];
                let gain = gain.reshape([samples, 1, width]).expand([samples, patches, width]);
                let gain = gain.reshape([samples * patches, width]);
                let shift = Tensor::zeros(gain.dims(), (pass.store.device(), DType::F32));
                ops::layer_norm(picture, gain, shift, FINAL_EPS)
            } else {
                let shift = Tensor::zeros(gain.dims(), (pass.store.device(), DType::F32));
                ops::layer_norm_groups(picture, gain, shift, &groups, FINAL_EPS, DType::F32)
            };
            // The network predicts clean - noise; the velocity is noise - clean.
            let raw = scope.linear(h, &format!("{FINAL_LAYER}.linear"))?;
            Ok((-raw).into())
        })
    }
}
