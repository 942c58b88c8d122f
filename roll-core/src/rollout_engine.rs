//! What continues the prompts of rollouts.

use crate::{Generation, LanguageModel, Result, Sampling};

/// Continues the prompts of a rollout: the trained model itself, or an inference engine that serves it.
///
/// Tokens go in and tokens come out. Text is never encoded again, because training needs exactly the tokens that were
/// drawn.
pub trait RolloutEngine {
    /// Continues each prompt, as [`LanguageModel::generate`] does, and returns one result per prompt, in their order. A
    /// prompt that nobody continued is an error of its own: the episode that waits for it ends, and the others go on.
    ///
    /// # Errors
    /// Fails as a whole if no answer can be trusted, for example because the engine reads other tokens than it was sent
    /// or reports no log-probabilities.
    fn answers(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Result<Generation>>>;
}

/// The model itself answers all prompts or fails.
impl<M: LanguageModel + ?Sized> RolloutEngine for M {
    fn answers(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Result<Generation>>> {
        Ok(self.generate(prompts, sampling)?.into_iter().map(Ok).collect())
    }
}
