//! Rotary position embedding on flex.

use burn::backend::{Flex, TensorMetadata, tensor::FloatTensor};

use super::Values;
use crate::ops::RopeKernel;
use crate::ops::kernels::rope::rotate;

impl RopeKernel for Flex {
    fn rotate(x: FloatTensor<Self>, [cos, sin]: [FloatTensor<Self>; 2], heads: usize, back: bool) -> FloatTensor<Self> {
        let [rows, _] = x.shape().dims::<2>();
        let (x, cos, sin) = (Values::of(x), Values::of(cos), Values::of(sin));
        x.like(rotate(x.slice(), cos.slice(), sin.slice(), rows, heads, back))
    }
}
