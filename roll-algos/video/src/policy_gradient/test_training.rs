//! Shared by the tests of policy gradients: training on the doubles.
#![allow(clippy::unwrap_used)]

use roll_backends::strategy::{SingleOptions, single};
use roll_core::{Algorithm, Noise, OptimizerConfig, Sample, Silent, StepContext, Strategy};
use roll_testing::diffusion::sample;
use roll_testing::training::{Bench, Run, assert_same_runs};

/// The samples of a step.
pub fn two() -> [Sample; 2] {
    [sample(0, "a"), sample(1, "b")]
}

/// The mean score of many videos by these parameters, the same noises each time.
fn mean_score<A: Algorithm>(mut bench: Bench<A>, adapter: &[f32]) -> f64 {
    bench.model.adapter = adapter.to_vec();
    bench.algorithm.check(&mut bench.model, Some(&bench.reward)).unwrap();
    let steps = 1000..1020;
    let count = steps.clone().count() as f64;
    steps.map(|step| bench.step(step, &two(), 0.0).metrics["actor/score"]).sum::<f64>() / count
}

/// The gain in that score by training with AdamW.
pub fn gain<A: Algorithm>(set_up: impl Fn() -> Bench<A>, steps: u64) -> f64 {
    let (mut bench, mut strategy) = (set_up(), single(SingleOptions::default()));
    strategy.attach(&mut bench.model, &OptimizerConfig::default()).unwrap();
    let before = mean_score(set_up(), &bench.model.adapter);
    for step in 0..steps {
        let report = bench.algorithm.step(&mut StepContext {
            step,
            samples: &two(),
            model: &mut bench.model,
            reward: Some(&mut bench.reward),
            strategy: &mut strategy,
            learning_rate: 0.02,
            noise: &Noise::new(11),
            progress: &Silent,
            want_videos: false,
        });
        assert!(report.unwrap().applied);
    }
    mean_score(set_up(), &bench.model.adapter) - before
}

/// Asserts that `train`, on a number of ranks with the prompts of its samples, makes the same run on any number.
pub fn assert_same_on_all_ranks(train: impl Fn(usize, fn(u64) -> &'static str) -> Run) {
    let plain = |_| "a person";
    // The second rank of two has nothing to train on in the first step, and one prompt less in the second.
    let some_missing = |i| if [2, 3, 5].contains(&i) { "missing" } else { "a person" };
    for prompt in [plain as fn(u64) -> &'static str, some_missing] {
        let ours = train(1, prompt);
        assert!(ours.metrics[0]["actor/data_loss"] > 0.0);
        for ranks in [2, 4] {
            assert_same_runs(&ours, &train(ranks, prompt), 1e-5, 1e-4);
        }
    }
}
