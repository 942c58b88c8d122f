//! The AdamW update on libtorch's devices: the fused kernel on GPUs, composed operations elsewhere.

use burn::backend::{LibTorch, libtorch::TchTensor};
use roll_core::AdamUpdate;

use super::{fresh, fused};
use crate::ops::AdamKernel;
use crate::ops::adam::composed;

impl AdamKernel for LibTorch {
    fn adam_update(operands: [TchTensor; 4], update: &AdamUpdate) -> [TchTensor; 3] {
        let tensors = operands.each_ref().map(|operand| &operand.tensor);
        let new = fused::ops(tensors[0]).and_then(|ops| ops.adam(tensors, update));
        new.map(|new| new.map(fresh)).unwrap_or_else(|| composed::<Self>(operands, update))
    }
}
