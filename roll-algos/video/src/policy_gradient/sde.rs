//! Stochastic denoising steps. A step of the flow's differential equation becomes a Gaussian whose mean depends on the
//! velocity, so that a sampled trajectory has a probability under the model.
//!
//! A step goes from the noise level s to s' < s, with dt = s' - s, h = sqrt(-dt), the velocity v = d x / d sigma and
//! standard normal noise z: `mean = a x + b v`, `x' = mean + std z`. With the noise scale g (see [`SdeKind`]), `std = g
//! h`, `a = 1 + g^2 dt / (2 s)` and `b = (1 + g^2 (1 - s) / (2 s)) dt`; `cps` has other factors. Levels are the f32
//! numbers of the schedule; all computation from them is in f64.

use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::LossMask;

/// The noise scale g of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SdeKind {
    /// Flow-GRPO (arXiv:2505.05470): g = eta sqrt(s / (1 - s)). At s = 1, the second level of the schedule replaces the
    /// s in 1 - s.
    #[default]
    Sde,
    /// Flow-GRPO for Wan: g is a linear function of s, which is the last level of the schedule at s = 0 and the second
    /// level at s = 1. eta is not used.
    Wan,
    /// DanceGRPO (arXiv:2505.07818): g = eta.
    Dance,
    /// Flow-CPS (arXiv:2509.05952): noise that keeps the latents at the noise level that the model expects. The
    /// log-probability is minus the squared distance to the mean.
    Cps,
}

/// One stochastic step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SdeStep {
    kind: SdeKind,
    /// Factor of the latents in the mean: a.
    latents_factor: f64,
    /// Factor of the velocity in the mean: b.
    velocity_factor: f64,
    std: f64,
    /// The noise scale g; for `cps` the standard deviation.
    noise_scale: f64,
    /// The root of the step's length: h.
    root: f64,
}

impl SdeKind {
    /// Fails unless `eta` is finite and at least 0; for `cps` it must also be at most 1.
    pub fn check(self, eta: f64) -> Result<()> {
        let max_eta = if self == Self::Cps { 1.0 } else { f64::INFINITY };
        if eta.is_finite() && (0.0..=max_eta).contains(&eta) {
            return Ok(());
        }
        let expected = if self == Self::Cps { "must lie within 0 and 1" } else { "must be a number of at least 0" };
        Err(Error::config("eta", format!("{expected}, found {eta}")))
    }
}

impl SdeStep {
    /// Step `i` of a schedule of descending noise levels. Fails if the levels do not descend within 1 to 0, or if the
    /// schedule has no step `i`.
    pub fn new(kind: SdeKind, eta: f64, sigmas: &[f32], i: usize) -> Result<Self> {
        Self::limited(kind, eta, f64::INFINITY, sigmas, i)
    }

    /// As [`SdeStep::new`], with a standard deviation of at most `limit`. Without a limit, g may ask for more noise
    /// near pure noise than the next level has.
    pub fn limited(kind: SdeKind, eta: f64, limit: f64, sigmas: &[f32], i: usize) -> Result<Self> {
        kind.check(eta)?;
        let (Some(&s), Some(&next)) = (sigmas.get(i), sigmas.get(i + 1)) else {
            let steps = sigmas.len().saturating_sub(1);
            return Err(Error::Misuse(format!("step {i} of a table of {steps} steps")));
        };
        if !(0.0 <= next && next < s && s <= 1.0) {
            return Err(Error::Misuse(format!("noise levels descend within 0 and 1, found {s} to {next}")));
        }
        let [s, next] = [s, next].map(f64::from);
        let (dt, root) = (next - s, (s - next).sqrt());
        if kind == SdeKind::Cps {
            // The mean is `data_factor x_0 + noise_factor noise`, with x_0 = x - s v and noise = x + (1 - s) v as the
            // velocity predicts them. Together with the new noise, the noise in x' has the standard deviation s'.
            let std = (next * (0.5 * std::f64::consts::PI * eta).sin()).min(limit);
            let noise_factor = (next * next - std * std).max(0.0).sqrt();
            let data_factor = 1.0 - next;
            return Ok(Self {
                kind,
                latents_factor: data_factor + noise_factor,
                velocity_factor: noise_factor * (1.0 - s) - data_factor * s,
                std,
                noise_scale: std,
                root,
            });
        }
        let (second_level, last_level) = (f64::from(sigmas[1]), f64::from(sigmas[sigmas.len() - 1]));
        let unlimited_scale = match kind {
            SdeKind::Sde => eta * (s / (1.0 - if s == 1.0 { second_level } else { s })).sqrt(),
            SdeKind::Wan => last_level + (second_level - last_level) * s,
            // `Cps` has returned above.
            SdeKind::Dance | SdeKind::Cps => eta,
        };
        let noise_scale = unlimited_scale.min(limit / root);
        let drift = noise_scale * noise_scale / (2.0 * s);
        Ok(Self {
            kind,
            latents_factor: 1.0 + drift * dt,
            velocity_factor: (1.0 + drift * (1.0 - s)) * dt,
            std: noise_scale * root,
            noise_scale,
            root,
        })
    }

    /// Factor of the latents in the mean: a.
    pub fn latents_factor(&self) -> f64 {
        self.latents_factor
    }

    /// Factor of the velocity in the mean: b.
    pub fn velocity_factor(&self) -> f64 {
        self.velocity_factor
    }

    /// Standard deviation of the step.
    pub fn std(&self) -> f64 {
        self.std
    }

    /// The noise scale g; for `cps` the standard deviation.
    pub fn noise_scale(&self) -> f64 {
        self.noise_scale
    }

    /// The root of the step's length: h.
    pub fn root(&self) -> f64 {
        self.root
    }

    /// Whether the step has noise. Without noise it has no log-probability.
    pub fn is_stochastic(&self) -> bool {
        self.noise_scale > 0.0
    }

    /// The variance in the log-probability, which is `-mean((x' - mean)^2) / (2 variance)` plus a constant. It is std^2
    /// for Gaussians. For `cps`, where the log-probability is minus the squared distance, it is 1/2.
    pub fn variance(&self) -> f64 {
        match self.kind {
            SdeKind::Cps => 0.5,
            _ => self.std * self.std,
        }
    }

    /// The factor that removes the step's own scale from the gradient `d log p / d v = b std z / variance`:
    /// `variance / (std |b|)`, which is `std / |b|` for Gaussians (Flash-GRPO, arXiv:2605.15980).
    pub fn rescale(&self) -> f64 {
        self.variance() / (self.std * self.velocity_factor.abs())
    }

    /// The mean of the latents after the step: `a x + b v`.
    pub fn mean(&self, x: &[f32], v: &[f32]) -> Vec<f64> {
        let mean = |(x, v): (&f32, &f32)| self.latents_factor * f64::from(*x) + self.velocity_factor * f64::from(*v);
        x.iter().zip(v).map(mean).collect()
    }

    /// The latents after the step, with standard normal noise `z`: `mean + std z`.
    pub fn next(&self, mean: &[f64], z: &[f32]) -> Vec<f64> {
        mean.iter().zip(z).map(|(mean, z)| mean + self.std * f64::from(*z)).collect()
    }

    /// The log-probability: the log-density of `next` as a mean over the elements of `mask`; for `cps` minus the mean
    /// squared distance.
    pub fn log_prob(&self, next: &[f64], mean: &[f64], mask: LossMask) -> f64 {
        let squares = mask.mean(|i| (next[i] - mean[i]).powi(2));
        match self.kind {
            SdeKind::Cps => -squares,
            _ => {
                let log_normalizer = self.std.ln() + 0.5 * (2.0 * std::f64::consts::PI).ln();
                -squares / (2.0 * self.std * self.std) - log_normalizer
            }
        }
    }

    /// d log-probability / d mean.
    pub fn d_mean(&self, next: &[f64], mean: &[f64], mask: LossMask) -> Vec<f64> {
        let slope = 1.0 / (self.variance() * mask.count() as f64);
        mask.map(|i| slope * (next[i] - mean[i]))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use crate::FlowSchedule;

    use super::*;

    const KINDS: [SdeKind; 4] = [SdeKind::Sde, SdeKind::Wan, SdeKind::Dance, SdeKind::Cps];

    fn draws(key: u64) -> Vec<f32> {
        roll_testing::diffusion::values(key, 12)
    }

    #[test]
    fn without_noise_every_step_is_that_of_euler() {
        let schedule = FlowSchedule::new(8, 5.0).unwrap();
        let (x, v) = (draws(1), draws(2));
        for kind in [SdeKind::Sde, SdeKind::Dance, SdeKind::Cps] {
            for i in 0..8 {
                let step = SdeStep::new(kind, 0.0, schedule.sigmas(), i).unwrap();
                assert!(!step.is_stochastic());
                let delta = schedule.sigma(i + 1).0 - schedule.sigma(i).0;
                let next = step.next(&step.mean(&x, &v), &draws(3));
                for ((next, x), v) in next.iter().zip(&x).zip(&v) {
                    assert!((next - (f64::from(*x) + delta * f64::from(*v))).abs() < 1e-12, "{kind:?} {i}");
                }
            }
        }
    }

    #[test]
    fn the_first_step_of_any_table_that_begins_at_one_has_the_deviation_eta() {
        for (steps, shift) in [(4, 1.0), (8, 5.0), (20, 8.0)] {
            let schedule = FlowSchedule::new(steps, shift).unwrap();
            let step = SdeStep::new(SdeKind::Sde, 0.7, schedule.sigmas(), 0).unwrap();
            assert!((step.std() - 0.7).abs() < 1e-12);
        }
    }

    #[test]
    fn noise_limit_bounds_only_larger_deviations() {
        let schedule = FlowSchedule::new(8, 5.0).unwrap();
        for kind in KINDS {
            let free: Vec<SdeStep> = (0..8).map(|i| SdeStep::new(kind, 0.9, schedule.sigmas(), i).unwrap()).collect();
            let [least, most] = [f64::min, f64::max].map(|of| free.iter().map(SdeStep::std).reduce(of).unwrap());
            let limit = 0.5 * (least + most);
            for (i, free) in free.iter().enumerate() {
                let held = SdeStep::limited(kind, 0.9, limit, schedule.sigmas(), i).unwrap();
                assert!(if free.std() > limit { (held.std() - limit).abs() < 1e-12 } else { held == *free });
            }
            assert!(least < limit && limit < most, "{kind:?}");
        }
        // A step that has no room for its noise has room for less.
        let near_one = [0.9997, 0.98, 0.5, 0.0];
        assert!(SdeStep::new(SdeKind::Sde, 0.7, &near_one, 0).unwrap().std() > 4.0);
        let held = SdeStep::limited(SdeKind::Sde, 0.7, 0.1, &near_one, 0).unwrap();
        assert!(held.latents_factor() > 0.9 && (held.std() - 0.1).abs() < 1e-12);
    }

    #[test]
    fn log_prob_gradient_matches_finite_differences() {
        let schedule = FlowSchedule::new(8, 5.0).unwrap();
        let mask = LossMask::after(1, &[2, 3, 1, 2]).unwrap();
        let (x, v, z) = (draws(1), draws(2), draws(3));
        for kind in KINDS {
            for i in [0, 3, 6] {
                let step = SdeStep::new(kind, 0.7, schedule.sigmas(), i).unwrap();
                let next = step.next(&step.mean(&x, &v), &z);
                let mean = step.mean(&x, &draws(4));
                let gradient = step.d_mean(&next, &mean, mask);
                for element in 0..12 {
                    let at = |h: f64| {
                        let mut mean = mean.clone();
                        mean[element] += h;
                        step.log_prob(&next, &mean, mask)
                    };
                    let quotient = (at(1e-5) - at(-1e-5)) / 2e-5;
                    assert!((quotient - gradient[element]).abs() < 1e-5 * gradient[element].abs().max(1.0));
                }
                assert!([0, 1, 6, 7].iter().all(|known| gradient[*known] == 0.0));
            }
        }
    }

    /// The root mean square of d log p / d v over the noise of a step, `std |b| / variance`, by the pullback.
    #[test]
    fn rescaled_gradients_of_all_steps_have_one_size() {
        let schedule = FlowSchedule::new(12, 5.0).unwrap();
        let (x, v, z) = (draws(1), draws(2), draws(3));
        let mask = LossMask::all(12);
        for kind in KINDS {
            let sizes = (0..11).map(|i| {
                let step = SdeStep::new(kind, 0.7, schedule.sigmas(), i).unwrap();
                let mean = step.mean(&x, &v);
                let slopes = step.d_mean(&step.next(&mean, &z), &mean, mask);
                let length = slopes.iter().map(|slope| (slope * step.velocity_factor()).powi(2)).sum::<f64>().sqrt();
                (length, length * step.rescale())
            });
            let (own, rescaled): (Vec<f64>, Vec<f64>) = sizes.unzip();
            let spread = |sizes: &[f64]| {
                let [least, most] = [f64::min, f64::max].map(|of| sizes.iter().copied().reduce(of).unwrap());
                most / least
            };
            assert!(spread(&own) > 1.5 && spread(&rescaled) < 1.0 + 1e-9, "{kind:?} {own:?} {rescaled:?}");
        }
    }

    #[test]
    fn invalid_noise_and_schedules_are_errors() {
        let table = [1.0, 0.5, 0.0];
        for eta in [-0.1, f64::NAN, f64::INFINITY] {
            assert!(KINDS.iter().all(|kind| SdeStep::new(*kind, eta, &table, 0).is_err()));
        }
        assert!(SdeStep::new(SdeKind::Cps, 1.1, &table, 0).is_err());
        for (table, i) in [(&table[..], 2), (&[0.5, 0.7], 0), (&[2.0, 0.5], 0), (&[0.5, -0.5], 0), (&[], 0)] {
            assert!(SdeStep::new(SdeKind::Sde, 0.7, table, i).is_err(), "{table:?}");
        }
    }
}
