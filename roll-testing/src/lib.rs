//! For tests of roll, and of algorithms, models and rewards written elsewhere.
//!
//! Test doubles that compute by hand what real components compute on a device, so that an algorithm is tested in
//! milliseconds, against differences and against formulas:
//!
//! - [`diffusion`]: a velocity model of eight numbers ([`MockDiffusion`]), a reward ([`Sines`]) and a strategy that shows
//!   the gradient it was given ([`Descent`]);
//! - [`language`]: a language model in which the next character depends on the last one alone ([`Bigram`]);
//! - `faces` (feature `onnx`): a face detector and an embedder as ONNX files.
//!
//! A test that cannot run on this machine says so by [`skip!`], and fails where `ROLL_REQUIRE` says that it can.

pub mod diffusion;
#[cfg(feature = "onnx")]
pub mod faces;
pub mod language;
mod skip;

pub use diffusion::{Descent, MockDiffusion, Sines, sample};
pub use language::Bigram;
pub use skip::{CAPABILITIES, is_capability, is_required, skipped};
