//! Collects the gradients that a model delivers during a backward pass, and starts the reduction of each bucket as soon
//! as its gradients are complete, so that it overlaps the rest of the pass.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use roll_core::{Error, GradientSink, Model, ParameterSpec, Result};

use super::partition::Partition;
use crate::overlap::OverlappedRanks;
use crate::sync::lock;

/// Collects gradients into buckets and starts the reduction of each bucket when it is complete.
///
/// Reductions always start in the same order, from the last bucket to the first, even if an earlier bucket is complete
/// first. If the order differed between ranks, a reduction would pair different buckets of them, and sums over several
/// samples would round differently from run to run.
pub(super) struct GradientReducer {
    partition: Arc<Partition>,
    /// The place of each parameter in its bucket.
    slots: Vec<BucketSlot>,
    ranks: Arc<OverlappedRanks>,
    /// Number of the gradient service among the services of the ranks.
    service: u32,
    state: Mutex<ReducerState>,
}

/// The elements of a parameter in a bucket.
struct BucketSlot {
    /// Number of the bucket.
    bucket: usize,
    start: usize,
    len: usize,
}

#[derive(Default)]
struct ReducerState {
    /// Whether gradients are accepted.
    is_open: bool,
    /// Incomplete buckets, by number.
    filling: BTreeMap<usize, PartialBucket>,
    /// The reductions of the buckets `0..unstarted` have not been started.
    unstarted: usize,
    /// Gradients that arrived after the reduction of their bucket was started, by bucket. They belong to parameters
    /// that a pass uses more than once.
    late: BTreeMap<usize, Vec<f32>>,
    /// The first error of a reduction.
    first_error: Option<Error>,
}

struct PartialBucket {
    values: Vec<f32>,
    /// Whether the gradient of each parameter has arrived.
    is_received: Vec<bool>,
}

impl PartialBucket {
    /// Whether the gradients of all its parameters have arrived.
    fn is_complete(&self) -> bool {
        self.is_received.iter().all(|is_received| *is_received)
    }
}

impl GradientReducer {
    pub(super) fn new(
        partition: Arc<Partition>,
        specs: &[ParameterSpec],
        ranks: Arc<OverlappedRanks>,
        service: u32,
    ) -> Self {
        let mut slots = Vec::with_capacity(specs.len());
        for (number, bucket) in partition.buckets().iter().enumerate() {
            let mut start = 0;
            for spec in &specs[bucket.specs.clone()] {
                slots.push(BucketSlot { bucket: number, start, len: spec.len() });
                start += spec.len();
            }
        }
        Self { partition, slots, ranks, service, state: Mutex::default() }
    }

    /// Accepts gradients from now on, which must be the last ones of their parameters in this step.
    pub(super) fn open(&self) {
        *lock(&self.state) =
            ReducerState { is_open: true, unstarted: self.partition.buckets().len(), ..ReducerState::default() };
    }

    /// Drops the gradients that have arrived and accepts no more.
    pub(super) fn close(&self) {
        *lock(&self.state) = ReducerState::default();
    }

    /// Takes the remaining gradients out of the model, and starts the reductions that have not been started. Fails with
    /// the first error of a reduction.
    pub(super) fn finish(&self, model: &mut dyn Model) -> Result<()> {
        let ReducerState { is_open, mut filling, unstarted, late, first_error } =
            std::mem::take(&mut *lock(&self.state));
        if let Some(error) = first_error {
            return Err(error);
        }
        let buckets = self.partition.buckets();
        // Without overlap, the reducer was never opened and no reduction has been started.
        let unstarted = if is_open { unstarted } else { buckets.len() };
        // All gradients of a model without parts, taken once.
        let mut all_gradients = None;
        for number in (0..unstarted).rev() {
            let bucket = &buckets[number];
            let mut values = match filling.remove(&number) {
                Some(partial) => partial.values,
                None => self.zeros(number),
            };
            match model.parts() {
                Some(parts) => parts.take_gradients_part(bucket.specs.clone(), &mut values[..bucket.len])?,
                None => {
                    if all_gradients.is_none() {
                        let mut taken = vec![0.0; model.parameter_count()];
                        model.take_gradients(&mut taken)?;
                        all_gradients = Some(taken);
                    }
                    let all_gradients = all_gradients.as_deref().unwrap_or_default();
                    let gradients = &all_gradients[bucket.flat_at..bucket.flat_at + bucket.len];
                    // Such a model has delivered nothing to the bucket so far.
                    values[..bucket.len].copy_from_slice(gradients);
                }
            }
            self.reduce(number, values)?;
        }
        late.into_iter().rev().try_for_each(|(number, values)| self.reduce(number, values))
    }

    /// Queues the reduction of a padded bucket; see `Gradients::serve`.
    fn reduce(&self, bucket: usize, values: Vec<f32>) -> Result<()> {
        self.ranks.begin(self.service, [bucket as u32, 0], values)
    }

    /// Zeros of the size of a padded bucket.
    fn zeros(&self, bucket: usize) -> Vec<f32> {
        vec![0.0; self.partition.buckets()[bucket].shard_len * self.partition.world()]
    }
}

impl GradientSink for GradientReducer {
    fn deliver(&self, position: usize, gradient: &[f32]) -> bool {
        let mut state = lock(&self.state);
        let Some(BucketSlot { bucket, start, len }) = self.slots.get(position) else { return false };
        if !state.is_open || gradient.len() != *len {
            return false;
        }
        let add = |values: &mut [f32]| {
            values[*start..*start + *len].iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        };
        if *bucket >= state.unstarted {
            add(state.late.entry(*bucket).or_insert_with(|| self.zeros(*bucket)));
            return true;
        }
        let specs = &self.partition.buckets()[*bucket].specs;
        let new_bucket = || PartialBucket { values: self.zeros(*bucket), is_received: vec![false; specs.len()] };
        let partial = state.filling.entry(*bucket).or_insert_with(new_bucket);
        add(&mut partial.values);
        partial.is_received[position - specs.start] = true;
        // Starts the reductions of complete buckets, from the last unstarted bucket down to the first incomplete one.
        while let Some(last) = state.unstarted.checked_sub(1)
            && state.filling.get(&last).is_some_and(PartialBucket::is_complete)
            && let Some(complete) = state.filling.remove(&last)
        {
            state.unstarted = last;
            if let Err(error) = self.reduce(last, complete.values) {
                state.first_error.get_or_insert(error);
            }
        }
        true
    }
}
