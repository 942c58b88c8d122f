//! 3-d convolutions by cubek's kernels. GPUs with TF32 (eleven significant bits per operand) use tensor cores,
//! as PyTorch does; `NVIDIA_TF32_OVERRIDE=0`, which NVIDIA's own libraries read too, selects f32.
//!
//! bf16 is converted to f32 and back: TF32 holds its eight significant bits. cubek's direct kernel would accumulate in
//! bf16, which is off by some percent after a thousand products.

use std::collections::BTreeMap;
use std::sync::Mutex;

use burn_cubecl::kernel::conv::{ConvStrategy, conv_data_backward, conv_forward, conv_weight_backward};
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, TensorData};
use cubecl::prelude::Scalar;
use cubecl::tf32;

use super::{cached, to_host};
use crate::backend::ops::FloatTensorOps;
use crate::backend::{Cube, TensorMetadata};
use crate::ops::conv::{options, with_batch, without_batch};
use crate::ops::expression::Expression;
use crate::ops::{ConvKernel, Cotangents};

/// Environment variable that disables TF32 if it is `0`.
const OVERRIDE: &str = "NVIDIA_TF32_OVERRIDE";

impl ConvKernel for Cube {
    fn conv_forward(operands: [CubeTensor; 3], padding: [usize; 3]) -> CubeTensor {
        let dtype = operands[0].dtype;
        let [x, weight, bias] = operands.map(in_f32);
        let use_tensor_cores = tensor_cores_are_usable(&x);
        let x = with_batch::<Self>(x);
        let y = run_conv(use_tensor_cores, |strategy| {
            conv_forward::<3>(x.clone(), weight.clone(), Some(bias.clone()), options(padding), strategy)
        });
        Expression::<Self>(without_batch::<Self>(y)).cast(dtype).0
    }

    fn conv_backward(
        [x, weight]: [CubeTensor; 2],
        padding: [usize; 3],
        d_y: CubeTensor,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        let dtype = x.dtype;
        let [x, weight, d_y] = [x, weight, d_y].map(in_f32);
        let use_tensor_cores = tensor_cores_are_usable(&x);
        let gradients = conv_gradients([x, weight], padding, d_y, wanted, use_tensor_cores);
        gradients.map(|gradient| gradient.map(|gradient| Expression::<Self>(gradient).cast(dtype).0))
    }
}

/// Casts to f32, or returns x unchanged.
fn in_f32(x: CubeTensor) -> CubeTensor {
    Expression::<Cube>(x).cast(DType::F32).0
}

/// The gradients of x, weight and bias that are `wanted`.
fn conv_gradients(
    [x, weight]: [CubeTensor; 2],
    padding: [usize; 3],
    d_y: CubeTensor,
    [x_wanted, weight_wanted, bias_wanted]: [bool; 3],
    use_tensor_cores: bool,
) -> Cotangents<Cube, 3> {
    let (x, d_y) = (with_batch::<Cube>(x), with_batch::<Cube>(d_y));
    let d_x = x_wanted.then(|| {
        without_batch::<Cube>(run_conv(use_tensor_cores, |strategy| {
            conv_data_backward::<3>(d_y.clone(), weight.clone(), x.shape(), options(padding), strategy)
        }))
    });
    let d_weight = weight_wanted.then(|| {
        run_conv(use_tensor_cores, |strategy| {
            conv_weight_backward::<3>(x.clone(), d_y.clone(), weight.shape(), options(padding), strategy)
        })
    });
    let d_bias = bias_wanted.then(|| {
        let d_y = Expression::<Cube>(d_y);
        let [_, outputs, t, h, w] = d_y.dims();
        d_y.reshape([outputs, t * h * w]).sum(1).reshape([outputs]).0
    });
    [d_x, d_weight, d_bias]
}

/// Runs `kernel` as implicit GEMM on tensor cores if requested and supported for the shapes, else directly.
fn run_conv<E: std::fmt::Debug>(
    use_tensor_cores: bool,
    kernel: impl Fn(ConvStrategy) -> Result<CubeTensor, E>,
) -> CubeTensor {
    if use_tensor_cores && let Ok(y) = kernel(ConvStrategy::ImplicitGemm) {
        return y;
    }
    match kernel(ConvStrategy::Direct) {
        Ok(y) => y,
        Err(error) => panic!("no kernel for a convolution: {error:?}"),
    }
}

/// Whether convolutions of f32 on the device of `like` use TF32 on tensor cores. Decided once per device: TF32 must be
/// supported and agree with f32 in a check.
fn tensor_cores_are_usable(like: &CubeTensor) -> bool {
    static DECIDED: Mutex<BTreeMap<String, bool>> = Mutex::new(BTreeMap::new());
    let has_tf32 = like.client.properties().supports_type(tf32::elem_type_native());
    if !has_tf32 {
        return false;
    }
    cached(&DECIDED, format!("{:?}", like.device), || {
        if std::env::var(OVERRIDE).as_deref() == Ok("0") {
            tracing::info!("convolutions in f32, as {OVERRIDE}=0 says");
            return false;
        }
        match disagreement(like) {
            None => {
                tracing::info!("convolutions in TF32 ({OVERRIDE}=0 for f32)");
                true
            }
            Some(reason) => {
                tracing::warn!(
                    "cubek's convolutions on tensor cores do not work on this device ({reason}): they are in f32"
                );
                false
            }
        }
    })
}

/// Compares convolutions on tensor cores with direct ones, for a causal convolution with 3 taps per axis. Returns a
/// description of the difference, or `None`.
fn disagreement(like: &CubeTensor) -> Option<String> {
    const PADDING: [usize; 3] = [0, 1, 1];
    /// Largest difference relative to the largest value, by the rounding to TF32.
    const TOLERANCE: f32 = 1e-2;
    // Values between -1 and 1 without a pattern that a wrong kernel could get right.
    let varied = |shape: &[usize], seed: usize| {
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|i: usize| ((i + seed) * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
        Cube::float_from_data(TensorData::new(values, shape.to_vec()), &like.device)
    };
    let [x, weight, bias] = [varied(&[32, 4, 9, 11], 1), varied(&[48, 32, 3, 3, 3], 7), varied(&[48], 5)];
    let d_y = varied(&[48, 2, 9, 11], 3);
    let input = with_batch::<Cube>(x.clone());
    let results = |use_tensor_cores: bool| {
        let y = run_conv(use_tensor_cores, |strategy| {
            conv_forward::<3>(input.clone(), weight.clone(), Some(bias.clone()), options(PADDING), strategy)
        });
        let all_but_bias = [true, true, false];
        let [d_x, d_weight, _] =
            conv_gradients([x.clone(), weight.clone()], PADDING, d_y.clone(), all_but_bias, use_tensor_cores);
        [Some(y), d_x, d_weight]
    };
    let names = ["the result", "the gradient of x", "the gradient of the weight"];
    let (on_tensor_cores, direct) = (results(true), results(false));
    for ((what, found), expected) in names.into_iter().zip(on_tensor_cores).zip(direct) {
        let (Some(found), Some(expected)) = (found.and_then(to_host), expected.and_then(to_host)) else {
            return Some(format!("{what}: a kernel failed"));
        };
        let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        if !found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= TOLERANCE * largest) {
            return Some(format!("{what} is wrong"));
        }
    }
    None
}
