//! Pseudo-random numbers for tests.

/// States of a linear congruential generator (Knuth's MMIX). Only the upper bits are random.
pub fn states(seed: u64) -> impl Iterator<Item = u64> {
    let next =
        |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    std::iter::successors(Some(seed | 1), next).skip(1)
}

/// Deterministic values in [-1, 1). An even seed is the same as the next odd one.
#[cfg(not(feature = "portable-kernels"))]
pub fn noise(count: usize, seed: u64) -> Vec<f32> {
    states(seed).map(|state| (state >> 40) as f32 / (1 << 23) as f32 - 1.0).take(count).collect()
}
