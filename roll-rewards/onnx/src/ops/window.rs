//! Windows that slide over spatial axes (kernel, stride, dilation, padding), for convolutions and pooling.

use burn_tensor::Tensor;
use roll_backends::NdTensor;

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{elements, reshaped};

/// Padding at both ends of each axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Padding {
    /// Padding before and after each axis.
    Explicit(Vec<(usize, usize)>),
    /// Padding for an output length of ceil(input / stride). If the total is odd, the extra element is after the input
    /// (`odd_after`) or before it.
    Same { odd_after: bool },
}

/// A window over one to three spatial axes.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pub kernel: Vec<usize>,
    pub stride: Vec<usize>,
    pub dilation: Vec<usize>,
    pub padding: Padding,
    /// Whether output lengths are rounded up (`ceil_mode` of pooling).
    pub rounds_up: bool,
}

/// Placement of a window on the axes of one input.
pub(super) struct WindowPlacement {
    /// Padding before and after each axis. The padding after an axis ends where the last window ends: it exceeds the
    /// requested padding if `rounds_up` adds a window, and is smaller if the last elements are in no window.
    pub padding: Vec<(usize, usize)>,
    /// Lengths of the output.
    pub output: Vec<usize>,
}

impl Window {
    /// Reads the attributes. `kernel` is the spatial shape of a convolution's weights; without it `kernel_shape` is
    /// required.
    pub fn build(spec: &mut OperatorSpec, kernel: Option<&[usize]>) -> Result<Self, Problem> {
        let attributes = &mut spec.attributes;
        let declared = match attributes.ints("kernel_shape")? {
            Some(ints) => Some(super::super::attributes::sizes("kernel_shape", &ints, 1)?),
            None => None,
        };
        let kernel = match (kernel, declared) {
            (Some(kernel), Some(declared)) if kernel != declared => {
                return Err(format!("`kernel_shape` is {declared:?}, but the weights have {kernel:?}").into());
            }
            (Some(kernel), _) => kernel.to_vec(),
            (None, Some(declared)) => declared,
            (None, None) => return Err("`kernel_shape` is missing".into()),
        };
        let axes = kernel.len();
        if !(1..=3).contains(&axes) {
            return Err(format!("expected a window over one to three axes, found {axes}").into());
        }
        let ones = vec![1; axes];
        let stride = attributes.sizes("strides", 1, &ones)?;
        let dilation = attributes.sizes("dilations", 1, &ones)?;
        let pads = attributes.sizes("pads", 0, &vec![0; 2 * axes])?;
        let padding = match attributes.text("auto_pad", "NOTSET")?.as_str() {
            "NOTSET" => Padding::Explicit((0..axes).map(|i| (pads[i], pads[axes + i])).collect()),
            "VALID" => Padding::Explicit(vec![(0, 0); axes]),
            "SAME_UPPER" => Padding::Same { odd_after: true },
            "SAME_LOWER" => Padding::Same { odd_after: false },
            other => return Err(format!("`auto_pad` is {other}, which is not known").into()),
        };
        Ok(Self { kernel, stride, dilation, padding, rounds_up: false })
    }

    /// The extent of the dilated kernel along spatial axis `i`.
    pub fn extent(&self, i: usize) -> usize {
        (self.kernel[i] - 1).saturating_mul(self.dilation[i]).saturating_add(1)
    }

    /// Places the window on spatial axes of lengths `input`. Fails if the window does not fit.
    pub fn place(&self, input: &[usize]) -> Result<WindowPlacement, Problem> {
        if input.len() != self.kernel.len() {
            return Err(format!("expected {} spatial axes, found {input:?}", self.kernel.len()).into());
        }
        let (mut padding, mut output) = (vec![], vec![]);
        for (i, &length) in input.iter().enumerate() {
            let (extent, stride) = (self.extent(i), self.stride[i]);
            let (before, after) = match &self.padding {
                Padding::Explicit(pads) => pads[i],
                Padding::Same { odd_after } => {
                    let steps = length.div_ceil(stride).checked_sub(1);
                    let steps = steps.ok_or_else(|| format!("spatial axis {i} is empty"))?;
                    let total = (steps * stride).saturating_add(extent).saturating_sub(length);
                    let (smaller_half, larger_half) = (total / 2, total - total / 2);
                    if *odd_after { (smaller_half, larger_half) } else { (larger_half, smaller_half) }
                }
            };
            let padded = length.saturating_add(before).saturating_add(after);
            let max_start = padded.checked_sub(extent).ok_or_else(|| {
                format!("a window of {extent} does not fit the padded length {padded} of spatial axis {i}")
            })?;
            let mut count = if self.rounds_up { max_start.div_ceil(stride) } else { max_start / stride } + 1;
            // A window that would start in the padding after the input is omitted.
            if self.rounds_up && (count - 1) * stride >= length + before {
                count -= 1;
            }
            let last_window_end = ((count - 1) * stride).saturating_add(extent);
            padding.push((before, last_window_end.saturating_sub(length + before)));
            output.push(count);
        }
        Ok(WindowPlacement { padding, output })
    }
}

/// Returns `x` as `[N, C, H, W]`: `[N, C, W]` gets a height of one. Fails on other ranks.
pub(super) fn as_nchw(x: &NdTensor) -> Result<Tensor<4>, Problem> {
    match *x.shape() {
        [n, c, w] => Ok(x.flat().clone().reshape([n, c, 1, w])),
        [..] => Ok(x.rank::<4>()?),
    }
}

/// Reshapes the result of a computation on [`as_nchw`] to the rank of `like`.
pub(super) fn from_nchw(y: Tensor<4>, like: &NdTensor) -> Result<NdTensor, Problem> {
    let [n, c, _, w] = y.dims();
    let y = NdTensor::from(y);
    if like.shape().len() == 3 { reshaped(&y, vec![n, c, w]) } else { Ok(y) }
}

/// Converts a list with one entry per spatial axis to the entries of rows and columns. With one axis, its entry is that
/// of the columns, and the rows get `default`.
pub(super) fn pair<T: Copy>(list: &[T], default: T) -> [T; 2] {
    match *list {
        [w] => [default, w],
        [h, w, ..] => [h, w],
        [] => [default, default],
    }
}

/// Pads the last axes of `x` with `value`, by `pads` (before, after) per axis.
pub(super) fn pad<const D: usize, const S: usize>(
    x: Tensor<D>,
    pads: [(usize, usize); S],
    value: f32,
) -> Result<Tensor<D>, Problem> {
    let mut shape = x.dims();
    for (length, (before, after)) in shape[D - S..].iter_mut().zip(pads) {
        *length = length.saturating_add(before).saturating_add(after);
    }
    // Fails if the padded tensor is too large.
    elements(&shape)?;
    if pads == [(0, 0); S] {
        return Ok(x);
    }
    Ok(x.pad(pads, burn_tensor::ops::PadMode::Constant(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_that_do_not_fit_are_errors() {
        let place = |padding, length| {
            let window = Window { kernel: vec![3], stride: vec![2], dilation: vec![1], padding, rounds_up: false };
            window.place(&[length]).map(|placement| placement.output).map_err(|problem| problem.0)
        };
        assert_eq!(place(Padding::Same { odd_after: true }, 3), Ok(vec![2]));
        assert!(place(Padding::Same { odd_after: true }, 0).unwrap_err().contains("axis 0 is empty"));
        assert!(place(Padding::Explicit(vec![(0, 0)]), 2).unwrap_err().contains("padded length 2"));
    }
}
