//! Reward-FL on several ranks.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use roll_backends::strategy::{Zero, ZeroOptions};
use roll_core::*;
use roll_testing::training::{self, BATCH, Run, agreed, assert_same_runs};
use roll_testing::{MockDiffusion, Sines, sample};

use super::*;

/// Trains on the same samples with the given number of ranks.
fn train(ranks: usize, stage: u8, prompt: fn(u64) -> &'static str) -> Vec<Result<Run>> {
    train_on(ranks, stage, |i| sample(i, prompt(i)), Sines::new)
}

fn train_on(
    ranks: usize,
    stage: u8,
    sample: impl Fn(u64) -> Sample + Sync,
    reward: impl Fn() -> Sines + Sync,
) -> Vec<Result<Run>> {
    train_with(ranks, stage, sample, reward, &RewardFlConfig { mid_timestep: 2, ..RewardFlConfig::default() })
}

fn train_with(
    ranks: usize,
    stage: u8,
    sample: impl Fn(u64) -> Sample + Sync,
    reward: impl Fn() -> Sines + Sync,
    config: &RewardFlConfig,
) -> Vec<Result<Run>> {
    training::train(ranks, 10, 1e-2, sample, |ranks| {
        let strategy = Zero::new(ZeroOptions { stage, ..ZeroOptions::default() }, ranks)?;
        Ok(training::Rank { algorithm: RewardFl::new(config.clone()), strategy, reward: reward() })
    })
}

fn plain(_: u64) -> &'static str {
    "a person"
}

/// Prompts of a step's four samples: no face in the first, in the second, in the last two, or in all.
fn some_missing(index: u64) -> &'static str {
    match index {
        0 | 5 | 10 | 11 | 16..=19 => "missing",
        _ => "a person",
    }
}

fn assert_near(a: &[f32], b: &[f32]) {
    let scale = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6 * scale), "{a:?}\n{b:?}");
}

#[test]
fn parameters_and_metrics_do_not_depend_on_the_number_of_ranks_also_with_skipped_samples() {
    for prompt in [plain, some_missing] {
        let ours = agreed(train(1, 2, prompt));
        for ranks in [2, 4] {
            let theirs = agreed(train(ranks, 2, prompt));
            assert_same_runs(&ours, &theirs, 1e-6, 1e-5);
            // Before the first update the results are equal without tolerance.
            let counted = ["actor/samples", "actor/skipped", "actor/loss", "actor/score", "actor/kl_loss"];
            for name in counted {
                assert_eq!(theirs.metrics[0].get(name), ours.metrics[0].get(name), "{name}");
            }
        }
    }
}

#[test]
fn references_without_a_target_are_left_out_alike_on_any_number_of_ranks() {
    let faceless = || Sines { faceless: vec![0, 5, 10, 11, 16, 17, 18, 19], ..Sines::new() };
    let run = |ranks| agreed(train_on(ranks, 2, |i| sample(i, "a person"), faceless));
    let Run { parameters, metrics } = run(1);
    let skipped: Vec<f64> = metrics.iter().map(|m| m["actor/skipped"]).collect();
    assert_eq!(skipped, [1.0, 1.0, 2.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    for ranks in [2, 4] {
        let Run { parameters: theirs, metrics: their_metrics } = run(ranks);
        assert_near(&theirs, &parameters);
        assert!(metrics.iter().zip(&their_metrics).all(|(a, b)| a["actor/skipped"] == b["actor/skipped"]));
    }
}

#[test]
fn repeated_clip_has_the_same_noise_on_any_number_of_ranks() {
    let run = |ranks| agreed(train_on(ranks, 2, |i| sample(i / BATCH, "a person"), Sines::new));
    let Run { parameters, metrics } = run(1);
    let alone = agreed(train_on(1, 2, |i| sample(i, "a person"), Sines::new)).metrics;
    assert_ne!(metrics[1]["actor/loss"], alone[1]["actor/loss"]);
    for ranks in [2, 4] {
        let Run { parameters: theirs, metrics: their_metrics } = run(ranks);
        assert_near(&theirs, &parameters);
        assert_eq!(their_metrics[0]["actor/loss"], metrics[0]["actor/loss"]);
    }
}

#[test]
fn steps_noisings_and_noise_levels_are_drawn_alike_on_any_number_of_ranks() {
    let direct = TrainedSteps::Direct(Direct::default());
    for trained_steps in [TrainedSteps::Random(2), TrainedSteps::Renoised(2), direct] {
        let config = RewardFlConfig { mid_timestep: 2, trained_steps, data_weight: 0.5, ..RewardFlConfig::default() };
        let run = |ranks| agreed(train_with(ranks, 2, |i| sample(i, some_missing(i)), Sines::new, &config));
        let Run { parameters, metrics } = run(1);
        for ranks in [2, 4] {
            let Run { parameters: theirs, metrics: their_metrics } = run(ranks);
            assert_near(&theirs, &parameters);
            for name in ["actor/loss", "actor/score", "actor/kl_loss", "actor/data_loss"] {
                assert_eq!(their_metrics[0].get(name), metrics[0].get(name), "{name}");
            }
        }
    }
}

#[test]
fn every_stage_gives_the_same_bits() {
    let expected = agreed(train(4, 0, some_missing));
    for stage in 1..=3 {
        assert_eq!(agreed(train(4, stage, some_missing)), expected);
    }
}

#[test]
fn nonfinite_value_on_one_rank_skips_the_update_of_all() {
    let huge = |index: u64| if index == 6 { "huge" } else { "a person" };
    let Run { metrics, .. } = agreed(train(4, 2, huge));
    assert_eq!(metrics[1]["actor/nonfinite"], 1.0);
    assert!(!metrics[1].contains_key("actor/grad_norm") && metrics[2].contains_key("actor/grad_norm"));
}

#[test]
fn an_error_of_one_rank_ends_all() {
    let results = ThreadRanks::run(2, Duration::from_secs(60), |ranks| -> Result<()> {
        let rank = ranks.rank().0;
        let mut strategy = Zero::new(ZeroOptions::default(), ranks)?;
        let (mut model, mut reward) = (MockDiffusion::new(), Sines::new());
        reward.on_missing = OnMissing::Error;
        strategy.attach(&mut model, &OptimizerConfig::default())?;
        let samples = [sample(0, if rank == 1 { "missing" } else { "a person" })];
        let mut context = StepContext {
            step: 0,
            samples: &samples,
            model: &mut model,
            reward: Some(&mut reward),
            strategy: &mut strategy,
            learning_rate: 1e-2,
            noise: &Noise::new(11),
            progress: &Silent,
            want_videos: false,
        };
        RewardFl::new(RewardFlConfig::default()).step(&mut context).map(drop)
    });
    let said = |rank: usize| {
        let error: &dyn std::error::Error = results[rank].as_ref().unwrap_err();
        std::iter::successors(Some(error), |e| e.source()).map(|e| e.to_string()).collect::<Vec<_>>().join(": ")
    };
    assert!(said(0).contains("rank 1 failed") && said(0).contains("training on row 0"), "{}", said(0));
    assert!(said(1).contains("found nothing to score"), "{}", said(1));
}
