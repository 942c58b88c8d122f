//! The check that algorithms on conversations share.

use roll_core::{Communicator, Error, Model, Result, RewardScorer};
use roll_step::update;

/// What an algorithm trains on, in words.
pub(crate) struct TrainedOn {
    pub algorithm: &'static str,
    /// "conversations", "preferences".
    pub data: &'static str,
    /// What `algo.batch_size` counts: "conversations", "pairs".
    pub entries: &'static str,
}

impl TrainedOn {
    /// Fails if nothing of the model is trained, or if `batch_size` entries cannot be shared out equally among `ranks`.
    /// Warns of a reward, which has no effect.
    pub(crate) fn check(
        &self,
        model: &dyn Model,
        reward: Option<&dyn RewardScorer>,
        batch_size: usize,
        ranks: &dyn Communicator,
    ) -> Result<()> {
        let Self { algorithm, data, entries } = self;
        update::check_trainable(model)?;
        if let Some(reward) = reward {
            tracing::warn!("`{algorithm}` trains on {data} alone: the reward `{}` has no effect", reward.name());
        }
        let ranks = ranks.world_size();
        if !batch_size.is_multiple_of(ranks) {
            let problem = format!("{batch_size} {entries} cannot be shared out among {ranks} ranks");
            return Err(Error::config("algo.batch_size", problem));
        }
        Ok(())
    }
}
