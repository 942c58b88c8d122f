//! The numerical layer below roll's models and rewards: devices, value-and-pullback through Burn's autodiff, chains of
//! recomputed segments, fused operators, LoRA, weight stores, optimizers and strategies.
//!
//! Everything here works on Burn tensors, whose device is chosen at run time; nothing above this crate sees an
//! autodiff graph.
//!
//! *What it is for*: authors of models and networks. *What it is not*: needed by plugins, which exchange host tensors of
//! `roll-core`, or a model (`roll-models`).

// burn-tch is deprecated upstream, and the only way to libtorch.
#![cfg_attr(feature = "libtorch", allow(deprecated))]

pub mod background;
pub mod blocks;
pub mod chain;
pub mod device;
pub mod eight_bits;
pub mod error;
pub mod host;
pub mod layers;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod nd;
mod offload;
pub mod ops;
pub mod optimizer;
pub mod overlap;
pub mod parameters;
#[cfg(any(feature = "libtorch", test))]
mod side_copies;
mod speed;
pub mod strategy;
pub mod vjp;
pub mod weights;

/// Shared with the tests under MPI, which stand outside of this crate.
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
