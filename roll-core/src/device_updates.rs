//! Updates of parameters where they are, without a way through host memory.

use std::ops::Range;

use crate::Result;

/// The numbers of one update of AdamW, each computed in f64 and rounded once. For a parameter p with moments m and v,
/// where g is its gradient times the two factors of `scale`, one after the other, and every operation rounds to f32:
///
/// - `m' = m + rest[0] * (g - m)`
/// - `v' = v * beta_2 + rest[1] * g * g`
/// - `p' = p * keep - step_size * (m' / (sqrt(v') / root_correction + eps))`
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamUpdate {
    /// Factors of the gradient: the mean over samples, and clipping.
    pub scale: [f32; 2],
    /// Decay rate of the second moment.
    pub beta_2: f32,
    /// One minus the decay rate of each moment.
    pub rest: [f32; 2],
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Learning rate over `1 - betas[0]^step`.
    pub step_size: f32,
    /// Root of `1 - betas[1]^step`.
    pub root_correction: f32,
    /// One minus learning rate times weight decay.
    pub keep: f32,
}

/// AdamW on the device of a model's parameters: gradients and moments stay there. It shares values and gradients with
/// the model that returned it and covers all parameters of the model, in the order of the flat layout.
///
/// Moments are f32, and zero until they are written.
pub trait DeviceUpdates: Send {
    /// Whether that device has memory of its own: on the CPU, updates in host memory are as near.
    fn has_own_memory(&self) -> bool;

    /// Takes the gradients that pulls have accumulated in the model, and adds them to those taken before.
    fn accumulate(&mut self) -> Result<()>;

    /// Adds gradients that are in host memory, in the flat layout.
    fn add(&mut self, gradients: &[f32]) -> Result<()>;

    /// Forgets the gradients that were taken.
    fn discard(&mut self);

    /// Sum of the squares of the gradients that were taken; finite exactly when each of them is.
    fn sum_of_squares(&mut self) -> Result<f64>;

    /// Updates parameters and moments by the gradients that were taken, and forgets these. Pullbacks recorded before
    /// still use the old values.
    fn update(&mut self, update: &AdamUpdate) -> Result<()>;

    /// Copies the moments, first and second, to host memory, in the flat layout.
    fn read_moments(&self) -> Result<[Vec<f32>; 2]>;

    /// Replaces the moments, in the flat layout. Fails on another length, and then changes nothing.
    fn write_moments(&mut self, moments: [&[f32]; 2]) -> Result<()>;

    /// Updates of the elements `which` of the flat layout alone, for ranks that shard the optimizer's state. They have moments of
    /// their own. Fails on elements that there are not.
    fn part(&self, which: Range<usize>) -> Result<Box<dyn DevicePart>>;
}

/// AdamW of some elements of the flat layout on the device of their model, where their moments are: f32, and zero until
/// they are written.
pub trait DevicePart: Send {
    /// The elements after an update by `gradients`, which are in host memory, as the results are; moments are updated
    /// too. The model keeps its values, until it is given those of all ranks. Fails on another length, and then changes
    /// nothing.
    fn updated(&mut self, gradients: &[f32], update: &AdamUpdate) -> Result<Vec<f32>>;

    /// Copies the moments, first and second, to host memory.
    fn read_moments(&self) -> Result<[Vec<f32>; 2]>;

    /// Replaces the moments. Fails on another length, and then changes nothing.
    fn write_moments(&mut self, moments: [&[f32]; 2]) -> Result<()>;
}
