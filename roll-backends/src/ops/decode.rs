//! Decoding of one new token per sequence, for a batch of sequences: storing its key and value in the KV cache, and the
//! attention of its query over all cached keys.

use std::any::Any;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex};

use burn_tensor::{IndexingUpdateOp, Tensor, TensorData};

use super::ProductKernel;
use super::expression::Expression;
use super::operator::{Primitives, with_backend};
use crate::backend::tensor::{Device, FloatTensor as Floats, IntTensor};
use crate::backend::{Backend, TensorMetadata};
use crate::sync::lock;

/// The cached keys of one sequence: a prompt that sequences may share, and a tail of generated tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedSequence {
    /// Rows of the prompt cache; several sequences may share them.
    pub prompt: Range<usize>,
    /// The sequence's slot in the tail cache.
    pub slot: usize,
    /// Number of keys in the slot.
    pub tail: usize,
    /// Number of leading tail keys that are masked because they lie before a sliding window.
    pub skip: usize,
}

/// The cached keys of every row of a pass. All layers should share one value: its indices are uploaded once, and each
/// copy to a GPU waits for the kernels before it.
#[derive(Debug)]
pub struct CachedSequences {
    rows: Vec<CachedSequence>,
    uploads: Uploads,
}

impl From<Vec<CachedSequence>> for CachedSequences {
    fn from(rows: Vec<CachedSequence>) -> Self {
        Self { rows, uploads: Uploads::default() }
    }
}

impl Deref for CachedSequences {
    type Target = [CachedSequence];

    fn deref(&self) -> &[CachedSequence] {
        &self.rows
    }
}

/// Distinct places of the tail cache, each a slot and a position in it. All layers should share one value, as with
/// [`CachedSequences`].
#[derive(Debug)]
pub struct TailPlaces {
    places: Vec<(usize, usize)>,
    uploads: Uploads,
}

impl From<Vec<(usize, usize)>> for TailPlaces {
    fn from(places: Vec<(usize, usize)>) -> Self {
        Self { places, uploads: Uploads::default() }
    }
}

impl TailPlaces {
    /// The rows of the places in the tail cache, seen as `[slots * capacity, W]`.
    pub(super) fn rows(&self, capacity: usize) -> impl Iterator<Item = usize> {
        self.places.iter().map(move |(slot, at)| slot * capacity + at)
    }

    /// [`Self::rows`] on the device of `like`.
    pub(super) fn uploaded_rows<B: Backend>(&self, capacity: usize, like: &Floats<B>) -> IntTensor<B> {
        let upload = || indices::<B>(self.rows(capacity).map(|row| row as i64).collect(), like);
        self.uploads.get::<B, _>(capacity, &like.device(), upload)
    }
}

/// Tensors that were uploaded for one host value: tuples of a key, the device, and the tensors, whose type depends on
/// the backend.
#[derive(Default)]
struct Uploads(Mutex<Vec<Box<dyn Any + Send + Sync>>>);

impl std::fmt::Debug for Uploads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} uploads", lock(&self.0).len())
    }
}

impl Uploads {
    /// The tensors of this key and device, which `upload` makes at the first call.
    fn get<B: Backend, T>(&self, key: usize, device: &Device<B>, upload: impl FnOnce() -> T) -> T
    where
        T: Clone + Send + Sync + 'static,
    {
        let mut uploads = lock(&self.0);
        let known_uploads = uploads.iter().filter_map(|upload| upload.downcast_ref::<(usize, Device<B>, T)>());
        for (known_key, known_device, tensors) in known_uploads {
            if *known_key == key && known_device == device {
                return tensors.clone();
            }
        }
        let tensors = upload();
        uploads.push(Box::new((key, device.clone(), tensors.clone())));
        tensors
    }
}

/// Operands of one call of [`attend_rows`].
#[derive(Clone, Debug)]
pub struct DecodeCall {
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values (grouped-query attention); query heads that share one are adjacent.
    pub key_heads: usize,
    /// The cached keys of each row of the queries.
    pub sequences: Arc<CachedSequences>,
    /// Factor of the scores; `1 / sqrt(d)` by default.
    pub scale: Option<f32>,
    /// Soft cap of the scores; see [`super::AttentionOptions::softcap`].
    pub softcap: Option<f32>,
}

impl DecodeCall {
    /// The factor of the scores, for heads of `width` numbers.
    pub(super) fn factor(&self, width: usize) -> f32 {
        self.scale.unwrap_or_else(|| (1.0 / (width as f64).sqrt()) as f32)
    }
}

/// Writes row i of `rows` `[N, W]` to slot and position `places[i]` of `into` `[S, C, W]`, and returns the result in
/// the dtype of `into`. Backends that can write in place do so if `into` has no other handle.
pub fn store_rows(into: Tensor<3>, rows: Tensor<2>, places: &TailPlaces) -> Tensor<3> {
    let ([slots, capacity, width], [count, row_width]) = (into.dims(), rows.dims());
    let places_of_rows = &places.places;
    let are_inside = places_of_rows.iter().all(|(slot, position)| *slot < slots && *position < capacity);
    assert!(
        row_width == width && count == places_of_rows.len() && are_inside,
        "{count} rows of {row_width} at {places_of_rows:?} of {slots} slots with {capacity} of {width}"
    );
    let rows = rows.cast(into.dtype());
    let operands = [into.into_dispatch(), rows.into_dispatch()];
    with_backend!(operands[0], B => {
        let [into, rows] = operands.map(B::constant);
        B::tensor(B::store(into, rows, places))
    })
}

/// Attention of one query per sequence. `prompts` and `tails` are each keys and values. Shapes: `q` `[N, heads * d]`,
/// prompts `[P, key_heads * d]`, tails `[S, C, key_heads * d]`. The result has the shape and dtype of `q`. Panics if
/// the shapes do not match or a sequence has no key.
pub fn attend_rows(q: Tensor<2>, prompts: [Tensor<2>; 2], tails: [Tensor<3>; 2], call: DecodeCall) -> Tensor<2> {
    let ([count, channels], [rows, width], [slots, capacity, _]) = (q.dims(), prompts[0].dims(), tails[0].dims());
    let is_inside = |sequence: &CachedSequence| {
        let CachedSequence { prompt, slot, tail, skip } = sequence;
        prompt.end <= rows && *slot < slots && *tail <= capacity && skip <= tail
    };
    let has_key = |sequence: &CachedSequence| sequence.prompt.len() + sequence.tail > sequence.skip;
    assert!(
        call.key_heads > 0
            && call.heads.is_multiple_of(call.key_heads)
            && channels * call.key_heads == width * call.heads
            && count == call.sequences.len()
            && call.sequences.iter().all(|sequence| is_inside(sequence) && has_key(sequence)),
        "queries {:?} of {} heads over keys {:?} and {:?} of {}",
        q.dims(),
        call.heads,
        prompts[0].dims(),
        tails[0].dims(),
        call.key_heads
    );
    let dtype = q.dtype();
    let (q, prompts, tails) = (q.into_dispatch(), prompts.map(Tensor::into_dispatch), tails.map(Tensor::into_dispatch));
    let out: Tensor<2> = with_backend!(q, B => {
        B::tensor(B::attend(B::constant(q), prompts.map(B::constant), tails.map(B::constant), &call))
    });
    out.cast(dtype)
}

/// Both operators on one backend.
pub trait DecodeKernel: ProductKernel {
    /// See [`store_rows`].
    fn store(into: Floats<Self>, rows: Floats<Self>, places: &TailPlaces) -> Floats<Self> {
        store_by_index::<Self>(into, rows, places)
    }

    /// See [`attend_rows`].
    fn attend(
        q: Floats<Self>,
        prompts: [Floats<Self>; 2],
        tails: [Floats<Self>; 2],
        call: &DecodeCall,
    ) -> Floats<Self> {
        attend_by_index::<Self>(q, prompts, tails, call)
    }
}

/// Uploads indices to the device of `like`.
fn indices<B: Backend>(values: Vec<i64>, like: &Floats<B>) -> IntTensor<B> {
    let count = values.len();
    B::int_from_data(TensorData::new(values, [count]), &like.device())
}

/// [`store_rows`] composed of primitive operations.
pub(super) fn store_by_index<B: Backend>(into: Floats<B>, rows: Floats<B>, places: &TailPlaces) -> Floats<B> {
    let into = Expression::<B>(into);
    let [slots, capacity, width] = into.dims();
    let into_rows = places.uploaded_rows::<B>(capacity, &rows);
    let flat = into.reshape([slots * capacity, width]).0;
    let stored = B::float_select_assign(flat, 0, into_rows, rows, IndexingUpdateOp::Assign);
    Expression::<B>(stored).reshape([slots, capacity, width]).0
}

/// Indices by which [`attend_by_index`] gathers the keys and values of N sequences. Prompts are padded to the longest
/// prompt, and tails to the longest tail.
#[derive(Clone)]
struct Gathered<B: Backend> {
    /// Number of keys of the longest prompt.
    longest_prompt: usize,
    /// Number of keys of the longest tail.
    longest_tail: usize,
    /// Rows of the prompt cache, `[N * longest_prompt]`. Padding reads an arbitrary valid row.
    from_prompts: IntTensor<B>,
    /// Slots of the tail cache, `[N]`.
    slots: IntTensor<B>,
    /// [`MASKED`] for padding and skipped keys, else 0: `[N, 1, longest_prompt + longest_tail]`.
    bias: Floats<B>,
}

impl CachedSequences {
    /// The indices on the device of `like`, uploaded at the first call.
    fn gathered<B: Backend>(&self, like: &Floats<B>) -> Gathered<B> {
        // There is one set of indices per device. Any key will do.
        const KEY: usize = 0;
        self.uploads.get::<B, _>(KEY, &like.device(), || self.gather::<B>(like))
    }

    fn gather<B: Backend>(&self, like: &Floats<B>) -> Gathered<B> {
        let longest_prompt = self.iter().map(|sequence| sequence.prompt.len()).max().unwrap_or(0);
        let longest_tail = self.iter().map(|sequence| sequence.tail).max().unwrap_or(0);
        let (mut from_prompts, mut slots, mut bias) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in self.iter() {
            let prompt = &sequence.prompt;
            // Padding repeats the last row of the prompt. An empty prompt has none, and may lie at either end of the
            // cache; its padding reads the first row of the cache.
            let padding = if prompt.is_empty() { 0 } else { prompt.end - 1 };
            let row_of = |i: usize| if i < prompt.len() { prompt.start + i } else { padding };
            from_prompts.extend((0..longest_prompt).map(|i| row_of(i) as i64));
            slots.push(sequence.slot as i64);
            let bias_of = |is_hidden: bool| if is_hidden { MASKED } else { 0.0 };
            bias.extend((0..longest_prompt).map(|i| bias_of(i >= prompt.len())));
            bias.extend((0..longest_tail).map(|i| bias_of(i < sequence.skip || i >= sequence.tail)));
        }
        let bias = TensorData::new(bias, [self.len(), 1, longest_prompt + longest_tail]);
        Gathered {
            longest_prompt,
            longest_tail,
            from_prompts: indices::<B>(from_prompts, like),
            slots: indices::<B>(slots, like),
            bias: B::float_from_data(bias, &like.device()),
        }
    }
}

/// [`attend_rows`] composed of primitive operations: gathers the keys and values of every sequence, pads them to the
/// longest sequence, and masks the padding by a bias. Scores are f32.
pub(super) fn attend_by_index<B: ProductKernel>(
    q: Floats<B>,
    prompts: [Floats<B>; 2],
    tails: [Floats<B>; 2],
    call: &DecodeCall,
) -> Floats<B> {
    let DecodeCall { heads, key_heads, sequences, .. } = call;
    let (count, heads_per_key_head) = (sequences.len(), heads / key_heads);
    let Gathered { longest_prompt, longest_tail, from_prompts, slots, bias } = sequences.gathered::<B>(&q);
    let q = Expression::<B>(q);
    let [_, channels] = q.dims();
    let (width, dtype, keys) = (channels / heads, q.dtype(), longest_prompt + longest_tail);
    // Sequences and key heads are one batch axis: for three axes, backends have bf16 products with f32 results.
    let batch = count * key_heads;
    // Gathers keys or values, as `[batch, keys, width]`.
    let by_head = |prompts: Floats<B>, tails: Floats<B>| {
        let mut parts = Vec::new();
        if longest_prompt > 0 {
            let rows = Expression::<B>(B::float_select(prompts, 0, from_prompts.clone()));
            parts.push(rows.reshape([count, longest_prompt, key_heads * width]));
        }
        if longest_tail > 0 {
            let written = Expression::<B>(tails).narrow(1, 0..longest_tail);
            parts.push(Expression(B::float_select(written.0, 0, slots.clone())));
        }
        let rows = Expression::cat(parts, 1).cast(dtype).reshape([count, keys, *key_heads, width]);
        rows.swap(1, 2).reshape([batch, keys, width])
    };
    let [[prompt_keys, prompt_values], [tail_keys, tail_values]] = [prompts, tails];
    let (k, v) = (by_head(prompt_keys, tail_keys), by_head(prompt_values, tail_values));
    let scores = q.reshape([batch, heads_per_key_head, width]).matmul(k.t()) * f64::from(call.factor(width));
    let scores = match call.softcap.map(f64::from) {
        Some(cap) => (scores * (1.0 / cap)).tanh() * cap,
        None => scores,
    };
    let scores = scores.reshape([count, key_heads * heads_per_key_head, keys]) + Expression::<B>(bias);
    let weights = (scores.clone() - scores.max(2)).exp();
    let weights = weights.clone() * weights.sum(2).recip();
    let out = weights.cast(dtype).reshape([batch, heads_per_key_head, keys]).matmul(v);
    out.reshape([count, channels]).0
}

/// Added to the scores of masked keys, so that their weight is 0.
const MASKED: f32 = -1e30;
