//! Truncation of a rollout's gradient: the selection of the trained steps.
//!
//! All variants select from the same steps: the steps from `mid_timestep` to `final_timestep`, within the bounds on the
//! noise level, that have trainable parameters. DRaFT (<https://arxiv.org/abs/2309.17400>) trains the last K of these
//! steps; its variant DRaFT-LV trains the last step from several noisings of the result. AlignProp
//! (<https://arxiv.org/abs/2310.03739>) and ReFL (<https://arxiv.org/abs/2304.05977>) draw the trained step at random.
//! LeapAlign ([`super::leap`]) draws two steps and SRPO ([`super::direct`]) one. DRTune
//! (<https://arxiv.org/abs/2405.00760>) and FlowBP (<https://arxiv.org/abs/2606.11075>) stop the gradient between the
//! trained steps; [`Adjoint`] says how the gradient passes them.

use roll_core::{Error, Noise, Purpose, Result, ScheduleFacts, Tensor};

use super::RolloutStart;
use super::config::TrainedSteps;
use super::direct;
use super::plan::{Adjoint, EarlyStop, RolloutPlan};
use crate::draw_keys::in_unit_interval;
use crate::flow_matching::mixed;

/// Number of trained steps of LeapAlign.
const LEAPS: usize = 2;

/// Numbers of steps per sample.
pub(super) struct StepCounts {
    /// Trained steps.
    pub(super) trained: usize,
    /// Steps that are computed in addition to the rollout.
    pub(super) beside_rollout: usize,
}

impl TrainedSteps {
    /// The numbers of steps per sample if the window has `steps` steps.
    pub(super) fn counts(&self, steps: usize) -> StepCounts {
        let (trained, beside_rollout) = match *self {
            // Trained steps are steps of the rollout.
            Self::Window => (steps, 0),
            Self::Last(k) | Self::Random(k) | Self::Uniform(k) => (k.min(steps), 0),
            Self::Leap(_) => (LEAPS.min(steps), 0),
            // Trained steps follow the rollout.
            Self::Renoised(n) => (n, n),
            Self::Direct(_) => (direct::STEPS, direct::STEPS),
        };
        StepCounts { trained, beside_rollout }
    }

    /// The number of videos that are decoded and scored per sample, one after another.
    pub(super) fn videos(&self) -> usize {
        match *self {
            Self::Renoised(n) => n.max(1),
            Self::Direct(_) => direct::STEPS,
            _ => 1,
        }
    }

    /// How the gradient passes through the selected steps. Fails if `stop_gradient` is set and has no effect.
    pub(super) fn adjoint(&self, stop_gradient: bool) -> Result<Adjoint> {
        let scope = "`stop_gradient` applies to `algo.trained_steps` of `last`, `random` or `uniform`";
        let remedy = match *self {
            Self::Leap(leap) if !stop_gradient => return Ok(Adjoint::Leap(leap)),
            _ if !stop_gradient => return Ok(Adjoint::Chain),
            Self::Last(_) | Self::Random(_) | Self::Uniform(_) => return Ok(Adjoint::Detached),
            Self::Leap(_) => {
                "leave it out, and set `algo.trained_steps.leap.discount: 0` to stop the gradient of leaps"
            }
            Self::Window => "choose `{uniform: K}` with the number of steps, or leave it out",
            Self::Renoised(_) => "leave it out: of `renoised`, each velocity is computed from constants",
            Self::Direct(_) => "leave it out: of `direct`, each velocity is computed from constants",
        };
        Err(Error::config("algo.stop_gradient", format!("{scope}; {remedy}")))
    }

    /// Restricts the plan to the selected steps or, if they are random, to the steps that they are drawn from. Fails if
    /// the number is 0 or too large.
    pub(super) fn restricted(&self, plan: RolloutPlan, facts: ScheduleFacts) -> Result<RolloutPlan> {
        let available = plan.acting.len();
        let (count, most) = match *self {
            Self::Window => return Ok(plan),
            // No step can be selected; `check_experts` reports why.
            _ if available == 0 => return Ok(plan),
            Self::Direct(ref direct) => return direct.restricted(plan, facts),
            Self::Renoised(n) => (n, usize::MAX),
            Self::Last(k) | Self::Random(k) | Self::Uniform(k) => (k, available),
            Self::Leap(_) => (LEAPS, available),
        };
        if count == 0 {
            return Err(Error::config("algo.trained_steps", "expected a number of at least 1, found 0"));
        }
        if count > most {
            let remedy = if matches!(self, Self::Leap(_)) { "begin" } else { "ask for fewer, or begin" };
            let problem = format!(
                "{count} steps are to be trained, and trained parameters act at {most} of those from `mid_timestep` to \
                 `final_timestep`: {remedy} earlier"
            );
            return Err(Error::config("algo.trained_steps", problem));
        }
        let chosen = match *self {
            Self::Last(k) => plan.acting[available - k..].to_vec(),
            Self::Uniform(k) => (1..=k).map(|i| plan.acting[i * available / k - 1]).collect(),
            _ => plan.acting.clone(),
        };
        Ok(plan.training(chosen))
    }

    /// Draws the steps of one sample, ascending, from the `candidates`, the trained steps of
    /// [`TrainedSteps::restricted`].
    fn drawn(&self, candidates: &[usize], noise: &Noise, step: u64, key: u64) -> Vec<usize> {
        let count = match *self {
            Self::Random(k) => k.min(candidates.len()),
            Self::Renoised(_) | Self::Direct(_) => candidates.len().min(1),
            Self::Leap(_) => LEAPS.min(candidates.len()),
            _ => return candidates.to_vec(),
        };
        // Draws without replacement.
        let (mut remaining, mut drawn) = (candidates.to_vec(), Vec::new());
        let mut draw = noise.uniform(Purpose::Levels, step, key);
        for _ in 0..count {
            drawn.push(remaining.remove((in_unit_interval(draw()) * remaining.len() as f64) as usize));
        }
        drawn.sort_unstable();
        drawn
    }

    /// Returns the starts of a sample's videos. `plan` is the result of [`TrainedSteps::restricted`], and `latents` is
    /// the noise that the rollout begins with. `step` and `key` are the training step and the sample's key, for the
    /// draws from `noise`. `run` computes the final latents of a plan from given latents, without gradient.
    pub(super) fn starts(
        &self,
        plan: &RolloutPlan,
        latents: Tensor,
        noise: &Noise,
        [step, key]: [u64; 2],
        run: impl FnOnce(&RolloutPlan, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<RolloutStart>> {
        let trained = self.drawn(&plan.trained, noise, step, key);
        // The whole rollout to the data, without a trained step.
        let to_data = RolloutPlan { early_stop: EarlyStop::PredictX0, ..plan.clone().training(Vec::new()) };
        match self {
            Self::Renoised(count) => {
                let data = run(&to_data, &latents)?;
                renoised_starts(plan, &data, *count, &trained, noise, [step, key])
            }
            Self::Direct(direct) => {
                let data = run(&to_data, &latents)?;
                match trained.first() {
                    Some(i) => direct.starts(plan, &data, &latents, *i),
                    None => Ok(Vec::new()),
                }
            }
            _ => {
                let plan = if *self == Self::Window { plan.clone() } else { plan.clone().training(trained) };
                Ok(vec![RolloutStart { plan, latents, direct: None }])
            }
        }
    }
}

/// The starts of `count` videos for each of the `trained` steps: the rollout's `data`, noised to the level of the step.
fn renoised_starts(
    plan: &RolloutPlan,
    data: &Tensor,
    count: usize,
    trained: &[usize],
    noise: &Noise,
    [step, key]: [u64; 2],
) -> Result<Vec<RolloutStart>> {
    let draws = noise.normal(Purpose::Noising, step, key, &[count, data.len()])?;
    let mut starts = Vec::new();
    for draw in draws.f32s()?.chunks_exact(data.len().max(1)) {
        for &i in trained {
            let plan = plan.clone().alone(i);
            let latents = mixed(data, draw, plan.schedule.sigma(i))?;
            starts.push(RolloutStart { plan, latents, direct: None });
        }
    }
    Ok(starts)
}

#[cfg(test)]
mod tests {
    use roll_core::{Sigma, SigmaRange};

    use super::super::{Direct, Leap};
    use super::*;
    use crate::reward_fl::RewardFlConfig;

    const FACTS: ScheduleFacts = ScheduleFacts { shift: 5.0, boundary: Some(0.9), trained: SigmaRange::ALL };

    fn plan(trained_steps: TrainedSteps, facts: ScheduleFacts) -> Result<RolloutPlan> {
        RewardFlConfig { mid_timestep: 1, trained_steps, ..RewardFlConfig::default() }.plan(facts)
    }

    #[test]
    fn the_last_steps_and_those_at_even_distances_are_known_before_the_rollout() {
        for (steps, expected) in [
            (TrainedSteps::Last(1), &[7][..]),
            (TrainedSteps::Last(3), &[5, 6, 7]),
            (TrainedSteps::Uniform(1), &[7]),
            (TrainedSteps::Uniform(2), &[3, 7]),
            (TrainedSteps::Uniform(7), &[1, 2, 3, 4, 5, 6, 7]),
            (TrainedSteps::Random(2), &[1, 2, 3, 4, 5, 6, 7]),
        ] {
            let plan = plan(steps, FACTS).unwrap();
            assert_eq!((&plan.trained[..], &plan.acting[..]), (expected, expected));
        }
    }

    #[test]
    fn a_step_of_a_frozen_expert_is_never_chosen() {
        // Steps 1 and 2 use the high-noise expert, steps 3 to 7 the other.
        let high = ScheduleFacts { trained: SigmaRange { low: Sigma(0.9), high: Sigma(1.0) }, ..FACTS };
        assert_eq!(plan(TrainedSteps::Last(1), high).unwrap().trained, [2]);
        assert_eq!(plan(TrainedSteps::Random(1), high).unwrap().trained, [1, 2]);
        let message = plan(TrainedSteps::Last(3), high).unwrap_err().to_string();
        assert!(
            message.contains("`algo.trained_steps`") && message.contains("3 steps") && message.contains("at 2 of"),
            "{message}"
        );
        let two = TrainedSteps::Leap(Leap::default());
        assert_eq!(plan(two.clone(), high).unwrap().trained, [1, 2]);
        let one = ScheduleFacts { trained: SigmaRange { low: Sigma(0.95), high: Sigma(1.0) }, ..FACTS };
        let message = plan(two, one).unwrap_err().to_string();
        assert!(message.contains("2 steps") && message.contains("`: begin earlier"), "{message}");
        for none in
            [TrainedSteps::Last(0), TrainedSteps::Random(0), TrainedSteps::Uniform(0), TrainedSteps::Renoised(0)]
        {
            assert!(plan(none, FACTS).unwrap_err().to_string().contains("at least 1"));
        }
    }

    #[test]
    fn a_stopped_gradient_needs_steps_that_it_has_an_effect_on() {
        let stopped = |trained_steps| {
            let config = RewardFlConfig { trained_steps, stop_gradient: true, ..RewardFlConfig::default() };
            config.plan(FACTS).map(|plan| plan.adjoint).map_err(|e| e.to_string())
        };
        for steps in [TrainedSteps::Last(2), TrainedSteps::Random(2), TrainedSteps::Uniform(2)] {
            assert_eq!(stopped(steps), Ok(Adjoint::Detached));
        }
        for (steps, remedy) in [
            (TrainedSteps::Window, "`{uniform: K}`"),
            (TrainedSteps::Renoised(2), "`renoised`"),
            (TrainedSteps::Leap(Leap::default()), "`algo.trained_steps.leap.discount: 0`"),
            (TrainedSteps::Direct(Direct::default()), "`direct`"),
        ] {
            let message = stopped(steps).unwrap_err();
            assert!(message.contains("`algo.stop_gradient`") && message.contains(remedy), "{message}");
        }
    }

    #[test]
    fn options_of_leaps_outside_their_ranges_are_named() {
        for (leap, key) in [
            (Leap { discount: 1.5, ..Leap::default() }, "leap.discount"),
            (Leap { discount: f64::NAN, ..Leap::default() }, "leap.discount"),
            (Leap { similarity_floor: Some(0.0), ..Leap::default() }, "leap.similarity_floor"),
        ] {
            let message = plan(TrainedSteps::Leap(leap), FACTS).unwrap_err().to_string();
            assert!(message.contains(&format!("`algo.trained_steps.{key}`")), "{message}");
        }
        plan(TrainedSteps::Leap(Leap { similarity_floor: None, ..Leap::default() }), FACTS).unwrap();
    }

    #[test]
    fn options_of_direct_steps_outside_their_ranges_are_named() {
        let direct = |change: &dyn Fn(&mut Direct)| {
            let mut direct = Direct::default();
            change(&mut direct);
            plan(TrainedSteps::Direct(direct), FACTS).map(|plan| plan.trained).map_err(|e| e.to_string())
        };
        // The noise levels from step 1 on: .972 .938 .893 .833 .750 .625 .417. That of step 0 is 1, without any data.
        assert_eq!(direct(&|_| ()).unwrap(), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(direct(&|d| d.step = 0.7).unwrap(), [1, 2, 3, 4, 5]);
        // A level of `step` itself has noise level 0 below it, which the inversion cannot start from.
        for step in [0.625, 0.6245] {
            assert_eq!(direct(&|d| d.step = step).unwrap(), [1, 2, 3, 4, 5], "{step}");
        }
        assert_eq!(direct(&|d| d.step = 0.62).unwrap(), [1, 2, 3, 4, 5, 6]);
        for (change, key) in [
            (&(|d: &mut Direct| d.step = 0.0) as &dyn Fn(&mut Direct), "step"),
            (&|d| d.step = 1.0, "step"),
            (&|d| d.step = 0.98, "step"),
            (&|d| d.denoise_discount[1] = -0.1, "denoise_discount.1"),
            (&|d| d.inversion_discount[0] = f64::NAN, "inversion_discount.0"),
            (&|d| d.unwanted = " Real".into(), "unwanted"),
        ] {
            let message = direct(change).unwrap_err();
            assert!(message.contains(&format!("`algo.trained_steps.direct.{key}`")), "{message}");
        }
        let steps = TrainedSteps::Direct(Direct::default());
        let config = RewardFlConfig { mid_timestep: 0, trained_steps: steps.clone(), ..RewardFlConfig::default() };
        assert_eq!(config.plan(FACTS).unwrap().trained, [1, 2, 3, 4, 5, 6, 7]);
        let noise = RewardFlConfig { mid_timestep: 0, final_timestep: 0, ..config };
        let message = noise.plan(FACTS).unwrap_err().to_string();
        assert!(message.contains("`algo.trained_steps.direct.step`") && message.contains("below 1"), "{message}");
    }

    #[test]
    fn a_direct_step_stays_with_the_trained_experts() {
        let trained = |step: f64, low: f64, high: f64| {
            let facts = ScheduleFacts { trained: SigmaRange { low: Sigma(low), high: Sigma(high) }, ..FACTS };
            plan(TrainedSteps::Direct(Direct { step, ..Direct::default() }), facts).map(|plan| plan.trained)
        };
        // The noise levels from step 1 on: .972 .938 .893 .833 .750 .625 .417. The experts change at 0.9.
        assert_eq!(trained(0.02, 0.9, 1.0).unwrap(), [1, 2]);
        assert_eq!(trained(0.05, 0.9, 1.0).unwrap(), [1], "0.938 - 0.05 is in the other expert, which is frozen");
        assert_eq!(trained(0.05, 0.0, 1.0).unwrap(), [1, 2, 3, 4, 5, 6, 7], "both experts are trained");
        assert_eq!(trained(0.05, 0.0, 0.9).unwrap(), [3, 4, 5, 6, 7]);
        let message = trained(0.1, 0.9, 1.0).unwrap_err().to_string();
        assert!(message.contains("`algo.trained_steps.direct.step`") && message.contains("expert"), "{message}");
    }

    #[test]
    fn excess_weights_lie_on_a_line_over_the_trained_noise_levels() {
        let direct = Direct::default();
        for (height, k) in [(0.0, [0.1, 0.3]), (1.0, [0.25, 0.01]), (0.5, [0.175, 0.155])] {
            let [denoise, invert] = direct.steps(Sigma(0.9), height, &Tensor::zeros([1]));
            let near = |found: [f64; 2], expected: [f64; 2]| {
                assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-12), "{found:?} {expected:?}");
            };
            near(denoise.factors, [1.0 + k[0], -1.0]);
            near(invert.factors, [-1.0, 1.0 + k[1]]);
            assert_eq!((denoise.at, denoise.to), (invert.to, invert.at));
        }
    }

    #[test]
    fn steps_are_drawn_without_repetition_each_as_often_and_from_their_key_alone() {
        let (noise, from) = (Noise::new(5), [1, 2, 3, 4, 5]);
        let mut seen = [0usize; 6];
        for key in 0..1000 {
            let drawn = TrainedSteps::Random(2).drawn(&from, &noise, 3, key);
            assert!(drawn.len() == 2 && drawn[0] < drawn[1]);
            assert_eq!(drawn, TrainedSteps::Random(2).drawn(&from, &noise, 3, key));
            drawn.iter().for_each(|i| seen[*i] += 1);
        }
        assert!(seen[1..].iter().all(|n| (340..=460).contains(n)), "{seen:?}");
        let leap = TrainedSteps::Leap(Leap::default());
        assert!((0..50).all(|key| matches!(leap.drawn(&from, &noise, 3, key)[..], [k, j] if k < j)));
        let all =
            |step| (0..50).map(|key| TrainedSteps::Renoised(3).drawn(&from, &noise, step, key)).collect::<Vec<_>>();
        assert!(all(1) != all(2) && all(1).iter().all(|drawn| drawn.len() == 1));
    }

    #[test]
    fn the_options_are_a_word_or_one_number_by_name() {
        let read = |text: &str| serde_json::from_str::<TrainedSteps>(text);
        assert_eq!(read("\"window\"").unwrap(), TrainedSteps::Window);
        assert_eq!(read("{\"last\": 2}").unwrap(), TrainedSteps::Last(2));
        assert_eq!(read("{\"renoised\": 4}").unwrap(), TrainedSteps::Renoised(4));
        let leap = Leap { discount: 0.5, ..Leap::default() };
        assert_eq!(read("{\"leap\": {\"discount\": 0.5}}").unwrap(), TrainedSteps::Leap(leap));
        let direct = Direct { wanted: "Sharp".into(), ..Direct::default() };
        assert_eq!(read("{\"direct\": {\"wanted\": \"Sharp\"}}").unwrap(), TrainedSteps::Direct(direct));
        for wrong in [
            "{\"leap\": {\"alpha\": 0.5}}",
            "{\"leap\": 2}",
            "\"last\"",
            "{\"first\": 1}",
            "{\"last\": -1}",
            "{\"last\": 1, \"random\": 1}",
            "3",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
