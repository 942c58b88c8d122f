//! The cache of keys and values during a generation.
//!
//! All prompts are packed in one tensor. A prompt is there once, even if several sequences continue it. Each sequence
//! writes its new tokens into a slot of its own, in preallocated tensors that are written in place and grow by
//! doubling. A sequence that reuses a slot overwrites the previous tokens and never attends to them.
//!
//! - *prompt*: the tokens that sequences continue. A prompt has a number, and a range among the packed prompts.
//! - *slot*: a row of the preallocated tensors, which belongs to one sequence at a time.
//! - *tail*: the tokens that a sequence has in its slot, after its prompt; also their number.
//! - *known*: the first tokens of a prompt whose keys and values were computed before ([`Prefix`]). A pass computes
//!   only the other tokens of the prompt; `read` is their range among the tokens of the pass.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{DType, Tensor};
use roll_backends::ops::{self, CachedSequence, CachedSequences, DecodeCall, TailPlaces};
use roll_network::precision::as_dtype;

use super::integers;

/// Keys and values of consecutive tokens in one layer: `[tokens, kv_heads * head_dim]` each.
pub type KeysValues = (Tensor<2>, Tensor<2>);

/// Keys and values of the first tokens of a sequence: per layer a list of parts, whose tokens are consecutive.
pub type Prefix = Vec<Vec<KeysValues>>;

/// Initial capacity of a slot in tokens.
const FIRST_CAPACITY: usize = 32;

/// Returns the capacity of slots that must hold `needed` tokens. `capacity` is the capacity before; 0 means no slots
/// yet.
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

/// The cached keys and values of one layer.
#[derive(Default)]
struct CachedLayer {
    /// The known prefix of each prompt of the next pass.
    known: Vec<Vec<KeysValues>>,
    /// All prompts, packed.
    prompts: Option<KeysValues>,
    /// Tokens after the prompts: `[slots, capacity, kv_heads * head_dim]`.
    tails: Option<(Tensor<3>, Tensor<3>)>,
}

/// Which tokens a pass with a cache computes.
#[derive(Clone)]
pub enum CachedTokens {
    /// The tokens of new prompts, except those that are known.
    Prompts {
        /// Number of the first of these prompts.
        first: usize,
    },
    /// The next token of every sequence.
    Next(Arc<NextPlaces>),
}

/// Where the next token of every sequence belongs in the cache.
pub struct NextPlaces {
    /// The cached tokens of each sequence, which precede its next token.
    places: Vec<CachedSequence>,
    /// Slot and tail of each sequence, as the operator that writes the tokens needs them.
    tails: TailPlaces,
    /// The keys that layers with a window of this size attend to. Layers of the same window share them.
    visible: Mutex<Vec<(Option<usize>, Arc<CachedSequences>)>>,
}

impl NextPlaces {
    pub fn new(places: Vec<CachedSequence>) -> Self {
        let tails = places.iter().map(|p| (p.slot, p.tail)).collect::<Vec<_>>().into();
        Self { places, tails, visible: Mutex::default() }
    }

    /// The keys that the next token of each sequence attends to in layers with this window, including its own key.
    pub fn visible(&self, window: Option<usize>) -> Arc<CachedSequences> {
        let mut by_window = self.visible.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, keys)) = by_window.iter().find(|(known_window, _)| *known_window == window) {
            return keys.clone();
        }
        let visible_keys = |place: &CachedSequence| {
            let tail = place.tail + 1;
            // The first tokens are before the window: tokens of the prompt, then tokens of the slot.
            let hidden = (place.prompt.len() + tail).saturating_sub(window.unwrap_or(usize::MAX));
            let hidden_of_prompt = hidden.min(place.prompt.len());
            let prompt = place.prompt.start + hidden_of_prompt..place.prompt.end;
            CachedSequence { prompt, tail, skip: hidden - hidden_of_prompt, slot: place.slot }
        };
        let keys = Arc::new(self.places.iter().map(visible_keys).collect::<Vec<_>>().into());
        by_window.push((window, Arc::clone(&keys)));
        keys
    }
}

impl Cache {
    /// Creates an empty cache for `layers` layers, which stores keys and values as `dtype`.
    pub fn new(layers: usize, dtype: DType) -> Self {
        Self { layers: (0..layers).map(|_| Mutex::default()).collect(), prompts: Mutex::default(), dtype }
    }

    /// Adds prompts, whose tokens the next pass computes. `known` has the length of each prompt's known prefix and its
    /// keys and values; `read` has the range of the prompt's other tokens among the tokens of the pass. Returns the
    /// number of the first added prompt.
    pub fn add_prompts(&self, known: Vec<(usize, Option<Prefix>)>, read: &[Range<usize>]) -> usize {
        let mut prompts = self.prompts.lock().unwrap_or_else(PoisonError::into_inner);
        let first = prompts.len();
        for ((length, _), read) in known.iter().zip(read) {
            let start = prompts.last().map_or(0, |last| last.end);
            prompts.push(start..start + length + read.len());
        }
        // One iterator over layers per prompt.
        let mut known_by_layer: Vec<_> =
            known.into_iter().map(|(_, layers)| layers.unwrap_or_default().into_iter()).collect();
        for layer in 0..self.layers.len() {
            self.layer(layer).known =
                known_by_layer.iter_mut().map(|layers| layers.next().unwrap_or_default()).collect();
        }
        first
    }

    /// The range of a prompt among the packed prompts.
    pub fn prompt(&self, number: usize) -> Range<usize> {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner)[number].clone()
    }

    fn layer(&self, layer: usize) -> std::sync::MutexGuard<'_, CachedLayer> {
        self.layers[layer].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the keys and values of the added prompts: `k` and `v` have the tokens that this pass computed, those of
    /// each prompt at its range in `read`. Returns the keys and values of all prompts, packed.
    pub fn read_prompts(&self, layer: usize, k: Tensor<2>, v: Tensor<2>, read: &[Range<usize>]) -> KeysValues {
        let mut layer = self.layer(layer);
        let (k, v) = (as_dtype(k, self.dtype), as_dtype(v, self.dtype));
        let known = std::mem::take(&mut layer.known);
        let (added_keys, added_values) = if known.iter().all(Vec::is_empty) {
            (k, v)
        } else {
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for (known_parts, read) in known.into_iter().zip(read) {
                for (known_k, known_v) in known_parts {
                    keys.push(known_k);
                    values.push(known_v);
                }
                if !read.is_empty() {
                    keys.push(k.clone().narrow(0, read.start, read.len()));
                    values.push(v.clone().narrow(0, read.start, read.len()));
                }
            }
            (Tensor::cat(keys, 0), Tensor::cat(values, 0))
        };
        let all_prompts = match layer.prompts.take() {
            None => (added_keys, added_values),
            Some((keys, values)) => {
                (Tensor::cat(vec![keys, added_keys], 0), Tensor::cat(vec![values, added_values], 0))
            }
        };
        layer.prompts.insert(all_prompts).clone()
    }

    /// Writes the key and value of the next token of every sequence at its place, and returns the attention of these
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
        let needed_capacity = places.iter().map(|p| p.tail + 1).max().unwrap_or(0);
        let used_slots = places.iter().map(|p| p.slot + 1).max().unwrap_or(0);
        let slots = used_slots.max(layer.tails.as_ref().map_or(0, |(keys, _)| keys.dims()[0]));
        let empty = |slots, capacity| Tensor::<3>::zeros([slots, capacity, width], (&device, self.dtype));
        // The tails are taken out of the layer, so that their memory has one owner and is written in place.
        let (keys, values) = match layer.tails.take() {
            None => {
                let capacity = capacity_for(needed_capacity, 0);
                (empty(slots, capacity), empty(slots, capacity))
            }
            Some((keys, values)) if keys.dims()[1] >= needed_capacity && keys.dims()[0] == slots => (keys, values),
            // Too small: copied to larger tensors.
            Some((keys, values)) => {
                let [old_slots, old_capacity, _] = keys.dims();
                let capacity = capacity_for(needed_capacity, old_capacity);
                let enlarged = |old: Tensor<3>| {
                    empty(slots, capacity).slice_assign([0..old_slots, 0..old_capacity, 0..width], old)
                };
                (enlarged(keys), enlarged(values))
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

    /// Copies the keys and values of `prompt` and of the first `tail` tokens of `slot`. They are not views, because a
    /// view of the slot would prevent writes in place, and a view of the prompt would keep the tensor of all present
    /// prompts alive, although each added prompt makes a new tensor.
    pub fn copy_prefix(&self, prompt: usize, slot: usize, tail: usize) -> Prefix {
        self.prefix(prompt, slot, tail, |x, rows| {
            let device = x.device();
            x.select(0, integers(rows.map(|row| row as i64).collect(), &device))
        })
    }

    /// Like [`Cache::copy_prefix`], but returns views, which keep the cache's memory alive. This is for a cache that is
    /// not written any more.
    pub fn view_prefix(&self, prompt: usize, slot: usize, tail: usize) -> Prefix {
        self.prefix(prompt, slot, tail, |x, rows| x.narrow(0, rows.start, rows.len()))
    }

    /// The keys and values of a prompt and a tail. `select` takes rows out of a tensor.
    fn prefix(
        &self,
        prompt: usize,
        slot: usize,
        tail: usize,
        select: impl Fn(Tensor<2>, Range<usize>) -> Tensor<2>,
    ) -> Prefix {
        let prompt_rows = self.prompt(prompt);
        let select_prompt = |prompts: &Tensor<2>| select(prompts.clone(), prompt_rows.clone());
        let select_tail = |tails: &Tensor<3>| {
            let [slots, capacity, width] = tails.dims();
            select(tails.clone().reshape([slots * capacity, width]), slot * capacity..slot * capacity + tail)
        };
        let parts_of_layer = |layer: usize| {
            let layer = self.layer(layer);
            let prompt_part = layer.prompts.as_ref().map(|(k, v)| (select_prompt(k), select_prompt(v)));
            let tails = if tail > 0 { layer.tails.as_ref() } else { None };
            let tail_part = tails.map(|(k, v)| (select_tail(k), select_tail(v)));
            prompt_part.into_iter().chain(tail_part).collect()
        };
        (0..self.layers.len()).map(parts_of_layer).collect()
    }
}
