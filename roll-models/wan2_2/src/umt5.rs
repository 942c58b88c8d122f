//! The UMT5 text encoder: T5's encoder with a separate relative position bias in every layer.
//!
//! It runs in f32, and without gradient unless its weights are leaves of an autodiff graph. Weights come block by block
//! from a [`WeightStore`], so the XXL encoder (11 GB in bf16) is never resident as a whole, and they stay bf16 until
//! they are used. Several sequences pass through a block, one after the other, while its weights are loaded.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn_tensor::{DType, Device, Int, Tensor as Burn, activation};
use roll_backends::{Resident, Scope, Tape, WeightStore, ops, to_host};
use roll_core::{Error, Result, StateDict, Tensor};
use roll_network::precision::DeviceTraits;
use roll_network::weights::{Checkpoint, Streamed, stored_dtype};

use super::dit::Probe;
use roll_network::shapes::WeightShapes;

/// Epsilon of T5's layer norm: `x / sqrt(mean(x^2) + EPS)`.
const EPS: f64 = 1e-6;

/// Distance from which on all positions share the last bucket.
const MAX_DISTANCE: usize = 128;

/// Number of query rows whose attention scores are in memory at a time, per head.
const QUERY_ROWS: usize = 512;

/// Name of the network in error messages.
const NETWORK: &str = "UMT5 encoder";

/// Name of the embedding table.
const EMBEDDING: &str = "token_embedding.weight";

/// Prefix of the norm after the last block.
const FINAL_NORM: &str = "norm.";

fn block_prefix(i: usize) -> String {
    format!("blocks.{i}.")
}

/// Appends rows of zeros to `rows` `[L, dim]`, up to `length` rows.
pub(super) fn padded(rows: &Tensor, length: usize) -> Result<Tensor> {
    let dim = rows.shape().last().copied().unwrap_or(0);
    let mut values = rows.to_f32_vec();
    values.resize(length * dim, 0.0);
    Tensor::new(values, [length, dim])
}

/// Fails because an encoder was called without a sequence.
fn no_sequence<T>() -> Result<T> {
    Err(Error::Misuse("an encoding of no sequence was requested".into()))
}

/// The sizes of a UMT5 encoder, read from its weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Umt5Config {
    /// Number of rows of the embedding, an exclusive upper bound of ids.
    pub vocab: usize,
    /// Width of the residual stream and of the output.
    pub dim: usize,
    /// Total width of all attention heads.
    pub attention_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn_dim: usize,
    /// Number of attention heads.
    pub heads: usize,
    /// Number of buckets of relative positions, both directions together.
    pub buckets: usize,
    /// Number of blocks.
    pub layers: usize,
}

impl Umt5Config {
    /// Reads the sizes from the shapes of the weights (official key names), and checks that every weight is present in
    /// its shape.
    pub fn from_shapes(shapes: &BTreeMap<String, Vec<usize>>) -> Result<Self> {
        let weights = WeightShapes { network: NETWORK, shapes };
        let [vocab, dim] = weights.get(EMBEDDING)?;
        let [attention_dim, _] = weights.get("blocks.0.attn.q.weight")?;
        let [ffn_dim, _] = weights.get("blocks.0.ffn.fc1.weight")?;
        let [buckets, heads] = weights.get("blocks.0.pos_embedding.embedding.weight")?;
        let layers = weights.blocks(|i| format!("blocks.{i}.norm1.weight"));
        let config = Self { vocab, dim, attention_dim, ffn_dim, heads, buckets, layers };
        if heads == 0 || !attention_dim.is_multiple_of(heads) {
            return Err(Error::Unsupported(format!(
                "UMT5 encoder: expected heads that divide the attention width {attention_dim}, found {heads}"
            )));
        }
        if buckets < 4 || !buckets.is_multiple_of(4) {
            return Err(Error::Unsupported(format!(
                "UMT5 encoder: expected a multiple of 4 relative position buckets, found {buckets}"
            )));
        }
        weights.check(&config.weights())?;
        Ok(config)
    }

    /// Name (official) and shape of every weight of the network.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let &Self { vocab, dim, attention_dim, ffn_dim, heads, buckets, layers } = self;
        let mut all = vec![(EMBEDDING.to_string(), vec![vocab, dim]), ("norm.weight".to_string(), vec![dim])];
        for i in 0..layers {
            let mut add = |name: &str, shape: &[usize]| all.push((format!("blocks.{i}.{name}.weight"), shape.to_vec()));
            add("norm1", &[dim]);
            add("norm2", &[dim]);
            for part in ["q", "k", "v"] {
                add(&format!("attn.{part}"), &[attention_dim, dim]);
            }
            add("attn.o", &[dim, attention_dim]);
            add("pos_embedding.embedding", &[buckets, heads]);
            add("ffn.gate.0", &[ffn_dim, dim]);
            add("ffn.fc1", &[ffn_dim, dim]);
            add("ffn.fc2", &[dim, ffn_dim]);
        }
        all
    }
}

/// A UMT5 encoder.
pub struct Umt5 {
    config: Umt5Config,
    store: Arc<dyn WeightStore>,
    embedding: Embedding,
    probe: Option<Probe>,
}

/// The embedding table. It stays on the host, where a few rows are read, because it would be the largest weight on the
/// device.
enum Embedding {
    Loaded(Tensor),
    /// Read on demand: only the used rows of a mapped file are paged in.
    Stored(Checkpoint),
    /// Stored on the device together with the other weights, so that it can be trained.
    OnDevice,
}

impl Umt5 {
    /// Creates an encoder with resident weights (official names). bf16 weights stay bf16 and are converted to f32 at
    /// use.
    pub fn new(state: &StateDict, device: &Device) -> Result<Self> {
        let shapes = state.iter().map(|(k, t)| (k.clone(), t.shape().to_vec())).collect();
        let config = Umt5Config::from_shapes(&shapes)?;
        let mut blocks = state.clone();
        let embedding = blocks
            .remove(EMBEDDING)
            .ok_or_else(|| WeightShapes { network: NETWORK, shapes: &shapes }.missing(EMBEDDING))?;
        let store = Resident::new(&blocks, DeviceTraits::of(device).storable(stored_dtype(&embedding)), device);
        Ok(Self { config, store: Arc::new(store), embedding: Embedding::Loaded(embedding), probe: None })
    }

    /// Creates an encoder that streams the weights of `checkpoint` block by block at every [`Umt5::encode`]. Names are
    /// official; see [`super::components::recognise`].
    pub fn streamed(checkpoint: &Checkpoint, device: &Device) -> Result<Self> {
        let config = Umt5Config::from_shapes(&checkpoint.shapes())?;
        let order = (0..config.layers).map(block_prefix).chain([FINAL_NORM.to_string()]).collect();
        let store = Arc::new(Streamed::new(checkpoint.clone(), device).with_prefetch_order(order));
        Ok(Self { config, store, embedding: Embedding::Stored(checkpoint.clone()), probe: None })
    }

    /// Creates an encoder with all weights, including the embedding, from `store`. With a store of leaves
    /// ([`Resident::tracked`]) the encoder can be trained through [`Umt5::hidden_recorded`].
    pub fn with_store(config: Umt5Config, store: Arc<dyn WeightStore>) -> Self {
        Self { config, store, embedding: Embedding::OnDevice, probe: None }
    }

    /// Passes intermediate values to `probe`: `blocks.N.attn` and `blocks.N`, each `[L, dim]`.
    pub fn with_probe(mut self, probe: Probe) -> Self {
        self.probe = Some(probe);
        self
    }

    /// Sizes of the network.
    pub fn config(&self) -> &Umt5Config {
        &self.config
    }

    /// Returns the prompt embedding, f32 `[length, dim]`: the encoding of `ids` (without padding), then rows of zeros.
    /// Fails if there are no ids, more than `length`, or an id outside the vocabulary.
    pub fn encode(&self, ids: &[u32], length: usize) -> Result<Tensor> {
        if ids.is_empty() || ids.len() > length {
            return Err(Error::Misuse(format!("expected 1 to {length} token ids, found {}", ids.len())));
        }
        match self.encode_all(&[ids])?.first() {
            Some(rows) => padded(rows, length),
            None => no_sequence(),
        }
    }

    /// Encodes several prompts, f32 `[ids.len(), dim]` each. Every weight is read once, and the results are
    /// bit-identical to those of the prompts encoded separately.
    pub fn encode_all(&self, prompts: &[&[u32]]) -> Result<Vec<Tensor>> {
        let keys: Vec<Vec<usize>> = prompts.iter().map(|ids| (0..ids.len()).collect()).collect();
        let sequences: Vec<_> = prompts.iter().copied().zip(keys.iter().map(Vec::as_slice)).collect();
        self.hidden_all(&sequences)?.into_iter().map(to_host).collect()
    }

    /// Encodes `ids`, f32 `[ids.len(), dim]`, with attention to the positions `keys` only. This equals a mask of all
    /// other positions, whose weights vanish in the softmax.
    pub fn hidden(&self, ids: &[u32], keys: &[usize]) -> Result<Tensor> {
        to_host(self.hidden_recorded(ids, keys)?)
    }

    /// Encodes `ids` like [`Umt5::hidden`], but returns the result on the device. The result is part of the autodiff
    /// graph if the weights are leaves of one.
    pub fn hidden_recorded(&self, ids: &[u32], keys: &[usize]) -> Result<Burn<2>> {
        self.hidden_all(&[(ids, keys)])?.pop().map_or_else(no_sequence, Ok)
    }

    /// Encodes several pairs of ids and key positions like [`Umt5::hidden_recorded`].
    fn hidden_all(&self, sequences: &[(&[u32], &[usize])]) -> Result<Vec<Burn<2>>> {
        if let Some((ids, keys)) =
            sequences.iter().find(|(ids, keys)| keys.is_empty() || keys.iter().any(|&k| k >= ids.len()))
        {
            return Err(Error::Misuse(format!("expected key positions below {}, found {keys:?}", ids.len())));
        }
        let tape = Tape::off();
        let positions: Vec<Positions> =
            sequences.iter().map(|(ids, keys)| Positions::new(ids.len(), keys, self.config.buckets)).collect();
        let mut states = sequences.iter().map(|(ids, _)| self.embed(ids)).collect::<Result<Vec<_>>>()?;
        for i in 0..self.config.layers {
            let weights = self.store.segment(&block_prefix(i))?;
            let scope = Scope {
                weights: &weights,
                trainable: None,
                lora_scale: 1.0,
                tape: &tape,
                products: DType::F32,
                fp8: false,
            };
            let run_block = |(x, positions)| self.block(&scope, i, x, positions);
            states = states.into_iter().zip(&positions).map(run_block).collect::<Result<_>>()?;
        }
        let weights = self.store.segment(FINAL_NORM)?;
        let scope = Scope {
            weights: &weights,
            trainable: None,
            lora_scale: 1.0,
            tape: &tape,
            products: DType::F32,
            fp8: false,
        };
        states.into_iter().map(|x| Ok(ops::rms_norm(x, scope.weight("norm.weight")?, EPS))).collect()
    }

    /// Block `i`: self-attention and a gated feed-forward layer.
    fn block(&self, scope: &Scope<'_>, i: usize, x: Burn<2>, positions: &Positions) -> Result<Burn<2>> {
        let name = |part: &str| format!("blocks.{i}.{part}");
        let normed = ops::rms_norm(x.clone(), scope.weight(&name("norm1.weight"))?, EPS);
        let q = scope.linear(normed.clone(), &name("attn.q"))?;
        let at_keys = positions.select_keys(normed);
        let k = scope.linear(at_keys.clone(), &name("attn.k"))?;
        let v = scope.linear(at_keys, &name("attn.v"))?;
        let table = scope.weight::<2>(&name("pos_embedding.embedding.weight"))?;
        let mixed = attention([q, k, v], table, positions, self.store.device());
        let attended = scope.linear(mixed, &name("attn.o"))?;
        self.probe_value(|| name("attn"), &attended);
        let x = x + attended;
        let normed = ops::rms_norm(x.clone(), scope.weight(&name("norm2.weight"))?, EPS);
        let gate = ops::gelu_tanh(scope.linear(normed.clone(), &name("ffn.gate.0"))?);
        let wide = scope.linear(normed, &name("ffn.fc1"))? * gate;
        let x = x + scope.linear(wide, &name("ffn.fc2"))?;
        self.probe_value(|| format!("blocks.{i}"), &x);
        Ok(x)
    }

    /// Looks up rows of the embedding, f32 `[ids.len(), dim]`.
    fn embed(&self, ids: &[u32]) -> Result<Burn<2>> {
        let Umt5Config { vocab, .. } = self.config;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::Unsupported(format!(
                "the token id {id} is beyond the text encoder's vocabulary of {vocab}: the tokenizer is that of another \
                 model"
            )));
        }
        let device = self.store.device();
        let rows = match &self.embedding {
            Embedding::Loaded(table) => self.look_up(table, ids)?,
            Embedding::Stored(checkpoint) => self.look_up(&checkpoint.tensor(EMBEDDING)?, ids)?,
            Embedding::OnDevice => {
                let weights = self.store.segment(EMBEDDING)?;
                let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
                let ids = Burn::<1, Int>::from_data(ids.as_slice(), device);
                return Ok(roll_backends::weights::get(&weights, EMBEDDING)?.f32::<2>()?.select(0, ids));
            }
        };
        roll_backends::to_device(&rows, device)
    }

    /// Looks up rows of a table in host memory. Every id must be in the vocabulary.
    fn look_up(&self, table: &Tensor, ids: &[u32]) -> Result<Tensor> {
        let Umt5Config { dim, .. } = self.config;
        let width = dim * table.dtype().size();
        let mut bytes = Vec::with_capacity(ids.len() * width);
        ids.iter().for_each(|&id| bytes.extend_from_slice(&table.as_bytes()[id as usize * width..][..width]));
        Tensor::from_bytes(table.dtype(), [ids.len(), dim], Arc::new(bytes))?.to_float(roll_core::DType::F32)
    }

    fn probe_value(&self, name: impl FnOnce() -> String, value: &Burn<2>) {
        if let Some(probe) = &self.probe {
            probe(&name(), value);
        }
    }
}

/// Positions of queries and keys, and the bucket of each pair.
struct Positions {
    queries: usize,
    keys: Vec<usize>,
    /// One bucket per pair, row-major over queries and keys.
    buckets: Vec<u16>,
}

impl Positions {
    fn new(queries: usize, keys: &[usize], buckets: usize) -> Self {
        let pairs = (0..queries).flat_map(|q| keys.iter().map(move |&k| k as i64 - q as i64));
        let buckets = pairs.map(|distance| relative_bucket(distance, buckets) as u16).collect();
        Self { queries, keys: keys.to_vec(), buckets }
    }

    /// Selects the rows of `x` that are keys.
    fn select_keys(&self, x: Burn<2>) -> Burn<2> {
        if self.keys.len() == self.queries {
            return x;
        }
        let rows = self.keys.iter().map(|&k| x.clone().narrow(0, k, 1)).collect();
        Burn::cat(rows, 0)
    }

    /// The buckets of the pairs of a range of queries with all keys, row-major.
    fn buckets_of(&self, queries: Range<usize>) -> &[u16] {
        let keys = self.keys.len();
        &self.buckets[queries.start * keys..queries.end * keys]
    }
}

/// The position bias that a head adds to its scores, row-major `[queries, keys.len()]`, from the `table` `[buckets,
/// heads]` of its layer. Queries are at 0, 1, ...; keys at the given positions.
pub fn head_bias(table: &[f32], config: &Umt5Config, head: usize, queries: usize, keys: &[usize]) -> Vec<f32> {
    let positions = Positions::new(queries, keys, config.buckets);
    positions.buckets_of(0..queries).iter().map(|&bucket| table[usize::from(bucket) * config.heads + head]).collect()
}

/// Attention without scaling, `softmax(q k^T + bias) v`, for one head and [`QUERY_ROWS`] queries at a time. `table`
/// `[buckets, heads]` has the bias of each bucket.
fn attention([q, k, v]: [Burn<2>; 3], table: Burn<2>, positions: &Positions, device: &Device) -> Burn<2> {
    let heads = table.dims()[1];
    let width = q.dims()[1] / heads;
    // Ranges of queries, and the buckets of their pairs with all keys.
    let query_ranges: Vec<_> = (0..positions.queries)
        .step_by(QUERY_ROWS)
        .map(|start| {
            let rows = start..(start + QUERY_ROWS).min(positions.queries);
            let buckets: Vec<i32> = positions.buckets_of(rows.clone()).iter().map(|&b| i32::from(b)).collect();
            (rows, Burn::<1, Int>::from_data(buckets.as_slice(), device))
        })
        .collect();
    let outputs_of_heads = (0..heads).map(|head| {
        let part = |t: &Burn<2>| t.clone().narrow(1, head * width, width);
        let (q, k, v) = (part(&q), part(&k).transpose(), part(&v));
        let bias_by_bucket = table.clone().narrow(1, head, 1).flatten::<1>(0, 1);
        let outputs = query_ranges.iter().map(|(rows, buckets)| {
            let bias = bias_by_bucket.clone().select(0, buckets.clone()).reshape([rows.len(), positions.keys.len()]);
            let scores = ops::product(q.clone().narrow(0, rows.start, rows.len()), k.clone()) + bias;
            ops::product(activation::softmax(scores, 1), v.clone())
        });
        Burn::cat(outputs.collect(), 0)
    });
    Burn::cat(outputs_of_heads.collect(), 1)
}

/// The bucket of a distance (key position minus query position). The upper half of the `buckets` is for keys after the
/// query. In each half, the first half are exact distances and the rest grow logarithmically up to `MAX_DISTANCE`.
pub fn relative_bucket(distance: i64, buckets: usize) -> usize {
    let half = buckets / 2;
    let exact = half / 2;
    let side = if distance > 0 { half } else { 0 };
    let absolute = distance.unsigned_abs() as usize;
    if absolute < exact {
        return side + absolute;
    }
    // Computed in f32, as in the reference: the result at powers of two depends on its rounding.
    let ratio = (absolute as f32 / exact as f32).ln() / (MAX_DISTANCE as f32 / exact as f32).ln();
    let logarithmic = exact + (ratio * (half - exact) as f32) as usize;
    side + logarithmic.min(half - 1)
}

#[cfg(test)]
#[path = "umt5_tests.rs"]
mod tests;
