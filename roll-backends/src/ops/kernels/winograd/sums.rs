//! The inner loop: a block of output channels and a panel of tiles stay in registers while the products pass by.

use super::{OUT, SUMS, TILES};
use crate::ops::kernels::simd::{self, MulAdd};

/// Adds to the sums, or sets them, the products of the kernels of a block with what they see.
pub fn accumulate(weights: &[f32], patches: &[f32], sums: &mut [f32; SUMS], add: bool) {
    #[cfg(target_arch = "x86_64")]
    if simd::has_avx2_fma() {
        // SAFETY: the features were detected just now.
        return unsafe { wide(weights, patches, sums, add) };
    }
    #[cfg(target_arch = "aarch64")]
    plain::<simd::Fused>(weights, patches, sums, add);
    #[cfg(not(target_arch = "aarch64"))]
    plain::<simd::Separate>(weights, patches, sums, add);
}

/// In vector registers by name: the compiler does not keep so many sums in them by itself.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn wide(weights: &[f32], patches: &[f32], sums: &mut [f32; SUMS], add: bool) {
    use std::arch::x86_64::{
        _mm256_add_ps, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps,
    };
    let mut all = [[_mm256_setzero_ps(); 2]; OUT];
    for (weights, tiles) in weights.as_chunks::<OUT>().0.iter().zip(patches.as_chunks::<TILES>().0) {
        // SAFETY: sixteen numbers are two times eight.
        let (low, high) = unsafe { (_mm256_loadu_ps(tiles.as_ptr()), _mm256_loadu_ps(tiles.as_ptr().add(8))) };
        for o in 0..OUT {
            let weight = _mm256_broadcast_ss(&weights[o]);
            all[o][0] = _mm256_fmadd_ps(weight, low, all[o][0]);
            all[o][1] = _mm256_fmadd_ps(weight, high, all[o][1]);
        }
    }
    for (all, sums) in all.iter().zip(sums.chunks_exact_mut(TILES)) {
        for (all, sums) in all.iter().zip(sums.chunks_exact_mut(8)) {
            // SAFETY: the chunk has eight numbers.
            unsafe {
                let sum = if add { _mm256_add_ps(_mm256_loadu_ps(sums.as_ptr()), *all) } else { *all };
                _mm256_storeu_ps(sums.as_mut_ptr(), sum);
            }
        }
    }
}

/// The same sums on any processor.
#[cfg_attr(target_arch = "x86_64", inline(never))]
pub fn plain<M: MulAdd>(weights: &[f32], patches: &[f32], sums: &mut [f32; SUMS], add: bool) {
    let mut all = [[0.0f32; TILES]; OUT];
    for (weights, tiles) in weights.as_chunks::<OUT>().0.iter().zip(patches.as_chunks::<TILES>().0) {
        for o in 0..OUT {
            for l in 0..TILES {
                all[o][l] = M::mul_add(weights[o], tiles[l], all[o][l]);
            }
        }
    }
    for (all, sum) in all.iter().flatten().zip(sums) {
        *sum = if add { *sum + all } else { *all };
    }
}
