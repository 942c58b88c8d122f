//! Models, and the further functions of diffusion and language models.

use std::ffi::c_void;

use super::{
    RollList, RollListMut, RollNamedTensor, RollObject, RollOwned, RollPullback, RollRange, RollStr, RollTensor,
    RollValue,
};

data! {
    /// Name and shape of a trainable tensor.
    #[derive(Clone, Copy)]
    pub struct RollParameter {
        pub name: RollStr,
        pub shape: RollList<usize>,
    }

    /// Facts of a model that do not change.
    #[derive(Default)]
    pub struct RollModelFacts {
        pub parameters: RollOwned<RollParameter>,
        /// The table of a diffusion model, whose functions take the model's state; null if it is not a diffusion model.
        pub diffusion: *const c_void,
        /// The table of a language model, likewise.
        pub language: *const c_void,
    }

    /// Access to some parameters at a time.
    #[derive(Default)]
    pub struct RollParts {
        /// Its table, whose functions take the model's state; null if the model has no parts.
        pub table: *const c_void,
    }

    /// Tensors of one file of an adapter.
    #[derive(Clone, Copy)]
    pub struct RollFile {
        pub name: RollStr,
        pub tensors: RollList<RollNamedTensor>,
    }

    /// Facts of a diffusion checkpoint.
    #[derive(Clone, Copy, Default)]
    pub struct RollSchedule {
        pub shift: f64,
        pub has_boundary: u32,
        pub boundary: f64,
        /// Noise levels at which trainable parameters act.
        pub trained_low: f64,
        pub trained_high: f64,
    }

    /// Heights and widths are multiples of these, numbers of frames multiples plus one; none is 0.
    #[derive(Clone, Copy, Default)]
    pub struct RollVideoUnit {
        pub height: usize,
        pub width: usize,
        pub frames: usize,
    }

    /// Arguments of `encode`. A missing tensor has the dtype [`NO_TENSOR`](crate::abi::NO_TENSOR).
    #[derive(Clone, Copy)]
    pub struct RollConditionInput {
        pub prompt: RollStr,
        pub image: RollTensor,
        pub end_image: RollTensor,
        pub frames: usize,
        pub height: usize,
        pub width: usize,
    }

    /// The result of `encode` and an argument of `velocity`. A missing tensor has the dtype
    /// [`NO_TENSOR`](crate::abi::NO_TENSOR).
    #[derive(Clone, Copy, Default)]
    pub struct RollConditioning {
        pub context: RollTensor,
        pub channels: RollTensor,
        pub image_tokens: RollTensor,
        pub first_frame: RollTensor,
        pub latent_shape: [usize; 4],
    }

    /// Sampling options.
    #[derive(Clone, Copy)]
    pub struct RollSampling {
        pub temperature: f64,
        pub top_p: f64,
        pub top_k: usize,
        pub max_new_tokens: usize,
        pub stop: RollList<RollStr>,
        pub seed: u64,
        pub numbers: RollList<u64>,
    }

    /// One generated continuation.
    #[derive(Clone, Copy)]
    pub struct RollGeneration {
        pub tokens: RollList<u32>,
        pub log_probs: RollList<f32>,
    }

    /// Result of `evaluate`.
    #[derive(Default)]
    pub struct RollTokenStats {
        pub log_probs: RollTensor,
        pub entropy: RollTensor,
        pub pullback: RollPullback,
    }

    /// One message of a conversation.
    #[derive(Clone, Copy)]
    pub struct RollMessage {
        pub role: RollStr,
        pub content: RollStr,
    }
}

table! {
    pub struct RollModelTable {
        fn facts(out: *mut RollModelFacts);
        fn read_parameters(values: RollListMut<f32>);
        fn write_parameters(values: RollList<f32>);
        fn take_gradients(add_into: RollListMut<f32>);
        fn export_adapter(out: *mut RollOwned<RollFile>);
        fn import_adapter(files: RollList<RollFile>);
        fn parts(out: *mut RollParts);
        /// The placement of the frozen weights: 0 the model has one placement only, 1 resident, 2 streamed, 3 sharded.
        fn distribution(out: *mut usize);
    }
}

table! {
    /// Parameters of a model, some at a time.
    pub struct RollPartsTable {
        fn read_part(which: RollRange, values: RollListMut<f32>);
        fn write_part(which: RollRange, values: RollList<f32>);
        fn take_gradients_part(which: RollRange, add_into: RollListMut<f32>);
        /// The sink belongs to the model (P2); a null table ends the deliveries. Returns whether the model delivers.
        fn deliver_gradients(sink: RollObject, out: *mut u32);
    }
}

table! {
    /// Receives gradients during a backward pass.
    pub struct RollGradientSinkTable {
        /// Returns whether it accepts the gradient.
        fn deliver(position: usize, gradient: RollList<f32>, out: *mut u32);
    }
}

table! {
    pub struct RollDiffusionTable {
        fn schedule(out: *mut RollSchedule);
        fn encode(input: *const RollConditionInput, out: *mut RollConditioning);
        /// `adapter` 1: with the adapter; 2: with the one that training started from; `record` 1: a pullback is wanted.
        fn velocity(
            latents: *const RollTensor,
            timestep: f64,
            conditioning: *const RollConditioning,
            adapter: u32,
            record: u32,
            out: *mut RollValue,
        );
        fn decode(latents: *const RollTensor, record: u32, out: *mut RollValue);
        fn encode_video(frames: *const RollTensor, out: *mut RollTensor);
        /// Key of the results of `encode` and `encode_video`; empty if the model does not know it, null if it never
        /// does.
        fn encoding_key(out: *mut RollOwned<u8>);
        /// Sizes and lengths of videos. Without it: multiples of 16 pixels, and of 4 frames plus one.
        fn video_unit(out: *mut RollVideoUnit);
        /// Frames per second of generated videos; 0: unknown.
        fn frame_rate(out: *mut f64);
    }
}

table! {
    pub struct RollLanguageTable {
        fn tokenize(text: RollStr, out: *mut RollOwned<u32>);
        fn detokenize(tokens: RollList<u32>, out: *mut RollOwned<u8>);
        fn generate(
            prompts: RollList<RollList<u32>>,
            sampling: *const RollSampling,
            out: *mut RollOwned<RollGeneration>,
        );
        fn evaluate(
            tokens: *const RollTensor,
            mask: *const RollTensor,
            adapter: u32,
            record: u32,
            out: *mut RollTokenStats,
        );
        fn render_chat(messages: RollList<RollMessage>, continue_as_assistant: u32, out: *mut RollOwned<u8>);
        fn end_tokens(out: *mut RollOwned<u32>);
        fn context_length(out: *mut usize);
        /// f32 `[B, L, D]`.
        fn hidden_states(tokens: *const RollTensor, mask: *const RollTensor, adapter: u32, out: *mut RollTensor);
    }
}
