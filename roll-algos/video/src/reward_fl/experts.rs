//! Checks which of the trained steps have trainable parameters. A model with two experts divides the noise levels
//! between them, and one expert may be frozen.

use crate::FlowSchedule;
use roll_core::{Error, Result, ScheduleFacts, Sigma, SigmaRange};

use super::config::RewardFlConfig;
use super::config::TrainedSteps;
use super::plan::RolloutPlan;

impl RewardFlConfig {
    /// Fails unless a trained step has trainable parameters. Otherwise returns warnings about options without effect.
    pub(super) fn check_experts(&self, facts: ScheduleFacts) -> Result<Vec<String>> {
        let plan = self.plan(facts)?;
        let (schedule, window) = (&plan.schedule, self.window(&plan.schedule));
        if plan.acting.is_empty() {
            return Err(self.unreached(schedule, &window, facts.trained));
        }
        if self.trained_steps != TrainedSteps::Window {
            // `chosen_steps` reports the chosen steps.
            return Ok(idle_expert(schedule, &self.evaluation_plan(facts)?.acting, facts).into_iter().collect());
        }
        let mut warnings = Vec::new();
        // Steps of a frozen expert before the first step with trainable parameters.
        let before: Vec<usize> = window.iter().copied().filter(|i| !plan.trained.contains(i)).collect();
        if !before.is_empty() {
            warnings.push(format!(
                "an expert that is not trained works at {}, before every step that is trained: they run without \
                 gradient, as with `algo.mid_timestep: {}`",
                steps(schedule, &before),
                plan.trained[0]
            ));
        }
        // Steps of a frozen expert after the first step with trainable parameters.
        let frozen: Vec<usize> = plan.trained.iter().copied().filter(|i| !plan.acting.contains(i)).collect();
        if !frozen.is_empty() {
            warnings.push(format!(
                "an expert that is not trained works at {}: the gradient passes through it, and the KL is the mean \
                 over the other steps",
                steps(schedule, &frozen)
            ));
        }
        warnings.extend(idle_expert(schedule, &plan.acting, facts));
        Ok(warnings)
    }

    /// Describes the trained steps and their experts; `None` if the whole window is trained.
    pub(super) fn chosen_steps(&self, facts: ScheduleFacts) -> Result<Option<String>> {
        let RolloutPlan { schedule, trained, .. } = self.plan(facts)?;
        let how = match &self.trained_steps {
            TrainedSteps::Window => return Ok(None),
            TrainedSteps::Last(_) | TrainedSteps::Uniform(_) => String::new(),
            TrainedSteps::Random(k) => format!("{k} drawn for each sample from "),
            TrainedSteps::Leap(_) => "2 drawn for each sample from ".into(),
            TrainedSteps::Direct(_) => "1 drawn for each sample, for a step down from it and one back, out of ".into(),
            TrainedSteps::Renoised(n) => format!("1 drawn for each sample, from {n} noisings, out of "),
        };
        let experts = facts.boundary.map(|boundary| {
            let are_both_trained = facts.trained.low.0 < boundary && boundary < facts.trained.high.0;
            let on_other = if are_both_trained { ", and the parameters of the other stay as they are" } else { "" };
            let high = trained.iter().filter(|i| schedule.expert_level(**i) >= Sigma(boundary)).count();
            match (high, trained.len() - high) {
                (0, _) => format!("; all of the low-noise expert{on_other}"),
                (_, 0) => format!("; all of the high-noise expert{on_other}"),
                (high, low) => format!("; {high} of the high-noise expert, {low} of the low-noise expert"),
            }
        });
        Ok(Some(format!("trained: {how}{}{}", steps(&schedule, &trained), experts.unwrap_or_default())))
    }

    /// The error if no trained step has trainable parameters.
    fn unreached(&self, schedule: &FlowSchedule, window: &[usize], trained: SigmaRange) -> Error {
        let trainable: Vec<usize> =
            (0..schedule.steps()).filter(|i| trained.contains(schedule.expert_level(*i))).collect();
        let (key, remedy) = match (trainable.first(), trainable.last()) {
            // All trainable steps come before the window.
            (Some(_), Some(last)) if *last < self.mid_timestep => ("mid_timestep", format!("set it to at most {last}")),
            // All come after it.
            (Some(first), Some(_)) if *first > self.final_timestep => {
                ("final_timestep", format!("set it to at least {first}"))
            }
            // Some lie in the window, but the boundaries exclude them.
            (Some(_), Some(_)) => {
                let remedy =
                    format!("include some of {} in it and `algo.max_timestep_boundary`", steps(schedule, &trainable));
                ("min_timestep_boundary", remedy)
            }
            // The rollout has no trainable step.
            _ => ("num_inference_steps", "take more steps, until some lie there".into()),
        };
        let problem = format!(
            "nothing would be trained: what is trained is {}, and the parameters under training act at noise levels \
             {:.3} to {:.3}; {remedy}, or train the other expert (`model.trainable_models`, `model.lora_base_model`)",
            steps(schedule, window),
            trained.low.0,
            trained.high.0
        );
        Error::config(format!("algo.{key}"), problem)
    }
}

/// The warning if both experts are under training, but one expert is used in none of the trained steps `acting`.
fn idle_expert(schedule: &FlowSchedule, acting: &[usize], facts: ScheduleFacts) -> Option<String> {
    let boundary = Sigma(facts.boundary?);
    let is_high = |i: &usize| schedule.expert_level(*i) >= boundary;
    let are_both_trained = facts.trained.low < boundary && boundary < facts.trained.high;
    let (expert, remedy) = match acting.iter().filter(|i| is_high(i)).count() {
        0 if are_both_trained => {
            let last = (0..schedule.steps()).take_while(is_high).last()?;
            ("high-noise expert, which works from", format!("`algo.mid_timestep` of at most {last}"))
        }
        n if are_both_trained && n == acting.len() => {
            let first = (0..schedule.steps()).find(|i| !is_high(i))?;
            ("low-noise expert, which works below", format!("`algo.final_timestep` of at least {first}"))
        }
        _ => return None,
    };
    Some(format!(
        "both experts are under training, and what is trained is {}: the parameters of the {expert} noise level {:.3}, \
         stay as they are; an {remedy} reaches them",
        steps(schedule, acting),
        boundary.0
    ))
}

/// Formats steps as "steps 4 to 7 (noise levels 0.833 to 0.417)".
fn steps(schedule: &FlowSchedule, steps: &[usize]) -> String {
    match steps {
        [] => "no step".into(),
        [one] => format!("step {one} (noise level {:.3})", schedule.expert_level(*one).0),
        [first, .., last] => {
            let [high, low] = [first, last].map(|i| schedule.expert_level(*i).0);
            let are_consecutive = last - first + 1 == steps.len();
            let numbers = if are_consecutive {
                format!("{first} to {last}")
            } else {
                steps.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
            };
            format!("steps {numbers} (noise levels {high:.3} to {low:.3})")
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const LOW: SigmaRange = SigmaRange { low: Sigma(0.0), high: Sigma(0.9) };
    const HIGH: SigmaRange = SigmaRange { low: Sigma(0.9), high: Sigma(1.0) };

    fn warnings(mid_timestep: usize, final_timestep: usize, trained: SigmaRange) -> Vec<String> {
        let config = RewardFlConfig { mid_timestep, final_timestep, ..RewardFlConfig::default() };
        config.check_experts(ScheduleFacts { shift: 5.0, boundary: Some(0.9), trained }).unwrap()
    }

    #[test]
    fn options_without_effect_are_warned_of_once() {
        assert!(warnings(4, 7, LOW).is_empty() && warnings(2, 7, SigmaRange::ALL).is_empty());
        let said = |mid, last, trained, parts: &[&str]| {
            let [warning] = &warnings(mid, last, trained)[..] else { panic!("{:?}", warnings(mid, last, trained)) };
            assert!(parts.iter().all(|part| warning.contains(part)), "{warning}");
        };
        said(1, 7, LOW, &["steps 1 to 2 (noise levels 0.972 to 0.938)", "without gradient", "`algo.mid_timestep: 3`"]);
        said(2, 7, HIGH, &["steps 3 to 7 (noise levels 0.893 to 0.417)", "the gradient passes through it"]);
        said(4, 7, SigmaRange::ALL, &["high-noise expert", "0.900", "`algo.mid_timestep` of at most 2"]);
        said(0, 2, SigmaRange::ALL, &["low-noise expert", "`algo.final_timestep` of at least 3"]);
    }

    #[test]
    fn chosen_steps_are_described_with_their_experts() {
        let said = |trained_steps, mid_timestep, trained| {
            let config = RewardFlConfig { mid_timestep, trained_steps, ..RewardFlConfig::default() };
            let facts = ScheduleFacts { shift: 5.0, boundary: Some(0.9), trained };
            (config.chosen_steps(facts).unwrap(), config.check_experts(facts).unwrap())
        };
        assert_eq!(said(TrainedSteps::Window, 0, SigmaRange::ALL), (None, vec![]));
        let (last, idle) = said(TrainedSteps::Last(1), 0, SigmaRange::ALL);
        let alone = "trained: step 7 (noise level 0.417); all of the low-noise expert";
        assert_eq!(last.unwrap(), format!("{alone}, and the parameters of the other stay as they are"));
        assert_eq!((said(TrainedSteps::Last(1), 0, LOW).0.unwrap(), idle.len()), (alone.to_string(), 0));
        let (_, idle) = said(TrainedSteps::Last(1), 4, SigmaRange::ALL);
        assert!(idle.len() == 1 && idle[0].contains("high-noise expert"), "{idle:?}");
        let (random, idle) = said(TrainedSteps::Random(2), 1, SigmaRange::ALL);
        let random = random.unwrap();
        assert!(random.contains("2 drawn for each sample from steps 1 to 7"), "{random}");
        assert!(
            random.contains("2 of the high-noise expert, 5 of the low-noise expert") && idle.is_empty(),
            "{random}"
        );
        let (renoised, _) = said(TrainedSteps::Renoised(4), 0, LOW);
        assert!(renoised.unwrap().contains("from 4 noisings, out of steps 3 to 7"));
        let (uniform, _) = said(TrainedSteps::Uniform(2), 4, LOW);
        assert!(uniform.unwrap().contains("steps 5, 7 (noise levels 0.750 to 0.417)"));
    }

    #[test]
    fn a_step_at_the_boundary_belongs_to_the_high_noise_expert() {
        // The f32 nearest to 0.9 is less than 0.9; its timestep is 900.
        let schedule = FlowSchedule::from_timesteps(&[900], 1.0).unwrap();
        assert!(schedule.sigma(0) < Sigma(0.9));
        let facts = |trained| ScheduleFacts { shift: 1.0, boundary: Some(0.9), trained };
        assert!(schedule.is_trained(0, facts(HIGH)) && !schedule.is_trained(0, facts(LOW)));
    }

    #[test]
    fn boundaries_that_leave_out_all_that_is_trained_are_named() {
        let config = RewardFlConfig { mid_timestep: 0, max_timestep_boundary: 0.9, ..RewardFlConfig::default() };
        let facts = ScheduleFacts { shift: 5.0, boundary: Some(0.9), trained: HIGH };
        let message = config.check_experts(facts).unwrap_err().to_string();
        assert!(message.contains("timestep_boundary") && message.contains("steps 0 to 2"), "{message}");
    }
}
