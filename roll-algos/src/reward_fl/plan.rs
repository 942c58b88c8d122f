//! The steps of a rollout, as the options and the model's schedule give them.

use crate::{FlowSchedule, Sampler};
use roll_core::Sigma;

use crate::sampling::Guidance;

/// The steps of a rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Noise levels.
    pub schedule: FlowSchedule,
    /// The step from one to the next.
    pub sampler: Sampler,
    /// The velocity at each.
    pub guidance: Guidance,
    /// The steps with gradient, ascending. Where experts take turns, they begin with the first that has trainable
    /// parameters: steps before it move none.
    pub trained: Vec<usize>,
    /// Those among them that have trainable parameters. The KL is a mean over these: a frozen expert does not diverge
    /// from itself, and its exact zeros would only make the KL smaller, and with it the pull back to the base model.
    pub acting: Vec<usize>,
    /// The first step.
    pub first: usize,
    /// The last step.
    pub last: usize,
    /// The latents of a stop before the last step of the schedule.
    pub early_stop: EarlyStop,
    /// Precision of latents between steps.
    pub latent_dtype: LatentDtype,
}

impl Plan {
    /// With these steps trained, at all of which trained parameters act.
    pub(super) fn training(self, steps: Vec<usize>) -> Self {
        Self { acting: steps.clone(), trained: steps, ..self }
    }

    /// One step, which is trained and leads to the data.
    pub(super) fn alone(self, step: usize) -> Self {
        Self { first: step, last: step, early_stop: EarlyStop::PredictX0, ..self.training(vec![step]) }
    }

    /// The noise level after step `i`: that of the next, or 0, all the way to the data.
    pub(super) fn end(&self, i: usize) -> Sigma {
        match self.early_stop {
            EarlyStop::PredictX0 if i == self.last => Sigma(0.0),
            _ => self.schedule.sigma(i + 1),
        }
    }
}

/// The latents that are decoded when the trajectory stops early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EarlyStop {
    /// The latents as they are, still noisy, as in the reference.
    Decode,
    /// The data that the last velocity points at: the last step goes to noise level 0.
    PredictX0,
}

/// Precision of latents between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LatentDtype {
    /// As computed.
    F32,
    /// Rounded to bf16 after every step, as in the reference. The gradient passes straight through.
    Bf16,
}
