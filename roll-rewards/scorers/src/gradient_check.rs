//! Seeded random numbers and dot products for the gradient tests of this crate.

/// Pseudo-random values in [-1, 1], determined by the seed.
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
    // Two constants without a pattern spread small seeds over all bits.
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    // A linear congruential generator with the constants of Knuth's MMIX.
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    };
    (0..count).map(|_| draw()).collect()
}

/// Dot product in f64.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}
