//! Blockwise scaled dot-product attention composed of primitive operations, forward and backward: some heads and a
//! block of query rows at a time. Only the scores of one block exist at a time; the backward pass recomputes them.
//!
//! Scores, probabilities and sums are f32 whatever the operands are: rounding a score of ten to bf16 changes its
//! probability by four percent. Operands of products have the dtype of q, k and v.

use std::ops::Range;

use burn_tensor::{DType, TensorData};

use super::AttentionCall;
use crate::backend::{TensorMetadata, tensor::FloatTensor as Floats};
use crate::ops::expression::Expression;
use crate::ops::operator::Cotangents;
use crate::ops::product::ProductKernel;

/// Scores of one block (64 MiB). A few temporaries have the same size.
const BLOCK_SCORES: usize = 1 << 24;
/// Number of query rows of each head that a block of several heads has room for, or all query rows if a call has fewer.
/// A block without this room covers one head.
const ROWS_PER_HEAD: usize = 128;
/// Bias of masked scores, which makes their exponential 0 relative to that of any other score.
const MASKED: f32 = -1e30;
/// Lower bound of the sum of a row, which is 0 if the row attends to no key.
const MIN_SUM: f64 = 1e-30;

/// An operand or result of a call, head by head: `[heads, rows, width]`.
type Heads<B> = Expression<B>;

/// The sizes of a call and how it is divided into blocks.
struct Tiling {
    call: AttentionCall,
    /// Channels per head.
    width: usize,
    queries: usize,
    keys: usize,
    heads_per_block: usize,
    /// Query rows per block.
    rows_per_block: usize,
}

impl Tiling {
    fn new<B: ProductKernel>([q, k, _]: &[Floats<B>; 3], call: AttentionCall) -> Self {
        let ([queries, channels], [keys, _]) = (q.shape().dims::<2>(), k.shape().dims::<2>());
        let scores_per_row = keys.max(1);
        let heads_per_block =
            (BLOCK_SCORES / (ROWS_PER_HEAD.min(queries.max(1)) * scores_per_row)).clamp(1, call.heads);
        let rows_per_block = (BLOCK_SCORES / (heads_per_block * scores_per_row)).clamp(1, queries.max(1));
        Self { call, width: channels / call.heads, queries, keys, heads_per_block, rows_per_block }
    }

    fn head_groups(&self) -> impl Iterator<Item = Range<usize>> {
        ranges(self.call.heads, self.heads_per_block)
    }

    fn row_blocks(&self) -> impl Iterator<Item = Range<usize>> {
        ranges(self.queries, self.rows_per_block)
    }

    /// Reshapes `[rows, heads * width]` to `[heads, rows, width]`.
    fn split_heads<B: ProductKernel>(&self, x: Floats<B>) -> Heads<B> {
        let x = Expression::<B>(x);
        let [rows, _] = x.dims::<2>();
        x.reshape([rows, self.call.heads, self.width]).swap(0, 1)
    }

    /// Undoes [`Tiling::split_heads`] and casts to `dtype`.
    fn merge_heads<B: ProductKernel>(&self, x: Heads<B>, dtype: DType) -> Floats<B> {
        let [_, rows, _] = x.dims::<3>();
        x.swap(0, 1).reshape([rows, self.call.heads * self.width]).cast(dtype).0
    }

    /// Returns the scores `[heads, rows, keys]` and the mask that was applied to them. `q` holds some of the heads, and
    /// of these only the query rows `rows`.
    fn scores<B: ProductKernel>(
        &self,
        q: &Heads<B>,
        k: &Heads<B>,
        rows: &Range<usize>,
    ) -> (Heads<B>, Option<Heads<B>>) {
        let scores = q.clone().matmul(k.clone().t()) * f64::from(self.call.scale);
        let scores = match self.call.softcap.map(f64::from) {
            Some(cap) => (scores * (1.0 / cap)).tanh() * cap,
            None => scores,
        };
        match self.mask(q, rows) {
            // Adds 0 where the mask is 1, and `MASKED` where it is 0.
            Some(mask) => (scores + (mask.clone() + -1.0) * f64::from(-MASKED), Some(mask)),
            None => (scores, None),
        }
    }

    /// The mask of the query rows `rows`, `[1, rows, keys]`, on the device of `like`: 1 if the query attends to the
    /// key, else 0. `None` if every query attends to all keys.
    fn mask<B: ProductKernel>(&self, like: &Heads<B>, rows: &Range<usize>) -> Option<Heads<B>> {
        // The number of leading keys that the causal mask leaves to a query.
        let causal_end = |query: usize| (query + 1 + self.keys).saturating_sub(self.queries).min(self.keys);
        let window = self.call.window.unwrap_or(usize::MAX);
        if !self.call.causal || (causal_end(rows.start) == self.keys && self.keys <= window) {
            return None;
        }
        let mut mask = vec![0.0f32; rows.len() * self.keys];
        for (row, query) in mask.chunks_exact_mut(self.keys).zip(rows.clone()) {
            let end = causal_end(query);
            row[end.saturating_sub(window)..end].fill(1.0);
        }
        let data = TensorData::new(mask, [1, rows.len(), self.keys]);
        Some(Expression(B::float_from_data(data, &like.0.device())))
    }
}

/// Divides `0..total` into ranges of `size`; the last may be shorter.
pub fn ranges(total: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..total).step_by(size).map(move |start| start..(start + size).min(total))
}

/// The unnormalised softmax of some rows of scores.
struct Softmax<B: ProductKernel> {
    exponentials: Heads<B>,
    /// The largest score of each row.
    max: Heads<B>,
    /// The reciprocal of the sum of each row's exponentials.
    inverse: Heads<B>,
}

impl<B: ProductKernel> Softmax<B> {
    fn of(scores: Heads<B>, mask: Option<Heads<B>>) -> Self {
        let max = scores.clone().max(2);
        let exponentials = times((scores - max.clone()).exp(), mask);
        let inverse = exponentials.clone().sum(2).clamp_min(MIN_SUM).recip();
        Self { exponentials, max, inverse }
    }
}

/// Returns `x * factor`, or x without a factor.
fn times<B: ProductKernel>(x: Heads<B>, factor: Option<Heads<B>>) -> Heads<B> {
    match factor {
        Some(factor) => x * factor,
        None => x,
    }
}

/// Returns the attended values and, per row, the largest score and the reciprocal of the sum of exponentials,
/// `[heads, Lq, 2]`.
pub fn forward<B: ProductKernel>(qkv: [Floats<B>; 3], call: AttentionCall) -> (Floats<B>, Floats<B>) {
    let (tiling, dtype) = (Tiling::new::<B>(&qkv, call), qkv[0].dtype());
    let [q, k, v] = qkv.map(|x| tiling.split_heads::<B>(x));
    if tiling.queries * tiling.keys * tiling.width == 0 {
        let out = q.zeros([call.heads, tiling.queries, tiling.width]);
        let statistics = q.zeros([call.heads, tiling.queries, 2]);
        return (tiling.merge_heads(out, dtype), statistics.0);
    }
    let (mut outs, mut statistics) = (Vec::new(), Vec::new());
    for heads in tiling.head_groups() {
        let of_heads = |x: &Heads<B>| x.clone().narrow(0, heads.clone());
        let (q, k, v) = (of_heads(&q), of_heads(&k), of_heads(&v));
        let (mut out_rows, mut statistics_rows) = (Vec::new(), Vec::new());
        for rows in tiling.row_blocks() {
            let (scores, mask) = tiling.scores(&q.clone().narrow(1, rows.clone()), &k, &rows);
            let Softmax { exponentials, max, inverse } = Softmax::of(scores, mask);
            out_rows.push(exponentials.cast(dtype).matmul(v.clone()) * inverse.clone());
            statistics_rows.push(Expression::cat(vec![max, inverse], 2));
        }
        outs.push(Expression::cat(out_rows, 1));
        statistics.push(Expression::cat(statistics_rows, 1));
    }
    (tiling.merge_heads(Expression::cat(outs, 0), dtype), Expression::cat(statistics, 0).0)
}

/// Returns the gradients of q, k and v that are wanted. `statistics` are the softmax statistics that [`forward`]
/// returned. If empty, they are recomputed from the scores, which the backward pass computes anyway.
pub fn backward<B: ProductKernel>(
    qkv: [Floats<B>; 3],
    out: Floats<B>,
    statistics: Floats<B>,
    d_out: Floats<B>,
    call: AttentionCall,
    [q_wanted, k_wanted, v_wanted]: [bool; 3],
) -> Cotangents<B, 3> {
    let (tiling, dtype) = (Tiling::new::<B>(&qkv, call), qkv[0].dtype());
    let [q, k, v] = qkv.map(|x| tiling.split_heads::<B>(x));
    if tiling.queries * tiling.keys * tiling.width == 0 {
        return [q, k, v].map(|x| Some(tiling.merge_heads(x.zeros(x.dims::<3>()), dtype)));
    }
    let (out, d_out) = (tiling.split_heads::<B>(out), tiling.split_heads::<B>(d_out));
    // For each row, the mean of `d_probabilities` (below) weighted by the probabilities. It equals the row's sum of
    // `out * d_out`.
    let weighted_mean = (out.cast(DType::F32) * d_out.clone().cast(DType::F32)).sum(2);
    let d_out = d_out.cast(dtype);
    let statistics = Some(Expression::<B>(statistics)).filter(|statistics| !statistics.is_empty());
    let (scale, softcap) = (f64::from(call.scale), call.softcap.map(f64::from));
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    for heads in tiling.head_groups() {
        let of_heads = |x: &Heads<B>| x.clone().narrow(0, heads.clone());
        let (k, v) = (of_heads(&k), of_heads(&v));
        let (mut dq_rows, mut dk_sum, mut dv_sum) = (Vec::new(), None, None);
        for rows in tiling.row_blocks() {
            let of_block = |x: &Heads<B>| of_heads(x).narrow(1, rows.clone());
            let (q, d_out) = (of_block(&q), of_block(&d_out));
            let (scores, mask) = tiling.scores(&q, &k, &rows);
            // Derivative of the soft cap, `1 - (score / cap)^2`. For a masked score it only has to be finite, because
            // the probability is 0.
            let slope = softcap.map(|cap| (scores.clone() * (1.0 / cap)).clamp_abs(1.0).squared() * -1.0 + 1.0);
            let probabilities = match statistics.as_ref().map(of_block) {
                Some(statistics) => {
                    let (max, inverse) = (statistics.clone().narrow(2, 0..1), statistics.narrow(2, 1..2));
                    times((scores - max).exp(), mask) * inverse
                }
                None => {
                    let Softmax { exponentials, inverse, .. } = Softmax::of(scores, mask);
                    exponentials * inverse
                }
            };
            if v_wanted {
                accumulate(&mut dv_sum, probabilities.clone().cast(dtype).t().matmul(d_out.clone()));
            }
            if q_wanted || k_wanted {
                let d_probabilities = d_out.matmul(v.clone().t());
                let d_scores = probabilities * (d_probabilities - of_block(&weighted_mean)) * scale;
                let d_scores = times(d_scores, slope).cast(dtype);
                if k_wanted {
                    accumulate(&mut dk_sum, d_scores.clone().t().matmul(q));
                }
                if q_wanted {
                    dq_rows.push(d_scores.matmul(k.clone()));
                }
            }
        }
        if q_wanted {
            dq.push(Expression::cat(dq_rows, 1));
        }
        dk.extend(dk_sum);
        dv.extend(dv_sum);
    }
    [dq, dk, dv].map(|heads| (!heads.is_empty()).then(|| tiling.merge_heads(Expression::cat(heads, 0), dtype)))
}

/// Adds `part` to `sum`, which is `None` before the first part.
fn accumulate<B: ProductKernel>(sum: &mut Option<Heads<B>>, part: Heads<B>) {
    *sum = Some(match sum.take() {
        Some(before) => before + part,
        None => part,
    });
}
