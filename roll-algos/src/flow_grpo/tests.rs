#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::slice::from_ref;
use std::time::Duration;

use roll_backends::strategy::{Single, Zero, ZeroOptions};
use roll_core::*;
use roll_testing::diffusion::{Descent, MockDiffusion, Sines, sample, values};

use super::window::WindowKind;
use super::*;
use crate::policy_gradient::round::Explore;
use crate::policy_gradient::sde::SdeKind;

/// One run of the algorithm on mocks.
struct Bench {
    algorithm: FlowGrpo,
    model: MockDiffusion,
    reward: Sines,
    strategy: Descent,
}

impl Bench {
    fn new(config: FlowGrpoConfig) -> Self {
        let mut bench = Self {
            algorithm: FlowGrpo::new(config),
            model: MockDiffusion::new(),
            // A value, and nothing more.
            reward: Sines { differentiable: false, ..Sines::new() },
            strategy: Descent::default(),
        };
        bench.algorithm.check(&mut bench.model, Some(&bench.reward)).unwrap();
        bench
    }

    fn step_with(&mut self, step: u64, samples: &[Sample], learning_rate: f64, noise: &Noise) -> Result<StepReport> {
        self.algorithm.step(&mut StepContext {
            step,
            samples,
            model: &mut self.model,
            reward: Some(&mut self.reward),
            strategy: &mut self.strategy,
            learning_rate,
            noise,
            progress: &Silent,
            want_videos: false,
        })
    }

    fn step(&mut self, step: u64, samples: &[Sample], learning_rate: f64) -> StepReport {
        self.step_with(step, samples, learning_rate, &Noise::new(11)).unwrap()
    }
}

fn small() -> FlowGrpoConfig {
    FlowGrpoConfig { group_size: 4, num_inference_steps: 6, ..FlowGrpoConfig::default() }
}

fn two() -> [Sample; 2] {
    [sample(0, "a"), sample(1, "b")]
}

const KINDS: [SdeKind; 4] = [SdeKind::Sde, SdeKind::Wan, SdeKind::Dance, SdeKind::Cps];

#[test]
fn before_the_first_update_the_ratio_is_exactly_one() {
    for sde in KINDS {
        for at_once in [1, 3] {
            for guidance_scale in [1.0, 2.5] {
                let config = FlowGrpoConfig { sde, at_once, guidance_scale: guidance_scale.into(), ..small() };
                let mut bench = Bench::new(config);
                bench.model.prompted = 0.2;
                let metrics = bench.step(0, &two(), 0.1).metrics;
                let found = ["actor/ratio", "actor/approx_kl", "actor/clip_fraction"].map(|name| metrics[name]);
                assert_eq!(found, [1.0, 0.0, 0.0], "{sde:?} {at_once}");
                assert!(metrics["actor/grad_norm"] > 0.0);
            }
        }
    }
    let later = Bench::new(FlowGrpoConfig { updates_per_step: 2, ..small() }).step(0, &two(), 0.1).metrics;
    assert_ne!(later["actor/ratio"], 1.0);
}

/// Adds the gradient of the loss on `groups` under `parameters`; gives the sum of the losses and the gradient.
fn climb(bench: &mut Bench, plan: &Plan, groups: &[Group<Vec<Taken>>], parameters: &[f32]) -> (f64, Vec<f32>) {
    bench.model.adapter = parameters.to_vec();
    let (mut tally, mut watch, noise) = (Tally::default(), Stopwatch::new(&Silent, &PHASES), Noise::new(11));
    let mut context = StepContext {
        step: 0,
        samples: &[],
        model: &mut bench.model,
        reward: None,
        strategy: &mut bench.strategy,
        learning_rate: 0.0,
        noise: &noise,
        progress: &Silent,
        want_videos: false,
    };
    for group in groups {
        bench.algorithm.climb(&mut context, plan, group, None, 0, &mut watch, &mut tally).unwrap();
    }
    context.strategy.step(context.model, 0.0, 1.0).unwrap();
    let videos = groups.iter().map(|group| group.videos.len()).sum::<usize>() as f64;
    let loss = tally.report(0.0, None, BTreeMap::new()).metrics["actor/loss"];
    (loss * videos, bench.strategy.gradient.clone())
}

#[test]
fn the_gradient_is_that_of_the_loss_on_the_same_rollouts() {
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
        let mut bench = Bench::new(config.clone());
        bench.model.prompted = 0.2;
        let plan = config.plan(bench.model.schedule()).unwrap();
        let (samples, noise) = (two(), Noise::new(11));
        let (mut tally, mut watch) = (Tally::default(), Stopwatch::new(&Silent, &PHASES));
        let options = RoundOptions {
            algorithm: NAME,
            sampling: &plan.sampling,
            group_size: 4,
            at_once: 1,
            same_start: false,
            negative_prompt: "",
            reference: config.reference,
            frame_rate: config.frame_rate,
        };
        let mut context = StepContext {
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
        let mut windowed = Windowed::new(&plan, &noise, 0);
        let prepared = &mut bench.algorithm.prepared;
        let mut groups = generate(&options, prepared, &mut context, &mut windowed, &mut watch, &mut tally).unwrap();
        judge(config.judgement(), &context, &mut groups, &mut tally).unwrap();
        // Away from the policy that sampled, so that ratios are not 1.
        let moved_by = values(9, bench.model.adapter.len());
        let base: Vec<f32> = bench.model.adapter.iter().zip(&moved_by).map(|(a, d)| a + 0.02 * d).collect();
        let (_, gradient) = climb(&mut bench, &plan, &groups, &base);
        for seed in 0..4 {
            let direction = values(50 + seed, base.len());
            let mut value = |h: f32| {
                let moved: Vec<f32> = base.iter().zip(&direction).map(|(a, d)| a + h * d).collect();
                climb(&mut bench, &plan, &groups, &moved).0
            };
            let h = 2e-3f32;
            let quotient = (value(h) - value(-h)) / f64::from(2.0 * h);
            let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
            assert!((quotient - slope).abs() < 5e-3 * (slope.abs() + 0.1), "{loss:?} {seed}: {quotient} or {slope}");
        }
    }
}

/// The mean score of many videos by these parameters, the same noises each time.
fn mean_score(config: &FlowGrpoConfig, adapter: &[f32]) -> f64 {
    let mut bench = Bench::new(config.clone());
    bench.model.adapter = adapter.to_vec();
    bench.algorithm.check(&mut bench.model, Some(&bench.reward)).unwrap();
    let steps = 1000..1020;
    let count = steps.clone().count() as f64;
    steps.map(|step| bench.step(step, &two(), 0.0).metrics["actor/score"]).sum::<f64>() / count
}

/// The gain in that score by training with AdamW.
fn gain(config: &FlowGrpoConfig, steps: u64) -> f64 {
    let (mut bench, mut strategy) = (Bench::new(config.clone()), Single::default());
    strategy.attach(&mut bench.model, &OptimizerConfig::default()).unwrap();
    let before = mean_score(config, &bench.model.adapter);
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
    mean_score(config, &bench.model.adapter) - before
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
        let gain = gain(&config, 40);
        assert!(gain > 0.02, "{loss:?} {sde:?}: {gain}");
    }
}

#[test]
fn the_window_is_one_for_a_prompt_whichever_of_its_videos() {
    let config = FlowGrpoConfig { window: 1, window_range: Some([0, 4]), ..small() };
    let bench = Bench::new(config.clone());
    let plan = config.plan(bench.model.schedule()).unwrap();
    let noise = Noise::new(11);
    let mut windowed = Windowed::new(&plan, &noise, 3);
    let x = Tensor::zeros([2, 2, 1, 2]);
    let mut window = |row: u64, keys: &[u64]| -> Vec<usize> {
        windowed.begin(row, keys);
        (0..6).filter(|i| windowed.step(*i, from_ref(&x), from_ref(&x)).unwrap().is_some()).collect()
    };
    let own = window(7, &[1]);
    assert!(own.len() == 1 && (0..20).all(|key| window(7, &[key]) == own));
    assert!((0..20).any(|row| window(row, &[1]) != own));
}

#[test]
fn the_known_first_frame_is_in_no_mean_and_no_probability() {
    let mut bench = Bench::new(small());
    bench.model.first_frame = Some(Tensor::full([2, 1, 1, 2], 0.7));
    let metrics = bench.step(0, &two(), 0.1).metrics;
    assert_eq!((metrics["actor/ratio"], metrics["actor/approx_kl"]), (1.0, 0.0));
    assert!(metrics["actor/grad_norm"] > 0.0);
}

#[test]
fn videos_side_by_side_without_an_advantage_cost_no_backward_pass() {
    let mut bench = Bench::new(FlowGrpoConfig { best_of: Some(2), ..small() });
    let report = bench.step(0, &two(), 0.1);
    // Two of four videos of two prompts, at two steps.
    assert_eq!((bench.model.recorded, report.metrics["actor/trained"]), (8, 4.0));
    let mut bench = Bench::new(small());
    bench.reward.on_missing = OnMissing::Value(0.5);
    assert!(!bench.step(0, &[sample(0, "missing")], 0.1).applied && bench.model.recorded == 0);
}

#[test]
fn rescaling_keeps_the_size_of_the_gradient_where_there_is_one_step() {
    let at = |rescale| {
        let config = FlowGrpoConfig { rescale, window: 1, window_kind: WindowKind::Fixed, ..small() };
        Bench::new(config).step(0, &two(), 0.0).metrics["actor/grad_norm"]
    };
    let (plain, rescaled) = (at(false), at(true));
    assert!((plain / rescaled - 1.0).abs() < 1e-6, "{plain} {rescaled}");
    let random = |rescale| {
        let config = FlowGrpoConfig { rescale, window: 3, ..small() };
        Bench::new(config).step(0, &two(), 0.0).metrics["actor/grad_norm"]
    };
    assert_ne!(random(false), random(true));
}

#[test]
fn senseless_options_are_errors_that_name_their_key() {
    let facts = ScheduleFacts { shift: 5.0, boundary: None, trained: SigmaRange::ALL };
    let cases: [(&str, FlowGrpoConfig); 15] = [
        ("group_size", FlowGrpoConfig { group_size: 1, ..small() }),
        ("best_of", FlowGrpoConfig { best_of: Some(1), ..small() }),
        ("at_once", FlowGrpoConfig { at_once: 0, ..small() }),
        ("updates_per_step", FlowGrpoConfig { updates_per_step: 0, ..small() }),
        ("eta", FlowGrpoConfig { eta: f64::NAN, ..small() }),
        ("eta", FlowGrpoConfig { eta: 0.0, ..small() }),
        ("eta", FlowGrpoConfig { eta: 3.0, ..small() }),
        ("eta", FlowGrpoConfig { sde: SdeKind::Cps, eta: 1.5, ..small() }),
        ("window", FlowGrpoConfig { window: 0, ..small() }),
        ("window_range", FlowGrpoConfig { window_range: Some([0, 5]), ..small() }),
        ("window_range", FlowGrpoConfig { num_inference_steps: 1, ..small() }),
        ("clip_range", FlowGrpoConfig { clip_range: 0.0, ..small() }),
        ("divergence_threshold", FlowGrpoConfig { divergence_threshold: -1.0, ..small() }),
        ("kl_weight", FlowGrpoConfig { kl_weight: f64::INFINITY, ..small() }),
        ("advantage_clip", FlowGrpoConfig { advantage_clip: 0.0, ..small() }),
    ];
    for (key, config) in cases {
        let told = config.plan(facts).map(drop).unwrap_err().to_string();
        assert!(told.contains(&format!("algo.{key}")), "{key}: {told}");
    }
}

/// Parameters at the end, and the metrics of each step without times.
type Run = (Vec<f32>, Vec<BTreeMap<String, f64>>);

fn train(ranks: usize, prompt: fn(u64) -> &'static str) -> Run {
    const BATCH: u64 = 4;
    let results = ThreadRanks::run(ranks, Duration::from_secs(60), |ranks| {
        let (rank, world) = (ranks.rank().0 as u64, ranks.world_size() as u64);
        let mut strategy = Zero::new(ZeroOptions { stage: 2, ..ZeroOptions::default() }, ranks)?;
        let (mut model, mut reward) = (MockDiffusion::new(), Sines::new());
        let config = FlowGrpoConfig { updates_per_step: 2, rescale: true, clip_range: 0.2, ..small() };
        let mut algorithm = FlowGrpo::new(config);
        strategy.attach(&mut model, &OptimizerConfig::default())?;
        let mut metrics = Vec::new();
        for step in 0..4 {
            let all: Vec<Sample> = (step * BATCH..(step + 1) * BATCH).map(|i| sample(i, prompt(i))).collect();
            let own = (rank * BATCH / world) as usize..((rank + 1) * BATCH / world) as usize;
            let report = algorithm.step(&mut StepContext {
                step,
                samples: &all[own],
                model: &mut model,
                reward: Some(&mut reward),
                strategy: &mut strategy,
                learning_rate: 1e-3,
                noise: &Noise::new(11),
                progress: &Silent,
                want_videos: false,
            })?;
            metrics.push(report.metrics.into_iter().filter(|(name, _)| !name.starts_with("time/")).collect());
        }
        Ok((model.adapter, metrics))
    });
    let mut results = results.into_iter().map(Result::unwrap);
    let first: Run = results.next().unwrap();
    assert!(results.all(|other: Run| other == first));
    first
}

#[test]
fn parameters_and_metrics_do_not_depend_on_the_number_of_ranks() {
    let plain = |_| "a person";
    // The second rank of two has nothing to train on in the first step, and one prompt less in the second.
    let some_missing = |i| if [2, 3, 5].contains(&i) { "missing" } else { "a person" };
    for prompt in [plain as fn(u64) -> &'static str, some_missing] {
        let (parameters, metrics) = train(1, prompt);
        for ranks in [2, 4] {
            let (theirs, their_metrics) = train(ranks, prompt);
            let scale = parameters.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(parameters.iter().zip(&theirs).all(|(a, b)| (a - b).abs() <= 1e-5 * scale));
            for (ours, theirs) in metrics.iter().zip(&their_metrics) {
                assert!(ours.keys().eq(theirs.keys()));
                for (name, value) in ours {
                    assert!((value - theirs[name]).abs() <= 1e-4 * value.abs().max(1.0), "{name}");
                }
            }
        }
    }
}
