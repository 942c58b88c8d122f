//! Depthwise convolution.
//!
//! A plane is one channel of one item. A task copies it with its zero padding into the cache, split into one *phase
//! plane* per phase of the stride: rows and columns with the same index modulo the stride. The inputs that a tap reads
//! for adjacent outputs are then adjacent, so that a tap reads one shifted row. Rows are computed without a break
//! between them; the sums in the columns between two rows are dropped.

use rayon::prelude::*;

use super::Call;
use super::epilogue::KernelEpilogue;
use super::passes::Pass;
use crate::ops::kernels::simd::vectorised;

/// Positions whose sums are accumulated in registers at a time: four registers of eight.
const LANES: usize = 32;
/// Positions that pass through all steps (sums, epilogue, output) before the next ones, so that they stay in the cache.
const STRIP: usize = 1024;
/// Minimum number of multiplications of a task.
const MIN_TASK: usize = 1 << 16;
/// Up to this many multiplications run on one thread: waking another takes longer.
const MAX_ON_ONE_THREAD: usize = 1 << 18;

/// The padded copy of a plane may have this number of times the plane's numbers, plus [`FREE_COPY`].
const MAX_COPY_RATIO: usize = 16;
/// A copy of this many numbers (256 KiB) is small enough for a plane of any size.
const FREE_COPY: usize = 1 << 16;

/// Whether the padded copy of a plane of `read` rows and columns is small enough for this kernel. It is, unless strides
/// or dilations are extreme.
pub fn fits(passes: &[Pass], read: [usize; 2]) -> bool {
    let PlaneLayout { step, size, .. } = PlaneLayout::of(passes, read[1]);
    let numbers = step.into_iter().chain(size).try_fold(1usize, |product, n| product.checked_mul(n));
    numbers.is_some_and(|numbers| numbers <= FREE_COPY + MAX_COPY_RATIO * read[0] * read[1])
}

/// An epilogue to pull back: the epilogue of the outputs whose cotangents are read, and the `saved` tensor of
/// [`KernelEpilogue::pull`].
pub type Pulled<'a> = (KernelEpilogue<'a>, &'a [f32]);

/// A pass with the offsets at which its taps read in the copy of a plane.
pub struct OffsetPass {
    pass: Pass,
    /// Index in the kernel, and read offset in the copy, of each tap.
    taps: Vec<(usize, usize)>,
}

/// The layout of the copy of a plane: padded, and split by the phases of the stride.
pub struct PlaneLayout {
    /// Number of phases along rows and columns.
    step: [usize; 2],
    /// Zeros above and to the left.
    before: [usize; 2],
    /// Rows and columns of each of the `step[0] * step[1]` phase planes.
    size: [usize; 2],
    /// The input columns of each phase of the column stride.
    columns: Vec<PhaseColumns>,
}

/// The columns of an input row that belong to one phase: every `step`-th.
struct PhaseColumns {
    /// The first of these columns in the input row.
    first: usize,
    /// The column of `first` in the phase plane.
    start: usize,
    count: usize,
}

impl PlaneLayout {
    /// The layout from which all of `passes` can read. They must have the same read step, and read planes with rows of
    /// `columns` numbers.
    fn of(passes: &[Pass], columns: usize) -> Self {
        let step = passes.first().map_or([1; 2], |p| p.read_step);
        // For each tap of each pass, its read offset and the number of positions of its pass.
        let taps_along =
            |axis: usize| passes.iter().flat_map(move |p| p.taps.iter().map(move |t| (t.at[axis], p.grid[axis])));
        // As many zeros as the tap reads that reaches furthest above or to the left.
        let before: [usize; 2] =
            std::array::from_fn(|i| taps_along(i).map(|(at, _)| (-at).max(0) as usize).max().unwrap_or(0));
        let size: [usize; 2] = std::array::from_fn(|i| {
            // The end of the rows or columns of a phase plane that a tap reads.
            let end_of_tap = |(at, count): (isize, usize)| (before[i] as isize + at) as usize / step[i] + count;
            // A pass without taps still writes its positions.
            let largest_grid = passes.iter().map(|p| p.grid[i]).max().unwrap_or(1);
            taps_along(i).map(end_of_tap).max().unwrap_or(1).max(largest_grid)
        });
        let columns = (0..step[1]).map(|phase| {
            // The first column whose padded index, `first + before`, has this phase.
            let first = (phase + step[1] - before[1] % step[1]) % step[1];
            let start = (first + before[1]) / step[1];
            let count = columns.saturating_sub(first).div_ceil(step[1]).min(size[1].saturating_sub(start));
            PhaseColumns { first, start, count }
        });
        Self { step, before, size, columns: columns.collect() }
    }

    /// Number of phase planes.
    fn phases(&self) -> usize {
        self.step[0] * self.step[1]
    }

    /// Numbers of a phase plane.
    fn phase_size(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// Computes where the taps of a pass read.
    fn with_offsets(&self, pass: Pass) -> OffsetPass {
        let taps = pass.taps.iter().map(|tap| {
            let [row, column] = std::array::from_fn(|i| (self.before[i] as isize + tap.at[i]) as usize);
            let phase = row % self.step[0] * self.step[1] + column % self.step[1];
            let offset = row / self.step[0] * self.size[1] + column / self.step[1];
            (tap.index, phase * self.phase_size() + offset)
        });
        OffsetPass { taps: taps.collect(), pass }
    }
}

/// Computes `passes`, which must have the same read step, with a weight `[channels, taps]`, where `taps` is the number
/// of taps of the kernel. If `pulled` is given, `call.x` holds cotangents of outputs, and the epilogue is pulled back
/// before the passes.
pub fn run_passes(call: &Call, weight: &[f32], pulled: Option<Pulled>, passes: Vec<Pass>, taps: usize) {
    let layout = PlaneLayout::of(&passes, call.read[1]);
    let passes: Vec<OffsetPass> = passes.into_iter().map(|pass| layout.with_offsets(pass)).collect();
    // Multiplications per plane. The copy and the epilogue are counted as one multiplication each per position.
    let work = passes.iter().map(|p| p.pass.grid[0] * p.pass.grid[1] * (p.taps.len() + 2)).sum::<usize>().max(1);
    let planes = call.items * call.outputs;
    let planes_per_task = (MIN_TASK / work).clamp(1, planes.max(1));
    let compute_planes = |scratch: &mut Scratch, first: usize| {
        for plane in first..(first + planes_per_task).min(planes) {
            copy_plane(call, pulled, &layout, plane, scratch);
            for pass in &passes {
                compute_pass(call, &layout, pass, plane, &weight[plane % call.outputs * taps..][..taps], scratch);
            }
        }
    };
    if planes.saturating_mul(work) <= MAX_ON_ONE_THREAD {
        let scratch = &mut Scratch::default();
        (0..planes).step_by(planes_per_task).for_each(|first| compute_planes(scratch, first));
    } else {
        let tasks = (0..planes).into_par_iter().step_by(planes_per_task);
        tasks.for_each_init(Scratch::default, compute_planes);
    }
}

/// Scratch memory of a thread.
#[derive(Default)]
pub struct Scratch {
    /// The phase planes of a plane.
    copy: Vec<f32>,
    /// An input row after the epilogue's pullback.
    line: Vec<f32>,
    /// The sums of a strip.
    sums: Vec<f32>,
    /// Weight and read offset of each tap.
    weights: Vec<(f32, usize)>,
}

vectorised! {
    /// Copies a plane into its padded layout.
    fn copy_plane<M>(
        call: &Call, pulled: Option<Pulled>, layout: &PlaneLayout, plane: usize, scratch: &mut Scratch,
    ) {
        let [rows, columns] = call.read;
        // The last positions of a pass read up to `LANES` numbers beyond the copy. The padding is zeroed only once,
        // because further planes overwrite only the inputs.
        scratch.copy.resize(layout.phases() * layout.phase_size() + LANES, 0.0);
        let padded_rows = layout.size[0] * layout.step[0];
        // Row phase of the input row, and its row in the phase plane.
        let (mut row_phase, mut phase_row) = (layout.before[0] % layout.step[0], layout.before[0] / layout.step[0]);
        for row in 0..rows.min(padded_rows.saturating_sub(layout.before[0])) {
            let at = (plane * rows + row) * columns;
            let mut line = &call.x[at..at + columns];
            if let Some((epilogue, saved)) = pulled {
                scratch.line.resize(columns, 0.0);
                epilogue.pull::<M>(plane % call.outputs, &saved[at..at + columns], line, &mut scratch.line);
                line = &scratch.line;
            }
            for (column_phase, &PhaseColumns { first, start, count }) in layout.columns.iter().enumerate() {
                if count > 0 {
                    let phase_plane = row_phase * layout.step[1] + column_phase;
                    let into = phase_plane * layout.phase_size() + phase_row * layout.size[1] + start;
                    let inputs = &line[first..][..(count - 1) * layout.step[1] + 1];
                    copy_strided(inputs, layout.step[1], &mut scratch.copy[into..into + count]);
                }
            }
            row_phase += 1;
            if row_phase == layout.step[0] {
                (row_phase, phase_row) = (0, phase_row + 1);
            }
        }
    }

    /// Computes a pass over one plane from its copy, in strips of rows.
    fn compute_pass<M>(
        call: &Call, layout: &PlaneLayout, pass: &OffsetPass, plane: usize, weight: &[f32], scratch: &mut Scratch,
    ) {
        let OffsetPass { pass, taps } = pass;
        // The copy and the sums have rows of `pitch` numbers.
        let (pitch, channel, finish) = (layout.size[1], plane % call.outputs, call.finish);
        let [rows, columns] = pass.grid;
        let bias = finish.bias.map_or(0.0, |bias| bias[channel]);
        // Without residual and sums to write, the epilogue is applied to a strip at once, including the columns between
        // rows, which is faster than row by row.
        let applies_to_strips = finish.residual.is_none() && finish.sums.is_none();
        let Scratch { copy, sums, weights, .. } = scratch;
        weights.clear();
        weights.extend(taps.iter().map(|&(index, offset)| (weight[index], offset)));
        let strip_height = (STRIP / pitch).clamp(1, rows.max(1));
        sums.resize((strip_height * pitch).next_multiple_of(LANES), 0.0);
        for first in (0..rows).step_by(strip_height) {
            let height = strip_height.min(rows - first);
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
            // The epilogue is not applied to `values` in the loop above, because they would have to leave their
            // registers.
            if applies_to_strips {
                finish.epilogue.apply::<M>(channel, &mut sums[..length]);
            }
            for (row, sums) in sums.chunks_mut(pitch).take(height).enumerate() {
                let sums = &mut sums[..columns];
                let row = (first + row) * pass.write_step[0] + pass.write_first[0];
                let to = (plane * call.written[0] + row) * call.written[1] + pass.write_first[1];
                if pass.write_step[1] != 1 {
                    // A backward pass, which has neither residual nor epilogue.
                    // SAFETY: no other task writes this plane.
                    unsafe { call.y.write_every(to, pass.write_step[1], sums) };
                    continue;
                }
                if let Some(residual) = finish.residual {
                    sums.iter_mut().zip(&residual[to..]).for_each(|(sum, residual)| *sum += residual);
                }
                if let Some(output) = finish.sums {
                    // SAFETY: as above.
                    unsafe { output.write(to, sums) };
                }
                if !applies_to_strips {
                    finish.epilogue.apply::<M>(channel, sums);
                }
                // SAFETY: as above.
                unsafe { call.y.write(to, sums) };
            }
        }
    }
}

/// Numbers per copy of a fixed size. Rows are often short, and a call of `memcpy` would cost more than the copy.
const SHORT: usize = 8;
/// Greatest length of a row that is copied in such parts.
const MAX_SHORT_ROW: usize = 16 * SHORT;

/// Copies every `step`-th number of `from`. `to` must not be empty.
#[inline(always)]
fn copy_strided(from: &[f32], step: usize, to: &mut [f32]) {
    match step {
        1 if to.len() < SHORT => to.iter_mut().zip(from).for_each(|(to, from)| *to = *from),
        // Copies of `SHORT` numbers each; the last one may overlap the one before it.
        1 if to.len() <= MAX_SHORT_ROW => {
            let last = to.len() - SHORT;
            let mut at = 0;
            while at < last {
                to[at..at + SHORT].copy_from_slice(&from[at..at + SHORT]);
                at += SHORT;
            }
            to[last..].copy_from_slice(&from[last..last + SHORT]);
        }
        1 => to.copy_from_slice(&from[..to.len()]),
        // A constant step, so that the compiler uses vector registers; the last number may have no successor.
        2 => {
            let (last, rest) = (to.len() - 1, from.chunks_exact(2));
            to[..last].iter_mut().zip(rest).for_each(|(to, from)| *to = from[0]);
            to[last] = from[2 * last];
        }
        _ => to.iter_mut().zip(from.iter().step_by(step)).for_each(|(to, from)| *to = *from),
    }
}
