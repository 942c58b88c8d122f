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
    /// No server of an engine continued a prompt. Only the episode that waits for the answer is concerned.
    #[error("the engine gave no answer: {problem}")]
    NoAnswer { problem: String },
    /// An engine cannot be trained with.
    #[error("the engine of `algo.rollout` cannot be trained with: {problem}")]
    Engine { problem: String },
    /// An engine's log-probabilities are not those of the trained model.
    #[error(
        "the engine's log-probabilities differ from those of the trained model by {found:.3} on average, of at most \
         {limit}: does it serve the base model of `model.model_path`, in a precision near that of the training, with \
         log-probabilities before temperature (docs: Agents, \"Rollouts by vLLM or SGLang\")?"
    )]
    OtherModel { found: f64, limit: f64 },
    /// A chat template leaves out or repeats places of pictures.
    #[error(
        "the prompt has {marks} places for {pictures} pictures: the chat template leaves out or repeats messages with \
         pictures"
    )]
    PicturesOfPrompt { pictures: usize, marks: usize },
    /// An engine is to continue a prompt with pictures.
    #[error(
        "the environment shows pictures, which the engine of `algo.rollout` does not get: set `algo.rollout.name` to \
         `model`"
    )]
    EngineReadsNoPictures,
}

impl From<AgentError> for Error {
    fn from(e: AgentError) -> Self {
        Error::component(Fault::User, e)
    }
}
