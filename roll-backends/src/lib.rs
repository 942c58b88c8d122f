//! The numerical layer below roll's models and rewards: devices, value-and-pullback through Burn's autodiff, gradient
//! checkpointing, fused operators, LoRA layers, weight stores, optimizers and strategies (ZeRO).
//!
//! Everything here works on Burn tensors, whose device is chosen at run time. No autodiff graph is visible above this
//! crate.
//!
//! The crate is for authors of models and networks. A plugin does not need it: plugins exchange host tensors of
//! `roll-core`. It depends on `roll-core` and on Burn, and on no other crate of this project. Start reading at
//! [`vjp()`] and [`chain`], then [`layers`]; [`ops`] holds the operators, [`strategy`] and [`parameters`] the training
//! state.
//!
//! Example: the values and the pullback of a closure that squares its input.
//!
//! ```
//! use roll_backends::host::{to_device_nd, to_host_nd};
//! use roll_backends::{NdTensor, Tape, device, vjp};
//! use roll_core::Tensor;
//!
//! # fn main() -> roll_core::Result<()> {
//! let cpu = device("flex")?;
//! let x = to_device_nd(&Tensor::new(vec![1.0f32, -2.0, 3.0], [3])?, &cpu)?;
//! let (values, recorded) = vjp(&[x], Tape::off(), |inputs, _| {
//!     let x = inputs[0].flat().clone();
//!     Ok(vec![NdTensor::from_flat(x.clone() * x, inputs[0].shape())])
//! })?;
//! assert_eq!(to_host_nd(&values[0])?.f32s()?, [1.0, 4.0, 9.0]);
//!
//! let ones = to_device_nd(&Tensor::full([3], 1.0), &cpu)?;
//! let gradients = recorded.pull(vec![Some(ones)], None);
//! let d_x = gradients[0].as_ref().expect("the squares depend on x");
//! assert_eq!(to_host_nd(d_x)?.f32s()?, [2.0, -4.0, 6.0]);
//! # Ok(())
//! # }
//! ```
//!
//! A [`Chain`] of [`Segment`]s does this for a deep network, one segment at a time.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
// burn-tch is deprecated upstream, but it is the only way to libtorch.
#![cfg_attr(feature = "libtorch", allow(deprecated))]

#[cfg(any(feature = "libtorch", test))]
mod async_copies;
mod backend;
pub mod background;
pub mod blocks;
pub mod cache_directory;
pub mod chain;
pub mod device;
pub mod eight_bits;
pub mod error;
pub mod host;
pub mod layers;
mod library;
pub mod nccl;
pub mod nd;
mod offload;
pub mod ops;
pub mod optimizer;
pub mod overlap;
pub mod parameters;
mod speed;
pub mod strategy;
mod sync;
pub mod tcp;
pub mod vjp;
pub mod weights;

#[cfg(test)]
mod tests;

/// A toy model that is shared with the tests of ranks that are processes.
#[cfg(test)]
#[path = "../tests/flat_model/mod.rs"]
mod flat_model;

pub use blocks::BlockMatrix;
pub use chain::{Chain, ChainRecord, Memory, Segment};
pub use device::{Backend, activation_dtype, device, product_dtype};
pub use eight_bits::{EightBits, ScaledMatrix, ScaledRows};
pub use error::BackendError;
pub use host::{to_device, to_host};
pub use layers::Scope;
pub use nd::NdTensor;
pub use offload::Offloaded;
pub use parameters::{ParameterSegment, Parameters, Snapshot};
pub use speed::sustained_flops;
pub use vjp::{Tape, vjp};
pub use weights::{Resident, Sharded, Weight, WeightStore, Weights};
