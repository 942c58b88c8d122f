//! The segments of the transformer: patch embedding, blocks, head.

use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use roll_backends::ops::{self, AllToAll, AttentionOptions, KeptAttention, Sharding, TokenRanks};
use roll_backends::{NdTensor, Scope, Segment, Snapshot, Tape, WeightStore, Weights};
use roll_core::Result;
use roll_network::precision::as_dtype;

use super::config::DitConfig;
use super::embed::EPS;

/// Receives intermediate values of a pass by name; tests compare them.
pub type Probe = Arc<dyn Fn(&str, &Tensor<2>) + Send + Sync>;

/// The state that all segments of one forward pass share.
pub struct Pass {
    /// Sizes of the network.
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
    /// Dtype of the values between the operators of a block: f32 or bf16. The residual stream and its updates are
    /// always f32, because sums in bf16 would lose small updates.
    pub activations: DType,
    /// Rotary tables (cosines, sines), each `[tokens, head_dim / 2]`.
    pub rope: (Tensor<2>, Tensor<2>),
    /// Number of samples in the batch. States and context have the rows of one sample after the other.
    pub samples: usize,
    /// Number of tokens of each group that shares a timestep and therefore a row of the modulations: one group per
    /// sample, or two for TI2V (the known first frame, then the other frames).
    pub groups: Vec<usize>,
    /// Whether gradients flow to the modulations.
    pub trains_modulation: bool,
    /// Number of image tokens in the context of a sample. They come before the text.
    pub image_rows: usize,
    /// The ranks of sequence parallelism, if it is used. States, tables and groups then cover only this rank's tokens,
    /// and there is one sample.
    pub token_ranks: Option<Arc<TokenRanks>>,
    /// Receives intermediate values.
    pub probe: Option<Probe>,
}

/// Indices of the shared tensors of a chain.
pub mod shared {
    /// Embedded timesteps `[G, dim]`, read by the head. G is the number of groups.
    pub const TIME: usize = 0;
    /// Modulations `[G, 6 * dim]`, read by the blocks.
    pub const MODULATION: usize = 1;
    /// Context `[L, dim]`: image tokens, then text.
    pub const CONTEXT: usize = 2;
}

impl Pass {
    /// Runs `f` with the weights whose names begin with `prefix`. `products` is the dtype of its matrix products.
    ///
    /// Embeddings and head use f32. They are cheap, and all modulations depend on the embedded time, whose angles reach
    /// 1000; bf16 would keep only eight bits of them.
    pub fn scoped<T>(
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

    /// Prepares a modulation, which has one row per group, for the operators that [`Pass::row_groups`] describes.
    ///
    /// A trained modulation of several groups is expanded to one row per token: the pullback of the expansion sums its
    /// gradient over the tokens of a group always in the same order. Other modulations are returned unchanged.
    fn prepared_modulation(&self, rows: Tensor<2>) -> Tensor<2> {
        let [group_count, width] = rows.dims();
        let [first_size, ..] = self.groups.as_slice() else { return rows };
        if group_count == 1 || !self.trains_modulation {
            return rows;
        }
        // Groups of one size are expanded at once.
        if self.groups.iter().all(|size| size == first_size) {
            let expanded = rows.reshape([group_count, 1, width]).expand([group_count, *first_size, width]);
            return expanded.reshape([group_count * first_size, width]);
        }
        let expand = |(i, size): (usize, &usize)| rows.clone().narrow(0, i, 1).expand([*size, width]);
        // A rank may have no token of a group.
        let not_empty = self.groups.iter().enumerate().filter(|(_, size)| **size > 0);
        Tensor::cat(not_empty.map(expand).collect(), 0)
    }

    /// Sizes of the groups of tokens that share a row of [`Pass::prepared_modulation`]. Empty if each token has a row
    /// of its own, or all tokens share a single trained row.
    fn row_groups(&self) -> &[usize] {
        if self.trains_modulation { &[] } else { &self.groups }
    }

    /// Attention within each sample. The samples of a batch are folded into the head axis.
    fn attention(&self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>, kept: Option<KeptAttention>) -> Tensor<2> {
        let (samples, heads) = (self.samples, self.config.heads);
        let options = AttentionOptions { products: Some(self.products), kept, ..Default::default() };
        if samples == 1 {
            return ops::attention_with(q, k, v, heads, options);
        }
        let [rows, width] = q.dims();
        // `[samples * n, width]` becomes `[n, samples * width]`.
        let fold = |x: Tensor<2>| {
            let n = x.dims()[0] / samples;
            x.reshape([samples, n, width]).swap_dims(0, 1).reshape([n, samples * width])
        };
        let attended = ops::attention_with(fold(q), fold(k), fold(v), samples * heads, options);
        attended.reshape([rows / samples, samples, width]).swap_dims(0, 1).reshape([rows, width])
    }

    /// Attention between all tokens of the sample, including tokens on other ranks.
    fn attention_among_tokens(
        &self,
        q: Tensor<2>,
        k: Tensor<2>,
        v: Tensor<2>,
        kept: Option<KeptAttention>,
    ) -> Tensor<2> {
        let Some(ranks) = &self.token_ranks else { return self.attention(q, k, v, kept) };
        // One exchange for q, k and v together, so that a pullback makes its exchanges in the same order on every rank.
        let all = ops::all_to_all(Tensor::cat(vec![q, k, v], 1), ranks, AllToAll { to: Sharding::Heads, parts: 3 });
        let width = self.config.dim / ranks.count();
        let [q, k, v] = [0, 1, 2].map(|i| all.clone().narrow(1, i * width, width));
        let options = AttentionOptions { products: Some(self.products), kept, ..Default::default() };
        let attended = ops::attention_with(q, k, v, self.config.heads / ranks.count(), options);
        ops::all_to_all(attended, ranks, AllToAll { to: Sharding::Tokens, parts: 1 })
    }

    /// Concatenates per sample: the rows of `first`, then the rows of `second`.
    pub(super) fn interleaved(&self, first: Tensor<2>, second: Tensor<2>) -> Tensor<2> {
        let width = first.dims()[1];
        let by_sample = |x: Tensor<2>| {
            let n = x.dims()[0] / self.samples;
            x.reshape([self.samples, n, width])
        };
        let both = Tensor::cat(vec![by_sample(first), by_sample(second)], 1);
        let rows = self.samples * both.dims()[1];
        both.reshape([rows, width])
    }

    /// Selects the same range of rows of each sample.
    fn rows_of_each(&self, x: Tensor<2>, start: usize, count: usize) -> Tensor<2> {
        let [rows, width] = x.dims();
        let by_sample = x.reshape([self.samples, rows / self.samples, width]);
        by_sample.narrow(1, start, count).reshape([self.samples * count, width])
    }

    /// Passes an intermediate value to the probe, if there is one.
    fn probe_value(&self, name: impl FnOnce() -> String, value: &Tensor<2>) {
        if let Some(probe) = &self.probe {
            probe(&name(), value);
        }
    }
}

/// Maps patches of latents to tokens of width `dim`.
pub struct PatchEmbedding(pub Arc<Pass>);

impl Segment for PatchEmbedding {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let pass = &self.0;
        pass.scoped("patch_embedding.", pass.products, tape, |scope| {
            // The convolution's stride equals its kernel, so it is a matrix product.
            let weight = scope.weight::<5>("patch_embedding.weight")?;
            let weight = weight.reshape([pass.config.dim, pass.config.patch_in()]);
            let bias = scope.weight::<1>("patch_embedding.bias")?;
            let x = ops::linear(state.rank::<2>()?, weight, Some(bias));
            pass.probe_value(|| "patch_embedding".into(), &x);
            Ok(x.into())
        })
    }
}

/// A transformer block: self-attention, cross-attention, feed-forward.
pub struct Block {
    /// Number of the block, from 0.
    pub index: usize,
    /// The pass that the block belongs to.
    pub pass: Arc<Pass>,
    /// Where a recorded pass keeps the result of self-attention, so that the pullback does not recompute it.
    pub kept: Option<KeptAttention>,
}

impl Segment for Block {
    fn forward(&self, state: &NdTensor, shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let prefix = format!("blocks.{}.", self.index);
        self.pass.scoped(&prefix, self.pass.products, tape, |scope| {
            let x = state.rank::<2>()?;
            let modulation = shared[shared::MODULATION].rank::<2>()?;
            let context = shared[shared::CONTEXT].rank::<2>()?;
            Ok(self.apply(scope, x, modulation, context)?.into())
        })
    }
}

impl Block {
    /// Runs the block on the residual stream `x`.
    fn apply(&self, scope: &Scope<'_>, x: Tensor<2>, modulation: Tensor<2>, context: Tensor<2>) -> Result<Tensor<2>> {
        let (pass, name) = (&self.pass, format!("blocks.{}", self.index));
        let dim = pass.config.dim;
        // Six parts: shift, scale and gate of self-attention, then of the feed-forward layer. A gain is 1 + scale.
        let bias = scope.weight::<3>(&format!("{name}.modulation"))?.reshape([1, 6 * dim]);
        let modulation = modulation + bias;
        let part = |i: usize| modulation.clone().narrow(1, i * dim, dim);
        let shift_or_gate = |i: usize| pass.prepared_modulation(part(i));
        let gain = |i: usize| pass.prepared_modulation(part(i) + 1.0);

        let groups = pass.row_groups();
        let modulated_norm =
            |x: &Tensor<2>, gain, shift| ops::layer_norm_groups(x.clone(), gain, shift, groups, EPS, pass.activations);

        let h = modulated_norm(&x, gain(1), shift_or_gate(0));
        let attended = self.self_attention(scope, h, &format!("{name}.self_attn"))?;
        let x = ops::gated_add_groups(x, attended, shift_or_gate(2), groups);

        // The norm before cross-attention has weights of its own instead of a modulation.
        let norm3 = |part: &str| scope.weight::<1>(&format!("{name}.norm3.{part}"));
        let [gain3, shift3] = [norm3("weight")?, norm3("bias")?].map(|row| row.unsqueeze());
        let h = ops::layer_norm_as(x.clone(), gain3, shift3, EPS, pass.activations);
        let attended = self.cross_attention(scope, h, context, &format!("{name}.cross_attn"))?;
        let x = ops::gated_add(x, attended, None);

        let h = modulated_norm(&x, gain(4), shift_or_gate(3));
        let h = ops::gelu_tanh(scope.linear(h, &format!("{name}.ffn.0"))?);
        let h = scope.linear(h, &format!("{name}.ffn.2"))?;
        let x = ops::gated_add_groups(x, h, shift_or_gate(5), groups);
        pass.probe_value(|| name.clone(), &x);
        Ok(x)
    }

    /// Self-attention with its projections.
    fn self_attention(&self, scope: &Scope<'_>, h: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let (cos, sin) = &self.pass.rope;
        let rotated = |part: &str| self.projected_norm(scope, h.clone(), name, part, Some([cos.clone(), sin.clone()]));
        let (q, k) = (rotated("q")?, rotated("k")?);
        let v = scope.linear(h.clone(), &format!("{name}.v"))?;
        let out = scope.linear(self.pass.attention_among_tokens(q, k, v, self.kept.clone()), &format!("{name}.o"))?;
        self.pass.probe_value(|| name.into(), &out);
        Ok(out)
    }

    /// Cross-attention to the context with its projections. All rows of the context are keys, including padding, which
    /// the reference implementation does not mask either. Image tokens have keys, values and an attention of their own.
    fn cross_attention(&self, scope: &Scope<'_>, h: Tensor<2>, context: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let pass = &self.pass;
        let context = as_dtype(context, h.dtype());
        let (image_rows, rows) = (pass.image_rows, context.dims()[0] / pass.samples);
        let text = match image_rows {
            0 => context.clone(),
            _ => pass.rows_of_each(context.clone(), image_rows, rows - image_rows),
        };
        let q = self.projected_norm(scope, h, name, "q", None)?;
        let k = self.projected_norm(scope, text.clone(), name, "k", None)?;
        let v = scope.linear(text, &format!("{name}.v"))?;
        let mut attended = pass.attention(q.clone(), k, v, None);
        if image_rows > 0 {
            let image = pass.rows_of_each(context, 0, image_rows);
            let k = self.projected_norm(scope, image.clone(), name, "k_img", None)?;
            let v = scope.linear(image, &format!("{name}.v_img"))?;
            attended = attended + pass.attention(q, k, v, None);
        }
        let out = scope.linear(attended, &format!("{name}.o"))?;
        self.pass.probe_value(|| name.into(), &out);
        Ok(out)
    }

    /// The projection `part` (`q`, `k`, `k_img`), its RMS norm over the full width, and the rotation of each head by
    /// the rotary tables `rope`, if they are given.
    fn projected_norm(
        &self,
        scope: &Scope<'_>,
        x: Tensor<2>,
        name: &str,
        part: &str,
        rope: Option<[Tensor<2>; 2]>,
    ) -> Result<Tensor<2>> {
        let projected = scope.linear(x, &format!("{name}.{part}"))?;
        let gain = scope.weight::<1>(&format!("{name}.norm_{part}.weight"))?;
        Ok(ops::rms_rope(projected, gain, rope, self.pass.config.heads, EPS))
    }
}

/// Maps tokens of width `dim` to patches of the velocity.
pub struct Head(pub Arc<Pass>);

impl Segment for Head {
    fn forward(&self, state: &NdTensor, shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let pass = &self.0;
        pass.scoped("head.", DType::F32, tape, |scope| {
            let x = state.rank::<2>()?;
            let dim = pass.config.dim;
            // Two parts: shift and scale. The gain is 1 + scale.
            let bias = scope.weight::<3>("head.modulation")?;
            let time = shared[shared::TIME].rank::<2>()?;
            let part = |i: usize| time.clone() + bias.clone().narrow(1, i, 1).reshape([1, dim]);
            let [gain, shift] = [part(1) + 1.0, part(0)].map(|rows| pass.prepared_modulation(rows));
            let h = ops::layer_norm_groups(x, gain, shift, pass.row_groups(), EPS, DType::F32);
            let out = scope.linear(h, "head.head")?;
            pass.probe_value(|| "head".into(), &out);
            Ok(out.into())
        })
    }
}
