//! The entry of a tensor in the header of a weight file, the same for every format.

use std::ops::Range;
use std::path::Path;

use roll_core::DType;

use crate::error::WeightsError;

/// Dtype, shape and place of a tensor, as the header of its file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Dtype, or `None` if it is not supported.
    pub dtype: Option<DType>,
    /// Name of the dtype in the file, in lower case.
    pub stored: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Byte range within a safetensors file; empty for a torch checkpoint.
    pub(crate) range: Range<usize>,
}

impl TensorInfo {
    /// The dtype. Fails if it is not supported.
    pub(crate) fn supported_dtype(&self, path: &Path, tensor: &str) -> Result<DType, WeightsError> {
        self.dtype.ok_or_else(|| self.unsupported_dtype(path, tensor))
    }

    pub(crate) fn unsupported_dtype(&self, path: &Path, tensor: &str) -> WeightsError {
        WeightsError::dtype(path, tensor, &self.stored)
    }
}
