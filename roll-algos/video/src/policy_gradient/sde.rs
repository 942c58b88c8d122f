//! Denoising steps with noise in them: a step of the flow's differential equation becomes a Gaussian whose mean the
//! velocity decides, so that a sampled trajectory has a probability under the model.
//!
//! A step goes from the noise level s to s' < s, dt = s' - s, h = sqrt(-dt), along the velocity v = d x / d sigma:
//! `mean = a x + b v`, `x' = mean + std z`. Levels are those of the table as f32, everything after it is f64.

use roll_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::LossMask;

/// How much noise a step brings in, and its consequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SdeKind {
    /// g = eta sqrt(s / (1 - s)), where 1 - s is 1 minus the second level of the table at s = 1: Flow-GRPO's
    /// (arXiv:2505.05470).
    #[default]
    Sde,
    /// g between the last and the second level of the table, in proportion to s, without eta: Flow-GRPO's for Wan.
    Wan,
    /// g = eta: DanceGRPO's (arXiv:2505.07818).
    Dance,
    /// Noise that keeps the latents at the level that the model expects: Flow-CPS (arXiv:2509.05952). Its
    /// log-probability is the squared distance to the mean alone.
    Cps,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SdeStep {
    kind: SdeKind,
    of_latents: f64,
    of_velocity: f64,
    std: f64,
    level: f64,
    root: f64,
}

impl SdeKind {
    /// Fails on an `eta` that is no level of noise for this kind.
    pub fn check(self, eta: f64) -> Result<()> {
        let most = if self == Self::Cps { 1.0 } else { f64::INFINITY };
        match eta.is_finite() && (0.0..=most).contains(&eta) {
            true => Ok(()),
            false if self == Self::Cps => Err(Error::config("eta", format!("must lie within 0 and 1, found {eta}"))),
            false => Err(Error::config("eta", format!("must be a number of at least 0, found {eta}"))),
        }
    }
}

impl SdeStep {
    /// Step `i` of a descending table of noise levels. Fails on levels between which there is no step.
    pub fn new(kind: SdeKind, eta: f64, sigmas: &[f32], i: usize) -> Result<Self> {
        Self::limited(kind, eta, f64::INFINITY, sigmas, i)
    }

    /// The same, with a standard deviation of at most `limit`: near pure noise a level asks for more than there is room
    /// for.
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
        let table = |i: usize| f64::from(sigmas[i]);
        let (dt, root) = (next - s, (s - next).sqrt());
        let step = |of_latents, of_velocity, std, level| Self { kind, of_latents, of_velocity, std, level, root };
        if kind == SdeKind::Cps {
            let std = (next * (0.5 * std::f64::consts::PI * eta).sin()).min(limit);
            let kept = (next * next - std * std).max(0.0).sqrt();
            let data = 1.0 - next;
            return Ok(step(data + kept, kept * (1.0 - s) - data * s, std, std));
        }
        let level = match kind {
            SdeKind::Sde => eta * (s / (1.0 - if s == 1.0 { table(1) } else { s })).sqrt(),
            SdeKind::Wan => table(sigmas.len() - 1) + (table(1) - table(sigmas.len() - 1)) * s,
            SdeKind::Dance | SdeKind::Cps => eta,
        };
        let level = level.min(limit / root);
        let drift = level * level / (2.0 * s);
        Ok(step(1.0 + drift * dt, (1.0 + drift * (1.0 - s)) * dt, level * root, level))
    }

    /// Factor of the latents in the mean.
    pub fn of_latents(&self) -> f64 {
        self.of_latents
    }

    /// Factor of the velocity in the mean: b.
    pub fn of_velocity(&self) -> f64 {
        self.of_velocity
    }

    /// Standard deviation of the step.
    pub fn std(&self) -> f64 {
        self.std
    }

    /// The level of noise g; for `cps` the standard deviation.
    pub fn level(&self) -> f64 {
        self.level
    }

    /// h, the root of the step's length.
    pub fn root(&self) -> f64 {
        self.root
    }

    /// Whether the step has a log-probability: without noise it has none.
    pub fn is_stochastic(&self) -> bool {
        self.level > 0.0 || (self.kind == SdeKind::Cps && self.std > 0.0)
    }

    /// The variance in the log-probability, `-mean((x' - mean)^2) / (2 variance)` and a constant. That of `cps`, which is
    /// the squared distance alone, is 1/2.
    pub fn variance(&self) -> f64 {
        match self.kind {
            SdeKind::Cps => 0.5,
            _ => self.std * self.std,
        }
    }

    /// variance / (std |b|), of Gaussians std / |b|: undoes the step's own scale of d log p / d v, which is `b std z /
    /// variance` (Flash-GRPO, arXiv:2605.15980).
    pub fn rescale(&self) -> f64 {
        self.variance() / (self.std * self.of_velocity.abs())
    }

    /// `a x + b v`.
    pub fn mean(&self, x: &[f32], v: &[f32]) -> Vec<f64> {
        x.iter().zip(v).map(|(x, v)| self.of_latents * f64::from(*x) + self.of_velocity * f64::from(*v)).collect()
    }

    /// `mean + std z`.
    pub fn next(&self, mean: &[f64], z: &[f32]) -> Vec<f64> {
        mean.iter().zip(z).map(|(mean, z)| mean + self.std * f64::from(*z)).collect()
    }

    /// Log-density of `next`, as a mean over the elements that count; of `cps` minus the mean squared distance.
    pub fn log_prob(&self, next: &[f64], mean: &[f64], mask: LossMask) -> f64 {
        let squares = mask.mean(|i| (next[i] - mean[i]).powi(2));
        match self.kind {
            SdeKind::Cps => -squares,
            _ => {
                let normal = self.std.ln() + 0.5 * (2.0 * std::f64::consts::PI).ln();
                -squares / (2.0 * self.std * self.std) - normal
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
        assert!(held.of_latents() > 0.9 && (held.std() - 0.1).abs() < 1e-12);
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
                let length = slopes.iter().map(|slope| (slope * step.of_velocity()).powi(2)).sum::<f64>().sqrt();
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
