//! Losses of the velocity at a noised sample, weighted by its advantage.
//!
//! All losses compare the velocity v at `x_t = (1 - t) x_0 + t noise` with `noise - x_0`, the velocity of the straight
//! path between the sample x_0 and the noise. The old policy's velocity at x_t is an input too. Each loss is a function
//! of one sample at one noise level. It returns its value and its gradient with respect to v, in f64. Means are over
//! the elements of a [`LossMask`].

pub mod awm;
pub mod nft;

use roll_core::Result;

use crate::policy_gradient::LossMask;

/// Least weight that squared errors are divided by.
const LEAST_WEIGHT: f64 = 1e-5;

/// A sample at a noise level, and the velocities predicted for it.
#[derive(Clone, Copy, Debug)]
pub struct Noised<'a> {
    /// x_0.
    pub data: &'a [f32],
    /// The noise.
    pub noise: &'a [f32],
    /// The noise level.
    pub t: f64,
    /// v, the velocity under the policy in training.
    pub velocity: &'a [f32],
    /// The velocity under the old policy.
    pub old: &'a [f32],
    /// The elements that enter the loss.
    pub mask: LossMask,
}

/// A loss of one sample at one noise level.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueAndGradient {
    /// The loss.
    pub value: f64,
    /// d value / d velocity; 0 at elements that do not enter the loss.
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

    /// The error of the x_0 that a velocity predicts: `(x_t - t v) - x_0 = t (noise - x_0 - v)`.
    fn data_error(&self, i: usize, velocity: f64) -> f64 {
        self.t * (self.target(i) - velocity)
    }

    /// The velocity of the straight path: `noise - x_0`.
    fn target(&self, i: usize) -> f64 {
        f64::from(self.noise[i]) - f64::from(self.data[i])
    }

    /// The weight w of [`nft`], which divides squared errors: `max(mean |data error|, 1e-5)`. It is a constant for the
    /// gradient.
    fn weight(&self, velocity: impl Fn(usize) -> f64) -> f64 {
        self.mask.mean(|i| self.data_error(i, velocity(i)).abs()).max(LEAST_WEIGHT)
    }

    /// `mean((velocity - (noise - x_0))^2)`.
    pub fn flow_matching_loss(&self, velocity: &[f32]) -> f64 {
        self.mask.mean(|i| (f64::from(velocity[i]) - self.target(i)).powi(2))
    }

    /// `slope` times the gradient of [`Noised::flow_matching_loss`] at the velocity of the policy in training.
    fn flow_matching_gradient(&self, slope: f64) -> Vec<f64> {
        let factor = 2.0 * slope / self.mask.count() as f64;
        self.mask.map(|i| factor * (f64::from(self.velocity[i]) - self.target(i)))
    }
}
