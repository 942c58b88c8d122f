//! The steps of a schedule at which policy gradients train, and the plan of their evaluations.

use crate::FlowSchedule;
use roll_core::{Error, Result, ScheduleFacts};

use crate::kl_reference::KlReference;
use crate::reward_fl::{Adjoint, EarlyStop, RolloutPlan};
use crate::sampling::Sampling;

/// The steps of a schedule at which trainable parameters act and whose noise level lies within `low` to `high`. Fails
/// if there is no such step.
pub(crate) fn acting_steps(schedule: &FlowSchedule, facts: ScheduleFacts, [low, high]: [f64; 2]) -> Result<Vec<usize>> {
    for (name, value) in [("min_timestep_boundary", low), ("max_timestep_boundary", high)] {
        if !(0.0..=1.0).contains(&value) {
            return Err(Error::config(format!("algo.{name}"), format!("must lie between 0 and 1, found {value}")));
        }
    }
    let acts = |i: &usize| schedule.is_trained(*i, facts) && (low..=high).contains(&schedule.sigma(*i).0);
    let acting: Vec<usize> = (0..schedule.steps()).filter(acts).collect();
    // The error blames the bounds unless they admit every noise level.
    let key = if low > 0.0 || high < 1.0 { "algo.min_timestep_boundary" } else { "algo.num_inference_steps" };
    match acting.is_empty() {
        false => Ok(acting),
        true => Err(Error::config(
            key,
            format!(
                "no step is left to train: none of the {} steps has a noise level within min_timestep_boundary {low} \
                 to max_timestep_boundary {high} and within {} to {}, where the experts under training \
                 (`model.trainable_models`) work; more steps (`algo.num_inference_steps`) lie closer together",
                schedule.steps(),
                facts.trained.low.0,
                facts.trained.high.0
            ),
        )),
    }
}

/// The plan of an evaluation's rollout. It measures the KL from the policy of `reference` as a mean over the steps at
/// which trainable parameters act.
pub(crate) fn evaluation_plan(sampling: Sampling, facts: ScheduleFacts, reference: KlReference) -> Result<RolloutPlan> {
    let Sampling { schedule, sampler, guidance } = sampling;
    let acting = acting_steps(&schedule, facts, [0.0, 1.0])?;
    Ok(RolloutPlan {
        first: 0,
        last: schedule.steps() - 1,
        schedule,
        sampler,
        guidance,
        trained: acting.clone(),
        acting,
        adjoint: Adjoint::Chain,
        reference: Some(reference.adapter()),
        early_stop: EarlyStop::Decode,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{Sigma, SigmaRange};

    use super::*;

    #[test]
    fn only_steps_of_an_expert_under_training_are_trained() {
        let schedule = FlowSchedule::new(8, 5.0).unwrap();
        let facts = |low, high| ScheduleFacts {
            shift: 5.0,
            boundary: Some(0.9),
            trained: SigmaRange { low: Sigma(low), high: Sigma(high) },
        };
        assert_eq!(acting_steps(&schedule, facts(0.0, 0.9), [0.0, 1.0]).unwrap(), [3, 4, 5, 6, 7]);
        assert_eq!(acting_steps(&schedule, facts(0.9, 1.0), [0.0, 0.98]).unwrap(), [1, 2]);
        let message = acting_steps(&schedule, facts(0.0, 0.9), [0.9, 1.0]).unwrap_err().to_string();
        assert!(message.contains("no step is left") && message.contains("trainable_models"), "{message}");
        assert!(acting_steps(&schedule, facts(0.0, 0.9), [-0.1, 1.0]).is_err());
    }
}
