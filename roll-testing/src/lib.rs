//! Test doubles for roll, and for algorithms, models and rewards written elsewhere.
//!
//! The doubles compute by hand what real components compute on a device, so that an algorithm is tested in
//! milliseconds, against finite differences and formulas:
//!
//! - [`diffusion`]: a velocity model of eight numbers ([`MockDiffusion`]), a reward ([`Sines`]) and a strategy that
//!   exposes its last gradient ([`Descent`]);
//! - [`training`]: steps of an algorithm on the doubles, on one or several ranks;
//! - [`language`]: a language model in which the next character depends on the last one only ([`Bigram`]);
//! - [`engine`]: a server that follows the interfaces of vLLM and SGLang ([`StandIn`]);
//! - [`GgufWriter`]: GGUF files;
//! - `faces` (feature `onnx`): a face detector and an embedder as ONNX files.
//!
//! A test that cannot run on this machine reports it by [`skip!`], and fails if `ROLL_REQUIRE` lists the missing
//! capability. [`messages::check`] compares the wording of a message. `ROLL_TEST_BACKENDS` selects the backends of tests
//! that run on several ([`is_tested`]).
//!
//! The crate is for `[dev-dependencies]` only; it depends on `roll-core` and on no other crate of roll. Start reading
//! at [`diffusion`].
//!
//! An algorithm on the doubles, here one that denoises in a single step and climbs the reward:
//!
//! ```
//! use roll_core::{
//!     Adapter, Algorithm, ClipAlgorithm, ConditionInput, Error, Grad, Model, Noise, Result, RewardScorer, Samples, Score,
//!     Silent, StepContext, StepReport, Tensor, Timestep, Video,
//! };
//! use roll_testing::{Descent, MockDiffusion, Sines, sample};
//!
//! struct OneStep;
//!
//! impl Algorithm for OneStep {
//!     fn samples(self: Box<Self>) -> Samples {
//!         Samples::Clips(self)
//!     }
//!
//!     fn check(&mut self, model: &mut dyn Model, _: Option<&dyn RewardScorer>) -> Result<()> {
//!         model.as_diffusion().map(|_| ()).ok_or_else(|| Error::Misuse("expected a diffusion model".into()))
//!     }
//!
//!     fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
//!         let mut report = StepReport::default();
//!         let reward = context.reward.as_deref_mut().expect("this test has one");
//!         for sample in context.samples {
//!             let model = context.model.as_diffusion().expect("checked");
//!             let prompt = sample.prompt.clone();
//!             let input = ConditionInput { prompt, frames: 2, size: [1, 2], ..Default::default() };
//!             let conditioning = model.encode(&input)?;
//!             // From noise to data in one step: x - v.
//!             let x = context.noise.latents(0, sample.index, &conditioning.latent_shape)?;
//!             let (v, pull_velocity) =
//!                 model.velocity(&x, Timestep(1000.0), &conditioning, Adapter::On, Grad::Record)?;
//!             let latents: Vec<f32> = x.f32s()?.iter().zip(v.f32s()?).map(|(x, v)| x - v).collect();
//!             let (frames, pull_decode) = model.decode(&Tensor::new(latents, x.shape())?, Grad::Record)?;
//!
//!             let target = reward.prepare(sample.clip()?)?;
//!             let video = Video::new(frames, 8.0)?;
//!             let (score, pull_score) = reward.score(&video, &sample.prompt, &target, Grad::Record)?;
//!             let Score::Value { value, .. } = score else { continue };
//!             *report.metrics.entry("actor/score".into()).or_default() += value / context.samples.len() as f64;
//!
//!             // The loss is -score, and d latents / d v is -1: the signs cancel.
//!             let d_frames = pull_score.expect("recorded").pull(&Tensor::scalar(1.0))?;
//!             let d_velocity = pull_decode.expect("recorded").pull(&d_frames)?;
//!             pull_velocity.expect("recorded").pull(&d_velocity)?;
//!             context.strategy.accumulate(context.model)?;
//!         }
//!         let scale = 1.0 / context.samples.len() as f64;
//!         report.applied = context.strategy.step(context.model, context.learning_rate, scale)?.applied;
//!         Ok(report)
//!     }
//! }
//!
//! impl ClipAlgorithm for OneStep {}
//!
//! # fn main() -> Result<()> {
//! let (mut model, mut reward, mut strategy) = (MockDiffusion::new(), Sines::new(), Descent::default());
//! OneStep.check(&mut model, Some(&reward))?;
//! let samples = [sample(0, "a"), sample(1, "b")];
//! let mut scores = Vec::new();
//! for step in 0..20 {
//!     let report = OneStep.step(&mut StepContext {
//!         step,
//!         samples: &samples,
//!         model: &mut model,
//!         reward: Some(&mut reward),
//!         strategy: &mut strategy,
//!         learning_rate: 0.05,
//!         noise: &Noise::new(1),
//!         progress: &Silent,
//!         want_videos: false,
//!     })?;
//!     scores.push(report.metrics["actor/score"]);
//! }
//! assert!(scores[19] > scores[0], "{scores:?}");
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod backends;
pub mod diffusion;
pub mod engine;
#[cfg(feature = "onnx")]
pub mod faces;
mod gguf;
pub mod language;
pub mod messages;
mod skip;
pub mod training;

pub use backends::is_tested;
pub use diffusion::{Descent, MockDiffusion, Sines, sample};
pub use engine::{EngineApi, EngineFault, StandIn};
pub use gguf::GgufWriter;
pub use language::{Bigram, Letters, Scripted, Texts};
pub use skip::{CAPABILITIES, is_capability, is_required, skipped};
pub use training::Bench;
