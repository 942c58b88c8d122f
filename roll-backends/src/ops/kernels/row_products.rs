//! `x W^T` as dot products of rows, for weights in their storage format, and the product `d_y W` of its pullback.
//!
//! Both operands are contiguous along the inputs, so nothing is packed: a tile of 3 x 4 sums (6 x 4 on AVX-512) stays in
//! registers.
//! Weights that are not f32 are converted a few rows at a time, into memory that stays in the cache. Every sum has one
//! order (eight partial sums over the inputs, then their sum, then the remaining inputs), so that the result of a row
//! is bit-identical whatever the other rows and the number of threads are.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::matrix::{Threads, UNSCALED, Update, View, ViewMut};
use super::simd::{MulAdd, Portable};
use crate::BlockMatrix;

/// Numbers in a vector register.
const LANES: usize = 8;
/// Rows of x per register tile.
const X_ROWS: usize = 3;
/// Rows of x per register tile on AVX-512.
const X_ROWS_512: usize = 6;
/// Rows of W per register tile.
const W_ROWS: usize = 4;
/// Rows of W per register tile if x has one row, which leaves more registers.
const W_ROWS_FOR_ONE: usize = 8;
/// Maximum number of f32 values of W, and of x, that a task keeps in the cache: 128 KiB each.
const CACHE_BLOCK: usize = 1 << 15;
/// Tasks per thread: enough to balance the load.
const TASKS_PER_THREAD: usize = 8;
/// Number of multiplications up to which one thread is faster than several.
const MAX_ON_ONE_THREAD: usize = 1 << 16;
/// Outputs that [`pull`] converts at a time.
const OUTPUTS_PER_BLOCK: usize = 128;
/// Inputs per task of [`pull`]: a multiple of every quantisation block's length, so that tasks begin at block
/// boundaries.
const INPUTS_PER_TASK: usize = 256;

/// A matrix `[outputs, inputs]`, row-major, in its storage format.
#[derive(Clone, Copy, Debug)]
pub enum Stored<'a> {
    /// f32, multiplied directly.
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    Blocks(&'a BlockMatrix),
}

impl<'a> Stored<'a> {
    /// Returns some rows as f32, in `scratch` if they have to be converted.
    fn to_f32<'b>(self, rows: Range<usize>, inputs: usize, scratch: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        let elements = rows.start * inputs..rows.end * inputs;
        if let Self::F32(values) = self {
            return &values[elements];
        }
        let count = elements.len();
        scratch.resize(count.max(scratch.len()), 0.0);
        match self {
            Self::Blocks(matrix) => matrix.decode_into(rows, &mut scratch[..count]),
            Self::Bf16(values) => {
                let pairs = scratch.iter_mut().zip(&values[elements]);
                pairs.for_each(|(to, from)| *to = f32::from_bits(u32::from(from.to_bits()) << 16));
            }
            // Returned above.
            Self::F32(_) => {}
        }
        &scratch[..count]
    }
}

/// Returns `x W^T + bias`, `[rows, outputs]`; x `[rows, inputs]`, weight `[outputs, inputs]`, bias `[outputs]`.
pub fn forward(rows: usize, inputs: usize, x: &[f32], weight: Stored, bias: &[f32]) -> Vec<f32> {
    let outputs = bias.len();
    assert_eq!(x.len(), rows * inputs, "{rows} rows of {inputs}");
    let mut y = vec![0.0; rows * outputs];
    if y.is_empty() || inputs == 0 {
        y.chunks_exact_mut(outputs.max(1)).for_each(|row| row.copy_from_slice(bias));
        return y;
    }
    let is_small = rows * inputs * outputs <= MAX_ON_ONE_THREAD;
    let wanted_tasks = if is_small { 1 } else { TASKS_PER_THREAD * rayon::current_num_threads() };
    let max_width = (CACHE_BLOCK / inputs / W_ROWS).max(1) * W_ROWS;
    // Columns of the result, and so rows of the weight, per task.
    let width = outputs.div_ceil(wanted_tasks).next_multiple_of(W_ROWS).min(max_width);
    let task = |scratch: &mut Vec<f32>, (i, mut out): (usize, ViewMut)| {
        let outputs = i * width..((i + 1) * width).min(outputs);
        let weight = weight.to_f32(outputs.clone(), inputs, scratch);
        compute_column_block(&mut out, x, inputs, weight, &bias[outputs]);
    };
    let column_blocks = ViewMut::new(&mut y, rows, outputs).split_columns(width);
    if is_small {
        column_blocks.into_iter().enumerate().for_each(|block| task(&mut Vec::new(), block));
    } else {
        column_blocks.into_par_iter().enumerate().for_each_init(Vec::new, task);
    }
    y
}

/// Computes the columns of the result that belong to some rows of the weight, `weight` `[outputs, inputs]`.
fn compute_column_block(out: &mut ViewMut, x: &[f32], inputs: usize, weight: &[f32], bias: &[f32]) {
    let (rows, outputs) = (out.rows(), bias.len());
    // Rows of x that stay in the cache for a pass over the weight.
    let cached_rows = (CACHE_BLOCK / inputs / X_ROWS).max(1) * X_ROWS;
    if rows == 1 {
        let tiled_outputs = outputs / W_ROWS_FOR_ONE * W_ROWS_FOR_ONE;
        for o in (0..tiled_outputs).step_by(W_ROWS_FOR_ONE) {
            compute_tile::<1, W_ROWS_FOR_ONE>(out, x, inputs, weight, bias, [0, o]);
        }
        for o in tiled_outputs..outputs {
            compute_tile::<1, 1>(out, x, inputs, weight, bias, [0, o]);
        }
        return;
    }
    for first in (0..rows).step_by(cached_rows) {
        let end = (first + cached_rows).min(rows);
        let whole = outputs / W_ROWS * W_ROWS;
        for o in (0..whole).step_by(W_ROWS) {
            compute_tiles::<W_ROWS>(out, x, inputs, weight, bias, first..end, o);
        }
        for o in whole..outputs {
            compute_tiles::<1>(out, x, inputs, weight, bias, first..end, o);
        }
    }
}

/// Computes `O` columns of the result, from column `o`, in some rows.
fn compute_tiles<const O: usize>(
    out: &mut ViewMut,
    x: &[f32],
    inputs: usize,
    weight: &[f32],
    bias: &[f32],
    rows: Range<usize>,
    o: usize,
) {
    let is_wide = has_wide_dots::<X_ROWS_512, O>();
    let mut r = rows.start;
    while r < rows.end {
        r += match rows.end - r {
            X_ROWS_512.. if is_wide => {
                compute_tile::<X_ROWS_512, O>(out, x, inputs, weight, bias, [r, o]);
                X_ROWS_512
            }
            X_ROWS.. => {
                compute_tile::<X_ROWS, O>(out, x, inputs, weight, bias, [r, o]);
                X_ROWS
            }
            2 => {
                compute_tile::<2, O>(out, x, inputs, weight, bias, [r, o]);
                2
            }
            _ => {
                compute_tile::<1, O>(out, x, inputs, weight, bias, [r, o]);
                1
            }
        };
    }
}

/// Computes a tile of the result: `R` rows from `at[0]` and `O` columns from `at[1]`.
fn compute_tile<const R: usize, const O: usize>(
    out: &mut ViewMut,
    x: &[f32],
    inputs: usize,
    weight: &[f32],
    bias: &[f32],
    at: [usize; 2],
) {
    let x: [&[f32]; R] = std::array::from_fn(|r| &x[(at[0] + r) * inputs..][..inputs]);
    let w: [&[f32]; O] = std::array::from_fn(|o| &weight[(at[1] + o) * inputs..][..inputs]);
    let sums = dots(x, w);
    for (r, sums) in sums.iter().enumerate() {
        let row = &mut out.row(at[0] + r)[at[1]..][..O];
        row.iter_mut().zip(sums).zip(&bias[at[1]..]).for_each(|((y, sum), bias)| *y = sum + bias);
    }
}

/// Dot products of every row of x with every row of w; all rows must have one length.
pub fn dots<const R: usize, const O: usize>(x: [&[f32]; R], w: [&[f32]; O]) -> [[f32; O]; R] {
    #[cfg(target_arch = "x86_64")]
    if has_wide_dots::<R, O>() {
        // SAFETY: the features were detected just now.
        return unsafe { dots_avx512(x, w) };
    }
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { dots_avx2(x, w) };
    }
    dots_portable::<Portable, R, O>(x, w)
}

/// Whether [`dots`] of this tile use AVX-512. Tiles with fewer sums would wait for additions.
fn has_wide_dots<const R: usize, const O: usize>() -> bool {
    #[cfg(target_arch = "x86_64")]
    return R >= X_ROWS && O.is_multiple_of(2) && super::simd::has_avx512() && super::simd::has_avx2_fma();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// [`dots`] with AVX-512 intrinsics, of two rows of w at a time, one in each half of a register. Every sum has the order
/// and so the bits of [`dots_avx2`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn dots_avx512<const R: usize, const O: usize>(x: [&[f32]; R], w: [&[f32]; O]) -> [[f32; O]; R] {
    use std::arch::x86_64::{
        __m256, __m512, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps, _mm256_castpd_ps,
        _mm256_castps_pd, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_ps, _mm512_broadcast_f64x4,
        _mm512_castpd_ps, _mm512_castpd256_pd512, _mm512_castps_pd, _mm512_castps512_ps256, _mm512_extractf64x4_pd,
        _mm512_fmadd_ps, _mm512_insertf64x4, _mm512_setzero_ps,
    };
    let inputs = x[0].len();
    assert!(O.is_multiple_of(2) && x.iter().chain(&w).all(|row| row.len() == inputs));
    let whole = inputs / LANES * LANES;
    // Of the pairs of rows of w, O / 2 are used.
    let mut sums = [[_mm512_setzero_ps(); W_ROWS_FOR_ONE / 2]; R];
    let mut k = 0;
    while k < whole {
        // SAFETY: eight numbers from `k` on are in bounds of every row, whose length is asserted above.
        let load = |row: &[f32]| -> __m256 { unsafe { _mm256_loadu_ps(row.as_ptr().add(k)) } };
        let mut pairs = [_mm512_setzero_ps(); W_ROWS_FOR_ONE / 2];
        for pair in 0..O / 2 {
            let [low, high] = [w[2 * pair], w[2 * pair + 1]].map(|row| _mm256_castps_pd(load(row)));
            pairs[pair] = _mm512_castpd_ps(_mm512_insertf64x4::<1>(_mm512_castpd256_pd512(low), high));
        }
        for r in 0..R {
            let a: __m512 = _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(load(x[r]))));
            for pair in 0..O / 2 {
                sums[r][pair] = _mm512_fmadd_ps(a, pairs[pair], sums[r][pair]);
            }
        }
        k += LANES;
    }
    let mut out = [[0.0; O]; R];
    for r in 0..R {
        for o in 0..O {
            let both = sums[r][o / 2];
            let eight = match o % 2 {
                0 => _mm512_castps512_ps256(both),
                _ => _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(both))),
            };
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            let sum = _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)));
            out[r][o] = (whole..inputs).fold(sum, |sum, k| x[r][k].mul_add(w[o][k], sum));
        }
    }
    out
}

/// [`dots`] with AVX2 intrinsics: without them the compiler keeps fewer sums in registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dots_avx2<const R: usize, const O: usize>(x: [&[f32]; R], w: [&[f32]; O]) -> [[f32; O]; R] {
    use std::arch::x86_64::{
        __m256, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps, _mm256_castps256_ps128,
        _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps,
    };
    let inputs = x[0].len();
    assert!(x.iter().chain(&w).all(|row| row.len() == inputs), "rows of different lengths");
    let vector_end = inputs / LANES * LANES;
    let mut sums = [[_mm256_setzero_ps(); O]; R];
    let mut k = 0;
    while k < vector_end {
        // SAFETY: eight numbers from `k` on are in bounds of every row, whose length is asserted above.
        let load = |row: &[f32]| -> __m256 { unsafe { _mm256_loadu_ps(row.as_ptr().add(k)) } };
        let mut a = [_mm256_setzero_ps(); R];
        for r in 0..R {
            a[r] = load(x[r]);
        }
        for o in 0..O {
            let b = load(w[o]);
            for r in 0..R {
                sums[r][o] = _mm256_fmadd_ps(a[r], b, sums[r][o]);
            }
        }
        k += LANES;
    }
    let mut out = [[0.0; O]; R];
    for r in 0..R {
        for o in 0..O {
            let four = _mm_add_ps(_mm256_castps256_ps128(sums[r][o]), _mm256_extractf128_ps::<1>(sums[r][o]));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            let sum = _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)));
            out[r][o] = (vector_end..inputs).fold(sum, |sum, k| x[r][k].mul_add(w[o][k], sum));
        }
    }
    out
}

/// [`dots`] for any processor.
#[cfg_attr(target_arch = "x86_64", inline(never))]
fn dots_portable<M: MulAdd, const R: usize, const O: usize>(x: [&[f32]; R], w: [&[f32]; O]) -> [[f32; O]; R] {
    std::array::from_fn(|r| {
        std::array::from_fn(|o| {
            let ((a, a_rest), (b, b_rest)) = (x[r].as_chunks::<LANES>(), w[o].as_chunks::<LANES>());
            let mut lanes = [0.0; LANES];
            for (a, b) in a.iter().zip(b) {
                (0..LANES).for_each(|i| lanes[i] = M::mul_add(a[i], b[i], lanes[i]));
            }
            let four: [f32; 4] = std::array::from_fn(|i| lanes[i] + lanes[i + 4]);
            let sum = (four[0] + four[2]) + (four[1] + four[3]);
            a_rest.iter().zip(b_rest).fold(sum, |sum, (a, b)| M::mul_add(*a, *b, sum))
        })
    })
}

/// Returns `d_y W`, the cotangent of x; d_y `[rows, outputs]`, W `[outputs, inputs]`. A task computes some columns. It
/// decodes the part of the weight for these columns, some outputs at a time.
pub fn pull(rows: usize, d_y: &[f32], weight: &BlockMatrix) -> Vec<f32> {
    let [outputs, inputs] = weight.shape();
    let d_y = View::new(d_y, rows, outputs);
    let mut d_x = vec![0.0; rows * inputs];
    let column_blocks = ViewMut::new(&mut d_x, rows, inputs).split_columns(INPUTS_PER_TASK);
    column_blocks.into_par_iter().enumerate().for_each_init(Vec::new, |scratch, (i, mut d_x)| {
        let columns = i * INPUTS_PER_TASK..((i + 1) * INPUTS_PER_TASK).min(inputs);
        for first in (0..outputs).step_by(OUTPUTS_PER_BLOCK) {
            let block = first..(first + OUTPUTS_PER_BLOCK).min(outputs);
            let count = block.len() * columns.len();
            scratch.resize(count.max(scratch.len()), 0.0);
            weight.decode_part(block.clone(), columns.clone(), &mut scratch[..count]);
            let w = View::new(&scratch[..count], block.len(), columns.len());
            d_x.product(d_y.columns(block), w, UNSCALED, Update::Add, Threads::One);
        }
    });
    d_x
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::blocks::BlockType;
    use crate::ops::test_noise::noise;

    /// Pseudo-random blocks with small scales.
    fn blocks(kind: BlockType, shape: [usize; 2]) -> BlockMatrix {
        let count = shape[0] * shape[1] / kind.values();
        let mut bytes: Vec<u8> = noise(count * kind.bytes(), 7).iter().map(|v| (v * 127.0) as i8 as u8).collect();
        for block in bytes.chunks_exact_mut(kind.bytes()) {
            let scales: &[usize] = match kind {
                BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
                BlockType::Q3K => &[108],
                BlockType::Q2K => &[80, 82],
                BlockType::Q6K => &[208],
                _ => &[0],
            };
            scales.iter().for_each(|at| block[*at..at + 2].copy_from_slice(&half::f16::from_f32(0.01).to_le_bytes()));
        }
        BlockMatrix::new(kind, bytes, shape).unwrap()
    }

    fn assert_close(what: &str, found: &[f32], expected: impl Fn(usize) -> f64) {
        let worst = found.iter().enumerate().map(|(i, f)| (f64::from(*f) - expected(i)).abs()).fold(0.0, f64::max);
        let largest = (0..found.len()).map(|i| expected(i).abs()).fold(0.0, f64::max);
        assert!(worst <= 2e-6 * largest, "{what}: {worst:e} of {largest}");
    }

    const QUANTISED: [BlockType; 12] = [
        BlockType::Q4_0,
        BlockType::Q4_1,
        BlockType::Q8_0,
        BlockType::Q4K,
        BlockType::Q6K,
        BlockType::Q5_0,
        BlockType::Q5_1,
        BlockType::Q3K,
        BlockType::Q5K,
        BlockType::Q2K,
        BlockType::Iq4Nl,
        BlockType::Iq4Xs,
    ];

    #[test]
    fn products_with_blocks_match_products_with_the_decoded_matrix() {
        for (kind, rows) in QUANTISED.into_iter().zip([1, 2, 7, 64, 5, 3, 1, 2, 8, 3, 2, 5]) {
            let (outputs, inputs) = (37, 512);
            let (matrix, x, bias) = (blocks(kind, [outputs, inputs]), noise(rows * inputs, 1), noise(outputs, 2));
            let w = matrix.decode(0..outputs);
            let y = forward(rows, inputs, &x, Stored::Blocks(&matrix), &bias);
            let product = |i: usize, o: usize| {
                let products = (0..inputs).map(|k| f64::from(x[i * inputs + k]) * f64::from(w[o * inputs + k]));
                products.sum::<f64>() + f64::from(bias[o])
            };
            assert_close(&format!("{kind:?}"), &y, |i| product(i / outputs, i % outputs));
            assert_eq!(y, forward(rows, inputs, &x, Stored::F32(&w), &bias), "{kind:?}");

            let d_y = noise(rows * outputs, 3);
            let d_x = pull(rows, &d_y, &matrix);
            let pulled = |i: usize, k: usize| {
                (0..outputs).map(|o| f64::from(d_y[i * outputs + o]) * f64::from(w[o * inputs + k])).sum::<f64>()
            };
            assert_close(&format!("pull of {kind:?}"), &d_x, |i| pulled(i / inputs, i % inputs));
        }
    }

    #[test]
    fn bits_of_a_row_do_not_depend_on_other_rows_or_threads() {
        // Remainders: of inputs per register, of outputs per tile, and more rows than a block has.
        let (inputs, outputs, rows) = (1037, 21, 80);
        let (x, w, bias) = (noise(rows * inputs, 4), noise(outputs * inputs, 5), noise(outputs, 6));
        let narrow: Vec<bf16> = w.iter().map(|v| bf16::from_f32(*v)).collect();
        for weight in [Stored::F32(&w), Stored::Bf16(&narrow)] {
            let together = forward(rows, inputs, &x, weight, &bias);
            for count in [1, 2, 3, 4, 50] {
                for first in [0, 7, rows - count] {
                    let x = &x[first * inputs..][..count * inputs];
                    let alone = forward(count, inputs, x, weight, &bias);
                    assert_eq!(alone, together[first * outputs..][..count * outputs], "{count} from {first}");
                }
            }
            let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            assert_eq!(one_thread.install(|| forward(rows, inputs, &x, weight, &bias)), together);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx512_has_the_bits_of_avx2() {
        use crate::ops::kernels::simd;

        if !(simd::has_avx512() && simd::has_avx2_fma()) {
            roll_testing::skip!("the processor has no AVX-512");
        }
        for inputs in [0, 7, 8, 203, 576] {
            let (x, w) = (noise(6 * inputs, 8), noise(4 * inputs, 9));
            let x: [&[f32]; 6] = std::array::from_fn(|r| &x[r * inputs..][..inputs]);
            let w: [&[f32]; 4] = std::array::from_fn(|o| &w[o * inputs..][..inputs]);
            // SAFETY: the features were detected just now.
            let (wide, narrow) = unsafe { (dots_avx512(x, w), dots_avx2(x, w)) };
            assert_eq!(wide.map(|row| row.map(f32::to_bits)), narrow.map(|row| row.map(f32::to_bits)), "{inputs}");
        }
    }

    #[test]
    fn portable_dot_products_match_avx2() {
        let (x, w) = (noise(3 * 203, 8), noise(4 * 203, 9));
        let (x, w): (Vec<_>, Vec<_>) = (x.chunks(203).collect(), w.chunks(203).collect());
        let (x, w): ([&[f32]; 3], [&[f32]; 4]) = (x.try_into().unwrap(), w.try_into().unwrap());
        // `Separate`, as on processors without fused multiply-add: one more rounding.
        let (fast, slow) = (dots(x, w), dots_portable::<crate::ops::kernels::simd::Separate, 3, 4>(x, w));
        for (fast, slow) in fast.iter().flatten().zip(slow.iter().flatten()) {
            assert!((fast - slow).abs() < 1e-5, "{fast}, {slow}");
        }
    }
}
