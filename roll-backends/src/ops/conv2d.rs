//! 2-d convolution with constant weights and a fused epilogue (activation, residual).

use std::sync::Arc;
#[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
use std::sync::OnceLock;

use burn_tensor::ops::{ConvOptions, PadMode};
use burn_tensor::{FloatDType, Shape, Tensor};

use super::Kernels;
use super::expression::Expression;
use super::operator::{Operator, Pullback, call};
use crate::backend::{Backend, TensorMetadata, tensor::FloatTensor as Floats};
use crate::device::is_flex;

/// The epilogue of a convolution: an activation that is applied to each sum `z` (products, bias and residual).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Epilogue {
    /// The identity.
    #[default]
    Nothing,
    /// `max(z, 0)`.
    Relu,
    /// PReLU: `z` if positive, else `z` times the channel's slope.
    Slopes,
    /// `clamp(z, low, high)`.
    Clip(f32, f32),
    /// `1 / (1 + e^-z)`.
    Sigmoid,
    /// `z * sigmoid(z)`.
    Silu,
    /// `z * clamp(z / 6 + 1/2, 0, 1)`.
    HardSwish,
}

/// Stride, dilation and groups of a convolution. Axes are rows, columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dOptions {
    /// Stride.
    pub stride: [usize; 2],
    /// Dilation: distance between the taps of the kernel.
    pub dilation: [usize; 2],
    /// Number of groups of channels.
    pub groups: usize,
}

/// A 2-d convolution with constant weights. Gradients flow to its input, never to the weights.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor<4>,
    bias: Tensor<1>,
    /// Slopes of PReLU; not read for other epilogues.
    slopes: Tensor<1>,
    options: Conv2dOptions,
    epilogue: Epilogue,
    packed: Arc<Packed>,
}

/// The weights, packed for a backend's own kernels at their first use.
#[derive(Debug, Default)]
pub struct Packed {
    #[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
    pub(super) forward: OnceLock<super::kernels::conv2d::Weights>,
    #[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
    pub(super) backward: OnceLock<super::kernels::conv2d::BackwardWeights>,
}

impl Conv2d {
    /// Creates a convolution from f32 weights `[outputs, inputs / groups, rows, columns]`, a bias `[outputs]` (zeros by
    /// default) and, for [`Epilogue::Slopes`] only, the slopes `[outputs]`. Panics if the shapes do not match.
    pub fn new(
        weight: Tensor<4>,
        bias: Option<Tensor<1>>,
        options: Conv2dOptions,
        epilogue: Epilogue,
        slopes: Option<Tensor<1>>,
    ) -> Self {
        let [outputs, ..] = weight.dims();
        let bias = bias.unwrap_or_else(|| Tensor::zeros([outputs], (&weight.device(), weight.dtype())));
        assert_eq!(epilogue == Epilogue::Slopes, slopes.is_some(), "`Epilogue::Slopes`, and only it, takes slopes");
        let slopes = slopes.unwrap_or_else(|| bias.clone());
        assert!(
            options.groups > 0 && outputs % options.groups == 0 && !weight.dims().contains(&0),
            "weights {:?} in {} groups",
            weight.dims(),
            options.groups
        );
        assert!(bias.dims() == [outputs] && slopes.dims() == [outputs], "bias and slopes of {outputs} output channels");
        assert!(!options.stride.contains(&0) && !options.dilation.contains(&0), "{options:?}");
        Self { weight, bias, slopes, options, epilogue, packed: Arc::default() }
    }

    /// Returns the same convolution without epilogue.
    pub fn without_epilogue(&self) -> Self {
        Self { epilogue: Epilogue::Nothing, ..self.clone() }
    }

    /// Convolves x `[N, inputs, H, W]`, padded by `padding` zeros (before, after) of rows and columns, and returns
    /// `[N, outputs, H', W']`. `residual` (of the result's shape) is added before the epilogue's activation.
    /// All tensors are f32. Panics if the shapes do not match.
    pub fn apply(&self, x: Tensor<4>, residual: Option<Tensor<4>>, padding: [(usize, usize); 2]) -> Tensor<4> {
        let ([_, inputs, h, w], [_, inputs_per_group, rows, columns]) = (x.dims(), self.weight.dims());
        let extent = |axis: usize, taps: usize| (taps - 1) * self.options.dilation[axis] + 1;
        let sizes_and_extents = [(h, extent(0, rows)), (w, extent(1, columns))];
        let mut padded_axes = sizes_and_extents.into_iter().zip(padding);
        let kernel_fits = padded_axes.all(|((size, extent), (before, after))| size + before + after >= extent);
        assert!(
            inputs == inputs_per_group * self.options.groups && kernel_fits,
            "convolution of {:?} with {:?}, padded by {padding:?}",
            x.dims(),
            self.weight.dims()
        );
        let is_symmetric = padding.iter().all(|(before, after)| before == after);
        let (x, padding) = if is_symmetric || has_own_kernel(&x) {
            (x, padding)
        } else {
            (x.pad(padding, PadMode::Constant(0.0)), [(0, 0); 2])
        };
        let applied = Applied { conv: self.clone(), padding };
        match residual {
            None => call(applied, [x.into_dispatch()]),
            Some(residual) => call(applied, [x.into_dispatch(), residual.into_dispatch()]),
        }
    }
}

/// A call of [`Conv2d::apply`]; the operands are x and, if there is one, the residual.
struct Applied {
    conv: Conv2d,
    padding: [(usize, usize); 2],
}

impl Applied {
    /// The call with its constants as tensors of the backend `B`.
    fn on<B: Kernels>(self) -> Conv2dCall<Floats<B>> {
        let Conv2d { weight, bias, slopes, options, epilogue, packed } = self.conv;
        let constants = [weight.into_dispatch(), bias.into_dispatch(), slopes.into_dispatch()];
        let [weight, bias, slopes] = constants.map(B::constant);
        Conv2dCall { weight, bias, slopes, packed, options, padding: self.padding, epilogue }
    }
}

impl Operator<1> for Applied {
    fn record<B: Kernels>(self, [x]: [Floats<B>; 1], [wanted]: [bool; 1]) -> (Floats<B>, impl Pullback<B, 1>) {
        let (call, shape) = (self.on::<B>(), x.shape().dims());
        let no_residual = None;
        let (y, saved) = B::conv2d_forward(x, no_residual, &call, wanted);
        (y, move |d_y| [Some(B::conv2d_pull_both(shape, saved, &call, d_y))])
    }
}

impl Operator<2> for Applied {
    fn record<B: Kernels>(self, [x, residual]: [Floats<B>; 2], wanted: [bool; 2]) -> (Floats<B>, impl Pullback<B, 2>) {
        let (call, shape) = (self.on::<B>(), x.shape().dims());
        let [x_wanted, residual_wanted] = wanted;
        let is_recorded = wanted.contains(&true);
        let (y, saved) = B::conv2d_forward(x, Some(residual), &call, is_recorded);
        (y, move |d_y| {
            let d_sums = B::conv2d_pull_epilogue(saved, &call, d_y);
            let d_x = x_wanted.then(|| B::conv2d_pull_convolution(shape, &call, d_sums.clone()));
            [d_x, residual_wanted.then_some(d_sums)]
        })
    }
}

/// Whether x is on a backend with kernels of its own for 2-d windows. These support padding that differs before and
/// after an axis; Burn's do not.
pub(super) fn has_own_kernel(x: &Tensor<4>) -> bool {
    !cfg!(feature = "portable-kernels") && is_flex(&x.device())
}

/// A convolution on one backend.
pub struct Conv2dCall<T> {
    /// Weights, `[outputs, inputs / groups, rows, columns]`.
    pub weight: T,
    /// Bias, `[outputs]`.
    pub bias: T,
    /// Slopes of PReLU, `[outputs]`; read for [`Epilogue::Slopes`] only.
    pub slopes: T,
    pub packed: Arc<Packed>,
    pub options: Conv2dOptions,
    /// Zeros before and after rows and columns.
    pub padding: [(usize, usize); 2],
    pub epilogue: Epilogue,
}

impl<T> Conv2dCall<T> {
    /// Burn's options, for symmetric padding.
    fn burn_options(&self) -> ConvOptions<2> {
        let Conv2dOptions { stride, dilation, groups } = self.options;
        ConvOptions::new(stride, self.padding.map(|(before, _)| before), dilation, groups)
    }
}

/// The convolution and the gradient of its input on one backend.
pub trait Conv2dKernel: Backend {
    /// Returns the result and, if `is_recorded` is true, the tensor that [`Conv2dKernel::conv2d_pull_epilogue`] needs
    /// (`None` if it needs none).
    fn conv2d_forward(
        x: Floats<Self>,
        residual: Option<Floats<Self>>,
        call: &Conv2dCall<Floats<Self>>,
        is_recorded: bool,
    ) -> (Floats<Self>, Option<Floats<Self>>) {
        let z = Self::conv2d(x, call.weight.clone(), Some(call.bias.clone()), call.burn_options());
        let z = Expression::<Self>(z);
        let z = match residual {
            Some(residual) => z + Expression(residual),
            None => z,
        };
        let y = match call.epilogue {
            Epilogue::Nothing => return (z.0, None),
            Epilogue::Relu => Self::relu(z.0.clone()),
            // max(z, 0) - slope * max(-z, 0).
            Epilogue::Slopes => {
                let negative_part = Expression::<Self>(Self::relu((z.clone() * -1.0).0)) * by_channel(&call.slopes);
                (Expression::<Self>(Self::relu(z.0.clone())) - negative_part).0
            }
            Epilogue::Clip(low, high) => {
                Self::float_clamp_max(Self::float_clamp_min(z.0.clone(), low.into()), high.into())
            }
            Epilogue::Sigmoid => Self::sigmoid(z.0.clone()),
            Epilogue::Silu => (z.clone() * Expression(Self::sigmoid(z.0.clone()))).0,
            Epilogue::HardSwish => (z.clone() * hard_sigmoid(z.clone())).0,
        };
        let saved = match call.epilogue {
            // The derivatives of these are computed from the result.
            Epilogue::Relu | Epilogue::Clip(..) | Epilogue::Sigmoid => y.clone(),
            // The derivatives of these are computed from the sum. (`Nothing` has returned above.)
            Epilogue::Nothing | Epilogue::Slopes | Epilogue::Silu | Epilogue::HardSwish => z.0,
        };
        (y, is_recorded.then_some(saved))
    }

    /// The gradient of the sums before the epilogue, given the gradient of the result and the tensor that the forward
    /// pass saved.
    fn conv2d_pull_epilogue(
        saved: Option<Floats<Self>>,
        call: &Conv2dCall<Floats<Self>>,
        d_y: Floats<Self>,
    ) -> Floats<Self> {
        let Some(saved) = saved else { return d_y };
        // Returns `d` where `x` is positive, else 0.
        let where_positive =
            |x: Expression<Self>, d: Expression<Self>| Expression::<Self>(Self::relu_backward(x.0, d.0));
        let (saved, d_y) = (Expression::<Self>(saved), Expression::<Self>(d_y));
        match call.epilogue {
            Epilogue::Nothing => d_y.0,
            Epilogue::Relu => Self::relu_backward(saved.0, d_y.0),
            Epilogue::Slopes => {
                let positive = where_positive(saved, d_y.clone());
                (positive.clone() + (d_y - positive) * by_channel(&call.slopes)).0
            }
            // d_y where low < y < high.
            Epilogue::Clip(low, high) => {
                let below_high = where_positive(saved.clone() * -1.0 + f64::from(high), d_y);
                where_positive(saved + f64::from(-low), below_high).0
            }
            Epilogue::Sigmoid => Self::sigmoid_backward(saved.0, d_y.0),
            // d_y * s (1 + z (1 - s)).
            Epilogue::Silu => {
                let s = Expression::<Self>(Self::sigmoid(saved.0.clone()));
                (d_y * s.clone() * (saved * (s * -1.0 + 1.0) + 1.0)).0
            }
            // d_y * hard_sigmoid(z), plus d_y * z / 6 where -3 < z < 3.
            Epilogue::HardSwish => {
                let below_3 = where_positive(saved.clone() * -1.0 + 3.0, d_y.clone() * saved.clone() * (1.0 / 6.0));
                (d_y * hard_sigmoid(saved.clone()) + where_positive(saved + 3.0, below_3)).0
            }
        }
    }

    /// The gradient of x, whose shape `[N, inputs, H, W]` is `x_shape`, given the gradient of the sums.
    fn conv2d_pull_convolution(
        x_shape: [usize; 4],
        call: &Conv2dCall<Floats<Self>>,
        d_sums: Floats<Self>,
    ) -> Floats<Self> {
        // Burn reads only the shape of x.
        let x = Self::float_empty(Shape::new(x_shape), &d_sums.device(), FloatDType::F32);
        Self::conv2d_x_backward(x, call.weight.clone(), d_sums, call.burn_options())
    }

    /// The gradient of x, given the gradient of the result and the tensor that the forward pass saved.
    fn conv2d_pull_both(
        x_shape: [usize; 4],
        saved: Option<Floats<Self>>,
        call: &Conv2dCall<Floats<Self>>,
        d_y: Floats<Self>,
    ) -> Floats<Self> {
        Self::conv2d_pull_convolution(x_shape, call, Self::conv2d_pull_epilogue(saved, call, d_y))
    }
}

/// `clamp(z / 6 + 1/2, 0, 1)`.
fn hard_sigmoid<B: Backend>(z: Expression<B>) -> Expression<B> {
    let line = z * (1.0 / 6.0) + 0.5;
    Expression(B::float_clamp(line.0, 0.0.into(), 1.0.into()))
}

/// Reshapes one number per channel for broadcasting over `[N, C, H, W]`.
fn by_channel<B: Backend>(slopes: &Floats<B>) -> Expression<B> {
    let slopes = Expression::<B>(slopes.clone());
    let [channels] = slopes.dims();
    slopes.reshape([1, channels, 1, 1])
}
