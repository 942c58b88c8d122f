//! Algorithms: the inputs and the reports of their steps and evaluations.

use std::ffi::c_void;

use super::{
    RollError, RollList, RollMaybe, RollNamedNumber, RollNamedTensor, RollObject, RollOwned, RollStr, RollTensor,
    RollVideo,
};

data! {
    /// A row of the data. A missing picture has the dtype [`NO_TENSOR`](crate::abi::NO_TENSOR). The frames of a row
    /// without a clip are i64 `[3]`: frames, height and width of the video to generate.
    #[derive(Clone, Copy)]
    pub struct RollSample {
        pub index: u64,
        pub origin: RollStr,
        pub prompt: RollStr,
        pub video: RollVideo,
        pub image: RollTensor,
        pub end_image: RollTensor,
        pub has_path: u32,
        pub path: RollStr,
        /// Factor of the loss, above 0.
        pub weight: f64,
        /// `[T, H, W]` or `[1, H, W]`; may be missing, as a picture.
        pub mask: RollTensor,
    }

    /// The keys of the random draws.
    #[derive(Clone, Copy)]
    pub struct RollNoise {
        pub seed: u64,
        pub has_fixed: u32,
        pub fixed: u32,
    }

    /// Receives progress; may be called on any thread during the call that lent it.
    #[derive(Clone, Copy)]
    pub struct RollProgress {
        pub state: *const c_void,
        pub phase: unsafe extern "C" fn(state: *const c_void, phase: RollStr),
        pub interrupted: unsafe extern "C" fn(state: *const c_void) -> u32,
    }

    /// Inputs of a step.
    #[derive(Clone, Copy)]
    pub struct RollStepContext {
        pub step: u64,
        pub samples: RollList<RollSample>,
        pub model: RollObject,
        /// A null table: no reward.
        pub reward: RollObject,
        pub strategy: RollObject,
        pub learning_rate: f64,
        pub noise: RollNoise,
        pub progress: RollProgress,
        pub want_videos: u32,
    }

    /// Inputs of an evaluation.
    #[derive(Clone, Copy)]
    pub struct RollEvaluationContext {
        pub samples: RollList<RollSample>,
        pub model: RollObject,
        pub rewards: RollList<RollObject>,
        pub noise: RollNoise,
        pub progress: RollProgress,
    }

    /// A skipped sample and the reason.
    #[derive(Clone, Copy)]
    pub struct RollSkipped {
        pub sample: RollStr,
        pub reason: RollStr,
    }

    /// A video and its name. A missing video has frames of the dtype [`NO_TENSOR`](crate::abi::NO_TENSOR).
    #[derive(Clone, Copy)]
    pub struct RollNamedVideo {
        pub name: RollStr,
        pub video: RollVideo,
    }

    /// The outcome of a step.
    #[derive(Default)]
    pub struct RollStepReport {
        pub metrics: RollOwned<RollNamedNumber>,
        pub skipped: RollOwned<RollSkipped>,
        pub videos: RollOwned<RollNamedVideo>,
        /// A JSON list.
        pub records: RollOwned<u8>,
        pub applied: u32,
    }

    /// Result of `validate`.
    #[derive(Default)]
    pub struct RollValidation {
        /// 0: the algorithm does not support it.
        pub supported: u32,
        pub metrics: RollOwned<RollNamedNumber>,
        /// A JSON list.
        pub records: RollOwned<u8>,
    }

    /// The result of one sample; the video's name is the sample's origin.
    #[derive(Clone, Copy)]
    pub struct RollEvaluated {
        pub scores: RollList<RollMaybe>,
        pub kl: f64,
        pub video: RollNamedVideo,
    }

    /// Result of `evaluate`.
    #[derive(Default)]
    pub struct RollEvaluation {
        /// 0: the algorithm does not support it.
        pub supported: u32,
        pub items: RollOwned<RollEvaluated>,
    }

    /// The source of an algorithm's samples.
    #[derive(Default)]
    pub struct RollDataSource {
        /// 0: the configuration's rows.
        pub own_data: u32,
        pub has_steps: u32,
        pub steps_per_epoch: u64,
    }

    /// Makes environments during the call that it is lent for; they belong to the caller of `make`.
    #[derive(Clone, Copy)]
    pub struct RollEnvironmentMaker {
        pub state: *mut c_void,
        pub make: unsafe extern "C" fn(state: *mut c_void, out: *mut RollObject, error: *mut RollError) -> u32,
    }
}

table! {
    pub struct RollAlgorithmTable {
        /// A reward without a table means that the run has no reward.
        fn check(model: RollObject, reward: RollObject);
        fn step(context: *const RollStepContext, out: *mut RollStepReport);
        fn evaluate(context: *const RollEvaluationContext, out: *mut RollEvaluation);
        /// JSON.
        fn state(out: *mut RollOwned<u8>);
        fn load_state(saved: RollStr);
        fn data_source(out: *mut RollDataSource);
        fn open_environments(maker: RollEnvironmentMaker);
        fn validate(
            step: u64,
            model: RollObject,
            noise: RollNoise,
            progress: RollProgress,
            out: *mut RollValidation,
        );
        /// A JSON list.
        fn headlines(out: *mut RollOwned<u8>);
        fn tensors(out: *mut RollOwned<RollNamedTensor>);
        fn load_tensors(tensors: RollList<RollNamedTensor>);
        /// The reason why a row without a clip cannot be used; empty if it can. `reference_reader` is the name of a
        /// reward that reads its reference, or empty. Without the function every row needs a clip.
        fn needs_clip(has_image: u32, reference_reader: RollStr, out: *mut RollOwned<u8>);
    }
}
