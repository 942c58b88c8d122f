//! The segments of the network: embedding, blocks, final norm.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use rayon::prelude::*;
use roll_backends::ops::{self, AttentionOptions};
use roll_backends::{NdTensor, Scope, Segment, Snapshot, Tape, WeightStore};
use roll_core::Result;

use super::cache::{Cache, Reads};
use super::config::LmConfig;
use super::packed::Packed;

/// Prompts that one thread takes at a time.
const PROMPTS_PER_TASK: usize = 4;

/// What all segments of one forward pass have in common.
pub struct Pass {
    /// Shape of the network.
    pub config: LmConfig,
    /// Frozen weights.
    pub store: Arc<dyn WeightStore>,
    /// Trainable parameters; `None` runs the base model alone.
    pub trainable: Option<Snapshot>,
    /// alpha / rank.
    pub lora_scale: f64,
    /// What products are taken in: see [`Scope::products`].
    pub products: DType,
    /// Token ids, `[N]`.
    pub ids: Tensor<1, Int>,
    /// Where each sequence lies among the tokens.
    pub spans: Vec<Range<usize>>,
    /// Cosine and sine of the rotary angles, `[N, head_dim / 2]`.
    pub rope: (Tensor<2>, Tensor<2>),
    /// Keys and values of earlier tokens; they are read and added to. A pass with a cache is not recorded.
    pub cache: Option<(Arc<Cache>, Reads)>,
}

impl Pass {
    /// A pass over `packed`.
    pub fn new(
        config: &LmConfig,
        store: Arc<dyn WeightStore>,
        trainable: Option<Snapshot>,
        lora_scale: f64,
        packed: &Packed,
    ) -> Self {
        let device = store.device().clone();
        let ids = integers(packed.ids.clone(), &device);
        let rope = rotary_tables(config, &packed.positions, &device);
        let (config, spans) = (config.clone(), packed.spans.clone());
        Self { config, store, trainable, lora_scale, products: DType::F32, ids, spans, rope, cache: None }
    }

    /// Runs `f` with the weights under `prefix`.
    pub fn scoped<T>(&self, prefix: &str, tape: &Tape, f: impl FnOnce(&Scope<'_>) -> Result<T>) -> Result<T> {
        let weights = self.store.segment(prefix)?;
        let trainable = self.trainable.as_ref().map(|all| all.segment(prefix)).transpose()?;
        let (trainable, lora_scale, products) = (trainable.as_ref(), self.lora_scale, self.products);
        f(&Scope { weights: &weights, trainable, lora_scale, tape, products })
    }
}

/// Ids on the device.
pub fn integers(ids: Vec<i64>, device: &Device) -> Tensor<1, Int> {
    let n = ids.len();
    Tensor::from_data(TensorData::new(ids, [n]), device)
}

/// Cosine and sine of each position's angles, computed in f64.
fn rotary_tables(config: &LmConfig, positions: &[usize], device: &Device) -> (Tensor<2>, Tensor<2>) {
    let (frequencies, magnitude) = (config.rope.frequencies(config.head_dim), config.rope.magnitude());
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f32> = positions
            .iter()
            .flat_map(|p| frequencies.iter().map(move |w| (f(*p as f64 * w) * magnitude) as f32))
            .collect();
        Tensor::from_data(TensorData::new(values, [positions.len(), frequencies.len()]), device)
    };
    (table(f64::cos), table(f64::sin))
}

/// Token ids to vectors. What comes in as state is ignored: ids are no floats.
pub struct Embedding(pub Arc<Pass>);

impl Segment for Embedding {
    fn forward(&self, _state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let pass = &self.0;
        pass.scoped("model.embed_tokens.", tape, |scope| {
            let table = scope.weight::<2>("model.embed_tokens.weight")?;
            Ok(table.select(0, pass.ids.clone()).into())
        })
    }
}

/// One transformer block: attention, feed-forward.
pub struct Block {
    /// Its number.
    pub index: usize,
    /// The pass it belongs to.
    pub pass: Arc<Pass>,
}

impl Segment for Block {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let name = format!("model.layers.{}", self.index);
        self.pass.scoped(&format!("{name}."), tape, |scope| {
            let x = state.rank::<2>()?;
            let norm = |x: Tensor<2>, which: &str| -> Result<Tensor<2>> {
                let gain = scope.weight::<1>(&format!("{name}.{which}.weight"))?;
                Ok(ops::rms_norm(x, gain, self.pass.config.norm_eps))
            };
            let h = norm(x.clone(), "input_layernorm")?;
            let x = x + self.attention(scope, h, &format!("{name}.self_attn"))?;
            let h = norm(x.clone(), "post_attention_layernorm")?;
            let gate = ops::silu(scope.linear(h.clone(), &format!("{name}.mlp.gate_proj"))?);
            let up = scope.linear(h, &format!("{name}.mlp.up_proj"))?;
            Ok((x + scope.linear(gate * up, &format!("{name}.mlp.down_proj"))?).into())
        })
    }
}

impl Block {
    fn attention(&self, scope: &Scope<'_>, h: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let config = &self.pass.config;
        let q = self.positioned(scope, h.clone(), name, "q", config.heads)?;
        let k = self.positioned(scope, h.clone(), name, "k", config.kv_heads)?;
        let v = scope.linear(h, &format!("{name}.v_proj"))?;
        let part = |x: &Tensor<2>, span: &Range<usize>| x.clone().narrow(0, span.start, span.len());
        let spans: Vec<_> = self.pass.spans.iter().enumerate().filter(|(_, span)| !span.is_empty()).collect();
        let attended = match &self.pass.cache {
            Some((cache, Reads::Tokens(places))) => {
                cache.attend(self.index, q, [k, v], places, [config.heads, config.kv_heads])
            }
            Some((cache, Reads::Prompts)) => {
                let (k, v) = cache.read_prompts(self.index, k, v, &self.pass.spans);
                // What is read of a prompt may be little: then it is less work than waking a thread for it.
                let attend = |(i, span): &(usize, &Range<usize>)| {
                    let whole = cache.prompt(*i);
                    self.attend(part(&q, span), part(&k, &whole), part(&v, &whole))
                };
                Tensor::cat(spans.par_iter().with_min_len(PROMPTS_PER_TASK).map(attend).collect(), 0)
            }
            None => {
                let attend =
                    |(_, span): &(usize, &Range<usize>)| self.attend(part(&q, span), part(&k, span), part(&v, span));
                Tensor::cat(spans.iter().map(attend).collect(), 0)
            }
        };
        scope.linear(attended, &format!("{name}.o_proj"))
    }

    /// Attention of the last tokens of one sequence over all of it.
    fn attend(&self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>) -> Tensor<2> {
        let config = &self.pass.config;
        match q.dims()[0] {
            // One query sees every key: the heads that share a key head become rows of one call, no key is copied.
            1 => self.attend_last(q, k, v),
            _ => {
                let options = AttentionOptions { causal: true, ..self.options() };
                ops::attention_with(q, self.shared_out(k), self.shared_out(v), config.heads, options)
            }
        }
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions { products: Some(self.pass.products), ..Default::default() }
    }

    /// A projection with its norm and its rotary positions. The channels of each head come out in the order of pairs:
    /// queries and keys alike, so their products are the same.
    fn positioned(&self, scope: &Scope<'_>, h: Tensor<2>, name: &str, part: &str, heads: usize) -> Result<Tensor<2>> {
        let config = &self.pass.config;
        let [tokens, _] = h.dims();
        let width = heads * config.head_dim;
        let mut x = scope.linear(h, &format!("{name}.{part}_proj"))?;
        if config.qk_norm {
            let gain = scope.weight::<1>(&format!("{name}.{part}_norm.weight"))?;
            x = ops::rms_norm(x.reshape([tokens * heads, config.head_dim]), gain, config.norm_eps);
        }
        // Checkpoints rotate channel i with i + d/2; the operator rotates neighbours.
        let paired = x.reshape([tokens, heads, 2, config.head_dim / 2]).swap_dims(2, 3).reshape([tokens, width]);
        let (cos, sin) = &self.pass.rope;
        Ok(ops::rope(paired, cos.clone(), sin.clone(), heads))
    }

    /// Each key head repeated for the query heads that share it.
    fn shared_out(&self, x: Tensor<2>) -> Tensor<2> {
        let config = &self.pass.config;
        let [tokens, width] = x.dims();
        let group = config.heads / config.kv_heads;
        if group == 1 {
            return x;
        }
        let x = x.reshape([tokens, config.kv_heads, 1, config.head_dim]);
        x.expand([tokens, config.kv_heads, group, config.head_dim]).reshape([tokens, width * group])
    }

    /// Attention of one query token over all keys.
    fn attend_last(&self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>) -> Tensor<2> {
        let config = &self.pass.config;
        let (kv, group, d) = (config.kv_heads, config.heads / config.kv_heads, config.head_dim);
        if group == 1 {
            return ops::attention_with(q, k, v, kv, self.options());
        }
        let q = q.reshape([kv, group, d]).swap_dims(0, 1).reshape([group, kv * d]);
        let out = ops::attention_with(q, k, v, kv, self.options());
        out.reshape([group, kv, d]).swap_dims(0, 1).reshape([1, config.heads * d])
    }
}

/// The norm before the output layer.
pub struct FinalNorm(pub Arc<Pass>);

impl Segment for FinalNorm {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let pass = &self.0;
        pass.scoped("model.norm.", tape, |scope| {
            let gain = scope.weight::<1>("model.norm.weight")?;
            Ok(ops::rms_norm(state.rank::<2>()?, gain, pass.config.norm_eps).into())
        })
    }
}
