//! The cache of keys and values of a model's conversations.
//!
//! Prompts that a model sees for the first time are packed in one tensor. Such a prompt is there once, even if several
//! sequences continue it. Each sequence has all its further tokens in a slot of its own, of preallocated tensors that
//! are written in place and grow by doubling: the tokens it generates, and, in later turns, those that the environment
//! adds. Between turns, a sequence keeps its slot, and nothing is copied. A sequence that reuses a slot overwrites the
//! previous tokens and never attends to them.
//!
//! - *prompt*: the first tokens of a sequence, as a range among the packed prompts.
//! - *slot*: a row of the preallocated tensors, which belongs to one sequence at a time.
//! - *tail*: the tokens that a sequence has in its slot, after its prompt; also their number.
//! - *known*: the first tokens of a prompt whose keys and values are in the cache ([`Prefix`]). A pass computes only the
//!   other tokens of the prompt.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{DType, Device, Int, Tensor};
use roll_backends::ops::{self, CachedSequence, CachedSequences, DecodeCall, TailPlaces};
use roll_network::precision::as_dtype;

use super::integers;

/// Keys and values of consecutive tokens in one layer: `[tokens, kv_heads * head_dim]` each.
pub type KeysValues = (Tensor<2>, Tensor<2>);

/// Keys and values of slots in one layer: `[slots, capacity, kv_heads * head_dim]` each.
type Slots = (Tensor<3>, Tensor<3>);

/// The cached tokens at the beginning of a sequence: those of a prompt, then those in a slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    /// Range among the packed prompts.
    pub prompt: Range<usize>,
    /// The slot of the tail; `None` if the sequence has no tail yet.
    pub slot: Option<usize>,
    /// Number of tokens in the slot.
    pub tail: usize,
}

impl Prefix {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.tail
    }
}

/// Initial capacity of a slot in tokens.
const FIRST_CAPACITY: usize = 32;

/// Returns the capacity of slots that must hold `needed` tokens, and will hold `most`. `capacity` is the capacity
/// before; 0 means no slots yet.
pub(super) fn capacity_for(needed: usize, capacity: usize, most: usize) -> usize {
    if capacity >= needed && capacity > 0 {
        return capacity;
    }
    let grown = if capacity == 0 { FIRST_CAPACITY } else { 2 * capacity };
    grown.min(most).max(needed)
}

/// The cache of a model.
pub struct Cache {
    layers: Vec<Mutex<CachedLayer>>,
    allocated: Mutex<Allocated>,
    dtype: DType,
}

/// The parts of a cache that belong to sequences.
#[derive(Default)]
struct Allocated {
    /// Number of packed tokens of prompts.
    prompt_rows: usize,
    /// Number of slots, and those among them that belong to no sequence.
    slots: usize,
    free_slots: Vec<usize>,
    /// Number of slots that the present call will take at most. They are allocated together.
    reserved: usize,
    /// Most tokens that a slot will hold, as far as is known. Capacities grow no further.
    most: usize,
}

/// The cached keys and values of one layer.
#[derive(Default)]
struct CachedLayer {
    /// All prompts, packed.
    prompts: Option<KeysValues>,
    /// Tokens after the prompts.
    tails: Option<Slots>,
}

/// Which tokens a pass with a cache computes.
#[derive(Clone)]
pub enum CachedTokens {
    /// The tokens of prompts that are not known.
    Prompts(Arc<PromptPlaces>),
    /// The next token of every sequence.
    Next(Arc<NextPlaces>),
}

/// Where the tokens of a pass over prompts belong in the cache.
pub struct PromptPlaces {
    /// The cached tokens of each prompt after the pass.
    prefixes: Vec<Prefix>,
    /// Ranges among the tokens of the pass of those that are packed, in their order among the packed prompts.
    packed: Vec<Range<usize>>,
    in_slots: Option<SlotPlaces>,
    /// Number of slots.
    slots: usize,
}

/// The tokens of a pass over prompts that belong in slots.
struct SlotPlaces {
    /// Their indices among the tokens of the pass.
    rows: Tensor<1, Int>,
    /// Their places.
    tails: TailPlaces,
    /// The largest number of tokens in a slot after the pass.
    longest: usize,
}

/// The keys and values of all sequences in one layer.
pub struct LayerKeys {
    prompts: Option<KeysValues>,
    tails: Option<Slots>,
}

impl LayerKeys {
    /// The keys and values of a sequence; `None` if it has no tokens.
    pub fn of(&self, prefix: &Prefix) -> Option<KeysValues> {
        let prompt = prefix.prompt.clone();
        let of_prompt = |x: &Tensor<2>| x.clone().narrow(0, prompt.start, prompt.len());
        let in_prompt = self.prompts.as_ref().filter(|_| !prompt.is_empty()).map(|(k, v)| (of_prompt(k), of_prompt(v)));
        let in_slot = prefix.slot.filter(|_| prefix.tail > 0).zip(self.tails.as_ref()).map(|(slot, (k, v))| {
            let of_slot = |x: &Tensor<3>| rows_of_slot(x, slot, prefix.tail);
            (of_slot(k), of_slot(v))
        });
        let together = |(k, v), (tail_k, tail_v)| (Tensor::cat(vec![k, tail_k], 0), Tensor::cat(vec![v, tail_v], 0));
        in_prompt.into_iter().chain(in_slot).reduce(together)
    }
}

/// The first `tail` tokens of a slot.
fn rows_of_slot(x: &Tensor<3>, slot: usize, tail: usize) -> Tensor<2> {
    let [_, _, width] = x.dims();
    x.clone().narrow(0, slot, 1).narrow(1, 0, tail).reshape([tail, width])
}

impl PromptPlaces {
    /// Places the tokens of a pass, whose spans are `spans`, after those that are `known` of each prompt: the tokens of
    /// unknown prompts among the packed prompts of `cache`, the others in the slot of their sequence. `to_come` has the
    /// number of further tokens that a sequence of each prompt will cache at most.
    pub fn new(
        cache: &Cache,
        known: Vec<Option<Prefix>>,
        spans: &[Range<usize>],
        to_come: &[usize],
        device: &Device,
    ) -> Self {
        let (mut prefixes, mut packed) = (Vec::new(), Vec::new());
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        for (known, span) in known.into_iter().zip(spans) {
            let Some(Prefix { prompt, slot, tail }) = known else {
                prefixes.push(Prefix { prompt: cache.append_prompt(span.len()), slot: None, tail: 0 });
                packed.push(span.clone());
                continue;
            };
            let slot = slot.unwrap_or_else(|| cache.take_slot());
            rows.extend(span.clone().map(|row| row as i64));
            places.extend((tail..tail + span.len()).map(|at| (slot, at)));
            prefixes.push(Prefix { prompt, slot: Some(slot), tail: tail + span.len() });
        }
        let longest = prefixes.iter().map(|prefix: &Prefix| prefix.tail).max().unwrap_or(0);
        let mut allocated = cache.allocated();
        let tails_to_come = prefixes.iter().zip(to_come).map(|(prefix, to_come)| prefix.tail + to_come);
        allocated.most = tails_to_come.max().unwrap_or(0).max(allocated.most);
        let slots = allocated.slots;
        let in_slots =
            (!rows.is_empty()).then(|| SlotPlaces { rows: integers(rows, device), tails: places.into(), longest });
        Self { prefixes, packed, in_slots, slots }
    }

    /// The cached tokens of each prompt, including those of the pass.
    pub fn prefixes(&self) -> &[Prefix] {
        &self.prefixes
    }
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
        Self { layers: (0..layers).map(|_| Mutex::default()).collect(), allocated: Mutex::default(), dtype }
    }

    /// Takes a slot that belongs to no sequence.
    pub fn take_slot(&self) -> usize {
        let mut allocated = self.allocated();
        if let Some(slot) = allocated.free_slots.pop() {
            return slot;
        }
        allocated.slots += 1;
        allocated.slots - 1
    }

    /// Makes the next allocation large enough for `more` further slots, so that the tensors are not copied for each.
    pub fn reserve(&self, more: usize) {
        let mut allocated = self.allocated();
        allocated.reserved = allocated.slots + more.saturating_sub(allocated.free_slots.len());
    }

    /// Frees a slot, whose tokens nothing continues.
    pub fn free_slot(&self, slot: usize) {
        self.allocated().free_slots.push(slot);
    }

    /// Number of slots.
    fn slots(&self) -> usize {
        self.allocated().slots
    }

    /// Takes the range of a new prompt among the packed prompts.
    fn append_prompt(&self, tokens: usize) -> Range<usize> {
        let mut allocated = self.allocated();
        let start = allocated.prompt_rows;
        allocated.prompt_rows += tokens;
        start..allocated.prompt_rows
    }

    /// Frees the slots and prompts that none of `live` has. Packed prompts are moved together if most of them are
    /// free, which changes their ranges in `live`.
    pub fn retain(&self, live: &mut [&mut Prefix]) {
        let mut allocated = self.allocated();
        let slots: BTreeSet<usize> = live.iter().filter_map(|prefix| prefix.slot).collect();
        allocated.free_slots = (0..allocated.slots).rev().filter(|slot| !slots.contains(slot)).collect();
        if slots.is_empty() {
            *allocated = Allocated { prompt_rows: allocated.prompt_rows, ..Allocated::default() };
            (0..self.layers.len()).for_each(|layer| self.layer(layer).tails = None);
        }
        // The new start of each prompt, by its old start.
        let (mut starts, mut rows) = (BTreeMap::new(), Vec::new());
        for prefix in live.iter() {
            starts.entry(prefix.prompt.start).or_insert_with(|| {
                let start = rows.len();
                rows.extend(prefix.prompt.clone().map(|row| row as i64));
                start
            });
        }
        if 2 * rows.len() >= allocated.prompt_rows && !rows.is_empty() {
            return;
        }
        for layer in 0..self.layers.len() {
            let mut layer = self.layer(layer);
            layer.prompts = layer.prompts.take().filter(|_| !rows.is_empty()).map(|(keys, values)| {
                let rows = integers(rows.clone(), &keys.device());
                (keys.select(0, rows.clone()), values.select(0, rows))
            });
        }
        allocated.prompt_rows = rows.len();
        for prefix in live {
            let start = starts.get(&prefix.prompt.start).copied().unwrap_or(0);
            prefix.prompt = start..start + prefix.prompt.len();
        }
    }

    fn allocated(&self) -> std::sync::MutexGuard<'_, Allocated> {
        self.allocated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn layer(&self, layer: usize) -> std::sync::MutexGuard<'_, CachedLayer> {
        self.layers[layer].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the keys and values of a pass over prompts, and returns those of all sequences.
    pub fn read_prompts(&self, layer: usize, k: Tensor<2>, v: Tensor<2>, places: &PromptPlaces) -> LayerKeys {
        let mut layer = self.layer(layer);
        let (k, v) = (as_dtype(k, self.dtype), as_dtype(v, self.dtype));
        if let Some(SlotPlaces { rows, tails, longest }) = &places.in_slots {
            let (keys, values) = self.with_room(layer.tails.take(), places.slots, *longest, &k);
            let of_slots = |x: &Tensor<2>| match places.packed.is_empty() {
                true => x.clone(),
                false => x.clone().select(0, rows.clone()),
            };
            let (k, v) = (of_slots(&k), of_slots(&v));
            layer.tails = Some((ops::store_rows(keys, k, tails), ops::store_rows(values, v, tails)));
        }
        if !places.packed.is_empty() {
            let packed = |x: Tensor<2>| match &places.in_slots {
                None => x,
                Some(_) => {
                    Tensor::cat(places.packed.iter().map(|r| x.clone().narrow(0, r.start, r.len())).collect(), 0)
                }
            };
            let (k, v) = (packed(k), packed(v));
            layer.prompts = Some(match layer.prompts.take() {
                None => (k, v),
                Some((keys, values)) => (Tensor::cat(vec![keys, k], 0), Tensor::cat(vec![values, v], 0)),
            });
        }
        LayerKeys { prompts: layer.prompts.clone(), tails: layer.tails.clone() }
    }

    /// Returns `tails` with at least `slots` slots of at least `needed` tokens. If they are too small, they are copied to
    /// larger tensors, which have the reserved slots too. `like` has the width and device of keys and values.
    fn with_room(&self, tails: Option<Slots>, slots: usize, needed: usize, like: &Tensor<2>) -> Slots {
        let (device, [_, width]) = (like.device(), like.dims());
        let Allocated { most, reserved, .. } = *self.allocated();
        let empty = |slots, capacity| Tensor::<3>::zeros([slots, capacity, width], (&device, self.dtype));
        let Some((keys, values)) = tails else {
            let (slots, capacity) = (slots.max(reserved), capacity_for(needed, 0, most));
            return (empty(slots, capacity), empty(slots, capacity));
        };
        let [old_slots, old_capacity, _] = keys.dims();
        if old_slots >= slots && old_capacity >= needed {
            return (keys, values);
        }
        let (slots, capacity) = (slots.max(old_slots).max(reserved), capacity_for(needed, old_capacity, most));
        let enlarged =
            |old: Tensor<3>| empty(slots, capacity).slice_assign([0..old_slots, 0..old_capacity, 0..width], old);
        (enlarged(keys), enlarged(values))
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
        let needed = next.places.iter().map(|p| p.tail + 1).max().unwrap_or(0);
        // The tails are taken out of the layer, so that their memory has one owner and is written in place.
        let (keys, values) = self.with_room(layer.tails.take(), self.slots(), needed, &k);
        let (keys, values) = (ops::store_rows(keys, k, &next.tails), ops::store_rows(values, v, &next.tails));
        let prompts = match &layer.prompts {
            Some((keys, values)) => [keys.clone(), values.clone()],
            None => {
                let [_, _, width] = keys.dims();
                [&keys, &values].map(|x| Tensor::zeros([0, width], (&x.device(), x.dtype())))
            }
        };
        let out = ops::attend_rows(q, prompts, [keys.clone(), values.clone()], call);
        layer.tails = Some((keys, values));
        out
    }

    /// Copies the tail of `prefix` to another slot: a sequence that continues the same tokens as the one in the slot.
    pub fn copy_tail(&self, prefix: &Prefix, to: usize) {
        let Some(from) = prefix.slot.filter(|_| prefix.tail > 0) else { return };
        let places: TailPlaces = (0..prefix.tail).map(|at| (to, at)).collect::<Vec<_>>().into();
        let slots = self.slots();
        for layer in 0..self.layers.len() {
            let mut layer = self.layer(layer);
            let Some((keys, values)) = layer.tails.take() else { continue };
            let copied = |x: &Tensor<3>| {
                let rows = integers((0..prefix.tail as i64).collect(), &x.device());
                rows_of_slot(x, from, prefix.tail).select(0, rows)
            };
            let [k, v] = [copied(&keys), copied(&values)];
            let (keys, values) = self.with_room(Some((keys, values)), slots, prefix.tail, &k);
            layer.tails = Some((ops::store_rows(keys, k, &places), ops::store_rows(values, v, &places)));
        }
    }

    /// Size of all keys and values in bytes.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        let bytes = |dims: &[usize]| 2 * dims.iter().product::<usize>() * self.dtype.size();
        let layers = (0..self.layers.len()).map(|layer| {
            let layer = self.layer(layer);
            let prompts = layer.prompts.as_ref().map_or(0, |(keys, _)| bytes(&keys.dims()));
            prompts + layer.tails.as_ref().map_or(0, |(keys, _)| bytes(&keys.dims()))
        });
        layers.sum()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use burn_tensor::TensorData;

    use super::*;

    /// Reads one prompt, whose keys and values are `values`; returns its cached tokens and all its keys.
    fn read(cache: &Cache, known: Option<Prefix>, values: &[f32]) -> (Prefix, Vec<f32>) {
        let device = roll_backends::device("flex").unwrap();
        let spans = vec![Range { start: 0, end: values.len() }];
        let places = PromptPlaces::new(cache, vec![known], &spans, &[4], &device);
        let rows = || Tensor::<2>::from_data(TensorData::new(values.to_vec(), [values.len(), 1]), &device);
        let keys = cache.read_prompts(0, rows(), rows(), &places);
        let prefix = places.prefixes()[0].clone();
        let (k, _) = keys.of(&prefix).unwrap();
        (prefix, k.into_data().try_into_vec::<f32>().unwrap())
    }

    #[test]
    fn sequences_keep_their_tokens_where_others_are_dropped_or_continue_the_same() {
        let cache = Cache::new(1, DType::F32);
        read(&cache, None, &[1.0, 2.0, 3.0]);
        let (prompt, _) = read(&cache, None, &[4.0]);
        let (mut prefix, keys) = read(&cache, Some(prompt), &[5.0, 6.0]);
        assert_eq!((prefix.prompt.clone(), prefix.slot, prefix.tail), (3..4, Some(0), 2));
        assert_eq!(keys, [4.0, 5.0, 6.0]);
        // Most packed tokens are dropped.
        cache.retain(&mut [&mut prefix]);
        assert_eq!(prefix.prompt, 0..1);
        let (prefix, keys) = read(&cache, Some(prefix), &[7.0]);
        assert_eq!(keys, [4.0, 5.0, 6.0, 7.0]);
        let copy = Prefix { slot: Some(cache.take_slot()), ..prefix.clone() };
        cache.copy_tail(&prefix, 1);
        assert_eq!(read(&cache, Some(copy), &[8.0]).1, [4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(read(&cache, Some(prefix), &[9.0]).1, [4.0, 5.0, 6.0, 7.0, 9.0]);
    }

    #[test]
    fn capacities_double_up_to_the_tokens_to_come() {
        let grown = |tokens: std::ops::RangeInclusive<usize>, most| {
            tokens.fold(0, |capacity, needed| capacity_for(needed, capacity, most))
        };
        assert_eq!([grown(1..=1, 500), grown(1..=33, 500), grown(1..=65, 100)], [32, 64, 100]);
        assert_eq!([grown(1..=19, 19), grown(40..=40, 10)], [19, 40]);
    }
}
