//! Rollouts with truncated gradients, and the loss on the clip: their cost and their gradients.
#![allow(clippy::unwrap_used)]

use roll_core::*;
use roll_testing::diffusion::{Sines, sample};

use super::tests::{Bench, two};
use super::*;

/// The variants whose untrained steps alone are constants.
fn chained() -> [TrainedSteps; 9] {
    [
        TrainedSteps::Last(1),
        TrainedSteps::Last(3),
        TrainedSteps::Random(1),
        TrainedSteps::Random(3),
        TrainedSteps::Uniform(2),
        TrainedSteps::Renoised(1),
        TrainedSteps::Renoised(3),
        TrainedSteps::Direct(Direct::default()),
        TrainedSteps::Direct(Direct { step: 0.1, denoise_discount: [0.0, 2.0], ..Direct::default() }),
    ]
}

fn cut(trained_steps: TrainedSteps) -> RewardFlConfig {
    // Near noise level 1, `direct` magnifies the rounding of f32 beyond the resolution of central differences.
    let max_timestep_boundary = if matches!(trained_steps, TrainedSteps::Direct(_)) { 0.8 } else { 1.0 };
    RewardFlConfig { mid_timestep: 0, trained_steps, max_timestep_boundary, ..RewardFlConfig::default() }
}

#[test]
fn truncated_gradient_matches_finite_differences() {
    for steps in chained() {
        Bench::new(cut(steps.clone())).check_gradient(&two());
        // Only the reward, so that the KL's gradient cannot hide errors in its gradient.
        Bench::new(RewardFlConfig { kl_weight: 0.0, ..cut(steps.clone()) }).check_gradient(&two());
        let early = RewardFlConfig { final_timestep: 5, early_stop: EarlyStop::PredictX0, ..cut(steps) };
        let mut bench = Bench::new(early);
        bench.model.first_frame = Some(Tensor::full([2, 1, 1, 2], 0.7));
        bench.check_gradient(&two());
    }
}

#[test]
fn last_one_is_bit_exact_with_a_window_of_one_step() {
    let gradient = |config| {
        let mut bench = Bench::new(config);
        let report = bench.step(&two());
        (bench.strategy.gradient, report.metrics["actor/loss"], report.metrics["actor/kl_loss"])
    };
    let window = |mid_timestep| RewardFlConfig { mid_timestep, ..RewardFlConfig::default() };
    assert_eq!(gradient(cut(TrainedSteps::Last(1))), gradient(window(7)));
    assert_eq!(gradient(cut(TrainedSteps::Last(3))), gradient(window(5)));
    assert_eq!(gradient(cut(TrainedSteps::Uniform(8))), gradient(window(0)));
    assert_eq!(gradient(cut(TrainedSteps::Random(8))), gradient(window(0)));
}

#[test]
fn plan_counts_the_velocities_of_a_step() {
    for (steps, asked, recorded) in [
        (TrainedSteps::Last(2), 8, 2),
        (TrainedSteps::Random(1), 8, 1),
        (TrainedSteps::Uniform(3), 8, 3),
        (TrainedSteps::Renoised(3), 8 + 3, 3),
        (TrainedSteps::Leap(Leap::default()), 8, 2),
        (TrainedSteps::Direct(Direct::default()), 8 + 2, 2),
    ] {
        for data_weight in [0.0, 0.5] {
            let config = RewardFlConfig { data_weight, ..cut(steps.clone()) };
            let mut bench = Bench::new(config.clone());
            bench.step(&[sample(0, "a")]);
            let on_clip = usize::from(data_weight > 0.0);
            // Each trained step has a reference velocity.
            assert_eq!(bench.model.velocity_calls.len(), asked + recorded + on_clip, "{steps:?}");
            assert_eq!(bench.model.recorded_passes, recorded + on_clip, "{steps:?}");
            let options = serde_json::to_value(&config).unwrap();
            let planned = passes(options.as_object().unwrap()).unwrap();
            assert_eq!((planned.forward, planned.pulled), (asked + on_clip, recorded + on_clip), "{steps:?}");
            assert_eq!(planned.steps(), [asked, recorded]);
            // Noisings are recorded, decoded and pulled back one after another.
            let several = matches!(steps, TrainedSteps::Renoised(_) | TrainedSteps::Direct(_));
            let expected = if several { (1, [0, recorded]) } else { (recorded, [0, 1]) };
            assert_eq!((planned.held(), planned.decoded()), expected, "{steps:?}");
        }
    }
}

#[test]
fn draws_depend_on_the_step_and_repeat_with_it() {
    let direct = TrainedSteps::Direct(Direct::default());
    for steps in [TrainedSteps::Random(1), TrainedSteps::Renoised(1), TrainedSteps::Leap(Leap::default()), direct] {
        // Every recorded velocity is at a noise level that was drawn.
        let levels = |at: u64| {
            let mut bench = Bench::new(cut(steps.clone()));
            bench.step_at(at, &two(), 0.0, &Silent).unwrap();
            let (gradient, asked) = (bench.strategy.gradient, bench.model.velocity_calls);
            (gradient.iter().map(|g| g.to_bits()).collect::<Vec<_>>(), asked)
        };
        let several: Vec<_> = (0..6).map(levels).collect();
        assert!(several.windows(2).all(|pair| pair[0].0 != pair[1].0));
        assert_eq!(levels(3), several[3]);
    }
}

#[test]
fn renoised_sample_is_skipped_if_no_video_has_a_score() {
    let mut bench = Bench::new(cut(TrainedSteps::Renoised(3)));
    let report = bench.step(&[sample(0, "a"), sample(1, "missing")]);
    assert_eq!(report.skipped, [("row 1".to_string(), "no face in any frame".to_string())]);
    assert_eq!((report.metrics["actor/samples"], report.videos.len()), (1.0, 2));
    let gradient = bench.strategy.gradient.clone();
    bench.step(&[sample(0, "a")]);
    assert_eq!(gradient, bench.strategy.gradient);
}

#[test]
fn gradient_split_of_a_truncated_rollout_is_bit_exact() {
    for steps in chained().into_iter().chain([TrainedSteps::Leap(Leap::default())]) {
        let config = RewardFlConfig { data_weight: 0.4, ..cut(steps.clone()) };
        let mut plain = Bench::new(config.clone());
        plain.step(&two());
        let mut split = Bench::new(RewardFlConfig { gradient_split_every: Some(1), ..config });
        let report = split.step(&two());
        assert_eq!(plain.strategy.gradient, split.strategy.gradient, "{steps:?}");
        let alone = RewardFlConfig { kl_weight: 0.0, ..cut(steps.clone()) };
        let norm = Bench::new(alone).step(&two()).metrics["actor/grad_norm"];
        assert!((report.metrics["actor/grad_norm_reward"] / norm - 1.0).abs() < 1e-4, "{steps:?}");
    }
}

#[test]
fn data_loss_is_added_with_its_gradient() {
    let with = |data_weight| RewardFlConfig { data_weight, ..cut(TrainedSteps::Window) };
    Bench::new(with(0.7)).check_gradient(&two());
    // Only the loss on the clips.
    let alone = RewardFlConfig { reward_weight: 0.0, kl_weight: 0.0, ..with(0.7) };
    let mut clips = Bench::new(alone);
    clips.check_gradient(&two());
    let report = clips.step(&two());
    let data = report.metrics["actor/data_loss"];
    assert!(data > 0.0 && (report.metrics["actor/loss"] - 0.7 * data).abs() < 1e-9);
    assert!(report.metrics["time/data"] >= 0.0);

    let (mut off, mut on) = (Bench::new(with(0.0)), Bench::new(with(0.7)));
    let (a, b) = (off.step(&two()), on.step(&two()));
    assert!(!a.metrics.contains_key("actor/data_loss"));
    assert_eq!(a.metrics["actor/score"], b.metrics["actor/score"]);
    let sum = off.strategy.gradient.iter().zip(&clips.strategy.gradient).map(|(a, b)| a + b);
    assert!(on.strategy.gradient.iter().zip(sum).all(|(g, sum)| (g - sum).abs() < 1e-6));
}

#[test]
fn clip_without_a_score_adds_no_data_loss() {
    let config = RewardFlConfig { data_weight: 0.7, ..RewardFlConfig::default() };
    let mut bench = Bench::new(config);
    bench.step(&[sample(0, "a"), sample(1, "missing")]);
    let gradient = bench.strategy.gradient.clone();
    bench.step(&[sample(0, "a")]);
    assert_eq!(gradient, bench.strategy.gradient);
}

#[test]
fn the_relative_score_weighs_two_prompts_oppositely_in_both_directions() {
    let direct = |step, discount| Direct {
        step,
        denoise_discount: [discount; 2],
        inversion_discount: [discount; 2],
        ..Direct::default()
    };
    let metrics = |direct| Bench::new(cut(TrainedSteps::Direct(direct))).step(&[sample(0, "a")]).metrics;
    // Where both prompts weigh the same, the steps of a sample have opposite scores, apart from their two videos.
    let short = metrics(direct(1e-5, 0.0));
    assert!(short["actor/score"].abs() < 1e-3 && (short["reward/wanted"] - short["reward/unwanted"]).abs() > 0.05);
    let weighed = metrics(direct(1e-5, 0.5));
    let expected = 0.5 * (short["reward/wanted"] + short["reward/unwanted"]) / 2.0;
    assert!((weighed["actor/score"] - expected).abs() < 1e-3, "{} or {expected}", weighed["actor/score"]);
    assert!(short.contains_key("reward/sine"), "{short:?}");
}

/// Rewards of steps with two samples in which some videos have no score: of three noisings each, and of two direct
/// steps with two prompts each.
fn partly_scored() -> [(TrainedSteps, Sines); 3] {
    let unscored = |period, calls: &[usize]| Sines { unscored: Some((period, calls.to_vec())), ..Sines::new() };
    [
        (TrainedSteps::Renoised(3), unscored(6, &[1, 3, 5])),
        (TrainedSteps::Renoised(3), unscored(6, &[0, 1, 2, 5])),
        (TrainedSteps::Direct(Direct::default()), unscored(8, &[3])),
    ]
}

#[test]
fn loss_and_gradient_of_partly_scored_samples_have_one_divisor() {
    for (steps, reward) in partly_scored() {
        for (kl_weight, data_weight) in [(0.0, 0.0), (1.0, 0.5)] {
            let mut bench = Bench::new(RewardFlConfig { kl_weight, data_weight, ..cut(steps.clone()) });
            bench.reward.unscored = reward.unscored.clone();
            bench.check_gradient(&two());
        }
    }
    // The whole update is the mean over the three videos with a score.
    let mut bench = Bench::new(cut(TrainedSteps::Renoised(3)));
    bench.reward.unscored = Some((6, vec![1, 3, 5]));
    let report = bench.step(&two());
    assert_eq!((report.metrics["actor/samples"], report.skipped.len()), (2.0, 0));
    let (loss, score, kl) =
        (report.metrics["actor/loss"], report.metrics["actor/score"], report.metrics["actor/kl_loss"]);
    assert!((loss - (kl - (score - 0.54) / 0.16 * 0.1)).abs() < 1e-9, "the means have one divisor");
}

#[test]
fn gradient_split_of_partly_scored_samples_leaves_out_the_kl_of_the_others() {
    for (trained_steps, reward) in partly_scored() {
        let config = RewardFlConfig { gradient_split_every: Some(1), reward_weight: 0.0, ..cut(trained_steps.clone()) };
        let mut bench = Bench::new(config);
        bench.reward.unscored = reward.unscored;
        let metrics = bench.step(&two()).metrics;
        assert!(metrics["actor/grad_norm_reward"] < 1e-6 * metrics["actor/grad_norm_kl"], "{trained_steps:?}");
        assert!((metrics["actor/grad_norm_kl"] / metrics["actor/grad_norm"] - 1.0).abs() < 1e-5, "{trained_steps:?}");
    }
}
