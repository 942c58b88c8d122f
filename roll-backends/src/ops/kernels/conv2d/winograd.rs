//! 3 x 3 convolution with stride 1 by Winograd's F(2 x 2, 3 x 3): 16 multiplications instead of 36. Transforms and
//! kernel layout are those of [`crate::ops::kernels::winograd`].
//!
//! A task takes some panels of tiles and some blocks of output channels through all steps: transforms patches,
//! multiplies, transforms back and applies the epilogue of [`super::tiles`]. Its intermediate data roughly fits the L2
//! cache. Tiles are counted over all items.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::Call;
use super::panel::Line;
use super::passes::Conv2dShape;
use super::tiles::{ONE_THREAD, store};
use crate::ops::kernels::geometry;
use crate::ops::kernels::simd::vectorised;
use crate::ops::kernels::tile::{KC, MR, NR, SUMS, accumulate};
use crate::ops::kernels::winograd::transforms::{patch_transform, result_transform};
use crate::ops::kernels::winograd::{ELEMENTS, Kernels, TileGrid, TileRun};

/// Minimum number of channels; below, the transforms cost more than they save.
const MIN_CHANNELS: usize = 16;
/// Target size in KiB of a task's patches and sums (L2 cache). A panel takes 1 KiB per channel.
const TASK_KIB: usize = 512;
/// Minimum number of panels of a task, up to the size [`MAX_TASK_KIB`], so that each pass over the kernels serves
/// several panels.
const MIN_PANELS: usize = 4;
const MAX_TASK_KIB: usize = 4 * TASK_KIB;

/// Whether convolutions of `shape` (with any number of items, size and padding) are computed here.
pub fn applies(shape: Conv2dShape) -> bool {
    shape.kernel == [3; 2]
        && shape.stride == [1; 2]
        && shape.dilation == [1; 2]
        && shape.groups == 1
        && shape.inputs.min(shape.outputs) >= MIN_CHANNELS
}

/// The transformed kernels of the convolution or, if `transposed`, of the convolution that computes its input gradient.
pub fn pack(shape: Conv2dShape, weight: &[f32], transposed: bool) -> Kernels {
    let [inputs, outputs] = if transposed { [shape.outputs, shape.inputs] } else { [shape.inputs, shape.outputs] };
    let shape = geometry::ConvShape { inputs, outputs, size: [1; 3], kernel: [1, 3, 3], padding: [0; 3] };
    Kernels::new(shape, weight, transposed)
}

struct Task {
    panels: Range<usize>,
    blocks: Range<usize>,
}

fn tasks(call: &Call, grid: TileGrid) -> Vec<Task> {
    let (panels, blocks) = (grid.panels(), call.outputs.div_ceil(MR));
    let threads = rayon::current_num_threads();
    let held = |most: usize| most / (call.inputs + call.outputs);
    let wanted = panels.div_ceil(held(TASK_KIB).max(held(MAX_TASK_KIB).min(MIN_PANELS)).clamp(1, 4 * MIN_PANELS));
    // The same number for each thread.
    let groups = if wanted < 8 * threads { wanted.next_multiple_of(threads).min(panels) } else { wanted };
    // If there are few panels, output channels are divided too; the same patches are then transformed several times.
    let parts = if groups == 0 { 1 } else { threads.div_ceil(groups).clamp(1, blocks.max(1)) };
    let high = blocks.div_ceil(parts).max(1);
    let at = |group: usize| group * panels / groups.max(1);
    let of_group = |group: usize| {
        let blocks = (0..blocks).step_by(high).map(move |first| first..(first + high).min(blocks));
        blocks.map(move |blocks| Task { panels: at(group)..at(group + 1), blocks })
    };
    (0..groups).flat_map(of_group).collect()
}

/// Scratch memory of a thread, reused by all calls: a few MiB at a thousand channels.
struct Scratch {
    patches: Vec<Line>,
    sums: Vec<Line>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { patches: Vec::new(), sums: Vec::new() }) };
}

/// Computes the convolution. `before` is the number of zeros above and to the left of the input; a negative number
/// skips rows or columns instead.
pub fn correlate(call: &Call, before: [isize; 2], kernels: &Kernels) {
    let grid = TileGrid::new(call.items, call.written);
    let tasks = tasks(call, grid);
    let run = |task| SCRATCH.with_borrow_mut(|scratch| run(call, before, kernels, grid, task, scratch));
    let work = (grid.tiles * ELEMENTS).saturating_mul(call.inputs).saturating_mul(call.outputs);
    match tasks.len() <= 1 || work <= ONE_THREAD {
        true => tasks.iter().for_each(run),
        false => tasks.par_iter().for_each(run),
    }
}

fn run(call: &Call, before: [isize; 2], kernels: &Kernels, grid: TileGrid, task: &Task, scratch: &mut Scratch) {
    let (inputs, panels, blocks) = (call.inputs, task.panels.len(), task.blocks.len());
    // Distance in lines between two elements of the transform. Odd, because with an even distance the same lanes of
    // all elements would share cache sets.
    let (pitch, element_stride) = (inputs | 1, (blocks * panels * SUMS / NR) | 1);
    let Scratch { patches, sums } = scratch;
    patches.resize((panels * ELEMENTS * pitch).max(patches.len()), Line::default());
    sums.resize((ELEMENTS * element_stride).max(sums.len()), Line::default());
    let all: Vec<Vec<TileRun>> = task.panels.clone().map(|panel| grid.runs(panel).collect()).collect();
    for (runs, patches) in all.iter().zip(patches.chunks_exact_mut(ELEMENTS * pitch)) {
        patches_of(call, before, runs, bytemuck::cast_slice_mut(patches), pitch * NR);
    }
    for element in 0..ELEMENTS {
        for (block, sums) in
            sums[element * element_stride..].chunks_exact_mut(panels * SUMS / NR).take(blocks).enumerate()
        {
            let weights = kernels.at(task.blocks.start + block, element);
            for (panel, sums) in sums.chunks_exact_mut(SUMS / NR).enumerate() {
                let patches: &[f32] = bytemuck::cast_slice(&patches[(panel * ELEMENTS + element) * pitch..][..inputs]);
                let Some(sums) = bytemuck::cast_slice_mut(sums).first_chunk_mut() else { continue };
                for first in (0..inputs).step_by(KC) {
                    let range = first..(first + KC).min(inputs);
                    let (weights, patches) = (&weights[first * MR..range.end * MR], &patches[first * NR..]);
                    accumulate(weights, &patches[..range.len() * NR], sums, first > 0);
                }
            }
        }
    }
    let sums: &[f32] = bytemuck::cast_slice(sums);
    for block in 0..blocks {
        let first = (task.blocks.start + block) * MR;
        for (panel, runs) in all.iter().enumerate() {
            let sums = &sums[(block * panels + panel) * SUMS..];
            results_of(call, runs, first..(first + MR).min(call.outputs), sums, element_stride * NR);
        }
    }
}

/// Transforms the patches of a panel to `[element, input, tile]`; elements are `element_stride` apart. Lanes beyond the
/// last tile keep their old content.
fn patches_of(call: &Call, before: [isize; 2], runs: &[TileRun], patches: &mut [f32], element_stride: usize) {
    let plane = call.read[0] * call.read[1];
    for input in 0..call.inputs {
        for run in runs {
            let x = &call.x[(run.image * call.inputs + input) * plane..][..plane];
            patch_transform(x, call.read, before, run, &mut patches[input * NR..], element_stride);
        }
    }
}

vectorised! {
    /// Transforms the sums of a panel, for some output channels, back and applies the epilogue. Elements are
    /// `element_stride` apart.
    fn results_of<M>(call: &Call, runs: &[TileRun], channels: Range<usize>, sums: &[f32], element_stride: usize) {
        let [rows, columns] = call.written;
        for (lane, channel) in channels.enumerate() {
            let bias = call.finish.bias.map_or(0.0, |bias| bias[channel]);
            let mut tiles = result_transform(&sums[lane * NR..], element_stride, bias);
            for run in runs {
                let plane = (run.image * call.outputs + channel) * rows;
                for (tiles, row) in tiles.iter_mut().zip(run.at[0]..rows) {
                    let to = (plane + row) * columns + run.at[1];
                    if run.count == NR && columns - run.at[1] >= 2 * NR {
                        store::<M>(call, channel, to, tiles);
                        continue;
                    }
                    let count = (2 * run.count).min(columns - run.at[1]);
                    store::<M>(call, channel, to, &mut tiles[2 * run.lane..][..count]);
                }
            }
        }
    }
}
