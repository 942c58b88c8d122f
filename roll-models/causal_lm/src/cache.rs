//! The cache of keys and values during a generation.
//!
//! Prompts are packed in one tensor, each once, even if several sequences continue it. Each sequence writes its new
//! tokens into a slot of its own, in preallocated tensors that are written in place and grow by doubling. A sequence
//! that reuses a slot overwrites the previous tokens and never attends to them.
//!
//! - *prompt*: the tokens that sequences continue, given by their number or by their range among the packed prompts.
//! - *slot*: a row of the preallocated tensors, which belongs to one sequence at a time.
//! - *tail*: the tokens that a sequence has in its slot, after its prompt; also their number.
//! - *known*: the first tokens of a prompt whose keys and values were computed before ([`Prefix`]). A pass computes the
//!   others only, which lie at the ranges `read` of its tokens.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{DType, Tensor};
use roll_backends::ops::{self, CachedSequence, CachedSequences, DecodeCall, TailPlaces};
use roll_network::precision::as_dtype;

use super::integers;

/// Keys and values of consecutive tokens in one layer: `[tokens, kv_heads * head_dim]` each.
pub type KeysValues = (Tensor<2>, Tensor<2>);

/// Keys and values of the first tokens of a sequence: for each layer, in consecutive parts.
pub type Prefix = Vec<Vec<KeysValues>>;

/// Initial capacity of a slot in tokens.
const FIRST_CAPACITY: usize = 32;

/// Returns the capacity of slots that must hold `needed` tokens, if it was `capacity` before (0: no slots).
pub(super) fn capacity_for(needed: usize, capacity: usize) -> usize {
    match capacity {
        0 => FIRST_CAPACITY.max(needed),
        _ if capacity >= needed => capacity,
        _ => (2 * capacity).max(needed),
    }
}

/// The cache of one generation.
pub struct Cache {
    layers: Vec<Mutex<CachedLayer>>,
    /// Range of each prompt among the packed prompts.
    prompts: Mutex<Vec<Range<usize>>>,
    dtype: DType,
}

#[derive(Default)]
struct CachedLayer {
    /// The known prefix of each prompt of the next pass.
    known: Vec<Vec<KeysValues>>,
    /// All prompts, packed.
    prompts: Option<KeysValues>,
    /// Tokens after the prompts: `[slots, capacity, kv_heads * head_dim]`.
    tails: Option<(Tensor<3>, Tensor<3>)>,
}

/// The tokens of a pass with a cache.
#[derive(Clone)]
pub enum CachedTokens {
    /// The unknown part of each added prompt.
    Prompts {
        /// Number of the first of these prompts.
        first: usize,
    },
    /// The next token of every row, after those of its place.
    Next(Arc<NextPlaces>),
}

/// The places of the next token of every row, and what layers share of them.
pub struct NextPlaces {
    places: Vec<CachedSequence>,
    tails: TailPlaces,
    /// The keys that are visible in layers of each window.
    visible: Mutex<Vec<(Option<usize>, Arc<CachedSequences>)>>,
}

impl NextPlaces {
    pub fn new(places: Vec<CachedSequence>) -> Self {
        let tails = places.iter().map(|p| (p.slot, p.tail)).collect::<Vec<_>>().into();
        Self { places, tails, visible: Mutex::default() }
    }

    /// The keys that the new token of each place attends to, its own key included, in layers with this window.
    pub fn visible(&self, window: Option<usize>) -> Arc<CachedSequences> {
        let mut by_window = self.visible.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, keys)) = by_window.iter().find(|(of, _)| *of == window) {
            return keys.clone();
        }
        let visible = |place: &CachedSequence| {
            let tail = place.tail + 1;
            let hidden = (place.prompt.len() + tail).saturating_sub(window.unwrap_or(usize::MAX));
            let hidden_of_prompt = hidden.min(place.prompt.len());
            let prompt = place.prompt.start + hidden_of_prompt..place.prompt.end;
            CachedSequence { prompt, tail, skip: hidden - hidden_of_prompt, slot: place.slot }
        };
        let keys = Arc::new(self.places.iter().map(visible).collect::<Vec<_>>().into());
        by_window.push((window, Arc::clone(&keys)));
        keys
    }
}

impl Cache {
    /// Creates an empty cache for `layers` layers, which stores keys and values as `dtype`.
    pub fn new(layers: usize, dtype: DType) -> Self {
        Self { layers: (0..layers).map(|_| Mutex::default()).collect(), prompts: Mutex::default(), dtype }
    }

    /// Adds prompts. `known` has the length of the known prefix of each and its keys and values, `read` the range of the
    /// prompt's other tokens in the next pass. Returns the number of the first of these prompts.
    pub fn add_prompts(&self, known: Vec<(usize, Option<Prefix>)>, read: &[Range<usize>]) -> usize {
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

    pub fn prompt(&self, i: usize) -> Range<usize> {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner)[i].clone()
    }

    fn layer(&self, layer: usize) -> std::sync::MutexGuard<'_, CachedLayer> {
        self.layers[layer].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the keys and values of the added prompts' unknown tokens, which lie at `read`. Returns those of all
    /// prompts, packed.
    pub fn read_prompts(&self, layer: usize, k: Tensor<2>, v: Tensor<2>, read: &[Range<usize>]) -> KeysValues {
        let mut layer = self.layer(layer);
        let (k, v) = (as_dtype(k, self.dtype), as_dtype(v, self.dtype));
        let known = std::mem::take(&mut layer.known);
        let added = match known.iter().all(Vec::is_empty) {
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
            None => added,
            Some((k, v)) => (Tensor::cat(vec![k, added.0], 0), Tensor::cat(vec![v, added.1], 0)),
        };
        layer.prompts.insert(all).clone()
    }

    /// Writes the key and value of one token of every row at its place, and returns the attention of these
    /// tokens over the keys that `call` names.
    pub fn attend(
        &self,
        layer: usize,
        q: Tensor<2>,
        [k, v]: [Tensor<2>; 2],
        next: &NextPlaces,
        call: DecodeCall,
    ) -> Tensor<2> {
        let mut layer = self.layer(layer);
        let (device, [_, width]) = (k.device(), k.dims());
        let places = &next.places;
        let needed = places.iter().map(|p| p.tail + 1).max().unwrap_or(0);
        let slots = places.iter().map(|p| p.slot + 1).max().unwrap_or(0);
        let slots = slots.max(layer.tails.as_ref().map_or(0, |(keys, _)| keys.dims()[0]));
        let empty = |slots, capacity| Tensor::<3>::zeros([slots, capacity, width], (&device, self.dtype));
        // They are taken out, so that the memory has one owner and is written in place.
        let (keys, values) = match layer.tails.take() {
            None => (empty(slots, capacity_for(needed, 0)), empty(slots, capacity_for(needed, 0))),
            Some(tails) if tails.0.dims()[1] >= needed && tails.0.dims()[0] == slots => tails,
            Some((keys, values)) => {
                let [before, capacity, _] = keys.dims();
                let new_capacity = capacity_for(needed, capacity);
                let larger =
                    |old: Tensor<3>| empty(slots, new_capacity).slice_assign([0..before, 0..capacity, 0..width], old);
                (larger(keys), larger(values))
            }
        };
        let (keys, values) = (ops::store_rows(keys, k, &next.tails), ops::store_rows(values, v, &next.tails));
        let prompts = match &layer.prompts {
            Some((keys, values)) => [keys.clone(), values.clone()],
            None => [&keys, &values].map(|x| Tensor::zeros([0, width], (&x.device(), x.dtype()))),
        };
        let out = ops::attend_rows(q, prompts, [keys.clone(), values.clone()], call);
        layer.tails = Some((keys, values));
        out
    }

    /// Copies the keys and values of `prompt` and of the first `tail` tokens of `slot`. A view of the slot would prevent
    /// writes in place. A view of the prompt would keep the tensor of all present prompts alive, of which each new
    /// prompt makes another.
    pub fn copy_prefix(&self, prompt: usize, slot: usize, tail: usize) -> Prefix {
        self.prefix(prompt, slot, tail, |x, rows| {
            let device = x.device();
            x.select(0, integers(rows.map(|row| row as i64).collect(), &device))
        })
    }

    /// Returns the same as views, which keep the cache's memory alive: for a cache that is not written any more.
    pub fn view_prefix(&self, prompt: usize, slot: usize, tail: usize) -> Prefix {
        self.prefix(prompt, slot, tail, |x, rows| x.narrow(0, rows.start, rows.len()))
    }

    fn prefix(
        &self,
        prompt: usize,
        slot: usize,
        tail: usize,
        select: impl Fn(Tensor<2>, Range<usize>) -> Tensor<2>,
    ) -> Prefix {
        let rows = self.prompt(prompt);
        let of_prompts = |x: &Tensor<2>| select(x.clone(), rows.clone());
        let of_slot = |tails: &Tensor<3>| {
            let [slots, capacity, width] = tails.dims();
            select(tails.clone().reshape([slots * capacity, width]), slot * capacity..slot * capacity + tail)
        };
        let of_layer = |layer: usize| {
            let layer = self.layer(layer);
            let prompts = layer.prompts.as_ref().map(|(k, v)| (of_prompts(k), of_prompts(v)));
            let tails = layer.tails.as_ref().filter(|_| tail > 0).map(|(k, v)| (of_slot(k), of_slot(v)));
            prompts.into_iter().chain(tails).collect()
        };
        (0..self.layers.len()).map(of_layer).collect()
    }
}
