//! Samplers: how a flow is integrated from noise to data, one step between two noise levels at a time.
//!
//! A sampler uses one velocity per noise level and changes only the latents, so that models, guidance and trajectories
//! do not depend on the sampler.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::FlowSchedule;
use roll_core::{Error, Result, Sigma, Tensor};

/// The names of samplers.
const NAMES: [(&str, Sampler); 2] = [("euler", Sampler::Euler), ("unipc", Sampler::Unipc)];

/// A way to integrate the flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Sampler {
    /// `x_{i+1} = x_i + (sigma_{i+1} - sigma_i) v_i`: linear in the velocity, so that the factor of the gradient is a
    /// constant.
    #[default]
    Euler,
    /// UniPC of order 2 (Zhao et al. 2023, arXiv:2302.04867) with B2(h) = e^h - 1, on predictions of the data: the
    /// sampler of Wan's official inference, which needs fewer steps than Euler for the same error.
    Unipc,
}

impl Sampler {
    /// The usual noise levels of `steps` steps of this sampler. Those of Euler begin at pure noise, those of UniPC a
    /// little below it, as in Wan's official inference.
    pub fn schedule(self, steps: usize, shift: f64) -> Result<FlowSchedule> {
        match self {
            Self::Euler => FlowSchedule::new(steps, shift),
            Self::Unipc => FlowSchedule::unipc(steps, shift),
        }
    }

    /// Begins a trajectory.
    pub fn start(self) -> Integration {
        Integration { sampler: self, previous: None }
    }
}

impl fmt::Display for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, sampler)| sampler == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl FromStr for Sampler {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = NAMES.iter().find(|(name, _)| *name == text).map(|(_, sampler)| *sampler);
        found.ok_or_else(|| Error::config("sampler", format!("expected euler or unipc, found `{text}`")))
    }
}

/// The state of a trajectory between steps: the earlier steps that a sampler uses.
#[derive(Clone, Debug)]
pub struct Integration {
    sampler: Sampler,
    previous: Option<UnipcStep>,
}

/// One step of UniPC.
#[derive(Clone, Debug)]
struct UnipcStep {
    /// Noise level at the start of the step.
    sigma: f64,
    /// Corrected latents at the start of the step.
    latents: Vec<f32>,
    /// The data that the velocity at the start pointed at.
    data: Vec<f32>,
    /// Noise level and predicted data at the start of the previous step. `None` in steps of first order: the first
    /// step, and the step to level 0.
    earlier: Option<(f64, Vec<f32>)>,
}

impl Integration {
    /// Returns the latents at noise level `to` from the latents (f32, any shape) at `from` and their velocity
    /// `d latents / d sigma`. `from` is above `to`, and is where the previous step ended.
    pub fn step(&mut self, from: Sigma, to: Sigma, latents: &Tensor, velocity: &Tensor) -> Result<Tensor> {
        if latents.shape() != velocity.shape() {
            return Err(Error::shape("the velocity", format!("{:?}", latents.shape()), velocity.shape()));
        }
        let (x, v) = (latents.f32s()?, velocity.f32s()?);
        let next = match self.sampler {
            Sampler::Euler => {
                // The difference is taken in f32, because the levels of a schedule are f32 numbers.
                let delta = to.0 as f32 - from.0 as f32;
                x.iter().zip(v).map(|(x, v)| x + delta * v).collect()
            }
            Sampler::Unipc => self.unipc(from.0, to.0, x, v),
        };
        Tensor::new(next, latents.shape())
    }

    /// Corrects the latents at `from`, which the previous step predicted, by the velocity at them. Returns the
    /// predicted latents at `to`.
    fn unipc(&mut self, from: f64, to: f64, x: &[f32], v: &[f32]) -> Vec<f32> {
        let data: Vec<f32> = x.iter().zip(v).map(|(x, v)| (f64::from(*x) - from * f64::from(*v)) as f32).collect();
        let previous = self.previous.take();
        let latents = match &previous {
            Some(previous) => previous.corrected(from, &data),
            None => x.to_vec(),
        };
        // The step to `to = 0` is of first order, as in the official inference: lambda is infinite at its end.
        let earlier = previous.filter(|_| to > 0.0).map(|previous| (previous.sigma, previous.data));
        let step = UnipcStep { sigma: from, latents, data, earlier };
        let next = step.predicted(to);
        self.previous = Some(step);
        next
    }
}

/// Symbols: s and t are start and end of the step, e the start of the step before it; x latents, m predicted data. In
/// the code, `sigma_s` is `self.sigma`, `x_s` `self.latents`, `m_s` `self.data`, `(sigma_e, m_e)` `self.earlier`, and
/// `sigma_t` `to`. Further, `alpha = 1 - sigma`, `lambda = ln(alpha / sigma)`, `h = lambda_t - lambda_s`,
/// `r = (lambda_e - lambda_s) / h`, and `B = B2(-h) = e^{-h} - 1`, as is usual for predictions of the data.
impl UnipcStep {
    /// The predictor: the latents at the end of this step,
    /// `x_t = sigma_t / sigma_s x_s - alpha_t B (m_s + (m_e - m_s) / (2 r))`.
    fn predicted(&self, to: f64) -> Vec<f32> {
        let (b, [_, inverse_r]) = (self.b(to), self.h_and_inverse_r(to));
        self.advanced(to, b, |_, m, earlier| m + 0.5 * inverse_r * (earlier - m))
    }

    /// The corrector: the latents at the end of this step, recomputed with `data_at_end`, the data m_t predicted there:
    /// `x_t = sigma_t / sigma_s x_s - alpha_t B (m_s + u (m_e - m_s) + w (m_t - m_s))`. In every step but the first,
    /// the weights w and u make the step exact for data that are a polynomial in lambda of degree 2. In the first step,
    /// u is 0 and w is 1/2, as in the official inference.
    fn corrected(&self, to: f64, data_at_end: &[f32]) -> Vec<f32> {
        let (b, [h, inverse_r]) = (self.b(to), self.h_and_inverse_r(to));
        let (w, u) = match self.earlier {
            None => (0.5, 0.0),
            Some(_) => {
                // Means over the step, with weights proportional to `e^{h tau}`, where `tau = (lambda - lambda_s) / h`:
                // `mean_tau = (-B / h - 1) / B` and `mean_tau_squared = 2 ((-B / h - 1) / (-h) - 1 / 2) / B`.
                let mean_tau = (b / -h - 1.0) / b;
                let mean_tau_squared = ((b / -h - 1.0) / -h - 0.5) * 2.0 / b;
                // `tau` is 1 at t and r at e. The step is exact for the degrees 1 and 2 if `w + r u = mean_tau` and
                // `w + r^2 u = mean_tau_squared`. So `r u (1 - r) = mean_tau - mean_tau_squared`. `r u`
                // is computed from `1 / r`, because r is infinite if the previous step began at pure noise.
                let r_times_u = (mean_tau - mean_tau_squared) * inverse_r / (inverse_r - 1.0);
                (mean_tau - r_times_u, r_times_u * inverse_r)
            }
        };
        self.advanced(to, b, |i, m, earlier| m + u * (earlier - m) + w * (f64::from(data_at_end[i]) - m))
    }

    /// `sigma_t / sigma_s x_s - alpha_t B m`. `combine` returns an element of m from its index and the elements of m_s
    /// and m_e. Without a previous step, m_s takes the place of m_e.
    fn advanced(&self, to: f64, b: f64, combine: impl Fn(usize, f64, f64) -> f64) -> Vec<f32> {
        let (latents_factor, data_factor) = (to / self.sigma, (1.0 - to) * b);
        let earlier = self.earlier.as_ref().map_or(&self.data, |(_, data)| data);
        let numbers = self.latents.iter().zip(&self.data).zip(earlier).enumerate();
        numbers
            .map(|(i, ((x, m), e))| {
                (latents_factor * f64::from(*x) - data_factor * combine(i, f64::from(*m), f64::from(*e))) as f32
            })
            .collect()
    }

    /// `B` of the step to the noise level `to`.
    fn b(&self, to: f64) -> f64 {
        (lambda(self.sigma) - lambda(to)).exp_m1()
    }

    /// `h` and `1 / r` of the step to the noise level `to`; `1 / r` is 0 in a step of first order.
    fn h_and_inverse_r(&self, to: f64) -> [f64; 2] {
        let h = lambda(to) - lambda(self.sigma);
        let inverse_r = self.earlier.as_ref().map_or(0.0, |(earlier, _)| h / (lambda(*earlier) - lambda(self.sigma)));
        [h, inverse_r]
    }
}

/// `ln(alpha / sigma)`: minus infinity at pure noise, infinity at the data.
fn lambda(sigma: f64) -> f64 {
    ((1.0 - sigma) / sigma).ln()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::new(values.to_vec(), [values.len()]).unwrap()
    }

    /// The end of a trajectory whose velocity leads from `x` at `sigma` to `data(x, sigma)`.
    fn integrate(sampler: Sampler, schedule: &FlowSchedule, data: impl Fn(f64, f64) -> f64) -> f64 {
        let (mut x, mut steps) = (tensor(&[0.7]), sampler.start());
        for i in 0..schedule.steps() {
            let (from, at) = (schedule.sigma(i), f64::from(x.f32s().unwrap()[0]));
            let velocity = ((at - data(at, from.0)) / from.0) as f32;
            x = steps.step(from, schedule.sigma(i + 1), &x, &tensor(&[velocity])).unwrap();
        }
        f64::from(x.f32s().unwrap()[0])
    }

    #[test]
    fn every_sampler_reaches_data_that_do_not_change() {
        for sampler in [Sampler::Euler, Sampler::Unipc] {
            for steps in [1, 2, 3, 8] {
                let schedule = sampler.schedule(steps, 5.0).unwrap();
                let found = integrate(sampler, &schedule, |_, _| 0.3);
                assert!((found - 0.3).abs() < 1e-6, "{sampler} with {steps}: {found}");
            }
        }
    }

    /// A perfect model of data around 0.3 with a deviation of 0.5: noise e flows to `0.3 + 0.5 * e`.
    fn gaussian(x: f64, sigma: f64) -> f64 {
        let (alpha, variance) = (1.0 - sigma, 0.25);
        0.3 + variance * alpha / (alpha * alpha * variance + sigma * sigma) * (x - alpha * 0.3)
    }

    #[test]
    fn unipc_has_a_smaller_error_than_euler_with_as_many_steps() {
        let error = |sampler: Sampler, schedule: &FlowSchedule| {
            (integrate(sampler, schedule, gaussian) - (0.3 + 0.5 * 0.7)).abs()
        };
        let from_noise = FlowSchedule::new(40, 5.0).unwrap();
        let euler = error(Sampler::Euler, &from_noise);
        for schedule in [from_noise, FlowSchedule::unipc(40, 5.0).unwrap()] {
            let unipc = error(Sampler::Unipc, &schedule);
            assert!(unipc < 0.2 * euler, "{unipc} against {euler}");
        }
    }

    #[test]
    fn euler_adds_the_velocity_times_the_difference_of_the_levels() {
        let schedule = FlowSchedule::new(8, 5.0).unwrap();
        let (x, v) = (0.3f32, -1.7f32);
        for i in 0..8 {
            let mut steps = Sampler::Euler.start();
            let next = steps.step(schedule.sigma(i), schedule.sigma(i + 1), &tensor(&[x]), &tensor(&[v])).unwrap();
            assert_eq!(next.f32s().unwrap(), [x + schedule.delta(i) * v]);
        }
    }

    #[test]
    fn a_velocity_of_another_shape_and_an_unknown_name_are_errors() {
        let other = Sampler::Euler.start().step(Sigma(1.0), Sigma(0.5), &tensor(&[1.0]), &tensor(&[1.0, 2.0]));
        assert!(other.is_err());
        assert_eq!("unipc".parse::<Sampler>().unwrap(), Sampler::Unipc);
        assert!("ddim".parse::<Sampler>().unwrap_err().to_string().contains("euler or unipc"));
        assert_eq!(Sampler::Unipc.to_string(), "unipc");
    }
}
