//! Strategies and communicators.

use super::{RollList, RollListMut, RollNamedTensor, RollObject, RollOwned, RollStr};

data! {
    /// AdamW and clipping.
    #[derive(Clone, Copy)]
    pub struct RollOptimizer {
        pub beta1: f64,
        pub beta2: f64,
        pub eps: f64,
        pub weight_decay: f64,
        pub max_grad_norm: f64,
    }

    /// The outcome of an update.
    #[derive(Default)]
    pub struct RollStrategyReport {
        pub grad_norm: f64,
        pub clipped: u32,
        pub applied: u32,
    }

    /// This process, and how many there are.
    #[derive(Clone, Copy, Default)]
    pub struct RollRanks {
        pub rank: usize,
        pub size: usize,
    }
}

table! {
    pub struct RollStrategyTable {
        /// The ranks that samples are divided over: a communicator, which may outlive the strategy.
        fn ranks(out: *mut RollObject);
        fn attach(model: RollObject, optimizer: *const RollOptimizer);
        fn accumulate(model: RollObject);
        fn discard();
        fn step(model: RollObject, learning_rate: f64, scale: f64, out: *mut RollStrategyReport);
        fn state(out: *mut RollOwned<RollNamedTensor>);
        fn load_state(tensors: RollList<RollNamedTensor>);
        fn before_last_pull(model: RollObject);
        /// 0 the model decides, 1 resident, 2 streamed, 3 sharded.
        fn weight_placement(out: *mut usize);
    }
}

table! {
    pub struct RollCommunicatorTable {
        fn ranks(out: *mut RollRanks);
        fn all_reduce(values: RollListMut<f32>);
        fn reduce_scatter(values: RollList<f32>, part: RollListMut<f32>);
        fn all_gather(part: RollList<f32>, values: RollListMut<f32>);
        fn broadcast(values: RollListMut<f32>, root: usize);
        fn barrier();
        fn set_timeout(seconds: f64);
        fn fail(reason: RollStr);
    }
}
