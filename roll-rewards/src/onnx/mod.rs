//! ONNX graphs, read at run time and executed on Burn, forward and backward.
//!
//! A graph with one float input becomes a [`Model`]: [`Model::run`] gives every output, [`Model::vjp`] the first output
//! and its pullback to the input. Weights are constants: no gradient work is done for them.
//!
//! What the executor cannot run is refused when the file is opened, by operator, node and file.

mod attributes;
mod batch;
mod error;
mod execute;
mod model;
mod nesting;
mod ops;
mod read;
mod tensor_proto;
#[cfg(test)]
mod tests;
mod value;

pub use error::OnnxError;
pub use model::{Model, Port, Recorded};
