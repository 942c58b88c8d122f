//! Advantage-weighted regression after FlowAWR (arXiv:2606.30376): the sample that the policy predicts moves from the
//! one that the old policy predicts towards the sample that was generated, or away from it.
//!
//! The target is `x_0_old + E (x_0 - x_0_old)`, `L = mean((x_0 predicted - target)^2) / w` with the weight w = mean
//! |x_0 predicted - x_0|, which carries no gradient. E is the advantage, bounded.

use super::{Noised, Valued};

/// At one sample and noise level.
pub fn at(energy: f64, at: &Noised<'_>) -> Valued {
    let velocity = |i: usize| f64::from(at.velocity[i]);
    let weight = at.weight(velocity);
    // Errors are differences from x_0: those of the old policy, E of the way closer to 0.
    let difference = |i: usize| at.data_error(i, velocity(i)) - (1.0 - energy) * at.data_error(i, f64::from(at.old[i]));
    let value = at.counted.mean(|i| difference(i).powi(2)) / weight;
    let slope = -2.0 * at.t / (weight * at.counted.count() as f64);
    Valued { value, gradient: at.counted.map(|i| slope * difference(i)) }
}
