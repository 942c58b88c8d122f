//! A reward without a gradient in a library of its own: how much the colours are those of the reference.
//!
//! The frames' pixels are counted in `bins^3` boxes of the RGB cube; the score is the overlap of the two histograms, 0
//! to 1. Counting has no useful slope, so the reward serves measuring (`roll score`, `evaluation.check`) and algorithms
//! that need no gradient.

use roll_plugin::serde::{Deserialize, Serialize};
use roll_plugin::{Error, Grad, Pullback, Result, RewardScorer, Score, Target, Tensor, Video};

/// Options of the reward.
#[derive(Serialize, Deserialize)]
#[serde(crate = "roll_plugin::serde", default)]
pub struct Options {
    /// Boxes along each axis of the RGB cube, 2 to 32.
    pub bins: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { bins: 8 }
    }
}

/// Overlap of colour histograms.
pub struct Colors {
    bins: usize,
}

impl Colors {
    /// Fails when the number of boxes makes no sense.
    pub fn new(options: Options) -> Result<Self> {
        match (2..=32).contains(&options.bins) {
            true => Ok(Self { bins: options.bins }),
            false => Err(Error::config("reward.bins", format!("expected 2 to 32, found {}", options.bins))),
        }
    }

    /// Share of pixels in each box.
    fn histogram(&self, video: &Video) -> Vec<f32> {
        let [frames, height, width] = video.dims();
        let mut counts = vec![0u64; self.bins.pow(3)];
        let bin = |value: f32| (((value + 1.0) / 2.0 * self.bins as f32) as usize).min(self.bins - 1);
        for [red, green, blue] in video.planes() {
            for ((r, g), b) in red.iter().zip(green).zip(blue) {
                counts[(bin(*r) * self.bins + bin(*g)) * self.bins + bin(*b)] += 1;
            }
        }
        let total = (frames * height * width).max(1) as f64;
        counts.into_iter().map(|n| (n as f64 / total) as f32).collect()
    }
}

roll_plugin::export_reward!("colors", "Overlap of colour histograms with the reference", Options, |options, _| {
    Colors::new(options)
});

impl RewardScorer for Colors {
    fn name(&self) -> &str {
        "colors"
    }

    fn differentiable(&self) -> bool {
        false
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        let histogram = Tensor::new(self.histogram(reference), [self.bins.pow(3)])?;
        Ok(Target::of([("histogram".to_string(), histogram)].into()))
    }

    fn score(&mut self, video: &Video, _: &str, target: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
        let missing = || Error::Misuse("the target holds no histogram: it is another reward's".into());
        let wanted = target.tensors.get("histogram").ok_or_else(missing)?.f32s()?;
        let found = self.histogram(video);
        let overlap = wanted.iter().zip(&found).map(|(a, b)| f64::from(a.min(*b))).sum();
        Ok((Score::of(overlap), None))
    }
}
