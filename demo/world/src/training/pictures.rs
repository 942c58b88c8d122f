//! Augmentation of rendered pictures. Networks trained on augmented pictures also work on the softer, noisier frames
//! that a video model decodes.

use super::gaussian;

/// Strength of the augmentation.
#[derive(Clone, Copy, Debug)]
pub struct Softening {
    /// Fraction of pictures that are blurred.
    pub blurred: f32,
    /// Largest standard deviation of the blur, in pixels.
    pub blur: f32,
    /// Largest standard deviation of the noise, for values in [-1, 1].
    pub noise: f32,
    /// Largest shift of the brightness, for values in [-1, 1].
    pub brightness: f32,
    /// Largest relative change of the contrast and of each channel's gain.
    pub gain: f32,
}

impl Softening {
    /// Augments `pixels`, `[3, height, width]` in [-1, 1]. `uniform` returns values in [-1, 1).
    pub fn apply(&self, pixels: &mut [f32], size: [usize; 2], uniform: &mut impl FnMut() -> f32) {
        let plane = size[0] * size[1];
        let (shift, contrast) = (self.brightness * uniform(), 1.0 + self.gain * uniform());
        for channel in pixels.chunks_exact_mut(plane) {
            let gain = contrast * (1.0 + self.gain * uniform());
            channel.iter_mut().for_each(|v| *v = *v * gain + shift);
        }
        if share(uniform) < self.blurred {
            blur(pixels, size, 0.3 + (self.blur - 0.3).max(0.0) * share(uniform));
        }
        let deviation = self.noise * share(uniform);
        pixels.iter_mut().for_each(|v| *v = (*v + deviation * gaussian(uniform)).clamp(-1.0, 1.0));
    }
}

/// Returns a value uniform in [0, 1). `uniform` returns values in [-1, 1).
pub fn share(uniform: &mut impl FnMut() -> f32) -> f32 {
    0.5 + 0.5 * uniform()
}

/// Convolves `[3, height, width]` with a Gaussian of standard deviation `deviation` in pixels. Border pixels are
/// repeated.
pub fn blur(pixels: &mut [f32], [height, width]: [usize; 2], deviation: f32) {
    let reach = (3.0 * deviation).ceil() as isize;
    let weights: Vec<f32> = (-reach..=reach).map(|d| (-0.5 * (d as f32 / deviation).powi(2)).exp()).collect();
    let total: f32 = weights.iter().sum();
    let mut line = vec![];
    let mut along = |pixels: &mut [f32], start: usize, length: usize, stride: usize| {
        line.clear();
        line.extend((0..length).map(|i| pixels[start + i * stride]));
        for i in 0..length {
            let at = |d: usize| (i as isize + d as isize - reach).clamp(0, length as isize - 1) as usize;
            let sum: f32 = weights.iter().enumerate().map(|(d, weight)| weight * line[at(d)]).sum();
            pixels[start + i * stride] = sum / total;
        }
    };
    for channel in pixels.chunks_exact_mut(height * width) {
        (0..height).for_each(|y| along(channel, y * width, width, 1));
        (0..width).for_each(|x| along(channel, x, height, width));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blur_keeps_constant_pictures_and_the_sum_of_a_point() {
        let mut constant = vec![0.3f32; 3 * 8 * 9];
        blur(&mut constant, [8, 9], 1.2);
        assert!(constant.iter().all(|v| (v - 0.3).abs() < 1e-6));
        let mut point = vec![0f32; 3 * 21 * 21];
        point[10 * 21 + 10] = 1.0;
        blur(&mut point, [21, 21], 1.5);
        assert!((point.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        assert!(point[10 * 21 + 10] < 0.1 && point[10 * 21 + 13] > 0.005);
    }

    #[test]
    fn softened_pictures_stay_in_range() {
        let softening = Softening { blurred: 1.0, blur: 1.5, noise: 0.5, brightness: 0.5, gain: 0.3 };
        let noise = roll_core::Noise::new(1);
        let mut uniform = noise.uniform(roll_core::Purpose::Synthetic, 0, 0);
        let mut pixels: Vec<f32> = (0..3 * 16 * 16).map(|_| uniform()).collect();
        softening.apply(&mut pixels, [16, 16], &mut uniform);
        assert!(pixels.iter().all(|v| (-1.0..=1.0).contains(v)));
    }
}
