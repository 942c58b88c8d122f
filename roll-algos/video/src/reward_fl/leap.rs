//! LeapAlign (<https://arxiv.org/abs/2604.15311>): the gradient passes through two leaps in place of all steps.
//!
//! A leap follows the velocity of a recorded step k from its latents to the noise level of step j, and the velocity of
//! step j from there to the end. The latents stay those of the rollout; the leaps determine the gradient alone:
//!
//! ```text
//! a  = x_k + (sigma_j - sigma_k) v_k                      x_j' = a + constant, equal to x_j
//! b  = x_j' + (sigma_end - sigma_j) v_j(discount x_j' + constant)    x' = b + constant, equal to x_end
//! ```

use roll_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::arithmetic::axpy;
use crate::policy_gradient::LossMask;

/// Options of the two leaps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Leap {
    /// Factor of the gradient that reaches the first leap through the velocity of the second: 1 is the gradient of the
    /// two leaps, 0 drops their product, which is what grows where steps are many.
    #[schemars(range(min = 0, max = 1))]
    pub discount: f64,
    /// The loss on the score is divided by the sum of the distances of both leaps from the rollout (mean absolute
    /// differences of latents), each at least this. `null` weights all rollouts equally.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub similarity_floor: Option<f64>,
}

impl Default for Leap {
    fn default() -> Self {
        Self { discount: 0.3, similarity_floor: Some(0.1) }
    }
}

impl Leap {
    /// The similarity of the leaps to a rollout whose first `known` frames are given; `None` if it has no effect.
    pub(super) fn similarity(self, known: usize) -> Option<Similarity> {
        self.similarity_floor.map(|floor| Similarity { floor, known, aim: None, distances: 0.0 })
    }
}

/// The similarity of leaps to their rollout.
pub(super) struct Similarity {
    floor: f64,
    known: usize,
    /// The end of the leap under way.
    aim: Option<Tensor>,
    /// Sum over the ended leaps.
    distances: f64,
}

impl Similarity {
    /// Ends the leap under way at the rollout's `latents`, and begins one of `delta` along `velocity`.
    pub(super) fn leap(&mut self, latents: &Tensor, delta: f32, velocity: &Tensor) -> Result<()> {
        self.land(latents)?;
        self.aim = Some(axpy(latents, delta, velocity)?);
        Ok(())
    }

    /// The weight of the loss on the score of a rollout that ended at `latents`.
    pub(super) fn weight(mut self, latents: &Tensor) -> Result<f64> {
        self.land(latents)?;
        Ok(1.0 / self.distances)
    }

    fn land(&mut self, latents: &Tensor) -> Result<()> {
        let Some(aim) = self.aim.take() else { return Ok(()) };
        let (x, aim) = (latents.f32s()?, aim.f32s()?);
        let distance = LossMask::after(self.known, latents.shape())?.mean(|i| f64::from((x[i] - aim[i]).abs()));
        self.distances += distance.max(self.floor);
        Ok(())
    }
}
