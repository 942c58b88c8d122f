//! Luma of pixels.

use roll_core::Video;

/// Weights of red, green and blue in the Rec. 709 luma.
pub const LUMA: [f64; 3] = [0.2126, 0.7152, 0.0722];

/// The luma of every pixel, 0 (black) to 1 (white): one plane `[H, W]` per frame.
pub fn lumas(video: &Video) -> Vec<Vec<f32>> {
    let [frames, height, width] = video.dims();
    let plane = height * width;
    let luma = |t: usize| {
        let frame = video.frame(t);
        let at = |i: usize| (0..3).map(|c| LUMA[c] as f32 * (frame[c * plane + i] + 1.0) / 2.0).sum::<f32>();
        (0..plane).map(at).collect()
    };
    (0..frames).map(luma).collect()
}

/// The pullback of [`lumas`]: maps the cotangents of the planes to the cotangent of the frames, `[T, 3, H, W]`.
pub fn pull(cotangents: &[Vec<f32>]) -> Vec<f32> {
    let channels = |plane: &Vec<f32>| {
        LUMA.map(|weight| plane.iter().map(|g| g * (weight / 2.0) as f32).collect::<Vec<f32>>()).concat()
    };
    cotangents.iter().flat_map(channels).collect()
}
