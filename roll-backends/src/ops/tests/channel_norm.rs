//! Tests of the channel norm.

use burn_tensor::{DType, Tensor};

use super::activation::silu_in_f64;
use super::{BF16, Exact, assert_near, check, devices, download, noise};
use crate::ops::{channel_norm, channel_norm_silu, channel_norm_silu_after, channel_norm_silu_pull, seed};

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
        // The gradient of x with one channel is a difference of equal terms, i.e. 0, and a relative tolerance is
        // meaningless.
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
fn channel_norm_vjp_matches_autodiff() {
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
fn channel_norm_after_past_frames_matches_concatenation() {
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
