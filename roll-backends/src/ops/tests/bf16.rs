//! Tests of operators with bf16 operands or results, compared with themselves in f32.

use burn_tensor::{DType, Device, Tensor};

use super::rope::angles;
use super::{BF16, Exact, assert_near, bf16_devices, download, noise, to_bf16};
use crate::ops::{
    attention, conv3d, conv3d_pull, gated_add, gelu_tanh, layer_norm_as, linear, linear_lora, rms_rope, seed,
};

/// Runs `f` on every bf16 device twice: with all operands in f32, and with the operands listed in `narrow` as bf16.
/// Checks the dtypes of result and gradients of the second run, and that they equal the first up to the rounding of
/// bf16. Operands are exact in bf16.
fn check(what: &str, inputs: &[Exact], narrow: &[usize], result: DType, f: impl Fn(&[Tensor<2>], DType) -> Tensor<2>) {
    let inputs: Vec<Exact> = inputs.iter().map(to_bf16).collect();
    let run = |device: &Device, wide: bool| {
        let leaf = |(i, x): (usize, &Exact)| {
            let x = x.upload(device);
            let x = if narrow.contains(&i) && !wide { x.cast(DType::BF16) } else { x };
            x.autodiff().require_grad()
        };
        let leaves: Vec<_> = inputs.iter().enumerate().map(leaf).collect();
        let y = f(&leaves, if wide { DType::F32 } else { DType::BF16 });
        let dtype = if wide { DType::F32 } else { result };
        assert_eq!(y.dtype(), dtype, "{what}");
        let [rows, columns] = y.dims();
        let cotangent = to_bf16(&noise(rows, columns, 99)).upload(device);
        let cotangent = if dtype == DType::F32 { cotangent } else { cotangent.cast(dtype) };
        let mut found = seed(y.clone(), cotangent).backward();
        let gradients: Vec<Vec<f32>> = leaves
            .iter()
            .map(|leaf| {
                let gradient = leaf.grad_remove(&mut found).unwrap();
                assert_eq!(gradient.dtype(), leaf.dtype(), "{what}");
                download(gradient.cast(DType::F32))
            })
            .collect();
        (download(y.cast(DType::F32)), gradients)
    };
    for device in bf16_devices() {
        let ((exact, exact_gradients), (found, gradients)) = (run(&device, true), run(&device, false));
        let wide = |x: &[f32]| x.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        assert_near(&format!("{what} on {device:?}"), &found, &wide(&exact), BF16);
        for (i, (found, exact)) in gradients.iter().zip(&exact_gradients).enumerate() {
            assert_near(&format!("{what} on {device:?}: gradient {i}"), found, &wide(exact), BF16);
        }
    }
}

#[test]
fn layer_norm_returns_the_requested_dtype() {
    for gains in [1, 6] {
        let inputs = [noise(6, 40, 1), noise(gains, 40, 2), noise(1, 40, 3)];
        check("layer norm", &inputs, &[], DType::BF16, |x, dtype| {
            layer_norm_as(x[0].clone(), x[1].clone(), x[2].clone(), 1e-6, dtype)
        });
    }
}

#[test]
fn convolutions_and_their_pulls_keep_the_dtype_in_every_branch() {
    // By Winograd on flex, and by Burn's kernel and the backend's own: with few positions and with many.
    for (channels, kernel, size) in [
        (32, [1, 3, 3], [2, 3, 4]),
        (32, [3, 3, 3], [2, 3, 4]),
        (2, [3, 1, 1], [3, 1, 2]),
        (2, [1, 3, 3], [2, 3, 4]),
        (2, [3, 3, 3], [2, 32, 32]),
    ] {
        let ([t, h, w], [kt, kh, kw]) = (size, kernel);
        let (positions, taps) = (t * h * w, kt * kh * kw);
        let padding = kernel.map(|k| k / 2);
        let inputs = [noise(channels, positions, 1), noise(channels, channels * taps, 2), noise(1, channels, 3)];
        let shaped = |x: &[Tensor<2>]| -> (Tensor<4>, Tensor<5>) {
            let weight = x[1].clone().reshape([channels, channels, kt, kh, kw]);
            (x[0].clone().reshape([channels, t, h, w]), weight)
        };
        check(&format!("conv {channels} {kernel:?} {size:?}"), &inputs, &[0, 1, 2], DType::BF16, |x, _| {
            let (volume, weight) = shaped(x);
            conv3d(volume, weight, Some(x[2].clone().reshape([channels])), padding).reshape([channels, positions])
        });
        for device in bf16_devices() {
            let pulled = |dtype| {
                let operands = inputs[..2].iter().map(|x| to_bf16(x).upload(&device).cast(dtype));
                let (cotangent, weight) = shaped(&operands.collect::<Vec<_>>());
                let d_x = conv3d_pull(cotangent, weight, padding);
                assert_eq!(d_x.dtype(), dtype);
                download(d_x.reshape([channels, positions]).cast(DType::F32))
            };
            let exact: Vec<f64> = pulled(DType::F32).into_iter().map(f64::from).collect();
            let what = format!("pull of conv {channels} {kernel:?} {size:?} on {device:?}");
            assert_near(&what, &pulled(DType::BF16), &exact, BF16);
        }
    }
}

#[test]
fn rms_rope_keeps_the_dtype() {
    let (heads, half) = (3, 4);
    for rotated in [true, false] {
        check("rms norm", &[noise(6, 24, 1), noise(1, 24, 2)], &[0], DType::BF16, |x, _| {
            let device = x[0].device().without_autodiff();
            let rotation = rotated.then(|| angles(6, half).map(|angle| angle.upload(&device)));
            rms_rope(x[0].clone(), x[1].clone().reshape([24]), rotation, heads, 1e-6)
        });
    }
}

#[test]
fn gated_add_accepts_bf16() {
    for gates in [0, 1, 5] {
        let inputs = [noise(5, 24, 1), noise(5, 24, 2), noise(gates.max(1), 24, 3)];
        let used = if gates == 0 { 2 } else { 3 };
        check("gated add", &inputs[..used], &[1], DType::F32, |x, _| {
            gated_add(x[0].clone(), x[1].clone(), x.get(2).cloned())
        });
    }
}

#[test]
fn gelu_keeps_the_dtype() {
    check("gelu", &[noise(6, 24, 1)], &[0], DType::BF16, |x, _| gelu_tanh(x[0].clone()));
}

#[test]
fn attention_keeps_the_dtype() {
    for keys in [20, 33] {
        let inputs = [noise(20, 32, 1), noise(keys, 32, 2), noise(keys, 32, 3)];
        check("attention", &inputs, &[0, 1, 2], DType::BF16, |x, _| {
            attention(x[0].clone(), x[1].clone(), x[2].clone(), 4)
        });
    }
}

#[test]
fn linear_layers_keep_the_dtype() {
    let plain = [noise(6, 40, 1), noise(24, 40, 2), noise(1, 24, 3)];
    check("linear", &plain, &[0, 1], DType::BF16, |x, _| {
        linear(x[0].clone(), x[1].clone(), Some(x[2].clone().reshape([24])))
    });
    for scale in [0.5, 1.0] {
        let with_lora = [plain.as_slice(), &[noise(4, 40, 4), noise(24, 4, 5)]].concat();
        check("linear with a low-rank part", &with_lora, &[0, 1], DType::BF16, |x, _| {
            let bias = x[2].clone().reshape([24]);
            linear_lora(x[0].clone(), x[1].clone(), Some(bias), x[3].clone(), x[4].clone(), scale)
        });
    }
}

/// Accumulators are spread between two bf16 numbers, so a contribution of an eighth of a step changes one result of
/// eight.
#[test]
fn lora_contributions_below_bf16_precision_survive_on_average() {
    let (rows, inputs, outputs) = (64, 64, 64);
    let (x, weight) = (to_bf16(&noise(rows, inputs, 1)), to_bf16(&noise(outputs, inputs, 2)));
    for device in bf16_devices() {
        let [x, weight] = [&x, &weight].map(|x| x.upload(&device).cast(DType::BF16));
        // x A^T is the first column of x; each number of B is an eighth of the bf16 step between 8 and 16.
        let mut first = Exact { rows: 1, columns: inputs, values: vec![0.0; inputs] };
        first.values[0] = 1.0;
        let down = first.upload(&device);
        let up = Tensor::<2>::full([outputs, 1], 1.0 / 128.0, &device);
        let low: f64 = {
            let column: Vec<f32> = download(x.clone().cast(DType::F32).narrow(1, 0, 1));
            column.iter().map(|v| f64::from(*v).powi(2) / 128.0 * outputs as f64).sum()
        };
        let base = download(linear(x.clone(), weight.clone(), None).cast(DType::F32));
        let y = download(linear_lora(x.clone(), weight, None, down, up, 1.0).cast(DType::F32));
        let column: Vec<f32> = download(x.cast(DType::F32).narrow(1, 0, 1));
        let moved = y.iter().zip(&base).enumerate();
        let along: f64 = moved.map(|(i, (y, base))| f64::from(y - base) * f64::from(column[i / outputs])).sum();
        assert!((along / low - 1.0).abs() < 0.25, "{device:?}: {along} of {low}");
    }
}
