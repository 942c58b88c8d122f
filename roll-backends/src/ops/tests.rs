//! The fused operators against the same formulas in f64.
#![allow(clippy::unwrap_used)]

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::*;

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
    fn upload(&self) -> Tensor<2> {
        let values: Vec<f32> = self.values.iter().map(|&v| v as f32).collect();
        Tensor::from_data(TensorData::new(values, [self.rows, self.columns]), (&Device::flex(), DType::F32))
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        self.values[i * self.columns + j]
    }
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

/// Checks values and gradients of `fused` against `reference` and its central differences in f64, with every subset
/// of the inputs tracked. The objective is the sum of the result weighted by noise.
fn check(
    what: &str,
    inputs: &[Exact],
    tolerance: f64,
    fused: impl Fn(&[Tensor<2>]) -> Tensor<2>,
    reference: impl Fn(&[Exact]) -> Vec<f64>,
) {
    let expected = reference(inputs);
    let plain: Vec<_> = inputs.iter().map(Exact::upload).collect();
    let value = fused(&plain);
    let [rows, columns] = value.dims();
    assert_near(what, &download(value), &expected, tolerance);

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
    for subset in 1..1usize << inputs.len() {
        let is_tracked = |i: usize| subset >> i & 1 == 1;
        let leaves: Vec<_> = plain
            .iter()
            .enumerate()
            .map(|(i, x)| if is_tracked(i) { x.clone().autodiff().require_grad() } else { x.clone() })
            .collect();
        let value = fused(&leaves);
        let mut found = (value * weights.upload()).sum().backward();
        for (i, leaf) in leaves.iter().enumerate().filter(|(i, _)| is_tracked(*i)) {
            let gradient = download(leaf.grad_remove(&mut found).unwrap());
            assert_near(&format!("{what}: gradient {i} of subset {subset:b}"), &gradient, &gradients[i], tolerance);
        }
    }
}

fn attention_in_f64(x: &[Exact], heads: usize, scale: f64, causal: bool) -> Vec<f64> {
    let (q, k, v) = (&x[0], &x[1], &x[2]);
    let d = q.columns / heads;
    let mut out = vec![0.0; q.rows * q.columns];
    for h in 0..heads {
        for i in 0..q.rows {
            let visible = if causal { (i + 1 + k.rows - q.rows).min(k.rows) } else { k.rows };
            let scores: Vec<f64> = (0..visible)
                .map(|j| (0..d).map(|c| q.at(i, h * d + c) * k.at(j, h * d + c)).sum::<f64>() * scale)
                .collect();
            let max = scores.iter().cloned().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for (j, s) in scores.iter().enumerate() {
                for c in 0..d {
                    out[i * q.columns + h * d + c] += (s - max).exp() / sum * v.at(j, h * d + c);
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
        let options = AttentionOptions { scale: Some(0.3), causal: true };
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
fn attention_in_many_blocks_equals_attention_in_one_and_its_gradients_too() {
    // 3000 keys: blocks of 87 query rows.
    let (q, k, v) = (noise(300, 16, 1), noise(3000, 16, 2), noise(3000, 16, 3));
    let weights = noise(300, 16, 4);
    let run = |rows: std::ops::Range<usize>| {
        let leaves = [&q, &k, &v].map(|x| x.upload().autodiff().require_grad());
        let part = leaves[0].clone().slice([rows.clone(), 0..16]);
        let y = attention(part, leaves[1].clone(), leaves[2].clone(), 1);
        let mut g = (y.clone() * weights.upload().slice([rows, 0..16])).sum().backward();
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

#[test]
fn attention_with_huge_or_equal_scores_stays_exact() {
    let mut q = noise(9, 8, 1);
    q.values.iter_mut().for_each(|v| *v = f64::from((*v * 4000.0) as f32));
    let inputs = [q.clone(), noise(12, 8, 2), noise(12, 8, 3)];
    let leaves: Vec<_> = inputs.iter().map(|x| x.upload().autodiff().require_grad()).collect();
    let y = attention(leaves[0].clone(), leaves[1].clone(), leaves[2].clone(), 1);
    assert_near("huge", &download(y.clone()), &attention_in_f64(&inputs, 1, 8f64.sqrt().recip(), false), 1e-5);
    let mut g = y.sum().backward();
    for leaf in &leaves {
        assert!(download(leaf.grad_remove(&mut g).unwrap()).iter().all(|v| v.is_finite()));
    }
    q.values.fill(0.0);
    let inputs = [q, noise(12, 8, 2), noise(12, 8, 3)];
    let y = attention(inputs[0].upload(), inputs[1].upload(), inputs[2].upload(), 2);
    assert_near("equal", &download(y), &attention_in_f64(&inputs, 2, 0.5, false), 1e-6);
}
