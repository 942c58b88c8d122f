//! Optimizer updates on the device that holds the parameters: neither gradients nor parameters go through host memory.
//!
//! A strategy asks the model for [`DeviceUpdates`] ([`crate::ParameterParts::device_updates`]) and makes the updates
//! itself, in host memory, if the model has none.

use std::ops::Range;

use crate::Result;

/// The coefficients of one update of AdamW, each computed in f64 and rounded once. They update a parameter p with
/// moments m and v as follows. The gradient g is first multiplied by `scale[0]` and then by `scale[1]`, and every
/// operation rounds to f32:
///
/// - `m' = m + rest[0] * (g - m)`
/// - `v' = v * beta_2 + rest[1] * g * g`
/// - `p' = p * keep - step_size * (m' / (sqrt(v') / root_correction + eps))`
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamUpdate {
    /// Factors of the gradient: `[for the mean over samples, for clipping]`.
    pub scale: [f32; 2],
    /// Decay rate of the second moment.
    pub beta_2: f32,
    /// One minus the decay rate of each moment.
    pub rest: [f32; 2],
    /// Added to the square root of the second moment.
    pub eps: f32,
    /// Learning rate over `1 - betas[0]^step`.
    pub step_size: f32,
    /// Square root of `1 - betas[1]^step`.
    pub root_correction: f32,
    /// One minus learning rate times weight decay.
    pub keep: f32,
}

/// AdamW on the device of a model's parameters: sums of gradients and moments stay there. The object shares parameters
/// and gradients with the model that returned it, and covers all parameters of the model in the order of the flat
/// layout.
///
/// Moments are f32, and zero until they are written.
pub trait DeviceUpdates: Send {
    /// Whether the device has memory of its own. On the CPU it has none, and updates there save no copy.
    fn has_own_memory(&self) -> bool;

    /// Takes the gradients that pulls have accumulated in the model, and adds them to the sum of gradients.
    fn accumulate(&mut self) -> Result<()>;

    /// Adds gradients that are in host memory, in the flat layout, to the sum of gradients.
    fn add(&mut self, gradients: &[f32]) -> Result<()>;

    /// Clears the sum of gradients.
    fn discard(&mut self);

    /// The sum of squares over all elements of the sum of gradients. It is finite exactly when every element is.
    fn sum_of_squares(&mut self) -> Result<f64>;

    /// Updates parameters and moments by the sum of gradients, and clears it. Pullbacks recorded before still use the
    /// old parameters.
    fn update(&mut self, update: &AdamUpdate) -> Result<()>;

    /// Copies the moments, first and second, to host memory, in the flat layout.
    fn read_moments(&self) -> Result<[Vec<f32>; 2]>;

    /// Replaces the moments, in the flat layout. Fails on another length, and then changes nothing.
    fn write_moments(&mut self, moments: [&[f32]; 2]) -> Result<()>;

    /// Updates of the elements `which` of the flat layout alone, for ranks that shard the optimizer's state. The part
    /// has moments of its own. Fails if `which` exceeds the flat layout.
    fn part(&self, which: Range<usize>) -> Result<Box<dyn DevicePart>>;
}

/// AdamW for a part of the flat layout, on the device of the model's parameters. Moments are f32, and zero until they
/// are written.
pub trait DevicePart: Send {
    /// Updates the moments by `gradients` and returns the updated parameters; both are in host memory. The parameters
    /// of the model do not change: the caller gathers the parts of all ranks and writes them to the model. Fails on
    /// another length, and then changes nothing.
    fn updated(&mut self, gradients: &[f32], update: &AdamUpdate) -> Result<Vec<f32>>;

    /// Copies the moments, first and second, to host memory.
    fn read_moments(&self) -> Result<[Vec<f32>; 2]>;

    /// Replaces the moments. Fails on another length, and then changes nothing.
    fn write_moments(&mut self, moments: [&[f32]; 2]) -> Result<()>;
}
