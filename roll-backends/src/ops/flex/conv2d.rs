//! 2-d convolution with constant weights on flex.

use super::{Values, tensor};
use crate::backend::{Flex, TensorMetadata, flex::FlexTensor};
use crate::ops::conv2d::{Conv2dCall, Conv2dKernel, Conv2dOptions, Epilogue};
use crate::ops::kernels::conv2d::{self as kernels, BackwardWeights, Conv2dShape, KernelEpilogue, Weights};

/// The sizes of a call for x `[N, C, H, W]`.
fn shape_of([items, inputs, h, w]: [usize; 4], call: &Conv2dCall<FlexTensor>) -> Conv2dShape {
    let [outputs, _, kernel @ ..] = call.weight.shape().dims::<4>();
    let Conv2dOptions { stride, dilation, groups } = call.options;
    let (size, before) = ([h, w], call.padding.map(|(before, _)| before));
    let output = std::array::from_fn(|i| {
        let (before, after) = call.padding[i];
        (size[i] + before + after - (kernel[i] - 1) * dilation[i] - 1) / stride[i] + 1
    });
    Conv2dShape { items, inputs, outputs, groups, size, kernel, stride, dilation, before, output }
}

/// The weights for the backward pass, packed at the first call.
fn backward_weights(call: &Conv2dCall<FlexTensor>, shape: Conv2dShape) -> &BackwardWeights {
    let weights = &call.packed.backward;
    weights.get_or_init(|| BackwardWeights::new(shape, Values::of(call.weight.clone()).slice()))
}

impl Conv2dKernel for Flex {
    fn conv2d_forward(
        x: FlexTensor,
        residual: Option<FlexTensor>,
        call: &Conv2dCall<FlexTensor>,
        is_recorded: bool,
    ) -> (FlexTensor, Option<FlexTensor>) {
        let shape = shape_of(x.shape().dims(), call);
        let pack = || Weights::new(shape, Values::of(call.weight.clone()).slice());
        let weights = call.packed.forward.get_or_init(pack);
        let (x, bias, slopes) = (Values::of(x), Values::of(call.bias.clone()), Values::of(call.slopes.clone()));
        let residual = residual.map(Values::of);
        let residual = residual.as_ref().map(Values::slice);
        let epilogue = KernelEpilogue { kind: call.epilogue, slopes: slopes.slice() };
        let saves_sums = is_recorded && epilogue.needs_sums();
        let results = kernels::forward(shape, x.slice(), weights, bias.slice(), residual, epilogue, saves_sums);
        let y_shape = [shape.items, shape.outputs, shape.output[0], shape.output[1]];
        let y = tensor(results.y, y_shape);
        let saved = match results.sums {
            Some(sums) => Some(tensor(sums, y_shape)),
            // The pullback of the epilogue can be computed from the result.
            None if is_recorded && call.epilogue != Epilogue::Nothing => Some(y.clone()),
            // There is no pullback, or it reads neither the sums nor the result.
            None => None,
        };
        (y, saved)
    }

    fn conv2d_pull_epilogue(saved: Option<FlexTensor>, call: &Conv2dCall<FlexTensor>, d_y: FlexTensor) -> FlexTensor {
        let Some(saved) = saved else { return d_y };
        let [_, channels, rows, columns] = d_y.shape().dims();
        let (saved, d_y, slopes) = (Values::of(saved), Values::of(d_y), Values::of(call.slopes.clone()));
        let epilogue = KernelEpilogue { kind: call.epilogue, slopes: slopes.slice() };
        d_y.like(kernels::pull_epilogue(channels, rows * columns, epilogue, saved.slice(), d_y.slice()))
    }

    fn conv2d_pull_convolution(x_shape: [usize; 4], call: &Conv2dCall<FlexTensor>, d_sums: FlexTensor) -> FlexTensor {
        let shape = shape_of(x_shape, call);
        let d_sums = Values::of(d_sums);
        tensor(kernels::pull_convolution(shape, backward_weights(call, shape), d_sums.slice()), x_shape)
    }

    fn conv2d_pull_both(
        x_shape: [usize; 4],
        saved: Option<FlexTensor>,
        call: &Conv2dCall<FlexTensor>,
        d_y: FlexTensor,
    ) -> FlexTensor {
        let Some(saved) = saved else { return Self::conv2d_pull_convolution(x_shape, call, d_y) };
        let shape = shape_of(x_shape, call);
        let (saved, d_y, slopes) = (Values::of(saved), Values::of(d_y), Values::of(call.slopes.clone()));
        let weights = backward_weights(call, shape);
        let epilogue = KernelEpilogue { kind: call.epilogue, slopes: slopes.slice() };
        tensor(kernels::pull_both(shape, weights, epilogue, saved.slice(), d_y.slice()), x_shape)
    }
}
