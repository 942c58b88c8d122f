//! A convolution with its epilogue, created by [`super::super::fuse`].

use roll_backends::NdTensor;
use roll_backends::ops::{Conv2d, Conv2dOptions, Epilogue};

use super::super::error::Problem;
use super::super::value::Value;
use super::conv::{Conv, ConvPlacement};
use super::elementwise::apply_epilogue;
use super::window::{Padding, Window, as_nchw, from_nchw, pair};
use super::{BatchInput, Operator, Run, broadcast, input};

/// A convolution of input 0 over one or two axes, plus input 1 if there is one, then a function.
#[derive(Debug)]
pub(in super::super) struct FusedConv {
    conv: Conv,
    weight_shape: Vec<usize>,
    /// The operator of the backend, with weights, bias and epilogue.
    conv2d: Conv2d,
    epilogue: Epilogue,
    /// The slopes of [`Epilogue::Slopes`], `[C, 1, ...]`, with one axis less than the input.
    slopes: Option<NdTensor>,
    /// Whether input 1 is added.
    adds_input: bool,
}

impl FusedConv {
    /// Creates the operator from weights `[outputs, inputs / groups, ...]`, and bias and slopes with one number per
    /// output channel. `None` if their shapes do not fit or the convolution is over more than two axes.
    pub fn new(
        conv: &Conv,
        weight: &NdTensor,
        bias: Option<&NdTensor>,
        (epilogue, slopes): (Epilogue, Option<NdTensor>),
        adds_input: bool,
    ) -> Option<Self> {
        let axes = conv.window.kernel.len();
        let outputs = *weight.shape().first()?;
        let is_per_output = |t: &NdTensor| t.shape() == [outputs];
        let weight_fits =
            weight.shape().len() == axes + 2 && !weight.shape().contains(&0) && outputs % conv.groups == 0;
        if axes > 2
            || !is_usual(&conv.window)
            || !weight_fits
            || !bias.is_none_or(is_per_output)
            || !slopes.as_ref().is_none_or(is_per_output)
        {
            return None;
        }
        let options = Conv2dOptions {
            stride: pair(&conv.window.stride, 1),
            dilation: pair(&conv.window.dilation, 1),
            groups: conv.groups,
        };
        let (flat_bias, flat_slopes) = (bias.map(|b| b.flat().clone()), slopes.as_ref().map(|s| s.flat().clone()));
        let conv2d = Conv2d::new(as_nchw(weight).ok()?, flat_bias, options, epilogue, flat_slopes);
        let slopes = slopes.map(|s| {
            let shape: Vec<usize> = [outputs].into_iter().chain(std::iter::repeat_n(1, axes)).collect();
            NdTensor::from_flat(s.flat().clone(), shape)
        });
        Some(Self { conv: conv.clone(), weight_shape: weight.shape().to_vec(), conv2d, epilogue, slopes, adds_input })
    }
}

/// Whether strides, padding and the extent of the window are at most those of real networks. The fused kernels support
/// no larger ones.
fn is_usual(window: &Window) -> bool {
    const MAX_STRIDE: usize = 64;
    /// Greatest padding at one end, and greatest extent of a dilated kernel.
    const MAX_REACH: usize = 1 << 12;
    let padding_is_usual = match &window.padding {
        Padding::Explicit(pads) => pads.iter().all(|(before, after)| *before.max(after) <= MAX_REACH),
        Padding::Same { .. } => true,
    };
    padding_is_usual
        && window.stride.iter().all(|stride| *stride <= MAX_STRIDE)
        && (0..window.kernel.len()).all(|axis| window.extent(axis) <= MAX_REACH)
}

impl Operator for FusedConv {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let ConvPlacement { pads, shape } = self.conv.placement(x.shape(), &self.weight_shape)?;
        let (x_nchw, pads) = (as_nchw(x)?, pair(&pads, (0, 0)));
        if !self.adds_input {
            return Ok(vec![Value::Float(from_nchw(self.conv2d.apply(x_nchw, None, pads), x)?)]);
        }
        let added = input(inputs, 1)?.float()?;
        let y = if added.shape() == shape {
            from_nchw(self.conv2d.apply(x_nchw, Some(as_nchw(added)?), pads), x)?
        } else {
            // The shapes differ: one value is broadcast to the other's shape, which the backend's epilogue cannot do.
            let convolved = from_nchw(self.conv2d.without_epilogue().apply(x_nchw, None, pads), x)?;
            let sum = broadcast::apply(&convolved, added, |convolved, added| convolved + added)?;
            apply_epilogue(self.epilogue, self.slopes.as_ref(), &sum)?
        };
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = inputs.first()?.batched()?;
        // The added value must have a batch of its own, with as many axes: then each item gets its own. (It is never a
        // constant: fusion folds a constant into the bias or leaves the sum a node.)
        let all_have_the_batch = inputs.iter().all(|input| input.batched() == Some(rank));
        all_have_the_batch.then_some(rank)
    }
}
