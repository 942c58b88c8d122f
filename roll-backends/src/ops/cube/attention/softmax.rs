//! Softmax kernels of blockwise attention. One cube of units handles each row, and every score is read once or twice,
//! where composed operations would read and write it a dozen times.
//!
//! The scores of a block are `[heads, rows, columns]`, f32, row-major: the products of queries and keys before scaling.
//! Columns from `keys` on and rows past the last query are padding. Exponentials and weights of masked columns are 0.

use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::prelude::*;
use half::bf16;

use super::super::reduction::{max_over_units, sum_over_units};
use super::super::{cube_per_row, empty, empty_as};
use crate::ops::AttentionCall;

/// Units per row: a power of two, because sums are reduced as a tree.
const UNITS: u32 = 256;
/// A lower bound of all scores: the exponential of its distance to any score is 0.
const MIN_SCORE: f32 = -1e30;
/// Lower bound of the sum of a row, which is 0 if the row attends to no key.
const MIN_SUM: f32 = 1e-30;

/// The part of a call that a block of scores covers.
#[derive(Clone, Copy)]
pub struct Block {
    pub call: AttentionCall,
    /// Queries of the whole call, without padding.
    pub queries: usize,
    /// Keys of the whole call, without padding.
    pub keys: usize,
    /// The index of the query in the first row of each head.
    pub first_query: usize,
    /// Heads, rows and columns of the block.
    pub shape: [usize; 3],
}

impl Block {
    /// Number of rows of all heads.
    fn rows(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// The window, or a window of all keys.
    fn window(&self) -> usize {
        self.call.window.unwrap_or(self.keys).min(self.keys)
    }
}

/// The unnormalised softmax of a block.
pub struct Softmax {
    /// The exponentials, of the shape of the scores and the requested dtype; a single element if no dtype was
    /// requested.
    pub exponentials: CubeTensor,
    /// The largest score of each row, `[heads, rows, 1]`.
    pub max: CubeTensor,
    /// The reciprocal of the sum of the exponentials of each row, `[heads, rows, 1]`.
    pub inverse: CubeTensor,
}

/// Returns the softmax of `scores`, and its exponentials in `dtype` if given.
pub fn softmax(scores: &CubeTensor, block: Block, dtype: Option<DType>) -> Softmax {
    let [heads, rows, columns] = block.shape;
    let result = Softmax {
        // A kernel launch needs all operands. Without a dtype, this one is not written.
        exponentials: dtype.map_or_else(|| empty(scores, [1]), |dtype| empty_as(scores, block.shape, dtype)),
        max: empty(scores, [heads, rows, 1]),
        inverse: empty(scores, [heads, rows, 1]),
    };
    let (cubes, dim) = cube_per_row(scores, block.rows(), UNITS);
    let AttentionCall { scale, causal, softcap, .. } = block.call;
    let launch = match dtype {
        Some(DType::BF16) => exponentials::launch::<bf16>,
        _ => exponentials::launch::<f32>,
    };
    launch(
        &scores.client,
        cubes,
        dim,
        scores.required_address_type(),
        scores.clone().into_buffer_arg(),
        result.exponentials.clone().into_buffer_arg(),
        result.max.clone().into_buffer_arg(),
        result.inverse.clone().into_buffer_arg(),
        block.rows(),
        rows,
        columns,
        block.first_query,
        block.queries,
        block.keys,
        block.window(),
        scale,
        softcap.unwrap_or(1.0),
        causal,
        softcap.is_some(),
        dtype.is_some(),
        UNITS,
    );
    result
}

/// Computes, for a block of the backward pass, the weights `p` and the cotangents of the products of queries and keys,
/// `p (d_weights - mean) * scale`, both in `dtype`. `d_weights` holds the cotangents of the weights, in the layout of
/// the scores.
/// `max`, `inverse` and `mean` (the sum of a row's weights times their cotangents) have one number per row.
pub fn softmax_backward(
    scores: &CubeTensor,
    d_weights: &CubeTensor,
    [max, inverse, mean]: [CubeTensor; 3],
    block: Block,
    dtype: DType,
) -> [CubeTensor; 2] {
    let [weights, d_scores] = [(); 2].map(|()| empty_as(scores, block.shape, dtype));
    let (cubes, dim) = cube_per_row(scores, block.rows(), UNITS);
    let AttentionCall { scale, causal, softcap, .. } = block.call;
    let launch = match dtype {
        DType::BF16 => cotangents::launch::<bf16>,
        _ => cotangents::launch::<f32>,
    };
    launch(
        &scores.client,
        cubes,
        dim,
        scores.required_address_type(),
        scores.clone().into_buffer_arg(),
        d_weights.clone().into_buffer_arg(),
        max.into_buffer_arg(),
        inverse.into_buffer_arg(),
        mean.into_buffer_arg(),
        weights.clone().into_buffer_arg(),
        d_scores.clone().into_buffer_arg(),
        block.rows(),
        block.shape[1],
        block.shape[2],
        block.first_query,
        block.queries,
        block.keys,
        block.window(),
        scale,
        softcap.unwrap_or(1.0),
        causal,
        softcap.is_some(),
        UNITS,
    );
    [weights, d_scores]
}

/// The end of the range of keys that a query attends to.
#[cube]
fn key_end(query: usize, queries: usize, keys: usize, #[comptime] causal: bool) -> usize {
    let mut end = keys;
    if comptime!(causal) {
        // `query + keys - queries` may be negative.
        let reach = query + 1 + keys;
        end = 0usize;
        if reach > queries {
            end = reach - queries;
        }
        if end > keys {
            end = keys;
        }
    }
    end
}

/// The start of the range of keys that a query attends to: at most `window` keys before `end`.
#[cube]
fn key_begin(end: usize, window: usize) -> usize {
    let mut begin = 0usize;
    if end > window {
        begin = end - window;
    }
    begin
}

/// A score: the scaled and, if `is_capped`, soft-capped product of a query and a key.
#[cube]
fn score(product: f32, scale: f32, cap: f32, #[comptime] is_capped: bool) -> f32 {
    let mut s = product * scale;
    if comptime!(is_capped) {
        s = (s / cap).tanh() * cap;
    }
    s
}

/// [`softmax`] of one row per cube. `rows` counts the rows of all heads, and `first_query` is the query of each head's
/// first row. The exponentials are written to `out` if `writes_exponentials`.
#[cube(launch, address_type = "dynamic")]
fn exponentials<E: Float>(
    scores: &[f32],
    out: &mut [E],
    maxima: &mut [f32],
    inverses: &mut [f32],
    rows: usize,
    rows_per_head: usize,
    columns: usize,
    first_query: usize,
    queries: usize,
    keys: usize,
    window: usize,
    scale: f32,
    cap: f32,
    #[comptime] causal: bool,
    #[comptime] is_capped: bool,
    #[comptime] writes_exponentials: bool,
    #[comptime] units: u32,
) {
    if CUBE_POS >= rows {
        terminate!();
    }
    let start = CUBE_POS * columns;
    let step = units as usize;
    let query = first_query + CUBE_POS % rows_per_head;
    let end = key_end(query, queries, keys, causal);
    let begin = key_begin(end, window);
    let mut partial = Shared::<[f32]>::new_slice(units as usize);

    // The largest score of this unit's columns, then of the row.
    let mut unit_max = f32::new(MIN_SCORE);
    let mut i = begin + UNIT_POS as usize;
    while i < end {
        let larger: f32 = max(unit_max, score(scores[start + i], scale, cap, is_capped));
        unit_max = larger;
        i += step;
    }
    let top = max_over_units(&mut partial, unit_max);

    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < columns {
        let mut exponential = 0.0f32;
        if i >= begin && i < end {
            exponential = (score(scores[start + i], scale, cap, is_capped) - top).exp();
        }
        sum += exponential;
        if comptime!(writes_exponentials) {
            out[start + i] = E::cast_from(exponential);
        }
        i += step;
    }
    let sum = sum_over_units(&mut partial, sum);
    if UNIT_POS == 0 {
        maxima[CUBE_POS] = top;
        let divisor: f32 = max(sum, f32::new(MIN_SUM));
        inverses[CUBE_POS] = 1.0 / divisor;
    }
}

/// [`softmax_backward`] of one row per cube.
#[cube(launch, address_type = "dynamic")]
fn cotangents<E: Float>(
    scores: &[f32],
    d_weights: &[f32],
    maxima: &[f32],
    inverses: &[f32],
    means: &[f32],
    weights: &mut [E],
    d_scores: &mut [E],
    rows: usize,
    rows_per_head: usize,
    columns: usize,
    first_query: usize,
    queries: usize,
    keys: usize,
    window: usize,
    scale: f32,
    cap: f32,
    #[comptime] causal: bool,
    #[comptime] is_capped: bool,
    #[comptime] units: u32,
) {
    if CUBE_POS >= rows {
        terminate!();
    }
    let start = CUBE_POS * columns;
    let step = units as usize;
    let query = first_query + CUBE_POS % rows_per_head;
    let end = key_end(query, queries, keys, causal);
    let begin = key_begin(end, window);
    let top = maxima[CUBE_POS];
    let inverse = inverses[CUBE_POS];
    let mean = means[CUBE_POS];
    let mut i = UNIT_POS as usize;
    while i < columns {
        let mut weight = 0.0f32;
        let mut d_score = 0.0f32;
        if i >= begin && i < end {
            let s = score(scores[start + i], scale, cap, is_capped);
            weight = (s - top).exp() * inverse;
            d_score = weight * (d_weights[start + i] - mean) * scale;
            if comptime!(is_capped) {
                // The derivative of the soft cap.
                d_score *= 1.0 - s / cap * (s / cap);
            }
        }
        weights[start + i] = E::cast_from(weight);
        d_scores[start + i] = E::cast_from(d_score);
        i += step;
    }
}
