//! 3 x 3 convolution with stride 1 by Winograd's F(2 x 2, 3 x 3): 16 multiplications instead of 36. Transforms and
//! kernel layout are those of [`crate::ops::kernels::winograd`].
//!
//! A task takes some panels of tiles and some blocks of output channels through all steps: transforms patches,
//! multiplies, transforms back and applies the epilogue of [`super::tiles`]. Its intermediate data roughly fits the L2
//! cache. Tiles are counted over all items.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::panel::{Line, floats, floats_mut};
use super::passes::Shape;
use super::tiles::{Call, ONE_THREAD, store};
use crate::ops::kernels::geometry;
use crate::ops::kernels::simd::vectorised;
use crate::ops::kernels::tile::{KC, MR, NR, SUMS, accumulate};
use crate::ops::kernels::winograd::transforms::{SPAN, result_transform, span, whole_patches};
use crate::ops::kernels::winograd::{Kernels, PLACES};

/// Minimum number of channels; below, the transforms cost more than they save.
const LEAST: usize = 16;
/// Target size in KiB of a task's patches and sums (L2 cache). A panel takes 1 KiB per channel.
const HELD: usize = 512;
/// Minimum number of panels of a task, up to the size [`MOST`], so that each pass over the kernels serves several
/// panels.
const FEW: usize = 4;
const MOST: usize = 4 * HELD;

/// Whether convolutions of `shape` (with any number of items, size and padding) are computed here.
pub fn applies(shape: Shape) -> bool {
    shape.kernel == [3; 2]
        && shape.stride == [1; 2]
        && shape.dilation == [1; 2]
        && shape.groups == 1
        && shape.inputs.min(shape.outputs) >= LEAST
}

/// The transformed kernels of the convolution or, if `turned`, of the convolution that computes its input gradient.
pub fn pack(shape: Shape, weight: &[f32], turned: bool) -> Kernels {
    let [inputs, outputs] = if turned { [shape.outputs, shape.inputs] } else { [shape.inputs, shape.outputs] };
    let shape = geometry::Shape { inputs, outputs, size: [1; 3], kernel: [1, 3, 3], padding: [0; 3] };
    Kernels::new(shape, weight, turned)
}

/// Tiles of 2 x 2 outputs, row by row, item by item.
struct Grid {
    /// Tiles per column and per row.
    down: usize,
    across: usize,
    tiles: usize,
}

/// Adjacent tiles of a panel that lie in one row.
pub struct Run {
    /// Index of the first tile in its panel.
    lane: usize,
    count: usize,
    item: usize,
    /// Row and column of the first output.
    at: [usize; 2],
}

impl Grid {
    fn new(items: usize, results: [usize; 2]) -> Self {
        let [down, across] = results.map(|n| n.div_ceil(2));
        Self { down, across, tiles: items * down * across }
    }

    fn runs(&self, panel: usize) -> Vec<Run> {
        let (mut next, end) = (panel * NR, ((panel + 1) * NR).min(self.tiles));
        let mut runs = vec![];
        while next < end {
            let (line, column) = (next / self.across, next % self.across);
            let count = (self.across - column).min(end - next);
            let at = [2 * (line % self.down), 2 * column];
            runs.push(Run { lane: next % NR, count, item: line / self.down, at });
            next += count;
        }
        runs
    }
}

/// One task.
struct Task {
    panels: Range<usize>,
    blocks: Range<usize>,
}

fn tasks(call: &Call, grid: &Grid) -> Vec<Task> {
    let (panels, blocks) = (grid.tiles.div_ceil(NR), call.outputs.div_ceil(MR));
    let threads = rayon::current_num_threads();
    let held = |most: usize| most / (call.inputs + call.outputs);
    let wanted = panels.div_ceil(held(HELD).max(held(MOST).min(FEW)).clamp(1, 4 * FEW));
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
    let grid = Grid::new(call.items, call.written);
    let tasks = tasks(call, &grid);
    let run = |task| SCRATCH.with_borrow_mut(|scratch| run(call, before, kernels, &grid, task, scratch));
    let work = (grid.tiles * PLACES).saturating_mul(call.inputs).saturating_mul(call.outputs);
    match tasks.len() <= 1 || work <= ONE_THREAD {
        true => tasks.iter().for_each(run),
        false => tasks.par_iter().for_each(run),
    }
}

fn run(call: &Call, before: [isize; 2], kernels: &Kernels, grid: &Grid, task: &Task, scratch: &mut Scratch) {
    let (inputs, panels, blocks) = (call.inputs, task.panels.len(), task.blocks.len());
    // Distance in lines between two places of the transform. Odd, because with an even distance the same elements of
    // all places would share cache sets.
    let (pitch, apart) = (inputs | 1, (blocks * panels * SUMS / NR) | 1);
    let Scratch { patches, sums } = scratch;
    patches.resize((panels * PLACES * pitch).max(patches.len()), Line::default());
    sums.resize((PLACES * apart).max(sums.len()), Line::default());
    let all: Vec<Vec<Run>> = task.panels.clone().map(|panel| grid.runs(panel)).collect();
    for (runs, patches) in all.iter().zip(patches.chunks_exact_mut(PLACES * pitch)) {
        patches_of(call, before, runs, floats_mut(patches), pitch * NR);
    }
    for place in 0..PLACES {
        for (block, sums) in sums[place * apart..].chunks_exact_mut(panels * SUMS / NR).take(blocks).enumerate() {
            let weights = kernels.at(task.blocks.start + block, place);
            for (panel, sums) in sums.chunks_exact_mut(SUMS / NR).enumerate() {
                let patches = floats(&patches[(panel * PLACES + place) * pitch..][..inputs]);
                let Some(sums) = floats_mut(sums).first_chunk_mut() else { continue };
                for first in (0..inputs).step_by(KC) {
                    let range = first..(first + KC).min(inputs);
                    let (weights, patches) = (&weights[first * MR..range.end * MR], &patches[first * NR..]);
                    accumulate(weights, &patches[..range.len() * NR], sums, first > 0);
                }
            }
        }
    }
    let sums = floats(sums);
    for block in 0..blocks {
        let first = (task.blocks.start + block) * MR;
        for (panel, runs) in all.iter().enumerate() {
            let sums = &sums[(block * panels + panel) * SUMS..];
            results_of(call, runs, first..(first + MR).min(call.outputs), sums, apart * NR);
        }
    }
}

/// Transforms the patches of a panel to `[place, input, tile]`; places are `apart` from each other. Lanes beyond the
/// last tile keep their old content.
fn patches_of(call: &Call, before: [isize; 2], runs: &[Run], patches: &mut [f32], apart: usize) {
    let [rows, columns] = call.read;
    let [left, skipped] = [before[1].max(0), (-before[1]).max(0)].map(|n| n as usize);
    for input in 0..call.inputs {
        for run in runs {
            let plane = &call.x[(run.item * call.inputs + input) * rows * columns..][..rows * columns];
            let mut edges = [[0.0; SPAN]; 4];
            let mut seen = [&[0.0; SPAN]; 4];
            for (i, (seen, edge)) in seen.iter_mut().zip(&mut edges).enumerate() {
                let row = usize::try_from((run.at[0] + i) as isize - before[0]).ok().filter(|row| *row < rows);
                if let Some(row) = row {
                    *seen = span(&plane[row * columns..][..columns], run.at[1] + skipped, left, edge);
                }
            }
            let out = &mut patches[input * NR..];
            if run.count == NR {
                whole_patches(seen, out, apart);
                continue;
            }
            let mut all = [0.0; PLACES * NR];
            whole_patches(seen, &mut all, NR);
            for (place, tiles) in all.chunks_exact(NR).enumerate() {
                let out = &mut out[place * apart + run.lane..][..run.count];
                out.iter_mut().zip(tiles).for_each(|(to, from)| *to = *from);
            }
        }
    }
}

vectorised! {
    /// Transforms the sums of a panel, for some output channels, back and applies the epilogue. Places are `apart` from
    /// each other.
    fn results_of<M>(call: &Call, runs: &[Run], channels: Range<usize>, sums: &[f32], apart: usize) {
        let [rows, columns] = call.written;
        for (lane, channel) in channels.enumerate() {
            let bias = call.finish.bias.map_or(0.0, |bias| bias[channel]);
            let mut tiles = result_transform(&sums[lane * NR..], apart, bias);
            for run in runs {
                let plane = (run.item * call.outputs + channel) * rows;
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
