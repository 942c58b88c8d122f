//! Errors of weight files.

use std::path::{Path, PathBuf};

use roll_core::{Error, Fault};

/// Why weights cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    // The file as a whole
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The action, such as "read" or "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The path of a file is a directory.
    #[error("{}: expected a weight file, found a directory{hint}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// A remedy that begins with "; ", or an empty text.
        hint: String,
    },
    /// The file's format contradicts its name or its use.
    #[error("{}: expected {expected}, found {found}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The required format.
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
    /// The file is too short.
    #[error("{}: truncated: expected {expected} bytes{}, found {found}", path.display(), of(tensor))]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor whose bytes are missing, if it is known.
        tensor: Option<String>,
        /// Number of bytes that the header requires.
        expected: u64,
        /// Number of bytes in the file.
        found: u64,
    },
    /// The header claims to be longer than the file or than the format's limit.
    #[error("{}: the header says it is {found} bytes long, expected at most {expected}", path.display())]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// The greatest possible length in bytes.
        expected: u64,
        /// The claimed length in bytes.
        found: u64,
    },
    /// The header or an index is not valid JSON of its kind.
    #[error("{}: {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// The byte range of a tensor contradicts its shape, the file's length or another tensor.
    #[error("{}: tensor `{tensor}`: expected {expected}, found {found}", path.display())]
    Offsets {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The requirement on the byte range.
        expected: String,
        /// The byte range in the header.
        found: String,
    },
    /// The number of bytes of a tensor exceeds 2^64.
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
    /// A torch checkpoint cannot be parsed.
    #[error("{}: not a torch checkpoint that can be read: {problem}", path.display())]
    Pickle {
        /// The file.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// A torch checkpoint refers to code or to objects other than tensors and plain values. Nothing of it is executed.
    #[error(
        "{}: `{key}`: expected tensors and plain values, found the Python object `{found}` (not executed); save a \
         plain state dictionary, or convert it to safetensors",
        path.display()
    )]
    UnexpectedPickle {
        /// The file.
        path: PathBuf,
        /// Position in the checkpoint: the keys, joined by dots.
        key: String,
        /// Name of the Python object.
        found: String,
    },

    // Tensors
    /// The dtype of a tensor is not supported.
    #[error(
        "{}: tensor `{tensor}`: expected dtype f32, bf16, f16, i64, i32, u8 or bool, found {found}",
        path.display()
    )]
    DType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The dtype's name in the file.
        found: String,
    },
    /// A tensor is missing.
    #[error("{}: the tensor `{tensor}` is missing", path.display())]
    MissingTensor {
        /// The file, or the first of several.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Two files, or two names, have the same tensor.
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
    /// A shard is missing.
    #[error("{}: the shard `{shard}` is missing", of.display())]
    MissingShard {
        /// The index or one of the shards.
        of: PathBuf,
        /// Name of the missing file.
        shard: String,
    },
    /// The keys do not belong to a known component.
    #[error("{}: expected {expected}, found keys such as {found}", path.display())]
    Unrecognised {
        /// The file.
        path: PathBuf,
        /// The known components.
        expected: &'static str,
        /// Some of its keys.
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
    /// Returns a conversion of an IO error, for `map_err(WeightsError::io("read", path))`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
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
