#![allow(clippy::unwrap_used)]

use roll_core::*;
use roll_step::update::OnNonfinite;
use roll_testing::diffusion::{Descent, MockDiffusion, sample, values};
use roll_testing::training;

use super::*;

/// One run of the algorithm on mocks.
struct Bench {
    algorithm: FlowMatching,
    model: MockDiffusion,
    strategy: Descent,
    videos: bool,
}

impl Bench {
    fn new(config: FlowMatchingConfig) -> Self {
        Self {
            algorithm: FlowMatching::new(config),
            model: MockDiffusion::new(),
            strategy: Descent::default(),
            videos: false,
        }
    }

    fn step_at(&mut self, step: u64, samples: &[Sample], learning_rate: f64) -> Result<StepReport> {
        self.algorithm.step(&mut StepContext {
            step,
            samples,
            model: &mut self.model,
            reward: None,
            strategy: &mut self.strategy,
            learning_rate,
            noise: &Noise::new(11),
            progress: &Silent,
            want_videos: self.videos,
        })
    }

    fn step(&mut self, samples: &[Sample]) -> StepReport {
        self.step_at(0, samples, 0.0).unwrap()
    }

    fn loss(&mut self, samples: &[Sample]) -> f64 {
        self.step(samples).metrics["actor/loss"]
    }

    /// Compares the gradient of an update with central differences of the loss, in random directions.
    fn check_gradient(&mut self, samples: &[Sample]) {
        self.step(samples);
        let gradient = self.strategy.gradient.clone();
        let at = self.model.adapter.clone();
        for seed in 0..5 {
            let direction = values(50 + seed, at.len());
            let mut moved = |h: f32| {
                self.model.adapter = at.iter().zip(&direction).map(|(a, d)| a + h * d).collect();
                self.loss(samples)
            };
            let h = 2e-3f32;
            let quotient = (moved(h) - moved(-h)) / f64::from(2.0 * h);
            let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
            assert!((quotient - slope).abs() < 1e-3 * (slope.abs() + 0.05), "direction {seed}: {quotient} or {slope}");
        }
        self.model.adapter = at;
    }

    fn timesteps(&self) -> Vec<f64> {
        self.model.velocity_calls.iter().map(|(timestep, _)| *timestep).collect()
    }
}

fn two() -> [Sample; 2] {
    [sample(0, "a"), sample(1, "b")]
}

fn draws(draws_per_sample: usize) -> FlowMatchingConfig {
    FlowMatchingConfig { draws_per_sample, ..FlowMatchingConfig::default() }
}

#[test]
fn step_gradient_matches_finite_differences() {
    Bench::new(FlowMatchingConfig::default()).check_gradient(&two());
    Bench::new(draws(3)).check_gradient(&two());
    Bench::new(FlowMatchingConfig { loss_weighting: LossWeighting::Bell, ..draws(2) }).check_gradient(&two());
}

#[test]
fn batched_draws_match_single_draws() {
    let gradient = |draws_at_once| {
        let mut bench = Bench::new(FlowMatchingConfig { draws_at_once, ..draws(3) });
        bench.step(&two());
        bench.strategy.gradient
    };
    let alone = gradient(1);
    for together in [2, 4, 100] {
        let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
        assert!(gradient(together).iter().zip(&alone).all(close), "{together}");
    }
}

#[test]
fn a_known_first_frame_is_given_and_does_not_count() {
    let mut bench = Bench::new(draws(2));
    let free = bench.loss(&two());
    bench.model.first_frame = Some(Tensor::full([2, 1, 1, 2], 0.7));
    bench = Bench { algorithm: FlowMatching::new(draws(2)), ..bench };
    assert_ne!(bench.loss(&two()), free);
    bench.check_gradient(&two());
}

#[test]
fn a_mask_chooses_what_counts() {
    let mask = |values: Vec<f32>| Some(Tensor::new(values, [1, 1, 2]).unwrap());
    let masked = |left, right| two().map(|sample| Sample { mask: mask(vec![left, right]), ..sample });
    let loss = |samples: &[Sample]| Bench::new(draws(2)).loss(samples);
    let [left, right] = [masked(1.0, 0.0), masked(0.0, 1.0)].map(|samples| loss(&samples));
    let all = loss(&two());
    assert!(left != right && (0.5 * (left + right) - all).abs() < 1e-6, "{left} and {right}, {all}");
    assert!((loss(&masked(0.5, 0.5)) - all).abs() < 1e-6);
    Bench::new(draws(2)).check_gradient(&masked(1.0, 0.25));

    let mut bench = Bench::new(draws(2));
    let [black, _] = masked(0.0, 0.0);
    let [_, other] = two();
    let report = bench.step(&[black, other.clone()]);
    assert_eq!([report.metrics["actor/samples"], report.metrics["actor/skipped"]], [1.0, 1.0]);
    assert!(report.skipped[0].1.contains("the mask of the clip is black"), "{:?}", report.skipped);
    assert_eq!(bench.strategy.gradient, {
        let mut alone = Bench::new(draws(2));
        alone.step(&[other]);
        alone.strategy.gradient
    });
}

#[test]
fn every_draw_stays_with_the_expert_under_training() {
    let (high, low) = ([0.9, 1.0], [0.0, 0.9]);
    for [from, to] in [high, low] {
        let mut bench = Bench::new(draws(64));
        bench.model.boundary = Some(0.9);
        bench.model.trained = SigmaRange { low: Sigma(from), high: Sigma(to) };
        bench.step(&two());
        let is_low = |t: &f64| Timestep(*t).uses_low_noise(0.9);
        assert!(bench.timesteps().iter().all(|t| is_low(t) == (to == 0.9)));
        assert_eq!(bench.timesteps().len(), 128);
    }
}

#[test]
fn boundaries_narrow_the_range_and_must_meet_the_trained_expert() {
    let bounded = |min, max| FlowMatchingConfig { min_timestep_boundary: min, max_timestep_boundary: max, ..draws(32) };
    let mut bench = Bench::new(bounded(Some(0.2), Some(0.3)));
    bench.step(&two());
    assert!(bench.timesteps().iter().all(|t| (200.0..300.0).contains(t)));
    assert!(bench.step(&two()).metrics.contains_key("loss/0.225-0.250"));

    bench.model.trained = SigmaRange { low: Sigma(0.9), high: Sigma(1.0) };
    let error = bench.algorithm.check(&mut bench.model, None).unwrap_err().to_string();
    assert!(error.contains("no noise level is left") && error.contains("0.9 to 1"), "{error}");
}

#[test]
fn draws_are_spread_over_the_distribution_and_depend_on_seed_step_and_sample() {
    let mut bench = Bench::new(FlowMatchingConfig { timestep_sampling: TimestepSampling::Uniform, ..draws(4) });
    bench.step(&[sample(0, "a")]);
    let first = bench.timesteps();
    for (quarter, t) in first.iter().enumerate() {
        assert!((250.0 * quarter as f64..250.0 * (quarter + 1) as f64).contains(t), "{first:?}");
    }
    bench.model.velocity_calls.clear();
    bench.step(&[sample(5, "x"), sample(0, "a")]);
    assert_eq!(bench.timesteps()[4..], first);
    assert_ne!(bench.timesteps()[..4], first);
    bench.model.velocity_calls.clear();
    bench.step_at(1, &[sample(0, "a")], 0.0).unwrap();
    assert_ne!(bench.timesteps(), first);
    // The same clip twice in a step is two different draws.
    bench.model.velocity_calls.clear();
    bench.step(&[sample(0, "a"), sample(0, "a")]);
    assert_eq!(bench.timesteps()[..4], first);
    assert_ne!(bench.timesteps()[4..], first);
}

#[test]
fn the_same_seed_gives_the_same_numbers() {
    let run = || {
        let mut bench = Bench::new(draws(2));
        for step in 0..3 {
            bench.step_at(step, &two(), 0.1).unwrap();
        }
        bench.model.adapter
    };
    assert_eq!(run(), run());
}

#[test]
fn a_perfect_model_has_no_loss_and_its_samples_are_the_data() {
    let mut bench = Bench::new(draws(4));
    let one = sample(0, "a");
    let data = bench.model.encode_video(one.clip().unwrap().frames()).unwrap();
    bench.model.data = Some(data.clone());
    bench.videos = true;
    let report = bench.step(&[one]);
    assert!(report.metrics["actor/loss"] < 1e-8, "{}", report.metrics["actor/loss"]);
    let (expected, _) = bench.model.decode(&data, Grad::Skip).unwrap();
    let (_, video) = &report.videos[0];
    let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
    assert!(video.frames().f32s().unwrap().iter().zip(expected.f32s().unwrap()).all(close));
}

#[test]
fn gradient_descent_lowers_the_loss() {
    let mut bench = Bench::new(draws(8));
    let losses: Vec<f64> = (0..5).map(|_| bench.step_at(0, &two(), 0.2).unwrap().metrics["actor/loss"]).collect();
    assert!(losses.windows(2).all(|w| w[1] < w[0]), "{losses:?}");
}

#[test]
fn prompts_are_dropped_as_often_as_asked_and_clips_encoded_once() {
    let dropped = |prompt_dropout| {
        let mut bench = Bench::new(FlowMatchingConfig { prompt_dropout, ..draws(200) });
        bench.step(&[sample(0, "four")]);
        bench.step(&[sample(0, "four")]);
        let empty = bench.model.velocity_calls.iter().filter(|(_, prompt)| *prompt == 0.0).count();
        (empty as f64 / bench.model.velocity_calls.len() as f64, bench.model.encode_calls)
    };
    assert_eq!(dropped(0.0), (0.0, 1));
    assert_eq!(dropped(1.0), (1.0, 2));
    let (share, encoded) = dropped(0.25);
    assert!((share - 0.25).abs() < 0.08 && encoded == 2, "{share}");
}

#[test]
fn nonfinite_values_leave_the_parameters_unchanged() {
    let mut broken = sample(1, "b");
    let frames = Tensor::full([2, 3, 1, 2], f32::NAN);
    broken.video = SampleVideo::Clip(std::sync::Arc::new(Video::new(frames, 8.0).unwrap()));
    for samples in [[sample(0, "a"), broken.clone()], [broken.clone(), sample(0, "a")]] {
        let mut bench = Bench::new(FlowMatchingConfig::default());
        let before = bench.model.adapter.clone();
        let report = bench.step_at(0, &samples, 1.0).unwrap();
        assert!(!report.applied && bench.model.adapter == before);
        assert_eq!(report.metrics["actor/nonfinite"], 1.0);
        bench.algorithm =
            FlowMatching::new(FlowMatchingConfig { on_nonfinite: OnNonfinite::Stop, ..FlowMatchingConfig::default() });
        assert!(matches!(bench.step_at(0, &samples, 1.0), Err(Error::NonFinite { .. })));
        // Nothing of it is left behind.
        bench.step(&[sample(0, "a")]);
        let mut fresh = Bench::new(FlowMatchingConfig::default());
        fresh.step(&[sample(0, "a")]);
        assert_eq!(bench.strategy.gradient, fresh.strategy.gradient);
    }
}

#[test]
fn check_rejects_invalid_configurations_and_needs_no_reward() {
    let check = |config: FlowMatchingConfig| {
        let mut bench = Bench::new(config);
        bench.algorithm.check(&mut bench.model, None).map_err(|e| e.to_string())
    };
    let with = |spoil: fn(&mut FlowMatchingConfig)| {
        let mut config = FlowMatchingConfig::default();
        spoil(&mut config);
        check(config).unwrap_err()
    };
    check(FlowMatchingConfig::default()).unwrap();
    assert!(with(|c| c.draws_per_sample = 0).contains("draws_per_sample"));
    assert!(with(|c| c.prompt_dropout = 1.5).contains("prompt_dropout"));
    assert!(with(|c| c.logit_std = 0.0).contains("logit_std"));
    assert!(with(|c| c.shift = Some(-1.0)).contains("`algo.shift`"));
    assert!(with(|c| c.max_timestep_boundary = Some(2.0)).contains("max_timestep_boundary"));
    assert!(with(|c| c.num_inference_steps = 0).contains("`algo.num_inference_steps`"));
    let bell = FlowMatchingConfig {
        loss_weighting: LossWeighting::Bell,
        shift: Some(f64::NAN),
        ..FlowMatchingConfig::default()
    };
    let weighting = bell.weighting(MockDiffusion::new().schedule()).unwrap_err().to_string();
    assert!(weighting.contains("`algo.shift`"), "{weighting}");
    let mut bench = Bench::new(FlowMatchingConfig::default());
    bench.model.is_diffusion = false;
    assert!(bench.algorithm.check(&mut bench.model, None).unwrap_err().to_string().contains("diffusion"));
}

#[test]
fn registry_builds_the_algorithm_and_rejects_unknown_keys() {
    let registry = Registry::linked().unwrap();
    let context = BuildContext::new("flex");
    let options = |json: serde_json::Value| json.as_object().unwrap().clone();
    let given = serde_json::json!({"timestep_sampling": "logit_normal", "draws_per_sample": 4});
    assert!(registry.algorithm("flow_matching", &options(given), &context).is_ok());
    let error = registry.algorithm("flow_matching", &options(serde_json::json!({"draw_per_sample": 4})), &context);
    assert!(error.err().unwrap().to_string().contains("did you mean `draws_per_sample`"));
}

#[test]
fn the_weight_of_a_row_scales_its_gradient() {
    for loss_weighting in [LossWeighting::Uniform, LossWeighting::Bell] {
        training::assert_weight_scales_the_gradient(|samples| {
            let mut bench = Bench::new(FlowMatchingConfig { loss_weighting, ..draws(3) });
            (bench.step(samples), bench.strategy.gradient)
        });
    }
}
