//! The gradients of leaps and of detached steps, against central differences of the functions that they are gradients
//! of. Those functions differ from the rollout: what the gradient stops at is a constant of the rollout.
#![allow(clippy::unwrap_used)]

use roll_core::*;
use roll_testing::diffusion::{SHAPE, sample, values};

use super::loss::step_kl;
use super::tests::{Bench, HIGH_NOISE, two_experts};
use super::*;
use crate::arithmetic::axpy;
use crate::policy_gradient::LossMask;

const DETACHED: [TrainedSteps; 4] =
    [TrainedSteps::Last(3), TrainedSteps::Random(3), TrainedSteps::Uniform(2), TrainedSteps::Last(8)];

fn leaping(discount: f64, similarity_floor: Option<f64>) -> RewardFlConfig {
    let trained_steps = TrainedSteps::Leap(Leap { discount, similarity_floor });
    RewardFlConfig { mid_timestep: 0, trained_steps, ..RewardFlConfig::default() }
}

fn detached(trained_steps: TrainedSteps) -> RewardFlConfig {
    RewardFlConfig { mid_timestep: 0, trained_steps, stop_gradient: true, ..RewardFlConfig::default() }
}

/// Latents before and after each step, and the velocities of a rollout.
#[derive(Default)]
struct Seen {
    latents: Vec<Tensor>,
    velocities: Vec<Tensor>,
    references: Vec<Tensor>,
}

impl Observer for Seen {
    fn velocity(&mut self, _step: usize, velocity: &Tensor) {
        self.velocities.push(velocity.clone());
    }
    fn reference(&mut self, _step: usize, velocity: &Tensor) {
        self.references.push(velocity.clone());
    }
    fn latents(&mut self, _step: usize, latents: &Tensor) {
        self.latents.push(latents.clone());
    }
}

/// The loss of sample 0 at step 0 as a function of the parameters, with the constants of one rollout.
struct Surrogate {
    plan: RolloutPlan,
    conditions: Conditions,
    seen: Seen,
    target: Target,
    /// The noise levels that the trained steps lead from, and to.
    levels: Vec<[Sigma; 2]>,
    /// Weight of the loss on the score.
    similarity: f64,
}

impl Surrogate {
    fn of(bench: &mut Bench) -> Self {
        let (config, noise) = (bench.algorithm.config.clone(), Noise::new(11));
        let plan = config.plan(bench.model.schedule()).unwrap();
        let [positive, negative] = ["a", ""].map(|prompt| {
            bench.model.encode(&ConditionInput { prompt: prompt.into(), ..ConditionInput::default() }).unwrap()
        });
        let conditions = Conditions::new(&positive, plan.guidance.is_on().then_some(negative.context));
        let latents = noise.latents(0, 0, &SHAPE).unwrap();
        let starts = config.trained_steps.starts(&plan, latents, &noise, [0, 0], |_, _| unreachable!()).unwrap();
        let [RolloutStart { plan, latents, .. }] = &starts[..] else { panic!("several videos") };
        let mut seen = Seen { latents: vec![conditions.prompt.with_first_frame(latents).unwrap()], ..Seen::default() };
        rollout(&mut bench.model, &conditions, latents, plan, Grad::Skip, &mut seen).unwrap();

        let TrainedSteps::Leap(leap) = config.trained_steps else {
            let levels = plan.trained.iter().map(|i| [plan.schedule.sigma(*i), plan.end(*i)]).collect();
            return Self { plan: plan.clone(), conditions, seen, target: target(bench), levels, similarity: 1.0 };
        };
        let [k, j] = plan.trained[..] else { panic!("{:?}", plan.trained) };
        let [from, between] = [k, j].map(|i| plan.schedule.sigma(i));
        let levels = vec![[from, between], [between, plan.end(plan.last)]];
        let skipped = usize::from(bench.model.first_frame.is_some()) * 2;
        let distances = [(k, j), (j, plan.last + 1)].into_iter().zip(&levels).map(|((i, end), [from, to])| {
            let [x, v, end] = [&seen.latents[i], &seen.velocities[i], &seen.latents[end]].map(Tensor::to_f32_vec);
            // Two channels of two frames of two pixels.
            let distance = |i: usize| (f64::from(x[i]) + (to.0 - from.0) * f64::from(v[i]) - f64::from(end[i])).abs();
            let counted: Vec<f64> = (0..8).filter(|i| i % 4 >= skipped).map(distance).collect();
            counted.iter().sum::<f64>() / counted.len() as f64
        });
        let similarity = leap.similarity_floor.map_or(1.0, |floor| 1.0 / distances.map(|d| d.max(floor)).sum::<f64>());
        Self { plan: plan.clone(), conditions, seen, target: target(bench), levels, similarity }
    }

    /// The loss at the model's parameters.
    fn loss(&self, bench: &mut Bench) -> f64 {
        let (Self { plan, conditions, seen, .. }, config) = (self, bench.algorithm.config.clone());
        let discount = match config.trained_steps {
            TrainedSteps::Leap(leap) => leap.discount,
            _ => 0.0,
        };
        let known = usize::from(bench.model.first_frame.is_some());
        let mask = LossMask::after(known, &SHAPE).unwrap();
        // Difference of the latents from those of the rollout.
        let (mut moved, mut kl) = (Tensor::zeros(SHAPE), 0.0);
        for (number, (&i, [from, to])) in plan.trained.iter().zip(&self.levels).enumerate() {
            let x = axpy(&seen.latents[i], discount as f32, &moved).unwrap();
            let timestep = plan.schedule.timestep(i);
            let at =
                plan.guidance.velocity(&mut bench.model, &x, timestep, conditions, Adapter::On, Grad::Skip).unwrap();
            let n = plan.trained.len() as f64;
            if let Some(reference) = seen.references.get(number) {
                kl += step_kl(&at.conditional, reference, *from, mask).unwrap().0 / n;
            }
            let difference = axpy(&at.velocity, -1.0, &seen.velocities[i]).unwrap();
            moved = axpy(&moved, (to.0 - from.0) as f32, &difference).unwrap();
            let free = mask.map(|i| f64::from(moved.to_f32_vec()[i]));
            moved = Tensor::new(free.into_iter().map(|v| v as f32).collect::<Vec<_>>(), SHAPE).unwrap();
        }
        let latents = axpy(&seen.latents[plan.last + 1], 1.0, &moved).unwrap();
        let video = Video::new(bench.model.decode(&latents, Grad::Skip).unwrap().0, 8.0).unwrap();
        let (score, _) = bench.reward.score(&video, "a", &self.target, Grad::Skip).unwrap();
        let Score::Value { value: score, .. } = score else { panic!("no score") };
        let reward = (score - config.reward_mean) / config.reward_std;
        -self.similarity * config.reward_weight * reward + config.kl_weight * kl
    }
}

fn target(bench: &mut Bench) -> Target {
    bench.reward.prepare(sample(0, "a").clip().unwrap()).unwrap()
}

fn check(mut bench: Bench) {
    let what = format!("{:?}", bench.algorithm.config);
    let report = bench.step(&[sample(0, "a")]);
    let gradient = bench.strategy.gradient.clone();
    assert!(gradient.iter().any(|g| *g != 0.0));
    let surrogate = Surrogate::of(&mut bench);
    let (found, expected) = (report.metrics["actor/loss"], surrogate.loss(&mut bench));
    assert!((found - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{found} or {expected}: {what}");
    let at = bench.model.adapter.clone();
    for seed in 0..5 {
        let direction = values(50 + seed, at.len());
        let mut moved = |h: f32| {
            bench.model.adapter = at.iter().zip(&direction).map(|(a, d)| a + h * d).collect();
            surrogate.loss(&mut bench)
        };
        let h = 2e-3f32;
        let quotient = (moved(h) - moved(-h)) / f64::from(2.0 * h);
        let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
        // The similarity multiplies the rounding of the score, too.
        let reach = slope.abs() + 0.05 * surrogate.similarity.max(1.0);
        assert!((quotient - slope).abs() < 1e-3 * reach, "{seed}: {quotient} or {slope}, {what}");
    }
}

/// The bench of `config`, and with an early stop, a known first frame, and guidance.
fn check_variants(config: RewardFlConfig) {
    check(Bench::new(config.clone()));
    // Only the reward, so that the KL's gradient cannot hide errors in its gradient.
    check(Bench::new(RewardFlConfig { kl_weight: 0.0, ..config.clone() }));
    let guided = RewardFlConfig {
        guidance_scale: 3.5.into(),
        guidance_gradient: GuidanceGradient::Both,
        early_stop: EarlyStop::PredictX0,
        ..config
    };
    let mut bench = Bench::new(guided);
    bench.model.prompt_weight = 0.2;
    bench.model.first_frame = Some(Tensor::full([2, 1, 1, 2], 0.7));
    check(bench);
}

#[test]
fn gradient_of_leaps_matches_finite_differences() {
    for discount in [0.0, 0.3, 1.0] {
        for floor in [None, Some(0.01), Some(5.0)] {
            check_variants(leaping(discount, floor));
            for early_stop in [EarlyStop::Decode, EarlyStop::PredictX0] {
                check_variants(RewardFlConfig { final_timestep: 5, early_stop, ..leaping(discount, floor) });
            }
        }
    }
}

#[test]
fn detached_gradient_matches_finite_differences() {
    for steps in DETACHED {
        check_variants(detached(steps));
    }
    for early_stop in [EarlyStop::Decode, EarlyStop::PredictX0] {
        check_variants(RewardFlConfig { final_timestep: 5, early_stop, ..detached(TrainedSteps::Random(3)) });
    }
}

#[test]
fn leaps_train_the_high_noise_expert_alone() {
    // Steps 0 to 2 use the high-noise expert; steps 3 to 7 use the frozen one.
    let mut bench = two_experts(HIGH_NOISE, leaping(0.3, Some(0.1)));
    bench.algorithm.check(&mut bench.model, Some(&bench.reward)).unwrap();
    check(bench);
}

#[test]
fn leaps_over_the_last_two_steps_are_bit_exact_with_these_steps() {
    let gradient = |config| {
        let mut bench = Bench::new(config);
        let report = bench.step(&super::tests::two());
        (bench.strategy.gradient, report.metrics["actor/loss"], report.metrics["actor/kl_loss"])
    };
    let leaps = RewardFlConfig { mid_timestep: 6, ..leaping(1.0, None) };
    let last = RewardFlConfig { trained_steps: TrainedSteps::Last(2), ..RewardFlConfig::default() };
    assert_eq!(gradient(leaps), gradient(last.clone()));
    // The distance of two steps that follow one another is 0.
    let weighted = RewardFlConfig { mid_timestep: 6, ..leaping(1.0, Some(0.5)) };
    assert_eq!(gradient(weighted), gradient(last));
}

#[test]
fn a_stopped_gradient_changes_nothing_for_one_step_and_all_for_several() {
    let gradient = |k, stop_gradient| {
        let trained_steps = TrainedSteps::Last(k);
        let mut bench = Bench::new(RewardFlConfig { trained_steps, stop_gradient, ..RewardFlConfig::default() });
        let score = bench.step(&super::tests::two()).metrics["actor/score"];
        (bench.strategy.gradient, score)
    };
    assert_eq!(gradient(1, true), gradient(1, false));
    let (stopped, chained) = (gradient(3, true), gradient(3, false));
    assert!(stopped.0 != chained.0 && stopped.1 == chained.1);
}

#[test]
fn discount_zero_is_the_gradient_of_each_leap_by_itself() {
    let gradient = |discount| {
        let mut bench = Bench::new(leaping(discount, None));
        bench.step(&[sample(0, "a")]);
        bench.strategy.gradient
    };
    let [none, half, whole] = [0.0, 0.5, 1.0].map(gradient);
    // The gradient is linear in the discount.
    let middle = none.iter().zip(&whole).map(|(a, b)| (a + b) / 2.0);
    assert!(half.iter().zip(middle).all(|(h, m)| (h - m).abs() < 1e-6) && none != whole);
}
