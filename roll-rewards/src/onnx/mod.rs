//! ONNX graphs, read at run time and executed on Burn, forward and backward.
//!
//! A graph becomes a [`Model`]: [`Model::run`] gives every output for one float input, [`Model::vjp`] one output and its
//! pullback to the input. Weights are constants: no gradient work is done for them. Graphs with several inputs,
//! or with integers among them (text towers), run with [`Model::run_all`].
//!
//! When a graph is opened, constants are folded, and convolutions, layer norms and the like are fused with what follows
//! them, so that each is one pass, forward and backward.
//!
//! A [`Network`] is a model whose passes without gradient may run on ONNX Runtime (the cargo feature `onnxruntime`).
//!
//! Opening a file refuses operators that the executor cannot run, by operator, node and file.

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
mod pool;
mod read;
mod recorded;
pub mod runtime;
mod tensor_proto;
#[cfg(test)]
mod tests;
mod value;

pub use error::OnnxError;
pub use graph::Port;
pub use model::Model;
pub use network::{Executor, Network};
pub use recorded::Recorded;
