//! Attention on flex.

use super::{Values, cast, tensor};
use crate::backend::{Flex, TensorMetadata, flex::FlexTensor};
use crate::ops::kernels::attention::{AttentionShape, RowSoftmax, SavedAttention, backward, forward};
use crate::ops::{AttentionCall, AttentionKernel, Cotangents};

fn shape_of(q: &FlexTensor, k: &FlexTensor, call: AttentionCall) -> AttentionShape {
    let ([queries, channels], [keys, _]) = (q.shape().dims::<2>(), k.shape().dims::<2>());
    AttentionShape { call, queries, keys, width: channels / call.heads }
}

impl AttentionKernel for Flex {
    fn attention_forward([q, k, v]: [FlexTensor; 3], call: AttentionCall) -> (FlexTensor, FlexTensor) {
        let (shape, dtype) = (shape_of(&q, &k, call), q.dtype());
        let (q, k, v) = (Values::of(q), Values::of(k), Values::of(v));
        let mut out = vec![0.0; q.slice().len()];
        let mut rows = vec![RowSoftmax::default(); call.heads * shape.queries];
        forward(shape, q.slice(), k.slice(), v.slice(), &mut out, &mut rows);
        let statistics = tensor(bytemuck::cast_slice(&rows).to_vec(), [call.heads, shape.queries, 2]);
        (cast(q.like(out), dtype), statistics)
    }

    fn attention_backward(
        [q, k, v]: [FlexTensor; 3],
        out: FlexTensor,
        statistics: FlexTensor,
        d_out: FlexTensor,
        call: AttentionCall,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        let (shape, dtype) = (shape_of(&q, &k, call), q.dtype());
        let (q, k, v) = (Values::of(q), Values::of(k), Values::of(v));
        let (out, statistics, d_out) = (Values::of(out), Values::of(statistics), Values::of(d_out));
        let saved = SavedAttention {
            q: q.slice(),
            k: k.slice(),
            v: v.slice(),
            out: out.slice(),
            softmax: bytemuck::cast_slice(statistics.slice()),
            d_out: d_out.slice(),
        };
        let [dq, dk, dv] = backward(shape, saved, wanted);
        let [dq, dk, dv] = [dq.map(|d| q.like(d)), dk.map(|d| k.like(d)), dv.map(|d| v.like(d))];
        [dq, dk, dv].map(|d| d.map(|d| cast(d, dtype)))
    }
}
