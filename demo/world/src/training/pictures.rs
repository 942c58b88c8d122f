//! Augmentation of rendered pictures. Networks trained on augmented pictures also work on the softer, noisier frames
//! that a video model decodes.

use super::gaussian;

/// Smallest standard deviation of a blur, in pixels.
const MIN_BLUR: f32 = 0.3;

/// Strength of the augmentation.
#[derive(Clone, Copy, Debug)]
pub struct Augmentation {
    /// Fraction of pictures that are blurred.
    pub blur_probability: f32,
    /// Largest standard deviation of the blur, in pixels; the smallest is `MIN_BLUR`.
    pub max_blur: f32,
    /// Largest standard deviation of the noise, for values in [-1, 1].
    pub max_noise: f32,
    /// Largest shift of the brightness, for values in [-1, 1].
    pub max_brightness: f32,
    /// Largest relative change of the contrast and of each channel's gain.
    pub max_gain: f32,
}

impl Augmentation {
    /// Augments `pixels`, `[3, height, width]` in [-1, 1]. `uniform` returns values in [-1, 1).
    pub fn apply(&self, pixels: &mut [f32], size: [usize; 2], uniform: &mut impl FnMut() -> f32) {
        let plane = size[0] * size[1];
        let (shift, contrast) = (self.max_brightness * uniform(), 1.0 + self.max_gain * uniform());
        for channel in pixels.chunks_exact_mut(plane) {
            let gain = contrast * (1.0 + self.max_gain * uniform());
            channel.iter_mut().for_each(|v| *v = *v * gain + shift);
        }
        if unit_uniform(uniform) < self.blur_probability {
            blur(pixels, size, MIN_BLUR + (self.max_blur - MIN_BLUR).max(0.0) * unit_uniform(uniform));
        }
        let deviation = self.max_noise * unit_uniform(uniform);
        pixels.iter_mut().for_each(|v| *v = (*v + deviation * gaussian(uniform)).clamp(-1.0, 1.0));
    }
}

/// Returns a value uniform in [0, 1). `uniform` returns values in [-1, 1).
pub fn unit_uniform(uniform: &mut impl FnMut() -> f32) -> f32 {
    0.5 + 0.5 * uniform()
}

/// Convolves `[3, height, width]` with a Gaussian of standard deviation `deviation` in pixels. Border pixels are
/// repeated.
pub fn blur(pixels: &mut [f32], [height, width]: [usize; 2], deviation: f32) {
    let reach = (3.0 * deviation).ceil() as isize;
    let weights: Vec<f32> = (-reach..=reach).map(|d| (-0.5 * (d as f32 / deviation).powi(2)).exp()).collect();
    let total: f32 = weights.iter().sum();
    let mut line = vec![];
    let mut blur_line = |pixels: &mut [f32], start: usize, length: usize, stride: usize| {
        line.clear();
        line.extend((0..length).map(|i| pixels[start + i * stride]));
        for i in 0..length {
            let at = |d: usize| (i as isize + d as isize - reach).clamp(0, length as isize - 1) as usize;
            let sum: f32 = weights.iter().enumerate().map(|(d, weight)| weight * line[at(d)]).sum();
            pixels[start + i * stride] = sum / total;
        }
    };
    for channel in pixels.chunks_exact_mut(height * width) {
        (0..height).for_each(|y| blur_line(channel, y * width, width, 1));
        (0..width).for_each(|x| blur_line(channel, x, height, width));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blur_keeps_constant_pictures_and_the_sum_of_an_impulse() {
        let mut constant = vec![0.3f32; 3 * 8 * 9];
        blur(&mut constant, [8, 9], 1.2);
        assert!(constant.iter().all(|v| (v - 0.3).abs() < 1e-6));
        let mut impulse = vec![0f32; 3 * 21 * 21];
        impulse[10 * 21 + 10] = 1.0;
        blur(&mut impulse, [21, 21], 1.5);
        assert!((impulse.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        assert!(impulse[10 * 21 + 10] < 0.1 && impulse[10 * 21 + 13] > 0.005);
    }

    #[test]
    fn augmented_pictures_stay_in_range() {
        let augmentation =
            Augmentation { blur_probability: 1.0, max_blur: 1.5, max_noise: 0.5, max_brightness: 0.5, max_gain: 0.3 };
        let noise = roll_core::Noise::new(1);
        let mut uniform = noise.uniform(roll_core::Purpose::Synthetic, 0, 0);
        let mut pixels: Vec<f32> = (0..3 * 16 * 16).map(|_| uniform()).collect();
        augmentation.apply(&mut pixels, [16, 16], &mut uniform);
        assert!(pixels.iter().all(|v| (-1.0..=1.0).contains(v)));
    }
}
