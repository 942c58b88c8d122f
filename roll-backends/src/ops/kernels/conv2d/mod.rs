//! 2-d convolution with constant weights on the CPU: forward with a fused epilogue, and the gradient of the input.
//!
//! `passes` describes which input each tap reads. The modules compute:
//!
//! - `tiles`: convolutions with several channels per group, by im2col and micro-kernel
//! - `winograd`: of these, the ones with 3 x 3 kernels and stride 1
//! - `depthwise`: depthwise convolutions
//! - `patches`: input gradients of convolutions with non-overlapping windows

mod depthwise;
mod epilogue;
mod panel;
mod passes;
mod patches;
mod shared_output;
mod tiles;
mod winograd;

use rayon::prelude::*;

use self::shared_output::{SharedOutput, filled};
use self::tiles::PackedWeight;
use crate::ops::kernels::geometry::ConvKind;
use crate::ops::kernels::simd::vectorised;
use crate::ops::kernels::winograd::Kernels;

pub use self::epilogue::KernelEpilogue;
pub use self::passes::Conv2dShape;

/// The operands of a forward or backward pass: it reads x, of shape `[items, inputs, read]`, and writes y, of shape
/// `[items, outputs, written]`. In a backward pass, x holds the cotangents of the convolution's sums, or of
/// its result if the pass also pulls the epilogue back.
struct Call<'a, 'p> {
    items: usize,
    /// Number of channel groups.
    groups: usize,
    x: &'a [f32],
    inputs: usize,
    /// Rows and columns of x.
    read: [usize; 2],
    y: &'a SharedOutput<'p>,
    outputs: usize,
    /// Rows and columns of y.
    written: [usize; 2],
    finish: Finish<'a, 'p>,
}

impl<'a, 'p> Call<'a, 'p> {
    fn new(shape: Conv2dShape, x: &'a [f32], y: &'a SharedOutput<'p>, finish: Finish<'a, 'p>) -> Self {
        let Conv2dShape { items, groups, inputs, size: read, outputs, output: written, .. } = shape;
        Self { items, groups, x, inputs, read, y, outputs, written, finish }
    }
}

/// The weight of a convolution, packed for the forward pass.
#[derive(Debug)]
pub enum Weights {
    /// `[channels, taps]`, not packed.
    Depthwise(Vec<f32>),
    Tiles(PackedWeight),
    Winograd(Kernels),
}

impl Weights {
    /// Packs `weight` for convolutions of `shape`, with any number of items, size and padding.
    pub fn new(shape: Conv2dShape, weight: &[f32]) -> Self {
        if shape.is_depthwise() {
            return Self::Depthwise(weight.to_vec());
        }
        if winograd::applies(shape) {
            return Self::Winograd(winograd::pack(shape, weight, ConvKind::Forward));
        }
        Self::Tiles(tiles::pack_forward(shape, weight))
    }
}

/// The weight of a convolution, packed for the gradient of its input.
#[derive(Debug)]
pub enum BackwardWeights {
    /// `[channels, taps]`, not packed.
    Depthwise(Vec<f32>),
    /// Packed for the micro-kernel, once per phase of the stride.
    Tiles(Vec<PackedWeight>),
    /// Packed for non-overlapping windows.
    Patches(PackedWeight),
    Winograd(Kernels),
}

impl BackwardWeights {
    /// Packs `weight` for convolutions of `shape`, with any number of items, size and padding.
    pub fn new(shape: Conv2dShape, weight: &[f32]) -> Self {
        if shape.is_depthwise() {
            return Self::Depthwise(weight.to_vec());
        }
        Self::general(shape, weight)
    }

    /// Packs for the kernels that compute every convolution, depthwise or not.
    fn general(shape: Conv2dShape, weight: &[f32]) -> Self {
        if patches::applies(shape) {
            return Self::Patches(patches::pack(shape, weight));
        }
        if winograd::applies(shape) {
            return Self::Winograd(winograd::pack(shape, weight, ConvKind::Transposed));
        }
        // One pass per phase (padded position modulo stride). The taps of a pass depend on its phase only. The passes
        // for an input of the stride's size, without padding, have all phases in order.
        let passes = Conv2dShape { size: shape.stride, before: [0; 2], ..shape }.backward();
        Self::Tiles(passes.iter().map(|pass| tiles::pack_backward(shape, pass, weight)).collect())
    }
}

/// The results of [`forward`].
pub struct Outputs {
    /// `[items, outputs, rows, columns]`.
    pub y: Vec<f32>,
    /// The sums before [`KernelEpilogue`], in the shape of `y`, if they were requested.
    pub sums: Option<Vec<f32>>,
}

/// Convolves x `[items, inputs, rows, columns]`, adds `bias` per output channel and `residual` (of the result's shape),
/// then applies the epilogue.
pub fn forward(
    shape: Conv2dShape,
    x: &[f32],
    weights: &Weights,
    bias: &[f32],
    residual: Option<&[f32]>,
    epilogue: KernelEpilogue,
    needs_sums: bool,
) -> Outputs {
    let count = shape.items * shape.outputs * shape.output[0] * shape.output[1];
    let finish = Finish { bias: Some(bias), residual, epilogue, sums: None };
    let mut sums = None;
    // SAFETY: the forward pass covers every output position, and every channel belongs to a task; the same holds for
    // sums.
    let y = unsafe {
        filled(count, |y| {
            if needs_sums {
                sums = Some(filled(count, |sums| fill(shape, x, weights, Finish { sums: Some(sums), ..finish }, y)));
            } else {
                fill(shape, x, weights, finish, y);
            }
        })
    };
    Outputs { y, sums }
}

/// The last steps for each sum of products, in the order of the fields: the bias is added, the residual is added, the
/// sum is written to `sums`, and the epilogue's activation is applied.
#[derive(Clone, Copy, Default)]
pub struct Finish<'a, 'p> {
    /// One number per output channel.
    bias: Option<&'a [f32]>,
    /// A tensor of the output's shape.
    residual: Option<&'a [f32]>,
    /// Where the sums before the activation are written, if they are wanted.
    sums: Option<&'a SharedOutput<'p>>,
    epilogue: KernelEpilogue<'a>,
}

/// Writes every output and, if `finish` has a tensor for them, every sum.
fn fill(shape: Conv2dShape, x: &[f32], weights: &Weights, finish: Finish, y: &SharedOutput) {
    let pass = shape.forward();
    let call = Call::new(shape, x, y, finish);
    match weights {
        Weights::Tiles(packed) => tiles::run_pass(&call, &pass, packed),
        Weights::Winograd(kernels) => {
            winograd::run_convolution(&call, shape.before.map(|before| before as isize), kernels);
        }
        Weights::Depthwise(weight) if depthwise::fits(std::slice::from_ref(&pass), shape.size) => {
            let no_epilogue = None;
            depthwise::run_passes(&call, weight, no_epilogue, vec![pass], shape.taps());
        }
        // Extreme strides or dilations.
        Weights::Depthwise(weight) => tiles::run_pass(&call, &pass, &tiles::pack_forward(shape, weight)),
    }
}

/// Returns the gradient of x, given the gradient `d_sums` of the sums.
pub fn pull_convolution(shape: Conv2dShape, weights: &BackwardWeights, d_sums: &[f32]) -> Vec<f32> {
    match weights {
        BackwardWeights::Depthwise(weight) => {
            let passes = shape.backward();
            if !depthwise::fits(&passes, shape.output) {
                return pull_convolution(shape, &BackwardWeights::general(shape, weight), d_sums);
            }
            let no_epilogue = None;
            gradient(shape, d_sums, |call| depthwise::run_passes(call, weight, no_epilogue, passes, shape.taps()))
        }
        BackwardWeights::Patches(packed) => patches::pull_convolution(shape, packed, d_sums),
        // The passes together cover every input position.
        BackwardWeights::Tiles(packed) => gradient(shape, d_sums, |call| {
            for pass in shape.backward() {
                let [row_phase, column_phase] =
                    std::array::from_fn(|i| (pass.write_first[i] + shape.before[i]) % shape.stride[i]);
                tiles::run_pass(call, &pass, &packed[row_phase * shape.stride[1] + column_phase]);
            }
        }),
        // The transposed convolution of a 3 x 3 kernel has 2 - n zeros before an axis, if the convolution has n.
        BackwardWeights::Winograd(kernels) => gradient(shape, d_sums, |call| {
            winograd::run_convolution(call, shape.before.map(|before| 2 - before as isize), kernels);
        }),
    }
}

/// Returns the gradient of x, which `convolve` computes from `cotangent`. `convolve` must write every position of every
/// channel.
fn gradient(shape: Conv2dShape, cotangent: &[f32], convolve: impl FnOnce(&Call)) -> Vec<f32> {
    // SAFETY: `convolve` is one of the closures in this file, which write every element: their passes together cover
    // every input position, and every channel belongs to a task.
    unsafe {
        filled(shape.items * shape.inputs * shape.size[0] * shape.size[1], |d_x| {
            convolve(&Call::new(shape.swapped(), cotangent, d_x, Finish::default()));
        })
    }
}

/// Returns the gradient of x, given the gradient `d_y` of the result and the `saved` tensor of
/// [`KernelEpilogue::pull`].
pub fn pull_both(
    shape: Conv2dShape,
    weights: &BackwardWeights,
    epilogue: KernelEpilogue,
    saved: &[f32],
    d_y: &[f32],
) -> Vec<f32> {
    // The depthwise kernel pulls the epilogue back while it copies a plane. For all other kernels this takes a pass of
    // its own.
    if let BackwardWeights::Depthwise(weight) = weights {
        let passes = shape.backward();
        if depthwise::fits(&passes, shape.output) {
            return gradient(shape, d_y, |call| {
                depthwise::run_passes(call, weight, Some((epilogue, saved)), passes, shape.taps());
            });
        }
    }
    let plane = shape.output[0] * shape.output[1];
    let d_sums = pull_epilogue(shape.outputs, plane, epilogue, saved, d_y);
    pull_convolution(shape, weights, &d_sums)
}

/// Minimum number of positions of a task of [`pull_epilogue`].
const MIN_PULLED: usize = 1 << 15;

/// Returns the gradient of the sums, given the gradient `d_y` of the result and the `saved` tensor of
/// [`KernelEpilogue::pull`], for `channels` channels of `plane` positions.
pub fn pull_epilogue(channels: usize, plane: usize, epilogue: KernelEpilogue, saved: &[f32], d_y: &[f32]) -> Vec<f32> {
    assert_eq!(saved.len(), d_y.len(), "the outputs of a convolution and their cotangents");
    // SAFETY: every plane belongs to a task.
    unsafe {
        filled(d_y.len(), |d_z| {
            let tasks = d_y.par_chunks(plane.max(1)).zip(saved.par_chunks(plane.max(1))).enumerate();
            tasks.with_min_len(MIN_PULLED / plane.max(1)).for_each_init(
                Vec::new,
                |d_z_plane: &mut Vec<f32>, (i, (d_y, saved))| {
                    d_z_plane.resize(plane, 0.0);
                    pull_plane(epilogue, i % channels, saved, d_y, d_z_plane);
                    d_z.write(i * plane, d_z_plane);
                },
            );
        })
    }
}

vectorised! {
    fn pull_plane<M>(epilogue: KernelEpilogue, channel: usize, saved: &[f32], d_y: &[f32], d_z: &mut [f32]) {
        epilogue.pull::<M>(channel, saved, d_y, d_z);
    }
}

#[cfg(test)]
mod tests;
