//! Optimizers on flat f32 slices in host memory, gradient clipping, learning-rate schedules.
//!
//! Everything here gives the same bits for any number of threads: updates are element by element, and sums are taken
//! over blocks of a fixed size in a fixed order.

mod adamw;
mod clip;
mod lr_schedule;
mod moments;

pub use adamw::AdamW;
pub use clip::{clear, clip_coefficient, norm, scale, sum_of_squares};
pub use lr_schedule::{LrSchedule, LrSchedulerOptions, LrSchedulerType};
pub use moments::Moments;

/// Elements that one thread takes at a time. Part of the definition of [`norm`]: another size rounds otherwise.
const BLOCK: usize = 1 << 14;
