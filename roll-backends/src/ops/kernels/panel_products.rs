//! Packed matrix products with an f32 or bf16 matrix on the right, blocked as in BLIS. Panels are packed in the order
//! in which the micro-kernel ([`super::tile`]) reads them; bf16 is converted to f32 while packing, so that a full f32
//! copy never exists.
//!
//! Accumulation is f32, in one order for any number of rows and threads.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::matrix::ViewMut;
use super::parallel::{ELEMENT_COST, min_items_per_task};
use super::simd::prefetch;
use super::tile::{KC, Line, MR, NR, SUMS, accumulate};
use crate::ops::tiled::ranges;

/// Column block (NC in BLIS terms). Its packed panels, [`KC`] deep, take 144 KiB.
const NC: usize = 128;
/// Row block (MC in BLIS terms) whose left operand is packed at once, if all threads share it.
const MC: usize = 256 * MR;
/// Row block of a task that packs a left operand of its own.
const MC_PER_TASK: usize = 64 * MR;
/// Depth to which a left operand is packed at a time, 6.8 MiB for [`MC`] rows. Its sums are then added to the result.
const LEFT_DEPTH: usize = 4 * KC;
/// Blocks of [`MR`] rows that are multiplied with one column panel while it is in the L1 cache: 108 KiB of the left
/// operand.
const MICRO_PANELS: usize = 16;
/// Rows between the row that is fetched and the one that is packed, or written.
const ROWS_AHEAD: usize = 12;
/// Number of tasks per thread, if the result is large enough.
const TASKS_PER_THREAD: usize = 2;

/// Transposes the first columns of [`LANES`] rows, which are `stride` apart: column k is written to `out[k * NR..]`.
/// Returns the number of columns transposed, a multiple of the register size. The processor must have AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
type Transpose<N> = unsafe fn(from: &[N], stride: usize, columns: usize, out: &mut [f32]) -> usize;

/// A storage type of the right matrix.
pub trait Number: Copy + Send + Sync {
    /// The transposition in AVX2 intrinsics.
    #[cfg(target_arch = "x86_64")]
    const TRANSPOSE: Transpose<Self>;

    /// Converts to f32, exactly.
    fn to_f32(self) -> f32;
}

/// The right matrix of a product, `[outputs, inputs]`.
#[derive(Clone, Copy, Debug)]
pub struct RightMatrix<'a, N> {
    /// The elements, row-major.
    pub values: &'a [N],
    pub outputs: usize,
    pub inputs: usize,
}

/// Depth and columns of a product with a matrix `[outputs, inputs]`, transposed if `is_transposed`.
pub fn depth_and_columns(outputs: usize, inputs: usize, is_transposed: bool) -> [usize; 2] {
    if is_transposed { [inputs, outputs] } else { [outputs, inputs] }
}

impl<N: Number> RightMatrix<'_, N> {
    /// Adds the product of `a` (row-major) and this matrix, transposed if `is_transposed`, to `out`: `a W` from
    /// `[rows, outputs]` to `[rows, inputs]`, or `a W^T` from `[rows, inputs]` to `[rows, outputs]`.
    pub fn add_product(self, a: &[f32], is_transposed: bool, out: &mut [f32]) {
        let [depth, columns] = depth_and_columns(self.outputs, self.inputs, is_transposed);
        assert_eq!(self.values.len(), depth * columns, "a matrix of {} x {}", self.outputs, self.inputs);
        if out.is_empty() || depth == 0 {
            return;
        }
        let rows = out.len() / columns;
        assert_eq!(a.len(), rows * depth, "{rows} rows of {depth}");
        let tasks = TASKS_PER_THREAD * rayon::current_num_threads();
        if columns.div_ceil(NC) < tasks && rows > MC_PER_TASK {
            self.add_by_rows(a, is_transposed, [depth, columns], out);
        } else {
            self.add_by_columns(a, is_transposed, [depth, columns], out);
        }
    }

    /// [`Self::add_product`] with rows distributed over threads, for products with few columns.
    fn add_by_rows(self, a: &[f32], is_transposed: bool, [depth, columns]: [usize; 2], out: &mut [f32]) {
        let parts = out.par_chunks_mut(MC_PER_TASK * columns).zip(a.par_chunks(MC_PER_TASK * depth));
        let parts = parts.with_min_len(min_items_per_task(MC_PER_TASK * depth * columns));
        parts.for_each_init(<(Vec<f32>, Scratch)>::default, |(left, scratch), (out, a)| {
            for depths in ranges(depth, LEFT_DEPTH) {
                let left = grown(left, packed_len(a, depth, &depths));
                let row_blocks = left.chunks_exact_mut(MR * depths.len()).zip(a.chunks(MR * depth));
                row_blocks.for_each(|(block, rows)| pack_rows(rows, depth, depths.clone(), block));
                let mut out = ViewMut::new(out, a.len() / depth, columns);
                for column_block in ranges(columns, NC) {
                    let out = out.columns_mut(column_block.clone());
                    self.add_block(left, depths.clone(), is_transposed, column_block, scratch, out);
                }
            }
        });
    }

    /// [`Self::add_product`] with columns distributed over threads, so that each part of this matrix is packed once.
    fn add_by_columns(self, a: &[f32], is_transposed: bool, [depth, columns]: [usize; 2], out: &mut [f32]) {
        let width = columns.div_ceil(TASKS_PER_THREAD * rayon::current_num_threads()).next_multiple_of(NR).min(NC);
        let mut left = Vec::new();
        for (a, out) in a.chunks(MC * depth).zip(out.chunks_mut(MC * columns)) {
            for depths in ranges(depth, LEFT_DEPTH) {
                let left = grown(&mut left, packed_len(a, depth, &depths));
                let row_blocks = left.par_chunks_exact_mut(MR * depths.len()).zip(a.par_chunks(MR * depth));
                let row_blocks = row_blocks.with_min_len(min_items_per_task(MR * depths.len() * ELEMENT_COST));
                row_blocks.for_each(|(block, rows)| pack_rows(rows, depth, depths.clone(), block));
                let parts = ViewMut::new(out, a.len() / depth, columns).split_columns(width);
                let parts = parts.into_par_iter().zip(ranges(columns, width).collect::<Vec<_>>());
                let parts = parts.with_min_len(min_items_per_task(left.len() * width));
                parts.for_each_init(Scratch::default, |scratch, (out, column_block)| {
                    self.add_block(left, depths.clone(), is_transposed, column_block, scratch, out);
                });
            }
        }
    }

    /// Adds to `out` the product of the packed `left` with this matrix, for a range of the depth and a block of
    /// columns. `left` covers this range of the depth only, and `out` these columns only.
    fn add_block(
        self,
        left: &[f32],
        depths: Range<usize>,
        is_transposed: bool,
        columns: Range<usize>,
        Scratch { right, sums }: &mut Scratch,
        mut out: ViewMut,
    ) {
        let (row_blocks, panels) = (left.len() / (MR * depths.len()), columns.len().div_ceil(NR));
        let sums: &mut [f32] = bytemuck::cast_slice_mut(grown(sums, panels * row_blocks * SUMS / NR));
        for first in depths.clone().step_by(KC) {
            let steps = KC.min(depths.end - first);
            // Lanes beyond the last column keep their old content; their sums are not read.
            let right: &mut [f32] = bytemuck::cast_slice_mut(grown(right, panels * steps));
            if is_transposed {
                self.pack_transposed(first, columns.clone(), right);
            } else {
                self.pack(first, steps, columns.clone(), right);
            }
            let adds_to_sums = first > depths.start;
            let left = |row_block| &left[(row_block * depths.len() + first - depths.start) * MR..][..steps * MR];
            for group in ranges(row_blocks, MICRO_PANELS) {
                // Two by two tiles at a time; one where a row block or a panel is left over.
                let panel_pairs = right.chunks(2 * steps * NR).zip(sums.chunks_mut(2 * row_blocks * SUMS));
                for (panels, sums) in panel_pairs {
                    let (sums, next_sums) = sums.as_chunks_mut::<SUMS>().0.split_at_mut(row_blocks);
                    let sums = &mut sums[group.clone()];
                    if next_sums.is_empty() {
                        for (row_block, sums) in group.clone().zip(sums) {
                            accumulate([left(row_block)], [panels], [[sums]], adds_to_sums);
                        }
                        continue;
                    }
                    let (panel, next_panel) = panels.split_at(steps * NR);
                    let pairs = sums.chunks_mut(2).zip(next_sums[group.clone()].chunks_mut(2));
                    for (row_block, pair) in group.clone().step_by(2).zip(pairs) {
                        match pair {
                            ([a, b], [c, d]) => {
                                let left = [left(row_block), left(row_block + 1)];
                                accumulate(left, [panel, next_panel], [[a, c], [b, d]], adds_to_sums);
                            }
                            ([a, ..], [c, ..]) => {
                                accumulate([left(row_block)], [panel, next_panel], [[a, c]], adds_to_sums);
                            }
                            _ => {}
                        }
                    }
                }
            }
        }
        for row in 0..out.rows() {
            if row + ROWS_AHEAD < out.rows() {
                prefetch(out.row(row + ROWS_AHEAD));
            }
            let panels = sums[row * NR..].chunks(row_blocks * SUMS);
            for (out, sums) in out.row(row).chunks_mut(NR).zip(panels) {
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
            }
        }
    }

    /// Packs `columns` of the `rows` rows from `first` on, in the order panel (of [`NR`] columns), row, column of the
    /// panel.
    fn pack(self, first: usize, rows: usize, columns: Range<usize>, out: &mut [f32]) {
        for (k, row) in self.values[first * self.inputs..].chunks_exact(self.inputs).take(rows).enumerate() {
            self.prefetch(first + k + ROWS_AHEAD, columns.clone());
            let (whole, rest) = row[columns.clone()].as_chunks::<NR>();
            let mut panels = out.chunks_exact_mut(rows * NR);
            for (row, panel) in whole.iter().zip(&mut panels) {
                let Some(out) = panel[k * NR..].first_chunk_mut::<NR>() else { continue };
                *out = row.map(N::to_f32);
            }
            if let Some(panel) = panels.next() {
                panel[k * NR..].iter_mut().zip(rest).for_each(|(out, value)| *out = value.to_f32());
            }
        }
    }

    /// Starts to fetch a part of a row into the cache, if there is such a row.
    fn prefetch(self, row: usize, columns: Range<usize>) {
        let start = row * self.inputs;
        prefetch(self.values.get(start + columns.start..start + columns.end).unwrap_or_default());
    }

    /// Packs the transpose of some columns, from `first` on, of `rows`, in the order panel (of [`NR`] rows), column,
    /// row of the panel. The number of columns follows from the length of `out`.
    fn pack_transposed(self, first: usize, rows: Range<usize>, out: &mut [f32]) {
        let panel_size = out.len() / rows.len().div_ceil(NR);
        let steps = panel_size / NR;
        for (panel, out) in out.chunks_exact_mut(panel_size).enumerate() {
            for lane in (0..NR.min(rows.len() - panel * NR)).step_by(LANES) {
                let count = LANES.min(rows.len() - panel * NR - lane);
                let row = rows.start + panel * NR + lane;
                (row + LANES..row + 2 * LANES).for_each(|row| self.prefetch(row, first..first + steps));
                let from = &self.values[row * self.inputs + first..];
                // The leading columns are transposed by intrinsics if there are enough rows, the remaining one by one.
                let transposed = if count == LANES { transpose(from, self.inputs, steps, &mut out[lane..]) } else { 0 };
                for (r, from) in from.chunks(self.inputs).take(count).enumerate() {
                    for k in transposed..steps {
                        out[k * NR + lane + r] = from[k].to_f32();
                    }
                }
            }
        }
    }
}

/// Scratch memory of a task.
#[derive(Default)]
struct Scratch {
    /// Packed panels of the right matrix.
    right: Vec<Line>,
    /// Sums, in the order panel, block of [`MR`] rows, row, column.
    sums: Vec<Line>,
}

/// The size of the packed left operand `a`: all blocks of [`MR`] rows, for a range of the depth.
fn packed_len(a: &[f32], depth: usize, depths: &Range<usize>) -> usize {
    (a.len() / depth).div_ceil(MR) * MR * depths.len()
}

/// Packs a block of up to [`MR`] rows, `[rows, depth]`, in the order step along the depth, row. Missing rows are zero.
fn pack_rows(a: &[f32], depth: usize, depths: Range<usize>, block: &mut [f32]) {
    let mut rows = a.chunks_exact(depth).map(|row| &row[depths.clone()]);
    if a.len() == MR * depth {
        let rows: [&[f32]; MR] = std::array::from_fn(|_| rows.next().unwrap_or_default());
        return interleave(rows, block);
    }
    block.fill(0.0);
    for (r, row) in rows.enumerate() {
        block.iter_mut().skip(r).step_by(MR).zip(row).for_each(|(to, value)| *to = *value);
    }
}

/// Packs a full block of rows; the compiler vectorises the fixed number of rows.
fn interleave(rows: [&[f32]; MR], block: &mut [f32]) {
    let steps = block.as_chunks_mut::<MR>().0;
    let [a, b, c, d, e, f] = rows.map(|row| &row[..steps.len()]);
    for (k, step) in steps.iter_mut().enumerate() {
        *step = [a[k], b[k], c[k], d[k], e[k], f[k]];
    }
}

/// Returns the first `length` items of a buffer, which is grown if it is too short. Old content is kept.
fn grown<T: Clone + Default>(buffer: &mut Vec<T>, length: usize) -> &mut [T] {
    if buffer.len() < length {
        buffer.resize(length, T::default());
    }
    &mut buffer[..length]
}

/// Number of rows that [`transpose`] transposes at a time.
const LANES: usize = 8;

/// Runs [`Number::TRANSPOSE`]; returns 0 without AVX2.
fn transpose<N: Number>(from: &[N], stride: usize, columns: usize, out: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { N::TRANSPOSE(from, stride, columns, out) };
    }
    let _ = (from, stride, columns, out);
    0
}

impl Number for f32 {
    #[cfg(target_arch = "x86_64")]
    const TRANSPOSE: Transpose<Self> = avx2::transpose_f32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Number for bf16 {
    #[cfg(target_arch = "x86_64")]
    const TRANSPOSE: Transpose<Self> = avx2::transpose_bf16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// [`Number::TRANSPOSE`] of each type.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_setzero_si128, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64,
        _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
        _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_slli_epi32,
        _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };

    use super::{LANES, NR, bf16};

    #[target_feature(enable = "avx2,fma")]
    pub fn transpose_f32(from: &[f32], stride: usize, steps: usize, out: &mut [f32]) -> usize {
        let whole = steps / LANES * LANES;
        for k in (0..whole).step_by(LANES) {
            let mut rows = [_mm256_setzero_ps(); LANES];
            for (r, row) in rows.iter_mut().enumerate() {
                let from = &from[r * stride + k..][..LANES];
                // SAFETY: these are eight numbers.
                *row = unsafe { _mm256_loadu_ps(from.as_ptr()) };
            }
            // Within each half of a register: interleaves pairs of rows, then groups of four rows.
            let mut fours = [_mm256_setzero_ps(); LANES];
            for half in [0, 4] {
                let [a, b, c, d] = [rows[half], rows[half + 1], rows[half + 2], rows[half + 3]];
                let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
                fours[half] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
                fours[half + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
                let (ab, cd) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
                fours[half + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
                fours[half + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            }
            for i in 0..4 {
                let (a, b) = (fours[i], fours[4 + i]);
                let halves = [_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)];
                for (j, column) in halves.into_iter().enumerate() {
                    let out = &mut out[(k + 4 * j + i) * NR..][..LANES];
                    // SAFETY: these are eight numbers.
                    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), column) };
                }
            }
        }
        whole
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn transpose_bf16(from: &[bf16], stride: usize, steps: usize, out: &mut [f32]) -> usize {
        let whole = steps / LANES * LANES;
        for k in (0..whole).step_by(LANES) {
            let mut rows = [_mm_setzero_si128(); LANES];
            for (r, row) in rows.iter_mut().enumerate() {
                let from = &from[r * stride + k..][..LANES];
                // SAFETY: these are eight numbers of two bytes.
                *row = unsafe { _mm_loadu_si128(from.as_ptr().cast::<__m128i>()) };
            }
            // Interleaves pairs of rows, then groups of four, then all eight: the columns.
            let mut pairs = [_mm_setzero_si128(); LANES];
            for i in 0..4 {
                pairs[i] = _mm_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
                pairs[4 + i] = _mm_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
            }
            let mut fours = [_mm_setzero_si128(); LANES];
            for half in 0..2 {
                for i in 0..2 {
                    let (a, b) = (pairs[4 * half + 2 * i], pairs[4 * half + 2 * i + 1]);
                    fours[4 * half + i] = _mm_unpacklo_epi32(a, b);
                    fours[4 * half + 2 + i] = _mm_unpackhi_epi32(a, b);
                }
            }
            for i in 0..4 {
                let (a, b) = (fours[2 * i], fours[2 * i + 1]);
                for (j, column) in [_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b)].into_iter().enumerate() {
                    let wide = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(column)));
                    let out = &mut out[(k + 2 * i + j) * NR..][..LANES];
                    // SAFETY: these are eight numbers.
                    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), wide) };
                }
            }
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ops::test_noise::noise;

    /// Rows, outputs and inputs, with and without remainders at each block size; some with several row or depth blocks.
    const SIZES: [[usize; 3]; 9] = [
        [1, 1, 1],
        [7, 21, 37],
        [100, 16, 304],
        [5, 150, 16],
        [13, 300, 9],
        [6, 128, 288],
        [1540, 5, 3],
        [400, 7, 1160],
        [1540, 600, 5],
    ];

    /// Deterministic pseudo-random matrices.
    trait Noise: Number {
        fn all(count: usize, seed: u64) -> Vec<Self>;
    }

    impl Noise for f32 {
        fn all(count: usize, seed: u64) -> Vec<Self> {
            noise(count, seed)
        }
    }

    impl Noise for bf16 {
        fn all(count: usize, seed: u64) -> Vec<Self> {
            noise(count, seed).into_iter().map(bf16::from_f32).collect()
        }
    }

    fn check_product<N: Noise>([rows, outputs, inputs]: [usize; 3], is_transposed: bool) {
        let values = N::all(outputs * inputs, 1);
        let [depth, columns] = depth_and_columns(outputs, inputs, is_transposed);
        let (a, before) = (noise(rows * depth, 2), noise(rows * columns, 3));
        let mut found = before.clone();
        RightMatrix { values: &values, outputs, inputs }.add_product(&a, is_transposed, &mut found);
        let exact = |i: usize| {
            let (r, c) = (i / columns, i % columns);
            let product = |k: usize| {
                let at = if is_transposed { c * inputs + k } else { k * inputs + c };
                f64::from(a[r * depth + k]) * f64::from(values[at].to_f32())
            };
            f64::from(before[i]) + (0..depth).map(product).sum::<f64>()
        };
        let worst = (0..found.len()).map(|i| (f64::from(found[i]) - exact(i)).abs()).fold(0.0, f64::max);
        let largest = (0..found.len()).map(|i| exact(i).abs()).fold(0.0, f64::max);
        assert!(
            worst <= 1e-6 * largest,
            "{rows} {outputs} {inputs} is_transposed {is_transposed}: {worst:e} of {largest}"
        );
    }

    #[test]
    fn products_match_f64() {
        for (size, is_transposed) in
            SIZES.into_iter().flat_map(|size| [false, true].map(|is_transposed| (size, is_transposed)))
        {
            check_product::<f32>(size, is_transposed);
            check_product::<bf16>(size, is_transposed);
        }
    }

    fn check_bits_of_rows<N: Noise>() {
        let [rows, outputs, inputs] = [MC_PER_TASK + 7, 150, LEFT_DEPTH + 300];
        let values = N::all(outputs * inputs, 4);
        let w = RightMatrix { values: &values, outputs, inputs };
        let a = noise(rows * inputs, 5);
        let product = |a: &[f32]| {
            let mut out = vec![0.0; a.len() / inputs * outputs];
            w.add_product(a, true, &mut out);
            out
        };
        let together = product(&a);
        for (threads, first, count) in [(1, 0, rows), (3, 0, rows), (2, 5, 1), (1, 93, 17), (4, 1, 380)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| product(&a[first * inputs..][..count * inputs]));
            assert_eq!(found, together[first * outputs..][..count * outputs], "{count} from {first}");
        }
    }

    #[test]
    fn bits_of_a_row_do_not_depend_on_other_rows_or_threads() {
        check_bits_of_rows::<f32>();
        check_bits_of_rows::<bf16>();
    }
}
