//! The rollout from noise to latents, and the discrete adjoint back.

use crate::Sampler;
use roll_core::{Adapter, DiffusionModel, Error, Grad, Result, Tensor};
use roll_step::stopwatch::{PULL, REFERENCE, ROLLOUT, Stopwatch};

use super::loss::step_kl;
use super::plan::{Adjoint, RolloutPlan};
use crate::arithmetic::{axpy, scaled};
use crate::policy_gradient::LossMask;
use crate::sampling::{Conditions, Guided, GuidedPullback};

/// Receives the progress of a rollout.
pub trait Observer {
    /// Called when a phase begins, with the metric of its seconds and its description. An error ends the rollout.
    fn begin(&mut self, _metric: &'static str, _description: Option<&str>) -> Result<()> {
        Ok(())
    }
    /// Receives the guided velocity of a step.
    fn velocity(&mut self, _step: usize, _velocity: &Tensor) {}
    /// Receives the velocity of the KL's reference in a trained step, under the prompt and without guidance.
    fn reference(&mut self, _step: usize, _velocity: &Tensor) {}
    /// Receives the latents after a step.
    fn latents(&mut self, _step: usize, _latents: &Tensor) {}
}

/// An observer that does nothing.
pub struct Unobserved;
impl Observer for Unobserved {}

impl Observer for Stopwatch<'_> {
    fn begin(&mut self, metric: &'static str, description: Option<&str>) -> Result<()> {
        Stopwatch::begin(self, metric, description)
    }
}

/// A rollout with the records of its trained steps.
pub struct Trajectory {
    /// The latents to decode, `[C, T, H, W]`.
    pub latents: Tensor,
    /// Mean of the KL over the steps with trainable parameters; 0 if the plan has no reference.
    pub kl: f64,
    /// Factor of the loss on the score: the similarity of leaps to the rollout; 1 without leaps.
    pub similarity: f64,
    /// See [`Adjoint::discount`].
    discount: f32,
    /// Derivative of `latents` with respect to the latents after the last step; 1 before [`Trajectory::continued`].
    slope: f32,
    steps: Vec<RecordedStep>,
    /// Number of steps of the rollout, for descriptions.
    total_steps: usize,
}

/// The record of one step for the adjoint. Recording starts with the first trained step.
struct RecordedStep {
    index: usize,
    /// Factor of the velocity in the gradient: the difference of noise levels over which it acts.
    delta: f32,
    /// Whether the first frame of the latents was replaced after the step.
    has_replaced_frame: bool,
    trained: Option<TrainedStep>,
}

/// The record of a step with gradient.
struct TrainedStep {
    pullback: GuidedPullback,
    /// d kl / d velocity under the prompt, with kl as the mean over steps; `None` for steps without trainable
    /// parameters.
    d_kl: Option<Tensor>,
}

/// Runs the steps of `plan` from `noise`, which is at the noise level of the plan's first step. A step of the Euler
/// sampler is `x_{i+1} = x_i + (sigma_{i+1} - sigma_i) v_i`. Only Euler steps support gradients.
///
/// The known first frame of TI2V models replaces that of the latents before the first step and after every step.
/// Trained steps are recorded if `grad` is [`Grad::Record`]. All other steps run without gradient, so their velocities
/// are constants.
///
/// The KL compares velocities under the prompt, without guidance. So its weight has the same meaning at every guidance
/// scale, and the reference needs no velocities under the negative prompt.
pub fn rollout(
    model: &mut dyn DiffusionModel,
    conditions: &Conditions,
    noise: &Tensor,
    plan: &RolloutPlan,
    grad: Grad,
    observer: &mut dyn Observer,
) -> Result<Trajectory> {
    if grad.is_on() && plan.sampler != Sampler::Euler {
        return Err(Error::Misuse(format!("gradients pass through Euler steps only, not through {}", plan.sampler)));
    }
    let RolloutPlan { schedule, trained, acting, first, last, guidance, .. } = plan;
    let total_steps = last + 1;
    let prompt = &conditions.prompt;
    // Symbols: x latents, v guided velocity, c velocity under the prompt, u velocity of the KL's reference.
    let mut x = prompt.with_first_frame(noise)?;
    let mut sampler = plan.sampler.start();
    let mut steps = Vec::new();
    let mut kl = 0.0;
    let given_frames = usize::from(prompt.first_frame.is_some());
    let mut similarity = match plan.adjoint {
        Adjoint::Leap(leap) => leap.similarity(given_frames),
        Adjoint::Chain | Adjoint::Detached => None,
    };
    for i in *first..=*last {
        let timestep = schedule.timestep(i);
        let is_trained = trained.contains(&i);
        let grad = if is_trained { grad } else { Grad::Skip };

        observer.begin(ROLLOUT, Some(&format!("denoising step {} of {total_steps}", i + 1)))?;
        let Guided { velocity: v, conditional: c, pullback } =
            guidance.velocity(model, &x, timestep, conditions, Adapter::On, grad)?;
        observer.velocity(i, &v);
        let delta = plan.reach(i).0 as f32 - schedule.sigma(i).0 as f32;
        if is_trained && let Some(similarity) = &mut similarity {
            similarity.begin_leap(&x, delta, &v)?;
        }

        let d_kl = match plan.reference {
            Some(reference) if acting.contains(&i) => {
                observer.begin(REFERENCE, None)?;
                let u = model.velocity(&x, timestep, prompt, reference, Grad::Skip)?.0;
                observer.reference(i, &u);
                let mask = LossMask::after(given_frames, c.shape())?;
                let (kl_i, d_kl_i) = step_kl(&c, &u, schedule.sigma(i), mask)?;
                let share = 1.0 / acting.len() as f64;
                kl += kl_i * share;
                Some(scaled(&d_kl_i, share as f32)?)
            }
            // No KL is computed, or the step has no trainable parameters.
            _ => None,
        };
        let trained_step = pullback.map(|pullback| TrainedStep { pullback, d_kl });

        x = sampler.step(schedule.sigma(i), plan.end(i), &x, &v)?;
        // The first frame is replaced after the last step, too, so that training decodes the same latents as
        // generation.
        let has_replaced_frame = prompt.first_frame.is_some();
        if has_replaced_frame {
            x = prompt.with_first_frame(&x)?;
        }
        observer.latents(i, &x);
        if trained_step.is_some() || !steps.is_empty() {
            steps.push(RecordedStep { index: i, delta, has_replaced_frame, trained: trained_step });
        }
    }
    let similarity = similarity.map_or(Ok(1.0), |similarity| similarity.weight(&x))?;
    let (discount, slope) = (plan.adjoint.discount(), 1.0);
    Ok(Trajectory { latents: x, kl, similarity, discount, slope, steps, total_steps })
}

impl Trajectory {
    /// The trajectory with the latents `latents`, which are a linear function of its own latents with the derivative
    /// `slope`.
    pub(super) fn continued(self, latents: Tensor, slope: f32) -> Self {
        Self { latents, slope: self.slope * slope, ..self }
    }

    /// Pulls the cotangents of the latents (`None` is zero) and of the KL back to the parameters, from the last step to
    /// the first trained step: `d_v = (sigma_{i+1} - sigma_i) d_x`, `d_x += discount pull_i(d_v, d_kl/d_c_i)`. For a
    /// leap, the noise level of the next trained step replaces `sigma_{i+1}`.
    pub fn pull(self, d_latents: Option<&Tensor>, d_kl: f64, observer: &mut dyn Observer) -> Result<()> {
        self.pull_with(d_latents, d_kl, observer, || Ok(()))
    }

    /// As [`Trajectory::pull`]. `before_last` is called before the last pullback, the one of the first trained step.
    pub fn pull_with(
        self,
        d_latents: Option<&Tensor>,
        d_kl: f64,
        observer: &mut dyn Observer,
        before_last: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut d_x = match d_latents {
            Some(d) => scaled(d, self.slope)?,
            None => Tensor::zeros(self.latents.shape()),
        };
        let mut before_last = Some(before_last);
        let mut pulls_left = self.steps.iter().filter(|step| step.trained.is_some()).count();
        for RecordedStep { index, delta, has_replaced_frame, trained } in self.steps.into_iter().rev() {
            if has_replaced_frame {
                d_x = without_first_frame(&d_x)?;
            }
            let Some(TrainedStep { pullback, d_kl: d_kl_i }) = trained else { continue };
            let description = format!("pulling back through denoising step {} of {}", index + 1, self.total_steps);
            observer.begin(PULL, Some(&description))?;
            pulls_left -= 1;
            let is_last_pull = pulls_left == 0;
            let before_pull = || match before_last.take_if(|_| is_last_pull) {
                Some(before_last) => before_last(),
                None => Ok(()),
            };
            let d_v = scaled(&d_x, delta)?;
            let d_c = d_kl_i.map(|d_kl_i| scaled(&d_kl_i, d_kl as f32)).transpose()?;
            let pulled = pullback.pull(&d_v, d_c.as_ref(), before_pull)?;
            if self.discount != 0.0 {
                d_x = axpy(&d_x, self.discount, &pulled)?;
            }
        }
        Ok(())
    }
}

/// The cotangent with zeros in the first frame, because the latents of that frame were replaced.
fn without_first_frame(x: &Tensor) -> Result<Tensor> {
    let [_, frames, height, width] = *x.shape() else {
        return Err(Error::shape("latents", "[C, T, H, W]", x.shape()));
    };
    let pixels = height * width;
    let mut values = x.f32s()?.to_vec();
    values.chunks_exact_mut(frames * pixels).for_each(|channel| channel[..pixels].fill(0.0));
    Tensor::new(values, x.shape())
}
