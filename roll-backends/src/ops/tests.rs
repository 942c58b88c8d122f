//! The fused operators against the same formulas in f64.
#![allow(clippy::unwrap_used)]

use burn::tensor::{DType, Device, Tensor, TensorData, module};

use super::*;
use crate::Backend;

mod conv2d;
mod decode;
mod max_pool;
mod narrow;
mod scaled;
mod video;

/// A matrix in f64, row-major: what the references below compute with.
#[derive(Clone, Debug)]
struct Exact {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

/// Numbers in about [-2, 2], the same for the same seed, exactly representable in f32.
fn noise(rows: usize, columns: usize, seed: u64) -> Exact {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as f64 / (1u64 << 31) as f64 - 0.5) * 4.0
    };
    let values = (0..rows * columns).map(|_| f64::from(next() as f32)).collect();
    Exact { rows, columns, values }
}

impl Exact {
    fn upload(&self, device: &Device) -> Tensor<2> {
        let values: Vec<f32> = self.values.iter().map(|&v| v as f32).collect();
        Tensor::from_data(TensorData::new(values, [self.rows, self.columns]), (device, DType::F32))
    }

    /// On the device of `x`.
    fn beside(&self, x: &Tensor<2>) -> Tensor<2> {
        self.upload(&x.device().without_autodiff())
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        self.values[i * self.columns + j]
    }
}

/// Every device that this build has and this machine can use, of those that tests are asked to run on.
fn devices() -> Vec<Device> {
    let tested = Backend::ALL.into_iter().filter(|b| roll_testing::is_tested(b.name()));
    let devices: Vec<Device> =
        tested.filter(|b| b.usable(0).is_ok()).map(|b| crate::device(b.name()).unwrap()).collect();
    assert!(!devices.is_empty(), "ROLL_TEST_BACKENDS lists no backend of this build that works here");
    devices
}

/// Those of them that compute in bf16.
fn bf16_devices() -> Vec<Device> {
    devices().into_iter().filter(|device| device.supports_dtype(DType::BF16)).collect()
}

/// Whether the exactness of our own kernels is asked for.
fn is_flex(device: &Device) -> bool {
    *device == Device::flex()
}

fn download<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let tensor = if tensor.device().is_autodiff() { tensor.inner() } else { tensor };
    tensor.into_data().try_into_vec::<f32>().unwrap()
}

/// Asserts that `found` is within `tolerance` of `expected`, relative to its largest value.
fn assert_near(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f64, |m, v| m.max(v.abs())).max(1e-30);
    let worst = found.iter().zip(expected).map(|(&f, &e)| (f64::from(f) - e).abs()).fold(0.0, f64::max);
    assert!(found.iter().all(|v| v.is_finite()), "{what}: not finite");
    assert!(worst <= tolerance * largest, "{what}: {:e} relative to the largest value", worst / largest);
}

/// Checks values and gradients of `fused` on every device against `reference` and its central differences in f64, with
/// every subset of the inputs tracked. The objective is the sum of the result weighted by noise.
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
            // An operator that wrote into what it was given would show in the next one.
            for (x, exact) in plain.iter().zip(inputs) {
                assert_near(what, &download(x.clone()), &exact.values, 0.0);
            }
        }
    }
}

fn attention_in_f64(x: &[Exact], heads: usize, scale: f64, causal: bool) -> Vec<f64> {
    let window = if causal { Some(usize::MAX) } else { None };
    bounded_attention_in_f64(x, heads, scale, window, None)
}

/// Of the keys up to its own place a query sees the last `window`; without it all there are.
fn bounded_attention_in_f64(
    x: &[Exact],
    heads: usize,
    scale: f64,
    window: Option<usize>,
    softcap: Option<f64>,
) -> Vec<f64> {
    let (q, k, v) = (&x[0], &x[1], &x[2]);
    let d = q.columns / heads;
    let mut out = vec![0.0; q.rows * q.columns];
    for h in 0..heads {
        for i in 0..q.rows {
            let end = if window.is_some() { (i + 1 + k.rows - q.rows).min(k.rows) } else { k.rows };
            let first = end.saturating_sub(window.unwrap_or(end));
            let scores: Vec<f64> = (first..end)
                .map(|j| (0..d).map(|c| q.at(i, h * d + c) * k.at(j, h * d + c)).sum::<f64>() * scale)
                .map(|score| softcap.map_or(score, |cap| cap * (score / cap).tanh()))
                .collect();
            let max = scores.iter().cloned().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for (j, s) in scores.iter().enumerate() {
                for c in 0..d {
                    out[i * q.columns + h * d + c] += (s - max).exp() / sum * v.at(first + j, h * d + c);
                }
            }
        }
    }
    out
}

#[test]
fn attention_and_its_gradients_match_f64() {
    for (lq, lk, heads, d) in [(5, 7, 2, 4), (19, 33, 3, 8), (40, 18, 1, 6), (1, 1, 1, 2)] {
        let inputs = [noise(lq, heads * d, 1), noise(lk, heads * d, 2), noise(lk, heads * d, 3)];
        check(
            &format!("attention {lq} {lk} {heads} {d}"),
            &inputs,
            1.5e-6,
            |x| attention(x[0].clone(), x[1].clone(), x[2].clone(), heads),
            |x| attention_in_f64(x, heads, 1.0 / (d as f64).sqrt(), false),
        );
    }
}

#[test]
fn causal_attention_with_a_scale_matches_f64() {
    for (lq, lk) in [(20, 20), (6, 23)] {
        let inputs = [noise(lq, 8, 1), noise(lk, 8, 2), noise(lk, 8, 3)];
        let options = AttentionOptions { scale: Some(0.3), causal: true, ..Default::default() };
        check(
            &format!("causal attention {lq} {lk}"),
            &inputs,
            1.5e-6,
            |x| attention_with(x[0].clone(), x[1].clone(), x[2].clone(), 2, options),
            |x| attention_in_f64(x, 2, f64::from(0.3f32), true),
        );
    }
}

#[test]
fn attention_in_a_window_with_bounded_scores_matches_f64() {
    for (lq, lk, window, softcap) in [(20, 20, 6, None), (20, 20, 40, Some(0.8)), (6, 23, 3, Some(2.0))] {
        let inputs = [noise(lq, 8, 1), noise(lk, 8, 2), noise(lk, 8, 3)];
        let options = AttentionOptions { causal: true, window: Some(window), softcap, ..Default::default() };
        check(
            &format!("attention {lq} {lk} in a window of {window}, bound {softcap:?}"),
            &inputs,
            1.5e-6,
            |x| attention_with(x[0].clone(), x[1].clone(), x[2].clone(), 2, options),
            |x| bounded_attention_in_f64(x, 2, 0.5, Some(window), softcap.map(f64::from)),
        );
    }
}

#[test]
fn a_window_moves_over_many_blocks() {
    // Blocks of 87 query rows, a window that ends within them.
    let (q, k, v) = (noise(3000, 4, 1), noise(3000, 4, 2), noise(3000, 4, 3));
    for device in devices() {
        let options = AttentionOptions { causal: true, window: Some(100), ..Default::default() };
        let run = |rows: std::ops::Range<usize>| {
            let [q, k, v] = [&q, &k, &v].map(|x| x.upload(&device).slice([rows.clone(), 0..4]));
            download(attention_with(q, k, v, 1, options))
        };
        let (whole, part) = (run(0..3000), run(1400..2000));
        let part: Vec<f64> = part[4 * 99..].iter().map(|v| f64::from(*v)).collect();
        assert_near("rows that see a whole window", &whole[4 * 1499..4 * 2000], &part, 1e-6);
    }
}

#[test]
fn attention_in_many_blocks_equals_attention_in_one_and_its_gradients_too() {
    // 3000 keys: blocks of 87 query rows.
    let (q, k, v) = (noise(300, 16, 1), noise(3000, 16, 2), noise(3000, 16, 3));
    let weights = noise(300, 16, 4);
    for device in devices() {
        let run = |rows: std::ops::Range<usize>| {
            let leaves = [&q, &k, &v].map(|x| x.upload(&device).autodiff().require_grad());
            let part = leaves[0].clone().slice([rows.clone(), 0..16]);
            let y = attention(part, leaves[1].clone(), leaves[2].clone(), 1);
            let mut g = (y.clone() * weights.upload(&device).slice([rows, 0..16])).sum().backward();
            (download(y), leaves.map(|x| download(x.grad_remove(&mut g).unwrap())))
        };
        let (whole, gradients) = run(0..300);
        let parts: Vec<_> = (0..300).step_by(60).map(|i| run(i..i + 60)).collect();
        let joined: Vec<f64> = parts.iter().flat_map(|(y, _)| y.iter().map(|&v| f64::from(v))).collect();
        assert_near("value", &whole, &joined, 1e-6);
        for i in 0..3 {
            let sum: Vec<f64> =
                (0..gradients[i].len()).map(|j| parts.iter().map(|(_, g)| f64::from(g[i][j])).sum()).collect();
            assert_near("gradient", &gradients[i], &sum, 1e-6);
        }
    }
}

#[test]
fn attention_with_huge_or_equal_scores_stays_exact() {
    let (mut huge, mut equal) = (noise(9, 8, 1), noise(9, 8, 1));
    huge.values.iter_mut().for_each(|v| *v = f64::from((*v * 4000.0) as f32));
    equal.values.fill(0.0);
    let [huge, equal] = [huge, equal].map(|q| [q, noise(12, 8, 2), noise(12, 8, 3)]);
    for device in devices() {
        let leaves: Vec<_> = huge.iter().map(|x| x.upload(&device).autodiff().require_grad()).collect();
        let y = attention(leaves[0].clone(), leaves[1].clone(), leaves[2].clone(), 1);
        assert_near("huge", &download(y.clone()), &attention_in_f64(&huge, 1, 8f64.sqrt().recip(), false), 1e-5);
        let mut g = y.sum().backward();
        for leaf in &leaves {
            assert!(download(leaf.grad_remove(&mut g).unwrap()).iter().all(|v| v.is_finite()));
        }
        let [q, k, v] = [0, 1, 2].map(|i| equal[i].upload(&device));
        assert_near("equal", &download(attention(q, k, v, 2)), &attention_in_f64(&equal, 2, 0.5, false), 1e-6);
    }
}

fn layer_norm_in_f64(x: &[Exact], eps: f64) -> Vec<f64> {
    let (x, gain, shift) = (&x[0], &x[1], &x[2]);
    let n = x.columns as f64;
    let pick = |o: &Exact, i: usize, j: usize| o.at(if o.rows == 1 { 0 } else { i }, j);
    (0..x.rows)
        .flat_map(|i| {
            let row: Vec<f64> = (0..x.columns).map(|j| x.at(i, j)).collect();
            let mean = row.iter().sum::<f64>() / n;
            let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
            (0..x.columns)
                .map(|j| (row[j] - mean) / (variance + eps).sqrt() * pick(gain, i, j) + pick(shift, i, j))
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn layer_norm_and_its_gradients_match_f64() {
    for (l, d, gains, shifts) in [(3, 5, 1, 1), (4, 37, 4, 1), (2, 64, 1, 2), (3, 16, 3, 3), (1, 20, 1, 1)] {
        let inputs = [noise(l, d, 1), noise(gains, d, 2), noise(shifts, d, 3)];
        check(
            &format!("layer norm {l} {d} {gains} {shifts}"),
            &inputs,
            1e-6,
            |x| layer_norm(x[0].clone(), x[1].clone(), x[2].clone(), 1e-6),
            |x| layer_norm_in_f64(x, 1e-6),
        );
    }
}

#[test]
fn norms_of_equal_rows_are_finite() {
    let x = Exact { rows: 2, columns: 40, values: vec![3.0; 80] };
    let (gain, shift) = (noise(1, 40, 1), noise(1, 40, 2));
    let twice = [shift.values.clone(), shift.values.clone()].concat();
    for device in devices() {
        let leaf = x.upload(&device).autodiff().require_grad();
        let y = layer_norm(leaf.clone(), gain.upload(&device), shift.upload(&device), 1e-6);
        assert_near("equal", &download(y.clone()), &twice, 1e-6);
        let mut g = y.sum().backward();
        assert!(download(leaf.grad_remove(&mut g).unwrap()).iter().all(|v| v.is_finite()));
    }
}

#[test]
fn rms_norm_and_its_gradients_match_f64() {
    for (l, d) in [(3, 7), (2, 48), (70, 4)] {
        check(
            &format!("rms norm {l} {d}"),
            &[noise(l, d, 1), noise(1, d, 2)],
            1e-6,
            |x| rms_norm(x[0].clone(), x[1].clone().reshape([d]), 1e-6),
            rms_norm_in_f64,
        );
    }
}

#[test]
fn gated_add_and_its_gradients_match_f64() {
    for gates in [1, 5] {
        check(
            "gated add",
            &[noise(5, 19, 1), noise(5, 19, 2), noise(gates, 19, 3)],
            1e-6,
            |x| gated_add(x[0].clone(), x[1].clone(), Some(x[2].clone())),
            |x| {
                let gate = |i: usize, j: usize| x[2].at(if gates == 1 { 0 } else { i }, j);
                (0..5).flat_map(|i| (0..19).map(move |j| x[0].at(i, j) + x[1].at(i, j) * gate(i, j))).collect()
            },
        );
    }
}

#[test]
fn a_sum_without_a_gate_and_its_gradients_match_f64() {
    check(
        "plain sum",
        &[noise(5, 19, 1), noise(5, 19, 2)],
        1e-6,
        |x| gated_add(x[0].clone(), x[1].clone(), None),
        |x| x[0].values.iter().zip(&x[1].values).map(|(x, y)| x + y).collect(),
    );
}

/// Cosine and sine of some angles.
fn angles(rows: usize, half: usize) -> [Exact; 2] {
    let angles = noise(rows, half, 7);
    [f64::cos as fn(f64) -> f64, f64::sin]
        .map(|f| Exact { values: angles.values.iter().map(|&a| f(a)).collect(), ..angles.clone() })
}

fn rope_in_f64(x: &[f64], [cos, sin]: &[Exact; 2], heads: usize) -> Vec<f64> {
    let (mut y, half) = (x.to_vec(), cos.columns);
    for (i, pair) in y.chunks_exact_mut(2).enumerate() {
        let (row, angle) = (i / (heads * half), i % half);
        let (c, s) = (cos.at(row, angle), sin.at(row, angle));
        let [a, b] = [pair[0], pair[1]];
        pair.copy_from_slice(&[a * c - b * s, a * s + b * c]);
    }
    y
}

fn rms_norm_in_f64(x: &[Exact]) -> Vec<f64> {
    let (l, d) = (x[0].rows, x[0].columns);
    let row = |i: usize| (0..d).map(move |j| x[0].at(i, j));
    let scale = |i: usize| 1.0 / (row(i).map(|v| v * v).sum::<f64>() / d as f64 + 1e-6).sqrt();
    (0..l).flat_map(|i| (0..d).map(move |j| x[0].at(i, j) * scale(i) * x[1].at(0, j))).collect()
}

#[test]
fn rope_and_its_gradient_match_f64() {
    let (l, heads, half) = (6, 3, 5);
    let [cos, sin] = angles(l, half);
    check(
        "rope",
        &[noise(l, heads * half * 2, 1)],
        1e-6,
        |x| rope(x[0].clone(), cos.beside(&x[0]), sin.beside(&x[0]), heads),
        |x| rope_in_f64(&x[0].values, &[cos.clone(), sin.clone()], heads),
    );
}

#[test]
fn rms_norm_with_a_rotation_and_its_gradients_match_f64() {
    let (l, heads, half) = (6, 3, 4);
    let width = heads * half * 2;
    let turn = angles(l, half);
    for rotated in [true, false] {
        check(
            &format!("rms norm, rotated: {rotated}"),
            &[noise(l, width, 1), noise(1, width, 2)],
            1e-6,
            |x| {
                let angles = rotated.then(|| turn.each_ref().map(|angle| angle.beside(&x[0])));
                rms_rope(x[0].clone(), x[1].clone().reshape([width]), angles, heads, 1e-6)
            },
            |x| if rotated { rope_in_f64(&rms_norm_in_f64(x), &turn, heads) } else { rms_norm_in_f64(x) },
        );
    }
}

#[test]
fn rms_norm_with_a_rotation_has_the_bits_of_the_two_operators() {
    let (l, heads, half) = (6, 3, 4);
    let [x, gain, weights] = [noise(l, 24, 1), noise(1, 24, 2), noise(l, 24, 3)];
    let run = |device: &Device, fused: bool| {
        let leaves = [&x, &gain].map(|x| x.upload(device).autodiff().require_grad());
        let [cos, sin] = angles(l, half).map(|angle| angle.upload(device));
        let (x, gain) = (leaves[0].clone(), leaves[1].clone().reshape([24]));
        let y = match fused {
            true => rms_rope(x, gain, Some([cos, sin]), heads, 1e-6),
            false => rope(rms_norm(x, gain, 1e-6), cos, sin, heads),
        };
        let mut found = seed(y.clone(), weights.upload(device)).backward();
        (download(y), leaves.map(|leaf| download(leaf.grad_remove(&mut found).unwrap())))
    };
    for device in devices() {
        assert_eq!(run(&device, true), run(&device, false), "{device:?}");
    }
}

fn gelu_in_f64(x: f64) -> f64 {
    x * 0.5 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// Its series, which has ten good digits up to 3; the rest of the function is 1 to nine.
fn erf(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    for n in 1..100 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    if x.abs() > 4.5 { x.signum() } else { sum * 2.0 / std::f64::consts::PI.sqrt() }
}

fn exact_gelu_in_f64(x: f64) -> f64 {
    x * 0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))
}

fn silu_in_f64(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

#[test]
fn activations_and_their_derivatives_match_f64() {
    let x = noise(7, 11, 1);
    let each = |x: &[Exact], f: fn(f64) -> f64| x[0].values.iter().map(|&v| f(v)).collect();
    check("gelu", std::slice::from_ref(&x), 1e-6, |x| gelu_tanh(x[0].clone()), |x| each(x, gelu_in_f64));
    check("exact gelu", std::slice::from_ref(&x), 1e-6, |x| gelu(x[0].clone()), |x| each(x, exact_gelu_in_f64));
    check("silu", &[x], 1e-6, |x| silu(x[0].clone()), |x| each(x, silu_in_f64));
}

#[test]
fn our_activations_are_exact_to_the_last_digits_at_every_size() {
    let values: Vec<f64> = (-6000..6000).map(|i| f64::from(i as f32 * 1e-3)).collect();
    let x = Exact { rows: 1, columns: values.len(), values };
    let on = x.upload(&Device::flex());
    for (name, y, f) in
        [("gelu", gelu_tanh(on.clone()), gelu_in_f64 as fn(f64) -> f64), ("silu", silu(on), silu_in_f64)]
    {
        for (&x, y) in x.values.iter().zip(download(y)) {
            // In the tail a relative error of the sigmoid's argument u shows u times larger in its value.
            let u = 1.6 * x.abs() + 0.072 * x.abs().powi(3);
            let allowed = 1e-12 + f(x).abs() * 2e-7 * (1.0 + u);
            assert!((f64::from(y) - f(x)).abs() <= allowed, "{name}({x}) = {y}, expected {}", f(x));
        }
    }
}

#[test]
fn gelu_is_within_three_tenths_of_a_millionth() {
    let values: Vec<f64> = (-6000..6000).map(|i| f64::from(i as f32 * 1e-3)).collect();
    let x = Exact { rows: 1, columns: values.len(), values };
    for device in devices() {
        for (&x, y) in x.values.iter().zip(download(gelu(x.upload(&device)))) {
            let (y, expected) = (f64::from(y), exact_gelu_in_f64(x));
            assert!((y - expected).abs() <= 3e-7 * (1.0 + x.abs()), "gelu({x}) = {y}, expected {expected}");
        }
    }
}

#[test]
fn activations_of_huge_arguments_are_the_limits() {
    let huge = [100.0, 1e4, 1e20, 3e38, -100.0, -1e4, -1e20, -3e38];
    // ATen's derivative of GELU is not a number where the square of its argument overflows.
    for (device, f) in
        devices().iter().flat_map(|d| [(d, gelu_tanh::<2> as fn(_) -> _), (d, gelu::<2>), (d, silu::<2>)])
    {
        let huge = if is_flex(device) { huge.as_slice() } else { &[100.0, 1e4, -100.0, -1e4] };
        let x = Exact { rows: 1, columns: huge.len(), values: huge.to_vec() };
        let leaf = x.upload(device).autodiff().require_grad();
        let y = f(leaf.clone());
        for (&x, y) in huge.iter().zip(download(y.clone())) {
            let expected = if x > 0.0 { x as f32 } else { 0.0 };
            assert!((y - expected).abs() <= 1e-30, "{x}: {y}");
        }
        let mut g = y.sum().backward();
        for (&x, d) in huge.iter().zip(download(leaf.grad_remove(&mut g).unwrap())) {
            let expected = if x > 0.0 { 1.0 } else { 0.0 };
            assert!((d - expected).abs() <= 1e-6, "derivative at {x}: {d}");
        }
    }
}

fn channel_norm_in_f64(x: &[Exact], then: fn(f64) -> f64) -> Vec<f64> {
    let (x, gain) = (&x[0], &x[1]);
    let norm = |p: usize| (0..x.rows).map(|c| x.at(c, p) * x.at(c, p)).sum::<f64>().sqrt().max(1e-12);
    let root = (x.rows as f64).sqrt();
    (0..x.rows).flat_map(|c| (0..x.columns).map(move |p| then(x.at(c, p) / norm(p) * root * gain.at(0, c)))).collect()
}

#[test]
fn channel_norm_and_its_gradients_match_f64() {
    for (c, positions) in [(5, 12), (3, 300), (1, 4)] {
        let inputs = [noise(c, positions, 1), noise(1, c, 2)];
        let four = |x: &Tensor<2>| x.clone().reshape([c, 2, positions / 4, 2]);
        let fused = |x: &[Tensor<2>], f: fn(Tensor<4>, Tensor<1>) -> Tensor<4>| {
            f(four(&x[0]), x[1].clone().reshape([c])).reshape([c, positions])
        };
        // With one channel the gradient of x is a difference of equal terms: 0, and nothing to be relative to.
        let inputs_tested: &[Exact] = if c == 1 { continue } else { &inputs };
        check("channel norm", inputs_tested, 1e-6, |x| fused(x, channel_norm), |x| channel_norm_in_f64(x, |y| y));
        check(
            "channel norm and silu",
            inputs_tested,
            1e-6,
            |x| fused(x, channel_norm_silu),
            |x| channel_norm_in_f64(x, silu_in_f64),
        );
    }
}

#[test]
fn the_pull_of_a_channel_norm_by_hand_is_the_recorded_one() {
    let (c, positions) = (6, 40);
    let (x, gain, cotangent) = (noise(c, positions, 1), noise(1, c, 2), noise(c, positions, 3));
    for device in devices() {
        let four = |x: &Exact| x.upload(&device).reshape([c, 2, positions / 4, 2]);
        let gain: Tensor<1> = gain.upload(&device).reshape([c]);
        let leaf = four(&x).autodiff().require_grad();
        let mut g = seed(channel_norm_silu(leaf.clone(), gain.clone()), four(&cotangent)).backward();
        let recorded = download(leaf.grad_remove(&mut g).unwrap());
        let by_hand = download(channel_norm_silu_pull(four(&x), gain.clone(), four(&cotangent)));
        assert_eq!(by_hand, recorded);
        if device.supports_dtype(DType::BF16) {
            let (x, cotangent) = (four(&x).cast(DType::BF16), four(&cotangent).cast(DType::BF16));
            let value = channel_norm_silu(x.clone(), gain.clone());
            let narrow = channel_norm_silu_pull(x, gain, cotangent);
            assert_eq!((value.dtype(), narrow.dtype()), (DType::BF16, DType::BF16));
            let recorded: Vec<f64> = recorded.iter().map(|&v| f64::from(v)).collect();
            assert_near("in bf16", &download(narrow.cast(DType::F32)), &recorded, 2.0 * BF16);
        }
    }
}

#[test]
fn a_channel_norm_after_other_frames_is_both_one_after_the_other() {
    let (c, positions) = (6, 40);
    let inputs = [noise(c, positions / 2, 3), noise(c, positions, 1), noise(1, c, 2)];
    let cotangent = noise(c, positions * 3 / 2, 4);
    for device in devices() {
        let gradients = |joined: fn(Tensor<4>, Tensor<4>, Tensor<1>) -> Tensor<4>| {
            let leaves: [Tensor<2>; 3] = inputs.each_ref().map(|x| x.upload(&device).autodiff().require_grad());
            let [past, x, gain] = leaves.clone();
            let (past, x) = (past.reshape([c, 1, 10, 2]), x.reshape([c, 2, 10, 2]));
            let y = joined(past, x, gain.reshape([c]));
            let mut g = seed(y.clone(), cotangent.upload(&device).reshape([c, 3, 10, 2])).backward();
            let gradients = leaves.map(|leaf| download(leaf.grad_remove(&mut g).unwrap()));
            (download(y), gradients)
        };
        let (y, pulled) = gradients(channel_norm_silu_after);
        let (expected, composed) = gradients(|past, x, gain| Tensor::cat(vec![past, channel_norm_silu(x, gain)], 1));
        assert_eq!(y, expected);
        assert_eq!(pulled, composed);
        let plain = |x: &Exact, frames: usize| x.upload(&device).reshape([c, frames, 10, 2]);
        let gain: Tensor<1> = inputs[2].upload(&device).reshape([c]);
        let unrecorded = channel_norm_silu_after(plain(&inputs[0], 1), plain(&inputs[1], 2), gain);
        assert_eq!(download(unrecorded), expected);
    }
}

#[test]
fn a_convolution_of_bf16_is_bf16() {
    let (x, weight) = (noise(3, 60, 1), noise(2, 81, 2));
    for device in bf16_devices() {
        let volume = x.upload(&device).reshape([3, 3, 4, 5]);
        let weight: Tensor<5> = weight.upload(&device).reshape([2, 3, 3, 3, 3]);
        let wide: Vec<f64> =
            download(conv3d(volume.clone(), weight.clone(), None, [0, 1, 1])).iter().map(|&v| f64::from(v)).collect();
        let (volume, weight) = (volume.cast(DType::BF16), weight.cast(DType::BF16));
        let narrow = conv3d(volume.clone(), weight.clone(), None, [0, 1, 1]);
        let bias = Tensor::zeros([2], (&device, DType::BF16));
        let fused = conv::fused_conv3d(volume, weight, bias, [0, 1, 1]).cast(DType::F32);
        assert_eq!(narrow.dtype(), DType::BF16);
        assert_near("in bf16", &download(narrow.cast(DType::F32)), &wide, BF16);
        assert_near("in bf16, by the kernel", &download(fused), &wide, BF16);
    }
}

#[test]
fn channel_norm_of_zeros_is_zero_with_finite_gradients() {
    for device in devices() {
        let x = Exact { rows: 4, columns: 8, values: vec![0.0; 32] }.upload(&device).reshape([4, 2, 2, 2]);
        let leaf = x.autodiff().require_grad();
        let gain = noise(1, 4, 1).upload(&device).reshape([4]).autodiff().require_grad();
        let y = channel_norm_silu(leaf.clone(), gain.clone());
        assert!(download(y.clone()).iter().all(|&v| v == 0.0));
        let mut g = y.sum().backward();
        assert!(download(leaf.grad_remove(&mut g).unwrap()).iter().all(|v| v.is_finite()));
        assert!(download(gain.grad_remove(&mut g).unwrap()).iter().all(|v| v.is_finite()));
    }
}

fn product_in_f64(a: &Exact, b: &Exact) -> Exact {
    let values = (0..a.rows)
        .flat_map(|i| (0..b.rows).map(move |j| (0..a.columns).map(|k| a.at(i, k) * b.at(j, k)).sum()))
        .collect();
    Exact { rows: a.rows, columns: b.rows, values }
}

#[test]
fn linear_layers_and_their_gradients_match_f64() {
    let (l, inputs, outputs, rank) = (5, 9, 6, 2);
    let plain = [noise(l, inputs, 1), noise(outputs, inputs, 2), noise(1, outputs, 3)];
    let base = |x: &[Exact]| -> Vec<f64> {
        let y = product_in_f64(&x[0], &x[1]);
        y.values.iter().enumerate().map(|(i, v)| v + x[2].values[i % outputs]).collect()
    };
    check("linear", &plain, 1e-6, |x| linear(x[0].clone(), x[1].clone(), Some(x[2].clone().reshape([outputs]))), base);
    check(
        "linear without bias",
        &plain[..2],
        1e-6,
        |x| linear(x[0].clone(), x[1].clone(), None),
        |x| product_in_f64(&x[0], &x[1]).values,
    );
    let with_lora = [plain.as_slice(), &[noise(rank, inputs, 4), noise(outputs, rank, 5)]].concat();
    check(
        "linear with a low-rank part",
        &with_lora,
        1e-6,
        |x| {
            let bias = x[2].clone().reshape([outputs]);
            linear_lora(x[0].clone(), x[1].clone(), Some(bias), x[3].clone(), x[4].clone(), 0.75)
        },
        |x| {
            let low = product_in_f64(&product_in_f64(&x[0], &x[3]), &x[4]);
            base(x).iter().zip(&low.values).map(|(y, low)| y + 0.75 * low).collect()
        },
    );
}

#[test]
fn products_and_their_gradients_match_f64() {
    check(
        "product",
        &[noise(5, 9, 1), noise(6, 9, 2)],
        1e-6,
        |x| product(x[0].clone(), x[1].clone().transpose()),
        |x| product_in_f64(&x[0], &x[1]).values,
    );
}

#[test]
fn operators_read_strided_tensors() {
    let x = noise(6, 10, 1);
    let swapped = Exact { rows: 10, columns: 6, values: (0..60).map(|i| x.at(i % 6, i / 6)).collect() };
    let expected: Vec<f64> = x.values[20..50].iter().map(|&v| silu_in_f64(v)).collect();
    for device in devices() {
        let on = x.upload(&device);
        let (a, b) = (silu(on.clone().transpose()), silu(swapped.upload(&device)));
        let b: Vec<f64> = download(b).iter().map(|&v| f64::from(v)).collect();
        assert_near("transposed", &download(a), &b, 2e-7);
        assert_near("narrow", &download(silu(on.clone().narrow(0, 2, 3))), &expected, 1e-6);
        // Heads that do not lie in order, as the VAE has them.
        let q = x.upload(&device).transpose();
        let [mixed, copied] =
            [q.clone(), swapped.upload(&device)].map(|q| attention(q.clone(), q.clone(), q, 2)).map(download);
        let copied: Vec<f64> = copied.iter().map(|&v| f64::from(v)).collect();
        assert_near("attention", &mixed, &copied, 1e-6);
    }
}

#[test]
fn seeds_give_the_gradients_of_the_weighted_sum() {
    let (x, weights) = (noise(4, 5, 1), noise(4, 5, 2));
    let expected: Vec<f64> = weights.values.iter().map(|w| 8.0 * w).collect();
    for device in devices() {
        let leaf = x.upload(&device).autodiff().require_grad();
        let (a, b) = (leaf.clone() * 3.0, leaf.clone() * 5.0);
        let mut g = (seed(a, weights.upload(&device)) + seed(b, weights.upload(&device))).backward();
        assert_near("seed", &download(leaf.grad_remove(&mut g).unwrap()), &expected, 1e-6);
    }
}

#[test]
fn convolution_and_its_gradients_match_f64() {
    for (size, kernel, padding) in [
        ([3, 5, 4], [3, 3, 3], [0, 1, 1]),
        ([2, 4, 5], [1, 3, 3], [0, 1, 1]),
        ([4, 2, 3], [3, 1, 1], [0, 0, 0]),
        ([2, 3, 3], [1, 1, 1], [0, 0, 0]),
        ([2, 4, 4], [2, 3, 2], [1, 0, 1]),
    ] {
        let (inputs, outputs) = (2, 3);
        let positions: usize = size.iter().product();
        let taps: usize = kernel.iter().product();
        let out: [usize; 3] = std::array::from_fn(|i| size[i] + 2 * padding[i] + 1 - kernel[i]);
        let operands = [noise(inputs, positions, 1), noise(outputs, inputs * taps, 2), noise(1, outputs, 3)];
        check(
            &format!("conv {size:?} {kernel:?} {padding:?}"),
            &operands,
            1e-6,
            |x| {
                let volume = x[0].clone().reshape([inputs, size[0], size[1], size[2]]);
                let weight = x[1].clone().reshape([outputs, inputs, kernel[0], kernel[1], kernel[2]]);
                let bias: Tensor<1> = x[2].clone().reshape([outputs]);
                let by_size = conv3d(volume.clone(), weight.clone(), Some(bias.clone()), padding);
                let y = conv::fused_conv3d(volume, weight, bias, padding);
                let by_size: Vec<f64> = download(by_size).iter().map(|&v| f64::from(v)).collect();
                assert_near("the kernel against Burn's", &download(y.clone()), &by_size, 2e-6);
                y.reshape([outputs, out.iter().product::<usize>()])
            },
            |x| {
                let mut y = Vec::new();
                for o in 0..outputs {
                    for p in 0..out.iter().product::<usize>() {
                        let at = [p / (out[1] * out[2]), p / out[2] % out[1], p % out[2]];
                        let mut sum = x[2].at(0, o);
                        for i in 0..inputs {
                            for k in 0..taps {
                                let tap = [k / (kernel[1] * kernel[2]), k / kernel[2] % kernel[1], k % kernel[2]];
                                let [t, r, c] = std::array::from_fn(|a| (at[a] + tap[a]).wrapping_sub(padding[a]));
                                if t < size[0] && r < size[1] && c < size[2] {
                                    sum += x[0].at(i, (t * size[1] + r) * size[2] + c) * x[1].at(o, i * taps + k);
                                }
                            }
                        }
                        y.push(sum);
                    }
                }
                y
            },
        );
    }
}

#[test]
fn the_pull_of_a_convolution_is_its_gradient() {
    // Flex filters the first two by another method than the others.
    for (channels, kernel, padding) in [
        ([32, 35], [3, 3, 3], [0, 1, 1]),
        ([33, 32], [1, 3, 3], [0, 0, 2]),
        ([2, 3], [3, 3, 3], [1, 1, 0]),
        ([18, 16], [3, 1, 1], [0, 0, 0]),
    ] {
        let ([inputs, outputs], size) = (channels, [3, 5, 4]);
        let taps: usize = kernel.iter().product();
        let out: [usize; 3] = std::array::from_fn(|i| size[i] + 2 * padding[i] + 1 - kernel[i]);
        let operands = [noise(inputs, 60, 1), noise(outputs, inputs * taps, 2), noise(1, outputs, 3)];
        let cotangent = noise(outputs, out.iter().product(), 4);
        for device in devices() {
            let x: Tensor<4> = operands[0].upload(&device).reshape([inputs, size[0], size[1], size[2]]);
            let weight: Tensor<5> =
                operands[1].upload(&device).reshape([outputs, inputs, kernel[0], kernel[1], kernel[2]]);
            let bias: Tensor<1> = operands[2].upload(&device).reshape([outputs]);
            let cotangent: Tensor<4> = cotangent.upload(&device).reshape([outputs, out[0], out[1], out[2]]);
            let wide = |x: Tensor<4>| download(x).iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let what = format!("{kernel:?} on {device:?}");

            let leaf = x.clone().autodiff().require_grad();
            let y = conv3d(leaf.clone(), weight.clone(), Some(bias.clone()), padding);
            let plain = module::conv3d(x.unsqueeze(), weight.clone(), Some(bias), conv::options(padding));
            assert_near(&what, &download(y.clone().inner()), &wide(plain.squeeze_dim(0)), 2e-6);

            let mut g = seed(y, cotangent.clone()).backward();
            let expected = wide(leaf.grad_remove(&mut g).unwrap());
            let pulled = conv::conv3d_pull(cotangent, weight, padding);
            assert_near(&format!("pull, {what}"), &download(pulled), &expected, 2e-6);
        }
    }
}

/// Rounded to bf16.
fn narrowed(x: &Exact) -> Exact {
    let values = x.values.iter().map(|&v| f64::from(half::bf16::from_f64(v).to_f32())).collect();
    Exact { values, ..x.clone() }
}

/// Three times the distance of neighbouring bf16 numbers, relative: operands are exact here, results and what a
/// backward pass hands on are rounded a few times.
const BF16: f64 = 3.0 / 256.0;

#[test]
fn products_in_bf16_match_f64_to_the_rounding_of_bf16() {
    let (l, inputs, outputs, rank) = (6, 40, 24, 4);
    let x = [noise(l, inputs, 1), noise(outputs, inputs, 2), noise(rank, inputs, 4), noise(outputs, rank, 5)];
    let x: Vec<Exact> = x.iter().map(narrowed).collect();
    let weights = narrowed(&noise(l, outputs, 9));
    let base = product_in_f64(&x[0], &x[1]);
    let low = product_in_f64(&product_in_f64(&x[0], &x[2]), &x[3]);
    let expected: Vec<f64> = base.values.iter().zip(&low.values).map(|(y, low)| y + 0.5 * low).collect();
    // d x = g (W + s B A), d A = s (g B)^T x, d B = s g^T (x A^T).
    let t = |x: &Exact| Exact {
        rows: x.columns,
        columns: x.rows,
        values: (0..x.columns).flat_map(|j| (0..x.rows).map(move |i| x.at(i, j))).collect(),
    };
    let d_inner = product_in_f64(&weights, &t(&x[3]));
    let low = product_in_f64(&d_inner, &t(&x[2]));
    let d_x: Vec<f64> =
        product_in_f64(&weights, &t(&x[1])).values.iter().zip(&low.values).map(|(a, b)| a + 0.5 * b).collect();
    let half = |x: Exact| x.values.iter().map(|v| 0.5 * v).collect::<Vec<_>>();
    let d_down = half(product_in_f64(&t(&d_inner), &t(&x[0])));
    let d_up = half(product_in_f64(&t(&weights), &t(&product_in_f64(&x[0], &x[2]))));
    for device in bf16_devices() {
        let [h, down, up] = [0, 2, 3].map(|i| x[i].upload(&device).autodiff().require_grad());
        let weight = x[1].upload(&device).cast(DType::BF16);
        let y = linear_lora(h.clone(), weight, None, down.clone(), up.clone(), 0.5);
        assert_eq!(y.dtype(), DType::F32);
        assert_near("value", &download(y.clone()), &expected, BF16);
        let mut g = seed(y, weights.upload(&device)).backward();
        for (what, leaf, expected) in [("x", h, &d_x), ("down", down, &d_down), ("up", up, &d_up)] {
            let d = leaf.grad_remove(&mut g).unwrap();
            assert_eq!(d.dtype(), DType::F32, "{what}");
            assert_near(&format!("d {what} on {device:?}"), &download(d), expected, BF16);
        }
    }
}

#[test]
fn a_small_low_rank_part_is_not_lost_beside_a_large_product_in_bf16() {
    for device in bf16_devices() {
        let ones = |rows: usize, columns: usize, value: f32| Tensor::<2>::full([rows, columns], value, &device);
        let (x, weight) = (ones(2, 8, 1.0), ones(3, 8, 125.0).cast(DType::BF16));
        let (down, up) = (ones(2, 8, 0.125), ones(3, 2, 0.5));
        let base = download(linear(x.clone(), weight.clone(), None));
        assert_eq!(base, [1000.0; 6], "{device:?}");
        assert_eq!(download(linear_lora(x, weight, None, down, up, 1.0)), [1001.0; 6], "{device:?}");
    }
}

#[test]
fn attention_in_bf16_is_that_in_f32_to_the_rounding_of_bf16() {
    for (lq, lk, causal) in [(40, 70, false), (33, 33, true), (5, 20, true)] {
        let inputs = [noise(lq, 32, 1), noise(lk, 32, 2), noise(lk, 32, 3)].map(|x| narrowed(&x));
        let weights = narrowed(&noise(lq, 32, 4));
        for device in bf16_devices() {
            let run = |products: Option<DType>| {
                let leaves = [0, 1, 2].map(|i| inputs[i].upload(&device).autodiff().require_grad());
                let [q, k, v] = leaves.clone();
                let y = attention_with(q, k, v, 4, AttentionOptions { causal, products, ..Default::default() });
                assert_eq!(y.dtype(), DType::F32);
                let mut g = seed(y.clone(), weights.upload(&device)).backward();
                let gradients = leaves.map(|leaf| download(leaf.grad_remove(&mut g).unwrap()));
                (download(y), gradients)
            };
            let ((exact, exact_gradients), (found, gradients)) = (run(None), run(Some(DType::BF16)));
            let wide = |x: &[f32]| x.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            assert_near("value", &found, &wide(&exact), BF16);
            for (found, exact) in gradients.iter().zip(&exact_gradients) {
                assert_near(&format!("gradient on {device:?}"), found, &wide(exact), BF16);
            }
        }
    }
}
