//! im2col panel: the input that the taps of a block of positions read, packed for the micro-kernel. A panel consists of
//! *columns* of [`NR`] positions. A column has one [`Line`] per pair of input channel and tap; these pairs are the
//! *depth*.

use std::ops::Range;

use super::Call;
use super::passes::{Pass, Tap, inside};
#[cfg(target_arch = "x86_64")]
use crate::ops::kernels::simd;
use crate::ops::kernels::tile::{Line, NR};

/// Adjacent positions of a column that lie in one row of one item's grid.
#[derive(Clone, Copy)]
pub struct Run {
    /// Index of the first position in the column.
    pub lane: usize,
    pub count: usize,
    pub item: usize,
    pub row: usize,
    /// Index of the first position in the row.
    pub at: usize,
}

/// A list of lists in one allocation.
pub struct Lists<T> {
    /// The elements of all lists.
    all: Vec<T>,
    /// Where each list ends in `all`.
    ends: Vec<usize>,
}

impl<T> Lists<T> {
    /// An empty list with room for `lists` lists.
    pub fn with_capacity(lists: usize) -> Self {
        Self { all: Vec::with_capacity(lists), ends: Vec::with_capacity(lists) }
    }

    pub fn push(&mut self, list: impl Iterator<Item = T>) {
        self.all.extend(list);
        self.ends.push(self.all.len());
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    #[inline(always)]
    pub fn list(&self, index: usize) -> &[T] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.all[start..self.ends[index]]
    }
}

/// Divides `range`, which counts the positions of all items, into columns of [`NR`] positions, and returns the runs of
/// each column. The last column may be shorter.
pub fn runs_of_columns(grid: [usize; 2], range: Range<usize>) -> Lists<Run> {
    let mut columns = Lists::with_capacity(range.len().div_ceil(NR));
    for start in range.clone().step_by(NR) {
        let (end, mut next) = ((start + NR).min(range.end), start);
        columns.push(std::iter::from_fn(|| {
            let (row_of_all, at) = (next / grid[1], next % grid[1]);
            let run = Run {
                lane: next - start,
                count: (grid[1] - at).min(end - next),
                item: row_of_all / grid[0],
                row: row_of_all % grid[0],
                at,
            };
            next += run.count;
            (run.count > 0).then_some(run)
        }));
    }
    columns
}

/// The contents of a panel.
pub struct PanelSpec<'a, 'c, 'p> {
    pub call: &'a Call<'c, 'p>,
    pub pass: &'a Pass,
    pub group: usize,
    /// The runs of positions of each column.
    pub runs: &'a Lists<Run>,
    /// Range along the depth (input channel x tap).
    pub range: Range<usize>,
}

/// Adjacent positions of a line whose inputs one tap reads from one row.
struct TapRun {
    /// Index of the first position in the line.
    lane: usize,
    count: usize,
    /// Index of the first input, relative to the group's first channel.
    from: usize,
}

impl Lists<TapRun> {
    /// The number of leading lists that read whole lines, contiguous in memory.
    fn contiguous_list_count(&self) -> usize {
        let Some(first) = self.all.first().map(|run| run.from) else { return 0 };
        let follows = |i: &usize| matches!(self.list(*i), [run] if run.count == NR && run.from == first + i * NR);
        (0..self.len()).take_while(follows).count()
    }
}

/// Packs the panel into `panel`, `[columns, range, NR]`.
pub fn pack(spec: &PanelSpec, panel: &mut [Line]) {
    if panel.is_empty() {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if spec.pass.read_step[1] <= 2 && simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { pack_avx2(spec, panel) };
    }
    pack_with(spec, panel, fill_portable);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn pack_avx2(spec: &PanelSpec, panel: &mut [Line]) {
    pack_with(spec, panel, |x, tap_runs, step, line| fill_avx2(x, tap_runs, step, line));
}

/// The body of [`pack`]. `fill(x, tap_runs, step, line)` writes one line from the channel that begins at x.
#[inline(always)]
fn pack_with(spec: &PanelSpec, panel: &mut [Line], fill: impl Fn(&[f32], &[TapRun], usize, &mut [f32; NR])) {
    let PanelSpec { call, pass, runs, range, .. } = spec;
    let (taps, step) = (pass.taps.len(), pass.read_step[1]);
    let (depth, columns_of_panel) = (range.len(), runs.len());
    // Along the depth, taps repeat with each channel: tap 0 of the next channel follows the last tap. A panel shallower
    // than the kernel reads `depth` taps in this cyclic order, beginning with that of its first line. Any other panel
    // reads all taps.
    let (first_tap, panel_taps) = if depth < taps { (range.start % taps, depth) } else { (0, taps) };
    // The runs of each column for each tap of the panel. Here taps are counted from `first_tap`, not from the kernel's
    // first tap.
    let mut tap_runs = Lists::with_capacity(panel_taps * columns_of_panel);
    for tap in (first_tap..taps).chain(0..first_tap).take(panel_taps) {
        for column in 0..columns_of_panel {
            tap_runs.push(spec.tap_runs(&pass.taps[tap], runs.list(column)));
        }
    }
    // A 1 x 1 kernel reads these columns from contiguous memory.
    let contiguous_columns = if taps == 1 && step == 1 { tap_runs.contiguous_list_count() } else { 0 };
    let plane = call.read[0] * call.read[1];
    // Each round packs the lines of one channel, from the depth `start` within the panel and the tap `tap` on.
    let (mut start, mut tap, mut channel) = (0, range.start % taps, range.start / taps);
    while start < depth {
        let lines_of_channel = (taps - tap).min(depth - start);
        // `tap`, counted from `first_tap`.
        let first_index = (tap + taps - first_tap) % taps;
        let x = &call.x[channel * plane..];
        if contiguous_columns > 0
            && let Some(TapRun { from, .. }) = tap_runs.list(0).first()
        {
            let numbers = x[*from..][..contiguous_columns * NR].as_chunks::<NR>().0;
            // The lines at the same depth of successive columns.
            let lines = panel[start..].iter_mut().step_by(depth);
            lines.zip(numbers).for_each(|(line, numbers)| line.0 = *numbers);
        }
        for column in contiguous_columns..columns_of_panel {
            let lines = &mut panel[column * depth + start..][..lines_of_channel];
            for (line, tap_index) in lines.iter_mut().zip(first_index..) {
                // The common case first: a whole line of adjacent inputs.
                match tap_runs.list(tap_index * columns_of_panel + column) {
                    &[TapRun { count: NR, from, .. }] if step == 1 => line.0.copy_from_slice(&x[from..][..NR]),
                    runs => fill(x, runs, step, &mut line.0),
                }
            }
        }
        (start, tap, channel) = (start + lines_of_channel, 0, channel + 1);
    }
}

impl PanelSpec<'_, '_, '_> {
    /// The inputs that a tap reads at the positions of a column. Positions without an input read zero padding.
    fn tap_runs(&self, &Tap { at: [down, right], .. }: &Tap, column: &[Run]) -> impl Iterator<Item = TapRun> {
        let ([height, width], [row_step, step]) = (self.call.read, self.pass.read_step);
        let tap_run = move |run: &Run| {
            let row = usize::try_from((run.row * row_step) as isize + down).ok().filter(|row| *row < height)?;
            let positions = inside(right, step, width, run.at..run.at + run.count);
            let plane = run.item * self.call.inputs + self.group * (self.call.inputs / self.call.groups);
            let from = (plane * height + row) * width + (positions.start * step).checked_add_signed(right)?;
            (!positions.is_empty()).then(|| TapRun {
                lane: run.lane + positions.start - run.at,
                count: positions.len(),
                from,
            })
        };
        column.iter().filter_map(tap_run)
    }
}

/// Numbers per register: half a line.
#[cfg(target_arch = "x86_64")]
const HALF: usize = NR / 2;

/// Table of load masks for a step of one. The mask that begins `lane` entries before the middle enables the elements
/// from lane `lane` on. For lines of four numbers, the table would be `0 0 0 0 -1 -1 -1 -1`, and the mask from lane 1
/// on begins at its entry 4 - 1: `0 -1 -1 -1`.
#[cfg(target_arch = "x86_64")]
const LANES_FROM_BY_ONE: [i32; 2 * NR] = {
    let mut table = [0; 2 * NR];
    let mut i = 0;
    while i < NR {
        table[NR + i] = -1;
        i += 1;
    }
    table
};

/// Table of load masks for a step of two. Its masks begin `2 * lane` entries before the middle, and only every second
/// element is enabled: for lines of four numbers, `0 0 0 0 0 0 0 0 -1 0 -1 0 -1 0 -1 0`.
#[cfg(target_arch = "x86_64")]
const LANES_FROM_BY_TWO: [i32; 4 * NR] = {
    let mut table = [0; 4 * NR];
    let mut i = 0;
    while i < NR {
        table[2 * NR + 2 * i] = -1;
        i += 1;
    }
    table
};

/// Assembles a line from parts of rows in registers: copies of a few numbers each would cost more than the products.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
#[inline]
fn fill_avx2(x: &[f32], tap_runs: &[TapRun], step: usize, line: &mut [f32; NR]) {
    use std::arch::x86_64::{
        __m256, __m256i, _mm256_andnot_si256, _mm256_castpd_ps, _mm256_castps_pd, _mm256_loadu_ps, _mm256_loadu_si256,
        _mm256_maskload_ps, _mm256_or_ps, _mm256_permute4x64_pd, _mm256_setzero_ps, _mm256_shuffle_ps,
    };
    let table: &[i32] = if step == 1 { &LANES_FROM_BY_ONE } else { &LANES_FROM_BY_TWO };
    assert!(step == 1 || step == 2, "a step of {step}");
    let mut halves = [_mm256_setzero_ps(); 2];
    // The shuffle leaves pairs in the order 0, 2, 1, 3.
    let in_order = |x: __m256| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(x)));
    if let (&[TapRun { count: NR, from, .. }], 2) = (tap_runs, step)
        && let Some(pairs) = x[from..].first_chunk::<{ 2 * NR }>()
    {
        for (half, pairs) in halves.iter_mut().zip(pairs.as_chunks::<NR>().0) {
            // SAFETY: sixteen numbers are two times eight.
            let (low, high) = unsafe { (_mm256_loadu_ps(pairs.as_ptr()), _mm256_loadu_ps(pairs.as_ptr().add(HALF))) };
            *half = in_order(_mm256_shuffle_ps::<0b10_00_10_00>(low, high));
        }
        return write_line(halves, line);
    }
    for run in tap_runs {
        let last = run.from + (run.count - 1) * step;
        assert!(last < x.len(), "a tap outside of its tensor");
        let start = x.as_ptr().wrapping_add(run.from).wrapping_sub(run.lane * step);
        assert!(run.lane + run.count <= NR, "more positions than a line has");
        let load = |part: usize| -> __m256 {
            // SAFETY: the table has 2 * NR * step entries. Lanes are at most NR (asserted), so that the index
            // (NR - lane) * step + HALF * part is not negative. It is at most NR * step + HALF * part, and parts are
            // less than 2 * step = NR * step / HALF, so that at least HALF entries follow it. The mask enables only
            // elements of `x` from index `run.from` to `last` (asserted to be in bounds); no other memory is touched.
            unsafe {
                let lanes_from = |lane: usize| {
                    let start = table.as_ptr().add((NR - lane) * step + HALF * part);
                    _mm256_loadu_si256(start.cast::<__m256i>())
                };
                let mask = _mm256_andnot_si256(lanes_from(run.lane + run.count), lanes_from(run.lane));
                _mm256_maskload_ps(start.wrapping_add(HALF * part), mask)
            }
        };
        if step == 1 {
            halves = [_mm256_or_ps(halves[0], load(0)), _mm256_or_ps(halves[1], load(1))];
            continue;
        }
        for (index, half) in halves.iter_mut().enumerate() {
            let even = _mm256_shuffle_ps::<0b10_00_10_00>(load(2 * index), load(2 * index + 1));
            *half = _mm256_or_ps(*half, in_order(even));
        }
    }
    write_line(halves, line);
}

/// Writes both halves of a line.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
#[inline]
fn write_line(halves: [std::arch::x86_64::__m256; 2], line: &mut [f32; NR]) {
    for (half, line) in halves.into_iter().zip(line.chunks_exact_mut(HALF)) {
        // SAFETY: the chunk has eight numbers.
        unsafe { std::arch::x86_64::_mm256_storeu_ps(line.as_mut_ptr(), half) };
    }
}

fn fill_portable(x: &[f32], tap_runs: &[TapRun], step: usize, line: &mut [f32; NR]) {
    *line = [0.0; NR];
    for run in tap_runs {
        let inputs = x[run.from..].iter().step_by(step);
        line[run.lane..][..run.count].iter_mut().zip(inputs).for_each(|(to, from)| *to = *from);
    }
}
