//! Stochastic steps in a rollout, and their records for training.

use std::ops::Range;

use roll_core::{Noise, Purpose, Result, Tensor};

use super::config::Plan;
use crate::policy_gradient::round::Explore;

/// A stochastic step of videos that were computed side by side, as it was taken; f32 throughout: log-probabilities of
/// rounded latents would be others.
pub(super) struct Taken {
    /// Its position in the schedule.
    pub(super) at: usize,
    pub(super) videos: Vec<TakenBy>,
}

/// One video's.
pub(super) struct TakenBy {
    /// Latents before and after.
    pub(super) x: Tensor,
    next: Tensor,
    /// The velocity that led there.
    pub(super) velocity: Tensor,
}

/// Takes the steps of windows.
pub(super) struct Windowed<'a> {
    plan: &'a Plan,
    noise: &'a Noise,
    round: u64,
    window: Range<usize>,
    keys: Vec<u64>,
    taken: Vec<Taken>,
}

impl<'a> Windowed<'a> {
    pub(super) fn new(plan: &'a Plan, noise: &'a Noise, round: u64) -> Self {
        Self { plan, noise, round, window: 0..0, keys: Vec::new(), taken: Vec::new() }
    }
}

impl Explore for Windowed<'_> {
    type Kept = Vec<Taken>;

    /// The window is the prompt's, whatever rank and whichever of its videos.
    fn begin(&mut self, row: u64, keys: &[u64]) {
        let mut draw = self.noise.uniform(Purpose::Levels, self.round, row);
        self.window = self.plan.windows.at(self.round, 0.5 * (f64::from(draw()) + 1.0));
        self.keys = keys.to_vec();
    }

    fn step(&mut self, i: usize, xs: &[Tensor], vs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let Some(step) = self.plan.steps[i].filter(|_| self.window.contains(&i)) else { return Ok(None) };
        let mut videos = Vec::new();
        for ((x, v), key) in xs.iter().zip(vs).zip(&self.keys) {
            // Each step of a video has noise of its own.
            let z = self.noise.normal(Purpose::Steps, self.round, key ^ ((i as u64) << 28), x.shape())?;
            let next = step.next(&step.mean(x.f32s()?, v.f32s()?), z.f32s()?);
            let next = Tensor::new(next.into_iter().map(|v| v as f32).collect::<Vec<f32>>(), x.shape())?;
            videos.push(TakenBy { x: x.clone(), next, velocity: v.clone() });
        }
        let nexts = videos.iter().map(|video| video.next.clone()).collect();
        self.taken.push(Taken { at: i, videos });
        Ok(Some(nexts))
    }

    fn end(&mut self) -> Self::Kept {
        std::mem::take(&mut self.taken)
    }
}

impl TakenBy {
    /// The latents after the step.
    pub(super) fn next(&self) -> Result<Vec<f64>> {
        Ok(self.next.f32s()?.iter().map(|v| f64::from(*v)).collect())
    }
}
