//! Tests of attention.

use burn_tensor::DType;

use super::{BF16, Exact, assert_near, bf16_devices, check, devices, download, noise, to_bf16};
use crate::device::is_gpu;
use crate::ops::{AttentionOptions, KeptAttention, attention, attention_with, seed};

fn attention_in_f64(x: &[Exact], heads: usize, scale: f64, causal: bool) -> Vec<f64> {
    let window = if causal { Some(usize::MAX) } else { None };
    softcapped_attention_in_f64(x, heads, scale, window, None)
}

/// The reference in f64. With a window, a query attends to the last `window` keys up to its own position; without one,
/// to all keys.
fn softcapped_attention_in_f64(
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
            |x| attention_with(x[0].clone(), x[1].clone(), x[2].clone(), 2, options.clone()),
            |x| attention_in_f64(x, 2, f64::from(0.3f32), true),
        );
    }
}

#[test]
fn attention_with_window_and_softcap_matches_f64() {
    for (lq, lk, window, softcap) in [(20, 20, 6, None), (20, 20, 40, Some(0.8)), (6, 23, 3, Some(2.0))] {
        let inputs = [noise(lq, 8, 1), noise(lk, 8, 2), noise(lk, 8, 3)];
        let options = AttentionOptions { causal: true, window: Some(window), softcap, ..Default::default() };
        check(
            &format!("attention {lq} {lk} in a window of {window}, bound {softcap:?}"),
            &inputs,
            1.5e-6,
            |x| attention_with(x[0].clone(), x[1].clone(), x[2].clone(), 2, options.clone()),
            |x| softcapped_attention_in_f64(x, 2, 0.5, Some(window), softcap.map(f64::from)),
        );
    }
}

#[test]
fn attention_with_window_matches_f64_over_many_blocks() {
    // Blocks have 87 query rows, and the window ends inside a block.
    let (q, k, v) = (noise(3000, 4, 1), noise(3000, 4, 2), noise(3000, 4, 3));
    for device in devices() {
        let options = AttentionOptions { causal: true, window: Some(100), ..Default::default() };
        let run = |rows: std::ops::Range<usize>| {
            let [q, k, v] = [&q, &k, &v].map(|x| x.upload(&device).slice([rows.clone(), 0..4]));
            download(attention_with(q, k, v, 1, options.clone()))
        };
        let (whole, part) = (run(0..3000), run(1400..2000));
        let part: Vec<f64> = part[4 * 99..].iter().map(|v| f64::from(*v)).collect();
        assert_near("rows that see a whole window", &whole[4 * 1499..4 * 2000], &part, 1e-6);
    }
}

#[test]
fn gradients_of_a_kept_result_are_those_of_a_recomputation() {
    let inputs = [noise(40, 32, 1), noise(33, 32, 2), noise(33, 32, 3)];
    for device in devices() {
        for products in [DType::F32, DType::BF16].into_iter().filter(|dtype| device.supports_dtype(*dtype)) {
            let kept = KeptAttention::default();
            let options = |kept: Option<&KeptAttention>| AttentionOptions {
                products: Some(products),
                kept: kept.cloned(),
                ..Default::default()
            };
            let qkv = || [0, 1, 2].map(|i| inputs[i].upload(&device));
            let gradients = |kept: Option<&KeptAttention>| {
                let leaves = qkv().map(|x| x.autodiff().require_grad());
                let [q, k, v] = leaves.clone();
                let y = attention_with(q, k, v, 4, options(kept));
                let mut gradients = seed(y.clone(), noise(40, 32, 4).upload(&device)).backward();
                let pulled = leaves.map(|x| download(x.grad_remove(&mut gradients).unwrap()));
                (download(y), pulled)
            };
            let [q, k, v] = qkv();
            let result = download(attention_with(q, k, v, 4, options(Some(&kept))));
            let expected = gradients(None);
            assert_eq!(result, expected.0, "{device:?}, {products:?}");
            // The second call finds nothing. Sums of gradients on GPUs have no order.
            for kept in [&kept, &kept] {
                let (y, found) = gradients(Some(kept));
                assert_eq!(y, result, "{device:?}, {products:?}");
                for (found, expected) in found.iter().zip(&expected.1) {
                    let expected: Vec<f64> = expected.iter().map(|v| f64::from(*v)).collect();
                    assert_near("gradient", found, &expected, if is_gpu(&device) { 1e-3 } else { 0.0 });
                }
            }
        }
    }
}

#[test]
fn attention_and_gradients_do_not_depend_on_block_size() {
    // 3000 keys result in blocks of 87 query rows.
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
fn attention_with_huge_or_equal_scores_matches_f64() {
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

#[test]
fn attention_in_bf16_matches_f32() {
    for (lq, lk, causal) in [(40, 70, false), (33, 33, true), (5, 20, true)] {
        let inputs = [noise(lq, 32, 1), noise(lk, 32, 2), noise(lk, 32, 3)].map(|x| to_bf16(&x));
        let weights = to_bf16(&noise(lq, 32, 4));
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
