//! Rewards that need no network: amount of motion, sharpness, flicker, and similarity to the first frame.
//!
//! `amount` is the common part of the first three, which differ by a function of the luma. [`first_frame`] compares
//! with the reference, by [`ssim`] among others. All gradients are written by hand and checked against finite
//! differences.

mod amount;
pub mod first_frame;
mod flicker;
mod motion;
mod sharpness;
pub mod ssim;

pub use amount::{Amount, AmountConfig, AmountReward, Wanted};
pub use first_frame::FirstFrame;
pub use flicker::Flicker;
pub use motion::Motion;
pub use sharpness::Sharpness;

/// The magnitude of a difference d is `sqrt(d^2 + SMOOTH^2) - SMOOTH`, which is differentiable at 0. A step of an 8-bit
/// luma is four times this constant.
const SMOOTH: f32 = 1e-3;

/// The magnitude of a difference, and its derivative.
fn magnitude(d: f32) -> (f32, f32) {
    let root = d.hypot(SMOOTH);
    (root - SMOOTH, d / root)
}

/// Checks a reward on random videos, and its gradient against central differences.
#[cfg(test)]
#[track_caller]
pub(crate) fn check(reward: &mut dyn roll_core::RewardScorer) {
    use roll_core::{Verdict, check_reward};
    let findings = check_reward(reward, 3);
    assert!(findings.iter().any(|f| f.verdict == Verdict::Kept && f.promise.contains("differences")), "{findings:#?}");
    assert!(findings.iter().all(|f| f.verdict != Verdict::Broken), "{findings:#?}");
}
