//! Decode attention on the CPU: one query per sequence, over the keys of its prompt and of the tokens generated since.

use std::ops::Range;

use rayon::prelude::*;

use super::attention::{exp_minus, maximum};
use super::row_products::dots;
use super::simd::vectorised;

/// Keys and values, row-major, of the same shape.
#[derive(Clone, Copy)]
pub struct KeysValues<'a> {
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
}

/// Sizes of one call. Queries are `[rows, key_heads * sharing * width]`, keys and values have `key_heads * width`
/// columns.
#[derive(Clone, Copy, Debug)]
pub struct DecodeShape {
    /// Heads of keys and values.
    pub key_heads: usize,
    /// Query heads per key head; they are adjacent.
    pub sharing: usize,
    /// Numbers per head.
    pub width: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Scores `s` become `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
}

/// Attention of row i of `q` over the rows `key_ranges[i]` of `prompts` and `tails`, in this order. A row's bits do not
/// depend on the other rows.
pub fn attend(
    shape: DecodeShape,
    q: &[f32],
    prompts: KeysValues<'_>,
    tails: KeysValues<'_>,
    key_ranges: &[[Range<usize>; 2]],
) -> Vec<f32> {
    let DecodeShape { key_heads, sharing, width, .. } = shape;
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
            for (all, rows, first) in sources.clone() {
                let start = rows.start * stride + head * width;
                score(q, &all.k[start..], scores, [width, stride, rows.len(), keys, first]);
            }
            for row in scores.chunks_exact_mut(keys.max(1)) {
                row.iter_mut().for_each(|score| *score *= shape.scale);
                if let Some(cap) = shape.softcap {
                    row.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
                }
                let max = maximum(row);
                let sum = exp_minus(row, max, 1.0);
                row.iter_mut().for_each(|p| *p /= sum);
            }
            for (all, rows, first) in sources {
                let start = rows.start * stride + head * width;
                add_weighted_values(scores, &all.v[start..], out, [width, stride, rows.len(), keys, first]);
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
