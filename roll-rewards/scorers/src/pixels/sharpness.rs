//! The reward `sharpness`: strength of edges in a frame.

use super::amount::register_amount;
use super::{Amount, SMOOTH, Wanted};

/// Root mean square of the luma's Laplacian (the four neighbours minus four times the pixel), averaged over the frames.
/// Its square is known as the variance of the Laplacian. Noise is sharp, too; `wanted: reference` or a level keeps a
/// model from producing noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharpness;

impl Amount for Sharpness {
    const NAME: &'static str = "sharpness";
    const FRAMES: usize = 1;
    const WANTED: Wanted = Wanted::More;

    fn measure(lumas: &[Vec<f32>], [h, w]: [usize; 2], mut gradient: Option<&mut [Vec<f32>]>) -> Option<f64> {
        if h < 3 || w < 3 {
            return None;
        }
        let count = ((h - 2) * (w - 2)) as f64;
        // Positions of the pixels with four neighbours.
        let inner = move || (1..h - 1).flat_map(move |y| (1..w - 1).map(move |x| y * w + x));
        let mut sum = 0.0;
        for (t, luma) in lumas.iter().enumerate() {
            let laplacian = |i: usize| luma[i - w] + luma[i + w] + luma[i - 1] + luma[i + 1] - 4.0 * luma[i];
            let square = inner().map(|i| f64::from(laplacian(i)).powi(2)).sum::<f64>() / count;
            let root = square.sqrt().hypot(f64::from(SMOOTH));
            sum += root - f64::from(SMOOTH);
            if let Some(gradient) = &mut gradient {
                let scale = (1.0 / (root * count * lumas.len() as f64)) as f32;
                for i in inner() {
                    let slope = scale * laplacian(i);
                    [i - w, i + w, i - 1, i + 1].into_iter().for_each(|j| gradient[t][j] += slope);
                    gradient[t][i] -= 4.0 * slope;
                }
            }
        }
        Some(sum / lumas.len() as f64)
    }
}

register_amount!(
    Sharpness,
    "Sharpness of frames: more of it, less of it, a given level, or that of the reference",
    is_default_check: true
);

#[cfg(test)]
mod tests {
    use roll_core::{Grad, RewardScorer, Score, Tensor, Video};

    use super::*;
    use crate::pixels::{AmountConfig, AmountReward};

    /// Random noise instead of `check_reward`'s smooth videos, whose sharpness is comparable to the step of the
    /// differences.
    fn agrees_with_differences(reward: &mut AmountReward<Sharpness>) {
        let video = |along: f32| {
            let noise = |seed: usize| ((seed * 7919 + 13) % 1009) as f32 / 1009.0 - 0.5;
            let values = (0..2 * 3 * 16 * 16).map(|i| noise(i) + along * noise(3 * i + 5)).collect();
            Video::new(Tensor::new(values, [2, 3, 16, 16]).unwrap(), 8.0).unwrap()
        };
        let target = reward.prepare(&video(2.0)).unwrap();
        let mut value = |along: f32, grad| match reward.score(&video(along), "", &target, grad).unwrap() {
            (Score::Value { value, .. }, pullback) => (value, pullback),
            other => panic!("{:?}", other.0),
        };
        let slope = value(0.0, Grad::Record).1.unwrap().pull(&Tensor::scalar(1.0)).unwrap().to_f32_vec();
        let direction = video(1.0).frames().to_f32_vec().into_iter().zip(video(0.0).frames().to_f32_vec());
        let expected: f64 = direction.zip(slope).map(|((a, b), g)| f64::from((a - b) * g)).sum();
        let found = (value(1e-2, Grad::Skip).0 - value(-1e-2, Grad::Skip).0) / 2e-2;
        assert!(expected.abs() > 1e-3 && (found - expected).abs() < 1e-3 * expected.abs(), "{found} {expected}");
    }

    #[test]
    fn gradient_matches_finite_differences_for_every_target() {
        for wanted in [Wanted::More, Wanted::Level(0.2), Wanted::Reference] {
            let mut reward =
                AmountReward::<Sharpness>::new(AmountConfig { wanted, ..AmountConfig::default() }).unwrap();
            agrees_with_differences(&mut reward);
        }
    }

    #[test]
    fn slope_is_not_sharp_and_checkerboard_is() {
        let slope: Vec<f32> = (0..25).map(|i| (i % 5 + i / 5) as f32 / 10.0).collect();
        assert!(Sharpness::measure(&[slope], [5, 5], None).unwrap() < 1e-6);
        let board: Vec<f32> = (0..25).map(|i| (i % 2) as f32).collect();
        assert!((Sharpness::measure(&[board], [5, 5], None).unwrap() - 4.0).abs() < 1e-2);
        assert_eq!(Sharpness::measure(&[vec![0.0; 4]], [2, 2], None), None);
    }
}
