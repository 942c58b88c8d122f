//! 3-d convolution on flex: by Winograd's algorithm if [`is_winograd_shape`] is true, else tap by tap.

use super::{Values, cast, tensor};
use crate::backend::{Flex, TensorMetadata, flex::FlexTensor};
use crate::ops::conv::is_winograd_shape;
use crate::ops::kernels::conv::{ConvKind, ConvShape, backward, forward};
use crate::ops::kernels::winograd::convolve;
use crate::ops::{ConvKernel, Cotangents};

fn shape_of(x: &FlexTensor, weight: &FlexTensor, padding: [usize; 3]) -> ConvShape {
    let ([inputs, size @ ..], [outputs, _, kernel @ ..]) = (x.shape().dims::<4>(), weight.shape().dims::<5>());
    ConvShape { inputs, outputs, size, kernel, padding }
}

fn uses_winograd(weight: &FlexTensor) -> bool {
    is_winograd_shape(weight.shape().dims::<5>())
}

impl ConvKernel for Flex {
    fn conv_forward([x, weight, bias]: [FlexTensor; 3], padding: [usize; 3]) -> FlexTensor {
        let (shape, is_winograd) = (shape_of(&x, &weight, padding), uses_winograd(&weight));
        let [t, h, w] = shape.output().unwrap_or_default();
        let (x, weight, bias) = (Values::of(x), Values::of(weight), Values::of(bias));
        let y = if is_winograd {
            convolve(shape, x.slice(), weight.slice(), ConvKind::Forward, Some(bias.slice()))
        } else {
            forward(shape, x.slice(), weight.slice(), bias.slice())
        };
        tensor(y, [shape.outputs, t, h, w])
    }

    fn conv_backward(
        [x, weight]: [FlexTensor; 2],
        padding: [usize; 3],
        d_y: FlexTensor,
        wanted: [bool; 3],
    ) -> Cotangents<Self, 3> {
        let [x_wanted, weight_wanted, bias_wanted] = wanted;
        let (shape, is_winograd) = (shape_of(&x, &weight, padding), uses_winograd(&weight));
        // Winograd computes the gradient of x only.
        let d_x_by_winograd = (is_winograd && x_wanted).then(|| Self::conv_pull(d_y.clone(), weight.clone(), padding));
        let wanted_by_tap = [x_wanted && !is_winograd, weight_wanted, bias_wanted];
        let (x_dtype, weight_dtype) = (x.dtype(), weight.dtype());
        let (x, weight, d_y) = (Values::of(x), Values::of(weight), Values::of(d_y));
        let [d_x, d_weight, d_bias] = backward(shape, x.slice(), weight.slice(), d_y.slice(), wanted_by_tap);
        let d_x = d_x_by_winograd.or_else(|| d_x.map(|d| x.like(d))).map(|d| cast(d, x_dtype));
        let d_weight = d_weight.map(|d| cast(weight.like(d), weight_dtype));
        [d_x, d_weight, d_bias.map(|d| cast(tensor(d, [shape.outputs]), x_dtype))]
    }

    fn conv_pull(cotangent: FlexTensor, weight: FlexTensor, padding: [usize; 3]) -> FlexTensor {
        let is_winograd = uses_winograd(&weight);
        let ([_, output @ ..], [outputs, inputs, kernel @ ..]) =
            (cotangent.shape().dims::<4>(), weight.shape().dims::<5>());
        let size = std::array::from_fn(|i| output[i] + kernel[i] - 1 - 2 * padding[i]);
        let shape = ConvShape { inputs, outputs, size, kernel, padding };
        let (cotangent, weight) = (Values::of(cotangent), Values::of(weight));
        let d_x = if is_winograd {
            let no_bias = None;
            convolve(shape.transposed(output), cotangent.slice(), weight.slice(), ConvKind::Transposed, no_bias)
        } else {
            // The gradient of x is computed without x.
            let (x, wanted) = (&[], [true, false, false]);
            let [d_x, ..] = backward(shape, x, weight.slice(), cotangent.slice(), wanted);
            d_x.unwrap_or_default()
        };
        let [t, h, w] = size;
        tensor(d_x, [inputs, t, h, w])
    }
}
