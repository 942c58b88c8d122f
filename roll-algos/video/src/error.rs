//! Errors of this crate.

use roll_core::{Error, Fault};

/// Errors of algorithms on videos.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum VideoError {
    /// The reward has no gradient.
    #[error(
        "the reward `{reward}` is not differentiable, and the algorithm `{algorithm}` back-propagates through it; \
         choose another reward"
    )]
    NotDifferentiable { algorithm: &'static str, reward: String },
    /// A sample has nothing to score, and `reward.on_missing` is `error`.
    #[error(
        "{sample}: the reward `{reward}` found nothing to score ({reason}); `on_missing: skip` leaves such samples out"
    )]
    NothingToScore { sample: String, reward: String, reason: String },
}

impl From<VideoError> for Error {
    fn from(e: VideoError) -> Self {
        Error::component(Fault::User, e)
    }
}
