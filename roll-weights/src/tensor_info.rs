//! The entry of a tensor in the header of a weight file.

use std::ops::Range;
use std::path::Path;

use roll_core::DType;

use crate::error::WeightsError;

/// A tensor's entry in the header of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Dtype, or `None` if it is not supported.
    pub dtype: Option<DType>,
    /// Name of the dtype in the file, in lower case.
    pub stored: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Position in a safetensors file, in bytes.
    pub(crate) range: Range<usize>,
}

impl TensorInfo {
    pub(crate) fn supported(&self, path: &Path, tensor: &str) -> Result<DType, WeightsError> {
        self.dtype.ok_or_else(|| self.unsupported(path, tensor))
    }

    pub(crate) fn unsupported(&self, path: &Path, tensor: &str) -> WeightsError {
        WeightsError::dtype(path, tensor, &self.stored)
    }
}
