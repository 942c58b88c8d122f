//! Linear layers, with and without a low-rank part.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Tensor};

use super::{operator, pull};

/// `x W^T + b`: x `[L, in]`, weight `[out, in]` as checkpoints store it, bias `[out]`.
pub fn linear(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let bias = checked_bias(&x, &weight, bias);
    let (x, weight, bias) = (x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(<Dispatch as LinearOps>::fused_linear(x, weight, bias))
}

/// `x W^T + b + scale * (x A^T) B^T`: as [`linear`], with down `[rank, in]`, up `[out, rank]` and scale = alpha / rank.
/// The low-rank part is added in place, never merged.
pub fn linear_lora(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    down: Tensor<2>,
    up: Tensor<2>,
    scale: f64,
) -> Tensor<2> {
    let bias = checked_bias(&x, &weight, bias);
    let [outputs, inputs] = weight.dims();
    let rank = down.dims()[0];
    assert!(
        down.dims() == [rank, inputs] && up.dims() == [outputs, rank],
        "a low-rank part of {:?} and {:?} for a weight of {:?}",
        down.dims(),
        up.dims(),
        weight.dims()
    );
    let (x, weight, bias) = (x.into_dispatch(), weight.into_dispatch(), bias.into_dispatch());
    let (down, up) = (down.into_dispatch(), up.into_dispatch());
    Tensor::from_dispatch(<Dispatch as LinearOps>::fused_linear_lora(x, weight, bias, down, up, scale as f32))
}

fn checked_bias(x: &Tensor<2>, weight: &Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<1> {
    let [outputs, inputs] = weight.dims();
    assert_eq!(x.dims()[1], inputs, "columns of x for a weight of {:?}", weight.dims());
    if let Some(bias) = bias {
        assert_eq!(bias.dims(), [outputs], "the bias for a weight of {:?}", weight.dims());
        return bias;
    }
    let device = if x.device().is_autodiff() { x.clone().inner().device() } else { x.device() };
    Tensor::zeros([outputs], (&device, DType::F32))
}

/// Linear layers as the run-time dispatch calls them. A backend implements [`LinearKernel`] and forwards to it here.
#[backend_extension(Flex, Autodiff)]
pub trait LinearOps: Backend {
    /// See [`linear`].
    fn fused_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`linear_lora`].
    fn fused_linear_lora(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        down: FloatTensor<Self>,
        up: FloatTensor<Self>,
        scale: f32,
    ) -> FloatTensor<Self>;
}

/// The low-rank part of a layer.
#[derive(Clone, Debug)]
pub struct Lora<T> {
    /// `[rank, in]`.
    pub down: T,
    /// `[out, rank]`.
    pub up: T,
    /// alpha / rank.
    pub scale: f32,
}

/// Linear layers and their gradients on one backend.
pub trait LinearKernel: Backend {
    /// The result, and `x A^T` where there is a low-rank part.
    fn linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        lora: Option<Lora<FloatTensor<Self>>>,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>);

    /// The wanted ones of the gradients of x, weight, bias, down and up.
    fn linear_backward(
        saved: SavedLinear<FloatTensor<Self>>,
        d_y: FloatTensor<Self>,
        wanted: [bool; 5],
    ) -> [Option<FloatTensor<Self>>; 5];
}

/// What the backward of a linear layer needs.
#[derive(Clone, Debug)]
pub struct SavedLinear<T> {
    /// The operand.
    pub x: T,
    /// `[out, in]`.
    pub weight: T,
    /// The low-rank part and `x A^T`.
    pub lora: Option<(Lora<T>, T)>,
}

impl<B: LinearKernel, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn fused_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Linear;
        impl<B: LinearKernel> Backward<B, 3> for Linear {
            type State = SavedLinear<FloatTensor<B>>;
            fn backward(self, ops: Ops<Self::State, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
                pull::<B, _, 3>(ops, gradients, |saved, d_y, [x, weight, bias]| {
                    let [d_x, d_weight, d_bias, ..] = B::linear_backward(saved, d_y, [x, weight, bias, false, false]);
                    [d_x, d_weight, d_bias]
                });
            }
        }
        let ((x, x_node), (weight, weight_node), (bias, bias_node)) =
            (x.into_parts(), weight.into_parts(), bias.into_parts());
        operator::<_, B, C, 3>(Linear, [x_node, weight_node, bias_node], || {
            let (y, _) = B::linear_forward(x.clone(), weight.clone(), bias, None);
            (y, SavedLinear { x, weight, lora: None })
        })
    }

    fn fused_linear_lora(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        down: FloatTensor<Self>,
        up: FloatTensor<Self>,
        scale: f32,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct LinearLora;
        impl<B: LinearKernel> Backward<B, 5> for LinearLora {
            type State = SavedLinear<FloatTensor<B>>;
            fn backward(self, ops: Ops<Self::State, 5>, gradients: &mut Gradients, _: &mut Checkpointer) {
                pull::<B, _, 5>(ops, gradients, B::linear_backward);
            }
        }
        let ((x, x_node), (weight, weight_node), (bias, bias_node)) =
            (x.into_parts(), weight.into_parts(), bias.into_parts());
        let ((down, down_node), (up, up_node)) = (down.into_parts(), up.into_parts());
        let nodes = [x_node, weight_node, bias_node, down_node, up_node];
        operator::<_, B, C, 5>(LinearLora, nodes, || {
            let lora = Lora { down, up, scale };
            let (y, inner) = B::linear_forward(x.clone(), weight.clone(), bias, Some(lora.clone()));
            (y, SavedLinear { x, weight, lora: inner.map(|inner| (lora, inner)) })
        })
    }
}

#[cfg(feature = "flex")]
mod on_flex {
    use burn::backend::{Flex, TensorMetadata};

    use super::*;
    use crate::ops::flex::{Values, tensor};
    use crate::ops::kernels::linear::{self as kernels, Shape};

    impl LinearOps for Flex {
        fn fused_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::linear_forward(x, weight, bias, None).0
        }

        fn fused_linear_lora(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            down: FloatTensor<Self>,
            up: FloatTensor<Self>,
            scale: f32,
        ) -> FloatTensor<Self> {
            Self::linear_forward(x, weight, bias, Some(Lora { down, up, scale })).0
        }
    }

    fn shape(x: &FloatTensor<Flex>, weight: &FloatTensor<Flex>) -> Shape {
        let ([rows, inputs], [outputs, _]) = (x.shape().dims::<2>(), weight.shape().dims::<2>());
        Shape { rows, inputs, outputs }
    }

    /// The low-rank part as the kernels take it.
    struct LoraValues {
        down: Values,
        up: Values,
        scale: f32,
        rank: usize,
    }

    impl LoraValues {
        fn of(lora: Lora<FloatTensor<Flex>>) -> Self {
            let [rank, _] = lora.down.shape().dims::<2>();
            Self { down: Values::of(lora.down), up: Values::of(lora.up), scale: lora.scale, rank }
        }

        fn kernel(&self) -> kernels::Lora<'_> {
            kernels::Lora { a: self.down.slice(), b: self.up.slice(), scale: self.scale, rank: self.rank }
        }
    }

    impl LinearKernel for Flex {
        fn linear_forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            lora: Option<Lora<FloatTensor<Self>>>,
        ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
            let shape = shape(&x, &weight);
            let (x, weight, bias) = (Values::of(x), Values::of(weight), Values::of(bias));
            let lora = lora.map(LoraValues::of);
            let (y, inner) =
                kernels::forward(shape, x.slice(), weight.slice(), bias.slice(), lora.as_ref().map(LoraValues::kernel));
            let inner = lora.map(|lora| tensor(inner, [shape.rows, lora.rank]));
            (tensor(y, [shape.rows, shape.outputs]), inner)
        }

        fn linear_backward(
            saved: SavedLinear<FloatTensor<Self>>,
            d_y: FloatTensor<Self>,
            wanted: [bool; 5],
        ) -> [Option<FloatTensor<Self>>; 5] {
            let shape = shape(&saved.x, &saved.weight);
            let (x, weight, d_y) = (Values::of(saved.x), Values::of(saved.weight), Values::of(d_y));
            let lora = saved.lora.map(|(lora, inner)| (LoraValues::of(lora), Values::of(inner)));
            let parts = lora.as_ref().map(|(lora, inner)| (lora.kernel(), inner.slice()));
            let [d_x, d_weight, d_bias, d_down, d_up] =
                kernels::backward(shape, x.slice(), weight.slice(), parts, d_y.slice(), wanted);
            let like_lora = |d: Option<Vec<f32>>, pick: fn(&LoraValues) -> &Values| {
                d.zip(lora.as_ref()).map(|(d, (lora, _))| pick(lora).like(d))
            };
            [
                d_x.map(|d| x.like(d)),
                d_weight.map(|d| weight.like(d)),
                d_bias.map(|d| tensor(d, [shape.outputs])),
                like_lora(d_down, |lora| &lora.down),
                like_lora(d_up, |lora| &lora.up),
            ]
        }
    }
}
