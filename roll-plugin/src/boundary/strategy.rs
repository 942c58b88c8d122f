//! [`Strategy`] across the boundary.

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::{RollError, RollObject, RollOptimizer, RollStrategyReport, RollStrategyTable};

use super::communicator::{self, ForeignCommunicator};
use super::crossing::crossing;
use super::foreign::{Foreign, ForeignObject};
use super::foreign_model::ForeignModel;
use super::model::LentModel;
use super::served::{Served, lent, serve, serve_shared};
use super::source::Source;
use super::wire::{Answer, Lend};
use crate::{
    Error, Model, OptimizerConfig, Result, StateDict, Strategy, StrategyRanks, StrategyReport, WeightPlacement,
};

type Target = dyn Strategy;

crossing! {
    Strategy for ForeignStrategy, table RollStrategyTable of Target {
        mut fn accumulate(model: &mut dyn Model);
        // A strategy that panicked answers no later call either, so nothing wrong is applied.
        mut fn discard(), or ();
        mut fn step(model: &mut dyn Model, learning_rate: f64, scale: f64) -> StrategyReport;
        ref fn state() -> StateDict;
        mut fn load_state(state: &StateDict);
        mut fn before_last_pull(model: &mut dyn Model), absent ();
        ref fn weight_placement() -> Option<WeightPlacement>, or None, absent None;
    }
    by hand [ranks, attach] {
        fn attach(&mut self, model: &mut dyn Model, optimizer: &OptimizerConfig) -> Result<()> {
            self.refuse_sharded_weights(model)?;
            let (model, optimizer) = (LentModel::new(model), Lend::lend(optimizer));
            let attached = self.object.call("attach", self.table.attach, |attach, state, _: *mut (), error| {
                // SAFETY: P1 and P7.
                unsafe { attach(state, model.object(), &optimizer, error) }
            })?;
            self.object.must("attach", attached)
        }

        fn ranks(&self) -> &StrategyRanks {
            &self.facts
        }
    }
}

unsafe extern "C" fn ranks(state: *mut c_void, out: *mut RollObject, error: *mut RollError) -> u32 {
    let body = |strategy: &Target| Ok(communicator::give(strategy.ranks().data.clone()));
    // SAFETY: P4, P7 and P8.
    unsafe { serve_shared(state, out, error, body) }
}

unsafe extern "C" fn attach(
    state: *mut c_void,
    model: RollObject,
    optimizer: *const RollOptimizer,
    error: *mut RollError,
) -> u32 {
    let body = |strategy: &mut Target| {
        // SAFETY: P1, P8 and P9.
        let (mut model, optimizer) =
            unsafe { (ForeignModel::new(model, Source::Host)?, OptimizerConfig::receive(optimizer)?) };
        strategy.attach(&mut model, &optimizer)
    };
    // SAFETY: P4, P7 and P8.
    unsafe { serve(state, &mut (), error, body) }
}

pub(super) fn give(strategy: Box<dyn Strategy>) -> RollObject {
    Served::give(strategy, &TABLE)
}

lent!(LentStrategy: Strategy);

pub(super) type ForeignStrategy = ForeignObject<RollStrategyTable, StrategyRanks>;

impl ForeignStrategy {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let (object, table) = unsafe { Foreign::new::<RollStrategyTable>(object, source.clone()) }?;
        let ranks: RollObject = object.must("ranks", object.ask("ranks", table.ranks)?)?;
        // SAFETY: P2 and P8.
        let ranks = unsafe { ForeignCommunicator::new(ranks, source) }?;
        Ok(Self { facts: StrategyRanks::new(Arc::new(ranks)), object, table })
    }

    /// Collectives of one job have one order, which the strategy and a model that gathers its weights have to share;
    /// a library cannot.
    fn refuse_sharded_weights(&self, model: &dyn Model) -> Result<()> {
        let placements = [self.weight_placement(), model.distribution().weights];
        let sharded = placements.contains(&Some(WeightPlacement::Sharded)) && self.facts.all.world_size() > 1;
        match sharded && self.object.source.is_plugin() {
            false => Ok(()),
            true => Err(Error::config(
                "strategy.name",
                "weights that are sharded over the ranks need the strategy that is linked in: leave its plugin out",
            )),
        }
    }
}

impl Lend for OptimizerConfig {
    type Wire = *const RollOptimizer;
    type Lent = RollOptimizer;
    type Received = OptimizerConfig;
    fn lend(&self) -> RollOptimizer {
        RollOptimizer {
            beta1: self.betas[0],
            beta2: self.betas[1],
            eps: self.eps,
            weight_decay: self.weight_decay,
            max_grad_norm: self.max_grad_norm,
        }
    }
    fn wire(lent: &mut RollOptimizer) -> *const RollOptimizer {
        lent
    }
    unsafe fn receive(wire: *const RollOptimizer) -> Result<OptimizerConfig> {
        // SAFETY: as the caller promises.
        let RollOptimizer { beta1, beta2, eps, weight_decay, max_grad_norm } = unsafe { *wire };
        Ok(OptimizerConfig { betas: [beta1, beta2], eps, weight_decay, max_grad_norm })
    }
}

impl Answer for StrategyReport {
    type Wire = RollStrategyReport;
    fn give(self) -> RollStrategyReport {
        let (clipped, applied) = (self.clipped.into(), self.applied.into());
        RollStrategyReport { grad_norm: self.grad_norm, clipped, applied }
    }
    unsafe fn take(wire: RollStrategyReport, _: &Source) -> Result<Self> {
        let RollStrategyReport { grad_norm, clipped, applied } = wire;
        Ok(Self { grad_norm, clipped: clipped != 0, applied: applied != 0 })
    }
}
