//! Convolutions with several channels per group: im2col panels multiplied by packed weights in a micro-kernel.
//!
//! A task computes a block of positions for some output channels. The input of these positions is packed into a panel
//! (`panel`) that stays in the L2 cache. Positions are counted over all items, so that small planes share tiles. A
//! *tile* is [`MR`] output channels at a *column* of [`NR`] positions; *depth* counts pairs of input channel and tap.
//!
//! `gemm` is not used: it would pack the weight in each call, and its sums would pass through memory once more for the
//! epilogue. A sum always runs over inputs and taps in the same order for any division into tasks.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::Call;
use super::panel::{self, Lists, PanelSpec, Run, runs_of_columns};
use super::passes::{Conv2dShape, Pass};
use crate::ops::kernels::simd::{MulAdd, vectorised};
use crate::ops::kernels::tile::{Line, MR, NR, SUMS, accumulate};

/// Columns per task, approximately (NC in BLIS terms).
const NC: usize = 8;
/// Largest depth block (KC in BLIS terms): a tile reads 16 KiB of a panel. Other products use the KC of
/// [`crate::ops::kernels::tile`].
const MAX_BLOCK_DEPTH: usize = 256;
/// Tiles of output channels that are computed for all columns before the next tiles (MC in BLIS terms): their weights
/// stay in the L2 cache.
const MC: usize = 16;
/// If there are fewer tasks per thread than this, output channels are divided too.
const TASKS_PER_THREAD: usize = 2;
/// Minimum number of multiplications of a task, unless there is only one task.
const MIN_TASK: usize = 1 << 18;
/// With at least this number of tasks per thread, a thread that gets one task more than another hardly matters.
pub const MANY_TASKS_PER_THREAD: usize = 8;
/// Up to this many multiplications run on one thread: waking another takes longer.
pub const MAX_ON_ONE_THREAD: usize = 1 << 19;

/// The packed weight of one pass, `[groups, outputs / MR, depth, MR]`, where depth is input channel x tap. The last
/// tile of a group is padded with zeros.
#[derive(Debug)]
pub struct PackedWeight {
    values: Vec<f32>,
    /// Output channels per group.
    outputs: usize,
    /// Input channels times taps per group.
    depth: usize,
}

impl PackedWeight {
    /// Packs the weight whose elements `weight(group, output, input, tap)` returns. Outputs and inputs are counted
    /// within their group, and taps within the pass.
    pub fn new(
        [groups, outputs, inputs, taps]: [usize; 4],
        weight: impl Fn(usize, usize, usize, usize) -> f32 + Sync,
    ) -> Self {
        let (depth, tiles) = (inputs * taps, outputs.div_ceil(MR));
        let mut values = vec![0.0; groups * tiles * depth * MR];
        values.par_chunks_mut((depth * MR).max(1)).enumerate().for_each(|(tile, values)| {
            let (group, first_output) = (tile / tiles, tile % tiles * MR);
            for (k, values) in values.chunks_exact_mut(MR).enumerate() {
                for (lane, value) in values.iter_mut().enumerate().take(outputs - first_output) {
                    *value = weight(group, first_output + lane, k / taps, k % taps);
                }
            }
        });
        Self { values, outputs, depth }
    }

    /// The weights of one tile of output channels, for a range of the depth.
    fn tile(&self, group: usize, tile: usize, range: Range<usize>) -> &[f32] {
        let start = (group * self.outputs.div_ceil(MR) + tile) * self.depth;
        &self.values[(start + range.start) * MR..(start + range.end) * MR]
    }
}

/// A block of positions for some tiles of output channels of one group.
struct Task {
    group: usize,
    positions: Range<usize>,
    tiles: Range<usize>,
}

/// Number of multiplications of a call.
fn multiplications(call: &Call, pass: &Pass, packed: &PackedWeight) -> usize {
    let positions = call.items * pass.grid[0] * pass.grid[1];
    positions.saturating_mul(packed.depth).saturating_mul(packed.outputs * call.groups)
}

/// Divides a pass into tasks.
fn split_into_tasks(call: &Call, pass: &Pass, packed: &PackedWeight) -> Vec<Task> {
    let positions = call.items * pass.grid[0] * pass.grid[1];
    let (columns, tile_count) = (positions.div_ceil(NR), packed.outputs.div_ceil(MR));
    let threads = rayon::current_num_threads();
    // A small number of tasks that is not a multiple of the threads would leave threads idle.
    let position_blocks = match columns.div_ceil(NC) {
        blocks @ 2.. if blocks < MANY_TASKS_PER_THREAD * threads => blocks.next_multiple_of(threads).min(columns),
        blocks => blocks.max(1),
    };
    // If there are few positions, output channels are divided too; the same panels are then packed several times.
    let wanted_tasks = (TASKS_PER_THREAD * threads).min(multiplications(call, pass, packed) / MIN_TASK).max(1);
    let channel_parts = wanted_tasks.div_ceil(position_blocks * call.groups.max(1)).clamp(1, tile_count.max(1));
    let tiles_per_task = tile_count.div_ceil(channel_parts).max(1);
    let mut tasks = vec![];
    for group in 0..call.groups {
        for block in 0..position_blocks {
            let start_of = |block: usize| (block * columns / position_blocks * NR).min(positions);
            for first in (0..tile_count).step_by(tiles_per_task) {
                let tiles = first..(first + tiles_per_task).min(tile_count);
                tasks.push(Task { group, positions: start_of(block)..start_of(block + 1), tiles });
            }
        }
    }
    tasks
}

/// The sums of a micro-tile, aligned to cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sums([f32; SUMS]);

/// Scratch memory of a thread, reused by all calls: some hundred KiB at most.
struct Scratch {
    panel: Vec<Line>,
    sums: Vec<Sums>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { panel: Vec::new(), sums: Vec::new() }) };
}

/// Computes a pass of `call` with its packed weight.
pub fn run_pass(call: &Call, pass: &Pass, packed: &PackedWeight) {
    // A 1 x 1 pass over contiguous rows is computed as one long row.
    let (pass, read, written) = pass.clone().flat(call.read, call.written);
    let call = Call { read, written, ..*call };
    let tasks = split_into_tasks(&call, &pass, packed);
    let run = |task| SCRATCH.with_borrow_mut(|scratch| run_task(&call, &pass, packed, task, scratch));
    if tasks.len() <= 1 || multiplications(&call, &pass, packed) <= MAX_ON_ONE_THREAD {
        tasks.iter().for_each(run);
    } else {
        tasks.par_iter().for_each(run);
    }
}

/// Computes a task, in blocks of the depth. Between blocks, the sums of all tiles are kept, in the order `[tiles,
/// columns]`. After the last block, they go through the epilogue to the output.
fn run_task(call: &Call, pass: &Pass, packed: &PackedWeight, task: &Task, scratch: &mut Scratch) {
    let columns = task.positions.len().div_ceil(NR);
    let depth = packed.depth;
    let depth_blocks = depth.div_ceil(MAX_BLOCK_DEPTH).max(1);
    let block_depth = depth.div_ceil(depth_blocks).max(1);
    let input_runs = runs_of_columns(pass.grid, task.positions.clone());
    let output_runs = output_locations(call, pass, task);
    // With one block, the sums of two tiles are complete at once, and the next tiles reuse their memory.
    let tile_sums = if depth_blocks > 1 { task.tiles.len() * columns } else { 2 };
    let Scratch { panel, sums } = scratch;
    panel.resize((block_depth * columns).max(panel.len()), Line::default());
    sums.resize(tile_sums.max(sums.len()), Sums([0.0; SUMS]));
    for block in 0..depth_blocks {
        let range = (block * block_depth).min(depth)..((block + 1) * block_depth).min(depth);
        let panel = &mut panel[..range.len() * columns];
        panel::pack(&PanelSpec { call, pass, group: task.group, runs: &input_runs, range: range.clone() }, panel);
        for first_tile in task.tiles.clone().step_by(MC) {
            let tile_block = first_tile..(first_tile + MC).min(task.tiles.end);
            for column in 0..columns {
                let inputs = bytemuck::cast_slice(&panel[column * range.len()..][..range.len()]);
                let weights = |tile| packed.tile(task.group, tile, range.clone());
                let adds_to_sums = block > 0;
                for tile in tile_block.clone().step_by(2) {
                    let [first, second] = if depth_blocks == 1 {
                        [0, 1]
                    } else {
                        [0, 1].map(|i| (tile + i - task.tiles.start) * columns + column)
                    };
                    if tile + 1 < tile_block.end {
                        let [one, other] = two_mut(sums, first, second);
                        accumulate([weights(tile), weights(tile + 1)], [inputs], [[one], [other]], adds_to_sums);
                    } else {
                        accumulate([weights(tile)], [inputs], [[&mut sums[first].0]], adds_to_sums);
                    }
                    if block + 1 < depth_blocks {
                        continue;
                    }
                    for (tile, index) in (tile..tile_block.end).zip([first, second]) {
                        let channel = task.group * packed.outputs + tile * MR;
                        let count = MR.min(packed.outputs - tile * MR);
                        finish_tile(call, output_runs.list(column), channel..channel + count, &mut sums[index].0);
                    }
                }
            }
        }
    }
}

/// The sums with the indices `first` and `second`, of which the first is smaller.
fn two_mut(sums: &mut [Sums], first: usize, second: usize) -> [&mut [f32; SUMS]; 2] {
    let (before, from_second) = sums.split_at_mut(second);
    [&mut before[first].0, &mut from_second[0].0]
}

/// The output location of adjacent positions of one column.
pub struct OutputRun {
    /// Index of the first position in the column.
    lane: usize,
    count: usize,
    /// Output index of the first position, in the first channel.
    at: usize,
    /// Distance between the outputs of adjacent positions.
    step: usize,
}

/// The output locations of each column of a task.
fn output_locations(call: &Call, pass: &Pass, task: &Task) -> Lists<OutputRun> {
    let plane = call.written[0] * call.written[1];
    let is_in_order = pass.write_step == [1; 2] && pass.grid == call.written;
    // Contiguous rows count as one.
    let grid = if is_in_order { [1, plane] } else { pass.grid };
    let output_run = |run: &Run| {
        let item = run.item * call.outputs * plane;
        let [row, column] = if is_in_order {
            [0, run.at]
        } else {
            let [row_step, column_step] = pass.write_step;
            let [first_row, first_column] = pass.write_first;
            [run.row * row_step + first_row, run.at * column_step + first_column]
        };
        OutputRun {
            lane: run.lane,
            count: run.count,
            at: item + row * call.written[1] + column,
            step: pass.write_step[1],
        }
    };
    let runs = runs_of_columns(grid, task.positions.clone());
    let mut output_runs = Lists::with_capacity(runs.len());
    (0..runs.len()).for_each(|column| output_runs.push(runs.list(column).iter().map(output_run)));
    output_runs
}

vectorised! {
    /// The epilogue: adds bias and residual to the sums of some channels, applies the activation, and writes them.
    fn finish_tile<M>(call: &Call, output_runs: &[OutputRun], channels: Range<usize>, sums: &mut [f32; SUMS]) {
        let plane = call.written[0] * call.written[1];
        for (channel, values) in channels.zip(sums.as_chunks_mut::<NR>().0) {
            if let Some(bias) = call.finish.bias {
                let bias = bias[channel];
                values.iter_mut().for_each(|v| *v += bias);
            }
            // The common case: a whole column of contiguous outputs.
            if let &[OutputRun { count: NR, at, step: 1, .. }] = output_runs {
                store::<M>(call, channel, at + channel * plane, values);
                continue;
            }
            for run in output_runs {
                let (to, values) = (run.at + channel * plane, &mut values[run.lane..run.lane + run.count]);
                match run.step {
                    1 => store::<M>(call, channel, to, values),
                    // A backward pass, which has neither residual nor epilogue.
                    // SAFETY: no other task writes these positions of this channel.
                    step => unsafe { call.y.write_every(to, step, values) },
                }
            }
        }
    }
}

/// The epilogue of adjacent positions of a channel, after the bias: adds the residual, writes the sums if they are
/// wanted, applies the activation, and writes the outputs from `to` on. No other task may write these positions of the
/// channel.
#[inline(always)]
pub fn store<M: MulAdd>(call: &Call, channel: usize, to: usize, values: &mut [f32]) {
    if let Some(residual) = call.finish.residual {
        values.iter_mut().zip(&residual[to..]).for_each(|(v, r)| *v += r);
    }
    if let Some(sums) = call.finish.sums {
        // SAFETY: no other task writes these positions of this channel.
        unsafe { sums.write(to, values) };
    }
    call.finish.epilogue.apply::<M>(channel, values);
    // SAFETY: as above.
    unsafe { call.y.write(to, values) };
}

/// Packs the weights for the forward pass.
pub fn pack_forward(shape: Conv2dShape, weight: &[f32]) -> PackedWeight {
    let (inputs, outputs, taps) = (shape.inputs / shape.groups, shape.outputs / shape.groups, shape.taps());
    PackedWeight::new([shape.groups, outputs, inputs, taps], |group, output, input, tap| {
        weight[((group * outputs + output) * inputs + input) * taps + tap]
    })
}

/// Packs the weights for a backward pass, in which inputs and outputs are swapped.
pub fn pack_backward(shape: Conv2dShape, pass: &Pass, weight: &[f32]) -> PackedWeight {
    let (inputs, outputs, taps) = (shape.inputs / shape.groups, shape.outputs / shape.groups, shape.taps());
    PackedWeight::new([shape.groups, inputs, outputs, pass.taps.len()], |group, input, output, tap| {
        weight[((group * outputs + output) * inputs + input) * taps + pass.taps[tap].index]
    })
}
