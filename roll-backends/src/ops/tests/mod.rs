//! Tests of the fused operators: values, and gradients by central differences, are compared with the same formulas in
//! f64 on every available backend.
#![allow(clippy::unwrap_used)]

mod activation;
mod attention;
mod bf16;
mod channel_norm;
mod conv;
mod conv2d;
mod cotangent;
mod decode;
mod fp8;
mod gate;
mod group_norm;
mod linear;
mod max_pool;
mod norm;
mod rope;
mod scaled;
mod strided;
mod video;

use burn_tensor::{DType, Device, Tensor, TensorData};

use super::test_noise::states;
use crate::Backend;

/// A matrix in f64, row-major, for references.
#[derive(Clone, Debug)]
struct Exact {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

/// Deterministic numbers in about [-2, 2] that are exact in f32.
fn noise(rows: usize, columns: usize, seed: u64) -> Exact {
    let number = |state: u64| ((state >> 33) as f64 / (1u64 << 31) as f64 - 0.5) * 4.0;
    let states = states(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let values = states.map(|state| f64::from(number(state) as f32)).take(rows * columns).collect();
    Exact { rows, columns, values }
}

impl Exact {
    fn upload(&self, device: &Device) -> Tensor<2> {
        let values: Vec<f32> = self.values.iter().map(|&v| v as f32).collect();
        Tensor::from_data(TensorData::new(values, [self.rows, self.columns]), (device, DType::F32))
    }

    /// Uploads to the device of `x`.
    fn upload_like(&self, x: &Tensor<2>) -> Tensor<2> {
        self.upload(&x.device().without_autodiff())
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        self.values[i * self.columns + j]
    }
}

/// Rounds every value to bf16.
fn to_bf16(x: &Exact) -> Exact {
    let values = x.values.iter().map(|&v| f64::from(half::bf16::from_f64(v).to_f32())).collect();
    Exact { values, ..x.clone() }
}

/// Every device of this build that works on this machine and is selected by ROLL_TEST_BACKENDS.
fn devices() -> Vec<Device> {
    let tested = Backend::ALL.into_iter().filter(|b| roll_testing::is_tested(b.name()));
    let devices: Vec<Device> =
        tested.filter(|b| b.check_usable(0).is_ok()).map(|b| crate::device(b.name()).unwrap()).collect();
    assert!(!devices.is_empty(), "ROLL_TEST_BACKENDS lists no backend of this build that works here");
    devices
}

/// The devices that compute in bf16.
fn bf16_devices() -> Vec<Device> {
    devices().into_iter().filter(|device| device.supports_dtype(DType::BF16)).collect()
}

fn download<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let tensor = if tensor.device().is_autodiff() { tensor.inner() } else { tensor };
    tensor.into_data().try_into_vec::<f32>().unwrap()
}

/// Asserts that `found` is within `tolerance` of `expected`, relative to its largest value.
fn assert_near(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    // A stand-in of the driver computes nothing: see `tests/kernels.rs`.
    if std::env::var("ROLL_COMPILE_ONLY").as_deref() == Ok("1") {
        return;
    }
    let largest = expected.iter().fold(0.0f64, |m, v| m.max(v.abs())).max(1e-30);
    let worst = found.iter().zip(expected).map(|(&f, &e)| (f64::from(f) - e).abs()).fold(0.0, f64::max);
    assert!(found.iter().all(|v| v.is_finite()), "{what}: not finite");
    assert!(worst <= tolerance * largest, "{what}: {:e} relative to the largest value", worst / largest);
}

/// Three times the spacing of bf16, relative: operands are exact here, results and cotangents are rounded a few times.
const BF16: f64 = 3.0 / 256.0;

/// Compares values and gradients of `fused`, on every device and for every subset of tracked inputs, with `reference`
/// and its central differences in f64. The objective is the sum of the result weighted by noise.
fn check(
    what: &str,
    inputs: &[Exact],
    tolerance: f64,
    fused: impl Fn(&[Tensor<2>]) -> Tensor<2>,
    reference: impl Fn(&[Exact]) -> Vec<f64>,
) {
    let expected = reference(inputs);
    let on = |device: &Device| inputs.iter().map(|x| x.upload(device)).collect::<Vec<_>>();
    let [rows, columns] = fused(&on(&Device::flex())).dims();
    let weights = noise(rows, columns, 99);
    let objective =
        |inputs: &[Exact]| -> f64 { reference(inputs).iter().zip(&weights.values).map(|(y, w)| y * w).sum() };
    let gradients: Vec<Vec<f64>> = (0..inputs.len())
        .map(|i| {
            (0..inputs[i].values.len())
                .map(|j| {
                    let h = 1e-5;
                    let mut moved = inputs.to_vec();
                    moved[i].values[j] += h;
                    let above = objective(&moved);
                    moved[i].values[j] -= 2.0 * h;
                    (above - objective(&moved)) / (2.0 * h)
                })
                .collect()
        })
        .collect();
    for device in devices() {
        let plain = on(&device);
        assert_near(&format!("{what} on {device:?}"), &download(fused(&plain)), &expected, tolerance);
        for subset in 1..1usize << inputs.len() {
            let is_tracked = |i: usize| subset >> i & 1 == 1;
            let leaves: Vec<_> = plain
                .iter()
                .enumerate()
                .map(|(i, x)| if is_tracked(i) { x.clone().autodiff().require_grad() } else { x.clone() })
                .collect();
            let value = fused(&leaves);
            let mut found = (value * weights.upload(&device)).sum().backward();
            for (i, leaf) in leaves.iter().enumerate().filter(|(i, _)| is_tracked(*i)) {
                let gradient = download(leaf.grad_remove(&mut found).unwrap());
                let what = format!("{what} on {device:?}: gradient {i} of subset {subset:b}");
                assert_near(&what, &gradient, &gradients[i], tolerance);
            }
            // Detects an operator that writes into its operands.
            for (x, exact) in plain.iter().zip(inputs) {
                assert_near(what, &download(x.clone()), &exact.values, 0.0);
            }
        }
    }
}
