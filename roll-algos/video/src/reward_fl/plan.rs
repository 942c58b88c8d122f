//! The plan of a rollout: its steps and which of them are trained, derived from the options and the model's schedule.

use crate::{FlowSchedule, Sampler};
use roll_core::{Adapter, Sigma};

use super::leap::Leap;
use crate::sampling::Guidance;

/// The plan of a rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutPlan {
    /// Noise levels of the steps.
    pub schedule: FlowSchedule,
    /// Sampler of the steps.
    pub sampler: Sampler,
    /// Classifier-free guidance of the velocities.
    pub guidance: Guidance,
    /// Indices of the steps with gradient, ascending. The first is a step with trainable parameters, because the
    /// gradient goes no further back. Later ones may be steps of a frozen expert.
    pub trained: Vec<usize>,
    /// Trained steps that have trainable parameters. The KL is a mean over these steps only, because a frozen expert
    /// does not diverge from itself: its zeros would reduce the KL and thereby the pull towards the reference.
    pub acting: Vec<usize>,
    /// How the gradient passes back through the trained steps.
    pub adjoint: Adjoint,
    /// Index of the first step.
    pub first: usize,
    /// Index of the last step.
    pub last: usize,
    /// The adapter of the policy that the KL compares with; `None` if no KL is computed.
    pub reference: Option<Adapter>,
    /// The latents that are decoded if the rollout stops before the last step of the schedule.
    pub early_stop: EarlyStop,
}

impl RolloutPlan {
    /// The plan with other trained steps, all of which have trainable parameters.
    pub(super) fn training(self, steps: Vec<usize>) -> Self {
        Self { acting: steps.clone(), trained: steps, ..self }
    }

    /// Reduces the plan to one step, which is trained and leads to the data (noise level 0).
    pub(super) fn alone(self, step: usize) -> Self {
        Self { first: step, last: step, early_stop: EarlyStop::PredictX0, ..self.training(vec![step]) }
    }

    /// Divides the plan into the steps of the high-noise and of the low-noise expert, so that the rollout can be
    /// interrupted in between; the second plan continues from the latents of the first. Returns `None` unless both
    /// experts have steps, the high-noise steps contribute to no gradient and no KL, and the sampler keeps no state
    /// between steps.
    pub(crate) fn divided(&self, boundary: Option<f64>) -> Option<[Self; 2]> {
        let is_low = |i: &usize| boundary.is_some_and(|boundary| self.schedule.timestep(*i).uses_low_noise(boundary));
        let first_low = (self.first..=self.last).find(is_low)?;
        let has_high = first_low > self.first;
        let trains_high = self.trained.iter().chain(&self.acting).any(|i| *i < first_low);
        if !has_high || trains_high || self.sampler != Sampler::Euler {
            return None;
        }
        let (last, early_stop, adjoint) = (first_low - 1, EarlyStop::Decode, Adjoint::Chain);
        let high = Self { last, early_stop, adjoint, ..self.clone() };
        Some([high.training(Vec::new()), Self { first: first_low, ..self.clone() }])
    }

    /// The noise level after step `i`: that of the next step, or 0 if the step leads to the data.
    pub(super) fn end(&self, i: usize) -> Sigma {
        match self.early_stop {
            EarlyStop::PredictX0 if i == self.last => Sigma(0.0),
            _ => self.schedule.sigma(i + 1),
        }
    }

    /// The noise level up to which the velocity of trained step `i` acts in the gradient: the end of the step or, for a
    /// leap, the level of the next trained step.
    pub(super) fn reach(&self, i: usize) -> Sigma {
        match self.adjoint {
            Adjoint::Leap(_) => {
                let next = self.trained.iter().find(|next| **next > i);
                next.map_or(self.end(self.last), |next| self.schedule.sigma(*next))
            }
            Adjoint::Chain | Adjoint::Detached => self.end(i),
        }
    }
}

/// How the gradient passes back through the trained steps. It never changes the latents of the rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Adjoint {
    /// The chain rule. The velocities of steps that are not trained are constants.
    #[default]
    Chain,
    /// Each trained step by itself: the latents that its velocity is computed from are constants.
    Detached,
    /// The chain rule over leaps from each trained step to the next.
    Leap(Leap),
}

impl Adjoint {
    /// Factor of the gradient with respect to the latents that a velocity is computed from.
    pub(super) fn discount(self) -> f32 {
        match self {
            Self::Chain => 1.0,
            Self::Detached => 0.0,
            Self::Leap(leap) => leap.discount as f32,
        }
    }
}

/// The latents that are decoded if the rollout stops early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EarlyStop {
    /// The latents as they are, still noisy, as in the reference implementation.
    Decode,
    /// The data predicted from the last velocity: the last step leads to noise level 0.
    PredictX0,
}
