//! 3 x 3 convolution with stride 1 by Winograd's F(2 x 2, 3 x 3): 16 multiplications instead of 36. The algorithm, its
//! terms (patch, tile, panel, element) and the kernel layout are those of [`crate::ops::kernels::winograd`].
//!
//! A task takes some panels of tiles and some blocks of [`MR`] output channels through all steps: it transforms
//! patches, multiplies, transforms back and applies the epilogue of [`super::tiles`]. Its intermediate data roughly
//! fits the L2 cache. Tiles are counted over all items, which [`TileGrid`] and [`TileRun`] call images.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::Call;
use super::passes::Conv2dShape;
use super::tiles::{MANY_TASKS_PER_THREAD, MAX_ON_ONE_THREAD, store};
use crate::ops::kernels::geometry::{ConvKind, ConvShape};
use crate::ops::kernels::simd::vectorised;
use crate::ops::kernels::tile::{KC, Line, MR, NR, SUMS, accumulate};
use crate::ops::kernels::winograd::transforms::{patch_transform, result_transform};
use crate::ops::kernels::winograd::{ELEMENTS, Kernels, TileGrid, TileRun};

/// Minimum number of channels; below, the transforms cost more than they save.
const MIN_CHANNELS: usize = 16;
/// Target size in KiB of a task's patches and sums (L2 cache). A panel takes 1 KiB per input and output channel.
const TASK_KIB: usize = 512;
/// Minimum number of panels of a task, so that each pass over the kernels serves several panels. It yields to
/// [`MAX_TASK_KIB`].
const MIN_PANELS: usize = 4;
/// Maximum number of panels of a task: more would leave too few tasks.
const MAX_PANELS: usize = 4 * MIN_PANELS;
/// Maximum size in KiB of a task's patches and sums, unless one panel is larger.
const MAX_TASK_KIB: usize = 4 * TASK_KIB;

/// Whether convolutions of `shape` (with any number of items, size and padding) are computed here.
pub fn applies(shape: Conv2dShape) -> bool {
    shape.kernel == [3; 2]
        && shape.stride == [1; 2]
        && shape.dilation == [1; 2]
        && shape.groups == 1
        && shape.inputs.min(shape.outputs) >= MIN_CHANNELS
}

/// The transformed kernels of a convolution, or of the transposed one, which computes its input gradient.
pub fn pack(shape: Conv2dShape, weight: &[f32], kind: ConvKind) -> Kernels {
    let [inputs, outputs] = match kind {
        ConvKind::Forward => [shape.inputs, shape.outputs],
        ConvKind::Transposed => [shape.outputs, shape.inputs],
    };
    let shape = ConvShape { inputs, outputs, size: [1; 3], kernel: [1, 3, 3], padding: [0; 3] };
    Kernels::new(shape, weight, kind)
}

/// Some panels of tiles for some blocks of output channels.
struct Task {
    panels: Range<usize>,
    blocks: Range<usize>,
}

/// Divides a convolution into tasks.
fn split_into_tasks(call: &Call, grid: TileGrid) -> Vec<Task> {
    let (panels, blocks) = (grid.panels(), call.outputs.div_ceil(MR));
    let threads = rayon::current_num_threads();
    let panels_in = |kib: usize| kib / (call.inputs + call.outputs);
    // [`MIN_PANELS`], or fewer if they exceed [`MAX_TASK_KIB`].
    let min_panels = panels_in(MAX_TASK_KIB).min(MIN_PANELS);
    let panels_per_task = panels_in(TASK_KIB).max(min_panels).clamp(1, MAX_PANELS);
    let wanted_groups = panels.div_ceil(panels_per_task);
    // A small number of groups of panels is rounded, so that each thread gets the same number.
    let groups = if wanted_groups < MANY_TASKS_PER_THREAD * threads {
        wanted_groups.next_multiple_of(threads).min(panels)
    } else {
        wanted_groups
    };
    // If there are few panels, output channels are divided too; the same patches are then transformed several times.
    let channel_parts = if groups == 0 { 1 } else { threads.div_ceil(groups).clamp(1, blocks.max(1)) };
    let blocks_per_task = blocks.div_ceil(channel_parts).max(1);
    let start_of = |group: usize| group * panels / groups.max(1);
    let mut tasks = Vec::new();
    for group in 0..groups {
        for first in (0..blocks).step_by(blocks_per_task) {
            let blocks = first..(first + blocks_per_task).min(blocks);
            tasks.push(Task { panels: start_of(group)..start_of(group + 1), blocks });
        }
    }
    tasks
}

/// Scratch memory of a thread, reused by all calls: a few MiB at a thousand channels.
struct Scratch {
    /// Transformed patches: `[panel, element, input, tile]`.
    patches: Vec<Line>,
    /// Sums: `[element, block, panel, output channel, tile]`.
    sums: Vec<Line>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { patches: Vec::new(), sums: Vec::new() }) };
}

/// Computes the convolution. `before` is the number of zeros above and to the left of the input; a negative number
/// skips rows or columns instead.
pub fn run_convolution(call: &Call, before: [isize; 2], kernels: &Kernels) {
    let grid = TileGrid::new(call.items, call.written);
    let tasks = split_into_tasks(call, grid);
    let run = |task| SCRATCH.with_borrow_mut(|scratch| run_task(call, before, kernels, grid, task, scratch));
    let work = (grid.tiles * ELEMENTS).saturating_mul(call.inputs).saturating_mul(call.outputs);
    if tasks.len() <= 1 || work <= MAX_ON_ONE_THREAD {
        tasks.iter().for_each(run);
    } else {
        tasks.par_iter().for_each(run);
    }
}

/// Computes a task.
fn run_task(call: &Call, before: [isize; 2], kernels: &Kernels, grid: TileGrid, task: &Task, scratch: &mut Scratch) {
    let (inputs, panels, blocks) = (call.inputs, task.panels.len(), task.blocks.len());
    // Distances in lines between two elements of the transform, in the patches of a panel and in the sums. They are
    // odd, because with an even distance the same lanes of all elements would share cache sets.
    let (patch_stride, sum_stride) = (inputs | 1, (blocks * panels * SUMS / NR) | 1);
    let Scratch { patches, sums } = scratch;
    patches.resize((panels * ELEMENTS * patch_stride).max(patches.len()), Line::default());
    sums.resize((ELEMENTS * sum_stride).max(sums.len()), Line::default());
    let runs_of_panels: Vec<Vec<TileRun>> = task.panels.clone().map(|panel| grid.runs(panel).collect()).collect();
    for (runs, panel_patches) in runs_of_panels.iter().zip(patches.chunks_exact_mut(ELEMENTS * patch_stride)) {
        transform_patches(call, before, runs, bytemuck::cast_slice_mut(panel_patches), patch_stride * NR);
    }
    for element in 0..ELEMENTS {
        let element_sums: &mut [f32] = bytemuck::cast_slice_mut(&mut sums[element * sum_stride..]);
        let element_sums = &mut element_sums.as_chunks_mut::<SUMS>().0[..blocks * panels];
        let patches = patches[element * patch_stride..].chunks(ELEMENTS * patch_stride).take(panels);
        let patches = patches.map(|patch| bytemuck::cast_slice(&patch[..inputs]));
        // Two blocks at a time, which share the patches.
        for (pair, sums) in element_sums.chunks_mut(2 * panels).enumerate() {
            let (sums, next_sums) = sums.split_at_mut(panels);
            let block = task.blocks.start + 2 * pair;
            let kernel = kernels.at(block, element);
            if next_sums.is_empty() {
                patches.clone().zip(sums).for_each(|(patch, sums)| multiply([kernel], patch, [sums]));
                continue;
            }
            let kernels = [kernel, kernels.at(block + 1, element)];
            for (patch, (sums, next_sums)) in patches.clone().zip(sums.iter_mut().zip(next_sums)) {
                multiply(kernels, patch, [sums, next_sums]);
            }
        }
    }
    let all_sums: &[f32] = bytemuck::cast_slice(sums);
    for block in 0..blocks {
        let first = (task.blocks.start + block) * MR;
        for (panel, runs) in runs_of_panels.iter().enumerate() {
            let panel_sums = &all_sums[(block * panels + panel) * SUMS..];
            transform_results(call, runs, first..(first + MR).min(call.outputs), panel_sums, sum_stride * NR);
        }
    }
}

/// Multiplies the kernels of some blocks of output channels by the patches of a panel, for one element.
fn multiply<const BLOCKS: usize>(kernels: [&[f32]; BLOCKS], patch: &[f32], mut sums: [&mut [f32; SUMS]; BLOCKS]) {
    for (i, patch) in patch.chunks(KC * NR).enumerate() {
        let kernels = kernels.map(|kernel| &kernel[i * KC * MR..][..patch.len() / NR * MR]);
        let adds_to_sums = i > 0;
        accumulate(kernels, [patch], sums.each_mut().map(|sums| [&mut **sums]), adds_to_sums);
    }
}

/// Transforms the patches of a panel to `[element, input, tile]`; elements are `element_stride` apart. Lanes beyond the
/// last tile keep their old content.
fn transform_patches(call: &Call, before: [isize; 2], runs: &[TileRun], patches: &mut [f32], element_stride: usize) {
    let plane = call.read[0] * call.read[1];
    for input in 0..call.inputs {
        for run in runs {
            let x = &call.x[(run.image * call.inputs + input) * plane..][..plane];
            patch_transform(x, call.read, before, run, &mut patches[input * NR..], element_stride);
        }
    }
}

vectorised! {
    /// Transforms the sums of a panel back for some output channels, and applies the epilogue. Elements are
    /// `element_stride` apart.
    fn transform_results<M>(
        call: &Call,
        runs: &[TileRun],
        channels: Range<usize>,
        sums: &[f32],
        element_stride: usize,
    ) {
        let [rows, columns] = call.written;
        for (lane, channel) in channels.enumerate() {
            let bias = call.finish.bias.map_or(0.0, |bias| bias[channel]);
            let mut output_rows = result_transform(&sums[lane * NR..], element_stride, bias);
            for run in runs {
                let first_row = (run.image * call.outputs + channel) * rows;
                for (outputs, row) in output_rows.iter_mut().zip(run.at[0]..rows) {
                    let to = (first_row + row) * columns + run.at[1];
                    // The common case: a whole panel in one row.
                    if run.count == NR && columns - run.at[1] >= 2 * NR {
                        store::<M>(call, channel, to, outputs);
                        continue;
                    }
                    let count = (2 * run.count).min(columns - run.at[1]);
                    store::<M>(call, channel, to, &mut outputs[2 * run.lane..][..count]);
                }
            }
        }
    }
}
