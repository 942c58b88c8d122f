//! What the fused operators compute on the CPU: functions on `f32` slices that know nothing of tensors or autodiff.
//!
//! Work is split over rayon; inner loops are written so that they vectorise, and are compiled twice (AVX2 with FMA,
//! and portable) with the choice made at run time.

pub mod attention;
pub mod matrix;
pub mod simd;
