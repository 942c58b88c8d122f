//! Pooling over one to three spatial axes.
//!
//! The input is padded here, including the padding that `ceil_mode` adds, and averages are corrected for the padding.
//! So results do not depend on the tensor library's interpretation of these attributes.

use burn_tensor::ops::AvgPoolOptions;
use burn_tensor::{Tensor, module};
use roll_backends::NdTensor;
use roll_backends::ops::{MaxPoolWindow, max_pool as max_pool_2d};

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{Value, elements, plain_device, upload};
use super::reduce::long_mean;
use super::window::{Padding, Window, WindowPlacement, as_nchw, pad, pair};
use super::{BatchInput, Built, Operator, Run, input, only_first_batched};

/// A window over two axes.
struct Window2d {
    kernel: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
}

impl Window2d {
    /// Selects one or two axes of a window.
    fn of(window: &Window, axes: std::ops::Range<usize>) -> Self {
        Self {
            kernel: pair(&window.kernel[axes.clone()], 1),
            stride: pair(&window.stride[axes.clone()], 1),
            dilation: pair(&window.dilation[axes], 1),
        }
    }

    /// Adds padding with -infinity before and after each axis.
    fn padded(self, padding: [(usize, usize); 2]) -> MaxPoolWindow {
        let Self { kernel, stride, dilation } = self;
        MaxPoolWindow { kernel, stride, dilation, padding }
    }
}

/// Applies `pool` over the spatial axes of the input, padded with the number `padding`.
///
/// Two axes are pooled at once. Of three axes, the last two are pooled at once and the first afterwards, because maxima
/// and means of a box can be computed axis by axis.
fn pooled(
    x: &NdTensor,
    window: &Window,
    placement: &WindowPlacement,
    padding: f32,
    pool: impl Fn(Tensor<4>, Window2d) -> Tensor<4>,
) -> Result<NdTensor, Problem> {
    let (pads, [n, c]) = (placement.padding.as_slice(), [x.shape()[0], x.shape()[1]]);
    let y = match *x.shape() {
        [_, _, t, h, w] => {
            let frames = x.flat().clone().reshape([n, c * t, h, w]);
            let frames = pool(pad(frames, pair(&pads[1..], (0, 0)), padding)?, Window2d::of(window, 1..3));
            let [_, _, h, w] = frames.dims();
            let (kernel, stride, dilation) = (window.kernel[0], window.stride[0], window.dilation[0]);
            let over_time = Window2d { kernel: [kernel, 1], stride: [stride, 1], dilation: [dilation, 1] };
            pool(pad(frames.reshape([n * c, 1, t, h * w]), [pads[0], (0, 0)], padding)?, over_time)
        }
        _ => {
            let window_2d = Window2d::of(window, 0..window.kernel.len());
            pool(pad(as_nchw(x)?, pair(pads, (0, 0)), padding)?, window_2d)
        }
    };
    let shape = [&[n, c], placement.output.as_slice()].concat();
    Ok(NdTensor::from_flat(y.reshape([elements(&shape)?]), shape))
}

/// The maximum of each window.
#[derive(Debug)]
struct MaxPool {
    window: Window,
}

pub(super) fn max_pool(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    if spec.attributes.flag("storage_order")? {
        return Err("`storage_order` 1 is not run here".into());
    }
    Ok(Box::new(MaxPool { window: read_window(spec)? }))
}

/// The spatial axes of `[N, C, ...]`.
fn spatial(x: &NdTensor) -> Result<&[usize], Problem> {
    x.shape().get(2..).ok_or_else(|| format!("expected [N, C, ...], found {:?}", x.shape()).into())
}

/// Reads the window of a pooling operator.
fn read_window(spec: &mut OperatorSpec) -> Result<Window, Problem> {
    let rounds_up = spec.attributes.flag("ceil_mode")?;
    Ok(Window { rounds_up, ..Window::build(spec, None)? })
}

impl Operator for MaxPool {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let placement = self.window.place(spatial(x)?)?;
        let y = match *x.shape() {
            // One or two spatial axes: the tensor library pads, always with negative infinity.
            [n, c, _, ref rest @ ..] if rest.len() < 2 => {
                let padding = pair(&placement.padding, (0, 0));
                let x_nchw = as_nchw(x)?;
                let [_, _, rows, columns] = x_nchw.dims();
                // The size of the padded input is bounded, too.
                let padded = |length: usize, (before, after)| length.saturating_add(before).saturating_add(after);
                elements(&[n, c, padded(rows, padding[0]), padded(columns, padding[1])])?;
                let shape = [&[n, c], placement.output.as_slice()].concat();
                let count = elements(&shape)?;
                let window_2d = Window2d::of(&self.window, 0..self.window.kernel.len());
                NdTensor::from_flat(max_pool_2d(x_nchw, window_2d.padded(padding)).reshape([count]), shape)
            }
            _ => {
                let pool = |x, window_2d: Window2d| max_pool_2d(x, window_2d.padded([(0, 0); 2]));
                pooled(x, &self.window, &placement, f32::NEG_INFINITY, pool)?
            }
        };
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}

/// The mean of each window.
#[derive(Debug)]
struct AveragePool {
    window: Window,
    /// Whether the zeros of the requested padding count as elements of a window.
    counts_padding: bool,
}

pub(super) fn average_pool(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    let counts_padding = spec.attributes.flag("count_include_pad")?;
    let window = read_window(spec)?;
    if window.dilation.iter().any(|d| *d != 1) {
        return Err("an average over dilated windows is not run here".into());
    }
    Ok(Box::new(AveragePool { window, counts_padding }))
}

impl Operator for AveragePool {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let placement = self.window.place(spatial(x)?)?;
        let mut y = pooled(x, &self.window, &placement, 0.0, |x, Window2d { kernel, stride, .. }| {
            module::avg_pool2d(x, AvgPoolOptions::new(kernel).with_stride(stride))
        })?;
        if let Some(factors) = self.factors(&x.shape()[2..], &placement) {
            let (shape, positions) = (y.shape().to_vec(), factors.len());
            let factors = upload(factors, vec![1, positions], &plain_device(x)).rank::<2>()?;
            let scaled = y.flat().clone().reshape([shape[0] * shape[1], positions]) * factors;
            y = NdTensor::from_flat(scaled.reshape([elements(&shape)?]), shape);
        }
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}

impl AveragePool {
    /// The factor per output position that turns the mean over a whole window into the mean over the elements that
    /// count: the size of the window divided by their number. `None` if all elements of every window count. `input` has
    /// the spatial lengths.
    fn factors(&self, input: &[usize], placement: &WindowPlacement) -> Option<Vec<f32>> {
        // The number of positions that count in each window along axis `i`.
        let axis_counts = |i: usize| -> Vec<usize> {
            let (before, after) = placement.padding[i];
            let counted_after = match (&self.window.padding, self.counts_padding) {
                (Padding::Explicit(pads), true) => {
                    let (_, requested_after) = pads[i];
                    requested_after
                }
                (Padding::Same { .. }, true) => after,
                (_, false) => 0,
            };
            // Positions from `counted_start` to `counted_end` of the padded axis count.
            let counted_start = if self.counts_padding { 0 } else { before };
            let counted_end = before + input[i] + counted_after;
            (0..placement.output[i])
                .map(|o| {
                    let window_start = o * self.window.stride[i];
                    let window_end = window_start + self.window.kernel[i];
                    window_end.min(counted_end).saturating_sub(window_start.max(counted_start))
                })
                .collect()
        };
        let counts: Vec<Vec<usize>> = (0..input.len()).map(axis_counts).collect();
        if counts.iter().zip(&self.window.kernel).all(|(counts, kernel)| counts.iter().all(|c| c == kernel)) {
            return None;
        }
        // The factors of a window multiply over the axes.
        let mut factors = vec![1.0];
        for (counts, &kernel) in counts.iter().zip(&self.window.kernel) {
            let axis_factor = |count: usize| kernel as f32 / count.max(1) as f32;
            factors = factors.iter().flat_map(|f| counts.iter().map(move |&count| f * axis_factor(count))).collect();
        }
        Some(factors)
    }
}

/// The mean or maximum over all spatial axes.
#[derive(Debug)]
struct Global {
    /// Whether the maximum is computed instead of the mean.
    takes_maximum: bool,
}

pub(super) fn global(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(1..=1, 1)?;
    Ok(Box::new(Global { takes_maximum: spec.operator == "GlobalMaxPool" }))
}

impl Operator for Global {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let [n, c, ref spatial @ ..] = *x.shape() else {
            return Err(format!("expected [N, C, ...], found {:?}", x.shape()).into());
        };
        let x_ncl = x.flat().clone().reshape([n, c, elements(spatial)?]);
        let y = if self.takes_maximum {
            x_ncl.max_dim(2)
        } else {
            let length = x_ncl.dims()[2];
            long_mean(x_ncl.reshape([n * c, length, 1])).reshape([n, c, 1])
        };
        let shape: Vec<usize> = [n, c].into_iter().chain(spatial.iter().map(|_| 1)).collect();
        Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([n * c]), shape))])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}
