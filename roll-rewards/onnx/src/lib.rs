//! ONNX graphs, read at run time and executed on Burn, forward and backward.
//!
//! A graph becomes a [`Model`]. [`Model::run`] computes every output for one float input; [`Model::vjp`] computes one
//! output and its pullback to the input. Weights are constants and cause no work in the backward pass. Graphs with
//! several inputs or with integer inputs (text towers) run with [`Model::run_all`].
//!
//! Opening a graph folds constants and fuses convolutions, layer norms and other chains of nodes, so that each is one
//! operator, forward and backward. An operator that the executor does not support is an error that names operator, node
//! and file.
//!
//! A [`Network`] is a model whose passes without gradient may run on ONNX Runtime (cargo feature `onnxruntime`).
//!
//! The crate depends on `roll-core`, `roll-external` and `roll-backends`, and knows no reward.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod attributes;
mod batch;
mod error;
mod execute;
mod fuse;
mod graph;
mod model;
mod nesting;
mod network;
mod ops;
mod read;
mod recorded;
pub mod runtime;
mod tensor_proto;
#[cfg(test)]
mod tests;
mod thread_pool;
mod value;

pub use error::OnnxError;
pub use graph::Port;
pub use model::Model;
pub use network::{Executor, Network};
pub use recorded::Recorded;
