//! Errors of this crate.

use roll_core::{Error, Fault};

/// Errors of devices, weights and ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The backend is not compiled in, or its hardware or library is missing.
    #[error("the backend `{name}` cannot be used: {reason}")]
    Backend {
        /// The name given to `--backend`.
        name: String,
        /// The missing part and the remedy.
        reason: String,
    },
    /// The weight store lacks a weight that the network needs.
    #[error("the weight `{name}` is missing")]
    MissingWeight {
        /// The key of the weight.
        name: String,
    },
    /// A tensor does not have the rank that the network needs.
    #[error("`{what}`: expected rank {expected}, found shape {found:?}")]
    Rank {
        /// Name of the tensor.
        what: String,
        /// The required rank.
        expected: usize,
        /// The shape of the tensor.
        found: Vec<usize>,
    },
    /// A tensor could not be moved between a GPU and pinned host memory.
    #[error(
        "a tensor could not be copied between the GPU and the host's memory ({reason}): is there memory for it on both \
         sides (`roll plan` reports how much)?"
    )]
    Offload {
        /// The message of libtorch or CUDA.
        reason: String,
    },
    /// A kernel or an allocation on the device failed. Devices compute asynchronously, so the error surfaces when a
    /// result is read.
    #[error(
        "computing on the device failed ({reason}): if its memory is full, `roll plan` reports what a run needs, and \
         `nvidia-smi` which processes use it"
    )]
    Device {
        /// The message of the device's library.
        reason: String,
    },

    // Ranks
    /// The ranks train different tensors.
    #[error(
        "rank {rank} trains {found} tensors that are not the {expected} of rank 0: do all ranks run the same version, \
         configuration and files?"
    )]
    OtherParameters {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Number of tensors that it trains.
        found: u64,
        /// Number of tensors that rank 0 trains.
        expected: u64,
    },
    /// A pullback was called after the sharded parameters it was recorded with had been updated.
    #[error(
        "parameters that are sharded over the ranks were requested as they were {behind} writes ago: a pullback that was \
         recorded before an update cannot be called after it"
    )]
    OldParameters {
        /// Updates since the pullback was recorded.
        behind: u32,
    },
    /// Replicated parameters differ between ranks.
    #[error(
        "the ranks have drifted apart: after {updates} updates `{name}` of rank {rank} is not that of rank 0 ({count} of \
         {of} tensors differ); after 0 updates the ranks started from different files or seeds, later a machine \
         computes wrongly: resume from the newest checkpoint"
    )]
    Drift {
        /// Updates so far.
        updates: u64,
        /// The first rank that differs.
        rank: usize,
        /// The first tensor that differs.
        name: String,
        /// Number of tensors that differ.
        count: usize,
        /// Number of tensors compared.
        of: usize,
    },
}

impl From<BackendError> for Error {
    fn from(e: BackendError) -> Self {
        let fault = match e {
            BackendError::Offload { .. }
            | BackendError::Device { .. }
            | BackendError::OldParameters { .. }
            | BackendError::Drift { .. } => Fault::Failure,
            _ => Fault::User,
        };
        Error::component(fault, e)
    }
}
