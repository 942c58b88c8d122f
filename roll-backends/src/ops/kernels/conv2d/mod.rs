//! Convolution over two axes with constant weights, what is done to its sums, and the gradient of its input.
//!
//! One description (`passes`) says where taps fall; what has many channels in a group is computed by `tiles`, or by
//! `winograd` where windows are of 3 x 3 and one step apart, each channel by itself by `depthwise`, and gradients of windows
//! that lie side by side by `patches`.

mod block;
mod depthwise;
mod passes;
mod patches;
mod place;
mod then;
mod tiles;
mod winograd;

use rayon::prelude::*;

use self::passes::Pass;
use self::place::{Place, filled};
use self::tiles::Packed;
use crate::ops::kernels::simd::{MulAdd, vectorised};
use crate::ops::kernels::winograd::Kernels;

pub use self::passes::Shape;
pub use self::then::Then;

/// The weight of a convolution in the order in which the forward pass reads it.
#[derive(Debug)]
pub enum Weights {
    /// `[channels, taps]`, as it is.
    Depthwise(Vec<f32>),
    /// Packed.
    Tiles(Packed),
    /// Transformed.
    Winograd(Kernels),
}

impl Weights {
    /// For convolutions of `shape`, whatever its items, sizes and padding.
    pub fn new(shape: Shape, weight: &[f32]) -> Self {
        if shape.is_depthwise() {
            return Self::Depthwise(weight.to_vec());
        }
        match winograd::takes(shape) {
            true => Self::Winograd(winograd::pack(shape, weight, false)),
            false => Self::Tiles(tiles::pack_forward(shape, weight)),
        }
    }
}

/// The weight of a convolution in the order in which the gradient of its input reads it.
#[derive(Debug)]
pub enum BackwardWeights {
    /// `[channels, taps]`, as it is.
    Depthwise(Vec<f32>),
    /// Packed for each place between two windows.
    Tiles(Vec<Packed>),
    /// Packed for windows that lie side by side.
    Patches(Packed),
    /// Transformed.
    Winograd(Kernels),
}

impl BackwardWeights {
    /// For convolutions of `shape`, whatever its items, sizes and padding.
    pub fn new(shape: Shape, weight: &[f32]) -> Self {
        if shape.is_depthwise() {
            return Self::Depthwise(weight.to_vec());
        }
        Self::together(shape, weight)
    }

    /// For any groups, channels by themselves among them.
    fn together(shape: Shape, weight: &[f32]) -> Self {
        if patches::takes(shape) {
            return Self::Patches(patches::pack(shape, weight));
        }
        if winograd::takes(shape) {
            return Self::Winograd(winograd::pack(shape, weight, true));
        }
        // The taps of a place depend on where it is among the padded positions, modulo the stride, and on nothing else.
        let passes = Shape { size: shape.stride, before: [0; 2], ..shape }.backward();
        Self::Tiles(passes.iter().map(|pass| tiles::pack_backward(shape, pass, weight)).collect())
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
        let pass = shape.forward();
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
        match self.weights {
            Weights::Tiles(packed) => tiles::correlate(&call, &pass, packed),
            Weights::Winograd(kernels) => {
                winograd::correlate(&call, shape.before.map(|before| before as isize), kernels)
            }
            Weights::Depthwise(weight) if depthwise::fits(std::slice::from_ref(&pass), shape.size) => {
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
                depthwise::correlate(&call, vec![pass], shape.taps());
            }
            Weights::Depthwise(weight) => tiles::correlate(&call, &pass, &tiles::pack_forward(shape, weight)),
        }
    }
}

/// The gradient of x, given `d_sums`, that of the sums.
pub fn backward(shape: Shape, weights: &BackwardWeights, d_sums: &[f32]) -> Vec<f32> {
    match weights {
        BackwardWeights::Depthwise(weight) => {
            let passes = shape.backward();
            match depthwise::fits(&passes, shape.output) {
                true => each_backward(shape, passes, weight, Then::Nothing, None, d_sums),
                false => backward(shape, &BackwardWeights::together(shape, weight), d_sums),
            }
        }
        BackwardWeights::Patches(packed) => patches::backward(shape, packed, d_sums),
        // The passes together have every position of the input.
        BackwardWeights::Tiles(packed) => gradient(shape, d_sums, |call| {
            for pass in shape.backward() {
                let [row, column] = std::array::from_fn(|i| (pass.write_first[i] + shape.before[i]) % shape.stride[i]);
                tiles::correlate(call, &pass, &packed[row * shape.stride[1] + column]);
            }
        }),
        BackwardWeights::Winograd(kernels) => gradient(shape, d_sums, |call| {
            winograd::correlate(call, shape.before.map(|before| 2 - before as isize), kernels);
        }),
    }
}

/// The gradient of x as convolutions of `d_sums`, which write every position of every channel.
fn gradient(shape: Shape, d_sums: &[f32], convolve: impl FnOnce(&tiles::Call)) -> Vec<f32> {
    // SAFETY: `convolve`, which is one of two in this file, writes every element.
    unsafe {
        filled(shape.items * shape.inputs * shape.size[0] * shape.size[1], |d_x| {
            convolve(&tiles::Call {
                items: shape.items,
                groups: shape.groups,
                x: d_sums,
                inputs: shape.outputs,
                read: shape.output,
                y: d_x,
                outputs: shape.inputs,
                written: shape.size,
                bias: None,
                added: None,
                then: Then::Nothing,
                sums: None,
            });
        })
    }
}

/// The gradient of x, given `d_y`, that of the result, and what [`Then::pull`] wants.
pub fn backward_then(shape: Shape, weights: &BackwardWeights, then: Then, kept: &[f32], d_y: &[f32]) -> Vec<f32> {
    if let BackwardWeights::Depthwise(weight) = weights {
        let passes = shape.backward();
        if depthwise::fits(&passes, shape.output) {
            return each_backward(shape, passes, weight, then, Some(kept), d_y);
        }
    }
    let plane = shape.output[0] * shape.output[1];
    backward(shape, weights, &pull(shape.outputs, plane, then, kept, d_y))
}

/// The gradient of x where each channel is convolved by itself.
fn each_backward(
    shape: Shape,
    passes: Vec<Pass>,
    weight: &[f32],
    pulled: Then,
    kept: Option<&[f32]>,
    d_y: &[f32],
) -> Vec<f32> {
    // SAFETY: the passes together have every position of the input, and every channel is in a task.
    unsafe {
        filled(shape.items * shape.inputs * shape.size[0] * shape.size[1], |d_x| {
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
            depthwise::correlate(&call, passes, shape.taps());
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
