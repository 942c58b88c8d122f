//! The reward `brightness` compares the video's brightness with a target. It needs no network and is meant for tests,
//! demonstrations and first trials of a training run.

use roll_core::{Grad, Pullback, Result, RewardScorer, Score, Target, Tensor, Video, keys::check_ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::picture::luma::LUMA;

/// Options of the reward `brightness`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BrightnessConfig {
    /// Target for the mean luma of every frame, 0 (black) to 1 (white).
    #[schemars(range(min = 0, max = 1))]
    pub target: f64,
}

impl Default for BrightnessConfig {
    fn default() -> Self {
        Self { target: 0.5 }
    }
}

/// Minus the squared distance of each frame's mean luma from the target, averaged over the frames. The best score is 0.
#[derive(Clone, Debug)]
pub struct Brightness {
    config: BrightnessConfig,
}

impl Brightness {
    /// Fails unless the target is in [0, 1].
    pub fn new(config: BrightnessConfig) -> Result<Self> {
        check_ranges("reward", &config)?;
        Ok(Self { config })
    }
}

impl RewardScorer for Brightness {
    fn name(&self) -> &str {
        "brightness"
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn reads_reference(&self) -> bool {
        false
    }

    fn computes_on_device(&self) -> bool {
        false
    }

    fn score(&mut self, video: &Video, _: &str, _: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let [frames, height, width] = video.dims();
        let plane = height * width;
        if frames * plane == 0 {
            return Ok((Score::Missing { reason: "the video has no pixels".into() }, None));
        }
        let lumas: Vec<f64> = video.planes().map(mean_luma).collect();
        let target = self.config.target;
        let value = -lumas.iter().map(|luma| (luma - target).powi(2)).sum::<f64>() / frames as f64;
        let luma = lumas.iter().sum::<f64>() / frames as f64;
        let score = Score::Value { value, details: [("luma".to_string(), luma)].into() };
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |cotangent| {
                let cotangent = f64::from(cotangent.item()?);
                let mut gradient = Vec::with_capacity(frames * 3 * plane);
                for luma in lumas {
                    // The derivative of the square has a factor of 2, and that of the luma 1/2, because pixels span 2.
                    let slope = -cotangent * (luma - target) / (frames * plane) as f64;
                    LUMA.iter().for_each(|weight| gradient.extend(std::iter::repeat_n((slope * weight) as f32, plane)));
                }
                Tensor::new(gradient, [frames, 3, height, width])
            })
        });
        Ok((score, pullback))
    }
}

/// Returns the mean luma of a frame, 0 to 1, from its colour planes in [-1, 1].
fn mean_luma(planes: [&[f32]; 3]) -> f64 {
    let means = planes.map(|plane| plane.iter().map(|&v| f64::from(v)).sum::<f64>() / plane.len() as f64);
    means.iter().zip(LUMA).map(|(mean, weight)| (mean + 1.0) / 2.0 * weight).sum()
}

roll_core::register! {
    Reward, "brightness", BrightnessConfig,
    "Distance of each frame's mean luma from a target; needs no files",
    |options, _| Brightness::new(options),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grey(level: f32) -> Video {
        Video::new(Tensor::full([2, 3, 4, 4], level), 8.0).unwrap()
    }

    fn score(video: &Video, grad: Grad) -> (f64, Option<Pullback>) {
        let mut scorer = Brightness::new(BrightnessConfig { target: 0.75 }).unwrap();
        match scorer.score(video, "", &Target::default(), grad).unwrap() {
            (Score::Value { value, .. }, pullback) => (value, pullback),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn target_brightness_scores_highest() {
        assert!(score(&grey(0.5), Grad::Skip).0.abs() < 1e-12);
        assert!((score(&grey(-1.0), Grad::Skip).0 + 0.5625).abs() < 1e-12);
        assert!(Brightness::new(BrightnessConfig { target: 1.5 }).is_err());
        assert!(Brightness::new(BrightnessConfig { target: f64::NAN }).is_err());
    }

    #[test]
    fn gradient_matches_finite_differences() {
        let values: Vec<f32> = (0..96).map(|i| ((i * 29 % 31) as f32) / 31.0 - 0.6).collect();
        let moved = |step: f32| {
            let values = values.iter().enumerate().map(|(i, v)| v + step * ((i * 17 % 13) as f32 - 6.0)).collect();
            Video::new(Tensor::new(values, [2, 3, 4, 4]).unwrap(), 8.0).unwrap()
        };
        let numeric = (score(&moved(0.01), Grad::Skip).0 - score(&moved(-0.01), Grad::Skip).0) / 0.02;
        let gradient = score(&moved(0.0), Grad::Record).1.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
        let gradient = gradient.f32s().unwrap().iter().enumerate();
        let exact: f64 = gradient.map(|(i, g)| f64::from(*g) * ((i * 17 % 13) as f64 - 6.0)).sum();
        assert!((numeric - exact).abs() < 1e-5 * exact.abs().max(1e-3), "{numeric} {exact}");
    }
}
