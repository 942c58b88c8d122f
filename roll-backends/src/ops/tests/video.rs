//! Tests of attention over the number of tokens of a video, for which the full score matrix does not fit in memory.
//!
//! The cotangent is zero outside of a few rows. Only the probabilities of these rows contribute to the gradients, which
//! are computed in f64 within a second, while the kernel passes over every row.

use burn_tensor::{DType, Device};

use super::{BF16, Exact, assert_near, bf16_devices, download, noise, to_bf16};
use crate::ops::{AttentionOptions, attention_with, seed};

const HEADS: usize = 2;
const WIDTH: usize = 128;

/// GPUs only: on the CPU this takes minutes, and the other tests cover the operator.
fn gpus() -> Vec<Device> {
    bf16_devices().into_iter().filter(crate::device::is_gpu).collect()
}

/// Rows at both ends and some between, including a partial last block of the kernel.
fn rows(tokens: usize) -> Vec<usize> {
    let mut rows: Vec<usize> = (0..8).chain((0..16).map(|i| i * tokens / 16)).chain(tokens - 24..tokens).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// Returns, in f64, the attention values of the rows `chosen`, and the gradients of q, k and v for a cotangent that is
/// nonzero in these rows only. All are `[tokens, HEADS * WIDTH]`; values of other rows are zero.
fn exact(q: &Exact, k: &Exact, v: &Exact, d_out: &Exact, chosen: &[usize]) -> [Vec<f64>; 4] {
    let (tokens, columns) = (q.rows, q.columns);
    let mut found = std::array::from_fn(|_| vec![0.0; tokens * columns]);
    let [out, d_q, d_k, d_v] = &mut found;
    let scale = 1.0 / (WIDTH as f64).sqrt();
    for head in 0..HEADS {
        let part = |x: usize| x * columns + head * WIDTH..x * columns + (head + 1) * WIDTH;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for &i in chosen {
            let (q_i, d_i) = (&q.values[part(i)], &d_out.values[part(i)]);
            let scores: Vec<f64> = (0..tokens).map(|j| scale * dot(q_i, &k.values[part(j)])).collect();
            let largest = scores.iter().fold(f64::MIN, |m, &s| m.max(s));
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let d_p: Vec<f64> = (0..tokens).map(|j| dot(d_i, &v.values[part(j)])).collect();
            let mean = dot(&weights, &d_p) / sum;
            for (j, (weight, d_p)) in weights.iter().zip(&d_p).enumerate() {
                let p = weight / sum;
                let d_s = scale * p * (d_p - mean);
                for c in 0..WIDTH {
                    let (at_i, at_j) = (part(i).start + c, part(j).start + c);
                    out[at_i] += p * v.values[at_j];
                    d_q[at_i] += d_s * k.values[at_j];
                    d_k[at_j] += d_s * q.values[at_i];
                    d_v[at_j] += p * d_out.values[at_i];
                }
            }
        }
    }
    found
}

#[test]
fn bf16_attention_over_a_video_matches_f64() {
    // The last size is 81 frames of 480x480; not a multiple of 128, but 147 blocks and 84 rows.
    for tokens in [84, 128, 1364, 18_900] {
        let devices = gpus();
        if devices.is_empty() {
            return;
        }
        let [q, k, v] = [1, 2, 3].map(|seed| to_bf16(&noise(tokens, HEADS * WIDTH, seed)));
        let chosen = rows(tokens);
        let mut d_out = to_bf16(&noise(tokens, HEADS * WIDTH, 4));
        for i in (0..tokens).filter(|i| !chosen.contains(i)) {
            d_out.values[i * d_out.columns..(i + 1) * d_out.columns].fill(0.0);
        }
        let expected = exact(&q, &k, &v, &d_out, &chosen);
        for device in devices {
            let leaves = [&q, &k, &v].map(|x| x.upload(&device).autodiff().require_grad());
            let [a, b, c] = leaves.clone();
            let options = AttentionOptions { products: Some(DType::BF16), ..AttentionOptions::default() };
            let y = attention_with(a, b, c, HEADS, options);
            let mut g = seed(y.clone(), d_out.upload(&device)).backward();
            let mut value = download(y);
            assert!(value.iter().all(|v| v.is_finite()), "{tokens} tokens on {device:?}: not finite");
            for i in (0..tokens).filter(|i| !chosen.contains(i)) {
                value[i * q.columns..(i + 1) * q.columns].fill(0.0);
            }
            assert_near(&format!("{tokens} tokens on {device:?}"), &value, &expected[0], BF16);
            for ((what, leaf), expected) in ["q", "k", "v"].iter().zip(leaves).zip(&expected[1..]) {
                let gradient = download(leaf.grad_remove(&mut g).unwrap());
                assert_near(&format!("d {what} of {tokens} tokens on {device:?}"), &gradient, expected, BF16);
            }
        }
    }
}
