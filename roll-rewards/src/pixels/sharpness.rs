//! How sharp frames are.

use super::amount::register_amount;
use super::{Amount, SMOOTH, Wanted};

/// The root mean square of the Laplacian of the luma (the four neighbours less four times the pixel), a mean over frames.
/// Its square is what is known as the variance of the Laplacian. Noise is sharp too: `wanted: reference` or a level keeps
/// a model from making it.
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

register_amount!(Sharpness, "How sharp frames are: more, less, so much, or as in the reference");

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::pixels::{AmountReward, Config, check};

    #[test]
    fn its_gradient_agrees_with_central_differences_whatever_is_wanted() {
        for wanted in [Wanted::More, Wanted::Level(0.2), Wanted::Reference] {
            check(&mut AmountReward::<Sharpness>::new(Config { wanted, ..Config::default() }).unwrap());
        }
    }

    #[test]
    fn an_even_slope_is_not_sharp_and_a_checkerboard_is() {
        let slope: Vec<f32> = (0..25).map(|i| (i % 5 + i / 5) as f32 / 10.0).collect();
        assert!(Sharpness::measure(&[slope], [5, 5], None).unwrap() < 1e-6);
        let board: Vec<f32> = (0..25).map(|i| (i % 2) as f32).collect();
        assert!((Sharpness::measure(&[board], [5, 5], None).unwrap() - 4.0).abs() < 1e-2);
        assert_eq!(Sharpness::measure(&[vec![0.0; 4]], [2, 2], None), None);
    }
}
