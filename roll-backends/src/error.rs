//! Errors of this crate.

use roll_core::{Error, Fault};

/// Errors below the models.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The backend was not compiled in, or its hardware or library is not there.
    #[error("the backend `{name}` cannot be used: {reason}")]
    Backend {
        /// As given to `--backend`.
        name: String,
        /// The missing part and how to get it.
        reason: String,
    },
    /// A network asked for a weight that the store does not hold.
    #[error("the weight `{name}` is missing")]
    MissingWeight {
        /// Its key.
        name: String,
    },
    /// A tensor has another rank than the network needs.
    #[error("`{what}`: expected rank {expected}, found shape {found:?}")]
    Rank {
        /// The tensor.
        what: String,
        /// The rank that is needed.
        expected: usize,
        /// The shape that was given.
        found: Vec<usize>,
    },
    /// A tensor could not be moved between a GPU and pinned host memory.
    #[error(
        "a tensor could not be copied between the GPU and the host's memory ({reason}): is there memory for it on both \
         sides (`roll plan` says how much)?"
    )]
    Offload {
        /// The message of libtorch or CUDA.
        reason: String,
    },
    /// A kernel or an allocation on the device failed; it is told when a result is read.
    #[error(
        "computing on the device failed ({reason}): if its memory is full, `roll plan` says what a run needs and `nvidia-smi` \
         who has it"
    )]
    Device {
        /// The message of the device's library.
        reason: String,
    },

    // Ranks
    /// The ranks have different models.
    #[error(
        "rank {rank} trains {found} tensors that are not the {expected} of rank 0: do all ranks run the same version, \
         configuration and files?"
    )]
    OtherParameters {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Tensors it trains.
        found: u64,
        /// Tensors that rank 0 trains.
        expected: u64,
    },
    /// A pullback came too late.
    #[error(
        "parameters that are divided among the ranks were asked for as they were {behind} writes ago: a pullback that was \
         recorded before an update cannot be pulled after it"
    )]
    OldParameters {
        /// Writes between then and now.
        behind: u32,
    },
    /// Parameters that must be equal are not.
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
        /// Tensors that differ.
        count: usize,
        /// Tensors in all.
        of: usize,
    },
}

impl From<BackendError> for Error {
    fn from(e: BackendError) -> Self {
        let fault = match e {
            BackendError::Backend { .. }
            | BackendError::MissingWeight { .. }
            | BackendError::Rank { .. }
            | BackendError::OtherParameters { .. } => Fault::User,
            BackendError::Offload { .. }
            | BackendError::Device { .. }
            | BackendError::OldParameters { .. }
            | BackendError::Drift { .. } => Fault::Failure,
        };
        Error::component(fault, e)
    }
}
