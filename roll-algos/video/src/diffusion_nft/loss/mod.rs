//! Losses of the velocity at a noised sample, weighted by its advantage.
//!
//! All of them compare the velocity v at `x_t = (1 - t) x_0 + t noise` with what would lead there from the sample x_0;
//! the old policy's velocity is an input too. Each is a function of one sample at one noise level: its value, and its
//! gradient in v, in f64. Means are over the elements that count.

pub mod awm;
pub mod nft;

use roll_core::Result;

use crate::policy_gradient::LossMask;

/// Least weight that squared errors are divided by.
const LEAST_WEIGHT: f64 = 1e-5;

/// A sample at a noise level, and the velocities there.
#[derive(Clone, Copy, Debug)]
pub struct Noised<'a> {
    /// x_0.
    pub data: &'a [f32],
    /// The noise.
    pub noise: &'a [f32],
    /// The noise level.
    pub t: f64,
    /// v, under the policy in training.
    pub velocity: &'a [f32],
    /// The same under the old policy.
    pub old: &'a [f32],
    /// The elements that enter the loss.
    pub mask: LossMask,
}

/// A loss of one sample at one noise level.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueAndGradient {
    /// Its value.
    pub value: f64,
    /// d value / d velocity; 0 at masked elements.
    pub gradient: Vec<f64>,
}

impl Noised<'_> {
    /// Fails unless all tensors have the same number of elements.
    pub fn check(&self) -> Result<()> {
        for (what, tensor) in [("the sample", self.data), ("noise", self.noise), ("velocity", self.velocity)] {
            self.mask.fits(what, tensor.len())?;
        }
        self.mask.fits("velocity of the old policy", self.old.len())
    }

    /// `x_0 predicted by a velocity, minus x_0`: t (noise - x_0 - v).
    fn data_error(&self, i: usize, velocity: f64) -> f64 {
        self.t * (self.target(i) - velocity)
    }

    /// The velocity that leads from the sample to the noise.
    fn target(&self, i: usize) -> f64 {
        f64::from(self.noise[i]) - f64::from(self.data[i])
    }

    /// `max(mean |error|, 1e-5)`, a weight without gradient.
    fn weight(&self, velocity: impl Fn(usize) -> f64) -> f64 {
        self.mask.mean(|i| self.data_error(i, velocity(i)).abs()).max(LEAST_WEIGHT)
    }

    /// `mean((v - (noise - x_0))^2)`, the loss of flow matching.
    pub fn matching(&self, velocity: &[f32]) -> f64 {
        self.mask.mean(|i| (f64::from(velocity[i]) - self.target(i)).powi(2))
    }

    /// The gradient of [`Noised::matching`] at the velocity in training, times `slope`.
    fn matching_gradient(&self, slope: f64) -> Vec<f64> {
        let slope = 2.0 * slope / self.mask.count() as f64;
        self.mask.map(|i| slope * (f64::from(self.velocity[i]) - self.target(i)))
    }
}
