//! Operators on CubeCL's devices: NVIDIA GPUs through CUDA, and other GPUs through Vulkan, Metal or Direct3D 12.
//!
//! Memory-bound operators (norms, rotary embedding, activations, sums) are one CubeCL kernel each, which reads every
//! operand once per pass over a row, where composed operations read and write each intermediate. Products, convolutions
//! and flash attention come from the cubek crates. The kernels of this folder index contiguous f32, to which other
//! tensors are converted first; attention also has kernels for bf16.

mod activation;
mod attention;
mod channel_norm;
mod conv;
mod gate;
mod linear;
mod norm;
mod product;
mod reduction;
mod rope;

use std::collections::BTreeMap;
use std::sync::Mutex;

use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, FloatDType, Shape};
use cubecl::ir::ElemType;
use cubecl::prelude::Scalar;
use cubecl::{CubeCount, CubeDim, calculate_cube_count_elemwise};
use half::bf16;

use super::{
    AdamKernel, BlockKernel, Conv2dKernel, DecodeKernel, Fp8Kernel, GroupNormKernel, MaxPoolKernel, RmsRopeKernel,
    ScaledKernel,
};
use crate::backend::ops::FloatTensorOps;
use crate::backend::{Cube, TensorMetadata};
use crate::sync::lock;
#[cfg(all(test, feature = "wgpu"))]
use burn_cubecl::CubeDevice;

// CubeCL's devices have no kernels for these traits: they use the default methods.
impl AdamKernel for Cube {}
impl BlockKernel for Cube {}
impl Conv2dKernel for Cube {}
impl DecodeKernel for Cube {}
impl Fp8Kernel for Cube {}
impl GroupNormKernel for Cube {}
impl MaxPoolKernel for Cube {}
impl RmsRopeKernel for Cube {}
impl ScaledKernel for Cube {}

/// Converts to contiguous f32, as kernels index it. The allocation may be larger than the tensor, and `len()` in a
/// kernel is the allocation's: kernels therefore take sizes as arguments.
fn values(x: CubeTensor) -> CubeTensor {
    let x = if x.dtype == DType::F32 { x } else { Cube::float_cast(x, FloatDType::F32) };
    into_contiguous(x)
}

/// An uninitialised f32 tensor of `shape` on the device of `like`.
fn empty(like: &CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    empty_as(like, shape, DType::F32)
}

/// An uninitialised f32 tensor of the shape of `like`, on its device.
fn empty_like(like: &CubeTensor) -> CubeTensor {
    empty(like, like.shape())
}

/// An uninitialised tensor of `shape` and `dtype` on the device of `like`.
fn empty_as(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// CubeCL's type for the tensor's dtype, f32 or bf16.
fn elem(x: &CubeTensor) -> ElemType {
    if x.dtype == DType::BF16 { bf16::elem_type_native() } else { f32::elem_type_native() }
}

/// Returns the cached value of `key`, which `compute` computes at the first call; other threads wait for it.
fn cached<K: Ord, V: Clone>(cache: &Mutex<BTreeMap<K, V>>, key: K, compute: impl FnOnce() -> V) -> V {
    lock(cache).entry(key).or_insert_with(compute).clone()
}

/// Copies the values to the host; `None` if a kernel that computes them failed.
fn to_host(x: CubeTensor) -> Option<Vec<f32>> {
    cubecl::future::block_on(Cube::float_into_data(values(x))).ok()?.try_to_vec().ok()
}

/// The device for kernel tests; `None`, with a skip message, if the machine has no such device. The tests of the
/// operators and the parity suite use the same device.
#[cfg(all(test, feature = "wgpu"))]
fn test_device() -> Option<CubeDevice> {
    match crate::device("wgpu").map(|device| device.without_autodiff().as_dispatch().clone()) {
        Ok(crate::backend::DispatchDevice::Cube(device)) => Some(device),
        found => {
            let reason = found.err().map_or_else(String::new, |error| error.to_string());
            roll_testing::skip!(reason, needs = "vulkan")
        }
    }
}

/// Launch size with one unit per element.
fn elementwise_launch(like: &CubeTensor, count: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(&like.client, count);
    (calculate_cube_count_elemwise(&like.client, count, dim), dim)
}

/// Launch size with one cube of `units` units per row.
fn cube_per_row(like: &CubeTensor, rows: usize, units: u32) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(units);
    (calculate_cube_count_elemwise(&like.client, rows * units as usize, dim), dim)
}

#[cfg(feature = "wgpu")]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use burn_tensor::TensorData;

    use super::*;
    use crate::ops::{ChannelNormKernel, GateKernel, LinearKernel, NormKernel, SavedNorm};

    const ROWS: usize = 3;
    const WIDTH: usize = 5;

    fn made<const D: usize>(shape: [usize; D], device: &CubeDevice) -> CubeTensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i * 7 % 11) as f32 / 4.0 - 1.0).collect();
        Cube::float_from_data(TensorData::new(values, shape), device)
    }

    /// The same tensor in an allocation that is `more` elements larger, filled with NaN.
    fn in_longer_memory<const D: usize>(shape: [usize; D], more: usize, device: &CubeDevice) -> CubeTensor {
        let mut values = to_host(made(shape, device)).unwrap();
        values.resize(values.len() + more, f32::NAN);
        let long = Cube::float_from_data(TensorData::new(values.clone(), [values.len()]), device);
        CubeTensor::new_contiguous(long.client, long.device, shape.into(), long.handle, long.dtype)
    }

    /// The results of each kernel when the operands that it indexes by row have larger allocations.
    fn results(more: usize, device: &CubeDevice) -> Vec<Vec<f32>> {
        let x = || made([ROWS, WIDTH], device);
        let row = || in_longer_memory([1, WIDTH], more, device);
        let mut found = Vec::new();
        for layer in [false, true] {
            let (y, moments) = Cube::norm_forward(x(), row(), layer.then(row), 1e-6);
            let shift = layer.then_some(crate::ops::SharedShift(true));
            let saved = SavedNorm { x: x(), gain: row(), moments, shift, eps: 1e-6 };
            let [d_x, ..] = Cube::norm_backward(saved, x(), [true, false, false]);
            found.extend([y, d_x.unwrap()]);
        }
        found.push(Cube::gated_add_forward(x(), x(), row()));
        found.push(
            Cube::linear_forward(x(), made([WIDTH, WIDTH], device), in_longer_memory([WIDTH], more, device), None).0,
        );
        let (volume, gain) = (|| made([WIDTH, 2, 2, 3], device), || in_longer_memory([WIDTH], more, device));
        let (y, factors) = Cube::channel_norm_forward(volume(), gain(), true);
        let [d_x, _] = Cube::channel_norm_backward([volume(), gain(), factors], true, volume(), [true, false]);
        found.extend([y, d_x.unwrap()]);
        found.into_iter().map(|x| to_host(x).unwrap()).collect()
    }

    #[test]
    fn kernels_do_not_read_beyond_their_tensors() {
        let Some(device) = test_device() else { return };
        let expected = results(0, &device);
        assert!(expected.iter().flatten().all(|x| x.is_finite()));
        for more in [1, 3, 8, 27] {
            assert_eq!(results(more, &device), expected, "{more} elements more");
        }
    }
}
