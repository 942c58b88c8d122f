//! Attention on CubeCL devices. The forward pass uses cubek's flash kernel on tensor cores if the operands are bf16 and
//! a check on this device passes. Otherwise, and for every backward pass, attention is computed in [`blocks`] of plain
//! products (cubek's own backward kernel uses one unit per row and supports f32 only).

mod blocks;
mod flash;
mod softmax;

use std::collections::BTreeMap;
use std::sync::Mutex;

use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, FloatDType, TensorData};
use cubek::attention::forward::routines::Routine;

use super::{cached, empty, to_host};
use crate::backend::ops::FloatTensorOps;
use crate::backend::{Cube, TensorMetadata};
use crate::ops::{AttentionCall, AttentionKernel, Cotangents};

/// Environment variable that selects the kernel of bf16 attention, for comparisons: `flash` (the default, if the check
/// passes) or `blocks`.
const CHOICE: &str = "ROLL_CUDA_ATTENTION";

roll_core::inventory::submit! { roll_core::Variable(CHOICE) }

impl AttentionKernel for Cube {
    fn attention_forward(qkv: [CubeTensor; 3], call: AttentionCall) -> (CubeTensor, CubeTensor) {
        if qkv[0].dtype == DType::BF16
            && flash::supports(&qkv, call)
            && flash_is_correct(&qkv[0], call)
            && let Ok(out) = flash::forward::<flash::TensorCores>(qkv.clone(), call)
        {
            // The flash kernel returns no statistics; the backward pass recomputes them.
            let no_statistics = empty(&out, [0]);
            return (out, no_statistics);
        }
        blocks::forward(qkv, call)
    }

    fn attention_backward(
        qkv: [CubeTensor; 3],
        out: CubeTensor,
        statistics: CubeTensor,
        d_out: CubeTensor,
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        blocks::backward(qkv, out, statistics, d_out, call, wanted)
    }
}

/// Pads an axis with zeros at its end up to `length`; a longer tensor is returned unchanged.
fn padded(x: CubeTensor, axis: usize, length: usize) -> CubeTensor {
    let mut zeros_shape = x.shape().to_vec();
    if zeros_shape[axis] >= length {
        return x;
    }
    zeros_shape[axis] = length - zeros_shape[axis];
    let zeros = Cube::float_zeros(zeros_shape.into(), &x.device, FloatDType::from(x.dtype));
    Cube::float_cat(vec![x, zeros], axis)
}

/// Whether the flash kernel agrees with plain products on the device of `like`, for heads of this width. Compared once
/// per device, width and mask, on a few rows: results depend on the device's matrix units, and a wrong kernel would not
/// fail.
fn flash_is_correct(like: &CubeTensor, call: AttentionCall) -> bool {
    static CHECKED: Mutex<BTreeMap<(String, usize, bool), bool>> = Mutex::new(BTreeMap::new());
    let width = like.shape().dims::<2>()[1] / call.heads;
    let key = (format!("{:?}", like.device), width, call.causal);
    cached(&CHECKED, key, || {
        let mask = if call.causal { ", causal" } else { "" };
        let kind = format!("heads of {width} channels{mask}");
        match std::env::var(CHOICE).as_deref() {
            Ok("blocks") => {
                tracing::info!("attention in bf16, {kind}: blocks of products, as {CHOICE} says");
                false
            }
            _ => match disagreement::<flash::TensorCores>(like, width, call.causal) {
                None => {
                    tracing::info!("attention in bf16, {kind}: cubek's flash kernel on tensor cores");
                    true
                }
                Some(reason) => {
                    tracing::warn!(
                        "cubek's flash attention does not work on this device for {kind} ({reason}): attention is computed \
                         in blocks of plain products"
                    );
                    false
                }
            },
        }
    })
}

/// Compares the flash kernel with [`blocks`], at lengths that are multiples of the queries per cube and at other
/// lengths, with values beyond the range of f16. Returns a description of the difference, or `None`.
fn disagreement<R: Routine<Strategy = ()>>(like: &CubeTensor, width: usize, causal: bool) -> Option<String> {
    const HEADS: usize = 2;
    const BEYOND_F16: f32 = 2e5;
    /// Largest difference relative to the largest value, by the rounding of the operands.
    const TOLERANCE_BF16: f32 = 3e-2;
    const TOLERANCE_F32: f32 = 1e-5;
    let scale = 1.0 / (width as f32).sqrt();
    let call = AttentionCall { heads: HEADS, scale, causal, window: None, softcap: None };
    let dtype = like.dtype;
    // `rows` rows of values between -size and size.
    let rows_of_values = |rows: usize, seed: usize, size: f32| {
        // Without a pattern that a wrong kernel could get right.
        let value = |i: usize| (((i + seed) * 7919 % 1009) as f32 / 504.5 - 1.0) * size;
        let values: Vec<f32> = (0..rows * HEADS * width).map(value).collect();
        let x = Cube::float_from_data(TensorData::new(values, [rows, HEADS * width]), &like.device);
        Cube::float_cast(x, FloatDType::from(dtype))
    };
    let lengths = if causal { [(128, 128), (150, 150)] } else { [(128, 256), (75, 150)] };
    for (queries, keys) in lengths {
        let qkv =
            [rows_of_values(queries, 1, 2.0), rows_of_values(keys, 400, 2.0), rows_of_values(keys, 90, BEYOND_F16)];
        let expected = to_host(blocks::forward(qkv.clone(), call).0);
        let found = match flash::forward::<R>(qkv, call) {
            Ok(found) => to_host(found),
            Err(reason) => return Some(reason),
        };
        let (Some(found), Some(expected)) = (found, expected) else {
            return Some("a kernel failed".into());
        };
        let largest_value = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let tolerance = largest_value * if dtype == DType::BF16 { TOLERANCE_BF16 } else { TOLERANCE_F32 };
        let largest_error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, nan_max);
        if largest_error.is_nan() || largest_error > tolerance {
            return Some(format!("{queries} queries, {keys} keys: off by {largest_error:e} of {largest_value:e}"));
        }
    }
    None
}

/// The maximum; NaN if either is NaN (`f32::max` ignores NaN).
fn nan_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

#[cfg(feature = "wgpu")]
#[cfg(test)]
mod tests {
    use cubek::attention::forward::routines::unit::UnitRoutine;

    use super::*;

    /// Tests cubek's flash kernel without tensor cores: it has the same layouts, scale, mask and padding.
    #[test]
    fn flash_attention_matches_blockwise_attention() {
        let Some(device) = super::super::test_device() else { return };
        let like = Cube::float_zeros([1, 1].into(), &device, FloatDType::F32);
        for (width, causal) in [(64, true), (128, false)] {
            let found = disagreement::<UnitRoutine>(&like, width, causal);
            assert_eq!(found, None, "width {width}, causal {causal}");
        }
    }
}
