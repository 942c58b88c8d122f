//! The RMS norm of the Wan VAE on flex.

use burn::backend::{Flex, flex::FlexTensor};

use super::{Values, tensor};
use crate::ops::kernels::channel_norm::{backward, forward};
use crate::ops::{ChannelNormKernel, Cotangents};

impl ChannelNormKernel for Flex {
    fn channel_norm_forward(x: FlexTensor, gain: FlexTensor, silu: bool) -> (FlexTensor, FlexTensor) {
        let (x, gain) = (Values::of(x), Values::of(gain));
        let (y, factors) = forward(x.slice(), gain.slice(), silu);
        let positions = factors.len();
        (x.like(y), tensor(factors, [positions]))
    }

    fn channel_norm_backward(
        [x, gain, factors]: [FlexTensor; 3],
        silu: bool,
        d_y: FlexTensor,
        wanted: [bool; 2],
    ) -> Cotangents<Self, 2> {
        let (x, gain, factors, d_y) = (Values::of(x), Values::of(gain), Values::of(factors), Values::of(d_y));
        let [d_x, d_gain] = backward(x.slice(), gain.slice(), factors.slice(), d_y.slice(), silu, wanted);
        [d_x.map(|d| x.like(d)), d_gain.map(|d| gain.like(d))]
    }
}
