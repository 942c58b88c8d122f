//! Convolutions with many channels in a group: products of the packed weight with what the taps see, tile by tile.
//!
//! A task computes a stretch of positions for some output channels. It copies what the taps of these positions see into
//! a block `[inputs and taps, positions]` that stays in the second cache, and multiplies it there. Positions are counted
//! over all items, so that small planes fill their tiles together. `gemm` is not used: it would pack the weight anew in
//! each call, and the sums would go through memory once more for what is added to them. A sum goes over inputs and taps in one fixed order,
//! whatever the tasks are.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::passes::{Pass, Shape, Tap, inside};
use super::place::Place;
use super::then::Then;
use crate::ops::kernels::simd::{MulAdd, vectorised};

/// Output channels of a tile: with [`WIDE`] positions twelve registers of eight, which leaves room for the operands.
pub const OUT: usize = 6;
/// Positions of a tile: a line of the cache.
pub const WIDE: usize = 16;
/// Tiles along the positions of a task. Odd, as the rows of a block would else fall on the same places of the cache.
const ACROSS: usize = 7;
/// About as many inputs and taps are summed at once; sixteen kibibytes of a block are seen by a tile.
const DEEP: usize = 256;
/// Output channels between two visits of the same block columns: their weights stay in the second cache.
const HIGH: usize = 16 * OUT;
/// A task has at least about this many multiplications, unless there is only one.
const TASK: usize = 1 << 18;

/// The weight of one pass, `[groups, outputs / OUT, inputs and taps, OUT]`: zeros fill the last tile of a group.
#[derive(Debug)]
pub struct Packed {
    values: Vec<f32>,
    /// Output channels of a group.
    outputs: usize,
    /// Inputs and taps of a group.
    depth: usize,
}

impl Packed {
    /// Packs what `weight(group, output, input, tap)` says, where `tap` counts those of the pass.
    pub fn new(
        [groups, outputs, inputs, taps]: [usize; 4],
        weight: impl Fn(usize, usize, usize, usize) -> f32 + Sync,
    ) -> Self {
        let (depth, tiles) = (inputs * taps, outputs.div_ceil(OUT));
        let mut values = vec![0.0; groups * tiles * depth * OUT];
        values.par_chunks_mut((depth * OUT).max(1)).enumerate().for_each(|(tile, values)| {
            let (group, first) = (tile / tiles, tile % tiles * OUT);
            for (k, values) in values.chunks_exact_mut(OUT).enumerate() {
                for (lane, value) in values.iter_mut().enumerate().take(outputs - first) {
                    *value = weight(group, first + lane, k / taps, k % taps);
                }
            }
        });
        Self { values, outputs, depth }
    }

    /// The weights of a tile of output channels of a group, of some inputs and taps.
    fn tile(&self, group: usize, tile: usize, range: Range<usize>) -> &[f32] {
        let start = (group * self.outputs.div_ceil(OUT) + tile) * self.depth;
        &self.values[(start + range.start) * OUT..(start + range.end) * OUT]
    }
}

/// What is read, and how the sums are written.
pub struct Call<'a, 'p> {
    /// Items, and parts into which channels are cut.
    pub items: usize,
    pub groups: usize,
    /// Channels, rows and columns of what is read.
    pub x: &'a [f32],
    pub inputs: usize,
    pub read: [usize; 2],
    /// Channels, rows and columns of what is written.
    pub y: &'a Place<'p>,
    pub outputs: usize,
    pub written: [usize; 2],
    /// What is added to the sums: one number for each output channel, and a tensor of the shape of what is written.
    pub bias: Option<&'a [f32]>,
    pub added: Option<&'a [f32]>,
    /// What is done to the sums afterwards, and where they are written before.
    pub then: Then<'a>,
    pub sums: Option<&'a Place<'p>>,
}

/// A row of a block: [`WIDE`] neighbours, on a line of the cache.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Line([f32; WIDE]);

type Tile = [[f32; WIDE]; OUT];

/// Positions of a task that lie in one row of the grid of one item.
#[derive(Clone, Copy)]
pub struct Stretch {
    /// Where it starts in the task.
    start: usize,
    length: usize,
    item: usize,
    row: usize,
    column: usize,
}

/// The positions of a task: a stretch of those of all items.
fn stretches(grid: [usize; 2], range: Range<usize>) -> Vec<Stretch> {
    let (mut found, mut at) = (vec![], range.start);
    while at < range.end {
        let (line, column) = (at / grid[1], at % grid[1]);
        let length = (grid[1] - column).min(range.end - at);
        found.push(Stretch { start: at - range.start, length, item: line / grid[0], row: line % grid[0], column });
        at += length;
    }
    found
}

/// One task.
pub struct Task {
    group: usize,
    positions: Range<usize>,
    tiles: Range<usize>,
}

fn tasks(call: &Call, pass: &Pass, packed: &Packed) -> Vec<Task> {
    let positions = call.items * pass.grid[0] * pass.grid[1];
    let tiles = packed.outputs.div_ceil(OUT);
    let stretches = positions.div_ceil(ACROSS * WIDE).max(1);
    let width = positions.div_ceil(stretches).next_multiple_of(WIDE);
    let work = positions.saturating_mul(packed.depth).saturating_mul(packed.outputs * call.groups);
    // Where positions are few, output channels are divided too; what they see is then copied several times.
    let wanted = (2 * rayon::current_num_threads()).min(work / TASK).max(1);
    let parts = wanted.div_ceil(stretches * call.groups).clamp(1, tiles);
    let high = tiles.div_ceil(parts).max(1);
    let mut tasks = vec![];
    for group in 0..call.groups {
        for first in (0..positions).step_by(width) {
            for tile in (0..tiles).step_by(high) {
                let positions = first..(first + width).min(positions);
                tasks.push(Task { group, positions, tiles: tile..(tile + high).min(tiles) });
            }
        }
    }
    tasks
}

/// Memory of a thread, for all calls: at most some hundred kibibytes.
struct Scratch {
    block: Vec<Line>,
    sums: Vec<Line>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { block: Vec::new(), sums: Vec::new() }) };
}

/// Computes one pass.
pub fn correlate(call: &Call, pass: &Pass, packed: &Packed) {
    let (pass, read, written) = pass.clone().flat(call.read, call.written);
    let call = Call { read, written, ..*call };
    let tasks = tasks(&call, &pass, packed);
    let run = |task| SCRATCH.with_borrow_mut(|scratch| run(&call, &pass, packed, task, scratch));
    match tasks.as_slice() {
        [task] => run(task),
        tasks => tasks.par_iter().for_each(run),
    }
}

fn run(call: &Call, pass: &Pass, packed: &Packed, task: &Task, scratch: &mut Scratch) {
    let stretches = stretches(pass.grid, task.positions.clone());
    let across = task.positions.len().div_ceil(WIDE);
    let depth = packed.depth;
    let parts = depth.div_ceil(DEEP).max(1);
    let step = depth.div_ceil(parts).max(1);
    // Odd, for the reason of [`ACROSS`]; and a stretch may be written a little too far.
    let pitch = (across + 1) | 1;
    scratch.block.resize((step * pitch).max(scratch.block.len()), Line([0.0; WIDE]));
    if parts > 1 {
        scratch.sums.resize((task.tiles.len() * OUT * across).max(scratch.sums.len()), Line([0.0; WIDE]));
    }
    for part in 0..parts {
        let range = (part * step).min(depth)..((part + 1) * step).min(depth);
        see(call, pass, task, &stretches, range.clone(), pitch, &mut scratch.block);
        let panel = Panel { call, pass, packed, task, stretches: &stretches, range, across, pitch };
        multiply(&panel, &scratch.block, &mut scratch.sums, part == 0, part + 1 == parts);
    }
}

/// One block's products.
pub struct Panel<'a, 'c, 'p> {
    call: &'a Call<'c, 'p>,
    pass: &'a Pass,
    packed: &'a Packed,
    task: &'a Task,
    stretches: &'a [Stretch],
    /// Inputs and taps.
    range: Range<usize>,
    /// Tiles along the positions, and between two rows of the block.
    across: usize,
    pitch: usize,
}

vectorised! {
    /// Copies what the inputs and taps `range` see into `block`, `[range, pitch]`.
    fn see(
        call: &Call,
        pass: &Pass,
        task: &Task,
        stretches: &[Stretch],
        range: Range<usize>,
        pitch: usize,
        block: &mut [Line],
    ) = see_body
}

#[inline(always)]
fn see_body<M: MulAdd>(
    call: &Call,
    pass: &Pass,
    task: &Task,
    stretches: &[Stretch],
    range: Range<usize>,
    pitch: usize,
    block: &mut [Line],
) {
    let ([rows, columns], taps) = (call.read, pass.taps.len());
    let (plane, channels) = (rows * columns, call.inputs / call.groups);
    let (row_step, step) = (pass.read_step[0], pass.read_step[1]);
    let (wide, length) = (pitch * WIDE, task.positions.len());
    let block = floats(&mut block[..range.len() * pitch]);
    for (tap, Tap { at, .. }) in pass.taps.iter().enumerate() {
        let first = range.start.saturating_sub(tap).div_ceil(taps);
        for stretch in stretches {
            let row = (stretch.row * row_step) as isize + at[0];
            let all = stretch.column..stretch.column + stretch.length;
            let seen = match row >= 0 && row < rows as isize {
                true => inside(at[1], step, columns, all.clone()),
                false => all.start..all.start,
            };
            let (left, width) = (seen.start - all.start, seen.len());
            let from = match width {
                0 => 0,
                _ => row as usize * columns + (seen.start * step).wrapping_add_signed(at[1]),
            };
            let item = (stretch.item * call.inputs + task.group * channels) * plane;
            let mut channel = first;
            while channel * taps + tap < range.end {
                let to = (channel * taps + tap - range.start) * wide + stretch.start;
                // What is written beyond the stretch is overwritten by the next one, or is beyond the positions.
                let line = &mut block[to..to + stretch.length + WIDE];
                if left > 0 {
                    clear(line, 0, left);
                }
                if width > 0 {
                    see_row(&call.x[item + channel * plane + from..], step, left, width, line);
                }
                clear(line, left + width, stretch.length - left - width);
                channel += 1;
            }
        }
    }
    // What a tile reads beyond the last position.
    let end = length.next_multiple_of(WIDE);
    if end > length {
        block.chunks_exact_mut(wide).for_each(|line| line[length..end].fill(0.0));
    }
}

/// Numbers that are moved at once: rows are often short, and a call of the system's copy would cost more than they do.
const SHORT: usize = 8;

/// Writes `count` zeros or a few more.
#[inline(always)]
fn clear(line: &mut [f32], at: usize, count: usize) {
    let mut i = 0;
    while i < count {
        line[at + i..at + i + SHORT].copy_from_slice(&[0.0; SHORT]);
        i += SHORT;
    }
}

/// Writes every `step`-th number of `x` to `line` from `left` on, `width` or a few more.
#[inline(always)]
fn see_row(x: &[f32], step: usize, left: usize, width: usize, line: &mut [f32]) {
    // Whole stretches of the input are read where it goes on long enough.
    let whole = width.next_multiple_of(SHORT);
    if step > 2 || whole * step > x.len() {
        take(&x[..(width - 1) * step + 1], step, &mut line[left..left + width]);
        return;
    }
    let mut i = 0;
    while i < width {
        let to = &mut line[left + i..left + i + SHORT];
        match step {
            1 => to.copy_from_slice(&x[i..i + SHORT]),
            _ => {
                let from = &x[2 * i..2 * i + 2 * SHORT];
                to.copy_from_slice(&std::array::from_fn::<f32, SHORT, _>(|l| from[2 * l]));
            }
        }
        i += SHORT;
    }
}

/// Every `step`-th number of `from`.
#[inline(always)]
pub fn take(from: &[f32], step: usize, to: &mut [f32]) {
    match step {
        1 if to.len() < SHORT => to.iter_mut().zip(from).for_each(|(to, from)| *to = *from),
        1 if to.len() <= 128 => {
            let last = to.len() - SHORT;
            let mut at = 0;
            while at < last {
                to[at..at + SHORT].copy_from_slice(&from[at..at + SHORT]);
                at += SHORT;
            }
            to[last..].copy_from_slice(&from[last..last + SHORT]);
        }
        1 => to.copy_from_slice(&from[..to.len()]),
        2 => {
            let (last, rest) = (to.len() - 1, from.chunks_exact(2));
            to[..last].iter_mut().zip(rest).for_each(|(to, from)| *to = from[0]);
            to[last] = from[2 * last];
        }
        _ => to.iter_mut().zip(from.iter().step_by(step)).for_each(|(to, from)| *to = *from),
    }
}

vectorised! {
    /// Multiplies a block with the weights of a task: from zero or from `sums` on, `[tiles * OUT, across]`, and back to
    /// them or, when the block is the `last`, to where the results belong.
    fn multiply(panel: &Panel, block: &[Line], sums: &mut [Line], first: bool, last: bool) = multiply_body
}

#[inline(always)]
fn multiply_body<M: MulAdd>(panel: &Panel, block: &[Line], sums: &mut [Line], first: bool, last: bool) {
    let (task, range) = (panel.task, &panel.range);
    let rows = range.len();
    let mut low = task.tiles.start;
    while low < task.tiles.end {
        let high = (low + HIGH / OUT).min(task.tiles.end);
        for column in 0..panel.across {
            for tile in low..high {
                let weight = panel.packed.tile(task.group, tile, range.clone());
                let kept = ((tile - task.tiles.start) * panel.across + column) * OUT;
                let mut values: Tile = [[0.0; WIDE]; OUT];
                if !first {
                    for (values, kept) in values.iter_mut().zip(&sums[kept..kept + OUT]) {
                        *values = kept.0;
                    }
                }
                if rows > 0 {
                    let seen = &block[column..][..(rows - 1) * panel.pitch + 1];
                    accumulate::<M>(weight, seen, panel.pitch, &mut values);
                }
                match last {
                    true => finish::<M>(panel, tile, column, &mut values),
                    false => {
                        for (values, kept) in values.iter().zip(&mut sums[kept..kept + OUT]) {
                            kept.0 = *values;
                        }
                    }
                }
            }
        }
        low = high;
    }
}

#[inline(always)]
fn accumulate<M: MulAdd>(weight: &[f32], seen: &[Line], pitch: usize, tile: &mut Tile) {
    let mut sums = *tile;
    for (weight, seen) in weight.chunks_exact(OUT).zip(seen.iter().step_by(pitch)) {
        for o in 0..OUT {
            for l in 0..WIDE {
                sums[o][l] = M::mul_add(weight[o], seen.0[l], sums[o][l]);
            }
        }
    }
    *tile = sums;
}

/// Adds what is added to the sums, applies the function, and writes the tile.
#[inline(always)]
fn finish<M: MulAdd>(panel: &Panel, tile: usize, column: usize, values: &mut Tile) {
    let Panel { call, pass, task, packed, .. } = panel;
    let plane = call.written[0] * call.written[1];
    let (start, end) = (column * WIDE, ((column + 1) * WIDE).min(task.positions.len()));
    let from = panel.stretches.partition_point(|s| s.start + s.length <= start);
    let in_order = pass.write_step == [1; 2];
    if let Some(stretch) = panel.stretches[from..].first()
        && in_order
        && stretch.start <= start
        && start + WIDE <= stretch.start + stretch.length
    {
        return finish_whole::<M>(panel, tile, stretch, start, values);
    }
    for (lane, values) in values.iter_mut().enumerate().take(packed.outputs - (tile * OUT).min(packed.outputs)) {
        let channel = task.group * packed.outputs + tile * OUT + lane;
        if let Some(bias) = call.bias {
            values.iter_mut().for_each(|v| *v += bias[channel]);
        }
        for stretch in &panel.stretches[from..] {
            if stretch.start >= end {
                break;
            }
            let (low, high) = (stretch.start.max(start), (stretch.start + stretch.length).min(end));
            let values = &mut values[low - start..high - start];
            let item = (stretch.item * call.outputs + channel) * plane;
            let column = stretch.column + low - stretch.start;
            if !in_order {
                let row = stretch.row * pass.write_step[0] + pass.write_first[0];
                let to = item + row * call.written[1] + column * pass.write_step[1] + pass.write_first[1];
                // SAFETY: no other task has these positions of this channel.
                unsafe { call.y.write_every(to, pass.write_step[1], values) };
                continue;
            }
            let to = item + stretch.row * call.written[1] + column;
            if let Some(added) = call.added {
                values.iter_mut().zip(&added[to..]).for_each(|(v, a)| *v += a);
            }
            if let Some(sums) = call.sums {
                // SAFETY: as above.
                unsafe { sums.write(to, values) };
            }
            call.then.apply::<M>(channel, values);
            // SAFETY: as above.
            unsafe { call.y.write(to, values) };
        }
    }
}

/// [`finish`] of a tile whose positions follow each other in memory.
#[inline(always)]
fn finish_whole<M: MulAdd>(panel: &Panel, tile: usize, stretch: &Stretch, start: usize, values: &mut Tile) {
    let Panel { call, task, packed, .. } = panel;
    let plane = call.written[0] * call.written[1];
    let place = stretch.row * call.written[1] + stretch.column + start - stretch.start;
    for (lane, values) in values.iter_mut().enumerate().take(packed.outputs - (tile * OUT).min(packed.outputs)) {
        let channel = task.group * packed.outputs + tile * OUT + lane;
        let to = (stretch.item * call.outputs + channel) * plane + place;
        if let Some(bias) = call.bias {
            values.iter_mut().for_each(|v| *v += bias[channel]);
        }
        if let Some(added) = call.added {
            values.iter_mut().zip(&added[to..to + WIDE]).for_each(|(v, a)| *v += a);
        }
        if let Some(sums) = call.sums {
            // SAFETY: no other task has these positions of this channel.
            unsafe { sums.write(to, values) };
        }
        call.then.apply::<M>(channel, values);
        // SAFETY: as above.
        unsafe { call.y.write(to, values) };
    }
}

/// The lines as the numbers in them.
fn floats(lines: &mut [Line]) -> &mut [f32] {
    // SAFETY: a line is sixteen numbers and nothing else: its size is its alignment.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * WIDE) }
}

/// The packed weights of the forward pass.
pub fn pack_forward(shape: Shape, weight: &[f32]) -> Packed {
    let (inputs, outputs, taps) = (shape.inputs / shape.groups, shape.outputs / shape.groups, shape.taps());
    Packed::new([shape.groups, outputs, inputs, taps], |group, output, input, tap| {
        weight[((group * outputs + output) * inputs + input) * taps + tap]
    })
}

/// The packed weights of a pass of the backward convolution, in which inputs and outputs change places.
pub fn pack_backward(shape: Shape, pass: &Pass, weight: &[f32]) -> Packed {
    let (inputs, outputs, taps) = (shape.inputs / shape.groups, shape.outputs / shape.groups, shape.taps());
    Packed::new([shape.groups, inputs, outputs, pass.taps.len()], |group, input, output, tap| {
        weight[((group * outputs + output) * inputs + input) * taps + pass.taps[tap].index]
    })
}
