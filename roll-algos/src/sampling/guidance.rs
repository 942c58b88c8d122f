//! Classifier-free guidance (Ho and Salimans 2022): `v = u + s (c - u)`, c being the velocity under the prompt and u
//! the one under a negative prompt.
//!
//! Composed of two velocities of the model, so that models know nothing of it.

use roll_core::{
    Adapter, Conditioning, DiffusionModel, Error, Grad, Pullback, Result, ScheduleFacts, Tensor, Timestep,
    VelocityInput,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::scale::GuidanceScale;
use crate::AlgorithmError;
use crate::arithmetic::{axpy, scaled};

/// The velocities that the gradient of a guided one passes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuidanceGradient {
    /// The one under the prompt; the other counts as a constant. It records one velocity a step, as without guidance.
    #[default]
    Conditional,
    /// Both: the exact gradient, which records two velocities a step.
    Both,
}

/// Conditions of a video: the prompt, and the one that guidance leads away from.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// Prompt and pictures.
    pub prompt: Conditioning,
    /// The same with the negative prompt; none is needed without guidance.
    pub negative: Option<Conditioning>,
}

impl Conditions {
    /// With the same pictures under the negative prompt, whose text embedding is `negative`.
    pub fn new(prompt: &Conditioning, negative: Option<Tensor>) -> Self {
        let negative = negative.map(|context| Conditioning { context, ..prompt.clone() });
        Self { prompt: prompt.clone(), negative }
    }
}

/// Guidance of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guidance {
    scale: GuidanceScale,
    boundary: Option<f64>,
    gradient: GuidanceGradient,
}

/// A guided velocity.
pub struct Guided {
    /// The velocity that the sampler follows.
    pub velocity: Tensor,
    /// The velocity under the prompt alone.
    pub conditional: Tensor,
    /// Of both; there when it was asked for.
    pub pullback: Option<GuidedPullback>,
}

/// Takes cotangents of a guided velocity back.
pub struct GuidedPullback {
    scale: f32,
    conditional: Pullback,
    negative: Option<Pullback>,
}

impl Guidance {
    /// None: one velocity a step.
    pub const OFF: Self = Self { scale: GuidanceScale::OFF, boundary: None, gradient: GuidanceGradient::Conditional };

    /// Guidance of a model with these facts.
    pub fn new(scale: GuidanceScale, gradient: GuidanceGradient, facts: ScheduleFacts) -> Result<Self> {
        scale.check(facts)?;
        Ok(Self { scale, boundary: facts.boundary, gradient })
    }

    /// Whether a negative prompt is needed at some noise level.
    pub fn is_on(&self) -> bool {
        self.scale.is_on()
    }

    /// The scale at a noise level.
    pub fn at(&self, timestep: Timestep) -> f64 {
        match self.boundary {
            Some(boundary) if timestep.uses_low_noise(boundary) => self.scale.low,
            _ => self.scale.high,
        }
    }

    /// The velocity at `latents`. Where the scale is 1 that is the model's own, bit for bit, and no other is computed.
    pub fn velocity(
        &self,
        model: &mut dyn DiffusionModel,
        latents: &Tensor,
        timestep: Timestep,
        conditions: &Conditions,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<Guided> {
        let at = |conditioning: &Conditioning, grad| model.velocity(latents, timestep, conditioning, adapter, grad);
        self.guided(timestep, conditions, grad, at)
    }

    /// The velocities at several latents of one noise level and shape, which the model may compute together; all of it,
    /// cotangents too, along a new first axis.
    pub fn velocities(
        &self,
        model: &mut dyn DiffusionModel,
        latents: &[Tensor],
        timestep: Timestep,
        conditions: &Conditions,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<Guided> {
        let at = |conditioning: &Conditioning, grad| {
            let input = |latents| VelocityInput { latents, timestep, conditioning };
            model.velocities(&latents.iter().map(input).collect::<Vec<_>>(), adapter, grad)
        };
        self.guided(timestep, conditions, grad, at)
    }

    fn guided(
        &self,
        timestep: Timestep,
        conditions: &Conditions,
        grad: Grad,
        mut at: impl FnMut(&Conditioning, Grad) -> Result<(Tensor, Option<Pullback>)>,
    ) -> Result<Guided> {
        let scale = self.at(timestep) as f32;
        // The negative one first: without its gradient nothing of it is left in memory when the other is recorded.
        let negative = match (scale == 1.0, &conditions.negative, self.gradient) {
            (true, ..) => None,
            (_, None, _) => return Err(Error::Misuse("guidance needs the conditioning of a negative prompt".into())),
            (_, Some(negative), GuidanceGradient::Conditional) => Some(at(negative, Grad::Skip)?),
            (_, Some(negative), GuidanceGradient::Both) => Some(at(negative, grad)?),
        };
        let (conditional, pullback) = at(&conditions.prompt, grad)?;
        let (velocity, negative) = match negative {
            None => (conditional.clone(), None),
            Some((u, pullback)) => (axpy(&u, scale, &axpy(&conditional, -1.0, &u)?)?, pullback),
        };
        let pullback = match (grad, pullback) {
            (Grad::Skip, _) => None,
            (Grad::Record, Some(conditional)) => Some(GuidedPullback { scale, conditional, negative }),
            (Grad::Record, None) => {
                let what = format!("the velocity at timestep {:.1}", timestep.0);
                return Err(AlgorithmError::NoPullback { what }.into());
            }
        };
        Ok(Guided { velocity, conditional, pullback })
    }
}

impl GuidedPullback {
    /// The cotangent of the latents, from that of the guided velocity and, of what depends on it alone, that of the
    /// velocity under the prompt. `before_last` runs before the model's last pull.
    pub fn pull(
        self,
        d_velocity: &Tensor,
        d_conditional: Option<&Tensor>,
        before_last: impl FnOnce() -> Result<()>,
    ) -> Result<Tensor> {
        let Self { scale, conditional, negative } = self;
        let through_negative = negative.map(|pullback| pullback.pull(&scaled(d_velocity, 1.0 - scale)?)).transpose()?;
        let d_c = match d_conditional {
            Some(d) => axpy(d, scale, d_velocity)?,
            None => scaled(d_velocity, scale)?,
        };
        before_last()?;
        let d_x = conditional.pull(&d_c)?;
        match through_negative {
            Some(d) => axpy(&d_x, 1.0, &d),
            None => Ok(d_x),
        }
    }
}
