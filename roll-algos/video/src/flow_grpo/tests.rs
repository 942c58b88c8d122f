#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::slice::from_ref;

use roll_backends::strategy::{Zero, ZeroOptions};
use roll_core::*;
use roll_testing::diffusion::{Sines, sample, values};
use roll_testing::training::{self, Bench, Run, agreed};

use super::window::WindowKind;
use super::*;
use crate::policy_gradient::round::Explore;
use crate::policy_gradient::sde::SdeKind;
use crate::policy_gradient::test_training::{assert_same_on_all_ranks, gain, two};
use crate::scoring::Prepared;

/// The algorithm with a reward that is a value, and nothing more.
fn set_up(config: FlowGrpoConfig) -> Bench<FlowGrpo> {
    Bench::new(FlowGrpo::new(config), Sines { differentiable: false, ..Sines::new() })
}

fn small() -> FlowGrpoConfig {
    FlowGrpoConfig { group_size: 4, num_inference_steps: 6, ..FlowGrpoConfig::default() }
}

const KINDS: [SdeKind; 4] = [SdeKind::Sde, SdeKind::Wan, SdeKind::Dance, SdeKind::Cps];

#[test]
fn ratio_is_exactly_one_before_the_first_update() {
    for sde in KINDS {
        for at_once in [1, 3] {
            for guidance_scale in [1.0, 2.5] {
                let config = FlowGrpoConfig { sde, at_once, guidance_scale: guidance_scale.into(), ..small() };
                let mut bench = set_up(config);
                bench.model.prompt_weight = 0.2;
                let metrics = bench.step(0, &two(), 0.1).metrics;
                let found = ["actor/ratio", "actor/approx_kl", "actor/clip_fraction"].map(|name| metrics[name]);
                assert_eq!(found, [1.0, 0.0, 0.0], "{sde:?} {at_once}");
                assert!(metrics["actor/grad_norm"] > 0.0);
            }
        }
    }
    let later = set_up(FlowGrpoConfig { updates_per_step: 2, ..small() }).step(0, &two(), 0.1).metrics;
    assert_ne!(later["actor/ratio"], 1.0);
}

fn context<'a>(bench: &'a mut Bench<FlowGrpo>, samples: &'a [Sample], noise: &'a Noise) -> StepContext<'a> {
    StepContext {
        step: 0,
        samples,
        model: &mut bench.model,
        reward: Some(&mut bench.reward),
        strategy: &mut bench.strategy,
        learning_rate: 0.0,
        noise,
        progress: &Silent,
        want_videos: false,
    }
}

/// Videos and advantages of a round, generated with the current parameters of the model.
fn rollouts(bench: &mut Bench<FlowGrpo>, config: &FlowGrpoConfig, plan: &FlowGrpoPlan) -> Vec<Group<Vec<StepRecord>>> {
    let (samples, noise, shared) = (two(), Noise::new(11), config.shared());
    let (sampling, has_same_start, share_prefix) = (&plan.sampling, false, false);
    let options = RoundOptions { algorithm: NAME, sampling, shared: &shared, has_same_start, share_prefix };
    let mut prepared = Prepared::default();
    let mut context = context(bench, &samples, &noise);
    let mut round = RoundState::new(&mut context);
    let mut explorer = WindowExplorer::new(plan, &noise, 0);
    let mut groups = generate(&options, &mut prepared, &mut context, &mut explorer, &mut round).unwrap();
    set_advantages(&shared, &context, &mut groups, &mut round).unwrap();
    groups
}

/// Adds the gradient of the loss on `groups` under `parameters` in update `update`; returns the metrics and the
/// gradient.
fn gradient_under(
    bench: &mut Bench<FlowGrpo>,
    config: &FlowGrpoConfig,
    plan: &FlowGrpoPlan,
    groups: &mut [Group<Vec<StepRecord>>],
    parameters: &[f32],
    update: usize,
) -> (BTreeMap<String, f64>, Vec<f32>) {
    bench.model.adapter = parameters.to_vec();
    let noise = Noise::new(11);
    let mut context = context(bench, &[], &noise);
    let mut round = RoundState::new(&mut context);
    round.update = update;
    for group in groups {
        config.accumulate(&mut context, plan, group, 1.0, &mut round).unwrap();
    }
    context.strategy.step(context.model, 0.0, 1.0).unwrap();
    (round.report(&context, &config.shared()).unwrap().metrics, bench.strategy.gradient.clone())
}

#[test]
fn step_gradient_matches_finite_differences() {
    for loss in [PolicyLoss::Clip, PolicyLoss::Guard, PolicyLoss::Dppo] {
        let config = FlowGrpoConfig {
            loss,
            clip_range: 1.0,
            clip_range_high: Some(10.0),
            divergence_threshold: 1e9,
            guidance_scale: 2.0.into(),
            guidance_gradient: GuidanceGradient::Both,
            kl_weight: 0.3,
            ..small()
        };
        let mut bench = set_up(config.clone());
        bench.model.prompt_weight = 0.2;
        let plan = config.plan(bench.model.schedule()).unwrap();
        let mut groups = rollouts(&mut bench, &config, &plan);
        let videos = groups.iter().map(|group| group.videos.len()).sum::<usize>() as f64;
        // Away from the policy that sampled, so that ratios are not 1.
        let moved_by = values(9, bench.model.adapter.len());
        let base: Vec<f32> = bench.model.adapter.iter().zip(&moved_by).map(|(a, d)| a + 0.02 * d).collect();
        let (_, gradient) = gradient_under(&mut bench, &config, &plan, &mut groups, &base, 0);
        for seed in 0..4 {
            let direction = values(50 + seed, base.len());
            let mut value = |h: f32| {
                let moved: Vec<f32> = base.iter().zip(&direction).map(|(a, d)| a + h * d).collect();
                videos * gradient_under(&mut bench, &config, &plan, &mut groups, &moved, 0).0["actor/loss"]
            };
            let h = 2e-3f32;
            let quotient = (value(h) - value(-h)) / f64::from(2.0 * h);
            let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
            assert!((quotient - slope).abs() < 5e-3 * (slope.abs() + 0.1), "{loss:?} {seed}: {quotient} or {slope}");
        }
    }
}

#[test]
fn replayed_rollout_has_ratio_one() {
    for replay in [false, true] {
        let config = FlowGrpoConfig { replay, clip_range: 0.5, ..small() };
        let mut bench = set_up(config.clone());
        let plan = config.plan(bench.model.schedule()).unwrap();
        let mut groups = rollouts(&mut bench, &config, &plan);
        // Generation by another engine would have found other velocities.
        let records = groups.iter_mut().flat_map(|group| &mut group.records).flatten();
        for transition in records.flat_map(|record| &mut record.transitions) {
            let velocity: Vec<f32> = transition.velocity.f32s().unwrap().iter().map(|v| v * 1.01).collect();
            transition.velocity = Tensor::new(velocity, transition.velocity.shape()).unwrap();
        }
        let sampled = bench.model.adapter.clone();
        let (first, gradient) = gradient_under(&mut bench, &config, &plan, &mut groups, &sampled, 0);
        assert_eq!(first["actor/ratio"] == 1.0 && first["actor/approx_kl"] == 0.0, replay);
        assert!(gradient.iter().any(|g| *g != 0.0));
        // Later updates are compared with the first.
        let moved: Vec<f32> = sampled.iter().zip(values(9, sampled.len())).map(|(a, d)| a + 0.02 * d).collect();
        let (second, _) = gradient_under(&mut bench, &config, &plan, &mut groups, &moved, 1);
        assert_ne!(second["actor/ratio"], 1.0);
        let (again, _) = gradient_under(&mut bench, &config, &plan, &mut groups, &sampled, 1);
        assert_eq!(again["actor/ratio"] == 1.0, replay);
    }
    let metrics = |replay| set_up(FlowGrpoConfig { replay, ..small() }).step(0, &two(), 0.1).metrics;
    assert_eq!(metrics(false)["actor/grad_norm"], metrics(true)["actor/grad_norm"]);
}

#[test]
fn noise_limit_allows_steps_near_pure_noise() {
    let facts = ScheduleFacts { shift: 5.0, boundary: None, trained: SigmaRange::ALL };
    let plan = |noise_limit| FlowGrpoConfig { eta: 3.0, noise_limit, ..small() }.plan(facts).map(|plan| plan.steps);
    let message = plan(None).map(drop).unwrap_err().to_string();
    assert!(message.contains("algo.noise_limit"), "{message}");
    let steps = plan(Some(0.2)).unwrap();
    assert!(steps.iter().flatten().all(|step| step.std() <= 0.2 + 1e-12));
}

#[test]
fn data_loss_is_added_with_its_gradient() {
    let step = |data_weight: f64, adapter: &[f32]| {
        let mut bench = set_up(FlowGrpoConfig { data_weight, ..small() });
        bench.model.adapter = adapter.to_vec();
        let metrics = bench.step(0, &two(), 0.0).metrics;
        (metrics, bench.strategy.gradient)
    };
    let at = set_up(small()).model.adapter;
    let ((without, off), (with, on)) = (step(0.0, &at), step(0.5, &at));
    assert!(!without.contains_key("actor/data_loss") && without["actor/score"] == with["actor/score"]);
    assert!((with["actor/loss"] - without["actor/loss"] - 0.5 * with["actor/data_loss"]).abs() < 1e-9);
    for seed in 0..4 {
        let direction = values(50 + seed, at.len());
        let loss = |h: f32| {
            let moved: Vec<f32> = at.iter().zip(&direction).map(|(a, d)| a + h * d).collect();
            step(0.5, &moved).0["actor/data_loss"]
        };
        let h = 2e-3f32;
        let quotient = 0.5 * (loss(h) - loss(-h)) / f64::from(2.0 * h);
        let slope: f64 = on.iter().zip(&off).zip(&direction).map(|((a, b), d)| f64::from((a - b) * d)).sum();
        assert!((quotient - slope).abs() < 2e-3 * (slope.abs() + 0.1), "{seed}: {quotient} or {slope}");
    }
    // A clip whose videos teach nothing is not trained on either.
    let mut bench = set_up(FlowGrpoConfig { data_weight: 0.5, ..small() });
    bench.step(0, &[sample(0, "a"), sample(1, "missing")], 0.0);
    let gradient = bench.strategy.gradient.clone();
    bench.step(0, &[sample(0, "a")], 0.0);
    assert_eq!(gradient, bench.strategy.gradient);
}

#[test]
fn plan_counts_the_velocities_of_a_step() {
    for (kl_weight, data_weight, updates_per_step, share_prefix) in
        [(0.0, 0.0, 1, false), (0.5, 0.0, 1, false), (0.5, 0.5, 2, false), (0.5, 0.0, 1, true)]
    {
        let config = FlowGrpoConfig {
            same_latent: share_prefix,
            share_prefix,
            window_kind: WindowKind::Fixed,
            window_range: Some([2, 4]),
            kl_weight,
            data_weight,
            updates_per_step,
            guidance_scale: 2.0.into(),
            guidance_gradient: GuidanceGradient::Both,
            ..small()
        };
        let mut bench = set_up(config.clone());
        bench.model.prompt_weight = 0.2;
        bench.step(0, &[sample(0, "a")], 0.0);
        let planned = passes(serde_json::to_value(&config).unwrap().as_object().unwrap()).unwrap();
        assert_eq!(bench.model.velocity_calls.len(), planned.forward + planned.references());
        assert_eq!(bench.model.recorded_passes, planned.pulled);
        assert_eq!((planned.held(), planned.decoded()), (2, [4, 0]));
    }
}

#[test]
fn a_reward_without_a_gradient_rises_with_every_loss_and_kind_of_noise() {
    let cases = [
        (PolicyLoss::Clip, SdeKind::Sde, 0.7),
        (PolicyLoss::Guard, SdeKind::Wan, 0.0),
        (PolicyLoss::Dppo, SdeKind::Dance, 0.7),
        (PolicyLoss::Clip, SdeKind::Cps, 0.8),
    ];
    for (loss, sde, eta) in cases {
        let config = FlowGrpoConfig { loss, sde, eta, clip_range: 0.2, group_size: 8, kl_weight: 0.0, ..small() };
        let gain = gain(|| set_up(config.clone()), 40);
        assert!(gain > 0.02, "{loss:?} {sde:?}: {gain}");
    }
}

#[test]
fn videos_of_a_prompt_share_their_window() {
    let config = FlowGrpoConfig { window: 1, window_range: Some([0, 4]), ..small() };
    let bench = set_up(config.clone());
    let plan = config.plan(bench.model.schedule()).unwrap();
    let noise = Noise::new(11);
    let mut explorer = WindowExplorer::new(&plan, &noise, 3);
    let x = Tensor::zeros([2, 2, 1, 2]);
    let mut window = |row: u64, keys: &[u64]| -> Vec<usize> {
        explorer.begin(row, keys, Vec::new());
        (0..6).filter(|i| explorer.step(*i, from_ref(&x), from_ref(&x)).unwrap().is_some()).collect()
    };
    let own = window(7, &[1]);
    assert!(own.len() == 1 && (0..20).all(|key| window(7, &[key]) == own));
    assert!((0..20).any(|row| window(row, &[1]) != own));
}

#[test]
fn known_first_frame_is_in_no_mean_and_no_log_prob() {
    let mut bench = set_up(small());
    bench.model.first_frame = Some(Tensor::full([2, 1, 1, 2], 0.7));
    let metrics = bench.step(0, &two(), 0.1).metrics;
    assert_eq!((metrics["actor/ratio"], metrics["actor/approx_kl"]), (1.0, 0.0));
    assert!(metrics["actor/grad_norm"] > 0.0);
}

#[test]
fn batches_without_an_advantage_cost_no_backward_pass() {
    let mut bench = set_up(FlowGrpoConfig { best_of: Some(2), ..small() });
    let report = bench.step(0, &two(), 0.1);
    // Two of four videos of two prompts, at two steps.
    assert_eq!((bench.model.recorded_passes, report.metrics["actor/trained"]), (8, 4.0));
    let mut bench = set_up(small());
    bench.reward.on_missing = OnMissing::Value(0.5);
    assert!(!bench.step(0, &[sample(0, "missing")], 0.1).applied && bench.model.recorded_passes == 0);
}

#[test]
fn step_weights_keep_the_size_of_the_gradient_where_there_is_one_step() {
    use StepWeight::{Even, Noise, Rescaled};
    let at = |step_weight| {
        let config = FlowGrpoConfig { step_weight, window: 1, window_kind: WindowKind::Fixed, ..small() };
        set_up(config).step(0, &two(), 0.0).metrics["actor/grad_norm"]
    };
    let [even, rescaled, noise] = [Even, Rescaled, Noise].map(at);
    assert!((even / rescaled - 1.0).abs() < 1e-6 && (even / noise - 1.0).abs() < 1e-6, "{even} {rescaled} {noise}");
    let random = |step_weight| {
        let config = FlowGrpoConfig { step_weight, window: 3, ..small() };
        set_up(config).step(0, &two(), 0.0).metrics["actor/grad_norm"]
    };
    let [even, rescaled, noise] = [Even, Rescaled, Noise].map(random);
    assert!(even != rescaled && even != noise && rescaled != noise, "{even} {rescaled} {noise}");
}

#[test]
fn videos_of_a_step_pass_through_one_expert_after_the_other_and_keep_their_bits() {
    for share_prefix in [false, true] {
        let config = FlowGrpoConfig {
            share_prefix,
            same_latent: share_prefix,
            window: 2,
            window_range: Some([2, 4]),
            at_once: 3,
            ..small()
        };
        let step = |boundary| {
            let mut bench = set_up(config.clone());
            bench.model.boundary = boundary;
            let metrics = bench.step(0, &two(), 0.1).metrics;
            let metrics: Vec<_> = metrics.into_iter().filter(|(name, _)| !name.starts_with("time/")).collect();
            (metrics, bench.strategy.gradient, bench.model)
        };
        let whole = step(None);
        // Timesteps of 6 steps with shift 5: 1000, 962, 909, 833, 714, 500.
        for boundary in [0.99, 0.93, 0.87, 0.6] {
            let (metrics, gradient, model) = step(Some(boundary));
            assert_eq!((&metrics, &gradient), (&whole.0, &whole.1), "{boundary}");
            let rollouts = model.velocity_calls.len() - 2 * model.recorded_passes;
            let is_low: Vec<bool> =
                model.velocity_calls[..rollouts].iter().map(|(t, _)| *t < 1000.0 * boundary).collect();
            assert!(is_low.is_sorted() && is_low[rollouts - 1] && !is_low[0], "{boundary}: {is_low:?}");
        }
    }
}

#[test]
fn a_shared_prefix_is_computed_once_and_changes_no_number() {
    let known = Tensor::full([2, 1, 1, 2], 0.7);
    for (window_kind, at_once, guidance_scale, first_frame) in [
        (WindowKind::Fixed, 1, 1.0, None),
        (WindowKind::Fixed, 3, 2.5, Some(&known)),
        (WindowKind::Random, 4, 1.0, Some(&known)),
        (WindowKind::Random, 1, 2.5, None),
    ] {
        let run = |share_prefix| {
            let mut bench = set_up(FlowGrpoConfig {
                same_latent: true,
                share_prefix,
                window: 1,
                window_kind,
                window_range: Some([2, 4]),
                at_once,
                guidance_scale: guidance_scale.into(),
                updates_per_step: 2,
                ..small()
            });
            bench.model.prompt_weight = 0.2;
            bench.model.first_frame = first_frame.cloned();
            let mut metrics = bench.step(0, &two(), 0.1).metrics;
            metrics.retain(|name, _| !name.starts_with("time/"));
            (metrics, bench.strategy.gradient, bench.model.adapter, bench.model.velocity_calls.len())
        };
        let (shared, apart) = (run(true), run(false));
        assert!(shared.0["actor/grad_norm"] > 0.0);
        assert_eq!((&shared.0, &shared.1, &shared.2), (&apart.0, &apart.1, &apart.2));
        // Two prompts; three of four videos of each are spared two steps, or more where the window lies later.
        let velocities = if guidance_scale > 1.0 { 2 } else { 1 };
        let saved = (apart.3 - shared.3) / velocities;
        match window_kind {
            WindowKind::Fixed => assert_eq!(saved, 2 * 3 * 2),
            _ => assert!(saved >= 2 * 3 * 2 && saved % 3 == 0, "{saved}"),
        }
    }
}

#[test]
fn a_prefix_that_cannot_be_shared_is_refused_with_both_keys() {
    let facts = ScheduleFacts { shift: 5.0, boundary: None, trained: SigmaRange::ALL };
    let sharing = || FlowGrpoConfig { same_latent: true, share_prefix: true, ..small() };
    sharing().plan(facts).unwrap();
    for (other, config) in [
        ("algo.same_latent", FlowGrpoConfig { same_latent: false, ..sharing() }),
        ("algo.window_kind", FlowGrpoConfig { window_kind: WindowKind::Fixed, ..sharing() }),
        ("algo.window_range", FlowGrpoConfig { window: 3, ..sharing() }),
    ] {
        let message = config.plan(facts).map(drop).unwrap_err().to_string();
        assert!(message.contains("algo.share_prefix") && message.contains(other), "{message}");
    }
    let later = FlowGrpoConfig { window_kind: WindowKind::Fixed, window_range: Some([1, 2]), ..sharing() };
    later.plan(facts).unwrap();
}

#[test]
fn invalid_options_are_errors_with_their_key() {
    let facts = ScheduleFacts { shift: 5.0, boundary: None, trained: SigmaRange::ALL };
    let cases: [(&str, FlowGrpoConfig); 17] = [
        ("group_size", FlowGrpoConfig { group_size: 1, ..small() }),
        ("best_of", FlowGrpoConfig { best_of: Some(1), ..small() }),
        ("at_once", FlowGrpoConfig { at_once: 0, ..small() }),
        ("updates_per_step", FlowGrpoConfig { updates_per_step: 0, ..small() }),
        ("eta", FlowGrpoConfig { eta: f64::NAN, ..small() }),
        ("eta", FlowGrpoConfig { eta: 0.0, ..small() }),
        ("eta", FlowGrpoConfig { eta: 3.0, ..small() }),
        ("eta", FlowGrpoConfig { sde: SdeKind::Cps, eta: 1.5, ..small() }),
        ("noise_limit", FlowGrpoConfig { noise_limit: Some(0.0), ..small() }),
        ("noise_limit", FlowGrpoConfig { noise_limit: Some(f64::NAN), ..small() }),
        ("window", FlowGrpoConfig { window: 0, ..small() }),
        ("window_range", FlowGrpoConfig { window_range: Some([0, 5]), ..small() }),
        ("num_inference_steps", FlowGrpoConfig { num_inference_steps: 1, ..small() }),
        ("clip_range", FlowGrpoConfig { clip_range: 0.0, ..small() }),
        ("divergence_threshold", FlowGrpoConfig { divergence_threshold: -1.0, ..small() }),
        ("kl_weight", FlowGrpoConfig { kl_weight: f64::INFINITY, ..small() }),
        ("advantage_clip", FlowGrpoConfig { advantage_clip: 0.0, ..small() }),
    ];
    for (key, config) in cases {
        let message = config.plan(facts).map(drop).unwrap_err().to_string();
        assert!(message.contains(&format!("algo.{key}")), "{key}: {message}");
    }
}

fn train(share_prefix: bool, ranks: usize, prompt: fn(u64) -> &'static str) -> Run {
    let runs = training::train(
        ranks,
        4,
        1e-3,
        |i| sample(i, prompt(i)),
        |ranks| {
            let strategy = Zero::new(ZeroOptions { stage: 2, ..ZeroOptions::default() }, ranks)?;
            let config = FlowGrpoConfig {
                same_latent: share_prefix,
                share_prefix,
                updates_per_step: 2,
                step_weight: StepWeight::Rescaled,
                clip_range: 0.2,
                data_weight: 0.5,
                ..small()
            };
            Ok(training::Rank { algorithm: FlowGrpo::new(config), strategy, reward: Sines::new() })
        },
    );
    agreed(runs)
}

#[test]
fn parameters_and_metrics_do_not_depend_on_the_number_of_ranks() {
    for share_prefix in [false, true] {
        assert_same_on_all_ranks(|ranks, prompt| train(share_prefix, ranks, prompt));
    }
}

#[test]
fn the_weight_of_a_row_scales_its_gradient() {
    for data_weight in [0.0, 0.5] {
        training::assert_weight_scales_the_gradient(|samples| {
            let mut bench = set_up(FlowGrpoConfig { data_weight, kl_weight: 0.1, ..small() });
            (bench.step(0, samples, 0.0), bench.strategy.gradient)
        });
    }
}
