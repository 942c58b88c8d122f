//! Blockwise attention from plain matrix products, forward and backward: some heads and query rows at a time, with one
//! kernel for everything between two products. Supports every mask, soft caps, f32 and bf16.
//!
//! The numerics are those of [`tiled`]: scores and sums are f32, and operands of products have the dtype of q, k and v.
//! Rows of queries and keys are padded to multiples of the tensor cores' tile sizes, so that products have no ragged
//! edges.

use std::ops::Range;

use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;

use super::super::product::product_with_contiguous_rows;
use super::super::values;
use super::padded;
use super::softmax::{Block, Softmax, softmax, softmax_backward};
use crate::backend::{Cube, TensorMetadata};
use crate::ops::expression::Expression;
use crate::ops::{AttentionCall, Cotangents, tiled};

/// Multiple to which long axes are padded: the rows and columns that a product's cube computes.
const STAGE: usize = 128;
/// Multiple to which short axes are padded.
const TILE: usize = 16;
/// Device memory per score of a block, in bytes. The few temporaries of a block then take about a fiftieth of the
/// memory.
const MEMORY_PER_SCORE: u64 = 512;
/// Query rows per head that a block takes before it takes further heads. More rows mean fewer blocks of the same heads,
/// each of which adds to the whole cotangents of these heads' keys and values.
const ROWS: usize = 16 * STAGE;
/// Minimum and maximum number of scores of a block (64 MiB to 1 GiB of f32). At the maximum, the products of 8 heads of
/// 20,000 tokens fill a GPU.
const SCORE_BOUNDS: [u64; 2] = [1 << 24, 1 << 28];

/// An operand or result of a call, head by head: `[heads, rows, width]`.
type Heads = Expression<Cube>;

/// The sizes of a call and how it is divided into blocks.
struct Blocks {
    call: AttentionCall,
    /// Numbers per head.
    width: usize,
    queries: usize,
    keys: usize,
    /// Padded number of queries.
    rows: usize,
    /// Padded number of keys.
    columns: usize,
    heads_per_block: usize,
    rows_per_block: usize,
}

impl Blocks {
    fn new([q, k]: [&CubeTensor; 2], call: AttentionCall) -> Self {
        let memory = q.client.properties().memory.max_memory().unwrap_or(0);
        let [min_scores, max_scores] = SCORE_BOUNDS;
        let scores = (memory / MEMORY_PER_SCORE).clamp(min_scores, max_scores);
        Self::of_scores(scores as usize, [q, k], call)
    }

    /// Blocks of at most `scores` scores, but at least one head and [`STAGE`] rows.
    fn of_scores(scores: usize, [q, k]: [&CubeTensor; 2], call: AttentionCall) -> Self {
        let ([queries, channels], [keys, _]) = (q.shape().dims::<2>(), k.shape().dims::<2>());
        let (rows, columns) = (padded_length(queries), padded_length(keys));
        // As many heads as fit with `ROWS` rows each, then as many rows as fit with these heads.
        let max_heads = (scores / (rows.min(ROWS) * columns)).clamp(1, call.heads);
        // All groups of heads have the same size, because another size would compile other kernels.
        let heads_per_block = (1..=max_heads).rev().find(|n| call.heads.is_multiple_of(*n)).unwrap_or(1);
        let rows_per_block = (scores / (heads_per_block * columns) / STAGE * STAGE).clamp(STAGE, rows.max(STAGE));
        Self { call, width: channels / call.heads, queries, keys, rows, columns, heads_per_block, rows_per_block }
    }

    fn is_empty(&self) -> bool {
        self.queries * self.keys * self.width == 0
    }

    fn head_groups(&self) -> impl Iterator<Item = Range<usize>> {
        tiled::ranges(self.call.heads, self.heads_per_block)
    }

    fn row_blocks(&self) -> impl Iterator<Item = Range<usize>> {
        tiled::ranges(self.rows, self.rows_per_block)
    }

    fn block(&self, heads: &Range<usize>, rows: &Range<usize>) -> Block {
        Block {
            call: self.call,
            queries: self.queries,
            keys: self.keys,
            first_query: rows.start,
            shape: [heads.len(), rows.len(), self.columns],
        }
    }

    /// Converts `[n, heads * width]` to contiguous `[heads, length, width]`, padded with zeros at the end of each head.
    fn split_heads(&self, x: CubeTensor, length: usize) -> Heads {
        let x = Expression::<Cube>(x);
        let [n, _] = x.dims::<2>();
        let x = x.reshape([n, self.call.heads, self.width]).swap(0, 1).0;
        Expression(burn_cubecl::kernel::into_contiguous(padded(x, 1, length)))
    }

    /// Undoes [`Blocks::split_heads`]: removes the padding and casts to `dtype`.
    fn merge_heads(&self, x: Heads, n: usize, dtype: DType) -> CubeTensor {
        x.narrow(1, 0..n).swap(0, 1).reshape([n, self.call.heads * self.width]).cast(dtype).0
    }
}

/// `length` rounded up to whole stages, or to whole tiles if it is short.
fn padded_length(length: usize) -> usize {
    length.next_multiple_of(if length > STAGE / 2 { STAGE } else { TILE })
}

/// A product whose rows are contiguous, as the other kernels require.
fn product(a: Heads, b: Heads) -> CubeTensor {
    product_with_contiguous_rows(a.0, b.0)
}

fn heads(x: CubeTensor) -> Heads {
    Expression(x)
}

/// Returns the attended values and, per row, the largest score and the reciprocal of the sum of exponentials,
/// `[heads, rows, 2]`.
pub fn forward(qkv: [CubeTensor; 3], call: AttentionCall) -> (CubeTensor, CubeTensor) {
    let blocks = Blocks::new([&qkv[0], &qkv[1]], call);
    if blocks.is_empty() { tiled::forward::<Cube>(qkv, call) } else { forward_blocks(&blocks, qkv) }
}

fn forward_blocks(blocks: &Blocks, [q, k, v]: [CubeTensor; 3]) -> (CubeTensor, CubeTensor) {
    let dtype = q.dtype;
    let (q, k, v) = (
        blocks.split_heads(q, blocks.rows),
        blocks.split_heads(k, blocks.columns),
        blocks.split_heads(v, blocks.columns),
    );
    let (mut outs, mut statistics) = (Vec::new(), Vec::new());
    for group in blocks.head_groups() {
        let of_group = |x: &Heads| x.clone().narrow(0, group.clone());
        let (q, k, v) = (of_group(&q), of_group(&k), of_group(&v));
        let (mut out_rows, mut statistics_rows) = (Vec::new(), Vec::new());
        for rows in blocks.row_blocks() {
            let scores = product(q.clone().narrow(1, rows.clone()), k.clone().t());
            let Softmax { exponentials, max, inverse } = softmax(&scores, blocks.block(&group, &rows), Some(dtype));
            drop(scores);
            let inverse = heads(inverse);
            out_rows.push(heads(product(heads(exponentials), v.clone())) * inverse.clone());
            statistics_rows.push(Expression::cat(vec![heads(max), inverse], 2));
        }
        outs.push(Expression::cat(out_rows, 1));
        statistics.push(Expression::cat(statistics_rows, 1));
    }
    let out = blocks.merge_heads(Expression::cat(outs, 0), blocks.queries, dtype);
    (out, Expression::cat(statistics, 0).0)
}

/// Returns the gradients of q, k and v that are `wanted`. `statistics` are the softmax statistics that [`forward`]
/// returned. If empty, they are recomputed from the scores, which the backward pass computes anyway.
pub fn backward(
    qkv: [CubeTensor; 3],
    out: CubeTensor,
    statistics: CubeTensor,
    d_out: CubeTensor,
    call: AttentionCall,
    wanted: [bool; 3],
) -> Cotangents<Cube, 3> {
    let blocks = Blocks::new([&qkv[0], &qkv[1]], call);
    if blocks.is_empty() {
        return tiled::backward::<Cube>(qkv, out, statistics, d_out, call, wanted);
    }
    backward_blocks(&blocks, qkv, [out, d_out], statistics, wanted)
}

fn backward_blocks(
    blocks: &Blocks,
    [q, k, v]: [CubeTensor; 3],
    [out, d_out]: [CubeTensor; 2],
    statistics: CubeTensor,
    [q_wanted, k_wanted, v_wanted]: [bool; 3],
) -> Cotangents<Cube, 3> {
    let dtype = q.dtype;
    let statistics = Some(heads(statistics)).filter(|statistics| !statistics.is_empty());
    let (q, k, v) = (
        blocks.split_heads(q, blocks.rows),
        blocks.split_heads(k, blocks.columns),
        blocks.split_heads(v, blocks.columns),
    );
    let split_queries = |x: CubeTensor| blocks.split_heads(x, blocks.rows);
    let d_out = split_queries(d_out);
    // For each row, the mean of `d_weights` (below) under the softmax weights. It equals the sum of out * d_out.
    let mean = (split_queries(out).cast(DType::F32) * d_out.clone().cast(DType::F32)).sum(2);
    let d_out = d_out.cast(dtype);
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    for group in blocks.head_groups() {
        let of_group = |x: &Heads| x.clone().narrow(0, group.clone());
        let (k, v) = (of_group(&k), of_group(&v));
        let (mut dq_rows, mut dk_sum, mut dv_sum) = (Vec::new(), None, None);
        for rows in blocks.row_blocks() {
            let of_block = |x: &Heads| of_group(x).narrow(1, rows.clone());
            let (q, d_out) = (of_block(&q), of_block(&d_out));
            let block = blocks.block(&group, &rows);
            let scores = product(q.clone(), k.clone().t());
            let [max, inverse] = match &statistics {
                Some(statistics) => {
                    let statistics = of_block(statistics);
                    [0..1, 1..2].map(|column| values(statistics.clone().narrow(2, column).0))
                }
                None => {
                    let no_exponentials = None;
                    let Softmax { max, inverse, .. } = softmax(&scores, block, no_exponentials);
                    [max, inverse]
                }
            };
            let d_weights = product(d_out.clone(), v.clone().t());
            let [weights, d_scores] =
                softmax_backward(&scores, &d_weights, [max, inverse, values(of_block(&mean).0)], block, dtype)
                    .map(heads);
            drop((scores, d_weights));
            if v_wanted {
                accumulate(&mut dv_sum, product(weights.t(), d_out));
            }
            if k_wanted {
                accumulate(&mut dk_sum, product(d_scores.clone().t(), q));
            }
            if q_wanted {
                dq_rows.push(heads(product(d_scores, k.clone())));
            }
        }
        if q_wanted {
            dq.push(Expression::cat(dq_rows, 1));
        }
        dk.extend(dk_sum);
        dv.extend(dv_sum);
    }
    [(dq, blocks.queries), (dk, blocks.keys), (dv, blocks.keys)]
        .map(|(parts, n)| (!parts.is_empty()).then(|| blocks.merge_heads(Expression::cat(parts, 0), n, dtype)))
}

/// Adds `part` to `sum`, which is `None` before the first part.
fn accumulate(sum: &mut Option<Heads>, part: CubeTensor) {
    let part = heads(part);
    *sum = Some(match sum.take() {
        Some(before) => before + part,
        None => part,
    });
}

#[cfg(feature = "wgpu")]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use crate::backend::ops::FloatTensorOps;
    use burn_tensor::TensorData;

    use super::super::super::{empty, test_device, to_host};
    use super::*;

    const CALLS: [AttentionCall; 3] = [
        AttentionCall { heads: 4, scale: 0.3, causal: false, window: None, softcap: None },
        AttentionCall { heads: 4, scale: 0.2, causal: true, window: Some(70), softcap: None },
        AttentionCall { heads: 4, scale: 0.5, causal: true, window: None, softcap: Some(2.0) },
    ];

    /// q, k, v and the cotangent of the result, for the given numbers of queries and keys.
    fn made(queries: usize, keys: usize) -> Option<[CubeTensor; 4]> {
        let device = test_device()?;
        let of = |rows: usize, seed: usize| {
            let wave = |i: usize| ((i + seed) * 7919 % 1009) as f32 / 504.5 - 1.0;
            let values: Vec<f32> = (0..rows * 32).map(wave).collect();
            Cube::float_from_data(TensorData::new(values, [rows, 32]), &device)
        };
        Some([of(queries, 0), of(keys, 501), of(keys, 117), of(queries, 33)])
    }

    fn near(what: &str, found: CubeTensor, expected: CubeTensor) {
        let (found, expected) = (to_host(found).unwrap(), to_host(expected).unwrap());
        assert_eq!(found.len(), expected.len(), "{what}");
        let largest = expected.iter().fold(1.0f32, |most, x| most.max(x.abs()));
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let finite = found.iter().all(|x| x.is_finite());
        assert!(finite && worst < 2e-5 * largest, "{what}: off by {worst} of {largest}");
    }

    #[test]
    fn blocks_match_composed_attention_and_gradients() {
        for (queries, keys) in [(150, 150), (5, 21), (130, 200)] {
            let Some([q, k, v, d_out]) = made(queries, keys) else { return };
            for (call, scores) in CALLS.into_iter().zip([1 << 24, 1 << 15, 1]) {
                let what = format!("{call:?}, {queries} queries, {keys} keys, {scores} scores");
                let qkv = [q.clone(), k.clone(), v.clone()];
                let (expected, softmax) = tiled::forward::<Cube>(qkv.clone(), call);
                let pulled =
                    tiled::backward::<Cube>(qkv.clone(), expected.clone(), softmax, d_out.clone(), call, [true; 3]);
                let blocks = Blocks::of_scores(scores, [&q, &k], call);
                let (out, softmax) = forward_blocks(&blocks, qkv.clone());
                near(&what, out.clone(), expected);
                for softmax in [softmax, empty(&out, [0])] {
                    let found = backward_blocks(&blocks, qkv.clone(), [out.clone(), d_out.clone()], softmax, [true; 3]);
                    for (found, expected) in found.into_iter().zip(pulled.clone()) {
                        near(&what, found.unwrap(), expected.unwrap());
                    }
                }
            }
        }
    }

    #[test]
    fn only_wanted_gradients_are_computed() {
        let Some([q, k, v, d_out]) = made(5, 9) else { return };
        let (out, softmax) = forward([q.clone(), k.clone(), v.clone()], CALLS[0]);
        let found = backward([q, k, v], out, softmax, d_out, CALLS[0], [false, true, false]);
        assert_eq!(found.map(|x| x.is_some()), [false, true, false]);
    }

    #[test]
    fn blocks_are_whole_stages_and_equal_groups_of_heads() {
        let Some([q, ..]) = made(1, 1) else { return };
        // Only the shape is read.
        let long = empty(&q, [18_900, 40]);
        let call = AttentionCall { heads: 40, ..CALLS[0] };
        for scores in [1 << 24, 1 << 26, 1 << 28] {
            let blocks = Blocks::of_scores(scores, [&long, &long], call);
            assert_eq!([blocks.rows, blocks.columns], [18_944; 2]);
            assert_eq!(40 % blocks.heads_per_block, 0);
            assert_eq!(blocks.rows_per_block % STAGE, 0);
            assert!(blocks.heads_per_block * blocks.rows_per_block * blocks.columns <= scores);
        }
    }
}
