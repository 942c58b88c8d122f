//! Rewards.

use super::{RollList, RollNamedNumber, RollNamedTensor, RollOwned, RollPullback, RollStr, RollVideo};

data! {
    /// Facts of a scorer that do not change.
    #[derive(Default)]
    pub struct RollRewardFacts {
        pub name: RollOwned<u8>,
        /// 1 if `score` can return a pullback.
        pub differentiable: u32,
        /// Reaction when there is nothing to score: 0 skip the sample, 1 stop, 2 score it as `missing_value`.
        pub on_missing: u32,
        pub missing_value: f64,
    }

    /// Result of `score`.
    #[derive(Default)]
    pub struct RollScore {
        /// 1: there was nothing to score, and `reason` is the explanation.
        pub missing: u32,
        pub value: f64,
        pub details: RollOwned<RollNamedNumber>,
        pub reason: RollOwned<u8>,
        /// From the cotangent of the score (scalar) to that of the frames.
        pub pullback: RollPullback,
    }
}

data! {
    /// The quantity that a reward measures.
    #[derive(Default)]
    pub struct RollMeasure {
        pub label: RollOwned<u8>,
        /// A second name; empty: none.
        pub alias: RollOwned<u8>,
    }
}

table! {
    pub struct RollRewardTable {
        fn facts(out: *mut RollRewardFacts);
        fn prepare(reference: *const RollVideo, out: *mut RollOwned<RollNamedTensor>);
        /// `target` is the result of `prepare`; `record` 1: a pullback is wanted.
        fn score(
            video: *const RollVideo,
            prompt: RollStr,
            target: RollList<RollNamedTensor>,
            record: u32,
            out: *mut RollScore,
        );
        /// Key of the result of `prepare`; empty if the scorer does not know it, null if it never does.
        fn target_key(out: *mut RollOwned<u8>);
        fn measures(out: *mut RollMeasure);
        /// The terms of a weighted sum: the name of each term's score among the details, and its weight. Empty, or no
        /// function, if the score is not a sum.
        fn terms(out: *mut RollOwned<RollNamedNumber>);
        /// 0: `prepare` does not look at the reference, and the reward can score rows without a clip. Without the
        /// function: 1.
        fn reads_reference(out: *mut u32);
    }
}
