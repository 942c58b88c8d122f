//! Errors of weight files.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use roll_core::{Error, Fault};

/// Why weights cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum WeightsError {
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// The path of a file is a directory.
    #[error("{}: expected a weight file, found a directory{hint}", path.display())]
    Directory {
        path: PathBuf,
        /// A remedy that begins with "; ", or an empty text.
        hint: String,
    },
    /// The file's format contradicts its name or its use.
    #[error("{}: expected {expected}, found {found}", path.display())]
    Format { path: PathBuf, expected: String, found: String },
    /// No file matches a pattern.
    #[error("no file matches `{pattern}`")]
    NoMatch { pattern: String },

    /// The contents of the file, or of one of its tensors, are invalid or not supported.
    #[error("{}: {problem}", path.display())]
    Invalid { path: PathBuf, problem: String },
    /// The keys do not belong to a known component.
    #[error("{}: expected {expected}, found keys such as {found}", path.display())]
    Unrecognised { path: PathBuf, expected: &'static str, found: String },
}

impl WeightsError {
    /// Returns a conversion of an IO error, for `map_err(WeightsError::io("read", path))`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// Returns an [`WeightsError::Invalid`].
    pub fn invalid(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self::Invalid { path: path.into(), problem: problem.into() }
    }

    /// Returns an error of one tensor.
    pub fn tensor(path: impl Into<PathBuf>, name: &str, problem: impl Display) -> Self {
        Self::invalid(path, format!("tensor `{name}`: {problem}"))
    }

    /// Returns the error of a missing tensor.
    pub fn missing(path: impl Into<PathBuf>, tensor: &str) -> Self {
        Self::invalid(path, format!("the tensor `{tensor}` is missing"))
    }

    /// Returns the error of a tensor whose dtype is not supported.
    pub fn dtype(path: impl Into<PathBuf>, tensor: &str, found: impl Display) -> Self {
        Self::tensor(path, tensor, format!("expected dtype f32, bf16, f16, i64, i32, u8 or bool, found {found}"))
    }

    /// Returns the error of a tensor that is in two files.
    pub(crate) fn duplicate(tensor: &str, first: &Path, second: &Path) -> Self {
        let remedy = "the files belong to two networks, or are two copies of one: name the files of one network alone";
        Self::tensor(second, tensor, format!("{} has it too; {remedy}", first.display()))
    }

    /// Returns the error of a missing shard.
    pub(crate) fn missing_shard(of: &Path, shard: &str) -> Self {
        Self::invalid(of, format!("the shard `{shard}` is missing"))
    }

    /// Returns the error of a torch checkpoint that cannot be parsed.
    pub(crate) fn pickle(path: &Path, problem: impl Display) -> Self {
        Self::invalid(path, format!("not a torch checkpoint that can be read: {problem}"))
    }
}

impl From<WeightsError> for Error {
    fn from(e: WeightsError) -> Self {
        match e {
            // Keeps user mistakes apart from failures of the disk.
            WeightsError::Io { action, path, source } => Error::File { action, path, source },
            e => Error::component(Fault::User, e),
        }
    }
}
