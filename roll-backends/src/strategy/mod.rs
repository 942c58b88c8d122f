//! Strategies: how gradients become updates.

mod single;

pub use single::{Single, SingleOptions};
