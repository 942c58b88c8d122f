//! The three transforms of F(2x2, 3x3): kernels to 16 *elements*, patches to 16 elements, and sums of elements to
//! outputs. [`super`] explains the algorithm and its terms.
//!
//! Element `4 r + c` is row r, column c of a transformed patch or kernel. Many patches or kernels are transformed at a
//! time, one per lane. The lanes of one element are adjacent, and the elements are `element_stride` apart.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__m256;

use super::{ELEMENTS, KERNEL_LANES, MR, NR, TAPS, TileRun};
use crate::ops::kernels::simd::{self, vectorised};

vectorised! {
    /// Transforms the kernels of [`MR`] output channels, `G g G^T`. `g[3 r + c]` holds tap (r, c) of each
    /// kernel, one per lane. The lanes from [`MR`] on are padding and not written.
    pub fn kernel_transform<M>(g: &[[f32; KERNEL_LANES]; TAPS], out: &mut [f32], element_stride: usize) {
        // G times a column of three.
        let combined = |[a, b, d]: [f32; 3]| {
            let outer = 0.5 * (a + d);
            [a, outer + 0.5 * b, outer - 0.5 * b, d]
        };
        // `G g`, then its product with `G^T`, row by row.
        let mut down = [[[0.0f32; KERNEL_LANES]; 3]; 4];
        for c in 0..3 {
            for l in 0..KERNEL_LANES {
                let column = combined([g[c][l], g[3 + c][l], g[6 + c][l]]);
                down.iter_mut().zip(column).for_each(|(down, value)| down[c][l] = value);
            }
        }
        for (r, down) in down.iter().enumerate() {
            let mut across = [[0.0f32; KERNEL_LANES]; 4];
            for l in 0..KERNEL_LANES {
                let row = combined([down[0][l], down[1][l], down[2][l]]);
                across.iter_mut().zip(row).for_each(|(across, value)| across[l] = value);
            }
            for (c, across) in across.iter().enumerate() {
                out[(4 * r + c) * element_stride..][..MR].copy_from_slice(&across[..MR]);
            }
        }
    }
}

/// Input columns that a panel of adjacent tiles reads: two per tile, and two more for the last patch.
pub const SPAN: usize = 2 * NR + 2;

/// Transforms the patches of a run, `B^T d B`. `plane` has `[rows, columns]`. `before` is the number of zeros above and
/// to the left of it; a negative number skips rows or columns instead.
pub fn patch_transform(
    plane: &[f32],
    [rows, columns]: [usize; 2],
    before: [isize; 2],
    run: &TileRun,
    out: &mut [f32],
    element_stride: usize,
) {
    // The four input rows of the patches; rows outside of the plane are zero.
    let mut edges = [[0.0; SPAN]; 4];
    let mut patch_rows = [&[0.0; SPAN]; 4];
    for (i, (patch_row, edge)) in patch_rows.iter_mut().zip(&mut edges).enumerate() {
        let row = usize::try_from((run.at[0] + i) as isize - before[0]).ok().filter(|row| *row < rows);
        if let Some(row) = row {
            *patch_row = span(&plane[row * columns..][..columns], run.at[1] as isize - before[1], edge);
        }
    }
    if run.count == NR {
        return whole_patches(patch_rows, out, element_stride);
    }
    // A shorter run is transformed like a whole panel; only its own tiles are copied.
    let mut all = [0.0; ELEMENTS * NR];
    whole_patches(patch_rows, &mut all, NR);
    for (element, tiles) in all.chunks_exact(NR).enumerate() {
        let out = &mut out[element * element_stride + run.lane..][..run.count];
        out.iter_mut().zip(tiles).for_each(|(to, from)| *to = *from);
    }
}

/// Returns [`SPAN`] columns of a row from column `start` on, as if the row were padded with zeros on both sides. If the
/// columns reach beyond the row, they are assembled in `edge`, which must be zero.
#[inline(always)]
fn span<'a>(row: &'a [f32], start: isize, edge: &'a mut [f32; SPAN]) -> &'a [f32; SPAN] {
    if let Some(inside) = usize::try_from(start).ok().and_then(|from| row.get(from..)?.first_chunk()) {
        return inside;
    }
    let before = ((-start).max(0) as usize).min(SPAN);
    let from = (start.max(0) as usize).min(row.len());
    let count = (SPAN - before).min(row.len() - from);
    edge[before..before + count].copy_from_slice(&row[from..from + count]);
    edge
}

/// Transforms the patches of a whole panel, given its four input rows.
pub fn whole_patches(rows: [&[f32; SPAN]; 4], out: &mut [f32], element_stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { patches_avx2(rows, out, element_stride) };
    }
    patches_portable(rows, out, element_stride);
}

/// [`whole_patches`] with AVX2 intrinsics: without them the compiler moves elements with a stride of two one by one.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn patches_avx2(rows: [&[f32; SPAN]; 4], out: &mut [f32], element_stride: usize) {
    use std::arch::x86_64::{
        _mm256_add_ps, _mm256_castpd_ps, _mm256_castps_pd, _mm256_loadu_ps, _mm256_permute4x64_pd, _mm256_shuffle_ps,
        _mm256_storeu_ps, _mm256_sub_ps,
    };
    for first in [0, HALF] {
        // The vertical transform, `B^T d`, of eight adjacent columns.
        let down = |from: usize| -> [__m256; 4] {
            let load = |row: &[f32; SPAN]| {
                let row = &row[2 * first + from..][..HALF];
                // SAFETY: these are eight numbers.
                unsafe { _mm256_loadu_ps(row.as_ptr()) }
            };
            let [a, b, c, d] = [load(rows[0]), load(rows[1]), load(rows[2]), load(rows[3])];
            [_mm256_sub_ps(a, c), _mm256_add_ps(b, c), _mm256_sub_ps(c, b), _mm256_sub_ps(b, d)]
        };
        // Eight adjacent patches begin at every second of sixteen columns. Their first two columns are among the
        // columns from 0 on, and their last two among those from 2 on.
        let (first_two, last_two) = ([down(0), down(8)], [down(2), down(10)]);
        // The shuffles leave pairs of numbers in the order 0, 2, 1, 3.
        let in_order = |x: __m256| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(x)));
        for r in 0..4 {
            // Even and odd columns: the four columns of each patch, by lane.
            let ([low, high], [low_2, high_2]) = ([first_two[0][r], first_two[1][r]], [last_two[0][r], last_two[1][r]]);
            let a = _mm256_shuffle_ps::<0b10_00_10_00>(low, high);
            let b = _mm256_shuffle_ps::<0b11_01_11_01>(low, high);
            let c = _mm256_shuffle_ps::<0b10_00_10_00>(low_2, high_2);
            let d = _mm256_shuffle_ps::<0b11_01_11_01>(low_2, high_2);
            // The horizontal transform, the product with B.
            let across = [_mm256_sub_ps(a, c), _mm256_add_ps(b, c), _mm256_sub_ps(c, b), _mm256_sub_ps(b, d)];
            for (column, across) in across.into_iter().enumerate() {
                let out = &mut out[(4 * r + column) * element_stride + first..][..HALF];
                // SAFETY: these are eight numbers.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), in_order(across)) };
            }
        }
    }
}

/// Tiles per register: half a panel.
#[cfg(target_arch = "x86_64")]
const HALF: usize = NR / 2;

/// [`whole_patches`] for any processor; bit-equal to the AVX2 version.
#[cfg_attr(target_arch = "x86_64", inline(never))]
pub fn patches_portable(rows: [&[f32; SPAN]; 4], out: &mut [f32], element_stride: usize) {
    // `B^T` times a column of four.
    let combined = |[a, b, c, d]: [f32; 4]| [a - c, b + c, c - b, b - d];
    for l in 0..NR {
        let down: [[f32; 4]; 4] = std::array::from_fn(|i| combined(rows.map(|row| row[2 * l + i])));
        for r in 0..4 {
            for (c, value) in combined(down.map(|down| down[r])).into_iter().enumerate() {
                out[(4 * r + c) * element_stride + l] = value;
            }
        }
    }
}

/// Transforms the sums of a panel back, `A^T m A`, and adds the bias. Returns both output rows of the tiles.
pub fn result_transform(sums: &[f32], element_stride: usize, bias: f32) -> [[f32; 2 * NR]; 2] {
    #[cfg(target_arch = "x86_64")]
    if simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { results_avx2(sums, element_stride, bias) };
    }
    results_portable(sums, element_stride, bias)
}

/// [`result_transform`] with AVX2 intrinsics.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn results_avx2(sums: &[f32], element_stride: usize, bias: f32) -> [[f32; 2 * NR]; 2] {
    use std::arch::x86_64::{
        _mm256_add_ps, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
        _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };
    let mut rows = [[0.0; 2 * NR]; 2];
    let bias = _mm256_set1_ps(bias);
    for first in [0, HALF] {
        // `A^T m`, two rows of four.
        let mut up = [[_mm256_setzero_ps(); 4]; 2];
        for c in 0..4 {
            let mut m = [_mm256_setzero_ps(); 4];
            for (r, m) in m.iter_mut().enumerate() {
                let sums = &sums[(4 * r + c) * element_stride + first..][..HALF];
                // SAFETY: these are eight numbers.
                *m = unsafe { _mm256_loadu_ps(sums.as_ptr()) };
            }
            [up[0][c], up[1][c]] = two_of_four(m);
        }
        for (up, row) in up.into_iter().zip(&mut rows) {
            let [left, right] = two_of_four(up);
            let [left, right] = [_mm256_add_ps(left, bias), _mm256_add_ps(right, bias)];
            // Interleaves the left and the right outputs of the tiles.
            let (low, high) = (_mm256_unpacklo_ps(left, right), _mm256_unpackhi_ps(left, right));
            let row = &mut row[2 * first..][..2 * HALF];
            // SAFETY: these are sixteen numbers.
            unsafe {
                _mm256_storeu_ps(row.as_mut_ptr(), _mm256_permute2f128_ps::<0x20>(low, high));
                _mm256_storeu_ps(row.as_mut_ptr().add(HALF), _mm256_permute2f128_ps::<0x31>(low, high));
            }
        }
    }
    rows
}

/// `A^T` times a column of four.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
#[inline]
fn two_of_four(m: [__m256; 4]) -> [__m256; 2] {
    use std::arch::x86_64::{_mm256_add_ps, _mm256_sub_ps};
    [_mm256_add_ps(_mm256_add_ps(m[0], m[1]), m[2]), _mm256_sub_ps(_mm256_sub_ps(m[1], m[2]), m[3])]
}

/// [`result_transform`] for any processor; bit-equal to the AVX2 version.
#[cfg_attr(target_arch = "x86_64", inline(never))]
pub fn results_portable(sums: &[f32], element_stride: usize, bias: f32) -> [[f32; 2 * NR]; 2] {
    // `A^T` times a column of four.
    let combined = |m: [f32; 4]| [m[0] + m[1] + m[2], m[1] - m[2] - m[3]];
    let mut rows = [[0.0; 2 * NR]; 2];
    for l in 0..NR {
        let up: [[f32; 2]; 4] =
            std::array::from_fn(|c| combined([0, 4, 8, 12].map(|r| sums[(r + c) * element_stride + l])));
        for (r, row) in rows.iter_mut().enumerate() {
            let [left, right] = combined(up.map(|up| up[r]));
            [row[2 * l], row[2 * l + 1]] = [left + bias, right + bias];
        }
    }
    rows
}
