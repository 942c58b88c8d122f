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
    computed: Conv2d,
    then: Epilogue,
    /// `[C, 1, ...]`, with one axis less than the input.
    slopes: Option<NdTensor>,
    adds_input: bool,
}

impl FusedConv {
    /// Creates the operator from weights `[outputs, inputs / groups, ...]`, and bias and slopes with one number per
    /// output channel. `None` if their shapes do not fit or the convolution is over more than two axes.
    pub fn new(
        conv: &Conv,
        weight: &NdTensor,
        bias: Option<&NdTensor>,
        (then, slopes): (Epilogue, Option<NdTensor>),
        adds_input: bool,
    ) -> Option<Self> {
        let axes = conv.window.kernel.len();
        let outputs = *weight.shape().first()?;
        let fit = |t: &NdTensor| t.shape() == [outputs];
        let sizes = weight.shape().len() == axes + 2 && !weight.shape().contains(&0) && outputs % conv.groups == 0;
        if axes > 2 || !is_usual(&conv.window) || !sizes || !bias.is_none_or(fit) || !slopes.as_ref().is_none_or(fit) {
            return None;
        }
        let steps = Conv2dOptions {
            stride: pair(&conv.window.stride, 1),
            dilation: pair(&conv.window.dilation, 1),
            groups: conv.groups,
        };
        let (bias, given) = (bias.map(|b| b.flat().clone()), slopes.as_ref().map(|s| s.flat().clone()));
        let computed = Conv2d::new(as_nchw(weight).ok()?, bias, steps, then, given);
        let slopes = slopes.map(|s| {
            let shape: Vec<usize> = [outputs].into_iter().chain(std::iter::repeat_n(1, axes)).collect();
            NdTensor::from_flat(s.flat().clone(), shape)
        });
        Some(Self { conv: conv.clone(), weight_shape: weight.shape().to_vec(), computed, then, slopes, adds_input })
    }
}

/// Whether strides and padding have the sizes of real networks; the fused kernels support no others.
fn is_usual(window: &Window) -> bool {
    const STRIDE: usize = 64;
    const REACH: usize = 1 << 12;
    let padded = match &window.padding {
        Padding::Explicit(pads) => pads.iter().all(|(before, after)| *before.max(after) <= REACH),
        Padding::Same { .. } => true,
    };
    padded
        && window.stride.iter().all(|stride| *stride <= STRIDE)
        && (0..window.kernel.len()).all(|axis| window.extent(axis) <= REACH)
}

impl Operator for FusedConv {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let ConvPlacement { pads, shape } = self.conv.placement(x.shape(), &self.weight_shape)?;
        let (x_nchw, pads) = (as_nchw(x)?, pair(&pads, (0, 0)));
        let y = match self.adds_input {
            false => from_nchw(self.computed.apply(x_nchw, None, pads), x)?,
            true => {
                let added = input(inputs, 1)?.float()?;
                if added.shape() == shape {
                    from_nchw(self.computed.apply(x_nchw, Some(as_nchw(added)?), pads), x)?
                } else {
                    // One of the two broadcasts along axes of the other.
                    let sums = from_nchw(self.computed.without_epilogue().apply(x_nchw, None, pads), x)?;
                    let sums = broadcast::apply(&sums, added, |sums, added| sums + added)?;
                    apply_epilogue(self.then, self.slopes.as_ref(), &sums)?
                }
            }
        };
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let rank = inputs.first()?.batched()?;
        // The added value is never a constant: a constant would be part of the bias or not be fused.
        inputs.iter().all(|i| i.batched() == Some(rank)).then_some(rank)
    }
}
