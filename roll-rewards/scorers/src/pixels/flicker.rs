//! The reward `flicker`: wavering of pixels from frame to frame.

use super::amount::register_amount;
use super::{Amount, Wanted, magnitude};

/// Mean magnitude of half the second difference in time of each pixel's luma, i.e. of the distance from the mean of the
/// previous and the next frame. Even fades have no flicker, and neither has uniform motion where luma changes linearly
/// in space.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flicker;

impl Amount for Flicker {
    const NAME: &'static str = "flicker";
    const FRAMES: usize = 3;
    const WANTED: Wanted = Wanted::Less;

    fn measure(lumas: &[Vec<f32>], _: [usize; 2], mut gradient: Option<&mut [Vec<f32>]>) -> Option<f64> {
        let count = ((lumas.len() - 2) * lumas[0].len()) as f64;
        let mut sum = 0.0;
        for (t, three) in lumas.windows(3).enumerate() {
            let (previous, current, next) = (&three[0], &three[1], &three[2]);
            for i in 0..current.len() {
                let (value, slope) = magnitude(current[i] - (previous[i] + next[i]) / 2.0);
                sum += f64::from(value);
                if let Some(gradient) = &mut gradient {
                    let slope = slope / count as f32;
                    gradient[t][i] -= slope / 2.0;
                    gradient[t + 1][i] += slope;
                    gradient[t + 2][i] -= slope / 2.0;
                }
            }
        }
        Some(sum / count)
    }
}

register_amount!(
    Flicker,
    "Wavering of pixels from frame to frame, apart from a steady change: less of it, unless `wanted` says otherwise"
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pixels::{AmountConfig, AmountReward, check};

    #[test]
    fn gradient_matches_finite_differences() {
        check(&mut AmountReward::<Flicker>::new(AmountConfig::default()).unwrap());
    }

    #[test]
    fn fade_has_no_flicker_and_flash_has() {
        let fade: Vec<Vec<f32>> = (0..4).map(|t| vec![0.1 * t as f32; 4]).collect();
        assert!(Flicker::measure(&fade, [2, 2], None).unwrap() < 1e-6);
        let flash = vec![vec![0.2; 4], vec![0.6; 4], vec![0.2; 4]];
        assert!((Flicker::measure(&flash, [2, 2], None).unwrap() - 0.4).abs() < 1e-3);
    }
}
