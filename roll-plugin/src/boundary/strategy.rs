//! [`Strategy`] across the boundary. P5 is a number of the contract in [`crate::abi`].

use std::sync::Arc;

use serde::Deserialize;

use super::communicator::{self, RemoteCommunicator};
use super::message::{Incoming, Outgoing};
use super::model;
use super::object::{Answered, Gift, Loan, Remote};
use super::remote::remote;
use super::remote_model::RemoteModel;
use crate::{
    Error, Model, OptimizerConfig, Result, StateDict, Strategy, StrategyRanks, StrategyReport, WeightPlacement,
};

// Generates `answer`, and the trait for `RemoteStrategy`. If the other side lacks a method, `{ E }` returns E (the
// trait's default) in its place, and `else { E }` logs a failure and returns E. See `remote!`.
remote! {
    trait Strategy for RemoteStrategy {
        fn weight_placement(&self) -> Option<WeightPlacement> { None }
        fn before_last_pull(&mut self, model: &mut dyn Model) -> Result<()> { Ok(()) }
        fn accumulate(&mut self, model: &mut dyn Model) -> Result<()>;
        // If `discard` fails by a panic, so do all later calls (P5): the gradient that remains is never applied.
        fn discard(&mut self) else { () };
        fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale: f64) -> Result<StrategyReport>;
        fn state(&self) -> Result<StateDict>;
        fn load_state(&mut self, state: &StateDict) -> Result<()>;
    }
    by hand others {
        fn attach(&mut self, model: &mut dyn Model, optimizer: &OptimizerConfig) -> Result<()> {
            self.refuse_sharded_weights(model)?;
            self.remote.call_required("attach", &[("model", &model::lend(model)), ("optimizer", optimizer)])
        }

        fn ranks(&self) -> &StrategyRanks {
            &self.ranks
        }
    }
}

/// A strategy of the other side.
pub(super) struct RemoteStrategy {
    remote: Remote,
    ranks: StrategyRanks,
}

impl RemoteStrategy {
    pub(super) fn new(remote: Remote) -> Result<Self> {
        let answer = remote.call("ranks", &[])?.ok_or_else(|| remote.lacks("ranks"))?;
        let ranks = remote.blame("ranks", answer.read().and_then(RemoteCommunicator::new))?;
        Ok(Self { remote, ranks: StrategyRanks::new(Arc::new(ranks)) })
    }

    /// Fails if the strategy is a plugin and the weights of the model are sharded over several ranks. Such a model
    /// gathers weights by collectives, which must have one order with those of the strategy; a library has collectives
    /// of its own.
    fn refuse_sharded_weights(&self, model: &dyn Model) -> Result<()> {
        let placements = [self.weight_placement(), model.distribution().weights];
        let is_sharded = placements.contains(&Some(WeightPlacement::Sharded)) && self.ranks.all.world_size() > 1;
        if is_sharded && self.remote.source.is_plugin() {
            return Err(Error::config(
                "strategy.name",
                "weights that are sharded over the ranks need the strategy that is linked in: leave its plugin out",
            ));
        }
        Ok(())
    }
}

/// Arguments of `attach`.
#[derive(Deserialize)]
struct Attach {
    model: Remote,
    optimizer: OptimizerConfig,
}

/// Answers the methods that the declaration leaves to be written by hand.
fn others(strategy: &mut (dyn Strategy + '_), method: &str, message: &Incoming) -> Answered {
    match method {
        // The ranks that samples are divided over; they may outlive the strategy.
        "ranks" => Outgoing::of(&communicator::give(strategy.ranks().data.clone())).map(Some),
        "attach" => {
            let Attach { model, optimizer } = message.read()?;
            strategy.attach(&mut RemoteModel::new(model)?, &optimizer)?;
            Outgoing::of(&()).map(Some)
        }
        _ => Ok(None),
    }
}

/// Hands over a strategy; calls reach it by the generated `answer`.
pub(super) fn give(mut strategy: Box<dyn Strategy>) -> Gift {
    Gift::exclusive(move |method, message| answer(strategy.as_mut(), method, message))
}

/// Lends a strategy for a call; calls reach it by the generated `answer`.
pub(super) fn lend<'a>(strategy: &'a mut (dyn Strategy + 'a)) -> Loan<'a> {
    Loan::exclusive(move |method, message| answer(strategy, method, message))
}
