//! In-place writes to the KV cache on libtorch.

use crate::backend::LibTorch;
use crate::backend::libtorch::TchTensor;
use crate::ops::DecodeKernel;
use crate::ops::decode::{TailPlaces, store_by_index};

impl DecodeKernel for LibTorch {
    /// Writes in place by ATen. Burn's operation takes a second handle on `into` before it checks whether it may write
    /// in place, and so would copy the whole cache for each token of each layer.
    fn store(into: TchTensor, rows: TchTensor, places: &TailPlaces) -> TchTensor {
        let shape = into.tensor.size();
        // Another tensor may share the memory, or the rows may not be adjacent.
        let can_write_in_place = into.can_mut() && into.tensor.is_contiguous();
        let (true, [slots, capacity, width]) = (can_write_in_place, &shape[..]) else {
            return store_by_index::<Self>(into, rows, places);
        };
        let places = places.uploaded_rows::<Self>(*capacity as usize, &rows).tensor;
        // A view: writing to it writes to `into`.
        let mut flat = into.tensor.view([slots * capacity, *width]);
        let _ = flat.index_copy_(0, &places, &rows.tensor);
        into
    }
}
