//! Pooling over one to three spatial axes.
//!
//! The input is padded here, including the padding that `ceil_mode` adds, and averages are corrected for it. So the
//! tensor library's interpretation of these attributes does not matter.

use burn_tensor::ops::AvgPoolOptions;
use burn_tensor::{Tensor, module};
use roll_backends::NdTensor;
use roll_backends::ops::{MaxPoolWindow, max_pool as largest};

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

/// Applies `pool` over the spatial axes of the padded input: over the last two at once and, if there are three, over
/// the first afterwards. Maxima and means of a box can be computed axis by axis.
fn pooled(
    x: &NdTensor,
    window: &Window,
    placement: &WindowPlacement,
    padding: f32,
    pool: impl Fn(Tensor<4>, Window2d) -> Tensor<4>,
) -> Result<NdTensor, Problem> {
    let plane = |axes| Window2d::of(window, axes);
    let (pads, [n, c]) = (placement.padding.as_slice(), [x.shape()[0], x.shape()[1]]);
    let y = match *x.shape() {
        [_, _, t, h, w] => {
            let frames = x.flat().clone().reshape([n, c * t, h, w]);
            let frames = pool(pad(frames, pair(&pads[1..], (0, 0)), padding)?, plane(1..3));
            let [_, _, h, w] = frames.dims();
            let (kernel, stride, dilation) = (window.kernel[0], window.stride[0], window.dilation[0]);
            let over_time = Window2d { kernel: [kernel, 1], stride: [stride, 1], dilation: [dilation, 1] };
            pool(pad(frames.reshape([n * c, 1, t, h * w]), [pads[0], (0, 0)], padding)?, over_time)
        }
        _ => pool(pad(as_nchw(x)?, pair(pads, (0, 0)), padding)?, plane(0..window.kernel.len())),
    };
    let shape = [&[n, c], placement.output.as_slice()].concat();
    Ok(NdTensor::from_flat(y.reshape([elements(&shape)?]), shape))
}

#[derive(Debug)]
struct MaxPool(Window);

pub(super) fn max_pool(spec: &mut OperatorSpec) -> Built {
    spec.arity(1..=1, 1)?;
    if spec.attributes.flag("storage_order")? {
        return Err("`storage_order` 1 is not run here".into());
    }
    Ok(Box::new(MaxPool(window(spec)?)))
}

/// The spatial axes of `[N, C, ...]`.
fn spatial(x: &NdTensor) -> Result<&[usize], Problem> {
    x.shape().get(2..).ok_or_else(|| format!("expected [N, C, ...], found {:?}", x.shape()).into())
}

fn window(spec: &mut OperatorSpec) -> Result<Window, Problem> {
    let ceil = spec.attributes.flag("ceil_mode")?;
    Ok(Window { ceil, ..Window::build(spec, None)? })
}

impl Operator for MaxPool {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let placement = self.0.place(spatial(x)?)?;
        let y = match *x.shape() {
            [n, c, _, ref rest @ ..] if rest.len() < 2 => {
                let padding = pair(&placement.padding, (0, 0));
                let x_nchw = as_nchw(x)?;
                let [_, _, rows, columns] = x_nchw.dims();
                // The padded input is bounded, too.
                let along = |length: usize, (before, after)| length.saturating_add(before).saturating_add(after);
                elements(&[n, c, along(rows, padding[0]), along(columns, padding[1])])?;
                let shape = [&[n, c], placement.output.as_slice()].concat();
                let count = elements(&shape)?;
                let plane = Window2d::of(&self.0, 0..self.0.kernel.len());
                NdTensor::from_flat(largest(x_nchw, plane.padded(padding)).reshape([count]), shape)
            }
            _ => pooled(x, &self.0, &placement, f32::NEG_INFINITY, |x, plane| largest(x, plane.padded([(0, 0); 2])))?,
        };
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}

#[derive(Debug)]
struct AveragePool {
    window: Window,
    count_padding: bool,
}

pub(super) fn average_pool(spec: &mut OperatorSpec) -> Built {
    spec.arity(1..=1, 1)?;
    let count_padding = spec.attributes.flag("count_include_pad")?;
    let window = window(spec)?;
    if window.dilation.iter().any(|d| *d != 1) {
        return Err("an average over dilated windows is not run here".into());
    }
    Ok(Box::new(AveragePool { window, count_padding }))
}

impl Operator for AveragePool {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let placement = self.window.place(spatial(x)?)?;
        let mut y = pooled(x, &self.window, &placement, 0.0, |x, Window2d { kernel, stride, .. }| {
            module::avg_pool2d(x, AvgPoolOptions::new(kernel).with_stride(stride))
        })?;
        if let Some(factors) = self.factors(&x.shape()[2..], &placement) {
            let (shape, places) = (y.shape().to_vec(), factors.len());
            let factors = upload(factors, vec![1, places], &plain_device(x)).rank::<2>()?;
            let scaled = y.flat().clone().reshape([shape[0] * shape[1], places]) * factors;
            y = NdTensor::from_flat(scaled.reshape([elements(&shape)?]), shape);
        }
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}

impl AveragePool {
    /// Kernel size divided by the number of elements that count, per output; `None` if every window is whole.
    fn factors(&self, input: &[usize], placement: &WindowPlacement) -> Option<Vec<f32>> {
        let axis_counts = |i: usize| -> Vec<usize> {
            let (before, _) = placement.padding[i];
            let counted_after = match (&self.window.padding, self.count_padding) {
                (Padding::Explicit(pads), true) => pads[i].1,
                (Padding::Same { .. }, true) => placement.padding[i].1,
                (_, false) => 0,
            };
            let first = if self.count_padding { 0 } else { before };
            let end = before + input[i] + counted_after;
            (0..placement.output[i])
                .map(|o| {
                    let start = o * self.window.stride[i];
                    (start + self.window.kernel[i]).min(end).saturating_sub(start.max(first))
                })
                .collect()
        };
        let counts: Vec<Vec<usize>> = (0..input.len()).map(axis_counts).collect();
        if counts.iter().zip(&self.window.kernel).all(|(counts, kernel)| counts.iter().all(|c| c == kernel)) {
            return None;
        }
        let factor = |i: usize, count: usize| self.window.kernel[i] as f32 / count.max(1) as f32;
        Some(counts.iter().enumerate().fold(vec![1.0], |before, (i, counts)| {
            before.iter().flat_map(|f| counts.iter().map(move |&count| f * factor(i, count))).collect()
        }))
    }
}

#[derive(Debug)]
struct Global {
    max: bool,
}

pub(super) fn global(spec: &mut OperatorSpec) -> Built {
    spec.arity(1..=1, 1)?;
    Ok(Box::new(Global { max: spec.operator == "GlobalMaxPool" }))
}

impl Operator for Global {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let [n, c, ref spatial @ ..] = *x.shape() else {
            return Err(format!("expected [N, C, ...], found {:?}", x.shape()).into());
        };
        let x_ncl = x.flat().clone().reshape([n, c, elements(spatial)?]);
        let y = match self.max {
            true => x_ncl.max_dim(2),
            false => {
                let length = x_ncl.dims()[2];
                long_mean(x_ncl.reshape([n * c, length, 1])).reshape([n, c, 1])
            }
        };
        let shape: Vec<usize> = [n, c].into_iter().chain(spatial.iter().map(|_| 1)).collect();
        Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([n * c]), shape))])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}
