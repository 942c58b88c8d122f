//! The segments of the network: embedding, blocks, final norm.

use std::ops::Range;
use std::sync::Arc;

use burn_tensor::{DType, Device, Int, Tensor, TensorData};
use rayon::prelude::*;
use roll_backends::ops::{self, AttentionOptions, DecodeCall};
use roll_backends::{NdTensor, Scope, Segment, Snapshot, Tape, WeightStore};
use roll_core::Result;

use super::cache::{Cache, CachedTokens};
use super::config::{Gate, LmConfig, Rope};
use super::pictures::PictureRows;

/// Minimal number of prompts per task of the thread pool.
const PROMPTS_PER_TASK: usize = 4;

/// The inputs that all segments of one forward pass share.
pub struct ForwardPass {
    pub config: LmConfig,
    pub store: Arc<dyn WeightStore>,
    /// Trainable parameters; `None` runs the base model alone.
    pub trainable: Option<Snapshot>,
    /// Scale `alpha / rank` of the LoRA.
    pub lora_scale: f64,
    /// Dtype of products; see [`Scope::products`].
    pub products: DType,
    /// Token ids, `[N]`; 0 in the places of pictures.
    pub ids: Tensor<1, Int>,
    /// The embeddings of tokens that represent pictures, if there are any.
    pub pictures: Option<PictureRows>,
    /// Range of each sequence among the tokens.
    pub spans: Vec<Range<usize>>,
    /// Cosine and sine of the rotary angles, `[N, head_dim / 2]`.
    pub rope: (Tensor<2>, Tensor<2>),
    /// Rotary tables of layers with a window, if they differ.
    pub window_rope: Option<(Tensor<2>, Tensor<2>)>,
    /// The cache, with the keys and values of earlier tokens, and where the tokens of this pass belong in it. A pass
    /// with a cache is not recorded.
    pub cache: Option<(Arc<Cache>, CachedTokens)>,
}

impl ForwardPass {
    /// Runs `f` with the weights under `prefix`.
    pub fn scoped<T>(&self, prefix: &str, tape: &Tape, f: impl FnOnce(&Scope<'_>) -> Result<T>) -> Result<T> {
        let weights = self.store.segment(prefix)?;
        let trainable = self.trainable.as_ref().map(|all| all.segment(prefix)).transpose()?;
        let (trainable, lora_scale, products) = (trainable.as_ref(), self.lora_scale, self.products);
        f(&Scope { weights: &weights, trainable, lora_scale, tape, products, fp8: false })
    }

    /// RMS norm by the gains called `name`.
    fn norm(&self, scope: &Scope<'_>, x: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let gain = scope.weight::<1>(&format!("{name}.weight"))?;
        let gain = if self.config.gain_offset == 0.0 { gain } else { gain + self.config.gain_offset };
        Ok(ops::rms_norm(x, gain, self.config.norm_eps))
    }
}

/// Returns the cosines and sines of each position's angles, `[positions, head_dim / 2]` each, computed in f64.
pub fn rotary_tables(rope: &Rope, head_dim: usize, positions: &[usize], device: &Device) -> (Tensor<2>, Tensor<2>) {
    let (frequencies, magnitude) = (rope.frequencies(head_dim), rope.magnitude());
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f32> = positions
            .iter()
            .flat_map(|p| frequencies.iter().map(move |w| (f(*p as f64 * w) * magnitude) as f32))
            .collect();
        Tensor::from_data(TensorData::new(values, [positions.len(), frequencies.len()]), device)
    };
    (table(f64::cos), table(f64::sin))
}

/// The embedding of the pass's token ids. The input state is ignored, because ids are not floats.
pub struct Embedding(pub Arc<ForwardPass>);

impl Segment for Embedding {
    fn forward(&self, _state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let pass = &self.0;
        pass.scoped("model.embed_tokens.", tape, |scope| {
            let x = scope.rows("model.embed_tokens.weight", pass.ids.clone())?;
            let scale = pass.config.embedding_scale;
            let x = if scale == 1.0 { x } else { x * scale };
            Ok(match &pass.pictures {
                Some(PictureRows { embeddings, sources }) => {
                    Tensor::cat(vec![x, embeddings.clone()], 0).select(0, sources.clone()).into()
                }
                None => x.into(),
            })
        })
    }
}

/// One transformer block: attention and a feed-forward layer.
pub struct Block {
    /// Number of the block, from 0.
    pub index: usize,
    pub pass: Arc<ForwardPass>,
}

impl Segment for Block {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let name = format!("model.layers.{}", self.index);
        self.pass.scoped(&format!("{name}."), tape, |scope| {
            let x = state.rank::<2>()?;
            let norm = |x: Tensor<2>, which: &str| self.pass.norm(scope, x, &format!("{name}.{which}"));
            let h = norm(x.clone(), "input_layernorm")?;
            let attended = self.attention(scope, h, &format!("{name}.self_attn"))?;
            // With output norms, `post_attention_layernorm` normalises the output of attention; without, it is the
            // input norm of the feed-forward layer.
            if self.pass.config.output_norms {
                let x = x + norm(attended, "post_attention_layernorm")?;
                let h = norm(x.clone(), "pre_feedforward_layernorm")?;
                let fed = self.feed_forward(scope, h, &format!("{name}.mlp"))?;
                return Ok((x + norm(fed, "post_feedforward_layernorm")?).into());
            }
            let x = x + attended;
            let h = norm(x.clone(), "post_attention_layernorm")?;
            Ok((x + self.feed_forward(scope, h, &format!("{name}.mlp"))?).into())
        })
    }
}

/// Splits the rows of `x` into the spans, which are contiguous and cover `x`. It splits by halves, because the gradient
/// of a slice has the size of the sliced tensor: one slice of `x` per span would cost the size of `x` times their
/// number.
pub fn split_rows(x: Tensor<2>, spans: &[Range<usize>]) -> Vec<Tensor<2>> {
    let (first_half, second_half) = spans.split_at(spans.len() / 2);
    let ([first, ..], [middle, ..]) = (first_half, second_half) else { return vec![x; spans.len()] };
    let (rows, rows_of_first_half) = (x.dims()[0], middle.start - first.start);
    let mut parts = split_rows(x.clone().narrow(0, 0, rows_of_first_half), first_half);
    parts.extend(split_rows(x.narrow(0, rows_of_first_half, rows - rows_of_first_half), second_half));
    parts
}

/// Rotates queries or keys, `[L, heads * d]`, by angles with the given cosines and sines, `[L, d / 2]`. In checkpoints,
/// channels i and i + d/2 of a head are a pair; the result has the channels of each pair as neighbours. The permutation
/// is the same for queries and keys, so it does not change their products.
pub fn rotate_halves(x: Tensor<2>, (cos, sin): (Tensor<2>, Tensor<2>), heads: usize) -> Tensor<2> {
    let [tokens, width] = x.dims();
    let paired = x.reshape([tokens, heads, 2, width / heads / 2]).swap_dims(2, 3).reshape([tokens, width]);
    ops::rope(paired, cos, sin, heads)
}

impl Block {
    /// Attention of every sequence over itself and its cached tokens, with all projections.
    fn attention(&self, scope: &Scope<'_>, h: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let config = &self.pass.config;
        let [q, k, v] = self.projections(scope, h, name)?;
        let q = self.rotated(scope, q, &format!("{name}.q_norm"), config.heads)?;
        let k = self.rotated(scope, k, &format!("{name}.k_norm"), config.kv_heads)?;
        let numbered_spans: Vec<_> = self.pass.spans.iter().enumerate().filter(|(_, span)| !span.is_empty()).collect();
        let attended = match &self.pass.cache {
            // Generation: one new token per sequence.
            Some((cache, CachedTokens::Next(next))) => {
                let call = DecodeCall {
                    heads: config.heads,
                    key_heads: config.kv_heads,
                    sequences: next.visible(config.windows[self.index]),
                    scale: config.attention_scale,
                    softcap: config.attention_softcap,
                };
                cache.attend(self.index, q, [k, v], next, call)
            }
            // Generation: the new tokens of prompts, over all tokens of each.
            Some((cache, CachedTokens::Prompts(places))) => {
                let keys = cache.read_prompts(self.index, k, v, places);
                let attend = |(i, span): &(usize, &Range<usize>)| {
                    let (k, v) = keys.of(&places.prefixes()[*i])?;
                    Some(self.attend(q.clone().narrow(0, span.start, span.len()), k, v))
                };
                // Several prompts per task, because a prompt with few new tokens is less work than waking a thread.
                Tensor::cat(numbered_spans.par_iter().with_min_len(PROMPTS_PER_TASK).filter_map(attend).collect(), 0)
            }
            // Whole sequences.
            None => {
                let spans: Vec<_> = numbered_spans.into_iter().map(|(_, span)| span.clone()).collect();
                let [q, k, v] = [q, k, v].map(|x| split_rows(x, &spans));
                let attended = q.into_iter().zip(k).zip(v).map(|((q, k), v)| self.attend(q, k, v));
                Tensor::cat(attended.collect(), 0)
            }
        };
        self.linear(scope, attended, &format!("{name}.o_proj"))
    }

    /// A linear layer. In generation, the result of a row does not depend on the other rows of the batch, see
    /// [`ops::linear_rows`].
    fn linear(&self, scope: &Scope<'_>, x: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        match self.pass.cache {
            Some(_) => scope.linear_rows(x, name),
            None => scope.linear(x, name),
        }
    }

    /// Attention of the last tokens of one sequence (the rows of `q`) over the whole sequence.
    fn attend(&self, q: Tensor<2>, k: Tensor<2>, v: Tensor<2>) -> Tensor<2> {
        let config = &self.pass.config;
        match q.dims()[0] {
            // A single query attends to all keys in its window and needs no causal mask.
            1 => {
                let keys = k.dims()[0];
                let window = config.windows[self.index].unwrap_or(keys).min(keys);
                let within_window = |x: Tensor<2>| x.narrow(0, keys - window, window);
                self.attend_last(q, within_window(k), within_window(v))
            }
            _ => {
                let window = config.windows[self.index];
                let options = AttentionOptions { causal: true, window, ..self.options() };
                ops::attention_with(q, self.repeated(k), self.repeated(v), config.heads, options)
            }
        }
    }

    fn options(&self) -> AttentionOptions {
        let LmConfig { attention_scale: scale, attention_softcap: softcap, .. } = self.pass.config;
        AttentionOptions { products: Some(self.pass.products), scale, softcap, ..Default::default() }
    }

    /// Queries, keys and values.
    fn projections(&self, scope: &Scope<'_>, h: Tensor<2>, name: &str) -> Result<[Tensor<2>; 3]> {
        let config = &self.pass.config;
        if config.fused {
            let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
            let qkv = self.linear(scope, h, &format!("{name}.qkv_proj"))?;
            return Ok([(0, q), (q, kv), (q + kv, kv)].map(|(start, width)| qkv.clone().narrow(1, start, width)));
        }
        Ok([
            self.linear(scope, h.clone(), &format!("{name}.q_proj"))?,
            self.linear(scope, h.clone(), &format!("{name}.k_proj"))?,
            self.linear(scope, h, &format!("{name}.v_proj"))?,
        ])
    }

    fn feed_forward(&self, scope: &Scope<'_>, h: Tensor<2>, name: &str) -> Result<Tensor<2>> {
        let config = &self.pass.config;
        let [gate, up] = if config.fused {
            let gate_up = self.linear(scope, h, &format!("{name}.gate_up_proj"))?;
            [0, config.ffn_dim].map(|start| gate_up.clone().narrow(1, start, config.ffn_dim))
        } else {
            [
                self.linear(scope, h.clone(), &format!("{name}.gate_proj"))?,
                self.linear(scope, h, &format!("{name}.up_proj"))?,
            ]
        };
        let gate = match config.gate {
            Gate::Silu => ops::silu(gate),
            Gate::Gelu => ops::gelu_tanh(gate),
        };
        self.linear(scope, gate * up, &format!("{name}.down_proj"))
    }

    /// Normalises and rotates queries or keys; see [`rotate_halves`].
    fn rotated(&self, scope: &Scope<'_>, mut x: Tensor<2>, norm: &str, heads: usize) -> Result<Tensor<2>> {
        let config = &self.pass.config;
        if config.qk_norm {
            let [tokens, width] = x.dims();
            x = self.pass.norm(scope, x.reshape([tokens * heads, config.head_dim]), norm)?.reshape([tokens, width]);
        }
        let has_window = config.windows[self.index].is_some();
        let (cos, sin) = match &self.pass.window_rope {
            Some(window_rope) if has_window => window_rope,
            _ => &self.pass.rope,
        };
        Ok(rotate_halves(x, (cos.clone(), sin.clone()), heads))
    }

    /// Repeats each key head for the query heads that share it.
    fn repeated(&self, x: Tensor<2>) -> Tensor<2> {
        let config = &self.pass.config;
        let [tokens, width] = x.dims();
        let group = config.heads / config.kv_heads;
        if group == 1 {
            return x;
        }
        let x = x.reshape([tokens, config.kv_heads, 1, config.head_dim]);
        x.expand([tokens, config.kv_heads, group, config.head_dim]).reshape([tokens, width * group])
    }

    /// Attention of one query over all keys. The query heads that share a key head become rows of one call, so that no
    /// key is copied.
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
pub struct FinalNorm(pub Arc<ForwardPass>);

impl Segment for FinalNorm {
    fn forward(&self, state: &NdTensor, _shared: &[NdTensor], tape: &Tape) -> Result<NdTensor> {
        let pass = &self.0;
        pass.scoped("model.norm.", tape, |scope| Ok(pass.norm(scope, state.rank::<2>()?, "model.norm")?.into()))
    }
}
