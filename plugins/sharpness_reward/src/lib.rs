//! A differentiable reward in a library of its own: how much neighbouring pixels differ.
//!
//! With `m` the mean of `(x[y, x + 1] - x[y, x])^2` and `(x[y + 1, x] - x[y, x])^2` over all frames and channels, the
//! score is `1 - exp(-m / scale)`: 0 for one colour, towards 1 for noise.

use roll_plugin::serde::{Deserialize, Serialize};
use roll_plugin::{Grad, Pullback, Result, RewardScorer, Score, Target, Tensor, Video};

/// The reward; its fields are its options.
#[derive(Serialize, Deserialize)]
#[serde(crate = "roll_plugin::serde", default)]
pub struct Sharpness {
    /// Mean squared difference (of pixels in [-1, 1]) that scores 0.63.
    pub scale: f64,
}

impl Default for Sharpness {
    fn default() -> Self {
        Self { scale: 0.05 }
    }
}

roll_plugin::export_reward!("edges", "How much neighbouring pixels differ; needs no files", Sharpness);

impl RewardScorer for Sharpness {
    fn name(&self) -> &str {
        "edges"
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn reads_reference(&self) -> bool {
        false
    }

    fn score(&mut self, video: &Video, _: &str, _: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let [_, height, width] = video.dims();
        let pairs = pairs(video);
        if pairs == 0.0 {
            return Ok((Score::Missing { reason: "the frames have no neighbouring pixels".into() }, None));
        }
        let mut sum = 0.0;
        for plane in video.planes().flatten() {
            neighbours(height, width, |a, b| sum += f64::from(plane[b] - plane[a]).powi(2));
        }
        let rest = (-sum / pairs / self.scale).exp();
        let (video, slope) = (video.clone(), rest / self.scale * 2.0 / pairs);
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |cotangent| {
                let slope = f64::from(cotangent.item()?) * slope;
                let mut gradient = vec![0.0f32; video.frames().len()];
                for (plane, out) in video.planes().flatten().zip(gradient.chunks_exact_mut(height * width)) {
                    neighbours(height, width, |a, b| {
                        let pull = (slope * f64::from(plane[b] - plane[a])) as f32;
                        out[b] += pull;
                        out[a] -= pull;
                    });
                }
                Tensor::new(gradient, video.frames().shape())
            })
        });
        Ok((Score::of(1.0 - rest), pullback))
    }
}

/// Calls `visit` with the indices of every pixel and its right and lower neighbour.
fn neighbours(height: usize, width: usize, mut visit: impl FnMut(usize, usize)) {
    for y in 0..height {
        for x in 0..width {
            let at = y * width + x;
            if x + 1 < width {
                visit(at, at + 1);
            }
            if y + 1 < height {
                visit(at, at + width);
            }
        }
    }
}

/// Number of such pairs in all frames and channels.
fn pairs(video: &Video) -> f64 {
    let [frames, height, width] = video.dims();
    let in_plane = height * width.saturating_sub(1) + height.saturating_sub(1) * width;
    (frames * 3 * in_plane) as f64
}
