#![allow(clippy::unwrap_used)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use roll_core::*;
use roll_testing::diffusion::{Descent, MockDiffusion, SHAPE, Sines, sample, values};
use roll_testing::training;

use super::*;
use crate::sampling::{Conditions, Sampling};

/// A run of the algorithm on mocks.
pub(super) struct Bench {
    pub(super) algorithm: RewardFl,
    pub(super) model: MockDiffusion,
    pub(super) reward: Sines,
    pub(super) strategy: Descent,
}

impl Bench {
    pub(super) fn new(config: RewardFlConfig) -> Self {
        Self {
            algorithm: RewardFl::new(config),
            model: MockDiffusion::new(),
            reward: Sines::new(),
            strategy: Descent::default(),
        }
    }

    fn step_with(&mut self, samples: &[Sample], learning_rate: f64, progress: &dyn Progress) -> Result<StepReport> {
        self.step_at(0, samples, learning_rate, progress)
    }

    pub(super) fn step_at(
        &mut self,
        step: u64,
        samples: &[Sample],
        learning_rate: f64,
        progress: &dyn Progress,
    ) -> Result<StepReport> {
        self.algorithm.step(&mut StepContext {
            step,
            samples,
            model: &mut self.model,
            reward: Some(&mut self.reward),
            strategy: &mut self.strategy,
            learning_rate,
            noise: &Noise::new(11),
            progress,
            want_videos: true,
        })
    }

    /// Runs a step of learning rate 0 that must succeed.
    pub(super) fn step(&mut self, samples: &[Sample]) -> StepReport {
        self.step_with(samples, 0.0, &Silent).unwrap()
    }

    fn loss(&mut self, samples: &[Sample]) -> f64 {
        self.step(samples).metrics["actor/loss"]
    }

    /// Compares the gradient of an update with central differences of the loss in random directions.
    ///
    /// The update treats some velocities as constants, although the latents they are computed from depend on the
    /// parameters. The difference quotient does the same: it replays them from the first run.
    ///
    /// - `references` (without the adapter, for the KL): always.
    /// - `unprompted` (under the negative prompt): if `guidance_gradient` is `Conditional`.
    /// - `constants` (velocities of untrained steps): unless `trained_steps` is `Window`. The untrained steps of a window
    ///   come first and are not replayed. Instead, the test gives them a copy of the adapter that the difference quotient
    ///   does not move: with `model.early = Some((timestep, adapter))`, steps above `timestep` use this copy.
    pub(super) fn check_gradient(&mut self, samples: &[Sample]) {
        self.model.references.clear();
        self.model.constants.clear();
        self.model.unprompted.clear();
        self.step(samples);
        let unprompted_is_constant = self.algorithm.config.guidance_gradient == GuidanceGradient::Conditional;
        let untrained_are_constant = self.algorithm.config.trained_steps != TrainedSteps::Window;
        let gradient = self.strategy.gradient.clone();
        assert!(gradient.iter().any(|g| *g != 0.0));
        let at = self.model.adapter.clone();
        for seed in 0..5 {
            let direction = values(50 + seed, at.len());
            let mut moved = |h: f32| {
                self.model.adapter = at.iter().zip(&direction).map(|(a, d)| a + h * d).collect();
                // From the first recorded velocity on.
                self.model.replay_references = Some(0);
                self.model.replay_unprompted = unprompted_is_constant.then_some(0);
                self.model.replay_constants = untrained_are_constant.then_some(0);
                self.loss(samples)
            };
            let h = 2e-3f32;
            let quotient = (moved(h) - moved(-h)) / f64::from(2.0 * h);
            let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
            assert!((quotient - slope).abs() < 1e-3 * (slope.abs() + 0.05), "direction {seed}: {quotient} or {slope}");
        }
        self.model.adapter = at;
        (self.model.replay_references, self.model.replay_unprompted, self.model.replay_constants) = (None, None, None);
    }
}

pub(super) fn two() -> [Sample; 2] {
    [sample(0, "a"), sample(1, "b")]
}

/// Conditions with an empty prompt.
fn conditions(model: &mut MockDiffusion) -> Conditions {
    Conditions::new(&model.encode(&ConditionInput::default()).unwrap(), None)
}

#[test]
fn step_gradient_matches_finite_differences() {
    Bench::new(RewardFlConfig { mid_timestep: 0, ..RewardFlConfig::default() }).check_gradient(&two());
}

#[test]
fn steps_before_the_first_trained_one_count_as_constants() {
    let mut bench = Bench::new(RewardFlConfig::default());
    // The timesteps of steps 3 and 4 are 892.9 and 833.3: steps 0 to 3 use a fixed copy (`early`), and the
    // parameters that the difference quotient moves are used from step 4 on, the first trained one.
    bench.model.early = Some((850.0, bench.model.adapter.clone()));
    bench.check_gradient(&two());
}

#[test]
fn gradients_match_finite_differences_for_every_early_stop() {
    for early_stop in [EarlyStop::Decode, EarlyStop::PredictX0] {
        Bench::new(RewardFlConfig { mid_timestep: 0, final_timestep: 4, early_stop, ..RewardFlConfig::default() })
            .check_gradient(&two());
    }
}

#[test]
fn predict_x0_decodes_where_the_last_velocity_points_and_changes_nothing_at_the_last_step() {
    let at = |final_timestep, early_stop| {
        let config = RewardFlConfig { mid_timestep: 0, final_timestep, early_stop, ..RewardFlConfig::default() };
        Bench::new(config).loss(&two())
    };
    assert_eq!(at(7, EarlyStop::Decode), at(7, EarlyStop::PredictX0));
    assert_ne!(at(3, EarlyStop::Decode), at(3, EarlyStop::PredictX0));
}

#[test]
fn known_first_frame_is_replaced_before_every_step_and_has_no_gradient() {
    let mut bench = Bench::new(RewardFlConfig { mid_timestep: 0, ..RewardFlConfig::default() });
    bench.model.first_frame = Some(Tensor::full([2, 1, 1, 2], 0.7));
    bench.check_gradient(&two());

    struct FirstFrames(Vec<Vec<f32>>);
    impl Observer for FirstFrames {
        fn latents(&mut self, _step: usize, latents: &Tensor) {
            // `[2 channels, 2 frames, 1, 2]`: the first frame is the first half of each channel.
            self.0.push(latents.f32s().unwrap().chunks(4).flat_map(|channel| channel[..2].to_vec()).collect());
        }
    }
    let plan = RewardFlConfig::default().plan(bench.model.schedule()).unwrap();
    let conditions = conditions(&mut bench.model);
    let mut seen = FirstFrames(Vec::new());
    rollout(&mut bench.model, &conditions, &Tensor::zeros(SHAPE), &plan, Grad::Record, &mut seen).unwrap();
    assert!(seen.0.len() == 8 && seen.0.iter().all(|frame| frame == &[0.7; 4]));
}

#[test]
fn velocities_of_a_known_first_frame_do_not_count_in_the_kl() {
    let mut model = MockDiffusion::new();
    // The adapter is a matrix 8 x 8 over latents `[2, 2, 1, 2]`; these rows change velocities of the second frame.
    // Without them it changes those of the first frame alone.
    [2, 3, 6, 7].iter().for_each(|row| model.adapter[row * 8..][..8].fill(0.0));
    let mut kl = |first_frame| {
        model.first_frame = first_frame;
        let plan = RewardFlConfig::default().plan(model.schedule()).unwrap();
        let conditions = conditions(&mut model);
        let noise = Noise::new(1).latents(0, 0, &SHAPE).unwrap();
        rollout(&mut model, &conditions, &noise, &plan, Grad::Skip, &mut Unobserved).unwrap().kl
    };
    assert!(kl(None) > 0.0);
    assert_eq!(kl(Some(Tensor::full([2, 1, 1, 2], 0.7))), 0.0);
}

#[test]
fn training_decodes_the_latents_that_generating_decodes() {
    for first_frame in [None, Some(Tensor::full([2, 1, 1, 2], 0.7))] {
        let mut model = MockDiffusion::new();
        model.first_frame = first_frame;
        let plan = RewardFlConfig::default().plan(model.schedule()).unwrap();
        let conditions = conditions(&mut model);
        let noise = Noise::new(1).latents(0, 0, &SHAPE).unwrap();
        let trained = rollout(&mut model, &conditions, &noise, &plan, Grad::Skip, &mut Unobserved).unwrap();
        let RolloutPlan { schedule, sampler, guidance, .. } = plan;
        let sampling = Sampling { schedule, sampler, guidance };
        let generated = sampling.generate(&mut model, &conditions, &noise, Adapter::On, &Silent).unwrap();
        assert_eq!(trained.latents.f32s().unwrap(), generated.f32s().unwrap());
    }
}

pub(super) const HIGH_NOISE: SigmaRange = SigmaRange { low: Sigma(0.9), high: Sigma(1.0) };
const LOW_NOISE: SigmaRange = SigmaRange { low: Sigma(0.0), high: Sigma(0.9) };

pub(super) fn two_experts(trained: SigmaRange, config: RewardFlConfig) -> Bench {
    let mut bench = Bench::new(config);
    (bench.model.boundary, bench.model.trained) = (Some(0.9), trained);
    bench
}

#[test]
fn rejects_an_expert_that_no_trained_step_uses() {
    let message = |trained, config| {
        let mut bench = two_experts(trained, config);
        bench.algorithm.check(&mut bench.model, Some(&bench.reward)).map_err(|e| e.to_string())
    };
    // The noise levels of the steps: 1.000 .972 .938 .893 .833 .750 .625 .417.
    let error = message(HIGH_NOISE, RewardFlConfig::default()).unwrap_err();
    for part in ["`algo.mid_timestep`", "4 to 7", "0.833 to 0.417", "0.900 to 1.000", "at most 2", "trainable_models"] {
        assert!(error.contains(part), "no {part}: {error}");
    }
    let early = RewardFlConfig { mid_timestep: 0, final_timestep: 2, ..RewardFlConfig::default() };
    let error = message(LOW_NOISE, early).unwrap_err();
    assert!(error.contains("`algo.final_timestep`") && error.contains("at least 3"), "{error}");
    message(LOW_NOISE, RewardFlConfig::default()).unwrap();
    message(HIGH_NOISE, RewardFlConfig { mid_timestep: 2, ..RewardFlConfig::default() }).unwrap();
    message(SigmaRange::ALL, RewardFlConfig::default()).unwrap();
}

// Of the eight steps, 0 to 2 use the high-noise expert, and 3 to 7 the low-noise expert.

fn trained_from(step: usize) -> RewardFlConfig {
    RewardFlConfig { mid_timestep: step, ..RewardFlConfig::default() }
}

fn kl_loss(bench: &mut Bench) -> f64 {
    bench.step(&two()).metrics["actor/kl_loss"]
}

#[test]
fn frozen_expert_is_not_in_the_kl() {
    // The trained steps are 2 to 7. In the second run the boundary excludes steps 3 to 7 from training.
    let only_step_2 = RewardFlConfig { min_timestep_boundary: 0.9, ..trained_from(2) };
    let with_frozen_steps = kl_loss(&mut two_experts(HIGH_NOISE, trained_from(2)));
    assert_eq!(with_frozen_steps, kl_loss(&mut two_experts(HIGH_NOISE, only_step_2)));
}

#[test]
fn gradient_passes_through_later_steps_of_a_frozen_expert() {
    let mut high = two_experts(HIGH_NOISE, trained_from(2));
    // The timesteps of steps 1 and 2 are 972.2 and 937.5: steps 0 and 1 use a fixed copy of the adapter, and the
    // parameters that the difference quotient moves are used from step 2 on.
    high.model.early = Some((950.0, high.model.adapter.clone()));
    high.check_gradient(&two());
}

#[test]
fn earlier_steps_of_a_frozen_expert_have_no_gradient() {
    let (mut from_0, mut from_3) = (two_experts(LOW_NOISE, trained_from(0)), two_experts(LOW_NOISE, trained_from(3)));
    assert_eq!(kl_loss(&mut from_0), kl_loss(&mut from_3));
    assert_eq!(from_0.strategy.gradient, from_3.strategy.gradient);
    from_0.check_gradient(&two());
}

#[test]
fn repeated_clip_gets_its_own_noise_and_video() {
    let gradient = |samples: &[Sample]| {
        let mut bench = Bench::new(RewardFlConfig::default());
        let report = bench.step(samples);
        (bench.strategy.gradient, report.videos.into_iter().map(|(name, _)| name).collect::<Vec<_>>())
    };
    let (alone, name) = gradient(&[sample(0, "a")]);
    let (twice, names) = gradient(&[sample(0, "a"), sample(0, "a")]);
    assert_ne!(alone, twice);
    assert_eq!(name, ["sample-000000"]);
    assert_eq!(names, ["sample-000000", "sample-000000-2"]);
    // Together with other samples, its first occurrence has the same noise as alone.
    let (with_others, names) = gradient(&[sample(1, "a"), sample(0, "a")]);
    let (other, _) = gradient(&[sample(1, "a")]);
    assert!(with_others.iter().zip(alone.iter().zip(&other)).all(|(g, (a, b))| (g - (a + b) / 2.0).abs() < 1e-6));
    assert_eq!(names, ["sample-000001", "sample-000000"]);
}

#[test]
fn a_first_frame_of_another_size_is_an_error() {
    let mut bench = Bench::new(RewardFlConfig::default());
    bench.model.first_frame = Some(Tensor::zeros([2, 1, 2, 2]));
    assert!(bench.step_with(&two(), 0.0, &Silent).is_err());
}

#[test]
fn an_adapter_of_zeros_has_no_kl() {
    let mut bench = Bench::new(RewardFlConfig::default());
    assert!(bench.step(&two()).metrics["actor/kl_loss"] > 0.0);
    bench.model.adapter.fill(0.0);
    assert_eq!(bench.step(&two()).metrics["actor/kl_loss"], 0.0);
}

#[test]
fn without_a_weight_of_the_kl_only_evaluations_compute_it() {
    let step = |kl_weight, gradient_split_every| {
        let config = RewardFlConfig { kl_weight, gradient_split_every, ..RewardFlConfig::default() };
        let options = serde_json::to_value(&config).unwrap();
        let planned = passes(options.as_object().unwrap()).unwrap();
        let mut bench = Bench::new(config);
        let metrics = bench.step(&two()).metrics;
        assert_eq!(bench.model.references.len(), 2 * planned.references(), "{kl_weight}");
        (bench, metrics)
    };
    let (weighed, metrics) = step(1e-30, Some(0));
    assert!(metrics["actor/kl_loss"] > 0.0);
    let (mut bench, metrics) = step(0.0, Some(1));
    assert!(!metrics.contains_key("actor/kl_loss") && !metrics.contains_key("actor/grad_norm_kl"), "{metrics:?}");
    assert_eq!(bench.strategy.gradient, weighed.strategy.gradient);
    let evaluated = bench.algorithm.evaluate(&mut EvaluationContext {
        samples: &two(),
        upcoming: &[],
        model: &mut bench.model,
        rewards: vec![&mut bench.reward],
        noise: &Noise::new(11),
        progress: &Silent,
    });
    assert!(evaluated.unwrap().unwrap()[0].kl > 0.0);
}

/// Whether the low-noise expert was asked, call by call.
fn low_noise(model: &MockDiffusion) -> Vec<bool> {
    model.velocity_calls.iter().map(|(timestep, _)| *timestep < 900.0).collect()
}

#[test]
fn samples_pass_through_the_frozen_expert_one_after_the_other_and_keep_their_bits() {
    let split = RewardFlConfig { gradient_split_every: Some(1), ..RewardFlConfig::default() };
    for config in [RewardFlConfig::default(), split] {
        let step = |boundary| {
            let mut bench = two_experts(LOW_NOISE, config.clone());
            bench.model.boundary = boundary;
            let mut metrics = bench.step(&two()).metrics;
            metrics.retain(|name, _| !name.starts_with("time/"));
            (metrics, bench)
        };
        let ((whole, one), (metrics, two)) = (step(None), step(Some(0.9)));
        assert_eq!((&metrics, &two.strategy.gradient), (&whole, &one.strategy.gradient));
        assert!(metrics["actor/grad_norm"] > 0.0);
        let is_low = low_noise(&two.model);
        assert!(is_low.is_sorted() && !is_low[5] && is_low[6], "three steps of two samples: {is_low:?}");
        assert!(!low_noise(&one.model).is_sorted());
    }
    // Steps that are trained keep their records, so their expert is not divided from the other.
    let early = RewardFlConfig { mid_timestep: 0, ..RewardFlConfig::default() };
    let mut both = two_experts(SigmaRange::ALL, early);
    both.step(&two());
    assert!(!low_noise(&both.model).is_sorted());
}

#[test]
fn upcoming_evaluations_begin_together_and_keep_their_bits() {
    let samples = [sample(0, "a"), sample(1, "b"), sample(2, "c")];
    let evaluate = |together: bool| {
        let mut bench = two_experts(LOW_NOISE, RewardFlConfig::default());
        let mut found = Vec::new();
        for i in 0..samples.len() {
            let context = &mut EvaluationContext {
                samples: &samples[i..=i],
                upcoming: if together { &samples[i + 1..] } else { &[] },
                model: &mut bench.model,
                rewards: vec![&mut bench.reward],
                noise: &Noise::new(11),
                progress: &Silent,
            };
            let evaluated = bench.algorithm.evaluate(context).unwrap().unwrap();
            found.extend(
                evaluated.into_iter().map(|one| (one.scores, one.kl, one.video.unwrap().frames().to_f32_vec())),
            );
        }
        (found, low_noise(&bench.model))
    };
    let (apart, together) = (evaluate(false), evaluate(true));
    assert_eq!(apart.0, together.0);
    assert!(apart.0[0].1 > 0.0 || apart.0[0].0[0].is_some());
    assert!(together.1.is_sorted() && !apart.1.is_sorted() && apart.1.len() == together.1.len());
}

#[test]
fn timestep_boundaries_restrict_the_trained_steps() {
    // The noise levels of steps 4 to 7 are 0.833, 0.75, 0.625 and 0.417.
    let config = RewardFlConfig { min_timestep_boundary: 0.6, max_timestep_boundary: 0.7, ..RewardFlConfig::default() };
    let plan = config.plan(MockDiffusion::new().schedule()).unwrap();
    assert_eq!(plan.trained, [6]);
    let mut bench = Bench::new(config);
    bench.step(&two());
    assert!(bench.strategy.gradient.iter().any(|g| *g != 0.0));
}

#[test]
fn skipped_sample_does_not_change_the_update_of_the_others() {
    let mut bench = Bench::new(RewardFlConfig::default());
    let report = bench.step(&[sample(0, "a"), sample(1, "missing")]);
    assert_eq!(report.skipped, [("row 1".to_string(), "no face in any frame".to_string())]);
    assert_eq!((report.metrics["actor/samples"], report.metrics["actor/skipped"]), (1.0, 1.0));
    assert!(report.applied);
    let gradient = bench.strategy.gradient.clone();
    bench.step(&[sample(0, "a")]);
    assert_eq!(gradient, bench.strategy.gradient);
}

#[test]
fn without_any_score_nothing_is_updated_and_the_report_says_so() {
    let mut bench = Bench::new(RewardFlConfig::default());
    let before = bench.model.adapter.clone();
    let report = bench.step_with(&[sample(0, "missing")], 1.0, &Silent).unwrap();
    assert!(!report.applied && bench.model.adapter == before);
    assert!(!report.metrics.contains_key("actor/score"));
}

#[test]
fn a_missing_score_follows_on_missing() {
    let mut bench = Bench::new(RewardFlConfig::default());
    bench.reward.on_missing = OnMissing::Error;
    let error = bench.step_with(&[sample(0, "missing")], 0.0, &Silent).unwrap_err();
    let chain = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(chain.contains("row 0") && chain.contains("no face") && chain.contains("on_missing: skip"), "{chain}");
    assert_eq!(error.fault(), roll_core::Fault::User);

    bench.reward.on_missing = OnMissing::Value(-1.0);
    let report = bench.step(&[sample(0, "missing")]);
    assert_eq!(report.metrics["actor/score"], -1.0);
    // The KL still has a gradient.
    assert!(report.metrics["actor/grad_norm"] > 0.0);
}

#[test]
fn a_reference_without_a_face_follows_on_missing() {
    let faceless = |on_missing| {
        let mut bench = Bench::new(RewardFlConfig::default());
        (bench.reward.on_missing, bench.reward.faceless) = (on_missing, vec![1]);
        bench
    };
    let mut bench = faceless(OnMissing::Skip);
    for _ in 0..2 {
        let report = bench.step(&[sample(0, "a"), sample(1, "a")]);
        assert_eq!(report.skipped, [("row 1".to_string(), "no face in the reference".to_string())]);
        assert_eq!((report.metrics["actor/samples"], report.metrics["actor/skipped"]), (1.0, 1.0));
    }
    // That the reference has no face is found once, and costs neither an encoding nor a rollout.
    assert_eq!((bench.reward.prepared.len(), bench.model.encode_calls), (2, 1));
    let gradient = bench.strategy.gradient.clone();
    bench.step(&[sample(0, "a")]);
    assert_eq!(gradient, bench.strategy.gradient);

    let error = faceless(OnMissing::Error).step_with(&two(), 0.0, &Silent).unwrap_err();
    let chain = error.chain();
    assert!(chain.contains("row 1") && chain.contains("no face") && chain.contains("on_missing: skip"), "{chain}");

    let report = faceless(OnMissing::Value(-1.0)).step(&[sample(1, "a")]);
    assert_eq!((report.metrics["actor/score"], report.skipped.len()), (-1.0, 0));
    // The KL still has a gradient.
    assert!(report.metrics["actor/grad_norm"] > 0.0);
}

#[test]
fn an_evaluation_follows_on_missing_of_each_reward() {
    // Returns the scores of each sample, one per reward, and whether it has a video.
    let evaluate = |on_missing: [OnMissing; 2], faceless: &[u64], prompt: &str| {
        let mut bench = Bench::new(RewardFlConfig::default());
        let mut second_reward = Sines { on_missing: on_missing[1], faceless: faceless.to_vec(), ..Sines::new() };
        bench.reward.on_missing = on_missing[0];
        let evaluated = bench.algorithm.evaluate(&mut EvaluationContext {
            samples: &[sample(0, "a"), sample(1, prompt)],
            upcoming: &[],
            model: &mut bench.model,
            rewards: vec![&mut bench.reward, &mut second_reward],
            noise: &Noise::new(11),
            progress: &Silent,
        });
        evaluated.map(|found| found.unwrap().into_iter().map(|e| (e.scores, e.video.is_some())).collect::<Vec<_>>())
    };
    let skip = evaluate([OnMissing::Skip; 2], &[1], "a").unwrap();
    assert!(skip[0].0.iter().all(Option::is_some));
    let (scores, has_video) = &skip[1];
    assert!(scores[0].is_some() && scores[1].is_none() && *has_video);
    let valued = evaluate([OnMissing::Skip, OnMissing::Value(-1.0)], &[1], "a").unwrap();
    assert_eq!(valued[1].0[1], Some(-1.0));
    let error = evaluate([OnMissing::Skip, OnMissing::Error], &[1], "a").unwrap_err().chain();
    assert!(error.contains("row 1") && error.contains("no face in the reference"), "{error}");
    // A generated video with nothing to score follows `on_missing`, too.
    let valued = evaluate([OnMissing::Skip, OnMissing::Value(-1.0)], &[], "missing").unwrap();
    assert_eq!(valued[1].0, [None, Some(-1.0)]);
    assert!(evaluate([OnMissing::Skip, OnMissing::Error], &[], "missing").is_err());
}

#[test]
fn an_evaluation_encodes_no_prompt_that_is_encoded_already() {
    let mut bench = Bench::new(RewardFlConfig::default());
    bench.step(&two());
    let mut unseen = sample(0, "c");
    unseen.origin = "row 0 of another file".into();
    let evaluate = |bench: &mut Bench| {
        let context = &mut EvaluationContext {
            samples: &[sample(0, "a"), unseen.clone()],
            upcoming: &[],
            model: &mut bench.model,
            rewards: vec![&mut bench.reward],
            noise: &Noise::new(11),
            progress: &Silent,
        };
        bench.algorithm.evaluate(context).unwrap().unwrap()
    };
    let first = evaluate(&mut bench);
    let again = evaluate(&mut bench);
    bench.step(&two());
    assert_eq!(bench.model.encode_calls, 3);
    assert!(first.iter().zip(&again).all(|(a, b)| (&a.scores, a.kl) == (&b.scores, b.kl)));
}

#[test]
fn a_nonfinite_score_is_one_missing_score() {
    let adapter_after = |prompt: &str, on_missing| {
        let mut bench = Bench::new(RewardFlConfig { on_nonfinite: OnNonfinite::Stop, ..RewardFlConfig::default() });
        bench.reward.on_missing = on_missing;
        let report = bench.step_with(&[sample(0, "a"), sample(1, prompt)], 1.0, &Silent);
        report.map(|report| (report.skipped, report.applied, report.metrics["actor/score"], bench.model.adapter))
    };
    for on_missing in [OnMissing::Skip, OnMissing::Value(0.25)] {
        let (nan, missing) = (adapter_after("nan", on_missing).unwrap(), adapter_after("missing", on_missing).unwrap());
        assert_eq!((nan.1, nan.2, &nan.3), (true, missing.2, &missing.3), "{on_missing:?}");
        let reasons: Vec<&str> = nan.0.iter().map(|(_, reason)| reason.as_str()).collect();
        assert_eq!(reasons, if on_missing == OnMissing::Skip { &["the score is NaN"][..] } else { &[] });
    }
    let problem = adapter_after("nan", OnMissing::Error).map(drop).unwrap_err().chain();
    assert!(problem.contains("the score is NaN"), "{problem}");
}

#[test]
fn nonfinite_values_leave_the_parameters_unchanged() {
    for prompt in ["huge", "broken gradient"] {
        let samples = [sample(0, "a"), sample(1, prompt)];
        let mut bench = Bench::new(RewardFlConfig::default());
        let before = bench.model.adapter.clone();
        let report = bench.step_with(&samples, 1.0, &Silent).unwrap();
        assert!(!report.applied && bench.model.adapter == before, "{prompt}");
        assert_eq!(report.metrics["actor/nonfinite"], 1.0);

        bench.algorithm =
            RewardFl::new(RewardFlConfig { on_nonfinite: OnNonfinite::Stop, ..RewardFlConfig::default() });
        assert!(matches!(bench.step_with(&samples, 1.0, &Silent), Err(Error::NonFinite { .. })), "{prompt}");
        assert!(bench.model.adapter == before);
        // No partial gradient remains.
        assert!(bench.step(&[sample(0, "a")]).applied);
        let gradient = bench.strategy.gradient.clone();
        let mut fresh = Bench::new(RewardFlConfig::default());
        fresh.step(&[sample(0, "a")]);
        assert_eq!(gradient, fresh.strategy.gradient);
    }
}

#[test]
fn gradient_split_keeps_the_update_bit_exact() {
    let mut plain = Bench::new(RewardFlConfig::default());
    plain.step(&two());
    let mut split = Bench::new(RewardFlConfig { gradient_split_every: Some(1), ..RewardFlConfig::default() });
    let report = split.step(&two());
    assert_eq!(plain.strategy.gradient, split.strategy.gradient);

    let norm_of = |config: RewardFlConfig| Bench::new(config).step(&two()).metrics["actor/grad_norm"];
    let kl = norm_of(RewardFlConfig { reward_weight: 0.0, ..RewardFlConfig::default() });
    let reward = norm_of(RewardFlConfig { kl_weight: 0.0, ..RewardFlConfig::default() });
    assert!((report.metrics["actor/grad_norm_kl"] / kl - 1.0).abs() < 1e-4);
    assert!((report.metrics["actor/grad_norm_reward"] / reward - 1.0).abs() < 1e-4);
}

#[test]
fn gradient_descent_lowers_the_loss() {
    let mut bench = Bench::new(RewardFlConfig { mid_timestep: 0, ..RewardFlConfig::default() });
    let losses: Vec<f64> =
        (0..5).map(|_| bench.step_with(&two(), 0.05, &Silent).unwrap().metrics["actor/loss"]).collect();
    assert!(losses.windows(2).all(|w| w[1] < w[0]), "{losses:?}");
}

#[test]
fn an_interrupt_at_any_phase_changes_nothing() {
    struct StopAt(AtomicUsize);
    impl Progress for StopAt {
        fn phase(&self, _phase: &str) {}
        fn interrupted(&self) -> bool {
            self.0.fetch_sub(1, Ordering::Relaxed) == 0
        }
    }
    let mut fresh = Bench::new(RewardFlConfig::default());
    fresh.step(&two());
    // The call of `interrupted` that stops the run; every phase makes some.
    for calls in [0, 3, 10, 14, 18, 30] {
        let mut bench = Bench::new(RewardFlConfig::default());
        let before = bench.model.adapter.clone();
        let error = bench.step_with(&two(), 1.0, &StopAt(AtomicUsize::new(calls))).unwrap_err();
        assert_eq!(error.fault(), roll_core::Fault::Interrupt);
        assert_eq!(bench.model.adapter, before);
        bench.step(&two());
        assert_eq!(bench.strategy.gradient, fresh.strategy.gradient);
    }
}

#[test]
fn a_step_reports_its_phases_and_times() {
    struct Phases(Mutex<Vec<String>>);
    impl Progress for Phases {
        fn phase(&self, phase: &str) {
            self.0.lock().unwrap().push(phase.into());
        }
    }
    let phases = Phases(Mutex::default());
    let report = Bench::new(RewardFlConfig::default()).step_with(&[sample(0, "a")], 0.0, &phases).unwrap();
    let phases = phases.0.into_inner().unwrap();
    assert!(phases.iter().any(|p| p == "denoising step 8 of 8"), "{phases:?}");
    for name in "encode rollout reference decode score pull optimizer step".split(' ') {
        assert!(report.metrics[&format!("time/{name}")] >= 0.0);
    }
    assert_eq!(report.metrics["reward/sine"], report.metrics["actor/score"]);
    assert_eq!(report.videos.len(), 1);
}

#[test]
fn a_sample_is_prepared_once_over_epochs() {
    let mut bench = Bench::new(RewardFlConfig::default());
    bench.step(&two());
    bench.step(&two());
    assert_eq!((bench.model.encode_calls, bench.reward.prepared.len()), (2, 2));
}

#[test]
fn the_reward_compares_with_what_is_configured() {
    for (reference, frames) in [(Reference::Clip, 2), (Reference::FirstFrame, 1), (Reference::Image, 1)] {
        let mut bench = Bench::new(RewardFlConfig { reference, ..RewardFlConfig::default() });
        bench.step(&[sample(0, "a")]);
        assert_eq!(bench.reward.prepared, [frames]);
    }
}

#[test]
fn check_rejects_invalid_configurations() {
    let check = |config: RewardFlConfig, spoil: fn(&mut MockDiffusion, &mut Sines)| {
        let mut bench = Bench::new(config);
        spoil(&mut bench.model, &mut bench.reward);
        let error = bench.algorithm.check(&mut bench.model, Some(&bench.reward));
        error.map_err(|e| e.to_string())
    };
    let with = |spoil: fn(&mut RewardFlConfig)| {
        let mut config = RewardFlConfig::default();
        spoil(&mut config);
        check(config, |_, _| {}).unwrap_err()
    };
    check(RewardFlConfig::default(), |_, _| {}).unwrap();
    assert!(with(|c| c.final_timestep = 8).contains("0 to 7"));
    assert!(with(|c| c.mid_timestep = 8).contains("mid_timestep"));
    assert!(with(|c| c.min_timestep_boundary = 0.9).contains("no step is left to train"));
    assert!(with(|c| c.reward_std = 0.0).contains("reward_std"));
    assert!(with(|c| c.num_inference_steps = 0).contains("`algo.num_inference_steps`"));
    assert!(with(|c| c.shift = Some(0.0)).contains("`algo.shift`"));
    assert!(with(|c| c.kl_weight = f64::NAN).contains("kl_weight"));
    assert!(with(|c| c.data_weight = f64::NAN).contains("data_weight"));
    assert!(with(|c| c.data_weight = -0.5).contains("away from the clips"));
    assert!(with(|c| c.trained_steps = TrainedSteps::Last(5)).contains("ask for fewer"));
    assert!(check(RewardFlConfig::default(), |m, _| m.is_diffusion = false).unwrap_err().contains("diffusion"));
    assert!(check(RewardFlConfig::default(), |_, r| r.differentiable = false).unwrap_err().contains("`sines`"));
    let mut bench = Bench::new(RewardFlConfig::default());
    assert!(bench.algorithm.check(&mut bench.model, None).is_err());
}

#[test]
fn registry_builds_the_algorithm_and_rejects_unknown_keys() {
    let registry = Registry::linked().unwrap();
    let context = BuildContext::new("flex");
    let options = |json: serde_json::Value| json.as_object().unwrap().clone();
    assert!(registry.algorithm("reward_fl", &options(serde_json::json!({"mid_timestep": 3})), &context).is_ok());
    let error = registry.algorithm("reward_fl", &options(serde_json::json!({"mid_timestp": 3})), &context).err();
    assert!(error.unwrap().to_string().contains("did you mean `mid_timestep`"));
}

#[test]
fn the_weight_of_a_row_scales_its_gradient() {
    for trained_steps in [TrainedSteps::Window, TrainedSteps::Renoised(2), TrainedSteps::Direct(Direct::default())] {
        training::assert_weight_scales_the_gradient(|samples| {
            let trained_steps = trained_steps.clone();
            let mut bench = Bench::new(RewardFlConfig { data_weight: 0.5, trained_steps, ..RewardFlConfig::default() });
            (bench.step(samples), bench.strategy.gradient)
        });
    }
}
