//! Errors that every algorithm may meet.

use roll_core::{Error, Fault};

/// Errors that every algorithm may meet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum AlgorithmError {
    /// The model is not of the kind that the algorithm trains.
    #[error(
        "the algorithm `{algorithm}` trains {kind}, and this model is not one; choose another `algo.name` or \
         `model.name`"
    )]
    OtherModel {
        algorithm: &'static str,
        /// Models that it trains: "language models".
        kind: &'static str,
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
    /// A component returned no pullback.
    #[error("{what} returned no pullback although one was asked for")]
    NoPullback {
        /// The result without a pullback: "the velocity of step 4".
        what: String,
    },
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
