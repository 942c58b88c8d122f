//! Winograd's transforms of kernels, patches and sums.

use super::{Grid, OUT, Run, TILES};
use crate::ops::kernels::simd::{self, MulAdd, vectorised};

vectorised! {
    /// `G g G^T` of eight kernels, of which the first [`OUT`] are written, place by place, `apart` from each other.
    fn kernel_transform(g: &[[f32; 8]; 9], out: &mut [f32], apart: usize) = kernel_transform_body
}

#[inline(always)]
fn kernel_transform_body<M: MulAdd>(g: &[[f32; 8]; 9], out: &mut [f32], apart: usize) {
    let mut down = [[[0.0f32; 8]; 3]; 4];
    for c in 0..3 {
        for l in 0..8 {
            let [a, b, d] = [g[c][l], g[3 + c][l], g[6 + c][l]];
            let outer = 0.5 * (a + d);
            down[0][c][l] = a;
            down[1][c][l] = outer + 0.5 * b;
            down[2][c][l] = outer - 0.5 * b;
            down[3][c][l] = d;
        }
    }
    for (r, down) in down.iter().enumerate() {
        let mut across = [[0.0f32; 8]; 4];
        for l in 0..8 {
            let [a, b, d] = [down[0][l], down[1][l], down[2][l]];
            let outer = 0.5 * (a + d);
            across[0][l] = a;
            across[1][l] = outer + 0.5 * b;
            across[2][l] = outer - 0.5 * b;
            across[3][l] = d;
        }
        for (c, across) in across.iter().enumerate() {
            out[(4 * r + c) * apart..][..OUT].copy_from_slice(&across[..OUT]);
        }
    }
}

/// Columns that a panel of neighbours sees.
const SPAN: usize = 2 * TILES + 2;

vectorised! {
    /// `B^T d B` of the patches of a run, place by place, `apart` from each other.
    fn patch_transform(plane: &[f32], grid: Grid, run: &Run, out: &mut [f32], apart: usize) = patch_transform_body
}

#[inline(always)]
fn patch_transform_body<M: MulAdd>(plane: &[f32], grid: Grid, run: &Run, out: &mut [f32], apart: usize) {
    let mut edges = [[0.0f32; SPAN]; 4];
    let mut seen = [&[0.0f32; SPAN]; 4];
    for (i, (seen, edge)) in seen.iter_mut().zip(&mut edges).enumerate() {
        let row = (2 * run.at[0] + i).checked_sub(grid.padding[0]).filter(|row| *row < grid.input[0]);
        if let Some(row) = row {
            *seen = span(&plane[row * grid.input[1]..][..grid.input[1]], 2 * run.at[1], grid.padding[1], edge);
        }
    }
    let mut down = [[0.0f32; SPAN]; 4];
    for l in 0..SPAN {
        let [a, b, c, d] = [seen[0][l], seen[1][l], seen[2][l], seen[3][l]];
        down[0][l] = a - c;
        down[1][l] = b + c;
        down[2][l] = c - b;
        down[3][l] = b - d;
    }
    for (r, down) in down.iter().enumerate() {
        let (mut outer, mut sum, mut difference) = ([0.0; 2 * TILES], [0.0; 2 * TILES], [0.0; 2 * TILES]);
        for l in 0..2 * TILES {
            outer[l] = down[l] - down[l + 2];
            sum[l] = down[l] + down[l + 1];
            difference[l] = down[l + 1] - down[l];
        }
        let [first, last] = split(&outer);
        let across = [first, split(&sum)[1], split(&difference)[1], last];
        for (c, across) in across.iter().enumerate() {
            let out = &mut out[(4 * r + c) * apart..][..TILES];
            match run.count {
                TILES => out.copy_from_slice(across),
                count => out[run.lane..][..count].copy_from_slice(&across[..count]),
            }
        }
    }
}

/// The columns from `start` on of a row that has `left` zeros before it, and zeros behind it. Where they reach beyond the
/// row they are put together in `edge`, which is zero.
#[inline(always)]
fn span<'a>(row: &'a [f32], start: usize, left: usize, edge: &'a mut [f32; SPAN]) -> &'a [f32; SPAN] {
    let inside = start.checked_sub(left).and_then(|from| row.get(from..)?.first_chunk());
    if let Some(inside) = inside {
        return inside;
    }
    let before = left.saturating_sub(start).min(SPAN);
    let from = (start + before - left).min(row.len());
    let count = (SPAN - before).min(row.len() - from);
    edge[before..before + count].copy_from_slice(&row[from..from + count]);
    edge
}

vectorised! {
    /// `A^T m A` plus the bias for a panel of sums, whose places are `apart` from each other: both rows of its tiles.
    fn result_transform(sums: &[f32], apart: usize, bias: f32) -> [[f32; 2 * TILES]; 2] = result_transform_body
}

#[inline(always)]
fn result_transform_body<M: MulAdd>(sums: &[f32], apart: usize, bias: f32) -> [[f32; 2 * TILES]; 2] {
    let mut up = [[[0.0f32; TILES]; 4]; 2];
    for c in 0..4 {
        let m: [&[f32]; 4] = std::array::from_fn(|r| &sums[(4 * r + c) * apart..][..TILES]);
        for l in 0..TILES {
            up[0][c][l] = m[0][l] + m[1][l] + m[2][l];
            up[1][c][l] = m[1][l] - m[2][l] - m[3][l];
        }
    }
    let mut rows = [[0.0; 2 * TILES]; 2];
    for (up, row) in up.iter().zip(&mut rows) {
        let (mut left, mut right) = ([0.0; TILES], [0.0; TILES]);
        for l in 0..TILES {
            left[l] = up[0][l] + up[1][l] + up[2][l] + bias;
            right[l] = up[1][l] - up[2][l] - up[3][l] + bias;
        }
        *row = interleave(&left, &right);
    }
    rows
}

/// The numbers at even and at odd places. (Written as a loop, the compiler moves them one by one.)
#[inline(always)]
pub fn split(row: &[f32; 2 * TILES]) -> [[f32; TILES]; 2] {
    #[cfg(target_arch = "x86_64")]
    if simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { split_wide(row) };
    }
    [0, 1].map(|odd| std::array::from_fn(|l| row[2 * l + odd]))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn split_wide(row: &[f32; 2 * TILES]) -> [[f32; TILES]; 2] {
    use std::arch::x86_64::{
        _mm256_castpd_ps, _mm256_castps_pd, _mm256_loadu_ps, _mm256_permute4x64_pd, _mm256_shuffle_ps, _mm256_storeu_ps,
    };
    let mut out = [[0.0; TILES]; 2];
    for half in 0..2 {
        // SAFETY: the row has two times sixteen numbers, each part of the result two times eight.
        unsafe {
            let from = row.as_ptr().add(half * TILES);
            let (low, high) = (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)));
            // Pairs come in the order 0, 2, 1, 3.
            let even = _mm256_castps_pd(_mm256_shuffle_ps::<0b10_00_10_00>(low, high));
            let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0b11_01_11_01>(low, high));
            let [even, odd] = [even, odd].map(|pairs| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(pairs)));
            _mm256_storeu_ps(out[0].as_mut_ptr().add(half * 8), even);
            _mm256_storeu_ps(out[1].as_mut_ptr().add(half * 8), odd);
        }
    }
    out
}

/// The reverse of [`split`].
#[inline(always)]
pub fn interleave(even: &[f32; TILES], odd: &[f32; TILES]) -> [f32; 2 * TILES] {
    #[cfg(target_arch = "x86_64")]
    if simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { interleave_wide(even, odd) };
    }
    std::array::from_fn(|l| if l % 2 == 0 { even[l / 2] } else { odd[l / 2] })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn interleave_wide(even: &[f32; TILES], odd: &[f32; TILES]) -> [f32; 2 * TILES] {
    use std::arch::x86_64::{
        _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };
    let mut row = [0.0; 2 * TILES];
    for half in 0..2 {
        // SAFETY: both parts have two times eight numbers, the row two times sixteen.
        unsafe {
            let (even, odd) = (even.as_ptr().add(half * 8), odd.as_ptr().add(half * 8));
            let (even, odd) = (_mm256_loadu_ps(even), _mm256_loadu_ps(odd));
            let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            let to = row.as_mut_ptr().add(half * TILES);
            _mm256_storeu_ps(to, _mm256_permute2f128_ps::<0x20>(low, high));
            _mm256_storeu_ps(to.add(8), _mm256_permute2f128_ps::<0x31>(low, high));
        }
    }
    row
}
