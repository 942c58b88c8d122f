//! Pools over one or two spatial axes.
//!
//! The padding, also what `ceil_mode` adds, is put around the input here and averages are corrected for it, so that
//! no library's own reading of these attributes matters.

use burn::tensor::module;
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};
use roll_backends::NdTensor;

use super::super::attributes::Build;
use super::super::error::Problem;
use super::super::value::{Value, elements, plain_device, upload};
use super::window::{Padding, Placement, Window, as_nchw, from_nchw, pad, pair};
use super::{Built, Carried, Operator, Run, first_only, input};

#[derive(Debug)]
struct MaxPool(Window);

pub(super) fn max_pool(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    if build.attributes.flag("storage_order")? {
        return Err("`storage_order` 1 is not run here".into());
    }
    Ok(Box::new(MaxPool(window(build)?)))
}

fn window(build: &mut Build) -> Result<Window, Problem> {
    let ceil = build.attributes.flag("ceil_mode")?;
    Ok(Window { ceil, ..Window::build(build, None)? })
}

impl Operator for MaxPool {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let x_nchw = as_nchw(x)?;
        let placement = self.0.place(&x.shape()[2..])?;
        let x_padded = pad(x_nchw, pair(&placement.padding, (0, 0)), f32::NEG_INFINITY)?;
        let options = MaxPoolOptions::new(pair(&self.0.kernel, 1))
            .with_stride(pair(&self.0.stride, 1))
            .with_dilation(pair(&self.0.dilation, 1));
        Ok(vec![Value::Float(from_nchw(module::max_pool2d(x_padded, options), x)?)])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        first_only(inputs)
    }
}

#[derive(Debug)]
struct AveragePool {
    window: Window,
    count_padding: bool,
}

pub(super) fn average_pool(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    let count_padding = build.attributes.flag("count_include_pad")?;
    let window = window(build)?;
    if window.dilation.iter().any(|d| *d != 1) {
        return Err("an average over dilated windows is not run here".into());
    }
    Ok(Box::new(AveragePool { window, count_padding }))
}

impl Operator for AveragePool {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let x_nchw = as_nchw(x)?;
        let placement = self.window.place(&x.shape()[2..])?;
        let x_padded = pad(x_nchw, pair(&placement.padding, (0, 0)), 0.0)?;
        let options = AvgPoolOptions::new(pair(&self.window.kernel, 1)).with_stride(pair(&self.window.stride, 1));
        let mut y = module::avg_pool2d(x_padded, options);
        if let Some(factors) = self.factors(&x.shape()[2..], &placement) {
            let [h, w] = pair(&placement.output, 1);
            y = y * upload(factors, vec![1, 1, h, w], &plain_device(x)).rank::<4>()?;
        }
        Ok(vec![Value::Float(from_nchw(y, x)?)])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        first_only(inputs)
    }
}

impl AveragePool {
    /// Kernel size over the number of elements that count, per output; none when every window is whole.
    fn factors(&self, input: &[usize], placement: &Placement) -> Option<Vec<f32>> {
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
        Some(match counts.as_slice() {
            [w] => w.iter().map(|&w| factor(0, w)).collect(),
            [h, w, ..] => h.iter().flat_map(|&h| w.iter().map(move |&w| factor(0, h) * factor(1, w))).collect(),
            [] => vec![],
        })
    }
}

#[derive(Debug)]
struct Global {
    max: bool,
}

pub(super) fn global(build: &mut Build) -> Built {
    build.arity(1..=1, 1)?;
    Ok(Box::new(Global { max: build.operator == "GlobalMaxPool" }))
}

impl Operator for Global {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let [n, c, ref spatial @ ..] = *x.shape() else {
            return Err(format!("expected [N, C, ...], found {:?}", x.shape()).into());
        };
        let x_ncl = x.flat().clone().reshape([n, c, elements(spatial)?]);
        let y = if self.max { x_ncl.max_dim(2) } else { x_ncl.mean_dim(2) };
        let shape: Vec<usize> = [n, c].into_iter().chain(spatial.iter().map(|_| 1)).collect();
        Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([n * c]), shape))])
    }

    fn carries(&self, inputs: &[Carried]) -> Option<usize> {
        first_only(inputs)
    }
}
