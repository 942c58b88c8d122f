//! Packed matrix products with an f32 or bf16 matrix on the right, blocked as in BLIS. Panels are packed in the order
//! in which the micro-kernel ([`super::tile`]) reads them; bf16 is converted to f32 while packing, so that a full f32
//! copy never exists.
//!
//! Accumulation is f32, in one order whatever the number of rows and threads.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::matrix::ViewMut;
use super::parallel::{ELEMENT, least};
use super::tile::{COLUMNS, DEEP, ROWS, SUMS, accumulate};

/// Column block (NC in BLIS terms). Its packed panels, [`DEEP`] (KC) deep, take 144 KiB.
const WIDE: usize = 128;
/// Row block (MC in BLIS terms) whose left operand is packed at once: for all threads, or for one.
const TOGETHER: usize = 256 * ROWS;
const ALONE: usize = 64 * ROWS;
/// Depth of a packed left operand before sums are added to the result: 6.8 MiB for [`TOGETHER`] rows.
const DEEPER: usize = 4 * DEEP;
/// Row micro-panels that are multiplied with one column panel while it is in the L1 cache: 108 KiB of the left operand.
const GROUP: usize = 16;
/// Number of tasks per thread, if the result is large enough.
const TASKS: usize = 2;

/// A storage type of the right matrix.
pub trait Number: Copy + Send + Sync {
    /// Converts to f32, exactly.
    fn widened(self) -> f32;

    /// Transposes the first columns of [`LANES`] rows, which are `apart` from each other: column k is written to
    /// `out[k * COLUMNS..]`. Returns the number of columns transposed, a multiple of the register size (0 without
    /// AVX2).
    fn turn(from: &[Self], apart: usize, steps: usize, out: &mut [f32]) -> usize;
}

/// The right matrix of a product, `[outputs, inputs]`.
#[derive(Clone, Copy, Debug)]
pub struct Right<'a, N> {
    /// The elements, row-major.
    pub values: &'a [N],
    /// Number of rows.
    pub outputs: usize,
    /// Number of columns.
    pub inputs: usize,
}

/// Whether the right matrix is transposed (`trans_b` in BLAS terms).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// `a W`: from `[rows, outputs]` to `[rows, inputs]`.
    Itself,
    /// `a W^T`: from `[rows, inputs]` to `[rows, outputs]`.
    Transpose,
}

impl By {
    /// Depth and columns of a product with a matrix of this size.
    pub fn depth_and_columns(self, outputs: usize, inputs: usize) -> [usize; 2] {
        match self {
            Self::Itself => [outputs, inputs],
            Self::Transpose => [inputs, outputs],
        }
    }
}

impl<N: Number> Right<'_, N> {
    /// Adds the product of `a` (row-major) and this matrix to `out`.
    pub fn add_product(self, a: &[f32], by: By, out: &mut [f32]) {
        let [depth, columns] = by.depth_and_columns(self.outputs, self.inputs);
        assert_eq!(self.values.len(), depth * columns, "a matrix of {} x {}", self.outputs, self.inputs);
        if out.is_empty() || depth == 0 {
            return;
        }
        let rows = out.len() / columns;
        assert_eq!(a.len(), rows * depth, "{rows} rows of {depth}");
        let tasks = TASKS * rayon::current_num_threads();
        match columns.div_ceil(WIDE) < tasks && rows > ALONE {
            true => self.add_by_rows(a, by, [depth, columns], out),
            false => self.add_by_columns(a, by, [depth, columns], out),
        }
    }

    /// Distributes rows over threads, for products with few columns.
    fn add_by_rows(self, a: &[f32], by: By, [depth, columns]: [usize; 2], out: &mut [f32]) {
        let parts = out.par_chunks_mut(ALONE * columns).zip(a.par_chunks(ALONE * depth));
        let parts = parts.with_min_len(least(ALONE * depth * columns));
        parts.for_each_init(<(Vec<f32>, Scratch)>::default, |(left, scratch), (out, a)| {
            for deep in ranges(depth, DEEPER) {
                let left = grown(left, length_of_blocks(a, depth, &deep));
                let blocks = left.chunks_exact_mut(ROWS * deep.len()).zip(a.chunks(ROWS * depth));
                blocks.for_each(|(block, rows)| arrange_rows(rows, depth, deep.clone(), block));
                let mut out = ViewMut::new(out, a.len() / depth, columns);
                for stripe in ranges(columns, WIDE) {
                    self.add_stripe(left, deep.clone(), by, stripe.clone(), scratch, out.part_of_columns(stripe));
                }
            }
        });
    }

    /// Distributes columns over threads, so that each part of this matrix is packed once.
    fn add_by_columns(self, a: &[f32], by: By, [depth, columns]: [usize; 2], out: &mut [f32]) {
        let width = columns.div_ceil(TASKS * rayon::current_num_threads()).next_multiple_of(COLUMNS).min(WIDE);
        let mut left = Vec::new();
        for (a, out) in a.chunks(TOGETHER * depth).zip(out.chunks_mut(TOGETHER * columns)) {
            for deep in ranges(depth, DEEPER) {
                let left = grown(&mut left, length_of_blocks(a, depth, &deep));
                let blocks = left.par_chunks_exact_mut(ROWS * deep.len()).zip(a.par_chunks(ROWS * depth));
                let blocks = blocks.with_min_len(least(ROWS * deep.len() * ELEMENT));
                blocks.for_each(|(block, rows)| arrange_rows(rows, depth, deep.clone(), block));
                let stripes = ViewMut::new(out, a.len() / depth, columns).stretches(width);
                let stripes = stripes.into_par_iter().zip(ranges(columns, width).collect::<Vec<_>>());
                let stripes = stripes.with_min_len(least(left.len() * width));
                stripes.for_each_init(Scratch::default, |scratch, (out, stripe)| {
                    self.add_stripe(left, deep.clone(), by, stripe, scratch, out);
                });
            }
        }
    }

    /// Adds, for a block of columns and a range of the depth, the product with the packed `left` to `out`, which covers
    /// these columns only.
    fn add_stripe(
        self,
        left: &[f32],
        deep: Range<usize>,
        by: By,
        columns: Range<usize>,
        Scratch { right, sums }: &mut Scratch,
        mut out: ViewMut,
    ) {
        let (blocks, panels) = (left.len() / (ROWS * deep.len()), columns.len().div_ceil(COLUMNS));
        let sums = grown(sums, panels * blocks * SUMS);
        for first in deep.clone().step_by(DEEP) {
            let steps = DEEP.min(deep.end - first);
            // Lanes beyond the last column keep their old content; their sums are not read.
            let right = grown(right, panels * steps * COLUMNS);
            match by {
                By::Itself => self.arrange(first, steps, columns.clone(), right),
                By::Transpose => self.arrange_transposed(first, columns.clone(), right),
            }
            for group in ranges(blocks, GROUP) {
                for (right, sums) in right.chunks_exact(steps * COLUMNS).zip(sums.chunks_exact_mut(blocks * SUMS)) {
                    for (block, sums) in group.clone().zip(sums[group.start * SUMS..].as_chunks_mut().0) {
                        let left = &left[(block * deep.len() + first - deep.start) * ROWS..][..steps * ROWS];
                        accumulate(left, right, sums, first > deep.start);
                    }
                }
            }
        }
        for (panel, sums) in sums.chunks_exact(blocks * SUMS).enumerate() {
            for (row, sums) in sums.chunks_exact(COLUMNS).enumerate().take(out.rows()) {
                let out = &mut out.row(row)[panel * COLUMNS..];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
            }
        }
    }

    /// Packs some columns of some rows in the order panel, row, column of the panel.
    fn arrange(self, first: usize, rows: usize, columns: Range<usize>, out: &mut [f32]) {
        for (k, row) in self.values[first * self.inputs..].chunks_exact(self.inputs).take(rows).enumerate() {
            let (whole, rest) = row[columns.clone()].as_chunks::<COLUMNS>();
            let mut panels = out.chunks_exact_mut(rows * COLUMNS);
            for (row, panel) in whole.iter().zip(&mut panels) {
                let Some(out) = panel[k * COLUMNS..].first_chunk_mut::<COLUMNS>() else { continue };
                *out = row.map(N::widened);
            }
            if let Some(panel) = panels.next() {
                panel[k * COLUMNS..].iter_mut().zip(rest).for_each(|(out, value)| *out = value.widened());
            }
        }
    }

    /// Packs the transpose of some columns of some rows in the order panel of rows, column, row of the panel.
    fn arrange_transposed(self, first: usize, rows: Range<usize>, out: &mut [f32]) {
        let (row, height) = (rows.start, rows.len());
        let panel = out.len() / height.div_ceil(COLUMNS);
        let steps = panel / COLUMNS;
        for (p, out) in out.chunks_exact_mut(panel).enumerate() {
            for lane in (0..COLUMNS.min(height - p * COLUMNS)).step_by(LANES) {
                let rows = LANES.min(height - p * COLUMNS - lane);
                let from = &self.values[(row + p * COLUMNS + lane) * self.inputs + first..];
                let whole = if rows == LANES { N::turn(from, self.inputs, steps, &mut out[lane..]) } else { 0 };
                for (r, from) in from.chunks(self.inputs).take(rows).enumerate() {
                    for k in whole..steps {
                        out[k * COLUMNS + lane + r] = from[k].widened();
                    }
                }
            }
        }
    }
}

/// Scratch memory of a task: packed panels, and sums in the order panel, row block, row, column.
#[derive(Default)]
struct Scratch {
    right: Vec<f32>,
    sums: Vec<f32>,
}

/// The size of the packed left operand: all row blocks, for a range of the depth.
fn length_of_blocks(a: &[f32], depth: usize, deep: &Range<usize>) -> usize {
    (a.len() / depth).div_ceil(ROWS) * ROWS * deep.len()
}

/// Packs a block of rows, step by step along the depth. Missing rows are filled with zeros.
fn arrange_rows(a: &[f32], depth: usize, deep: Range<usize>, block: &mut [f32]) {
    let mut rows = a.chunks_exact(depth).map(|row| &row[deep.clone()]);
    if a.len() == ROWS * depth {
        let rows: [&[f32]; ROWS] = std::array::from_fn(|_| rows.next().unwrap_or_default());
        return interleave(rows, block);
    }
    block.fill(0.0);
    for (r, row) in rows.enumerate() {
        block.iter_mut().skip(r).step_by(ROWS).zip(row).for_each(|(to, value)| *to = *value);
    }
}

fn interleave(rows: [&[f32]; ROWS], block: &mut [f32]) {
    let steps = block.as_chunks_mut::<ROWS>().0;
    let [a, b, c, d, e, f] = rows.map(|row| &row[..steps.len()]);
    for (k, step) in steps.iter_mut().enumerate() {
        *step = [a[k], b[k], c[k], d[k], e[k], f[k]];
    }
}

/// Returns the first `length` numbers of a buffer, which is grown if it is too short. Old content is kept.
fn grown(buffer: &mut Vec<f32>, length: usize) -> &mut [f32] {
    if buffer.len() < length {
        buffer.resize(length, 0.0);
    }
    &mut buffer[..length]
}

/// Divides `0..end` into ranges of `step`; the last may be shorter.
fn ranges(end: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..end).step_by(step).map(move |first| first..end.min(first + step))
}

/// Rows that [`Number::turn`] transposes.
const LANES: usize = 8;

impl Number for f32 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }

    fn turn(from: &[Self], apart: usize, steps: usize, out: &mut [f32]) -> usize {
        #[cfg(target_arch = "x86_64")]
        if super::simd::has_avx2_fma() {
            // SAFETY: the features were detected just now.
            return unsafe { turn::of_f32(from, apart, steps, out) };
        }
        let _ = (from, apart, steps, out);
        0
    }
}

impl Number for bf16 {
    #[inline(always)]
    fn widened(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn turn(from: &[Self], apart: usize, steps: usize, out: &mut [f32]) -> usize {
        #[cfg(target_arch = "x86_64")]
        if super::simd::has_avx2_fma() {
            // SAFETY: the features were detected just now.
            return unsafe { turn::of_bf16(from, apart, steps, out) };
        }
        let _ = (from, apart, steps, out);
        0
    }
}

/// [`Number::turn`] with AVX2.
#[cfg(target_arch = "x86_64")]
mod turn {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_setzero_si128, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64,
        _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
        _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_slli_epi32,
        _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };

    use super::{COLUMNS, LANES, bf16};

    #[target_feature(enable = "avx2,fma")]
    pub fn of_f32(from: &[f32], apart: usize, steps: usize, out: &mut [f32]) -> usize {
        let whole = steps / LANES * LANES;
        for k in (0..whole).step_by(LANES) {
            let mut rows = [_mm256_setzero_ps(); LANES];
            for (r, row) in rows.iter_mut().enumerate() {
                let from = &from[r * apart + k..][..LANES];
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
                    let out = &mut out[(k + 4 * j + i) * COLUMNS..][..LANES];
                    // SAFETY: these are eight numbers.
                    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), column) };
                }
            }
        }
        whole
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn of_bf16(from: &[bf16], apart: usize, steps: usize, out: &mut [f32]) -> usize {
        let whole = steps / LANES * LANES;
        for k in (0..whole).step_by(LANES) {
            let mut rows = [_mm_setzero_si128(); LANES];
            for (r, row) in rows.iter_mut().enumerate() {
                let from = &from[r * apart + k..][..LANES];
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
                    let out = &mut out[(k + 2 * i + j) * COLUMNS..][..LANES];
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

    fn near_the_exact_product<N: Noise>([rows, outputs, inputs]: [usize; 3], by: By) {
        let values = N::all(outputs * inputs, 1);
        let [depth, columns] = by.depth_and_columns(outputs, inputs);
        let (a, before) = (noise(rows * depth, 2), noise(rows * columns, 3));
        let mut found = before.clone();
        Right { values: &values, outputs, inputs }.add_product(&a, by, &mut found);
        let exact = |i: usize| {
            let (r, c) = (i / columns, i % columns);
            let product = |k: usize| {
                let at = if by == By::Itself { k * inputs + c } else { c * inputs + k };
                f64::from(a[r * depth + k]) * f64::from(values[at].widened())
            };
            f64::from(before[i]) + (0..depth).map(product).sum::<f64>()
        };
        let worst = (0..found.len()).map(|i| (f64::from(found[i]) - exact(i)).abs()).fold(0.0, f64::max);
        let largest = (0..found.len()).map(|i| exact(i).abs()).fold(0.0, f64::max);
        assert!(worst <= 1e-6 * largest, "{rows} {outputs} {inputs} {by:?}: {worst:e} of {largest}");
    }

    #[test]
    fn products_are_exact_to_a_millionth() {
        for (size, by) in SIZES.into_iter().flat_map(|size| [By::Itself, By::Transpose].map(|by| (size, by))) {
            near_the_exact_product::<f32>(size, by);
            near_the_exact_product::<bf16>(size, by);
        }
    }

    fn a_row_has_the_same_bits_anywhere<N: Noise>() {
        let [rows, outputs, inputs] = [ALONE + 7, 150, DEEPER + 300];
        let values = N::all(outputs * inputs, 4);
        let w = Right { values: &values, outputs, inputs };
        let a = noise(rows * inputs, 5);
        let product = |a: &[f32]| {
            let mut out = vec![0.0; a.len() / inputs * outputs];
            w.add_product(a, By::Transpose, &mut out);
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
    fn a_row_gets_the_same_bits_whatever_rows_are_beside_it_and_threads_there_are() {
        a_row_has_the_same_bits_anywhere::<f32>();
        a_row_has_the_same_bits_anywhere::<bf16>();
    }
}
