//! In-place writes to the KV cache on libtorch.

use burn::backend::LibTorch;
use burn::backend::libtorch::TchTensor;
use tch::Tensor;

use crate::ops::DecodeKernel;
use crate::ops::decode::store_by_index;

impl DecodeKernel for LibTorch {
    /// Burn's operation takes a second handle on `into` before it checks whether it may write in place, and so would
    /// copy the whole cache for each token of each layer.
    fn store(into: TchTensor, rows: TchTensor, places: &[usize]) -> TchTensor {
        let shape = into.tensor.size();
        let (true, true, [slots, capacity, width]) = (into.can_mut(), into.tensor.is_contiguous(), &shape[..]) else {
            return store_by_index::<Self>(into, rows, places);
        };
        let places: Vec<i64> = places.iter().map(|place| *place as i64).collect();
        let places = Tensor::from_slice(&places).to_device(into.tensor.device());
        // A view: writing to it writes to `into`.
        let mut flat = into.tensor.view([slots * capacity, *width]);
        let _ = flat.index_copy_(0, &places, &rows.tensor);
        into
    }
}
