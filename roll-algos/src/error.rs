//! Errors of this crate.

use roll_core::{Error, Fault};

/// Errors of algorithms.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum AlgorithmError {
    /// The model is of another kind.
    #[error(
        "the algorithm `{algorithm}` trains {kind}, and this model is not one; choose another `algo.name` or \
         `model.name`"
    )]
    OtherModel {
        algorithm: &'static str,
        /// Models that it trains: "language models".
        kind: &'static str,
    },
    /// The configuration names no environment.
    #[error(
        "the algorithm `{algorithm}` acts in an environment; name one with `--env` or `env.name` (see `roll plugins`)"
    )]
    NoEnvironment { algorithm: &'static str },
    /// Not one episode of a step can be trained on.
    #[error("no episode of this step gives `{algorithm}` anything to learn from: {reason}")]
    NoEpisode {
        algorithm: &'static str,
        /// The result of the first.
        reason: String,
    },
    /// Nothing to train.
    #[error(
        "the model has no trainable parameters; choose some with `lora_rank`, or `trainable_models` and \
         `lora_base_model`"
    )]
    NothingToTrain,
    /// The configuration names no reward.
    #[error("the algorithm `{algorithm}` needs a reward; name one in the configuration")]
    NoReward { algorithm: &'static str },
    /// The reward has no gradient.
    #[error(
        "the reward `{reward}` is not differentiable, and the algorithm `{algorithm}` back-propagates through it; \
         choose another reward"
    )]
    NotDifferentiable { algorithm: &'static str, reward: String },
    /// A part returned no pullback.
    #[error("{what} returned no pullback although one was asked for")]
    NoPullback {
        /// The part: "the velocity of step 4".
        what: String,
    },
    /// A sample without anything to score, and the policy is to stop.
    #[error(
        "{sample}: the reward `{reward}` found nothing to score ({reason}); `on_missing: skip` leaves such samples out"
    )]
    NothingToScore { sample: String, reward: String, reason: String },
}

impl From<AlgorithmError> for Error {
    fn from(e: AlgorithmError) -> Self {
        let fault = match e {
            AlgorithmError::NoPullback { .. } => Fault::Failure,
            _ => Fault::User,
        };
        Error::component(fault, e)
    }
}
