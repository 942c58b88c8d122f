#![allow(clippy::unwrap_used)]

use roll_backends::strategy::{Zero, ZeroOptions};
use roll_core::*;
use roll_testing::diffusion::{MockDiffusion, Sines, sample, values};
use roll_testing::training::{self, Bench, Run, agreed};

use super::loss::awm::Matching;
use super::loss::nft::{AdvantageMode, Nft};
use super::*;
use crate::policy_gradient::clip::ClipRange;
use crate::policy_gradient::old_policy::OldDecay;
use crate::policy_gradient::test_training::{assert_same_on_all_ranks, gain, two};

/// The algorithm with a reward that has a gradient only if `config.reward_gradient` uses it.
fn set_up(config: DiffusionNftConfig) -> Bench<DiffusionNft> {
    let differentiable = config.reward_gradient.weight > 0.0;
    Bench::new(DiffusionNft::new(config), Sines { differentiable, ..Sines::new() })
}

fn small() -> DiffusionNftConfig {
    DiffusionNftConfig { group_size: 4, num_inference_steps: 4, ..DiffusionNftConfig::default() }
}

#[test]
fn loss_gradients_match_finite_differences() {
    let [data, noise, velocity, old] = [1, 2, 3, 4].map(|key| values(key, 12));
    let mask = LossMask::after(1, &[2, 3, 1, 2]).unwrap();
    let at = |velocity: &[f32], loss: &dyn Fn(&Noised<'_>) -> ValueAndGradient| {
        loss(&Noised { data: &data, noise: &noise, t: 0.7, velocity, old: &old, mask })
    };
    let nft = Nft { beta: 0.3, bound: 5.0, mode: AdvantageMode::All };
    let range = ClipRange { low: 1.0, high: 10.0 };
    for advantage in [1.3, -2.1] {
        // The weights of `nft` carry no gradient, so the difference quotients hold them at their values for `velocity`.
        let held = |at: &Noised<'_>| {
            let term = nft.at(advantage, at);
            let parts = [term.share * term.positive, (1.0 - term.share) * term.negative];
            (term.weights, parts, term.loss)
        };
        let (weights, _, whole) =
            held(&Noised { data: &data, noise: &noise, t: 0.7, velocity: &velocity, old: &old, mask });
        let quotients = |value: &dyn Fn(&[f32]) -> f64| -> Vec<f64> {
            let moved = |i: usize, h: f32| {
                let mut velocity = velocity.clone();
                velocity[i] += h;
                value(&velocity)
            };
            (0..12).map(|i| (moved(i, 1e-3) - moved(i, -1e-3)) / 2e-3).collect()
        };
        let near = |found: &[f64], expected: &[f64]| {
            found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-4 * (1.0 + b.abs()))
        };
        let of_nft = quotients(&|velocity| {
            let at = Noised { data: &data, noise: &noise, t: 0.7, velocity, old: &old, mask };
            let (own, parts, _) = held(&at);
            5.0 * (parts[0] * own[0] / weights[0] + parts[1] * own[1] / weights[1]) / 0.3
        });
        assert!(near(&whole.gradient, &of_nft), "{:?} {of_nft:?}", whole.gradient);
        for matching in [Matching::Uniform, Matching::T, Matching::TSquared, Matching::Huber, Matching::Ghuber] {
            let loss = |at: &Noised<'_>| {
                let AwmTerm { term, gradient, .. } = awm::at_level(matching, awm::GHUBER_POWER, advantage, range, at);
                ValueAndGradient { value: term.loss, gradient }
            };
            let found = at(&velocity, &loss).gradient;
            assert!(near(&found, &quotients(&|velocity| at(velocity, &loss).value)), "{matching:?}");
        }
        assert!(whole.gradient[..2].iter().chain(&whole.gradient[6..8]).all(|known| *known == 0.0));
    }
}

#[test]
fn every_video_has_levels_and_noise_of_its_own() {
    let config = DiffusionNftConfig { num_inference_steps: 12, ..small() };
    let mut bench = set_up(config.clone());
    let (samples, noise, shared) = (two(), Noise::new(11), config.shared());
    let plan = config.plan(bench.model.schedule()).unwrap();
    let (sampling, has_same_start, share_prefix) = (&plan.sampling, false, false);
    let options = RoundOptions { algorithm: NAME, sampling, shared: &shared, has_same_start, share_prefix };
    let mut ctx = StepContext {
        step: 0,
        samples: &samples,
        model: &mut bench.model,
        reward: Some(&mut bench.reward),
        strategy: &mut bench.strategy,
        learning_rate: 0.0,
        noise: &noise,
        progress: &Silent,
        want_videos: false,
    };
    let (mut round, prepared) = (RoundState::new(&mut ctx), &mut bench.algorithm.state.prepared);
    let groups = generate(&options, prepared, &mut ctx, &mut NoExploration, &mut round).unwrap();
    let drawn: Vec<Vec<(Sigma, Vec<f32>)>> = groups
        .iter()
        .flat_map(|group| group.videos.iter().map(move |video| (group, video)))
        .map(|(group, video)| {
            let copies = config.noised_copies(&noise, 0, &plan, group, video, 0).unwrap();
            copies.into_iter().map(|copy| (copy.sigma, copy.noise.to_f32_vec())).collect()
        })
        .collect();
    assert!([1, 3, 4].iter().all(|other| drawn[0] != drawn[*other]) && drawn[0][0].1 != drawn[0][1].1);
}

#[test]
fn nft_at_the_old_policy_is_linear_in_the_advantage() {
    let [data, noise, velocity] = [1, 2, 3].map(|key| values(key, 12));
    let mask = LossMask::all(12);
    let at = Noised { data: &data, noise: &noise, t: 0.6, velocity: &velocity, old: &velocity, mask };
    let nft = Nft { beta: 1.0, bound: 5.0, mode: AdvantageMode::All };
    let unit = nft.at(1.0, &at).loss;
    for advantage in [-3.0, 0.5, 2.0] {
        let found = nft.at(advantage, &at).loss;
        assert!((found.value - unit.value).abs() < 1e-12);
        for (a, b) in found.gradient.iter().zip(&unit.gradient) {
            assert!((a - advantage * b).abs() < 1e-12, "{a} {b}");
        }
    }
    assert!(nft.at(0.0, &at).loss.gradient.iter().all(|d| d.abs() < 1e-12));
}

#[test]
fn a_reward_without_a_gradient_rises_with_every_loss() {
    for loss in [Regression::Nft, Regression::Awm] {
        let config = DiffusionNftConfig { loss, clip_range: 1.0, kl_weight: 0.0, group_size: 8, ..small() };
        let gain = gain(|| set_up(config.clone()), 40);
        assert!(gain > 0.02, "{loss:?}: {gain}");
    }
}

#[test]
fn the_old_policy_generates_and_the_model_keeps_its_parameters() {
    let mut bench = set_up(DiffusionNftConfig { old_policy: OldDecay::LateRamp, ..small() });
    let begin = bench.model.adapter.clone();
    bench.step(0, &two(), 0.1);
    let after = bench.model.adapter.clone();
    assert_ne!(begin, after);
    // At steps 100 and 101 about a fifth of the old policy stays.
    bench.step(100, &two(), 0.0);
    assert_eq!(bench.model.adapter, after, "generating by the old policy leaves the model as it was");
    let decay = OldDecay::LateRamp.at(101);
    bench.step(101, &two(), 0.1);
    let old = bench.algorithm.state.old_policy.parameters(&bench.model).unwrap().to_vec();
    let expected: Vec<f32> =
        after.iter().zip(&bench.model.adapter).map(|(o, c)| decay as f32 * o + (1.0 - decay) as f32 * c).collect();
    assert!(old.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6));
    // An error in a round leaves neither other parameters nor a gradient behind.
    bench.reward.on_missing = OnMissing::Error;
    let before = bench.model.adapter.clone();
    bench.step_with(102, &[sample(0, "missing")], 0.1, &Noise::new(11)).unwrap_err();
    assert_eq!(bench.model.adapter, before);
}

#[test]
fn videos_without_an_advantage_cost_no_backward_pass() {
    let mut bench = set_up(DiffusionNftConfig { best_of: Some(2), ..small() });
    let report = bench.step(0, &two(), 0.1);
    // Two of four videos of two prompts, at two levels.
    assert_eq!(
        (bench.model.recorded_passes, report.metrics["actor/trained"], report.metrics["actor/samples"]),
        (8, 4.0, 8.0)
    );
    // A constant score teaches nothing, and the step says so.
    let mut bench = set_up(small());
    bench.reward.on_missing = OnMissing::Value(0.5);
    let report = bench.step(0, &[sample(0, "missing")], 0.1);
    assert_eq!((bench.model.recorded_passes, report.applied, report.metrics["actor/equal_groups"]), (0, false, 1.0));
}

#[test]
fn copies_at_the_boundary_are_trained_in_the_expert_that_the_sampler_uses() {
    // With shift 3 the second of four levels is 0.9 in f32. Times 1000 in f64 that is 899.99998, below the boundary;
    // the schedule's own timestep is 900.
    let mut bench = set_up(DiffusionNftConfig { shift: Some(3.0), max_timestep_boundary: 0.95, ..small() });
    bench.model.boundary = Some(0.9);
    bench.model.trained = SigmaRange { low: Sigma(0.9), high: Sigma(1.0) };
    bench.step(0, &two(), 0.1);
    let timesteps: Vec<f64> = bench.model.velocity_calls.iter().map(|(timestep, _)| *timestep).collect();
    assert!(timesteps.contains(&900.0) && !timesteps.iter().any(|t| (899.0..900.0).contains(t)), "{timesteps:?}");
    assert!(bench.strategy.gradient.iter().any(|g| *g != 0.0));
}

#[test]
fn passes_through_the_copies_of_a_prompt_change_experts_once() {
    let mut bench = set_up(DiffusionNftConfig { levels_per_video: 4, kl_weight: 0.0, ..small() });
    bench.model.boundary = Some(0.9);
    bench.step(0, &two()[..1], 0.1);
    // After 4 videos of 4 steps: 16 copies by the old policy, and 16 recorded.
    let is_low: Vec<bool> = bench.model.velocity_calls[16..].iter().map(|(timestep, _)| *timestep < 900.0).collect();
    assert_eq!(is_low.len(), 32);
    for pass in is_low.chunks(16) {
        assert!(pass.is_sorted() && !pass[0] && pass[15], "{pass:?}");
    }
}

#[test]
fn missing_and_nonfinite_scores_are_skipped() {
    let mut bench = set_up(small());
    for prompt in ["missing", "nan"] {
        let report = bench.step(0, &[sample(0, prompt), sample(1, "b")], 0.1);
        assert_eq!((report.skipped.len(), report.metrics["actor/samples"], report.applied), (1, 4.0, true));
    }
}

#[test]
fn the_known_first_frame_changes_the_loss() {
    let known = Tensor::full([2, 1, 1, 2], 0.7);
    // The same step, parameters and noise.
    let loss = |first_frame| step_under(&small(), &moved_adapter(), first_frame).0.metrics["actor/loss"];
    assert_eq!(loss(None), loss(None));
    assert_ne!(loss(Some(&known)), loss(None));
}

#[test]
fn state_carries_the_old_policy_on() {
    let config = || DiffusionNftConfig { old_policy: OldDecay::Ramp, data_weight: 0.5, ..small() };
    let mut whole = set_up(config());
    (200..204).for_each(|step| drop(whole.step(step, &two(), 0.1)));
    let mut halved = set_up(config());
    (200..202).for_each(|step| drop(halved.step(step, &two(), 0.1)));
    let (json, tensors) = (halved.algorithm.state(), halved.algorithm.tensors().unwrap());
    assert_eq!(tensors.len(), 1);
    let mut next = set_up(config());
    next.model.adapter = halved.model.adapter.clone();
    next.algorithm.load_state(&json).unwrap();
    next.algorithm.load_tensors(&tensors).unwrap();
    (202..204).for_each(|step| drop(next.step(step, &two(), 0.1)));
    assert_eq!(next.model.adapter, whole.model.adapter);
    let [ours, theirs] = [&next, &whole].map(|b| b.algorithm.tensors().unwrap());
    assert!(ours.iter().zip(&theirs).all(|((a, x), (b, y))| a == b && x.as_bytes() == y.as_bytes()));
}

#[test]
fn invalid_options_are_errors_with_their_key() {
    let facts = ScheduleFacts { shift: 5.0, boundary: None, trained: SigmaRange::ALL };
    let cases: [(&str, DiffusionNftConfig); 10] = [
        ("group_size", DiffusionNftConfig { group_size: 1, ..small() }),
        ("best_of", DiffusionNftConfig { best_of: Some(9), ..small() }),
        ("at_once", DiffusionNftConfig { at_once: 0, ..small() }),
        ("updates_per_step", DiffusionNftConfig { updates_per_step: 0, ..small() }),
        ("levels_per_video", DiffusionNftConfig { levels_per_video: 0, ..small() }),
        ("beta", DiffusionNftConfig { beta: 0.0, ..small() }),
        ("advantage_clip", DiffusionNftConfig { advantage_clip: f64::NAN, ..small() }),
        ("clip_range", DiffusionNftConfig { clip_range: -1.0, ..small() }),
        ("kl_weight", DiffusionNftConfig { kl_weight: -1.0, ..small() }),
        ("min_timestep_boundary", DiffusionNftConfig { min_timestep_boundary: 2.0, ..small() }),
    ];
    for (key, config) in cases {
        let message = config.plan(facts).map(drop).unwrap_err().to_string();
        assert!(message.contains(&format!("algo.{key}")), "{key}: {message}");
    }
    let mut bench = set_up(small());
    let fixed = Noise::new(1).with_fixed_latents(3);
    let message = bench.step_with(0, &two(), 0.1, &fixed).unwrap_err().to_string();
    assert!(message.contains("all the same"), "{message}");
}

/// Report and gradient of a step of a model with these parameters. The old policy, which generates the videos, has
/// those of [`MockDiffusion::new`].
fn step_under(config: &DiffusionNftConfig, adapter: &[f32], first_frame: Option<&Tensor>) -> (StepReport, Vec<f32>) {
    let mut bench = Bench::new(DiffusionNft::new(config.clone()), Sines::new());
    bench.model.adapter = adapter.to_vec();
    bench.model.first_frame = first_frame.cloned();
    let report = bench.step(0, &two(), 0.0);
    (report, bench.strategy.gradient)
}

/// Parameters at some distance from those of the policy that generates.
fn moved_adapter() -> Vec<f32> {
    let adapter = MockDiffusion::new().adapter;
    adapter.iter().zip(values(9, adapter.len())).map(|(a, d)| a + 0.02 * d).collect()
}

fn with_reward(weight: f64) -> RewardGradient {
    RewardGradient { weight, ..RewardGradient::default() }
}

#[test]
fn step_gradient_matches_finite_differences() {
    let known = Tensor::full([2, 1, 1, 2], 0.7);
    for first_frame in [None, Some(&known)] {
        for max_timestep_boundary in [1.0, 0.9] {
            let config = DiffusionNftConfig {
                // A loss without stop-gradient weights, so that finite differences apply.
                loss: Regression::Awm,
                matching: Matching::Uniform,
                clip_range: 1.0,
                kl_weight: 0.3,
                old_kl_weight: 0.2,
                data_weight: 0.4,
                reward_gradient: RewardGradient { weight: 0.6, max_timestep_boundary },
                ..small()
            };
            let at = moved_adapter();
            let (report, gradient) = step_under(&config, &at, first_frame);
            assert!(report.metrics["actor/data_loss"] > 0.0 && report.metrics["actor/prediction_unscored"] == 0.0);
            for seed in 0..4 {
                let direction = values(50 + seed, at.len());
                let value = |h: f32| {
                    let moved: Vec<f32> = at.iter().zip(&direction).map(|(a, d)| a + h * d).collect();
                    step_under(&config, &moved, first_frame).0.metrics["actor/loss"]
                };
                let h = 2e-3f32;
                let quotient = (value(h) - value(-h)) / f64::from(2.0 * h);
                let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
                assert!((quotient - slope).abs() < 2e-3 * (slope.abs() + 0.1), "{seed}: {quotient} or {slope}");
            }
        }
    }
}

#[test]
fn the_rewards_gradient_is_added_to_that_of_every_loss() {
    let at = moved_adapter();
    let gradient = |loss, weight| {
        let config = DiffusionNftConfig { loss, clip_range: 1.0, reward_gradient: with_reward(weight), ..small() };
        step_under(&config, &at, None).1
    };
    let added = |loss| -> Vec<f32> {
        gradient(loss, 0.6).iter().zip(gradient(loss, 0.0)).map(|(with, without)| with - without).collect()
    };
    let (nft, awm) = (added(Regression::Nft), added(Regression::Awm));
    assert!(nft.iter().any(|g| g.abs() > 1e-3));
    assert!(nft.iter().zip(&awm).all(|(a, b)| (a - b).abs() < 1e-5), "{nft:?} {awm:?}");
}

#[test]
fn terms_of_weight_zero_are_bit_exact_and_compute_nothing() {
    let (plain, zero) = (small(), RewardGradient { weight: 0.0, max_timestep_boundary: 0.0 });
    let (a, gradient) = step_under(&plain, &moved_adapter(), None);
    let other = DiffusionNftConfig { reward_gradient: zero, data_weight: 0.0, ..plain };
    let (b, theirs) = step_under(&other, &moved_adapter(), None);
    assert_eq!(gradient, theirs);
    let named = |report: &StepReport| {
        report.metrics.clone().into_iter().filter(|(name, _)| !name.starts_with("time/")).collect::<Vec<_>>()
    };
    assert_eq!(named(&a), named(&b));
    assert!(!a.metrics.keys().any(|name| name.contains("prediction") || name == "actor/data_loss"));
}

#[test]
fn the_rewards_gradient_needs_a_reward_that_has_one_and_a_level_to_act_at() {
    let message = |reward_gradient, differentiable| {
        let mut algorithm = DiffusionNft::new(DiffusionNftConfig { reward_gradient, ..small() });
        let reward = Sines { differentiable, ..Sines::new() };
        algorithm.check(&mut MockDiffusion::new(), Some(&reward)).map_err(|error| error.to_string())
    };
    message(with_reward(0.5), true).unwrap();
    message(with_reward(0.0), false).unwrap();
    let rigid = message(with_reward(0.5), false).unwrap_err();
    assert!(rigid.contains("algo.reward_gradient.weight") && rigid.contains("`sines` has no gradient"), "{rigid}");
    for weight in [-1.0, f64::NAN] {
        assert!(message(with_reward(weight), true).unwrap_err().contains("algo.reward_gradient.weight"));
    }
    let nowhere = message(RewardGradient { weight: 0.5, max_timestep_boundary: 0.1 }, true).unwrap_err();
    assert!(nowhere.contains("algo.reward_gradient.max_timestep_boundary"), "{nowhere}");
}

#[test]
fn the_rewards_gradient_alone_raises_the_score() {
    // With advantages clipped to almost 0, practically only the gradient of the reward is left.
    let config = DiffusionNftConfig {
        loss: Regression::Awm,
        advantage_clip: 1e-6,
        kl_weight: 0.0,
        reward_gradient: with_reward(1.0),
        ..small()
    };
    let gain = gain(|| set_up(config.clone()), 40);
    assert!(gain > 0.02, "{gain}");
}

#[test]
fn plan_counts_the_velocities_of_a_step() {
    for (kl_weight, data_weight, updates_per_step) in [(0.0, 0.0, 1), (0.5, 0.0, 1), (0.5, 0.5, 2)] {
        let config = DiffusionNftConfig {
            kl_weight,
            data_weight,
            updates_per_step,
            guidance_scale: 2.0.into(),
            reward_gradient: with_reward(0.1),
            ..small()
        };
        let mut bench = Bench::new(DiffusionNft::new(config.clone()), Sines::new());
        bench.model.prompt_weight = 0.2;
        bench.step(0, &[sample(0, "a")], 0.0);
        let planned = passes(serde_json::to_value(&config).unwrap().as_object().unwrap()).unwrap();
        assert_eq!(bench.model.velocity_calls.len(), planned.forward + planned.references());
        assert_eq!(bench.model.recorded_passes, planned.pulled);
        assert_eq!((planned.held(), planned.decoded()), (1, [4, 8 * updates_per_step]));
    }
}

fn train(ranks: usize, prompt: fn(u64) -> &'static str) -> Run {
    let runs = training::train(
        ranks,
        4,
        1e-2,
        |i| sample(i, prompt(i)),
        |ranks| {
            let strategy = Zero::new(ZeroOptions { stage: 2, ..ZeroOptions::default() }, ranks)?;
            let reward_gradient = RewardGradient { weight: 0.3, ..RewardGradient::default() };
            let config = DiffusionNftConfig { updates_per_step: 2, data_weight: 0.5, reward_gradient, ..small() };
            Ok(training::Rank { algorithm: DiffusionNft::new(config), strategy, reward: Sines::new() })
        },
    );
    agreed(runs)
}

#[test]
fn parameters_and_metrics_do_not_depend_on_the_number_of_ranks() {
    assert_same_on_all_ranks(train);
}

#[test]
fn the_weight_of_a_row_scales_its_gradient() {
    for data_weight in [0.0, 0.5] {
        training::assert_weight_scales_the_gradient(|samples| {
            let mut bench = set_up(DiffusionNftConfig { data_weight, kl_weight: 0.1, ..small() });
            (bench.step(0, samples, 0.0), bench.strategy.gradient)
        });
    }
}
