//! Errors of this crate.

use roll_core::{Error, Fault};

/// What can go wrong below the models.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The backend was not compiled in, or its hardware or library is not there.
    #[error("the backend `{name}` cannot be used: {reason}")]
    Backend {
        /// As given to `--backend`.
        name: String,
        /// What is missing and how to get it.
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
}

impl From<BackendError> for Error {
    fn from(e: BackendError) -> Self {
        Error::component(Fault::User, e)
    }
}
