//! Decoding with a KV cache on flex.

use burn_tensor::DType;

use super::{Values, cast};
use crate::backend::{Flex, TensorMetadata, flex::FlexTensor};
use crate::ops::decode::{CachedSequence, DecodeCall, DecodeKernel, TailPlaces, store_by_index};
use crate::ops::kernels::decode::attend;

impl DecodeKernel for Flex {
    fn store(mut into: FlexTensor, rows: FlexTensor, places: &TailPlaces) -> FlexTensor {
        if into.dtype() != DType::F32 || !into.is_contiguous() || into.layout().start_offset() != 0 {
            return store_by_index::<Self>(into, rows, places);
        }
        let (rows, [_, capacity, width]) = (Values::of(rows), into.shape().dims::<3>());
        // `storage_mut` copies the memory first if another tensor shares it.
        let values = into.storage_mut::<f32>();
        for (row, place) in rows.slice().chunks_exact(width.max(1)).zip(places.rows(capacity)) {
            values[place * width..][..width].copy_from_slice(row);
        }
        into
    }

    fn attend(
        q: FlexTensor,
        [prompt_keys, prompt_values]: [FlexTensor; 2],
        [tail_keys, tail_values]: [FlexTensor; 2],
        call: &DecodeCall,
    ) -> FlexTensor {
        let ([_, capacity, _], [_, channels]) = (tail_keys.shape().dims::<3>(), q.shape().dims::<2>());
        let (dtype, width) = (q.dtype(), channels / call.heads);
        // The rows of the prompts and of the tails (as `[slots * capacity, W]`) that a query attends to.
        let key_ranges_of = |sequence: &CachedSequence| {
            let slot_start = sequence.slot * capacity;
            [sequence.prompt.clone(), slot_start + sequence.skip..slot_start + sequence.tail]
        };
        let key_ranges: Vec<_> = call.sequences.iter().map(key_ranges_of).collect();
        let [q, pk, pv, tk, tv] = [q, prompt_keys, prompt_values, tail_keys, tail_values].map(Values::of);
        let (prompts, tails) = ([pk.slice(), pv.slice()], [tk.slice(), tv.slice()]);
        cast(q.like(attend(call, width, q.slice(), prompts, tails, &key_ranges)), dtype)
    }
}
