//! Decode attention on the CPU: one query per sequence, over the keys of its prompt and of the tokens generated since.

use std::ops::Range;

use rayon::prelude::*;

use super::attention::{exp_minus, maximum};
use super::row_products::dots;
use super::simd::vectorised;
use crate::ops::DecodeCall;

/// Attention of row i of `q` over the rows `key_ranges[i]` of `prompts` and `tails` (keys and values), in this order.
/// Heads have `width` numbers. A row's bits do not depend on the other rows.
pub fn attend(
    call: &DecodeCall,
    width: usize,
    q: &[f32],
    prompts: [&[f32]; 2],
    tails: [&[f32]; 2],
    key_ranges: &[[Range<usize>; 2]],
) -> Vec<f32> {
    let (key_heads, scale) = (call.key_heads, call.factor(width));
    // Query heads that share a key head; they are adjacent.
    let sharing = call.heads / key_heads;
    let (group_width, stride) = (sharing * width, key_heads * width);
    let mut out = vec![0.0; q.len()];
    let max_keys = key_ranges.iter().map(|[a, b]| a.len() + b.len()).max().unwrap_or(0);
    let tasks = out.par_chunks_mut(group_width.max(1)).zip(q.par_chunks(group_width.max(1))).enumerate();
    tasks.for_each_init(
        || vec![0.0; sharing * max_keys],
        |scores, (i, (out, q))| {
            let (ranges, head) = (&key_ranges[i / key_heads], i % key_heads);
            let keys = ranges[0].len() + ranges[1].len();
            let scores = &mut scores[..sharing * keys];
            // Tensors and their rows, and the column of the first one's score.
            let sources = [(prompts, &ranges[0], 0), (tails, &ranges[1], ranges[0].len())];
            let sources = sources.into_iter().filter(|(_, rows, _)| !rows.is_empty());
            for ([k, _], rows, first) in sources.clone() {
                let start = rows.start * stride + head * width;
                score(q, &k[start..], scores, [width, stride, rows.len(), keys, first]);
            }
            for row in scores.chunks_exact_mut(keys.max(1)) {
                row.iter_mut().for_each(|score| *score *= scale);
                if let Some(cap) = call.softcap {
                    row.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
                }
                let max = maximum(row);
                let sum = exp_minus(row, max, 1.0);
                row.iter_mut().for_each(|p| *p /= sum);
            }
            for ([_, v], rows, first) in sources {
                let start = rows.start * stride + head * width;
                add_weighted_values(scores, &v[start..], out, [width, stride, rows.len(), keys, first]);
            }
        },
    );
    out
}

/// Writes the products of each query of `q` with the rows of `k` to `scores`. `sizes` are: width of a head, stride
/// between rows of `k`, number of rows, columns of `scores`, first column to write.
fn score(q: &[f32], k: &[f32], scores: &mut [f32], sizes: [usize; 5]) {
    let [width, _, rows, ..] = sizes;
    let sharing = q.len() / width;
    for r in (0..rows).step_by(KEYS) {
        for g in (0..sharing).step_by(QUERIES) {
            match (rows - r >= KEYS, sharing - g) {
                (true, 1) => score_tile::<1, KEYS>(q, k, scores, sizes, [g, r]),
                (true, 2) => score_tile::<2, KEYS>(q, k, scores, sizes, [g, r]),
                (true, _) => score_tile::<QUERIES, KEYS>(q, k, scores, sizes, [g, r]),
                (false, left) => {
                    for g in g..g + left.min(QUERIES) {
                        (r..rows).for_each(|r| score_tile::<1, 1>(q, k, scores, sizes, [g, r]));
                    }
                }
            }
        }
    }
}

/// Queries and keys of a register tile.
const QUERIES: usize = 3;
const KEYS: usize = 4;

fn score_tile<const R: usize, const O: usize>(
    q: &[f32],
    k: &[f32],
    scores: &mut [f32],
    [width, stride, _, keys, first]: [usize; 5],
    [query, key]: [usize; 2],
) {
    let q = std::array::from_fn(|g| &q[(query + g) * width..][..width]);
    let k = std::array::from_fn(|r| &k[(key + r) * stride..][..width]);
    for (g, products) in dots::<R, O>(q, k).iter().enumerate() {
        scores[(query + g) * keys + first + key..][..O].copy_from_slice(products);
    }
}

vectorised! {
    /// Adds rows of `v`, weighted by `scores`, to each head of `out`; `sizes` are those of [`score`].
    fn add_weighted_values<M>(scores: &[f32], v: &[f32], out: &mut [f32], sizes: [usize; 5]) {
        let [width, stride, rows, keys, first] = sizes;
        let whole = rows / KEYS * KEYS;
        for r in (0..whole).step_by(KEYS) {
            let v: [&[f32]; KEYS] = std::array::from_fn(|i| &v[(r + i) * stride..][..width]);
            for (g, out) in out.chunks_exact_mut(width).enumerate() {
                let p = &scores[g * keys + first + r..][..KEYS];
                for (c, o) in out.iter_mut().enumerate() {
                    let sum = M::mul_add(p[1], v[1][c], M::mul_add(p[0], v[0][c], *o));
                    *o = M::mul_add(p[3], v[3][c], M::mul_add(p[2], v[2][c], sum));
                }
            }
        }
        for r in whole..rows {
            let v = &v[r * stride..][..width];
            for (g, out) in out.chunks_exact_mut(width).enumerate() {
                let p = scores[g * keys + first + r];
                out.iter_mut().zip(v).for_each(|(o, v)| *o = M::mul_add(p, *v, *o));
            }
        }
    }
}
