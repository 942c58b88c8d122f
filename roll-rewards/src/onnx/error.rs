//! Errors of the ONNX reader and executor.

use std::path::PathBuf;

use roll_core::{DType, Error, Fault};

/// What can be wrong with an ONNX file, or with running it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OnnxError {
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The file is no ONNX model, or contradicts itself.
    #[error("{}: {problem}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What was expected and what was found.
        problem: String,
    },
    /// The executor has no such operator.
    #[error("{}: node `{node}` uses the operator `{operator}`, which this build cannot run", path.display())]
    Operator {
        /// The file.
        path: PathBuf,
        /// The node's name, or its first output where it has none.
        node: String,
        /// The operator, with its domain unless that is the default one.
        operator: String,
    },
    /// A node asks for something that its operator does not do here, or that does not fit its inputs.
    #[error("{}: node `{node}` ({operator}): {problem}", path.display())]
    Node {
        /// The file.
        path: PathBuf,
        /// The node's name, or its first output where it has none.
        node: String,
        /// The operator.
        operator: String,
        /// What was expected and what was found.
        problem: String,
    },
    /// The tensor that was given does not fit the graph's input or output.
    #[error("{}: `{port}` is {expected}, found shape {found:?}", path.display())]
    Port {
        /// The file.
        path: PathBuf,
        /// The input or output.
        port: String,
        /// Its declared shape; names and `?` stand for free axes.
        expected: String,
        /// The shape that was given.
        found: Vec<usize>,
    },
    /// Another number of tensors was given than the graph has inputs.
    #[error("{}: the inputs are `{expected}`, found {found} tensors", path.display())]
    Inputs {
        /// The file.
        path: PathBuf,
        /// The inputs.
        expected: String,
        /// How many tensors were given.
        found: usize,
    },
    /// A tensor of another type was given.
    #[error("{}: the input `{port}` is of type {expected:?}, found {found}", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The input.
        port: String,
        /// Its type.
        expected: DType,
        /// "floats" or "integers".
        found: &'static str,
    },
    /// A pullback was asked of a graph whose inputs are all of integers.
    #[error("{}: there is no gradient with respect to integers: {inputs}; ask for the outputs alone", path.display())]
    NoGradient {
        /// The file.
        path: PathBuf,
        /// The inputs with their types.
        inputs: String,
    },
    /// ONNX Runtime is asked for and is not part of this build.
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
        /// What was looked for and what was found.
        problem: String,
    },
    /// ONNX Runtime refused a file, or failed to run it.
    #[error("{}: ONNX Runtime: {problem}; this project's own executor may take it (`onnx: own`)", path.display())]
    Runtime {
        /// The file.
        path: PathBuf,
        /// What it says.
        problem: String,
    },
}

impl From<OnnxError> for Error {
    fn from(e: OnnxError) -> Self {
        Error::component(Fault::User, e)
    }
}

/// What is wrong with one node or tensor, before it is known whose it is.
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

/// Runs `f`; a panic in it (a tensor library's check that ours did not foresee) becomes a problem.
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
