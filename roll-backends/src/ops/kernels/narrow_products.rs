//! Products with a bf16 matrix, which is widened in pieces that stay in the cache, in the order in which they are read:
//! the whole is never there in f32. A library that takes f32 matrices would arrange the widened pieces once more.
//!
//! Sums are f32, taken in one order whatever the number of rows and threads.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::matrix::ViewMut;
use super::parallel::{ELEMENT, least};
use super::simd::{MulAdd, vectorised};
use super::tile::{COLUMNS, DEEP, ROWS, SUMS, accumulate};

/// Columns of the result that a task takes at a time. The numbers widened for them, [`DEEP`] steps, are 144 KiB.
const WIDE: usize = 128;
/// Rows of the result that are computed before others: their part of the left operand is copied.
const TOGETHER: usize = 256 * ROWS;
/// Blocks of rows that meet a panel of columns while it is in the first cache: 108 KiB of the left operand.
const GROUP: usize = 16;

/// A matrix `[outputs, inputs]` on the right of a product.
#[derive(Clone, Copy, Debug)]
pub struct Narrow<'a> {
    /// Row-major.
    pub values: &'a [bf16],
    /// Its rows.
    pub outputs: usize,
    /// Its columns.
    pub inputs: usize,
}

/// How it is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// `a W`, `[rows, outputs]` to `[rows, inputs]`.
    Itself,
    /// `a W^T`, `[rows, inputs]` to `[rows, outputs]`.
    Transpose,
}

impl Narrow<'_> {
    /// Adds the product of `a`, row-major, to `out`.
    pub fn add_product(self, a: &[f32], by: By, out: &mut [f32]) {
        let (depth, columns) = match by {
            By::Itself => (self.outputs, self.inputs),
            By::Transpose => (self.inputs, self.outputs),
        };
        assert_eq!(self.values.len(), depth * columns, "a matrix of {} x {}", self.outputs, self.inputs);
        if out.is_empty() || depth == 0 {
            return;
        }
        let rows = out.len() / columns;
        assert_eq!(a.len(), rows * depth, "{rows} rows of {depth}");
        for (a, out) in a.chunks(TOGETHER * depth).zip(out.chunks_mut(TOGETHER * columns)) {
            let left = blocks_of_rows(a, depth);
            let stripes = ViewMut::new(out, a.len() / depth, columns).stretches(WIDE);
            let stripes = stripes.into_par_iter().with_min_len(least(left.len() * WIDE));
            stripes.enumerate().for_each_init(Scratch::default, |scratch, (i, out)| {
                self.add_stripe(&left, depth, by, i * WIDE..columns.min((i + 1) * WIDE), scratch, out);
            });
        }
    }

    /// Adds some columns of the product to `out`, which has these alone.
    fn add_stripe(
        self,
        left: &[f32],
        depth: usize,
        by: By,
        columns: Range<usize>,
        scratch: &mut Scratch,
        mut out: ViewMut,
    ) {
        let (blocks, panels) = (left.len() / (ROWS * depth), columns.len().div_ceil(COLUMNS));
        let Scratch { right, sums } = scratch;
        // Of a panel that is not full the rest keeps what it has.
        right.resize(panels * DEEP * COLUMNS, 0.0);
        sums.resize(panels * blocks * SUMS, 0.0);
        for first in (0..depth).step_by(DEEP) {
            let steps = DEEP.min(depth - first);
            let right = &mut right[..panels * steps * COLUMNS];
            match by {
                By::Itself => widen(&self.values[first * self.inputs..], self.inputs, steps, columns.clone(), right),
                By::Transpose => self.widen_transposed(first, columns.clone(), right),
            }
            for group in (0..blocks).step_by(GROUP) {
                for (right, sums) in right.chunks_exact(steps * COLUMNS).zip(sums.chunks_exact_mut(blocks * SUMS)) {
                    let blocks = group..blocks.min(group + GROUP);
                    for (block, sums) in blocks.clone().zip(sums[blocks.start * SUMS..].as_chunks_mut().0) {
                        let left = &left[(block * depth + first) * ROWS..][..steps * ROWS];
                        accumulate(left, right, sums, first > 0);
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

    /// Some columns of some rows: panel of rows, column, row of the panel.
    fn widen_transposed(self, first: usize, rows: Range<usize>, out: &mut [f32]) {
        let (row, height) = (rows.start, rows.len());
        let panel = out.len() / height.div_ceil(COLUMNS);
        let steps = panel / COLUMNS;
        for (p, out) in out.chunks_exact_mut(panel).enumerate() {
            for lane in (0..COLUMNS.min(height - p * COLUMNS)).step_by(LANES) {
                let rows = LANES.min(height - p * COLUMNS - lane);
                let from = &self.values[(row + p * COLUMNS + lane) * self.inputs + first..];
                let whole = if rows == LANES { turn(from, self.inputs, steps, &mut out[lane..]) } else { 0 };
                for (r, from) in from.chunks(self.inputs).take(rows).enumerate() {
                    for k in whole..steps {
                        out[k * COLUMNS + lane + r] = widened(from[k]);
                    }
                }
            }
        }
    }
}

/// Exact.
#[inline(always)]
fn widened(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Memory of a task: widened numbers, and sums by panel, block of rows, row and column.
#[derive(Default)]
struct Scratch {
    right: Vec<f32>,
    sums: Vec<f32>,
}

/// Rows in blocks of [`ROWS`], step by step; zeros fill the last.
fn blocks_of_rows(a: &[f32], depth: usize) -> Vec<f32> {
    let mut left = vec![0.0; (a.len() / depth).div_ceil(ROWS) * ROWS * depth];
    let blocks = left.par_chunks_mut(ROWS * depth).zip(a.par_chunks(ROWS * depth));
    blocks.with_min_len(least(ROWS * depth * ELEMENT)).for_each(|(left, a)| {
        let rows: Vec<&[f32]> = a.chunks_exact(depth).collect();
        match <[&[f32]; ROWS]>::try_from(rows) {
            Ok(rows) => {
                for (k, left) in left.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
                    *left = rows.map(|row| row[k]);
                }
            }
            Err(rows) => {
                for (r, row) in rows.into_iter().enumerate() {
                    left.iter_mut().skip(r).step_by(ROWS).zip(row).for_each(|(left, value)| *left = *value);
                }
            }
        }
    });
    left
}

vectorised! {
    /// Some columns of the first rows of `inputs` numbers each: panel, row, column of the panel.
    fn widen(values: &[bf16], inputs: usize, rows: usize, columns: Range<usize>, out: &mut [f32]) = widen_body
}

#[inline(always)]
fn widen_body<M: MulAdd>(values: &[bf16], inputs: usize, rows: usize, columns: Range<usize>, out: &mut [f32]) {
    for (k, row) in values.chunks_exact(inputs).take(rows).enumerate() {
        let (whole, rest) = row[columns.clone()].as_chunks::<COLUMNS>();
        let mut panels = out.chunks_exact_mut(rows * COLUMNS);
        for (row, panel) in whole.iter().zip(&mut panels) {
            let Some(out) = panel[k * COLUMNS..].first_chunk_mut::<COLUMNS>() else { continue };
            *out = row.map(widened);
        }
        if let Some(panel) = panels.next() {
            panel[k * COLUMNS..].iter_mut().zip(rest).for_each(|(out, value)| *out = widened(*value));
        }
    }
}

/// Rows that [`turn`] takes.
const LANES: usize = 8;

/// Turns the first columns of [`LANES`] rows, which lie `apart` from each other: to each column its row of `out`, of which
/// there is one every [`COLUMNS`]. Gives the number of columns turned, as many as whole registers hold.
fn turn(from: &[bf16], apart: usize, steps: usize, out: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { turn_wide(from, apart, steps, out) };
    }
    let _ = (from, apart, steps, out);
    0
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn turn_wide(from: &[bf16], apart: usize, steps: usize, out: &mut [f32]) -> usize {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_setzero_si128, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64,
        _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
        _mm256_slli_epi32, _mm256_storeu_ps,
    };
    let whole = steps / LANES * LANES;
    for k in (0..whole).step_by(LANES) {
        let mut rows = [_mm_setzero_si128(); LANES];
        for (r, row) in rows.iter_mut().enumerate() {
            let from = &from[r * apart + k..][..LANES];
            // SAFETY: these are eight numbers of two bytes.
            *row = unsafe { _mm_loadu_si128(from.as_ptr().cast::<__m128i>()) };
        }
        // Pairs of numbers of rows r and r + 1, then fours, then eights: the columns.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ops::test_noise::noise;

    /// Rows, outputs and inputs that fill no block, panel, stripe or stretch, and some that do.
    const SIZES: [[usize; 3]; 7] =
        [[1, 1, 1], [7, 21, 37], [100, 16, 304], [5, 150, 16], [13, 300, 9], [6, 128, 288], [1540, 5, 3]];

    #[test]
    fn products_are_those_with_the_widened_matrix_to_a_millionth() {
        for [rows, outputs, inputs] in SIZES {
            let values: Vec<bf16> = noise(outputs * inputs, 1).into_iter().map(bf16::from_f32).collect();
            let w = Narrow { values: &values, outputs, inputs };
            for by in [By::Itself, By::Transpose] {
                let (depth, columns) = if by == By::Itself { (outputs, inputs) } else { (inputs, outputs) };
                let (a, before) = (noise(rows * depth, 2), noise(rows * columns, 3));
                let mut found = before.clone();
                w.add_product(&a, by, &mut found);
                let exact = |i: usize| {
                    let (r, c) = (i / columns, i % columns);
                    let product = |k: usize| {
                        let at = if by == By::Itself { k * inputs + c } else { c * inputs + k };
                        f64::from(a[r * depth + k]) * f64::from(values[at].to_f32())
                    };
                    f64::from(before[i]) + (0..depth).map(product).sum::<f64>()
                };
                let worst = (0..found.len()).map(|i| (f64::from(found[i]) - exact(i)).abs()).fold(0.0, f64::max);
                let largest = (0..found.len()).map(|i| exact(i).abs()).fold(0.0, f64::max);
                assert!(worst <= 1e-6 * largest, "{rows} {outputs} {inputs} {by:?}: {worst:e} of {largest}");
            }
        }
    }

    #[test]
    fn a_row_gets_the_same_bits_whatever_rows_are_beside_it_and_threads_there_are() {
        let [rows, outputs, inputs] = [110, 150, 300];
        let values: Vec<bf16> = noise(outputs * inputs, 4).into_iter().map(bf16::from_f32).collect();
        let w = Narrow { values: &values, outputs, inputs };
        let a = noise(rows * inputs, 5);
        let product = |a: &[f32]| {
            let mut out = vec![0.0; a.len() / inputs * outputs];
            w.add_product(a, By::Transpose, &mut out);
            out
        };
        let together = product(&a);
        for (threads, first, count) in [(1, 0, rows), (3, 0, rows), (2, 5, 1), (1, 93, 17)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| product(&a[first * inputs..][..count * inputs]));
            assert_eq!(found, together[first * outputs..][..count * outputs], "{count} from {first}");
        }
    }
}
