//! Weighted regression: the loss of flow matching on the policy's own samples, times the signed advantage.

use super::{Noised, Valued};

/// At one sample and noise level.
pub fn at(weight: f64, at: &Noised<'_>) -> Valued {
    Valued { value: weight * at.matching(at.velocity), gradient: at.matching_gradient(weight) }
}
