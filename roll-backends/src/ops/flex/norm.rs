//! Layer norm, RMS norm, group norm and the RMS norm of the Wan VAE on flex.

use super::{Values, tensor};
use crate::backend::{Flex, TensorMetadata, flex::FlexTensor};
use crate::ops::kernels::rows::RowOperand;
use crate::ops::kernels::{channel_norm, group_norm, norm};
use crate::ops::{ChannelNormKernel, Cotangents, GroupNormKernel, Groups, NormKernel, SavedNorm, SharedShift};

impl NormKernel for Flex {
    fn norm_forward(x: FlexTensor, gain: FlexTensor, shift: Option<FlexTensor>, eps: f64) -> (FlexTensor, FlexTensor) {
        let [rows, width] = x.shape().dims::<2>();
        let (x, gain, shift) = (Values::of(x), Values::of(gain), shift.map(Values::of));
        let gain = RowOperand::new(gain.slice(), rows, width);
        let shift = shift.as_ref().map(|shift| RowOperand::new(shift.slice(), rows, width));
        let (y, moments) = norm::forward(x.slice(), rows, gain, shift, eps);
        (x.like(y), tensor(bytemuck::cast_slice(&moments).to_vec(), [rows, 2]))
    }

    fn norm_backward(saved: SavedNorm<FlexTensor>, d_y: FlexTensor, wanted: [bool; 3]) -> Cotangents<Self, 3> {
        let [x_wanted, gain_wanted, shift_wanted] = wanted;
        let [rows, width] = saved.x.shape().dims::<2>();
        let (x, gain_values, moments) = (Values::of(saved.x), Values::of(saved.gain), Values::of(saved.moments));
        let d_y_values = Values::of(d_y.clone());
        let gain = RowOperand::new(gain_values.slice(), rows, width);
        let moments = bytemuck::cast_slice(moments.slice());
        let d = d_y_values.slice();
        let is_layer_norm = saved.shift.is_some();
        let d_x = x_wanted.then(|| x.like(norm::backward_x(is_layer_norm, x.slice(), moments, gain, d)));
        let backward_gain = || norm::backward_gain(x.slice(), moments, gain.is_shared(), d);
        let d_gain = gain_wanted.then(|| gain_values.like(backward_gain()));
        let d_shift = match saved.shift {
            Some(SharedShift(true)) if shift_wanted => Some(tensor(norm::sum_of_rows(rows, d), [1, width])),
            Some(SharedShift(false)) if shift_wanted => Some(d_y),
            _ => None,
        };
        [d_x, d_gain, d_shift]
    }
}

impl ChannelNormKernel for Flex {
    fn channel_norm_forward(x: FlexTensor, gain: FlexTensor, has_silu: bool) -> (FlexTensor, FlexTensor) {
        let (x, gain) = (Values::of(x), Values::of(gain));
        let (y, factors) = channel_norm::forward(x.slice(), gain.slice(), has_silu);
        let positions = factors.len();
        (x.like(y), tensor(factors, [positions]))
    }

    fn channel_norm_backward(
        [x, gain, factors]: [FlexTensor; 3],
        has_silu: bool,
        d_y: FlexTensor,
        wanted: [bool; 2],
    ) -> Cotangents<Self, 2> {
        let (x, gain, factors, d_y) = (Values::of(x), Values::of(gain), Values::of(factors), Values::of(d_y));
        let [d_x, d_gain] =
            channel_norm::backward(x.slice(), gain.slice(), factors.slice(), d_y.slice(), has_silu, wanted);
        [d_x.map(|d| x.like(d)), d_gain.map(|d| gain.like(d))]
    }
}

impl GroupNormKernel for Flex {
    fn group_norm_silu(operands: [FlexTensor; 3], groups: Groups) -> FlexTensor {
        let [x, gain, bias] = operands.map(Values::of);
        x.like(group_norm_of(&gain, &bias, groups).forward(x.slice()))
    }

    fn group_norm_silu_pull(operands: [FlexTensor; 3], groups: Groups, d_y: FlexTensor) -> FlexTensor {
        let [x, gain, bias] = operands.map(Values::of);
        x.like(group_norm_of(&gain, &bias, groups).pull(x.slice(), Values::of(d_y).slice()))
    }
}

fn group_norm_of<'a>(gain: &'a Values, bias: &'a Values, Groups { groups, eps }: Groups) -> group_norm::GroupNorm<'a> {
    group_norm::GroupNorm { gain: gain.slice(), bias: bias.slice(), groups, eps }
}
