//! The interfaces of roll: host tensors, the traits of every kind of component, value-and-pullback, the registry and the
//! plugin boundary.
//!
//! *What it is for*: an author of a reward, model, algorithm, environment or strategy compiles this crate alone.
//! *What it is not*: a tensor library (a [`Tensor`] holds bytes and computes nothing), a trainer (`roll-train`), or a
//! configuration.
//!
//! Cargo features: `host` loads plugins, `noise` draws random numbers, `fingerprint` makes keys of caches, `process`
//! starts programs.
//!
//! One idea carries the framework: everything differentiable returns its value and a [`Pullback`]. [`RewardScorer`] and
//! [`Environment`] have examples, and `roll-testing` one of an [`Algorithm`].

pub mod algorithm;
pub mod communicator;
pub mod component;
pub mod contain;
mod delegate;
pub mod diffusion;
pub mod environment;
pub mod error;
pub mod evaluation;
pub mod file_check;
pub mod files;
#[cfg(feature = "fingerprint")]
pub mod fingerprint;
pub mod headline;
pub mod keys;
pub mod kind;
pub mod language;
pub mod model;
pub mod noise;
pub mod notes;
pub mod plan;
pub mod plugin;
#[cfg(feature = "process")]
pub mod process;
pub mod pullback;
pub mod registry;
pub mod reward;
pub mod sampler;
pub mod schedule;
pub mod step;
pub mod strategy;
pub mod tensor;
pub mod tokenizer_json;
pub mod video;

pub use algorithm::{Algorithm, DataSource};
pub use communicator::{Communicator, Rank, RanksError, SingleRank, ThreadRanks};
pub use component::{Component, RewardComponent};
pub use diffusion::{
    ConditionInput, Conditioning, DiffusionModel, ScheduleFacts, Sigma, SigmaRange, Timestep, VelocityInput,
};
pub use environment::{Environment, Observation, Transition};
pub use error::{Error, Fault, Result, ResultExt};
pub use evaluation::{Evaluated, EvaluationContext, Validation};
pub use file_check::{FileCheck, FilesFound};
#[cfg(feature = "fingerprint")]
pub use fingerprint::Fingerprint;
pub use headline::{Headline, HeadlineFormat, HeldOut};
pub use keys::Key;
pub use kind::Kind;
pub use language::{Generation, LanguageModel, Message, Sampling, TokenStats};
pub use model::{Adapter, GradientSink, Model, ParameterParts, ParameterSpec, StateDict};
pub use noise::{Noise, Purpose};
pub use notes::{OptionNotes, Said};
pub use plan::{Planner, WeightPlacement};
pub use pullback::{Grad, Pullback};
pub use registry::{BuildContext, Factory, Options, Registration, Registry, Replaces};
pub use reward::{Measure, OnMissing, RewardScorer, Score, Target};
pub use sampler::{Integration, Sampler};
pub use schedule::FlowSchedule;
pub use step::{Progress, Silent, StepContext, StepReport};
pub use strategy::{OptimizerConfig, Strategy, StrategyReport};
pub use tensor::{DType, Element, Tensor};
pub use video::{Sample, Video, VideoUnit};

pub use {inventory, serde, serde_json, tracing};
