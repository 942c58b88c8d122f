//! [`Strategy`] and its [`Communicator`] across the boundary.

use std::ffi::c_void;

use super::abi::{RollError, RollNamedTensor, RollObject, RollOwned};
use super::call::{Foreign, Served, Source, serve, serve_shared};
use super::data::{Lent, keep_named, lend_named, own_tensors, slice, slice_mut, take_tensors};
use super::layout::boundary;
use super::model::{ForeignModel, LentModel};
use crate::{Communicator, Model, OptimizerConfig, Rank, Result, StateDict, Strategy, StrategyReport};

boundary! {
    /// As [`OptimizerConfig`].
    #[derive(Clone, Copy)]
    pub struct RollOptimizer {
        pub beta1: f64,
        pub beta2: f64,
        pub eps: f64,
        pub weight_decay: f64,
        pub max_grad_norm: f64,
    }
}

boundary! {
    /// As [`StrategyReport`].
    #[derive(Default)]
    pub struct RollStrategyReport {
        pub grad_norm: f64,
        pub clipped: u32,
        pub applied: u32,
    }
}

boundary! {
    /// This process, and how many there are.
    #[derive(Default)]
    pub struct RollRanks {
        pub rank: usize,
        pub size: usize,
    }
}

boundary! {
    /// The functions of a strategy; from `ranks` on those of its communicator.
    #[derive(Clone, Copy)]
    pub struct RollStrategyTable {
        pub attach: unsafe extern "C" fn(
            state: *mut c_void,
            model: *const RollObject,
            optimizer: *const RollOptimizer,
            error: *mut RollError,
        ) -> u32,
        pub accumulate:
            unsafe extern "C" fn(state: *mut c_void, model: *const RollObject, error: *mut RollError) -> u32,
        pub discard: unsafe extern "C" fn(state: *mut c_void, error: *mut RollError) -> u32,
        pub step: unsafe extern "C" fn(
            state: *mut c_void,
            model: *const RollObject,
            learning_rate: f64,
            scale: f64,
            out: *mut RollStrategyReport,
            error: *mut RollError,
        ) -> u32,
        pub save: unsafe extern "C" fn(
            state: *mut c_void,
            out: *mut RollOwned<RollNamedTensor>,
            error: *mut RollError,
        ) -> u32,
        pub restore: unsafe extern "C" fn(
            state: *mut c_void,
            tensors: *const RollNamedTensor,
            count: usize,
            error: *mut RollError,
        ) -> u32,
        pub ranks: unsafe extern "C" fn(state: *mut c_void, out: *mut RollRanks, error: *mut RollError) -> u32,
        pub all_reduce:
            unsafe extern "C" fn(state: *mut c_void, values: *mut f32, len: usize, error: *mut RollError) -> u32,
        pub reduce_scatter: unsafe extern "C" fn(
            state: *mut c_void,
            values: *const f32,
            len: usize,
            out: *mut f32,
            out_len: usize,
            error: *mut RollError,
        ) -> u32,
        pub all_gather: unsafe extern "C" fn(
            state: *mut c_void,
            part: *const f32,
            len: usize,
            out: *mut f32,
            out_len: usize,
            error: *mut RollError,
        ) -> u32,
        pub broadcast: unsafe extern "C" fn(
            state: *mut c_void,
            values: *mut f32,
            len: usize,
            root: usize,
            error: *mut RollError,
        ) -> u32,
        pub barrier: unsafe extern "C" fn(state: *mut c_void, error: *mut RollError) -> u32,
    }
}

type Target = dyn Strategy;

static TABLE: RollStrategyTable = RollStrategyTable {
    attach,
    accumulate,
    discard,
    step,
    save,
    restore,
    ranks,
    all_reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    barrier,
};

pub(super) fn give(strategy: Box<dyn Strategy>) -> RollObject {
    Served::give(strategy, &TABLE)
}

/// Lends a strategy to the other side for a call.
pub(super) struct LentStrategy(Served<Target>);

impl LentStrategy {
    pub(super) fn new<'a>(strategy: &'a mut (dyn Strategy + 'a)) -> Self {
        let strategy: *mut (dyn Strategy + 'a) = strategy;
        // SAFETY: only the lifetime changes; whoever makes this drops it before the borrow ends.
        Self(Served::lend(unsafe { std::mem::transmute::<*mut (dyn Strategy + 'a), *mut Target>(strategy) }))
    }

    pub(super) fn object(&self) -> RollObject {
        self.0.object(&TABLE)
    }
}

/// The model of an argument.
///
/// # Safety
/// The object is a model that the other side lends for this call.
unsafe fn lent_model(model: *const RollObject) -> Result<ForeignModel> {
    // SAFETY: as the caller promises; what is lent has no release.
    unsafe { ForeignModel::new(*model, Source::Host) }
}

unsafe extern "C" fn attach(
    state: *mut c_void,
    model: *const RollObject,
    optimizer: *const RollOptimizer,
    error: *mut RollError,
) -> u32 {
    let body = |strategy: &mut Target| {
        // SAFETY: lent for this call.
        let (mut model, o) = unsafe { (lent_model(model)?, *optimizer) };
        let (betas, eps) = ([o.beta1, o.beta2], o.eps);
        let optimizer = OptimizerConfig { betas, eps, weight_decay: o.weight_decay, max_grad_norm: o.max_grad_norm };
        strategy.attach(&mut model, &optimizer)
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn accumulate(state: *mut c_void, model: *const RollObject, error: *mut RollError) -> u32 {
    // SAFETY: lent for this call.
    let body = |strategy: &mut Target| strategy.accumulate(&mut unsafe { lent_model(model) }?);
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn discard(state: *mut c_void, error: *mut RollError) -> u32 {
    let body = |strategy: &mut Target| {
        strategy.discard();
        Ok(())
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn step(
    state: *mut c_void,
    model: *const RollObject,
    learning_rate: f64,
    scale: f64,
    out: *mut RollStrategyReport,
    error: *mut RollError,
) -> u32 {
    let body = |strategy: &mut Target| {
        // SAFETY: lent for this call.
        let report = strategy.step(&mut unsafe { lent_model(model) }?, learning_rate, scale)?;
        Ok(RollStrategyReport {
            grad_norm: report.grad_norm,
            clipped: report.clipped.into(),
            applied: report.applied.into(),
        })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn save(state: *mut c_void, out: *mut RollOwned<RollNamedTensor>, error: *mut RollError) -> u32 {
    let body = |strategy: &mut Target| Ok(own_tensors(strategy.state()?.iter()));
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn restore(
    state: *mut c_void,
    tensors: *const RollNamedTensor,
    count: usize,
    error: *mut RollError,
) -> u32 {
    // SAFETY: lent for this call.
    let body = |strategy: &mut Target| strategy.load_state(&unsafe { keep_named(slice(tensors, count)?) }?);
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn ranks(state: *mut c_void, out: *mut RollRanks, error: *mut RollError) -> u32 {
    let body = |strategy: &Target| {
        let communicator = strategy.communicator();
        Ok(RollRanks { rank: communicator.rank().0, size: communicator.world_size() })
    };
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, out, error, body) }
}

unsafe extern "C" fn all_reduce(state: *mut c_void, values: *mut f32, len: usize, error: *mut RollError) -> u32 {
    // SAFETY: lent for this call.
    let body = |strategy: &Target| strategy.communicator().all_reduce(unsafe { slice_mut(values, len) }?);
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, &mut (), error, body) }
}

unsafe extern "C" fn reduce_scatter(
    state: *mut c_void,
    values: *const f32,
    len: usize,
    out: *mut f32,
    out_len: usize,
    error: *mut RollError,
) -> u32 {
    let body = |strategy: &Target| {
        // SAFETY: lent for this call.
        let (values, out) = unsafe { (slice(values, len)?, slice_mut(out, out_len)?) };
        strategy.communicator().reduce_scatter(values, out)
    };
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, &mut (), error, body) }
}

unsafe extern "C" fn all_gather(
    state: *mut c_void,
    part: *const f32,
    len: usize,
    out: *mut f32,
    out_len: usize,
    error: *mut RollError,
) -> u32 {
    let body = |strategy: &Target| {
        // SAFETY: lent for this call.
        let (part, out) = unsafe { (slice(part, len)?, slice_mut(out, out_len)?) };
        strategy.communicator().all_gather(part, out)
    };
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, &mut (), error, body) }
}

unsafe extern "C" fn broadcast(
    state: *mut c_void,
    values: *mut f32,
    len: usize,
    root: usize,
    error: *mut RollError,
) -> u32 {
    // SAFETY: lent for this call.
    let body = |strategy: &Target| strategy.communicator().broadcast(unsafe { slice_mut(values, len) }?, Rank(root));
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, &mut (), error, body) }
}

unsafe extern "C" fn barrier(state: *mut c_void, error: *mut RollError) -> u32 {
    let body = |strategy: &Target| strategy.communicator().barrier();
    // SAFETY: as the interface says.
    unsafe { serve_shared(state, &mut (), error, body) }
}

/// A strategy of the other side, and its communicator.
pub(super) struct ForeignStrategy {
    object: Foreign<RollStrategyTable>,
    ranks: RollRanks,
}

// SAFETY: through `&self` only `save` and the communicator's functions are called; the other side serves these as
// shared, from a `Communicator`, which is `Sync`. The borrow of `communicator` keeps `&mut self` away.
unsafe impl Sync for ForeignStrategy {}

impl ForeignStrategy {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let object = unsafe { Foreign::<RollStrategyTable>::new(object, source) }?;
        let ranks = object.call("communicator", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.ranks)(state, out, error) }
        })?;
        Ok(Self { object, ranks })
    }
}

impl Strategy for ForeignStrategy {
    fn attach(&mut self, model: &mut dyn Model, optimizer: &OptimizerConfig) -> Result<()> {
        let model = LentModel::new(model);
        let optimizer = RollOptimizer {
            beta1: optimizer.betas[0],
            beta2: optimizer.betas[1],
            eps: optimizer.eps,
            weight_decay: optimizer.weight_decay,
            max_grad_norm: optimizer.max_grad_norm,
        };
        self.object.run("attach", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.attach)(state, &model.object(), &optimizer, error) }
        })
    }

    fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        let model = LentModel::new(model);
        self.object.run("accumulate", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.accumulate)(state, &model.object(), error) }
        })
    }

    fn discard(&mut self) {
        let done = self.object.run("discard", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.discard)(state, error) }
        });
        if let Err(error) = done {
            // A strategy that panicked answers no later call either, so nothing wrong is applied.
            tracing::error!("{}", super::Chain::line(&error));
        }
    }

    fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale: f64) -> Result<StrategyReport> {
        let model = LentModel::new(model);
        let report: RollStrategyReport = self.object.call("step", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.step)(state, &model.object(), learning_rate, scale, out, error) }
        })?;
        Ok(StrategyReport { grad_norm: report.grad_norm, clipped: report.clipped != 0, applied: report.applied != 0 })
    }

    fn communicator(&self) -> &dyn Communicator {
        self
    }

    fn state(&self) -> Result<StateDict> {
        let tensors = self.object.call("state", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.save)(state, out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.object.blame("state", unsafe { take_tensors(tensors) })
    }

    fn load_state(&mut self, state: &StateDict) -> Result<()> {
        let named: Vec<_> = state.iter().map(|(k, t)| (k.clone(), Lent::new(t))).collect();
        let list = lend_named(&named);
        self.object.run("load_state", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.restore)(state, list.as_ptr(), list.len(), error) }
        })
    }
}

impl Communicator for ForeignStrategy {
    fn rank(&self) -> Rank {
        Rank(self.ranks.rank)
    }

    fn world_size(&self) -> usize {
        self.ranks.size
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        self.object.run("all_reduce", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.all_reduce)(state, values.as_mut_ptr(), values.len(), error) }
        })
    }

    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.object.run("reduce_scatter", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.reduce_scatter)(state, values.as_ptr(), values.len(), out.as_mut_ptr(), out.len(), error) }
        })
    }

    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        self.object.run("all_gather", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.all_gather)(state, part.as_ptr(), part.len(), out.as_mut_ptr(), out.len(), error) }
        })
    }

    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        self.object.run("broadcast", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.broadcast)(state, values.as_mut_ptr(), values.len(), root.0, error) }
        })
    }

    fn barrier(&self) -> Result<()> {
        self.object.run("barrier", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.barrier)(state, error) }
        })
    }
}
