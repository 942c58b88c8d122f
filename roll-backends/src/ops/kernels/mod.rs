//! The CPU kernels of the fused operators: functions on `f32` slices, without tensors or autodiff.
//!
//! Work is split over rayon. Inner loops are plain Rust over fixed-size arrays, written so that the compiler vectorises
//! them, and are compiled twice ([`simd`]): for AVX2 with FMA, and portably; the choice is made at run time.
//!
//! Neither `std::simd` nor `pulp` is used. `std::simd` needs nightly Rust, and this project builds on stable. `pulp` would
//! replace only the run-time choice, one macro here, and in return every loop would be written in its vector type; the
//! loops as they are were measured against PyTorch (`benches/speed.rs` of roll-cli). They are fused: one pass over memory
//! does what several calls of a vector library would. Products of matrices, where a library is the better choice, go
//! through `gemm` ([`matrix`]), but where an operand is made in the order in which the inner loop reads it, by Winograd's
//! transforms ([`winograd`]), and in linear layers ([`panel_products`]): bf16 is widened as it is arranged, and f32 goes
//! through the same code. Beside `gemm` (`bench_ops linear`, AVX-512) that took 0.2 to 1.0 of the time in most shapes, 1.1 to
//! 1.3 for 18,900 rows of 128 numbers, and 1.8 for one row, which `gemm` keeps.

pub mod activation;
pub mod attention;
pub mod channel_norm;
pub mod conv;
pub mod conv2d;
mod correlate;
pub mod decode;
mod geometry;
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
