//! Convolution over two axes with constant weights, what is done to its sums, and the gradient of its input.
//!
//! One description (`passes`) says where taps fall; what has many channels in a group is computed by `tiles`, each channel
//! by itself by `depthwise`.

mod depthwise;
mod passes;
mod place;
mod then;
mod tiles;

use rayon::prelude::*;

use self::place::{Place, filled};
use self::tiles::Packed;
use crate::ops::kernels::simd::{MulAdd, vectorised};

pub use self::passes::Shape;
pub use self::then::Then;

/// The weight of a convolution in the order in which the kernels read it.
#[derive(Debug)]
pub enum Weights {
    /// `[channels, taps]`, as it is.
    Depthwise(Vec<f32>),
    /// Packed for each pass.
    Tiles(Vec<Packed>),
}

impl Weights {
    /// For the forward pass of convolutions of `shape`, whatever its items and sizes.
    pub fn forward(shape: Shape, weight: &[f32]) -> Self {
        match shape.is_depthwise() {
            true => Self::Depthwise(weight.to_vec()),
            false => Self::Tiles(vec![tiles::pack_forward(shape, weight)]),
        }
    }

    /// For the gradient of the input of convolutions of `shape`, of at least `stride` rows and columns.
    pub fn backward(shape: Shape, weight: &[f32]) -> Self {
        match shape.is_depthwise() {
            true => Self::Depthwise(weight.to_vec()),
            false => {
                // The taps of a place do not depend on how many positions there are.
                let passes = Shape { size: shape.stride, ..shape }.backward();
                Self::Tiles(passes.iter().map(|pass| tiles::pack_backward(shape, pass, weight)).collect())
            }
        }
    }
}

/// A result, and the sums before [`Then`] where they are wanted.
pub struct Outputs {
    /// `[items, outputs, rows, columns]`.
    pub y: Vec<f32>,
    /// Of the same shape.
    pub sums: Option<Vec<f32>>,
}

/// The convolution of x `[items, inputs, rows, columns]`, plus `bias` for each output channel, plus `added`, which has the
/// shape of the result; then the function.
pub fn forward(
    shape: Shape,
    x: &[f32],
    weights: &Weights,
    bias: &[f32],
    added: Option<&[f32]>,
    then: Then,
    sums_wanted: bool,
) -> Outputs {
    let count = shape.items * shape.outputs * shape.output[0] * shape.output[1];
    let call = Forward { shape, x, weights, bias, added, then };
    let mut sums = None;
    // SAFETY: the forward pass has every position of the output, every channel is in a task, and so is every sum.
    let y = unsafe {
        filled(count, |y| match sums_wanted {
            true => sums = Some(filled(count, |sums| call.fill(y, Some(sums)))),
            false => call.fill(y, None),
        })
    };
    Outputs { y, sums }
}

/// The operands of [`forward`].
struct Forward<'a> {
    shape: Shape,
    x: &'a [f32],
    weights: &'a Weights,
    bias: &'a [f32],
    added: Option<&'a [f32]>,
    then: Then<'a>,
}

impl Forward<'_> {
    /// Writes every output, and every sum.
    fn fill(&self, y: &Place, sums: Option<&Place>) {
        let Self { shape, x, bias, added, then, .. } = *self;
        match self.weights {
            Weights::Tiles(packed) => {
                let call = tiles::Call {
                    items: shape.items,
                    groups: shape.groups,
                    x,
                    inputs: shape.inputs,
                    read: shape.size,
                    y,
                    outputs: shape.outputs,
                    written: shape.output,
                    bias: Some(bias),
                    added,
                    then,
                    sums,
                };
                packed.iter().for_each(|packed| tiles::correlate(&call, &shape.forward(), packed));
            }
            Weights::Depthwise(weight) => {
                let call = depthwise::Call {
                    planes: shape.items * shape.outputs,
                    channels: shape.outputs,
                    x,
                    kept: None,
                    pulled: Then::Nothing,
                    read: shape.size,
                    y,
                    written: shape.output,
                    weight,
                    bias: Some(bias),
                    added,
                    then,
                    sums,
                };
                depthwise::correlate(&call, vec![shape.forward()], shape.taps());
            }
        }
    }
}

/// The gradient of x, given `d_sums`, that of the sums.
pub fn backward(shape: Shape, weights: &Weights, d_sums: &[f32]) -> Vec<f32> {
    through(shape, weights, Then::Nothing, None, d_sums)
}

/// The gradient of x, given `d_y`, that of the result, and what [`Then::pull`] wants.
pub fn backward_then(shape: Shape, weights: &Weights, then: Then, kept: &[f32], d_y: &[f32]) -> Vec<f32> {
    match weights {
        Weights::Depthwise(_) => through(shape, weights, then, Some(kept), d_y),
        Weights::Tiles(_) => {
            let plane = shape.output[0] * shape.output[1];
            backward(shape, weights, &pull(shape.outputs, plane, then, kept, d_y))
        }
    }
}

fn through(shape: Shape, weights: &Weights, pulled: Then, kept: Option<&[f32]>, d_y: &[f32]) -> Vec<f32> {
    let passes = shape.backward();
    // SAFETY: the passes together have every position of the input, and every channel is in a task.
    unsafe {
        filled(shape.items * shape.inputs * shape.size[0] * shape.size[1], |d_x| match weights {
            Weights::Tiles(packed) => {
                let call = tiles::Call {
                    items: shape.items,
                    groups: shape.groups,
                    x: d_y,
                    inputs: shape.outputs,
                    read: shape.output,
                    y: d_x,
                    outputs: shape.inputs,
                    written: shape.size,
                    bias: None,
                    added: None,
                    then: Then::Nothing,
                    sums: None,
                };
                for pass in &passes {
                    let [row, column] = pass.write_first;
                    tiles::correlate(&call, pass, &packed[row * shape.stride[1] + column]);
                }
            }
            Weights::Depthwise(weight) => {
                let call = depthwise::Call {
                    planes: shape.items * shape.inputs,
                    channels: shape.inputs,
                    x: d_y,
                    kept,
                    pulled,
                    read: shape.output,
                    y: d_x,
                    written: shape.size,
                    weight,
                    bias: None,
                    added: None,
                    then: Then::Nothing,
                    sums: None,
                };
                depthwise::correlate(&call, passes.clone(), shape.taps());
            }
        })
    }
}

/// The gradient of the sums, given that of the result: of `channels` channels of `plane` positions each.
pub fn pull(channels: usize, plane: usize, then: Then, kept: &[f32], d_y: &[f32]) -> Vec<f32> {
    assert_eq!(kept.len(), d_y.len(), "the outputs of a convolution and their cotangents");
    // SAFETY: every plane is in a task.
    unsafe {
        filled(d_y.len(), |d_z| {
            let tasks = d_y.par_chunks(plane.max(1)).zip(kept.par_chunks(plane.max(1))).enumerate();
            tasks.with_min_len((1 << 15) / plane.max(1)).for_each_init(
                Vec::new,
                |line: &mut Vec<f32>, (i, (d_y, kept))| {
                    line.resize(plane, 0.0);
                    pulled(then, i % channels, kept, d_y, line);
                    d_z.write(i * plane, line);
                },
            );
        })
    }
}

vectorised! {
    fn pulled(then: Then, channel: usize, kept: &[f32], d_y: &[f32], d_z: &mut [f32]) = pulled_body
}

#[inline(always)]
fn pulled_body<M: MulAdd>(then: Then, channel: usize, kept: &[f32], d_y: &[f32], d_z: &mut [f32]) {
    then.pull::<M>(channel, kept, d_y, d_z);
}

#[cfg(test)]
mod tests;
