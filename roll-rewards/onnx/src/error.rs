//! Errors of the ONNX reader and executor.

use std::path::PathBuf;

use roll_core::{DType, Error, Fault};

/// Errors of an ONNX file or of its execution.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum OnnxError {
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    /// The file is not an ONNX model, or contradicts itself.
    #[error("{}: {problem}", path.display())]
    BadFile {
        path: PathBuf,
        /// What was expected and what was found.
        problem: String,
    },
    /// The executor does not support an operator.
    #[error("{}: node `{node}` uses the operator `{operator}`, which this build cannot run; the rewards `command` and \
         `http` score with a program of yours", path.display())]
    Operator {
        path: PathBuf,
        /// The node's name, or the name of its first output if it has none.
        node: String,
        /// The operator, with its domain unless it is the default domain.
        operator: String,
    },
    /// A node uses an unsupported feature of its operator, or does not fit its inputs.
    #[error("{}: node `{node}` ({operator}): {problem}", path.display())]
    Node {
        path: PathBuf,
        /// The node's name, or the name of its first output if it has none.
        node: String,
        operator: String,
        /// What was expected and what was found.
        problem: String,
    },
    /// A tensor does not fit the graph's input or output.
    #[error("{}: `{port}` is {expected}, found shape {found:?}", path.display())]
    Port {
        path: PathBuf,
        port: String,
        /// The declared shape; free axes have a name or `?`.
        expected: String,
        found: Vec<usize>,
    },
    /// The number of tensors is not the number of the graph's inputs.
    #[error("{}: the inputs are `{expected}`, found {found} tensors", path.display())]
    Inputs { path: PathBuf, expected: String, found: usize },
    /// A tensor has another type than the input.
    #[error("{}: the input `{port}` is of type {expected:?}, found {found}", path.display())]
    Type { path: PathBuf, port: String, expected: DType, found: &'static str },
    /// ONNX Runtime is requested but not part of this build.
    #[error(
        "ONNX Runtime is not part of this build: build with `--features onnxruntime`, or take this project's own \
         executor (`onnx: own`)"
    )]
    NoRuntime,
    /// ONNX Runtime could not be loaded.
    #[error(
        "ONNX Runtime cannot be loaded: {problem}; run `scripts/setup-onnxruntime` and set ORT_DYLIB_PATH as it says, \
         or take this project's own executor (`onnx: own`)"
    )]
    Library {
        /// Which library was expected and what was found.
        problem: String,
    },
    /// ONNX Runtime refused a file or failed to run it.
    #[error("{}: ONNX Runtime: {problem}; this project's own executor may take it (`onnx: own`)", path.display())]
    Runtime { path: PathBuf, problem: String },
}

impl From<OnnxError> for Error {
    fn from(e: OnnxError) -> Self {
        Error::component(Fault::User, e)
    }
}

/// The problem of a node or tensor, before the node's name is attached.
#[derive(Debug, PartialEq)]
pub(super) struct Problem(pub String);

impl From<String> for Problem {
    fn from(problem: String) -> Self {
        Self(problem)
    }
}

impl From<&str> for Problem {
    fn from(problem: &str) -> Self {
        Self(problem.to_owned())
    }
}

impl From<Error> for Problem {
    fn from(e: Error) -> Self {
        Self(e.to_string())
    }
}

/// Runs `f` and converts a panic into a problem. A tensor library panics if its checks are stricter than ours.
pub(super) fn no_panic<T>(f: impl FnOnce() -> Result<T, Problem>) -> Result<T, Problem> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        Err(Problem(format!("the computation panicked: {message}")))
    })
}
