//! Optimizers on flat f32 slices in host memory, gradient clipping and learning-rate schedules.
//!
//! All results are bit-identical for any number of threads: updates are elementwise, and sums run over blocks of a
//! fixed size in a fixed order.

mod adamw;
mod clip;
mod lr_schedule;

pub use adamw::{AdamW, Moments, update};
pub use clip::{clear, clip_coefficient, norm, scale, sum_of_squares};
pub use lr_schedule::{LrSchedule, LrSchedulerOptions, LrSchedulerType};

/// Elements per block. Part of the definition of [`norm`]: another size rounds differently.
const BLOCK: usize = 1 << 14;
