//! Depthwise convolution.
//!
//! A task copies a plane with its zero padding into the cache, split into one plane per phase of the stride, so that
//! the inputs that a tap reads for adjacent outputs are adjacent. A tap is then one shifted row. Rows are computed
//! without a break between them; the columns between two rows are dropped.

use rayon::prelude::*;

use super::Call;
use super::epilogue::KernelEpilogue;
use super::passes::Pass;
use crate::ops::kernels::simd::vectorised;

/// Positions that are accumulated at once: four registers of eight.
const LANES: usize = 32;
/// Positions between two visits of the same memory.
const STRIP: usize = 1024;
/// Minimum number of multiplications of a task.
const TASK: usize = 1 << 16;
/// Up to this many multiplications run on one thread: waking another takes longer.
const ONE_THREAD: usize = 1 << 18;

/// Whether the padded copy of a plane of `read` rows and columns is small. It is, unless strides or dilations are
/// extreme.
pub fn fits(passes: &[Pass], read: [usize; 2]) -> bool {
    let PlaneLayout { step, size, .. } = PlaneLayout::of(passes, read[1]);
    let numbers = step.into_iter().chain(size).try_fold(1usize, |all, n| all.checked_mul(n));
    numbers.is_some_and(|numbers| numbers <= (1 << 16) + 16 * read[0] * read[1])
}

/// The epilogue of the outputs whose cotangent is read, and the tensor that [`KernelEpilogue::pull`] needs.
pub type Pulled<'a> = (KernelEpilogue<'a>, &'a [f32]);

/// A pass with the offsets at which its taps read in the copy of a plane.
pub struct OffsetPass {
    pass: Pass,
    /// Index in the kernel and read offset of each tap.
    taps: Vec<(usize, usize)>,
}

/// The layout of the copy of a plane: padded, and split by the phases of the stride.
pub struct PlaneLayout {
    step: [usize; 2],
    /// Zeros above and to the left.
    before: [usize; 2],
    /// Rows and columns of each of the `step[0] * step[1]` phase planes.
    size: [usize; 2],
    /// The first input column, the position in the copy and the number of columns, for each phase of the column stride.
    columns: Vec<[usize; 3]>,
}

impl PlaneLayout {
    /// The layout that all of `passes`, which have one step and read rows of `columns`, can read from.
    fn of(passes: &[Pass], columns: usize) -> Self {
        let step = passes.first().map_or([1; 2], |p| p.read_step);
        let taps_along =
            |axis: usize| passes.iter().flat_map(move |p| p.taps.iter().map(move |t| (t.at[axis], p.grid[axis])));
        let before: [usize; 2] =
            std::array::from_fn(|i| taps_along(i).map(|(at, _)| (-at).max(0) as usize).max().unwrap_or(0));
        let size: [usize; 2] = std::array::from_fn(|i| {
            let reach = |(at, count): (isize, usize)| (before[i] as isize + at) as usize / step[i] + count;
            // A pass without taps still writes its positions.
            let least = passes.iter().map(|p| p.grid[i]).max().unwrap_or(1);
            taps_along(i).map(reach).max().unwrap_or(1).max(least)
        });
        let columns = (0..step[1]).map(|phase| {
            let first = (phase + step[1] - before[1] % step[1]) % step[1];
            let start = (first + before[1]) / step[1];
            let count = columns.saturating_sub(first).div_ceil(step[1]).min(size[1].saturating_sub(start));
            [first, start, count]
        });
        Self { step, before, size, columns: columns.collect() }
    }

    fn planes(&self) -> usize {
        self.step[0] * self.step[1]
    }

    fn plane(&self) -> usize {
        self.size[0] * self.size[1]
    }

    fn with_offsets(&self, pass: Pass) -> OffsetPass {
        let taps = pass.taps.iter().map(|tap| {
            let [row, column] = std::array::from_fn(|i| (self.before[i] as isize + tap.at[i]) as usize);
            let part = row % self.step[0] * self.step[1] + column % self.step[1];
            let offset = row / self.step[0] * self.size[1] + column / self.step[1];
            (tap.index, part * self.plane() + offset)
        });
        OffsetPass { taps: taps.collect(), pass }
    }
}

/// Computes `passes`, which must have the same read step, with a weight `[channels, taps]`. If `pulled` is given,
/// `call.x` is the cotangent of outputs, and the epilogue is pulled back first.
pub fn correlate(call: &Call, weight: &[f32], pulled: Option<Pulled>, passes: Vec<Pass>, taps: usize) {
    let layout = PlaneLayout::of(&passes, call.read[1]);
    let passes: Vec<OffsetPass> = passes.into_iter().map(|pass| layout.with_offsets(pass)).collect();
    let work = passes.iter().map(|p| p.pass.grid[0] * p.pass.grid[1] * (p.taps.len() + 2)).sum::<usize>().max(1);
    let planes = call.items * call.outputs;
    let at_once = (TASK / work).clamp(1, planes.max(1));
    let run = |scratch: &mut Scratch, first: usize| {
        for plane in first..(first + at_once).min(planes) {
            copy_plane(call, pulled, &layout, plane, scratch);
            for pass in &passes {
                compute_pass(call, &layout, pass, plane, &weight[plane % call.outputs * taps..][..taps], scratch);
            }
        }
    };
    match planes.saturating_mul(work) <= ONE_THREAD {
        true => {
            let scratch = &mut Scratch::default();
            (0..planes).step_by(at_once).for_each(|first| run(scratch, first));
        }
        false => {
            let tasks = (0..planes).into_par_iter().step_by(at_once);
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
    fn copy_plane<M>(
        call: &Call, pulled: Option<Pulled>, layout: &PlaneLayout, plane: usize, scratch: &mut Scratch,
    ) {
        let [rows, columns] = call.read;
        // The last positions of a pass read beyond the copy, hence `LANES`. The padding's zeros are reused for the next
        // plane.
        scratch.copy.resize(layout.planes() * layout.plane() + LANES, 0.0);
        let reached = layout.size[0] * layout.step[0];
        let (mut phase, mut to) = (layout.before[0] % layout.step[0], layout.before[0] / layout.step[0]);
        for row in 0..rows.min(reached.saturating_sub(layout.before[0])) {
            let at = (plane * rows + row) * columns;
            let mut line = &call.x[at..at + columns];
            if let Some((epilogue, saved)) = pulled {
                scratch.line.resize(columns, 0.0);
                epilogue.pull::<M>(plane % call.outputs, &saved[at..at + columns], line, &mut scratch.line);
                line = &scratch.line;
            }
            for (part, &[first, start, count]) in layout.columns.iter().enumerate() {
                if count > 0 {
                    let into = (phase * layout.step[1] + part) * layout.plane() + to * layout.size[1] + start;
                    let inputs = &line[first..][..(count - 1) * layout.step[1] + 1];
                    copy_strided(inputs, layout.step[1], &mut scratch.copy[into..into + count]);
                }
            }
            phase += 1;
            if phase == layout.step[0] {
                (phase, to) = (0, to + 1);
            }
        }
    }

    fn compute_pass<M>(
        call: &Call, layout: &PlaneLayout, pass: &OffsetPass, plane: usize, weight: &[f32], scratch: &mut Scratch,
    ) {
        let OffsetPass { pass, taps } = pass;
        let (pitch, channel, finish) = (layout.size[1], plane % call.outputs, call.finish);
        let [rows, columns] = pass.grid;
        let bias = finish.bias.map_or(0.0, |bias| bias[channel]);
        // Without residual and sums to write, the epilogue is applied to the columns between rows too, which is faster
        // than row by row.
        let at_once = finish.added.is_none() && finish.sums.is_none();
        let Scratch { copy, sums, weights, .. } = scratch;
        weights.clear();
        weights.extend(taps.iter().map(|&(index, offset)| (weight[index], offset)));
        let height = (STRIP / pitch).clamp(1, rows.max(1));
        sums.resize((height * pitch).next_multiple_of(LANES), 0.0);
        for first in (0..rows).step_by(height) {
            let height = height.min(rows - first);
            let length = (height - 1) * pitch + columns;
            for at in (0..length).step_by(LANES) {
                let mut values = [bias; LANES];
                for &(weight, offset) in weights.iter() {
                    let inputs = &copy[offset + first * pitch + at..][..LANES];
                    for l in 0..LANES {
                        values[l] = M::mul_add(weight, inputs[l], values[l]);
                    }
                }
                sums[at..at + LANES].copy_from_slice(&values);
            }
            // Not on `values` above: they would have to leave their registers.
            if at_once {
                finish.epilogue.apply::<M>(channel, &mut sums[..length]);
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
                if let Some(added) = finish.added {
                    sums.iter_mut().zip(&added[to..]).for_each(|(sum, added)| *sum += added);
                }
                if let Some(output) = finish.sums {
                    // SAFETY: as above.
                    unsafe { output.write(to, sums) };
                }
                if !at_once {
                    finish.epilogue.apply::<M>(channel, sums);
                }
                // SAFETY: as above.
                unsafe { call.y.write(to, sums) };
            }
        }
    }
}

/// Numbers copied at once: rows are often short, and a call of `memcpy` would cost more than the copy.
const SHORT: usize = 8;

/// Copies every `step`-th number of `from`.
#[inline(always)]
fn copy_strided(from: &[f32], step: usize, to: &mut [f32]) {
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
