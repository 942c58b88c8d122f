//! Tests of rotary embedding, alone and after an RMS norm.

use burn_tensor::Device;

use super::norm::rms_norm_in_f64;
use super::{Exact, check, devices, download, noise};
use crate::ops::{rms_norm, rms_rope, rope, seed};

/// Cosines and sines of pseudo-random angles.
pub fn angles(rows: usize, half: usize) -> [Exact; 2] {
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

#[test]
fn rope_and_its_gradient_match_f64() {
    let (l, heads, half) = (6, 3, 5);
    let [cos, sin] = angles(l, half);
    check(
        "rope",
        &[noise(l, heads * half * 2, 1)],
        1e-6,
        |x| rope(x[0].clone(), cos.upload_like(&x[0]), sin.upload_like(&x[0]), heads),
        |x| rope_in_f64(&x[0].values, &[cos.clone(), sin.clone()], heads),
    );
}

#[test]
fn rms_rope_and_its_gradients_match_f64() {
    let (l, heads, half) = (6, 3, 4);
    let width = heads * half * 2;
    let rotation = angles(l, half);
    for rotated in [true, false] {
        check(
            &format!("rms norm, rotated: {rotated}"),
            &[noise(l, width, 1), noise(1, width, 2)],
            1e-6,
            |x| {
                let angles = rotated.then(|| rotation.each_ref().map(|angle| angle.upload_like(&x[0])));
                rms_rope(x[0].clone(), x[1].clone().reshape([width]), angles, heads, 1e-6)
            },
            |x| if rotated { rope_in_f64(&rms_norm_in_f64(x), &rotation, heads) } else { rms_norm_in_f64(x) },
        );
    }
}

#[test]
fn rms_rope_has_the_bits_of_norm_and_rope() {
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
