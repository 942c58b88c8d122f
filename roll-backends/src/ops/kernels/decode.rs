//! Decode attention on the CPU: one query per sequence, over the keys of its prompt and of the tokens generated since.

use std::ops::Range;

use rayon::prelude::*;

use super::attention::{exp_minus, maximum};
use super::matrix::UNSCALED;
use super::row_products::dots;
use super::simd::vectorised;
use crate::ops::DecodeCall;

/// Queries and keys of a register tile. What is left over at the ends is computed in smaller tiles.
const QUERIES: usize = 3;
const KEYS: usize = 4;

/// Attention of each query, a row of `q` `[N, heads * width]`, over the keys of its sequence. `prompts` and `tails` are
/// each keys and values, `[rows, key_heads * width]`. `key_ranges[i]` holds the rows of `prompts` and the rows of
/// `tails` that query i attends to. The bits of a result row do not depend on the other rows.
pub fn attend(
    call: &DecodeCall,
    width: usize,
    q: &[f32],
    prompts: [&[f32]; 2],
    tails: [&[f32]; 2],
    key_ranges: &[[Range<usize>; 2]],
) -> Vec<f32> {
    let (key_heads, scale) = (call.key_heads, call.factor(width));
    // Query heads that share a key head are adjacent, and computed together.
    let heads_per_key_head = call.heads / key_heads;
    let (group_width, stride) = (heads_per_key_head * width, key_heads * width);
    let mut out = vec![0.0; q.len()];
    let max_keys = key_ranges.iter().map(|[prompt, tail]| prompt.len() + tail.len()).max().unwrap_or(0);
    // A task is one key head of one query row.
    let tasks = out.par_chunks_mut(group_width.max(1)).zip(q.par_chunks(group_width.max(1))).enumerate();
    tasks.for_each_init(
        || vec![0.0; heads_per_key_head * max_keys],
        |scores, (task, (out, q))| {
            let ([prompt_rows, tail_rows], head) = (&key_ranges[task / key_heads], task % key_heads);
            let keys = prompt_rows.len() + tail_rows.len();
            let scores = &mut scores[..heads_per_key_head * keys];
            let layout = |rows: &Range<usize>, first_column: usize| Layout {
                width,
                stride,
                rows: rows.len(),
                score_columns: keys,
                first_column,
            };
            // Keys and values, their rows, and the column of the first row's score.
            let sources = [(prompts, prompt_rows, 0), (tails, tail_rows, prompt_rows.len())];
            for ([k, _], rows, first_column) in sources {
                if !rows.is_empty() {
                    let start = rows.start * stride + head * width;
                    score(q, &k[start..], scores, layout(rows, first_column));
                }
            }
            for row in scores.chunks_exact_mut(keys.max(1)) {
                row.iter_mut().for_each(|score| *score *= scale);
                if let Some(cap) = call.softcap {
                    row.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
                }
                let max = maximum(row);
                let sum = exp_minus(row, max, UNSCALED);
                row.iter_mut().for_each(|p| *p /= sum);
            }
            for ([_, v], rows, first_column) in sources {
                if !rows.is_empty() {
                    let start = rows.start * stride + head * width;
                    add_weighted_values(scores, &v[start..], out, layout(rows, first_column));
                }
            }
        },
    );
    out
}

/// Where the keys or values of one head lie, and where their scores lie.
#[derive(Clone, Copy)]
struct Layout {
    /// Numbers per head.
    width: usize,
    /// Distance between two rows of keys or values.
    stride: usize,
    /// Number of rows.
    rows: usize,
    /// Number of columns of the scores.
    score_columns: usize,
    /// Column of the first row's score.
    first_column: usize,
}

/// Writes the products of each query of `q` with the rows of `k` to `scores`.
fn score(q: &[f32], k: &[f32], scores: &mut [f32], layout: Layout) {
    let (rows, queries) = (layout.rows, q.len() / layout.width);
    for key in (0..rows).step_by(KEYS) {
        for query in (0..queries).step_by(QUERIES) {
            if rows - key < KEYS {
                for query in query..(query + QUERIES).min(queries) {
                    (key..rows).for_each(|key| score_tile::<1, 1>(q, k, scores, layout, [query, key]));
                }
                continue;
            }
            match queries - query {
                1 => score_tile::<1, KEYS>(q, k, scores, layout, [query, key]),
                2 => score_tile::<2, KEYS>(q, k, scores, layout, [query, key]),
                _ => score_tile::<QUERIES, KEYS>(q, k, scores, layout, [query, key]),
            }
        }
    }
}

/// Writes the scores of `Q` queries and `K` keys, from the given query and key on.
fn score_tile<const Q: usize, const K: usize>(
    q: &[f32],
    k: &[f32],
    scores: &mut [f32],
    Layout { width, stride, score_columns, first_column, .. }: Layout,
    [query, key]: [usize; 2],
) {
    let q = std::array::from_fn(|i| &q[(query + i) * width..][..width]);
    let k = std::array::from_fn(|i| &k[(key + i) * stride..][..width]);
    for (i, products) in dots::<Q, K>(q, k).iter().enumerate() {
        scores[(query + i) * score_columns + first_column + key..][..K].copy_from_slice(products);
    }
}

vectorised! {
    /// Adds rows of `v`, weighted by `scores`, to each head of `out`.
    fn add_weighted_values<M>(scores: &[f32], v: &[f32], out: &mut [f32], layout: Layout) {
        let Layout { width, stride, rows, score_columns, first_column } = layout;
        let rows_in_tiles = rows / KEYS * KEYS;
        for row in (0..rows_in_tiles).step_by(KEYS) {
            let v: [&[f32]; KEYS] = std::array::from_fn(|i| &v[(row + i) * stride..][..width]);
            for (query, out) in out.chunks_exact_mut(width).enumerate() {
                let weights = &scores[query * score_columns + first_column + row..][..KEYS];
                for (c, o) in out.iter_mut().enumerate() {
                    // The `KEYS` products, written out.
                    let sum = M::mul_add(weights[1], v[1][c], M::mul_add(weights[0], v[0][c], *o));
                    *o = M::mul_add(weights[3], v[3][c], M::mul_add(weights[2], v[2][c], sum));
                }
            }
        }
        for row in rows_in_tiles..rows {
            let v = &v[row * stride..][..width];
            for (query, out) in out.chunks_exact_mut(width).enumerate() {
                let weight = scores[query * score_columns + first_column + row];
                out.iter_mut().zip(v).for_each(|(o, v)| *o = M::mul_add(weight, *v, *o));
            }
        }
    }
}
