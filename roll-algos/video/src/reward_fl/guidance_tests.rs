//! Classifier-free guidance in Reward-FL: its cost and its gradient.
#![allow(clippy::unwrap_used)]

use crate::Sampler;
use roll_core::*;
use roll_testing::diffusion::{MockDiffusion, SHAPE, sample};

use super::tests::{Bench, two};
use super::*;
use crate::sampling::{Conditions, GuidanceScale, Sampling};

fn config(scale: impl Into<GuidanceScale>, guidance_gradient: GuidanceGradient) -> RewardFlConfig {
    RewardFlConfig { guidance_scale: scale.into(), guidance_gradient, ..RewardFlConfig::default() }
}

/// A test bench with a model whose velocities depend on the prompt.
fn bench(config: RewardFlConfig) -> Bench {
    let mut bench = Bench::new(config);
    bench.model.prompt_weight = 0.2;
    bench
}

fn scales(high: f64, low: f64) -> GuidanceScale {
    GuidanceScale { high, low }
}

#[test]
fn guided_step_gradient_matches_finite_differences() {
    for gradient in [GuidanceGradient::Conditional, GuidanceGradient::Both] {
        for scale in [3.5, 1.5] {
            bench(RewardFlConfig { mid_timestep: 0, ..config(scale, gradient) }).check_gradient(&two());
        }
        // Only the reward, so that the KL's gradient cannot hide errors in that of the guided velocity.
        let config = RewardFlConfig { mid_timestep: 0, kl_weight: 0.0, ..config(3.5, gradient) };
        bench(config.clone()).check_gradient(&two());
        // Scales that differ between the experts, a known first frame, and an early stop.
        let mut other = RewardFlConfig { mid_timestep: 0, final_timestep: 5, ..config };
        other.guidance_scale = scales(4.0, 1.0);
        let mut bench = bench(other);
        bench.model.boundary = Some(0.9);
        bench.model.first_frame = Some(Tensor::full([2, 1, 1, 2], 0.7));
        bench.check_gradient(&two());
    }
}

#[test]
fn guidance_gradient_modes_differ() {
    let gradient = |gradient| {
        let mut bench = bench(config(3.5, gradient));
        bench.step(&two());
        bench.strategy.gradient
    };
    assert_ne!(gradient(GuidanceGradient::Both), gradient(GuidanceGradient::Conditional));
}

#[test]
fn guidance_scale_one_is_bit_exact_and_computes_one_velocity() {
    let plain = |prompted| {
        let mut bench = Bench::new(RewardFlConfig::default());
        bench.model.prompt_weight = prompted;
        bench
    };
    for gradient in [GuidanceGradient::Conditional, GuidanceGradient::Both] {
        let (mut guided, mut today) = (bench(config(1.0, gradient)), plain(0.2));
        guided.algorithm.config.negative_prompt = "blurred".into();
        let (a, b) = (guided.step(&two()), today.step(&two()));
        assert_eq!(guided.strategy.gradient, today.strategy.gradient);
        assert_eq!(a.metrics["actor/loss"].to_bits(), b.metrics["actor/loss"].to_bits());
        assert_eq!(
            (guided.model.velocity_calls, guided.model.encode_calls),
            (today.model.velocity_calls, today.model.encode_calls)
        );
    }
}

#[test]
fn guidance_computes_two_velocities_and_records_one_or_both() {
    // 8 steps, 4 of which are trained and have a reference velocity.
    let counts = |config: RewardFlConfig| {
        let mut bench = bench(config);
        bench.model.boundary = Some(0.9);
        bench.step(&[sample(0, "a")]);
        (bench.model.velocity_calls.len(), bench.model.recorded_passes)
    };
    assert_eq!(counts(RewardFlConfig::default()), (8 + 4, 4));
    assert_eq!(counts(config(3.5, GuidanceGradient::Conditional)), (16 + 4, 4));
    assert_eq!(counts(config(3.5, GuidanceGradient::Both)), (16 + 4, 8));
    // Steps 0 to 2 use the high-noise expert.
    assert_eq!(counts(config(scales(4.0, 1.0), GuidanceGradient::Both)), (8 + 3 + 4, 4));
    assert_eq!(counts(config(scales(1.0, 3.0), GuidanceGradient::Conditional)), (8 + 5 + 4, 4));
}

#[test]
fn plan_counts_the_velocities_of_a_step() {
    let planned = |config: &RewardFlConfig| {
        let options = serde_json::to_value(config).unwrap();
        let passes = passes(options.as_object().unwrap()).unwrap();
        (passes.forward, passes.pulled, passes.steps())
    };
    assert_eq!(planned(&RewardFlConfig::default()), (8, 4, [8, 4]));
    assert_eq!(planned(&config(3.5, GuidanceGradient::Conditional)), (16, 4, [8, 4]));
    assert_eq!(planned(&config(3.5, GuidanceGradient::Both)), (16, 8, [8, 4]));
}

#[test]
fn the_negative_prompt_is_encoded_once_and_leads_the_other_way() {
    let mut guided = bench(config(3.5, GuidanceGradient::Conditional));
    guided.algorithm.config.negative_prompt = "blurred".into();
    guided.step(&two());
    guided.step(&two());
    assert_eq!(guided.model.encode_calls, 3);
    let seen = |length: f32| guided.model.velocity_calls.iter().filter(|(_, asked)| *asked == length).count();
    assert_eq!((seen(7.0), seen(1.0), seen(0.0)), (2 * 2 * 8, 2 * 2 * 12, 0));

    // v = u + s (c - u)
    let mut model = MockDiffusion::new();
    model.prompt_weight = 0.2;
    let prompt = model.encode(&ConditionInput { prompt: "abc".into(), ..ConditionInput::default() }).unwrap();
    let conditions = Conditions::new(&prompt, Some(Tensor::full([1, 1], 0.0)));
    let x = Noise::new(1).latents(0, 0, &SHAPE).unwrap();
    let guidance = config(3.0, GuidanceGradient::Both).plan(model.schedule()).unwrap().guidance;
    let t = Timestep(800.0);
    let mut at = |conditioning| model.velocity(&x, t, conditioning, Adapter::On, Grad::Skip).unwrap().0.to_f32_vec();
    let (c, u) = (at(&conditions.prompt), at(conditions.negative.as_ref().unwrap()));
    let guided = guidance.velocity(&mut model, &x, t, &conditions, Adapter::On, Grad::Skip).unwrap();
    let expected = c.iter().zip(&u).map(|(c, u)| u + 3.0 * (c - u));
    assert!(guided.velocity.f32s().unwrap().iter().zip(expected).all(|(v, e)| (v - e).abs() < 1e-6));
    assert_eq!(guided.conditional.f32s().unwrap(), c);
}

#[test]
fn the_kl_compares_velocities_under_the_prompt_whatever_the_scale() {
    // The latents of the first step are equal for all scales.
    let kl = |scale: f64| {
        let config = RewardFlConfig { mid_timestep: 0, final_timestep: 0, ..config(scale, GuidanceGradient::Both) };
        bench(config).step(&two()).metrics["actor/kl_loss"]
    };
    assert!(kl(1.0) > 0.0);
    assert_eq!(kl(1.0), kl(5.0));
}

#[test]
fn before_last_pull_is_called_after_the_pull_of_the_negative_prompt() {
    let mut model = MockDiffusion::new();
    model.prompt_weight = 0.2;
    let prompt = model.encode(&ConditionInput { prompt: "abc".into(), ..ConditionInput::default() }).unwrap();
    let conditions = Conditions::new(&prompt, Some(Tensor::full([1, 1], 0.0)));
    let (x, t, d) = (Noise::new(1).latents(0, 0, &SHAPE).unwrap(), Timestep(800.0), Tensor::full(SHAPE, 1.0));
    let guidance = config(3.0, GuidanceGradient::Both).plan(model.schedule()).unwrap().guidance;
    let guided = guidance.velocity(&mut model, &x, t, &conditions, Adapter::On, Grad::Record).unwrap();
    let mut before = Vec::new();
    let tell = || {
        before = update::take_gradients(&mut model)?;
        Ok(())
    };
    guided.pullback.unwrap().pull(&d, None, tell).unwrap();
    let last = update::take_gradients(&mut model).unwrap();

    // d v / d u = 1 - s, d v / d c = s.
    let mut pulled = |conditioning: &Conditioning, slope: f32| {
        let (_, pullback) = model.velocity(&x, t, conditioning, Adapter::On, Grad::Record).unwrap();
        pullback.unwrap().pull(&Tensor::full(SHAPE, slope)).unwrap();
        update::take_gradients(&mut model).unwrap()
    };
    assert_eq!(before, pulled(conditions.negative.as_ref().unwrap(), -2.0));
    assert_eq!(last, pulled(&conditions.prompt, 3.0));
}

#[test]
fn training_rejects_samplers_without_gradient() {
    let refused = |config: RewardFlConfig| {
        let mut bench = Bench::new(config);
        bench.algorithm.check(&mut bench.model, Some(&bench.reward)).map_err(|e| e.to_string())
    };
    let message = refused(RewardFlConfig { sampler: Sampler::Unipc, ..RewardFlConfig::default() }).unwrap_err();
    assert!(message.contains("`algo.sampler`") && message.contains("algo.evaluation_sampler: unipc"), "{message}");
    let config = RewardFlConfig { evaluation_sampler: Some(Sampler::Unipc), ..config(3.5, GuidanceGradient::Both) };
    refused(config.clone()).unwrap();

    let mut evaluating = bench(config.clone());
    let evaluated = evaluating
        .algorithm
        .evaluate(&mut EvaluationContext {
            samples: &two(),
            upcoming: &[],
            model: &mut evaluating.model,
            rewards: vec![&mut evaluating.reward],
            noise: &Noise::new(11),
            progress: &Silent,
        })
        .unwrap()
        .unwrap();
    assert!(evaluated.iter().all(|e| e.scores[0].is_some() && e.video.is_some()));
    // The noise levels of the official inference, twice each, and the reference velocities of the four trained steps.
    let asked = &evaluating.model.velocity_calls;
    assert!(asked.len() == 2 * (16 + 4) && asked[0].0 == 999.0, "{asked:?}");

    let mut model = MockDiffusion::new();
    let plan = config.evaluation_plan(model.schedule()).unwrap();
    let conditions = Conditions::new(&model.encode(&ConditionInput::default()).unwrap(), Some(Tensor::zeros([1, 1])));
    let noise = Noise::new(1).latents(0, 0, &SHAPE).unwrap();
    let error = rollout(&mut model, &conditions, &noise, &plan, Grad::Record, &mut Unobserved).err().unwrap();
    assert!(error.to_string().contains("Euler"), "{error}");
    // The frames equal those of generation.
    let evaluated = rollout(&mut model, &conditions, &noise, &plan, Grad::Skip, &mut Unobserved).unwrap().latents;
    let RolloutPlan { schedule, sampler, guidance, .. } = plan;
    let generated = Sampling { schedule, sampler, guidance };
    let generated = generated.generate(&mut model, &conditions, &noise, Adapter::On, &Silent).unwrap();
    assert_eq!(evaluated.f32s().unwrap(), generated.f32s().unwrap());
}

#[test]
fn listed_timesteps_take_the_place_of_even_ones() {
    let listed = |timesteps: &[u32], config: RewardFlConfig| {
        let config = RewardFlConfig { timesteps: Some(timesteps.to_vec()), ..config };
        config.plan(MockDiffusion::new().schedule()).map_err(|e| e.to_string())
    };
    let four = RewardFlConfig { mid_timestep: 2, final_timestep: 3, ..RewardFlConfig::default() };
    let even = RewardFlConfig { num_inference_steps: 4, ..four.clone() }.plan(MockDiffusion::new().schedule()).unwrap();
    assert_eq!(listed(&[1000, 750, 500, 250], four.clone()).unwrap(), even);
    let message = listed(&[1000, 750, 500, 250], RewardFlConfig::default()).unwrap_err();
    assert!(message.contains("0 to 3 with 4 timesteps"), "{message}");
    let twice = RewardFlConfig { num_inference_steps: 6, ..four.clone() };
    assert!(listed(&[1000, 500, 200, 100], twice).unwrap_err().contains("leave one of the two out"));
    assert!(listed(&[500, 1000, 2], four).unwrap_err().contains("`algo.timesteps`"));
}

#[test]
fn frame_rate_is_that_of_the_model_or_the_clip() {
    let rate = |rate, frame_rate| {
        let mut bench = Bench::new(RewardFlConfig { frame_rate, ..RewardFlConfig::default() });
        bench.model.frame_rate = rate;
        bench.step(&[sample(0, "a")]).videos[0].1.fps()
    };
    // The clip has 8 frames per second.
    assert_eq!(rate(Some(16.0), FrameRate::Model), 16.0);
    assert_eq!(rate(None, FrameRate::Model), 8.0);
    assert_eq!(rate(Some(16.0), FrameRate::Clip), 8.0);
}

#[test]
fn gradient_split_interval_depends_on_the_parameter_count() {
    let config = RewardFlConfig::default();
    let steps: Vec<u64> = (0..60).filter(|step| config.measures_gradients_apart(*step, 1000)).collect();
    assert_eq!(steps, [24, 49]);
    // LoRA of rank 32 on one expert and on both experts of A14B, by `roll plan`.
    for parameters in [153_354_240, 306_708_480] {
        assert!(
            config.measures_gradients_apart(24, parameters) && !config.measures_gradients_apart(25, parameters),
            "{parameters}"
        );
    }
    assert!((0..60).all(|step| !config.measures_gradients_apart(step, 14_000_000_000)));
    let asked = RewardFlConfig { gradient_split_every: Some(1), ..RewardFlConfig::default() };
    assert!(asked.measures_gradients_apart(0, 14_000_000_000));
    assert!(!RewardFlConfig { gradient_split_every: Some(0), ..config }.measures_gradients_apart(24, 1000));
}
