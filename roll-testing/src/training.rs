//! Runs steps of an algorithm on the test doubles, on one or several ranks.

// Wrong use of a test double fails the test by a panic.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use roll_core::*;

use crate::{Descent, MockDiffusion, Sines};

/// An algorithm with doubles of a model, a reward and a strategy, for tests that make one step after another.
pub struct Bench<A> {
    /// The algorithm.
    pub algorithm: A,
    /// The model.
    pub model: MockDiffusion,
    /// The reward.
    pub reward: Sines,
    /// The strategy, which exposes the gradient of the last update.
    pub strategy: Descent,
}

impl<A: Algorithm> Bench<A> {
    /// Creates a bench with new doubles, checked by the algorithm.
    pub fn new(mut algorithm: A, reward: Sines) -> Self {
        let mut model = MockDiffusion::new();
        algorithm.check(&mut model, Some(&reward)).unwrap();
        Self { algorithm, model, reward, strategy: Descent::default() }
    }

    /// Runs step `step`.
    pub fn step_with(
        &mut self,
        step: u64,
        samples: &[Sample],
        learning_rate: f64,
        noise: &Noise,
    ) -> Result<StepReport> {
        let Self { algorithm, model, reward, strategy } = self;
        algorithm.step(&mut context(step, samples, model, reward, strategy, learning_rate, noise))
    }

    /// Runs step `step` with the noise of [`train`]; panics if it fails.
    pub fn step(&mut self, step: u64, samples: &[Sample], learning_rate: f64) -> StepReport {
        self.step_with(step, samples, learning_rate, &Noise::new(SEED)).unwrap()
    }
}

/// Seed of the noise of [`train`] and [`Bench::step`].
const SEED: u64 = 11;

fn context<'a>(
    step: u64,
    samples: &'a [Sample],
    model: &'a mut MockDiffusion,
    reward: &'a mut Sines,
    strategy: &'a mut dyn Strategy,
    learning_rate: f64,
    noise: &'a Noise,
) -> StepContext<'a> {
    let (reward, progress): (Option<&mut dyn RewardScorer>, _) = (Some(reward), &Silent);
    StepContext { step, samples, model, reward, strategy, learning_rate, noise, progress, want_videos: false }
}

/// Time after which a rank of [`train`] that does not come to a collective fails the test.
const RANK_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of samples per step of [`train`].
pub const BATCH: u64 = 4;

/// The result of [`train`].
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The final parameters.
    pub parameters: Vec<f32>,
    /// The metrics of each step, without times.
    pub metrics: Vec<BTreeMap<String, f64>>,
}

/// The components of one rank of [`train`].
pub struct Rank<A, S> {
    /// The algorithm.
    pub algorithm: A,
    /// The strategy, not yet attached.
    pub strategy: S,
    /// The reward.
    pub reward: Sines,
}

/// Trains on the same samples with any number of ranks, which are threads of this process. Rank r has the r-th part of
/// each step's samples. `sample` makes the sample of a number; `components` makes the algorithm, strategy and reward of
/// a rank. Returns the result of each rank.
pub fn train<A: Algorithm, S: Strategy>(
    ranks: usize,
    steps: u64,
    learning_rate: f64,
    sample: impl Fn(u64) -> Sample + Sync,
    components: impl Fn(Arc<dyn Communicator>) -> Result<Rank<A, S>> + Sync,
) -> Vec<Result<Run>> {
    ThreadRanks::run(ranks, RANK_TIMEOUT, |ranks| {
        let (rank, world) = (ranks.rank().0 as u64, ranks.world_size() as u64);
        let share = (rank * BATCH / world) as usize..((rank + 1) * BATCH / world) as usize;
        let Rank { mut algorithm, mut strategy, mut reward } = components(ranks)?;
        let (mut model, noise, mut metrics) = (MockDiffusion::new(), Noise::new(SEED), Vec::new());
        strategy.attach(&mut model, &OptimizerConfig::default())?;
        for step in 0..steps {
            let all: Vec<Sample> = (step * BATCH..(step + 1) * BATCH).map(&sample).collect();
            let samples = &all[share.clone()];
            let mut context = context(step, samples, &mut model, &mut reward, &mut strategy, learning_rate, &noise);
            let report = algorithm.step(&mut context)?;
            metrics.push(report.metrics.into_iter().filter(|(name, _)| !name.starts_with("time/")).collect());
        }
        Ok(Run { parameters: model.adapter, metrics })
    })
}

/// Returns the result of the ranks; panics if they differ.
pub fn agreed(results: Vec<Result<Run>>) -> Run {
    let mut results = results.into_iter().map(Result::unwrap);
    let first = results.next().unwrap();
    assert!(results.all(|other| other == first), "ranks differ");
    first
}

/// Panics unless two runs have the same parameters and metrics. Parameters may differ by `parameter_tolerance` of the
/// largest one, metrics by `metric_tolerance` (relative, or absolute for metrics below one).
pub fn assert_same_runs(ours: &Run, theirs: &Run, parameter_tolerance: f32, metric_tolerance: f64) {
    let largest = ours.parameters.iter().fold(0f32, |m, v| m.max(v.abs()));
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= parameter_tolerance * largest;
    let are_near = ours.parameters.iter().zip(&theirs.parameters).all(is_near);
    assert!(are_near, "{:?}\n{:?}", ours.parameters, theirs.parameters);
    for (ours, theirs) in ours.metrics.iter().zip(&theirs.metrics) {
        assert!(ours.keys().eq(theirs.keys()), "{:?}\n{:?}", ours.keys(), theirs.keys());
        for (name, value) in ours {
            let same = (value - theirs[name]).abs() <= metric_tolerance * value.abs().max(1.0);
            assert!(same || value.is_nan(), "{name}: {value} or {}", theirs[name]);
        }
    }
}

/// Asserts that the weight 2 of a sample doubles its gradient and changes no metric but norms of gradients. `step`
/// makes a step on new doubles; the gradient is the second value.
pub fn assert_weight_scales_the_gradient(step: impl Fn(&[Sample]) -> (StepReport, Vec<f32>)) {
    let step_with = |weight| {
        let (mut report, gradient) = step(&[Sample { weight, ..crate::sample(0, "a") }]);
        report.metrics.retain(|name, _| !name.starts_with("time/") && !name.contains("grad_norm"));
        (report.metrics, gradient)
    };
    let ((metrics, gradient), (same, twice)) = (step_with(1.0), step_with(2.0));
    assert_eq!(metrics, same);
    assert!(gradient.iter().any(|g| *g != 0.0));
    assert_eq!(gradient.iter().map(|g| 2.0 * g).collect::<Vec<f32>>(), twice);
}
