//! Exploration of Flow-GRPO: makes the steps of a rollout's window stochastic, and records them for training.

use std::ops::Range;

use roll_core::{Noise, Purpose, Result, Tensor};

use super::config::FlowGrpoPlan;
use crate::draw_keys::{UPDATE_OR_STEP_BIT, in_unit_interval};
use crate::policy_gradient::round::Explore;

/// The record of one stochastic step of a batch of videos.
pub(super) struct StepRecord {
    /// Index of the step in the schedule.
    pub(super) step: usize,
    /// The transition of each video of the batch.
    pub(super) transitions: Vec<Transition>,
}

/// A stochastic step of one video. Latents are kept as f32, because rounded latents would have another log-probability.
pub(super) struct Transition {
    /// Latents before the step.
    pub(super) x: Tensor,
    /// Latents after the step.
    next: Tensor,
    /// The velocity at `x`.
    pub(super) velocity: Tensor,
}

/// Makes the steps of a window stochastic, and records them.
pub(super) struct WindowExplorer<'a> {
    plan: &'a FlowGrpoPlan,
    noise: &'a Noise,
    /// Number of the training step.
    round: u64,
    /// The window of the current prompt.
    window: Range<usize>,
    /// Keys of the draws of the videos of the current batch.
    keys: Vec<u64>,
    /// Records of the current batch so far.
    records: Vec<StepRecord>,
}

impl<'a> WindowExplorer<'a> {
    /// The window of the prompt in `row` of the data. In a round, it depends on the row alone, so that all videos of a
    /// prompt, on any rank, have the same window.
    fn window(&self, row: u64) -> Range<usize> {
        let mut draw = self.noise.uniform(Purpose::Levels, self.round, row);
        self.plan.windows.at(self.round, in_unit_interval(draw()))
    }

    pub(super) fn new(plan: &'a FlowGrpoPlan, noise: &'a Noise, round: u64) -> Self {
        Self { plan, noise, round, window: 0..0, keys: Vec::new(), records: Vec::new() }
    }
}

impl Explore for WindowExplorer<'_> {
    type Record = Vec<StepRecord>;

    fn steps_before(&self, row: u64) -> usize {
        self.window(row).start
    }

    fn begin(&mut self, row: u64, keys: &[u64], record: Self::Record) {
        self.window = self.window(row);
        self.keys = keys.to_vec();
        self.records = record;
    }

    fn step(&mut self, i: usize, xs: &[Tensor], vs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let Some(step) = self.plan.steps[i] else { return Ok(None) };
        if !self.window.contains(&i) {
            return Ok(None);
        }
        let mut transitions = Vec::new();
        for ((x, v), key) in xs.iter().zip(vs).zip(&self.keys) {
            // The number of the step enters the key, so that each step of a video has its own noise.
            let z =
                self.noise.normal(Purpose::Steps, self.round, key ^ ((i as u64) << UPDATE_OR_STEP_BIT), x.shape())?;
            let next = step.next(&step.mean(x.f32s()?, v.f32s()?), z.f32s()?);
            let next = Tensor::new(next.into_iter().map(|v| v as f32).collect::<Vec<f32>>(), x.shape())?;
            transitions.push(Transition { x: x.clone(), next, velocity: v.clone() });
        }
        let next_latents = transitions.iter().map(|transition| transition.next.clone()).collect();
        self.records.push(StepRecord { step: i, transitions });
        Ok(Some(next_latents))
    }

    fn end(&mut self) -> Self::Record {
        std::mem::take(&mut self.records)
    }
}

impl Transition {
    /// The latents after the step, in f64 for the log-probability.
    pub(super) fn next_latents(&self) -> Result<Vec<f64>> {
        Ok(self.next.f32s()?.iter().map(|v| f64::from(*v)).collect())
    }
}
