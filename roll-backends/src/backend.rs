//! Burn's backends, below the `Tensor` that hides them.

pub use burn_backend::*;
pub use burn_dispatch::backends::*;
#[cfg(feature = "libtorch")]
pub use burn_dispatch::devices::*;
pub use burn_dispatch::{device::*, tensor::*};
