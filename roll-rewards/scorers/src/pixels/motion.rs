//! The reward `motion`: change of pixels from frame to frame.

use super::amount::register_amount;
use super::{Amount, Wanted, magnitude};

/// Mean magnitude of the change of each pixel's luma (0 to 1) between consecutive frames.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Motion;

impl Amount for Motion {
    const NAME: &'static str = "motion";
    const FRAMES: usize = 2;
    const WANTED: Wanted = Wanted::More;

    fn measure(lumas: &[Vec<f32>], _: [usize; 2], mut gradient: Option<&mut [Vec<f32>]>) -> Option<f64> {
        let count = ((lumas.len() - 1) * lumas[0].len()) as f64;
        let mut sum = 0.0;
        for (t, pair) in lumas.windows(2).enumerate() {
            for (i, (before, after)) in pair[0].iter().zip(&pair[1]).enumerate() {
                let (value, slope) = magnitude(after - before);
                sum += f64::from(value);
                if let Some(gradient) = &mut gradient {
                    let slope = slope / count as f32;
                    gradient[t][i] -= slope;
                    gradient[t + 1][i] += slope;
                }
            }
        }
        Some(sum / count)
    }
}

register_amount!(
    Motion,
    "Change from frame to frame: more of it, less of it, a given level, or that of the reference",
    is_default_check: true
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pixels::{AmountConfig, AmountReward, check};

    #[test]
    fn gradient_matches_finite_differences_for_every_target() {
        for wanted in [Wanted::More, Wanted::Less, Wanted::Level(0.1)] {
            check(&mut AmountReward::<Motion>::new(AmountConfig { wanted, ..AmountConfig::default() }).unwrap());
        }
        assert!(
            AmountReward::<Motion>::new(AmountConfig { wanted: Wanted::Level(0.0), ..AmountConfig::default() })
                .is_err()
        );
    }

    #[test]
    fn motion_is_the_mean_luma_change() {
        let still = vec![vec![0.4; 6]; 3];
        assert_eq!(Motion::measure(&still, [2, 3], None), Some(0.0));
        let jumps = vec![vec![0.4; 6], vec![0.5; 6], vec![0.4; 6]];
        assert!((Motion::measure(&jumps, [2, 3], None).unwrap() - 0.1).abs() < 1e-3);
    }
}
