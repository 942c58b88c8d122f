//! The interfaces of roll: host tensors, the traits of every kind of component, value-and-pullback and the registry.
//!
//! *What it is for*: an author of a reward, model, algorithm, environment or strategy compiles this crate alone.
//! *What it is not*: a tensor library (a [`Tensor`] holds bytes and computes nothing), a trainer (`roll-train`), or a
//! configuration.
//! *What it may depend on*: no other crate of roll and no tensor library.
//! *Where to start reading*: [`Pullback`] (`pullback.rs`), then [`RewardScorer`] (`reward.rs`), the smallest component;
//! [`Algorithm`] and [`StepContext`] show how the traits meet, and [`Registry`] how a component gets its name.
//!
//! Cargo features: `noise` draws random numbers, `schema` describes options by their types.
//!
//! One idea carries the framework: everything differentiable returns its value and a [`Pullback`], the function from
//! the gradient of the value to that of the input. Here a reward, and steps along its gradient:
//!
//! ```
//! use roll_core::{Grad, Pullback, Result, RewardScorer, Score, Target, Tensor, Video};
//!
//! /// Minus a quarter of the sum of squares: grey frames, whose values are 0, score best.
//! struct Grey;
//!
//! impl RewardScorer for Grey {
//!     fn name(&self) -> &str {
//!         "grey"
//!     }
//!     fn differentiable(&self) -> bool {
//!         true
//!     }
//!     fn score(&mut self, video: &Video, _: &str, _: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
//!         let x = video.frames().clone();
//!         let value = -0.25 * x.f32s()?.iter().map(|x| x * x).sum::<f32>();
//!         let pull = move |d: &Tensor| {
//!             let slope = -0.5 * d.item()?;
//!             Tensor::new(x.f32s()?.iter().map(|x| slope * x).collect(), x.shape())
//!         };
//!         Ok((Score::of(f64::from(value)), grad.is_on().then(|| Pullback::new(pull))))
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let mut frames = Tensor::full([1, 3, 2, 2], 0.8); // frames, channels, height, width
//! for _ in 0..10 {
//!     let video = Video::new(frames.clone(), 8.0)?;
//!     let (_, pullback) = Grey.score(&video, "a prompt", &Target::default(), Grad::Record)?;
//!     let gradient = pullback.expect("it was recorded").pull(&Tensor::scalar(1.0))?;
//!     let moved: Vec<f32> = frames.f32s()?.iter().zip(gradient.f32s()?).map(|(x, d)| x + d).collect();
//!     frames = Tensor::new(moved, [1, 3, 2, 2])?;
//! }
//! assert!(frames.f32s()?.iter().all(|x| x.abs() < 1e-3));
//! # Ok(())
//! # }
//! ```
//!
//! [`Pullback`], [`RewardScorer`] and [`Environment`] have further examples, and `roll-testing` has one of an
//! [`Algorithm`].

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod adapter;
mod algorithm;
mod carried;
pub mod communicator;
mod component;
mod context;
mod device_updates;
mod diffusion;
mod environment;
mod error;
mod evaluation;
mod file_check;
mod headline;
pub mod keys;
mod kind;
mod language;
mod model;
mod noise;
mod notes;
pub mod number;
mod option_kind;
mod options;
mod picture;
pub mod plan;
mod progress;
mod pullback;
mod registry;
mod reward;
#[cfg(feature = "noise")]
mod reward_check;
mod rollout_engine;
mod step;
mod strategy;
mod tensor;
pub mod threads;
mod video;
mod vision_language;

pub use adapter::Adapter;
pub use algorithm::{Algorithm, ClipAlgorithm, ClipUse, OwnDataAlgorithm, Reference, Samples, acts_in_no_environment};
pub use carried::{TensorCarrier, with_carrier};
pub use communicator::{Communicator, FirstRank, Rank, RanksError, SingleRank, ThreadRanks};
pub use component::{Component, RewardComponent};
pub use context::{BuildContext, WeightPlacement};
pub use device_updates::{AdamUpdate, DevicePart, DeviceUpdates};
pub use diffusion::{
    ConditionInput, Conditioning, DiffusionModel, ScheduleFacts, Sigma, SigmaRange, Timestep, VelocityInput,
};
pub use environment::{ChatRequest, Environment, Observation, Split, Transition};
pub use error::{Error, Fault, Result, ResultExt, messages, nearest, one_line};
pub use evaluation::{Evaluated, EvaluationContext, Validation};
pub use file_check::{FileCheck, FilesFound};
pub use headline::{Headline, HeadlineFormat, HeldOut, Subject};
pub use keys::Key;
pub use kind::Kind;
pub use language::{Generation, LanguageModel, Message, Sampling, TokenStats};
pub use model::{Distribution, GradientSink, Model, ParameterParts, ParameterSpec, StateDict, flat, header};
pub use noise::{Noise, Purpose};
pub use notes::{ConfiguredOptions, IdleKeys, OptionNotes, When};
pub use option_kind::OptionKind;
pub use options::{Options, check_seconds, default_options, parse_options};
pub use picture::{FIRST_PICTURE_ID, PICTURE_MARK, Picture, without_picture_marks};
pub use plan::Planner;
pub use progress::{Progress, Silent};
pub use pullback::{Grad, Pullback};
pub use registry::{ComponentOptions, Factory, Make, Registration, Registry, Replaces, Variable};
pub use reward::{Measure, OnMissing, RewardScorer, Score, Target};
#[cfg(feature = "noise")]
pub use reward_check::{Finding, Verdict, check_reward};
pub use rollout_engine::RolloutEngine;
pub use step::{StepContext, StepReport};
pub use strategy::{OptimizerConfig, Strategy, StrategyRanks, StrategyReport};
pub use tensor::{DType, Element, Tensor};
pub use video::{Columns, Sample, SampleVideo, Video, VideoUnit};
pub use vision_language::{
    Medium, PlannedReads, Positions, VisionLanguageFacts, VisionLanguageModel, VisionLanguageRegistration,
    open_vision_language, split_media,
};

pub use {inventory, serde, serde_json, tracing};

/// For `#[serde(default)]`: the default of a flag that is set unless the input says otherwise.
fn yes() -> bool {
    true
}
