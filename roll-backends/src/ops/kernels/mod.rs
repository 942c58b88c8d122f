//! What the fused operators compute on the CPU: functions on `f32` slices that know nothing of tensors or autodiff.
//!
//! Work is split over rayon; inner loops are written so that they vectorise, and are compiled twice (AVX2 with FMA,
//! and portable) with the choice made at run time.

pub mod activation;
pub mod attention;
pub mod channel_norm;
pub mod conv;
mod correlate;
pub mod linear;
pub mod matrix;
pub mod norm;
pub mod rope;
pub mod rows;
pub mod simd;
