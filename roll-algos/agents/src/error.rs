//! Errors of this crate.

use roll_core::{Error, Fault};

/// Errors of algorithms on language models.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum AgentError {
    /// The configuration names no environment.
    #[error(
        "the algorithm `{algorithm}` acts in an environment; name one with `--env` or `env.name` (see `roll plugins`)"
    )]
    NoEnvironment { algorithm: &'static str },
    /// No episode of a step can be trained on.
    #[error("no episode of this step gives `{algorithm}` anything to learn from: {reason}")]
    NoEpisode {
        algorithm: &'static str,
        /// The reason of the first episode.
        reason: String,
    },
}

impl From<AgentError> for Error {
    fn from(e: AgentError) -> Self {
        Error::component(Fault::User, e)
    }
}
