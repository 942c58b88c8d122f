//! Classifier-free guidance (Ho and Salimans 2022): `v = u + s (c - u)`, with the velocity c under the prompt and u
//! under a negative prompt.
//!
//! A guided velocity is composed of two velocities of the model, so that models need no support for guidance.

use roll_core::{
    Adapter, Conditioning, DiffusionModel, Error, Grad, Pullback, Result, ScheduleFacts, Tensor, Timestep,
    VelocityInput,
};
use roll_step::AlgorithmError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::scale::GuidanceScale;
use crate::arithmetic::{axpy, scaled};

/// The velocities that the gradient of a guided velocity passes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuidanceGradient {
    /// The velocity under the prompt only; the one under the negative prompt is a constant. Records one velocity per
    /// step, as without guidance.
    #[default]
    Conditional,
    /// Both velocities: the exact gradient, which records two velocities per step.
    Both,
}

/// Conditions of a video: the prompt and, for guidance, the negative prompt.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// Prompt and pictures.
    pub prompt: Conditioning,
    /// The same pictures with the negative prompt; only needed for guidance.
    pub negative: Option<Conditioning>,
}

impl Conditions {
    /// Combines the conditions of `prompt` with the negative prompt, whose text embedding is `negative`.
    pub fn new(prompt: &Conditioning, negative: Option<Tensor>) -> Self {
        let negative = negative.map(|context| Conditioning { context, ..prompt.clone() });
        Self { prompt: prompt.clone(), negative }
    }
}

/// The guidance of a model's velocities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guidance {
    scale: GuidanceScale,
    /// Noise level between the model's experts, if it has two.
    boundary: Option<f64>,
    gradient: GuidanceGradient,
}

/// A guided velocity.
pub struct Guided {
    /// The velocity that the sampler follows.
    pub velocity: Tensor,
    /// The velocity under the prompt, without guidance.
    pub conditional: Tensor,
    /// The pullback of both velocities, if it was requested.
    pub pullback: Option<GuidedPullback>,
}

/// The pullback of a guided velocity and of the velocity under the prompt.
pub struct GuidedPullback {
    /// The scale s.
    scale: f32,
    /// The pullback of c, the velocity under the prompt.
    conditional: Pullback,
    /// The pullback of u, the velocity under the negative prompt, if the gradient passes through it.
    negative: Option<Pullback>,
}

impl Guidance {
    /// No guidance: one velocity per step.
    pub const OFF: Self = Self { scale: GuidanceScale::OFF, boundary: None, gradient: GuidanceGradient::Conditional };

    /// Creates the guidance of a model with these facts. Fails on scales below 1, and on two scales for one expert.
    pub fn new(scale: GuidanceScale, gradient: GuidanceGradient, facts: ScheduleFacts) -> Result<Self> {
        scale.check(facts)?;
        Ok(Self { scale, boundary: facts.boundary, gradient })
    }

    /// Whether a negative prompt is needed at some noise level.
    pub fn is_on(&self) -> bool {
        self.scale.is_on()
    }

    /// The scale at the noise level of `timestep`.
    pub fn at(&self, timestep: Timestep) -> f64 {
        match self.boundary {
            Some(boundary) if timestep.uses_low_noise(boundary) => self.scale.low,
            _ => self.scale.high,
        }
    }

    /// Computes the velocity at `latents`. With scale 1 the result is the model's velocity bit for bit, and no velocity
    /// under the negative prompt is computed.
    pub fn velocity(
        &self,
        model: &mut dyn DiffusionModel,
        latents: &Tensor,
        timestep: Timestep,
        conditions: &Conditions,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<Guided> {
        let velocity =
            |conditioning: &Conditioning, grad| model.velocity(latents, timestep, conditioning, adapter, grad);
        self.guided(timestep, conditions, grad, velocity)
    }

    /// Computes the velocities at several latents of the same noise level and shape, which the model may batch. Results
    /// and cotangents have an additional first axis.
    pub fn velocities(
        &self,
        model: &mut dyn DiffusionModel,
        latents: &[Tensor],
        timestep: Timestep,
        conditions: &Conditions,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<Guided> {
        let velocities = |conditioning: &Conditioning, grad| {
            let input = |latents| VelocityInput { latents, timestep, conditioning };
            model.velocities(&latents.iter().map(input).collect::<Vec<_>>(), adapter, grad)
        };
        self.guided(timestep, conditions, grad, velocities)
    }

    /// Composes the guided velocity. `velocity` computes the model's velocity under a conditioning.
    fn guided(
        &self,
        timestep: Timestep,
        conditions: &Conditions,
        grad: Grad,
        mut velocity: impl FnMut(&Conditioning, Grad) -> Result<(Tensor, Option<Pullback>)>,
    ) -> Result<Guided> {
        let scale = self.at(timestep) as f32;
        // The negative prompt comes first. Unless its velocity is recorded too, all of its memory is free again when
        // the other velocity is recorded.
        let negative = match (scale == 1.0, &conditions.negative, self.gradient) {
            (true, ..) => None,
            (_, None, _) => return Err(Error::Misuse("guidance needs the conditioning of a negative prompt".into())),
            (_, Some(negative), GuidanceGradient::Conditional) => Some(velocity(negative, Grad::Skip)?),
            (_, Some(negative), GuidanceGradient::Both) => Some(velocity(negative, grad)?),
        };
        let (conditional, conditional_pullback) = velocity(&conditions.prompt, grad)?;
        let (guided, negative_pullback) = match negative {
            None => (conditional.clone(), None),
            Some((u, pullback)) => (axpy(&u, scale, &axpy(&conditional, -1.0, &u)?)?, pullback),
        };
        let pullback = match (grad, conditional_pullback) {
            (Grad::Skip, _) => None,
            (Grad::Record, Some(conditional)) => {
                Some(GuidedPullback { scale, conditional, negative: negative_pullback })
            }
            (Grad::Record, None) => {
                let what = format!("the velocity at timestep {:.1}", timestep.0);
                return Err(AlgorithmError::NoPullback { what }.into());
            }
        };
        Ok(Guided { velocity: guided, conditional, pullback })
    }
}

impl GuidedPullback {
    /// Returns the cotangent of the latents. `d_velocity` is the cotangent of the guided velocity. `d_conditional` is
    /// the cotangent of the velocity under the prompt from loss terms that use this velocity directly (the KL).
    /// `before_last` is called before the model's last pullback.
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
