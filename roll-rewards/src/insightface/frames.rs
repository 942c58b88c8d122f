//! Converts decoded videos to pixels.

/// Converts decoded frames `[3, T, H, W]` in [-1, 1] to pixels `[T, H, W, 3]` in 0 to 255, clamped and not rounded.
///
/// # Panics
/// Panics unless `decoded` has `3 * T * H * W` values.
pub fn to_pixels(decoded: &[f32], [t, h, w]: [usize; 3]) -> Vec<f32> {
    let plane = t * h * w;
    assert_eq!(decoded.len(), 3 * plane, "[3, {t}, {h}, {w}]");
    let pixel = |i: usize| [0, 1, 2].map(|c| ((decoded[c * plane + i] + 1.0) * 127.5).clamp(0.0, 255.0));
    (0..plane).flat_map(pixel).collect()
}
