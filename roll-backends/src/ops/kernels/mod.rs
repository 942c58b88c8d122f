//! CPU kernels of the fused operators: functions on `f32` slices, without tensors or autodiff.
//!
//! Work is distributed by rayon. Inner loops are plain Rust over fixed-size arrays that the compiler vectorises; each
//! is compiled for AVX2 with FMA and portably, and selected at run time ([`simd`]).
//!
//! `std::simd` is not used because it needs nightly Rust. `pulp` is not used because it would replace only the run-time
//! selection (one macro here), and every loop would have to be written in its vector types; the plain loops were
//! measured against PyTorch (`bench/src/bin/speed`). The kernels are fused: one pass over memory replaces
//! several calls of a vector library.
//!
//! Matrix products use `gemm` ([`matrix`]), with two exceptions where operands are packed here: Winograd convolution
//! ([`winograd`]) and linear layers ([`panel_products`]), which convert bf16 while packing; f32 uses the same code.
//! Compared with `gemm` (`operators linear` of `bench`, AVX-512), [`panel_products`] takes 0.2 to 1.0 of the time in
//! most shapes, 1.1 to 1.3 for 18,900 rows of 128 numbers, and 1.8 for one row, for which `gemm` is used.

pub mod activation;
pub mod attention;
pub mod channel_norm;
pub mod conv;
pub mod conv2d;
mod correlate;
pub mod decode;
mod geometry;
pub mod group_norm;
pub mod linear;
pub mod matrix;
pub mod max_pool;
pub mod norm;
pub mod panel_products;
pub mod parallel;
pub mod rope;
pub mod row_products;
pub mod rows;
pub mod simd;
mod tile;
pub mod winograd;
