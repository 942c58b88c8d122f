//! 2-d convolution with constant weights on flex.

use burn::backend::{Flex, TensorMetadata, tensor::FloatTensor};

use super::{Values, tensor};
use crate::ops::conv2d::{Conv2dCall, Conv2dConstants, Conv2dKernel, Conv2dSteps, Epilogue};
use crate::ops::kernels::conv2d::{self as kernels, BackwardWeights, Shape, Weights};

/// The sizes of a call for x `[N, C, H, W]`.
fn shape([items, inputs, h, w]: [usize; 4], weight: &FloatTensor<Flex>, call: Conv2dCall) -> Shape {
    let [outputs, _, kernel @ ..] = weight.shape().dims::<4>();
    let Conv2dSteps { stride, dilation, groups } = call.steps;
    let (size, before) = ([h, w], call.padding.map(|(before, _)| before));
    let output = std::array::from_fn(|i| {
        let (first, last) = call.padding[i];
        (size[i] + first + last - (kernel[i] - 1) * dilation[i] - 1) / stride[i] + 1
    });
    Shape { items, inputs, outputs, groups, size, kernel, stride, dilation, before, output }
}

fn epilogue(epilogue: Epilogue, slopes: &Values) -> kernels::Epilogue<'_> {
    match epilogue {
        Epilogue::Nothing => kernels::Epilogue::Nothing,
        Epilogue::Relu => kernels::Epilogue::Relu,
        Epilogue::Slopes => kernels::Epilogue::Slopes(slopes.slice()),
        Epilogue::Clip(low, high) => kernels::Epilogue::Clip(low, high),
        Epilogue::Sigmoid => kernels::Epilogue::Sigmoid,
        Epilogue::Silu => kernels::Epilogue::Silu,
        Epilogue::HardSwish => kernels::Epilogue::HardSwish,
    }
}

fn backward_weights(constants: &Conv2dConstants<FloatTensor<Flex>>, shape: Shape) -> &BackwardWeights {
    let weights = &constants.packed.backward;
    weights.get_or_init(|| BackwardWeights::new(shape, Values::of(constants.weight.clone()).slice()))
}

impl Conv2dKernel for Flex {
    fn conv2d_forward(
        x: FloatTensor<Self>,
        added: Option<FloatTensor<Self>>,
        constants: &Conv2dConstants<FloatTensor<Self>>,
        call: Conv2dCall,
        keeps: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        let shape = shape(x.shape().dims(), &constants.weight, call);
        let weights = &constants.packed.forward;
        let weights = weights.get_or_init(|| Weights::new(shape, Values::of(constants.weight.clone()).slice()));
        let (x, bias, slopes) =
            (Values::of(x), Values::of(constants.bias.clone()), Values::of(constants.slopes.clone()));
        let (added, epilogue) = (added.map(Values::of), epilogue(call.epilogue, &slopes));
        let keeps_sums = keeps && epilogue.needs_sums();
        let added = added.as_ref().map(Values::slice);
        let found = kernels::forward(shape, x.slice(), weights, bias.slice(), added, epilogue, keeps_sums);
        let size = [shape.items, shape.outputs, shape.output[0], shape.output[1]];
        let y = tensor(found.y, size);
        let kept = match found.sums {
            Some(sums) => Some(tensor(sums, size)),
            None => (keeps && call.epilogue != Epilogue::Nothing).then(|| y.clone()),
        };
        (y, kept)
    }

    fn conv2d_pull(
        kept: Option<FloatTensor<Self>>,
        slopes: &FloatTensor<Self>,
        function: Epilogue,
        d_y: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let Some(kept) = kept else { return d_y };
        let [_, channels, rows, columns] = d_y.shape().dims();
        let (kept, d_y, slopes) = (Values::of(kept), Values::of(d_y), Values::of(slopes.clone()));
        d_y.like(kernels::pull(channels, rows * columns, epilogue(function, &slopes), kept.slice(), d_y.slice()))
    }

    fn conv2d_backward(
        x: [usize; 4],
        constants: &Conv2dConstants<FloatTensor<Self>>,
        call: Conv2dCall,
        d_sums: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let shape = shape(x, &constants.weight, call);
        let d_sums = Values::of(d_sums);
        tensor(kernels::backward(shape, backward_weights(constants, shape), d_sums.slice()), x)
    }

    fn conv2d_pull_backward(
        x: [usize; 4],
        kept: Option<FloatTensor<Self>>,
        constants: &Conv2dConstants<FloatTensor<Self>>,
        call: Conv2dCall,
        d_y: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let Some(kept) = kept else { return Self::conv2d_backward(x, constants, call, d_y) };
        let shape = shape(x, &constants.weight, call);
        let (kept, d_y, slopes) = (Values::of(kept), Values::of(d_y), Values::of(constants.slopes.clone()));
        let weights = backward_weights(constants, shape);
        let epilogue = epilogue(call.epilogue, &slopes);
        tensor(kernels::backward_fused(shape, weights, epilogue, kept.slice(), d_y.slice()), x)
    }
}
