//! Errors of this crate.

use roll_core::{Error, Fault};

/// Errors of devices, weights and ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum BackendError {
    /// The backend is not compiled in, or its hardware or library is missing.
    #[error("the backend `{name}` cannot be used: {reason}")]
    Backend { name: String, reason: String },
    /// The weight store lacks a weight that the network needs.
    #[error("the weight `{name}` is missing")]
    MissingWeight { name: String },
    /// A tensor does not have the rank that the network needs.
    #[error("`{what}`: expected rank {expected}, found shape {found:?}")]
    Rank { what: String, expected: usize, found: Vec<usize> },
    /// A tensor could not be moved between a GPU and pinned host memory.
    #[error(
        "a tensor could not be copied between the GPU and the host's memory ({reason}): is there memory for it on both \
         sides (`roll plan` reports how much)?"
    )]
    Offload { reason: String },
    /// A kernel or an allocation on the device failed. Devices compute asynchronously, so the error surfaces when a
    /// result is read.
    #[error(
        "computing on the device failed ({reason}): if its memory is full, `roll plan` reports what a run needs, and \
         `nvidia-smi` which processes use it"
    )]
    Device { reason: String },

    // Ranks
    /// The ranks train different tensors.
    #[error(
        "rank {rank} trains {found} tensors that are not the {expected} of rank 0: do all ranks run the same version, \
         configuration and files?"
    )]
    OtherParameters { rank: usize, found: u64, expected: u64 },
    /// A pullback was called after the sharded parameters it was recorded with had been updated.
    #[error(
        "parameters that are sharded over the ranks were requested as they were {behind} writes ago: a pullback that was \
         recorded before an update cannot be called after it"
    )]
    OldParameters { behind: u32 },
    /// Replicated parameters differ between ranks.
    #[error(
        "the ranks have drifted apart: after {updates} updates `{name}` of rank {rank} is not that of rank 0 ({count} of \
         {of} tensors differ); after 0 updates the ranks started from different files or seeds, later a machine \
         computes wrongly: resume from the newest checkpoint"
    )]
    Drift { updates: u64, rank: usize, name: String, count: usize, of: usize },
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
