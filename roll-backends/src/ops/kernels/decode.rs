//! Attention of one query a sequence over keys that lie in two places: those of its prompt, and those of what was written
//! since.

use std::ops::Range;

use rayon::prelude::*;

use super::attention::{exp_minus, maximum};
use super::simd::{LANES, MulAdd, sum_lanes, vectorised};

/// Keys and values, row-major; both alike.
#[derive(Clone, Copy)]
pub struct KeysValues<'a> {
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
}

/// Sizes of one call. Queries are `[rows, key_heads * sharing * width]`, keys and values have `key_heads * width` columns.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Heads of keys and values.
    pub key_heads: usize,
    /// Query heads that share one of those; they lie side by side.
    pub sharing: usize,
    /// Numbers per head.
    pub width: usize,
    /// What products of queries and keys are multiplied by.
    pub scale: f32,
}

/// Attention of row i of `q` over the rows `places[i]` of `prompts` and of `tails`, in this order. What a row gets does not
/// depend on the others, to the bit.
pub fn attend(
    shape: Shape,
    q: &[f32],
    prompts: KeysValues<'_>,
    tails: KeysValues<'_>,
    places: &[[Range<usize>; 2]],
) -> Vec<f32> {
    let Shape { key_heads, sharing, width, .. } = shape;
    let (own, stride) = (sharing * width, key_heads * width);
    let mut out = vec![0.0; q.len()];
    let most = places.iter().map(|[a, b]| a.len() + b.len()).max().unwrap_or(0);
    let tasks = out.par_chunks_mut(own.max(1)).zip(q.par_chunks(own.max(1))).enumerate();
    tasks.for_each_init(
        || vec![0.0; sharing * most],
        |scores, (i, (out, q))| {
            let (place, head) = (&places[i / key_heads], i % key_heads);
            let keys = place[0].len() + place[1].len();
            let scores = &mut scores[..sharing * keys];
            let mut first = 0;
            for (all, rows) in [prompts, tails].into_iter().zip(place) {
                if !rows.is_empty() {
                    let start = rows.start * stride + head * width;
                    score(q, &all.k[start..], scores, [width, stride, rows.len(), keys, first]);
                    first += rows.len();
                }
            }
            for row in scores.chunks_exact_mut(keys.max(1)) {
                row.iter_mut().for_each(|score| *score *= shape.scale);
                let max = maximum(row);
                let sum = exp_minus(row, max, 1.0);
                row.iter_mut().for_each(|p| *p /= sum);
            }
            let mut first = 0;
            for (all, rows) in [prompts, tails].into_iter().zip(place) {
                if !rows.is_empty() {
                    let start = rows.start * stride + head * width;
                    mix(scores, &all.v[start..], out, [width, stride, rows.len(), keys, first]);
                    first += rows.len();
                }
            }
        },
    );
    out
}

vectorised! {
    /// Products of each query of `q` with rows of `k`, to the columns from the last of `sizes` on. `sizes`: numbers per
    /// head, from row to row of `k`, rows, columns of `scores`, first column.
    fn score(q: &[f32], k: &[f32], scores: &mut [f32], sizes: [usize; 5]) = score_body
}

#[inline(always)]
fn score_body<M: MulAdd>(q: &[f32], k: &[f32], scores: &mut [f32], sizes: [usize; 5]) {
    let [width, stride, rows, keys, first] = sizes;
    for (r, k) in k.chunks(stride).take(rows).enumerate() {
        let k = &k[..width];
        for (g, q) in q.chunks_exact(width).enumerate() {
            scores[g * keys + first + r] = dot::<M>(q, k);
        }
    }
}

#[inline(always)]
fn dot<M: MulAdd>(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane = M::mul_add(*a, *b, *lane);
        }
    }
    a_rest.iter().zip(b_rest).fold(sum_lanes(lanes), |sum, (a, b)| M::mul_add(*a, *b, sum))
}

vectorised! {
    /// Adds rows of `v`, weighed by `scores`, to each head of `out`; `sizes` as of [`score`].
    fn mix(scores: &[f32], v: &[f32], out: &mut [f32], sizes: [usize; 5]) = mix_body
}

#[inline(always)]
fn mix_body<M: MulAdd>(scores: &[f32], v: &[f32], out: &mut [f32], sizes: [usize; 5]) {
    let [width, stride, rows, keys, first] = sizes;
    for (r, v) in v.chunks(stride).take(rows).enumerate() {
        let v = &v[..width];
        for (g, out) in out.chunks_exact_mut(width).enumerate() {
            let p = scores[g * keys + first + r];
            out.iter_mut().zip(v).for_each(|(o, v)| *o = M::mul_add(p, *v, *o));
        }
    }
}
