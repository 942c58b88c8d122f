//! Collects gradients during a backward pass and starts their reduction.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use roll_core::{Error, GradientSink, Model, ParameterSpec, Result};

use super::partition::Partition;
use crate::overlap::OverlappedRanks;
use crate::sync::lock;

/// Collects gradients into buckets and starts the reduction of each bucket when it is complete.
///
/// Reductions always start from the last bucket to the first, even if an earlier bucket is complete first. If the order
/// differed between ranks, other buckets would be paired, and sums over several samples would round differently from
/// run to run.
pub(super) struct GradientReducer {
    partition: Arc<Partition>,
    /// The bucket of each parameter, and its offset and length there.
    slots: Vec<BucketSlot>,
    ranks: Arc<OverlappedRanks>,
    /// Number of the gradient service among the services of the ranks.
    service: u32,
    state: Mutex<ReducerState>,
}

struct BucketSlot {
    bucket: usize,
    start: usize,
    len: usize,
}

#[derive(Default)]
struct ReducerState {
    /// Whether gradients are accepted.
    open: bool,
    /// Incomplete buckets, by number.
    filling: BTreeMap<usize, PartialBucket>,
    /// Buckets with smaller numbers have not been started.
    next: usize,
    /// Gradients that arrive after their bucket's reduction was started: of parameters that are used more than once.
    late: BTreeMap<usize, Vec<f32>>,
    failed: Option<Error>,
}

struct PartialBucket {
    values: Vec<f32>,
    /// The parameters whose gradients have arrived.
    received: Vec<bool>,
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

    /// Accepts gradients from now on: they are the last ones of their parameters in this step.
    pub(super) fn open(&self) {
        *lock(&self.state) =
            ReducerState { open: true, next: self.partition.buckets().len(), ..ReducerState::default() };
    }

    /// Drops the gradients that have arrived and accepts no more.
    pub(super) fn close(&self) {
        *lock(&self.state) = ReducerState::default();
    }

    /// Takes the remaining gradients out of the model, and starts the reductions that have not been started. Fails with
    /// the first error of a reduction.
    pub(super) fn finish(&self, model: &mut dyn Model) -> Result<()> {
        let ReducerState { open, mut filling, next, late, failed } = std::mem::take(&mut *lock(&self.state));
        if let Some(error) = failed {
            return Err(error);
        }
        let buckets = self.partition.buckets();
        let next = if open { next } else { buckets.len() };
        let mut whole = None;
        for number in (0..next).rev() {
            let bucket = &buckets[number];
            let mut values = match filling.remove(&number) {
                Some(filling) => filling.values,
                None => self.empty(number),
            };
            match model.parts() {
                Some(parts) => parts.take_gradients_part(bucket.specs.clone(), &mut values[..bucket.len])?,
                None => {
                    if whole.is_none() {
                        let mut all = vec![0.0; model.parameter_count()];
                        model.take_gradients(&mut all)?;
                        whole = Some(all);
                    }
                    let all = whole.as_deref().unwrap_or_default();
                    values[..bucket.len].copy_from_slice(&all[bucket.flat_at..bucket.flat_at + bucket.len]);
                }
            }
            self.reduce(number, values)?;
        }
        late.into_iter().rev().try_for_each(|(number, values)| self.reduce(number, values))
    }

    fn reduce(&self, bucket: usize, values: Vec<f32>) -> Result<()> {
        self.ranks.begin(self.service, [bucket as u32, 0], values)
    }

    /// Zeros of the size of a padded bucket.
    fn empty(&self, bucket: usize) -> Vec<f32> {
        vec![0.0; self.partition.buckets()[bucket].part * self.partition.world()]
    }
}

impl GradientSink for GradientReducer {
    fn deliver(&self, position: usize, gradient: &[f32]) -> bool {
        let mut state = lock(&self.state);
        let Some(BucketSlot { bucket, start, len }) = self.slots.get(position) else { return false };
        if !state.open || gradient.len() != *len {
            return false;
        }
        let add = |values: &mut [f32]| {
            values[*start..*start + *len].iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        };
        if *bucket >= state.next {
            add(state.late.entry(*bucket).or_insert_with(|| self.empty(*bucket)));
            return true;
        }
        let specs = &self.partition.buckets()[*bucket].specs;
        let new = || PartialBucket { values: self.empty(*bucket), received: vec![false; specs.len()] };
        let filling = state.filling.entry(*bucket).or_insert_with(new);
        add(&mut filling.values);
        filling.received[position - specs.start] = true;
        while let Some(next) = state.next.checked_sub(1)
            && state.filling.get(&next).is_some_and(|f| f.received.iter().all(|received| *received))
            && let Some(whole) = state.filling.remove(&next)
        {
            state.next = next;
            if let Err(error) = self.reduce(next, whole.values) {
                state.failed.get_or_insert(error);
            }
        }
        true
    }
}
