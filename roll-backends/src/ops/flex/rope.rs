//! Rotary position embedding on flex.

use burn::backend::{Flex, TensorMetadata, flex::FlexTensor};

use super::Values;
use crate::ops::RopeKernel;
use crate::ops::kernels::rope::rotate;

impl RopeKernel for Flex {
    fn rotate(x: FlexTensor, [cos, sin]: [FlexTensor; 2], heads: usize, back: bool) -> FlexTensor {
        let [rows, _] = x.shape().dims::<2>();
        let (x, cos, sin) = (Values::of(x), Values::of(cos), Values::of(sin));
        x.like(rotate(x.slice(), cos.slice(), sin.slice(), rows, heads, back))
    }
}
