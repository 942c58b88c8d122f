//! Depthwise convolution.
//!
//! A task copies a plane with its zero padding into the cache, split into one plane per phase of the stride, so that
//! the inputs that a tap reads for adjacent outputs are adjacent. A tap is then one shifted row. Rows are computed
//! without a break between them; the columns between two rows are dropped.

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::passes::Pass;
use super::place::Place;
use crate::ops::kernels::simd::{MulAdd, vectorised};

/// Positions that are accumulated at once: four registers of eight.
const WIDE: usize = 32;
/// Positions between two visits of the same memory.
const LONG: usize = 1024;
/// Minimum number of multiplications of a task.
const TASK: usize = 1 << 16;
/// Up to this many multiplications run on one thread: waking another takes longer.
const ALONE: usize = 1 << 18;

/// Whether the padded copy of a plane of `read` rows and columns is small. It is, unless strides or dilations are
/// extreme.
pub fn fits(passes: &[Pass], read: [usize; 2]) -> bool {
    let Copy { step, size, .. } = Copy::of(passes, read[1]);
    let numbers = step.into_iter().chain(size).try_fold(1usize, |all, n| all.checked_mul(n));
    numbers.is_some_and(|numbers| numbers <= (1 << 16) + 16 * read[0] * read[1])
}

/// The operands of a call: what is read, and how sums are written.
pub struct Call<'a, 'p> {
    /// Number of planes: items times channels.
    pub planes: usize,
    pub channels: usize,
    pub x: &'a [f32],
    /// If `x` is a cotangent of outputs: those outputs (or sums), for the pullback of `pulled`, which is applied to `x`
    /// first.
    pub kept: Option<&'a [f32]>,
    pub pulled: Epilogue<'a>,
    pub read: [usize; 2],
    pub y: &'a Place<'p>,
    pub written: [usize; 2],
    /// `[channels, taps]`.
    pub weight: &'a [f32],
    pub bias: Option<&'a [f32]>,
    pub added: Option<&'a [f32]>,
    pub epilogue: Epilogue<'a>,
    pub sums: Option<&'a Place<'p>>,
}

/// A pass with the offsets at which its taps read in the copy of a plane.
pub struct Placed {
    pass: Pass,
    /// Index in the kernel and read offset of each tap.
    taps: Vec<(usize, usize)>,
}

/// The layout of the copy of a plane: padded, and split by the phases of the stride.
pub struct Copy {
    step: [usize; 2],
    /// Zeros above and to the left.
    before: [usize; 2],
    /// Rows and columns of each of the `step[0] * step[1]` phase planes.
    size: [usize; 2],
    /// The first input column, the position in the copy and the number of columns, for each phase of the column stride.
    columns: Vec<[usize; 3]>,
}

impl Copy {
    /// The layout that all of `passes`, which have one step and read rows of `columns`, can read from.
    fn of(passes: &[Pass], columns: usize) -> Self {
        let step = passes.first().map_or([1; 2], |p| p.read_step);
        let ats = |axis: usize| passes.iter().flat_map(move |p| p.taps.iter().map(move |t| (t.at[axis], p.grid[axis])));
        let before: [usize; 2] =
            std::array::from_fn(|i| ats(i).map(|(at, _)| (-at).max(0) as usize).max().unwrap_or(0));
        let size: [usize; 2] = std::array::from_fn(|i| {
            let reach = |(at, count): (isize, usize)| (before[i] as isize + at) as usize / step[i] + count;
            // A pass without taps still writes its positions.
            let least = passes.iter().map(|p| p.grid[i]).max().unwrap_or(1);
            ats(i).map(reach).max().unwrap_or(1).max(least)
        });
        let places = (0..step[1]).map(|place| {
            let first = (place + step[1] - before[1] % step[1]) % step[1];
            let start = (first + before[1]) / step[1];
            let count = columns.saturating_sub(first).div_ceil(step[1]).min(size[1].saturating_sub(start));
            [first, start, count]
        });
        Self { step, before, size, columns: places.collect() }
    }

    fn planes(&self) -> usize {
        self.step[0] * self.step[1]
    }

    fn plane(&self) -> usize {
        self.size[0] * self.size[1]
    }

    fn placed(&self, pass: Pass) -> Placed {
        let taps = pass.taps.iter().map(|tap| {
            let [row, column] = std::array::from_fn(|i| (self.before[i] as isize + tap.at[i]) as usize);
            let part = row % self.step[0] * self.step[1] + column % self.step[1];
            let place = row / self.step[0] * self.size[1] + column / self.step[1];
            (tap.index, part * self.plane() + place)
        });
        Placed { taps: taps.collect(), pass }
    }
}

/// Computes `passes`, which must have the same read step.
pub fn correlate(call: &Call, passes: Vec<Pass>, taps: usize) {
    let copy = Copy::of(&passes, call.read[1]);
    let passes: Vec<Placed> = passes.into_iter().map(|pass| copy.placed(pass)).collect();
    let work = passes.iter().map(|p| p.pass.grid[0] * p.pass.grid[1] * (p.taps.len() + 2)).sum::<usize>().max(1);
    let at_once = (TASK / work).clamp(1, call.planes.max(1));
    let run = |scratch: &mut Scratch, first: usize| {
        for plane in first..(first + at_once).min(call.planes) {
            copied(call, &copy, plane, scratch);
            for pass in &passes {
                one(call, &copy, pass, plane, &call.weight[plane % call.channels * taps..][..taps], scratch);
            }
        }
    };
    match call.planes.saturating_mul(work) <= ALONE {
        true => {
            let scratch = &mut Scratch::default();
            (0..call.planes).step_by(at_once).for_each(|first| run(scratch, first));
        }
        false => {
            let tasks = (0..call.planes).into_par_iter().step_by(at_once);
            tasks.for_each_init(Scratch::default, run);
        }
    }
}

/// Scratch memory of a thread.
#[derive(Default)]
pub struct Scratch {
    copy: Vec<f32>,
    line: Vec<f32>,
    sums: Vec<f32>,
    weights: Vec<(f32, usize)>,
}

vectorised! {
    /// Copies a plane into its padded layout.
    fn copied(call: &Call, copy: &Copy, plane: usize, scratch: &mut Scratch) = copied_body
}

#[inline(always)]
fn copied_body<M: MulAdd>(call: &Call, copy: &Copy, plane: usize, scratch: &mut Scratch) {
    let [rows, columns] = call.read;
    // The last positions of a pass read beyond the copy, hence `WIDE`. The padding's zeros are reused for the next
    // plane.
    scratch.copy.resize(copy.planes() * copy.plane() + WIDE, 0.0);
    let reached = copy.size[0] * copy.step[0];
    let (mut place, mut to) = (copy.before[0] % copy.step[0], copy.before[0] / copy.step[0]);
    for row in 0..rows.min(reached.saturating_sub(copy.before[0])) {
        let at = (plane * rows + row) * columns;
        let mut line = &call.x[at..at + columns];
        if let Some(kept) = call.kept {
            scratch.line.resize(columns, 0.0);
            call.pulled.pull::<M>(plane % call.channels, &kept[at..at + columns], line, &mut scratch.line);
            line = &scratch.line;
        }
        for (part, &[first, start, count]) in copy.columns.iter().enumerate() {
            if count > 0 {
                let into = (place * copy.step[1] + part) * copy.plane() + to * copy.size[1] + start;
                let seen = &line[first..][..(count - 1) * copy.step[1] + 1];
                take(seen, copy.step[1], &mut scratch.copy[into..into + count]);
            }
        }
        place += 1;
        if place == copy.step[0] {
            (place, to) = (0, to + 1);
        }
    }
}

vectorised! {
    /// Computes a pass over one plane.
    fn one(call: &Call, copy: &Copy, placed: &Placed, plane: usize, weight: &[f32], scratch: &mut Scratch) = one_body
}

#[inline(always)]
fn one_body<M: MulAdd>(call: &Call, copy: &Copy, placed: &Placed, plane: usize, weight: &[f32], scratch: &mut Scratch) {
    let (pass, pitch, channel) = (&placed.pass, copy.size[1], plane % call.channels);
    let [rows, columns] = pass.grid;
    let bias = call.bias.map_or(0.0, |bias| bias[channel]);
    // Without residual and kept sums, the epilogue is applied to the columns between rows too, which is faster than row
    // by row.
    let at_once = call.added.is_none() && call.sums.is_none();
    let Scratch { copy: seen, sums, weights, .. } = scratch;
    weights.clear();
    weights.extend(placed.taps.iter().map(|&(index, place)| (weight[index], place)));
    let height = (LONG / pitch).clamp(1, rows.max(1));
    sums.resize((height * pitch).next_multiple_of(WIDE), 0.0);
    for first in (0..rows).step_by(height) {
        let height = height.min(rows - first);
        let length = (height - 1) * pitch + columns;
        for at in (0..length).step_by(WIDE) {
            let mut values = [bias; WIDE];
            for &(weight, place) in weights.iter() {
                let seen = &seen[place + first * pitch + at..][..WIDE];
                for l in 0..WIDE {
                    values[l] = M::mul_add(weight, seen[l], values[l]);
                }
            }
            sums[at..at + WIDE].copy_from_slice(&values);
        }
        // Not on `values` above: they would have to leave their registers.
        if at_once {
            call.epilogue.apply::<M>(channel, &mut sums[..length]);
        }
        for (row, sums) in sums.chunks_mut(pitch).take(height).enumerate() {
            let sums = &mut sums[..columns];
            let row = (first + row) * pass.write_step[0] + pass.write_first[0];
            let to = (plane * call.written[0] + row) * call.written[1] + pass.write_first[1];
            if pass.write_step[1] != 1 {
                // SAFETY: no other task writes this plane.
                unsafe { call.y.write_every(to, pass.write_step[1], sums) };
                continue;
            }
            if let Some(added) = call.added {
                sums.iter_mut().zip(&added[to..]).for_each(|(sum, added)| *sum += added);
            }
            if let Some(place) = call.sums {
                // SAFETY: as above.
                unsafe { place.write(to, sums) };
            }
            if !at_once {
                call.epilogue.apply::<M>(channel, sums);
            }
            // SAFETY: as above.
            unsafe { call.y.write(to, sums) };
        }
    }
}

/// Numbers copied at once: rows are often short, and a call of `memcpy` would cost more than the copy.
const SHORT: usize = 8;

/// Copies every `step`-th number of `from`.
#[inline(always)]
fn take(from: &[f32], step: usize, to: &mut [f32]) {
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
