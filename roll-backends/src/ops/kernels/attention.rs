//! Scaled dot-product attention on the CPU, forward and backward, per head and block of query rows.
//!
//! Only the probabilities of one block exist at a time; the backward pass recomputes them from each row's softmax
//! statistics.

use std::ops::Range;

use rayon::prelude::*;

use super::matrix::{Threads, UNSCALED, Update, View, ViewMut};
use super::parallel::{ELEMENT_COST, min_items_per_task};
use super::simd::{LANES, exp, sum_lanes, vectorised};
use crate::ops::AttentionCall;

/// Options and sizes of one call. q is `[queries, heads * width]`, k and v are `[keys, heads * width]`, row-major.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    pub call: AttentionCall,
    pub queries: usize,
    pub keys: usize,
    /// Numbers per head.
    pub width: usize,
}

/// Target number of scores of a block (1 MiB), with which they stay in the cache.
const BLOCK_SCORES: usize = 1 << 18;
/// Least and greatest number of query rows per block: fewer make products slow, more make too few tasks.
const MIN_BLOCK_ROWS: usize = 16;
const MAX_BLOCK_ROWS: usize = 256;

impl AttentionShape {
    fn channels(&self) -> usize {
        self.call.heads * self.width
    }

    /// Number of query rows per block.
    fn block_rows(&self) -> usize {
        (BLOCK_SCORES / self.keys.max(1)).clamp(MIN_BLOCK_ROWS, MAX_BLOCK_ROWS).min(self.queries.max(1))
    }

    /// The keys that a query attends to.
    fn visible(&self, query: usize) -> Range<usize> {
        let end = if self.call.causal {
            (query + 1 + self.keys).saturating_sub(self.queries).min(self.keys)
        } else {
            self.keys
        };
        end.saturating_sub(self.call.window.unwrap_or(end))..end
    }

    /// The keys that at least one of the queries attends to.
    fn visible_to(&self, queries: Range<usize>) -> Range<usize> {
        self.visible(queries.start).start..self.visible(queries.end - 1).end
    }

    /// Writes the scores of the `rows` queries in `q` for the keys in `k` to `scores`, `[rows, keys]`.
    fn scores(&self, [q, k]: [View; 2], scores: &mut [f32], rows: usize) {
        let keys = scores.len() / rows;
        ViewMut::new(scores, rows, keys).product(q, k.t(), self.call.scale, Update::Overwrite, Threads::One);
        if let Some(cap) = self.call.softcap {
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
    }

    /// The columns of one head of `data`, `[rows, heads * width]`.
    fn head<'a>(&self, data: &'a [f32], rows: usize, head: usize) -> View<'a> {
        View::new(data, rows, self.channels()).columns(head * self.width..(head + 1) * self.width)
    }
}

/// The softmax statistics of a row, for the backward pass. They are not combined to one log-sum-exp: with scores of
/// some thousands, its rounding would be visible in the probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowSoftmax {
    /// Largest score.
    pub max: f32,
    /// The reciprocal of the sum of `exp(score - max)`; 0 for a row without keys.
    pub inverse_sum: f32,
}

/// Writes the attended values to `out` `[queries, heads * width]` and the softmax statistics to `softmax`
/// `[heads, queries]`. A row without keys becomes zero.
pub fn forward(shape: AttentionShape, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32], softmax: &mut [RowSoftmax]) {
    if out.is_empty() {
        return;
    }
    let block = shape.block_rows();
    let heads = ViewMut::new(out, shape.queries, shape.channels()).split_columns(shape.width);
    let mut tasks = Vec::new();
    for (head, (out, softmax)) in heads.into_iter().zip(softmax.chunks_mut(shape.queries)).enumerate() {
        let blocks = out.split_rows(block).into_iter().zip(softmax.chunks_mut(block));
        for (i, (out, softmax)) in blocks.enumerate() {
            tasks.push(ForwardTask { head, first_query: i * block, out, softmax });
        }
    }
    // Two products, and two passes over the scores.
    let work = block * shape.keys * (2 * shape.width + 2 * ELEMENT_COST);
    tasks
        .into_par_iter()
        .with_min_len(min_items_per_task(work))
        .for_each_init(|| vec![0.0; block * shape.keys], |scores, task| task.run(shape, [q, k, v], scores));
}

/// A block of query rows of one head, from `first_query` on, with the parts of the results that it writes.
struct ForwardTask<'a> {
    head: usize,
    first_query: usize,
    out: ViewMut<'a>,
    softmax: &'a mut [RowSoftmax],
}

impl ForwardTask<'_> {
    /// Computes the results; see [`forward`]. `scores` is scratch memory for one block.
    fn run(self, shape: AttentionShape, [q, k, v]: [&[f32]; 3], scores: &mut [f32]) {
        let Self { head, first_query, mut out, softmax } = self;
        let rows = out.rows();
        let attended = shape.visible_to(first_query..first_query + rows);
        let keys = attended.len();
        let q = shape.head(q, shape.queries, head).rows(first_query..first_query + rows);
        let k = shape.head(k, shape.keys, head).rows(attended.clone());
        let v = shape.head(v, shape.keys, head).rows(attended.clone());
        let scores = &mut scores[..rows * keys];
        shape.scores([q, k], scores, rows);
        for (i, row) in scores.chunks_exact_mut(keys.max(1)).enumerate() {
            let visible = mask(row, shape.visible(first_query + i), attended.start);
            if !visible.is_empty() {
                let max = maximum(visible);
                softmax[i] = RowSoftmax { max, inverse_sum: 1.0 / exp_minus(visible, max, UNSCALED) };
            }
        }
        // `scores` now holds exponentials. The sums of exponentials divide the products, which usually are fewer
        // numbers than the exponentials.
        out.product(View::new(scores, rows, keys), v, UNSCALED, Update::Overwrite, Threads::One);
        for (i, row) in softmax.iter().enumerate() {
            out.row(i).iter_mut().for_each(|o| *o *= row.inverse_sum);
        }
    }
}

/// Operands and results of [`forward`], and the cotangent of its output.
#[derive(Clone, Copy)]
pub struct SavedAttention<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub out: &'a [f32],
    /// The softmax statistics, `[heads, queries]`.
    pub softmax: &'a [RowSoftmax],
    pub d_out: &'a [f32],
}

/// Returns the gradients of q, k and v; `None` if not wanted.
pub fn backward(
    shape: AttentionShape,
    saved: SavedAttention,
    [q_wanted, k_wanted, v_wanted]: [bool; 3],
) -> [Option<Vec<f32>>; 3] {
    let (queries, keys, channels) = (shape.queries, shape.keys, shape.channels());
    let block = shape.block_rows();
    let blocks = queries.div_ceil(block);
    // If there are fewer heads than threads, the blocks of a head are split into shares, each with its own partial
    // sums.
    let shares = rayon::current_num_threads().div_ceil(shape.call.heads.max(1)).min(blocks).max(1);
    let mut dq = vec![0.0; if q_wanted { queries * channels } else { 0 }];
    let mut dk: Vec<_> = (0..shares).map(|_| vec![0.0; if k_wanted { keys * channels } else { 0 }]).collect();
    let mut dv: Vec<_> = (0..shares).map(|_| vec![0.0; if v_wanted { keys * channels } else { 0 }]).collect();
    if queries * keys * channels > 0 {
        let rows_per_share = blocks.div_ceil(shares) * block;
        // For each head, the rows of dq that each share computes, in the order of the shares.
        let mut dq_parts = by_head(&mut dq, q_wanted, queries, shape)
            .into_iter()
            .map(|head| head.map_or_else(Vec::new, |head| head.split_rows(rows_per_share)).into_iter())
            .collect::<Vec<_>>();
        let mut tasks = Vec::new();
        for (share, (dk, dv)) in dk.iter_mut().zip(&mut dv).enumerate() {
            let parts = by_head(dk, k_wanted, keys, shape).into_iter().zip(by_head(dv, v_wanted, keys, shape));
            for (head, (dk, dv)) in parts.enumerate() {
                // The tasks of a head come in the order of the shares, as its parts of dq do.
                let dq = dq_parts[head].next();
                tasks.push(BackwardTask { head, first_query: share * rows_per_share, dq, dk, dv });
            }
        }
        // Five products, and two passes over the scores.
        let work = rows_per_share * keys * (5 * shape.width + 2 * ELEMENT_COST);
        tasks.into_par_iter().with_min_len(min_items_per_task(work)).for_each_init(
            || Scratch {
                probabilities: vec![0.0; block * keys],
                d_scores: vec![0.0; block * keys],
                slopes: vec![0.0; if shape.call.softcap.is_some() { block * keys } else { 0 }],
            },
            |scratch, task| {
                let end = (task.first_query + rows_per_share).min(queries);
                task.run(shape, &saved, block, end, scratch);
            },
        );
    }
    [q_wanted.then_some(dq), k_wanted.then(|| sum_parts(dk)), v_wanted.then(|| sum_parts(dv))]
}

/// The columns of each head of `data`, `[rows, heads * width]`; one `None` per head if the gradient is not wanted.
fn by_head(data: &mut [f32], is_wanted: bool, rows: usize, shape: AttentionShape) -> Vec<Option<ViewMut<'_>>> {
    if !is_wanted {
        return (0..shape.call.heads).map(|_| None).collect();
    }
    ViewMut::new(data, rows, shape.channels()).split_columns(shape.width).into_iter().map(Some).collect()
}

/// Numbers per task of [`sum_parts`].
const CHUNK: usize = 1 << 14;

/// Sum of the shares' partial sums.
fn sum_parts(parts: Vec<Vec<f32>>) -> Vec<f32> {
    let mut parts = parts.into_iter();
    let mut sum = parts.next().unwrap_or_default();
    for part in parts {
        sum.par_chunks_mut(CHUNK)
            .zip(part.par_chunks(CHUNK))
            .for_each(|(sum, part)| sum.iter_mut().zip(part).for_each(|(s, p)| *s += p));
    }
    sum
}

/// Scratch memory of a thread: one number per score of a block.
struct Scratch {
    probabilities: Vec<f32>,
    d_scores: Vec<f32>,
    /// Derivatives of the soft cap; empty without one.
    slopes: Vec<f32>,
}

/// One share of the query rows of one head, from `first_query` on, with the parts of the gradients that it adds to.
struct BackwardTask<'a> {
    head: usize,
    first_query: usize,
    dq: Option<ViewMut<'a>>,
    dk: Option<ViewMut<'a>>,
    dv: Option<ViewMut<'a>>,
}

impl BackwardTask<'_> {
    /// Computes the gradients through the query rows up to `end`, `block` rows at a time.
    fn run(self, shape: AttentionShape, saved: &SavedAttention, block: usize, end: usize, scratch: &mut Scratch) {
        let Self { head, first_query, dq, mut dk, mut dv } = self;
        let mut dq_blocks = dq.map_or_else(Vec::new, |dq| dq.split_rows(block)).into_iter();
        for start in (first_query..end).step_by(block) {
            let stop = (start + block).min(end);
            let attended = shape.visible_to(start..stop);
            let (rows, keys) = (stop - start, attended.len());
            let dq = dq_blocks.next();
            if keys == 0 {
                continue;
            }
            let q = shape.head(saved.q, shape.queries, head).rows(start..stop);
            let out = shape.head(saved.out, shape.queries, head).rows(start..stop);
            let d_out = shape.head(saved.d_out, shape.queries, head).rows(start..stop);
            let k = shape.head(saved.k, shape.keys, head).rows(attended.clone());
            let v = shape.head(saved.v, shape.keys, head).rows(attended.clone());
            let softmax = &saved.softmax[head * shape.queries..][start..stop];

            // The scores, replaced below by the probabilities.
            let p = &mut scratch.probabilities[..rows * keys];
            shape.scores([q, k], p, rows);
            if let Some(cap) = shape.call.softcap {
                let slopes = scratch.slopes.iter_mut().zip(&*p);
                slopes.for_each(|(slope, score)| *slope = 1.0 - (score / cap) * (score / cap));
            }
            for (i, row) in p.chunks_exact_mut(keys).enumerate() {
                let visible = mask(row, shape.visible(start + i), attended.start);
                exp_minus(visible, softmax[i].max, softmax[i].inverse_sum);
            }
            let p = View::new(p, rows, keys);
            if let Some(dv) = &mut dv {
                dv.rows_mut(attended.clone()).product(p.t(), d_out, UNSCALED, Update::Add, Threads::One);
            }
            if dq.is_none() && dk.is_none() {
                continue;
            }
            // The cotangents of the probabilities, replaced below by those of the products of queries and keys.
            let ds = &mut scratch.d_scores[..rows * keys];
            ViewMut::new(ds, rows, keys).product(d_out, v.t(), UNSCALED, Update::Overwrite, Threads::One);
            for (i, ds) in ds.chunks_exact_mut(keys).enumerate() {
                let mean = dot(out.row(i), d_out.row(i)); // equals sum(p ds), because out is sum(p v)
                softmax_backward(ds, p.row(i), mean, shape.call.scale);
            }
            if shape.call.softcap.is_some() {
                ds.iter_mut().zip(&scratch.slopes).for_each(|(ds, slope)| *ds *= slope);
            }
            let ds = View::new(ds, rows, keys);
            if let Some(mut dq) = dq {
                dq.product(ds, k, UNSCALED, Update::Overwrite, Threads::One);
            }
            if let Some(dk) = &mut dk {
                dk.rows_mut(attended.clone()).product(ds.t(), q, UNSCALED, Update::Add, Threads::One);
            }
        }
    }
}

/// Zeroes the masked scores of a row and returns its unmasked scores. `row` begins at key `first_key`; the query
/// attends to the keys `visible`.
fn mask(row: &mut [f32], visible: Range<usize>, first_key: usize) -> &mut [f32] {
    let columns = visible.start.saturating_sub(first_key)..visible.end.saturating_sub(first_key);
    row[..columns.start].fill(0.0);
    row[columns.end..].fill(0.0);
    &mut row[columns]
}

vectorised! {
    /// The maximum of `row`; negative infinity if it is empty.
    pub fn maximum<M>(row: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = row.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane = if x > *lane { x } else { *lane };
            }
        }
        rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, &b| a.max(b))
    }

    /// Replaces each `x` by `exp(x - offset) * factor` and returns the sum of the exponentials.
    pub fn exp_minus<M>(row: &mut [f32], offset: f32, factor: f32) -> f32 {
        let mut lanes = [0.0; LANES];
        let (chunks, rest) = row.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                let y = exp::<M>(*x - offset);
                *lane += y;
                *x = y * factor;
            }
        }
        let mut sum = sum_lanes(lanes);
        for x in rest {
            let y = exp::<M>(*x - offset);
            sum += y;
            *x = y * factor;
        }
        sum
    }
}

/// Replaces each number by its exponential and returns their sum.
pub fn exponentials(row: &mut [f32]) -> f32 {
    let offset = 0.0;
    exp_minus(row, offset, UNSCALED)
}

vectorised! {
    /// Replaces `ds`, the cotangents of the probabilities p of a row, by the cotangents of the products of query and
    /// keys: `p * (ds - mean) * scale`, where `mean` is `sum(p ds)`.
    fn softmax_backward<M>(ds: &mut [f32], p: &[f32], mean: f32, scale: f32) {
        for (ds, &p) in ds.iter_mut().zip(p) {
            *ds = p * (*ds - mean) * scale;
        }
    }

    fn dot<M>(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0; LANES];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        for (a, b) in a.iter().zip(b) {
            for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
                *lane = M::mul_add(a, b, *lane);
            }
        }
        sum_lanes(lanes) + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
    }
}
