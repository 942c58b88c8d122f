//! Environments.

use super::{RollOwned, RollStr};

data! {
    /// Result of `step`.
    #[derive(Default)]
    pub struct RollTransition {
        pub observation: RollOwned<u8>,
        pub reward: f64,
        pub terminated: u32,
        pub truncated: u32,
        pub valid: u32,
    }
}

table! {
    pub struct RollEnvironmentTable {
        fn reset(seed: u64, out: *mut RollOwned<u8>);
        fn step(action: RollStr, out: *mut RollTransition);
        fn instructions(out: *mut RollOwned<u8>);
        /// 0 no, 1 yes, 2 unknown.
        fn solved(out: *mut u32);
        /// A list of texts as JSON.
        fn kinds(out: *mut RollOwned<u8>);
        /// 0 training, 1 validation, and the number of the group of episodes; called before `reset`.
        fn enter(split: u32, number: u64);
        /// The episode is over.
        fn leave();
        /// The action that was read in the latest answer; empty if there was none.
        fn action(out: *mut RollOwned<u8>);
    }
}
