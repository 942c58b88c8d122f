//! From noise to latents, and the discrete adjoint back.

use roll_core::{Adapter, Conditioning, DType, DiffusionModel, Grad, Pullback, Result, Tensor, Timestep};

use super::loss::step_kl;
use super::plan::{LatentDtype, Plan};
use crate::AlgorithmError;

/// What goes on in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the variants are their own documentation
pub enum Phase {
    Encode,
    Rollout { step: usize, of: usize },
    Reference { step: usize, of: usize },
    Decode,
    Score,
    PullReward,
    Pull { step: usize, of: usize },
    Optimizer,
}

/// Told what a rollout does.
pub trait Observer {
    /// `phase` begins. An error ends the rollout.
    fn begin(&mut self, _phase: Phase) -> Result<()> {
        Ok(())
    }
    /// The velocity of a step.
    fn velocity(&mut self, _step: usize, _velocity: &Tensor) {}
    /// The velocity of a trained step without the adapter.
    fn reference(&mut self, _step: usize, _velocity: &Tensor) {}
    /// The latents after a step.
    fn latents(&mut self, _step: usize, _latents: &Tensor) {}
}

/// Observes nothing.
pub struct Unobserved;
impl Observer for Unobserved {}

/// A recorded rollout.
pub struct Trajectory {
    /// What gets decoded, `[C, T, H, W]`.
    pub latents: Tensor,
    /// Mean of the KL over the steps with trainable parameters.
    pub kl: f64,
    steps: Vec<Step>,
    of: usize,
}

/// What the adjoint needs of one step, from the first trained one on.
struct Step {
    index: usize,
    delta: f32,
    /// Whether the first frame of the latents was replaced after the step.
    replaced: bool,
    trained: Option<Trained>,
}

struct Trained {
    pullback: Pullback,
    /// d kl / d velocity, kl being the mean over steps; `None` where nothing is trained.
    d_kl: Option<Tensor>,
}

/// Runs the steps of `plan` from `noise`: `x_{i+1} = x_i + (sigma_{i+1} - sigma_i) v_i`.
///
/// The known first frame of TI2V models replaces that of the latents before the first step and after every one.
/// Trained steps are recorded if `grad` says so, all others run without gradient: their velocity counts as a constant.
pub fn rollout(
    model: &mut dyn DiffusionModel,
    conditioning: &Conditioning,
    noise: &Tensor,
    plan: &Plan,
    grad: Grad,
    observer: &mut dyn Observer,
) -> Result<Trajectory> {
    let Plan { schedule, trained, acting, last, .. } = plan;
    let of = last + 1;
    let mut x = conditioning.with_first_frame(noise)?;
    let mut steps = Vec::new();
    let mut kl = 0.0;
    for i in 0..=*last {
        let timestep = schedule.timestep(i);
        let is_trained = trained.contains(&i);
        let grad = if is_trained { grad } else { Grad::Skip };

        observer.begin(Phase::Rollout { step: i, of })?;
        let (v, pullback) = model.velocity(&x, timestep, conditioning, Adapter::On, grad)?;
        observer.velocity(i, &v);

        let d_kl = match acting.contains(&i) {
            false => None,
            true => {
                observer.begin(Phase::Reference { step: i, of })?;
                let u = reference_velocity(model, &x, timestep, conditioning)?;
                observer.reference(i, &u);
                let (kl_i, d_kl_i) = step_kl(&v, &u, schedule.sigma(i))?;
                let share = 1.0 / acting.len() as f64;
                kl += kl_i * share;
                Some(scaled(&d_kl_i, share as f32)?)
            }
        };
        let trained = match (grad, pullback) {
            (Grad::Skip, _) => None,
            (Grad::Record, Some(pullback)) => Some(Trained { pullback, d_kl }),
            (Grad::Record, None) => return Err(no_pullback(format!("the velocity of step {i}")).into()),
        };

        let delta = plan.delta(i);
        x = rounded(axpy(&x, delta, &v)?, plan.latent_dtype)?;
        // After the last step too, as in generation: what is decoded here is what will be decoded there.
        let replaced = conditioning.first_frame.is_some();
        if replaced {
            x = conditioning.with_first_frame(&x)?;
        }
        observer.latents(i, &x);
        if trained.is_some() || !steps.is_empty() {
            steps.push(Step { index: i, delta, replaced, trained });
        }
    }
    Ok(Trajectory { latents: x, kl, steps, of })
}

impl Trajectory {
    /// Pulls the cotangents of the latents (`None` is zero) and of the KL back to the parameters:
    /// `d_v = (sigma_{i+1} - sigma_i) d_x + d_kl/d_v_i`, `d_x += pull_i(d_v)`, from the last step to the first trained.
    pub fn pull(self, d_latents: Option<&Tensor>, d_kl: f64, observer: &mut dyn Observer) -> Result<()> {
        self.pull_telling(d_latents, d_kl, observer, || Ok(()))
    }

    /// As [`Trajectory::pull`]; `before_last` runs before the pull of the first trained step, which is the last.
    pub fn pull_telling(
        self,
        d_latents: Option<&Tensor>,
        d_kl: f64,
        observer: &mut dyn Observer,
        before_last: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut d_x = match d_latents {
            Some(d) => d.clone(),
            None => Tensor::zeros(self.latents.shape()),
        };
        let mut before_last = Some(before_last);
        let mut left = self.steps.iter().filter(|step| step.trained.is_some()).count();
        for Step { index, delta, replaced, trained } in self.steps.into_iter().rev() {
            if replaced {
                d_x = without_first_frame(&d_x)?;
            }
            let Some(Trained { pullback, d_kl: d_kl_i }) = trained else { continue };
            observer.begin(Phase::Pull { step: index, of: self.of })?;
            left -= 1;
            if let Some(before_last) = before_last.take_if(|_| left == 0) {
                before_last()?;
            }
            let d_v = match &d_kl_i {
                Some(d_kl_i) => axpy(&scaled(d_kl_i, d_kl as f32)?, delta, &d_x)?,
                None => scaled(&d_x, delta)?,
            };
            d_x = axpy(&d_x, 1.0, &pullback.pull(&d_v)?)?;
        }
        Ok(())
    }
}

fn reference_velocity(
    model: &mut dyn DiffusionModel,
    x: &Tensor,
    timestep: Timestep,
    conditioning: &Conditioning,
) -> Result<Tensor> {
    Ok(model.velocity(x, timestep, conditioning, Adapter::Off, Grad::Skip)?.0)
}

pub(super) fn no_pullback(what: String) -> AlgorithmError {
    AlgorithmError::NoPullback { what }
}

/// `x + a y`.
fn axpy(x: &Tensor, a: f32, y: &Tensor) -> Result<Tensor> {
    if x.shape() != y.shape() {
        return Err(roll_core::Error::shape("step of the latents", format!("{:?}", x.shape()), y.shape()));
    }
    let values = x.f32s()?.iter().zip(y.f32s()?).map(|(x, y)| x + a * y).collect::<Vec<f32>>();
    Tensor::new(values, x.shape())
}

fn scaled(x: &Tensor, a: f32) -> Result<Tensor> {
    Tensor::new(x.f32s()?.iter().map(|x| x * a).collect::<Vec<f32>>(), x.shape())
}

fn rounded(x: Tensor, dtype: LatentDtype) -> Result<Tensor> {
    match dtype {
        LatentDtype::F32 => Ok(x),
        LatentDtype::Bf16 => x.to_float(DType::Bf16)?.to_float(DType::F32),
    }
}

fn without_first_frame(x: &Tensor) -> Result<Tensor> {
    let (_, frames, pixels) = layout(x)?;
    let mut values = x.f32s()?.to_vec();
    values.chunks_exact_mut(frames * pixels).for_each(|channel| channel[..pixels].fill(0.0));
    Tensor::new(values, x.shape())
}

/// Channels, frames, and pixels of a frame.
fn layout(x: &Tensor) -> Result<(usize, usize, usize)> {
    match *x.shape() {
        [c, t, h, w] => Ok((c, t, h * w)),
        _ => Err(roll_core::Error::shape("latents", "[C, T, H, W]", x.shape())),
    }
}
