//! Errors of weight files.

use std::path::{Path, PathBuf};

use roll_core::{Error, Fault};

/// Why weights cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    // The file as a whole
    /// The system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The action, as a verb phrase.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A directory stands where a file is needed.
    #[error("{}: expected a weight file, found a directory{hint}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The remedy, beginning with "; ", or empty.
        hint: String,
    },
    /// The file is of another format than its name or its use says.
    #[error("{}: expected {expected}, found {found}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The format that is needed.
        expected: String,
        /// The format found.
        found: String,
    },
    /// No file matches a pattern.
    #[error("no file matches `{pattern}`")]
    NoMatch {
        /// The pattern or path.
        pattern: String,
    },

    // safetensors
    /// The file ends too early.
    #[error("{}: truncated: expected {expected} bytes{}, found {found}", path.display(), of(tensor))]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor whose bytes are missing, when one is known.
        tensor: Option<String>,
        /// Bytes that must be there.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The header claims to be longer than the file or the limit of the format.
    #[error("{}: the header says it is {found} bytes long, expected at most {expected}", path.display())]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// The most it can be.
        expected: u64,
        /// The length that it claims.
        found: u64,
    },
    /// The header or an index is no valid JSON of its kind.
    #[error("{}: {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// The place of a tensor's bytes contradicts its shape, the file, or another tensor.
    #[error("{}: tensor `{tensor}`: expected {expected}, found {found}", path.display())]
    Offsets {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Demands on its place.
        expected: String,
        /// The header's place.
        found: String,
    },
    /// The number of bytes of a tensor is beyond what can be counted.
    #[error("{}: tensor `{tensor}`: the shape {shape:?} overflows, expected a size below 2^64 bytes", path.display())]
    ShapeOverflow {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },

    // torch
    /// A torch checkpoint that cannot be parsed.
    #[error("{}: not a torch checkpoint that can be read: {problem}", path.display())]
    Pickle {
        /// The file.
        path: PathBuf,
        /// The obstacle.
        problem: String,
    },
    /// A torch checkpoint that refers to code or objects beyond tensors and plain values. They are never executed.
    #[error(
        "{}: `{key}`: expected tensors and plain values, found the Python object `{found}` (not executed); save a \
         plain state dictionary, or convert it to safetensors",
        path.display()
    )]
    UnexpectedPickle {
        /// The file.
        path: PathBuf,
        /// Where in the checkpoint.
        key: String,
        /// Name of the Python object.
        found: String,
    },

    // Tensors
    /// A tensor has a dtype that is not supported.
    #[error(
        "{}: tensor `{tensor}`: expected dtype f32, bf16, f16, i64, i32, u8 or bool, found {found}",
        path.display()
    )]
    DType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        found: String,
    },
    /// A tensor is not there.
    #[error("{}: the tensor `{tensor}` is missing", path.display())]
    MissingTensor {
        /// The file, or the first of several.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Two files, or two names, give the same tensor.
    #[error("{}", duplicate(tensor, first, second))]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// The first file.
        first: PathBuf,
        /// The second file.
        second: PathBuf,
    },

    // Several files
    /// A shard is not there.
    #[error("{}: the shard `{shard}` is missing", of.display())]
    MissingShard {
        /// The index or one of the shards.
        of: PathBuf,
        /// Name of the missing file.
        shard: String,
    },
    /// The keys are not those of a known component.
    #[error("{}: expected {expected}, found keys such as {found}", path.display())]
    Unrecognised {
        /// The file.
        path: PathBuf,
        /// The known components.
        expected: &'static str,
        /// A few of its keys.
        found: String,
    },
}

fn of(tensor: &Option<String>) -> String {
    tensor.as_ref().map(|t| format!(" for the tensor `{t}`")).unwrap_or_default()
}

fn duplicate(tensor: &str, first: &Path, second: &Path) -> String {
    match first == second {
        true => format!("{}: its header names the tensor `{tensor}` twice", first.display()),
        false => format!(
            "two files hold the tensor `{tensor}`: {} and {}. They are of two networks, or two copies of one: name the \
             files of one network alone",
            first.display(),
            second.display()
        ),
    }
}

impl WeightsError {
    /// Wraps an error of the file system: `map_err(WeightsError::io("read", path))`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

impl From<WeightsError> for Error {
    fn from(e: WeightsError) -> Self {
        match e {
            // Keeps the distinction between a mistake and a failing disk.
            WeightsError::Io { action, path, source } => Error::File { action, path, source },
            e => Error::component(Fault::User, e),
        }
    }
}
