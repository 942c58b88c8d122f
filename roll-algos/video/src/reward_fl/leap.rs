//! LeapAlign (<https://arxiv.org/abs/2604.15311>): the gradient passes through two leaps in place of all steps.
//!
//! Two steps k < j of the rollout are recorded. The first leap follows the velocity of step k from its latents to the
//! noise level of step j. The second leap follows the velocity of step j from there to the end. A constant is added
//! where each leap lands, so that the latents keep the values of the rollout and the leaps determine the gradient only:
//!
//! ```text
//! a = x_k + (sigma_j - sigma_k) v_k                                  x_j'   = a + constant, equal to x_j
//! b = x_j' + (sigma_end - sigma_j) v_j(discount x_j' + constant)     x_end' = b + constant, equal to x_end
//! ```

use roll_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::arithmetic::axpy;
use crate::policy_gradient::LossMask;

/// Options of the two leaps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Leap {
    /// Factor of the gradient that reaches the first leap through the velocity of the second. 1 is the exact gradient
    /// of the two leaps. 0 drops the product of the derivatives of both velocities, which can explode.
    #[schemars(range(min = 0, max = 1))]
    pub discount: f64,
    /// Least value that counts as the distance of a leap from the rollout. The loss on the score is divided by the sum
    /// of the distances of both leaps; a distance is the mean absolute difference of latents. `null` weights all
    /// rollouts equally.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub similarity_floor: Option<f64>,
}

impl Default for Leap {
    fn default() -> Self {
        Self { discount: 0.3, similarity_floor: Some(0.1) }
    }
}

impl Leap {
    /// Begins to measure the similarity of the leaps to a rollout. Its first `given_frames` frames are given and do not
    /// count. `None` if similarity has no effect.
    pub(super) fn similarity(self, given_frames: usize) -> Option<Similarity> {
        self.similarity_floor.map(|floor| Similarity { floor, given_frames, landing: None, distances: 0.0 })
    }
}

/// Measures the similarity of leaps to their rollout.
pub(super) struct Similarity {
    /// Least distance of a leap.
    floor: f64,
    /// Number of given first frames, which do not count.
    given_frames: usize,
    /// The latents at which the current leap lands.
    landing: Option<Tensor>,
    /// Sum of the distances of the ended leaps.
    distances: f64,
}

impl Similarity {
    /// Ends the current leap at the rollout's `latents`, and begins one from there along `velocity`. `delta` is the
    /// noise level at which the new leap lands, minus the noise level of `latents`.
    pub(super) fn begin_leap(&mut self, latents: &Tensor, delta: f32, velocity: &Tensor) -> Result<()> {
        self.end_leap(latents)?;
        self.landing = Some(axpy(latents, delta, velocity)?);
        Ok(())
    }

    /// The weight of the loss on the score of a rollout that ended at `latents`.
    pub(super) fn weight(mut self, latents: &Tensor) -> Result<f64> {
        self.end_leap(latents)?;
        Ok(1.0 / self.distances)
    }

    /// Adds the distance between the landing of the current leap and the rollout's `latents` at the same noise level.
    fn end_leap(&mut self, latents: &Tensor) -> Result<()> {
        let Some(landing) = self.landing.take() else { return Ok(()) };
        let (x, landing) = (latents.f32s()?, landing.f32s()?);
        let mask = LossMask::after(self.given_frames, latents.shape())?;
        let distance = mask.mean(|i| f64::from((x[i] - landing[i]).abs()));
        self.distances += distance.max(self.floor);
        Ok(())
    }
}
