//! The micro-kernel of products of packed matrices: a tile of six rows by sixteen columns is accumulated in registers.

use super::simd::{self, MulAdd};

/// Rows of a tile (MR in BLIS terms). With [`NR`], the sums take twelve registers, which leaves room for the
/// operands.
pub const MR: usize = 6;
/// Columns of a tile (NR in BLIS terms): two registers of eight.
pub const NR: usize = 16;
/// Numbers of a tile.
pub const SUMS: usize = MR * NR;
/// Depth of one accumulation (KC in BLIS terms): its right panel (18 KiB) stays in the L1 cache.
pub const KC: usize = 288;

/// The numbers of one step of a right panel, aligned to a cache line: registers are loaded faster from one line than from
/// two.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct Line(pub [f32; NR]);

/// Whether there is a micro-kernel in intrinsics for this processor. Elsewhere callers use a library's products where
/// they can, because the speed of the portable micro-kernel was never compared with a library's.
pub fn has_intrinsics() -> bool {
    #[cfg(target_arch = "x86_64")]
    return simd::has_avx2_fma();
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Computes the product of each packed panel of `left` `[steps, MR]` and each packed panel of `right` `[steps, NR]`; adds
/// it to their tile of `sums` if `adds_to_sums`, else overwrites the tile. Sums have the same bits for any number of
/// tiles. Several at a time take less time with AVX-512: the six registers of one are too few to hide the latency of
/// FMAs, of which two start in a cycle. Two by two panels load fewer numbers per FMA than four by one.
pub fn accumulate<const ROWS: usize, const COLUMNS: usize>(
    left: [&[f32]; ROWS],
    right: [&[f32]; COLUMNS],
    sums: [[&mut [f32; SUMS]; COLUMNS]; ROWS],
    adds_to_sums: bool,
) {
    #[cfg(target_arch = "x86_64")]
    if simd::has_avx512() {
        // SAFETY: the features were detected just now.
        return unsafe { avx512(left, right, sums, adds_to_sums) };
    }
    for (left, sums) in left.into_iter().zip(sums) {
        for (right, sums) in right.into_iter().zip(sums) {
            #[cfg(target_arch = "x86_64")]
            if simd::has_avx2_fma() {
                // SAFETY: the features were detected just now.
                unsafe { avx2(left, right, sums, adds_to_sums) };
                continue;
            }
            portable::<simd::Portable>(left, right, sums, adds_to_sums);
        }
    }
}

/// The AVX2 micro-kernel, in intrinsics: without them the compiler keeps fewer sums in registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(left: &[f32], right: &[f32], sums: &mut [f32; SUMS], adds_to_sums: bool) {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm256_add_ps, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps,
        _mm256_setzero_ps, _mm256_storeu_ps,
    };
    // The old sums are read last and may be in a slower cache.
    for row in sums.chunks_exact(NR) {
        _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().cast());
    }
    let mut products = [[_mm256_setzero_ps(); 2]; MR];
    for (left, columns) in left.as_chunks::<MR>().0.iter().zip(right.as_chunks::<NR>().0) {
        // SAFETY: sixteen numbers are two times eight.
        let (low, high) = unsafe { (_mm256_loadu_ps(columns.as_ptr()), _mm256_loadu_ps(columns.as_ptr().add(8))) };
        for o in 0..MR {
            let value = _mm256_broadcast_ss(&left[o]);
            products[o][0] = _mm256_fmadd_ps(value, low, products[o][0]);
            products[o][1] = _mm256_fmadd_ps(value, high, products[o][1]);
        }
    }
    for (row, sums) in products.iter().zip(sums.chunks_exact_mut(NR)) {
        for (half, sums) in row.iter().zip(sums.chunks_exact_mut(8)) {
            // SAFETY: the chunk has eight numbers.
            unsafe {
                let sum = if adds_to_sums { _mm256_add_ps(_mm256_loadu_ps(sums.as_ptr()), *half) } else { *half };
                _mm256_storeu_ps(sums.as_mut_ptr(), sum);
            }
        }
    }
}

/// The AVX-512 micro-kernel, bit-equal to the AVX2 one. Panics if a panel has fewer steps than the first right one.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512<const ROWS: usize, const COLUMNS: usize>(
    left: [&[f32]; ROWS],
    right: [&[f32]; COLUMNS],
    sums: [[&mut [f32; SUMS]; COLUMNS]; ROWS],
    adds_to_sums: bool,
) {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_storeu_ps,
    };
    for row in sums.iter().flatten().flat_map(|sums| sums.chunks_exact(NR)) {
        _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().cast());
    }
    let steps = right.first().map_or(0, |right| right.len() / NR);
    let right = right.map(|right| &right.as_chunks::<NR>().0[..steps]);
    let left = left.map(|left| &left.as_chunks::<MR>().0[..steps]);
    let mut products = [[[_mm512_setzero_ps(); MR]; COLUMNS]; ROWS];
    let mut step = |left: [&[f32; MR]; ROWS], right: [&[f32; NR]; COLUMNS]| {
        let mut columns = [_mm512_setzero_ps(); COLUMNS];
        for c in 0..COLUMNS {
            // SAFETY: there are sixteen numbers.
            columns[c] = unsafe { _mm512_loadu_ps(right[c].as_ptr()) };
        }
        for r in 0..ROWS {
            for o in 0..MR {
                let value = _mm512_set1_ps(left[r][o]);
                for c in 0..COLUMNS {
                    products[r][c][o] = _mm512_fmadd_ps(value, columns[c], products[r][c][o]);
                }
            }
        }
    };
    // Two steps a turn take less time than one, or four.
    for k in 0..steps / 2 {
        step(left.map(|left| &left[2 * k]), right.map(|right| &right[2 * k]));
        step(left.map(|left| &left[2 * k + 1]), right.map(|right| &right[2 * k + 1]));
    }
    if steps % 2 == 1 {
        step(left.map(|left| &left[steps - 1]), right.map(|right| &right[steps - 1]));
    }
    // The loops count, because with iterators the compiler keeps the products in memory and writes them in each step.
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            for o in 0..MR {
                let sums = &mut sums[r][c][o * NR..][..NR];
                // SAFETY: these are sixteen numbers.
                unsafe {
                    let product = products[r][c][o];
                    let sum =
                        if adds_to_sums { _mm512_add_ps(_mm512_loadu_ps(sums.as_ptr()), product) } else { product };
                    _mm512_storeu_ps(sums.as_mut_ptr(), sum);
                }
            }
        }
    }
}

/// The micro-kernel for any processor.
#[cfg_attr(target_arch = "x86_64", inline(never))]
pub fn portable<M: MulAdd>(left: &[f32], right: &[f32], sums: &mut [f32; SUMS], adds_to_sums: bool) {
    let mut products = [[0.0f32; NR]; MR];
    for (left, columns) in left.as_chunks::<MR>().0.iter().zip(right.as_chunks::<NR>().0) {
        for o in 0..MR {
            for l in 0..NR {
                products[o][l] = M::mul_add(left[o], columns[l], products[o][l]);
            }
        }
    }
    for (product, sum) in products.iter().flatten().zip(sums) {
        *sum = if adds_to_sums { *sum + product } else { *product };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operands(steps: usize) -> [Vec<f32>; 2] {
        [(MR, 0.37), (NR, 0.61)].map(|(n, step)| (0..steps * n).map(|i| (i as f32 * step).sin()).collect())
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx512_has_the_bits_of_avx2() {
        if !(simd::has_avx512() && simd::has_avx2_fma()) {
            roll_testing::skip!("the processor has no AVX-512");
        }
        for steps in [0, 1, 50, KC] {
            let [left, right] = operands(steps);
            let (mut one, mut other) = ([1.0; SUMS], [1.0; SUMS]);
            for adds_to_sums in [true, false] {
                // SAFETY: the features were detected above.
                unsafe {
                    avx2(&left, &right, &mut one, adds_to_sums);
                    avx512([&left], [&right], [[&mut other]], adds_to_sums);
                }
                assert_eq!(one.map(f32::to_bits), other.map(f32::to_bits));
            }
        }
    }

    #[test]
    fn tiles_at_once_have_the_bits_of_each_alone() {
        for steps in [0, 1, 50, KC] {
            let [first, right] = operands(steps);
            let left = [first.clone(), first.iter().map(|x| 1.5 - x).collect()];
            let right = [right.clone(), right.iter().map(|x| x * x - 0.3).collect()];
            let mut alone = [[[1.0; SUMS]; 2]; 2];
            let mut together = alone;
            for adds_to_sums in [true, false] {
                for (left, sums) in left.iter().zip(&mut alone) {
                    for (right, sums) in right.iter().zip(sums) {
                        accumulate([left], [right], [[sums]], adds_to_sums);
                    }
                }
                let [left, right] = [&left, &right].map(|panels| panels.each_ref().map(Vec::as_slice));
                accumulate(left, right, together.each_mut().map(|sums| sums.each_mut()), adds_to_sums);
                assert_eq!(alone.as_flattened().as_flattened(), together.as_flattened().as_flattened());
            }
        }
    }

    #[test]
    fn portable_kernel_matches_f64() {
        let steps = 50;
        let [left, right] = operands(steps);
        let (mut fast, mut slow) = ([1.0; SUMS], [1.0; SUMS]);
        for adds_to_sums in [false, true] {
            accumulate([&left], [&right], [[&mut fast]], adds_to_sums);
            portable::<simd::Separate>(&left, &right, &mut slow, adds_to_sums);
            for (i, (fast, slow)) in fast.iter().zip(&slow).enumerate() {
                let product = |k: usize| f64::from(left[k * MR + i / NR] * right[k * NR + i % NR]);
                let expected = f64::from(1 + u8::from(adds_to_sums)) * (0..steps).map(product).sum::<f64>();
                assert!((f64::from(*fast) - expected).abs() < 1e-5, "{fast}, {expected}");
                assert!((fast - slow).abs() < 1e-5, "{fast}, {slow}");
            }
        }
    }
}
