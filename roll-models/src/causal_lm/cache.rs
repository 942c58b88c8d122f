//! Keys and values of the tokens that sequences have so far.
//!
//! Prompts lie packed in one tensor, each once, whatever number of sequences go on from it. A sequence writes into a
//! slot of its own, in tensors that are allocated ahead and written in place; they grow by doubling. A sequence that
//! takes a slot over writes over another's tokens, and sees none of them: it looks at its own only.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Tensor};
use roll_backends::ops::{self, DecodeCall, KeyPlace};

use super::block::integers;

/// Keys and values of tokens that follow one another, in one layer: `[tokens, kv_heads * head_dim]` each.
pub type KeysValues = (Tensor<2>, Tensor<2>);

/// Keys and values of the beginning of a sequence, layer by layer, each in parts that follow one another.
pub type Beginning = Vec<Vec<KeysValues>>;

/// Tokens that a slot has room for at first.
const FIRST_CAPACITY: usize = 32;

/// Tokens that a slot has room for when `needed` have to fit, and before that `capacity` did (0: there was none).
pub(super) fn capacity_for(needed: usize, capacity: usize) -> usize {
    match capacity {
        0 => FIRST_CAPACITY.max(needed),
        _ if capacity >= needed => capacity,
        _ => (2 * capacity).max(needed),
    }
}

/// The sequences of one generation.
pub struct Cache {
    layers: Vec<Mutex<Layer>>,
    /// Rows of each prompt among those of all.
    prompts: Mutex<Vec<Range<usize>>>,
    dtype: DType,
}

#[derive(Default)]
struct Layer {
    /// Beginnings of the prompts that are read next, prompt by prompt.
    known: Vec<Vec<KeysValues>>,
    /// All prompts, packed.
    prompts: Option<KeysValues>,
    /// Tokens written since: `[slots, capacity, kv_heads * head_dim]`.
    tails: Option<(Tensor<3>, Tensor<3>)>,
}

/// Tokens that a pass with a cache reads.
#[derive(Clone)]
pub enum Reads {
    /// The part of every expected prompt that is not known.
    Prompts {
        /// Number of the first of them.
        first: usize,
    },
    /// One token of every row, which lies after those of its place.
    Tokens(Arc<[KeyPlace]>),
}

impl Cache {
    /// Makes a cache for `layers` layers; keys and values are kept in `dtype`.
    pub fn new(layers: usize, dtype: DType) -> Self {
        Self { layers: (0..layers).map(|_| Mutex::default()).collect(), prompts: Mutex::default(), dtype }
    }

    /// Makes room for prompts that begin with the `known` tokens and go on with as many tokens as `read` says, which
    /// the next pass reads. Gives the number of the first of them.
    pub fn expect(&self, known: Vec<(usize, Option<Beginning>)>, read: &[Range<usize>]) -> usize {
        let mut prompts = self.prompts.lock().unwrap_or_else(PoisonError::into_inner);
        let first = prompts.len();
        for ((length, _), read) in known.iter().zip(read) {
            let start = prompts.last().map_or(0, |last| last.end);
            prompts.push(start..start + length + read.len());
        }
        let mut known: Vec<_> = known.into_iter().map(|(_, parts)| parts.unwrap_or_default().into_iter()).collect();
        for layer in 0..self.layers.len() {
            self.layer(layer).known = known.iter_mut().map(|parts| parts.next().unwrap_or_default()).collect();
        }
        first
    }

    /// Rows of prompt `i` among those of all.
    pub fn prompt(&self, i: usize) -> Range<usize> {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner)[i].clone()
    }

    fn layer(&self, layer: usize) -> std::sync::MutexGuard<'_, Layer> {
        self.layers[layer].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the keys and values of the tokens that prompts go on with, at `read`; returns those of all prompts,
    /// packed.
    pub fn read_prompts(&self, layer: usize, k: Tensor<2>, v: Tensor<2>, read: &[Range<usize>]) -> KeysValues {
        let mut layer = self.layer(layer);
        let (k, v) = (stored(k, self.dtype), stored(v, self.dtype));
        let known = std::mem::take(&mut layer.known);
        let whole = match known.iter().all(Vec::is_empty) {
            true => (k, v),
            false => {
                let (mut keys, mut values) = (Vec::new(), Vec::new());
                for (parts, read) in known.into_iter().zip(read) {
                    for (k, v) in parts {
                        keys.push(k);
                        values.push(v);
                    }
                    if !read.is_empty() {
                        keys.push(k.clone().narrow(0, read.start, read.len()));
                        values.push(v.clone().narrow(0, read.start, read.len()));
                    }
                }
                (Tensor::cat(keys, 0), Tensor::cat(values, 0))
            }
        };
        let all = match layer.prompts.take() {
            None => whole,
            Some((k, v)) => (Tensor::cat(vec![k, whole.0], 0), Tensor::cat(vec![v, whole.1], 0)),
        };
        layer.prompts.insert(all).clone()
    }

    /// Attention of one token of every row, whose key and value are written at its place in `places`; `call` says which
    /// tokens it sees then.
    pub fn attend(
        &self,
        layer: usize,
        q: Tensor<2>,
        [k, v]: [Tensor<2>; 2],
        places: &[KeyPlace],
        call: DecodeCall,
    ) -> Tensor<2> {
        let mut layer = self.layer(layer);
        let (device, [_, width]) = (k.device(), k.dims());
        let needed = places.iter().map(|p| p.tail + 1).max().unwrap_or(0);
        let slots = places.iter().map(|p| p.slot + 1).max().unwrap_or(0);
        let slots = slots.max(layer.tails.as_ref().map_or(0, |(keys, _)| keys.dims()[0]));
        let empty = |slots, capacity| Tensor::<3>::zeros([slots, capacity, width], (&device, self.dtype));
        // Taken out, so that the memory has one owner and is written in place.
        let (keys, values) = match layer.tails.take() {
            None => (empty(slots, capacity_for(needed, 0)), empty(slots, capacity_for(needed, 0))),
            Some(tails) if tails.0.dims()[1] >= needed && tails.0.dims()[0] == slots => tails,
            Some((keys, values)) => {
                let [before, capacity, _] = keys.dims();
                let room = capacity_for(needed, capacity);
                let larger = |old: Tensor<3>| empty(slots, room).slice_assign([0..before, 0..capacity, 0..width], old);
                (larger(keys), larger(values))
            }
        };
        let at: Vec<(usize, usize)> = places.iter().map(|p| (p.slot, p.tail)).collect();
        let (keys, values) = (ops::store_rows(keys, k, &at), ops::store_rows(values, v, &at));
        let prompts = match &layer.prompts {
            Some((keys, values)) => [keys.clone(), values.clone()],
            None => [&keys, &values].map(|x| Tensor::zeros([0, width], (&x.device(), x.dtype()))),
        };
        let out = ops::attend_rows(q, prompts, [keys.clone(), values.clone()], call);
        layer.tails = Some((keys, values));
        out
    }

    /// The keys and values of `prompt` and of the first `tail` tokens of `slot`, layer by layer, as copies: a view of
    /// the slot would keep its memory from being written in place. A view of the prompt would keep the tensor of all
    /// prompts until now; as each row that enters makes a new one, so many of them would be there at once.
    pub fn copied(&self, prompt: usize, slot: usize, tail: usize) -> Beginning {
        let select = |x: Tensor<2>, rows: Range<usize>| {
            let rows = rows.map(|row| row as i64).collect();
            let device = x.device();
            x.select(0, integers(rows, &device))
        };
        let of_slot = |tails: &Tensor<3>| {
            let [slots, capacity, width] = tails.dims();
            select(tails.clone().reshape([slots * capacity, width]), slot * capacity..slot * capacity + tail)
        };
        self.beginning(prompt, tail, |prompts, rows| select(prompts.clone(), rows), of_slot)
    }

    /// The same as a view, once nothing will be written any more: it takes no memory beside the cache's, and keeps
    /// that.
    pub fn viewed(&self, prompt: usize, slot: usize, tail: usize) -> Beginning {
        let of_slot = |tails: &Tensor<3>| {
            let [slots, capacity, width] = tails.dims();
            tails.clone().reshape([slots * capacity, width]).narrow(0, slot * capacity, tail)
        };
        self.beginning(prompt, tail, |prompts, rows| prompts.clone().narrow(0, rows.start, rows.len()), of_slot)
    }

    fn beginning(
        &self,
        prompt: usize,
        tail: usize,
        of_prompts: impl Fn(&Tensor<2>, Range<usize>) -> Tensor<2>,
        of_slot: impl Fn(&Tensor<3>) -> Tensor<2>,
    ) -> Beginning {
        let rows = self.prompt(prompt);
        let of_layer = |layer: &Mutex<Layer>| {
            let layer = layer.lock().unwrap_or_else(PoisonError::into_inner);
            let mut parts = Vec::new();
            if let Some((k, v)) = &layer.prompts {
                parts.push((of_prompts(k, rows.clone()), of_prompts(v, rows.clone())));
            }
            if let Some((k, v)) = layer.tails.as_ref().filter(|_| tail > 0) {
                parts.push((of_slot(k), of_slot(v)));
            }
            parts
        };
        self.layers.iter().map(of_layer).collect()
    }
}

fn stored<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}
