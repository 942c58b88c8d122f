//! Checks that a reward keeps the promises of [`RewardScorer`] on random videos: it scores videos of several sizes,
//! scores the same video the same, and has a pullback that agrees with finite differences of the score.

use std::time::Instant;

use crate::{Error, Grad, Noise, Purpose, Result, RewardScorer, Score, Target, Tensor, Video};

/// Frames, height and width of the videos a reward is tried on.
const SIZES: [[usize; 3]; 3] = [[1, 32, 32], [5, 24, 40], [9, 64, 48]];
/// Number of directions in which slopes are compared, per size.
const DIRECTIONS: u64 = 3;
/// Step sizes of the central differences. The one that agrees best counts: small steps suffer from the rounding of f32
/// frames, large ones from the curvature of the reward.
const STEPS: [f32; 6] = [3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 3e-5];
/// Largest relative error of a slope that passes.
const TOLERANCE: f64 = 2e-2;
/// Largest difference that passes between scores with and without gradient, relative to the score. A pass without
/// gradient may add in another order.
const SCORE_TOLERANCE: f64 = 1e-5;
/// Scores below this are compared as if they were this large.
const LEAST_SCORE: f64 = 1e-2;
/// Length along the unit gradient that is added to the noise of a direction. With noise alone, the slope of a video of
/// many pixels would drown in rounding.
const ALONG_GRADIENT: f32 = 8.0;
/// Errors are measured relative to the slope, or to this fraction of the score if the slope is smaller. Where a reward
/// is flat, differences of scores are rounding errors.
const LEAST_SLOPE: f64 = 1e-6;
/// Frame rate of the videos.
const FPS: f64 = 16.0;
/// The prompt of the videos.
const PROMPT: &str = "a prompt";

/// Whether a reward keeps a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the variants are their own documentation
pub enum Verdict {
    Kept,
    Broken,
    NotTried,
}

/// The result of testing one promise.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The promise, as a sentence.
    pub promise: String,
    /// Whether the reward keeps it.
    pub verdict: Verdict,
    /// The measurement, or the failure.
    pub detail: String,
}

fn finding(promise: &str, verdict: Verdict, detail: impl Into<String>) -> Finding {
    Finding { promise: promise.into(), verdict, detail: detail.into() }
}

/// Tries a reward on random videos; the same `seed` yields the same videos.
pub fn check_reward(scorer: &mut dyn RewardScorer, seed: u64) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (i, size) in SIZES.into_iter().enumerate() {
        let result = Trial::new(scorer, seed, i as u64, size).and_then(|trial| trial.run(scorer, &mut findings));
        if let Err(error) = result {
            let promise = format!("it scores videos of {}", dims(size));
            findings.push(finding(&promise, Verdict::Broken, crate::error::one_line(&error)));
            // A reward that panicked is not called again.
            break;
        }
    }
    findings
}

/// A random video, and the target that the reward prepared from a random reference of the same size.
struct Trial {
    /// Frames, height and width.
    size: [usize; 3],
    noise: Noise,
    /// Key of the trial's random draws.
    sample: u64,
    video: Video,
    target: Target,
}

fn dims([frames, height, width]: [usize; 3]) -> String {
    format!("{frames} x {height} x {width}")
}

/// Frames without edges or sharp noise, within [-0.8, 0.8]: each channel is the mean of three plane waves.
fn random_video(noise: &Noise, sample: u64, [frames, height, width]: [usize; 3]) -> Result<Video> {
    /// Frames of the longest of [`SIZES`].
    const MAX_FRAMES: f32 = 9.0;
    const MAX_VALUE: f32 = 0.8;
    /// Waves per channel.
    const WAVES: usize = 3;
    let mut draw = noise.uniform(Purpose::Synthetic, 0, sample);
    // For each wave of the three channels: amplitude, frequencies in time, height and width, and phase.
    let waves: [[[f32; 5]; WAVES]; 3] =
        std::array::from_fn(|_| std::array::from_fn(|_| std::array::from_fn(|_| draw())));
    let mut values = Vec::with_capacity(frames * 3 * height * width);
    for frame in 0..frames {
        for channel in &waves {
            for row in 0..height {
                for column in 0..width {
                    let t = frame as f32 / MAX_FRAMES;
                    let [y, x] = [row as f32 / height as f32, column as f32 / width as f32];
                    // At most about one period along each axis, and any phase.
                    let wave = |[amplitude, in_t, in_y, in_x, phase]: &[f32; 5]| {
                        amplitude * (6.0 * (in_t * t + in_y * y + in_x * x) + 3.0 * phase).sin()
                    };
                    values.push(channel.iter().map(wave).sum::<f32>() * MAX_VALUE / WAVES as f32);
                }
            }
        }
    }
    Video::new(Tensor::new(values, [frames, 3, height, width])?, FPS)
}

impl Trial {
    fn new(scorer: &mut dyn RewardScorer, seed: u64, sample: u64, size: [usize; 3]) -> Result<Self> {
        let noise = Noise::new(seed);
        let reference = random_video(&noise, 2 * sample, size)?;
        let video = random_video(&noise, 2 * sample + 1, size)?;
        let target = scorer.prepare(&reference)?;
        Ok(Self { size, noise, sample, video, target })
    }

    fn score(&self, scorer: &mut dyn RewardScorer, video: &Video) -> Result<Score> {
        Ok(scorer.score(video, PROMPT, &self.target, Grad::Skip)?.0)
    }

    /// Tests all promises on this trial's video and appends the findings. Stops where a broken promise makes further
    /// tests pointless. Fails if a call of the reward fails.
    fn run(&self, scorer: &mut dyn RewardScorer, findings: &mut Vec<Finding>) -> Result<()> {
        use Verdict::{Broken, Kept, NotTried};
        let start = Instant::now();
        let first_score = self.score(scorer, &self.video)?;
        let seconds = start.elapsed().as_secs_f64();
        let promise = format!("it scores videos of {}", dims(self.size));
        let value = match &first_score {
            Score::Missing { reason } => {
                findings.push(finding(&promise, NotTried, format!("nothing to score: {reason}")));
                return Ok(());
            }
            Score::Value { value, .. } if value.is_finite() => {
                findings.push(finding(&promise, Kept, format!("{value:.6} in {:.2} ms", 1e3 * seconds)));
                *value
            }
            Score::Value { value, .. } => {
                findings.push(finding(&promise, Broken, format!("the score is {value}")));
                return Ok(());
            }
        };

        let is_repeated = self.score(scorer, &self.video)? == first_score;
        findings.push(finding("the same video gets the same score", if is_repeated { Kept } else { Broken }, ""));
        self.check_pullback(scorer, value, findings)
    }

    /// Tests the promises on scores with a gradient. `value` is the score without one.
    fn check_pullback(&self, scorer: &mut dyn RewardScorer, value: f64, findings: &mut Vec<Finding>) -> Result<()> {
        use Verdict::{Broken, Kept, NotTried};

        let (recorded_score, pullback) = scorer.score(&self.video, PROMPT, &self.target, Grad::Record)?;
        let difference = match recorded_score {
            Score::Value { value: recorded, .. } => (recorded - value).abs(),
            Score::Missing { .. } => f64::INFINITY,
        };
        let agrees = difference <= SCORE_TOLERANCE * value.abs().max(LEAST_SCORE);
        let verdict = if agrees { Kept } else { Broken };
        findings.push(finding("the score is the same when a gradient is wanted", verdict, ""));
        let Some(pullback) = pullback else {
            let (verdict, detail) = if scorer.differentiable() {
                (Broken, "it calls itself differentiable but gave no pullback")
            } else {
                (NotTried, "it is not differentiable")
            };
            findings.push(finding("its pullback agrees with differences", verdict, detail));
            return Ok(());
        };
        let gradient = pullback.pull(&Tensor::scalar(1.0))?;
        let shape = self.video.frames().shape();
        if gradient.shape() != shape {
            return Err(Error::shape("the gradient", format!("{shape:?}"), gradient.shape()));
        }
        let gradient = gradient.f32s()?;
        if let Some(bad) = gradient.iter().find(|v| !v.is_finite()) {
            findings.push(finding("its gradient is finite", Broken, format!("it holds {bad}")));
            return Ok(());
        }
        self.compare_slopes(scorer, value, gradient, findings)
    }

    /// Compares slopes in several directions: the product of gradient and direction with central differences of the
    /// score.
    fn compare_slopes(
        &self,
        scorer: &mut dyn RewardScorer,
        value: f64,
        gradient: &[f32],
        findings: &mut Vec<Finding>,
    ) -> Result<()> {
        let gradient_norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let mut largest_error = 0.0f64;
        for number in 0..DIRECTIONS {
            // Noise plus a multiple of the unit gradient.
            let mut draw = self.noise.uniform(Purpose::Synthetic, 1 + number, self.sample);
            let along_gradient = |g: f32| match gradient_norm > 0.0 {
                true => ALONG_GRADIENT * (f64::from(g) / gradient_norm) as f32,
                false => 0.0,
            };
            let direction: Vec<f32> = gradient.iter().map(|g| draw() + along_gradient(*g)).collect();
            let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
            let mut smallest_error = f64::INFINITY;
            for step in STEPS {
                let above = self.score_moved(scorer, &direction, step)?;
                let below = self.score_moved(scorer, &direction, -step)?;
                let numeric_slope = (above - below) / (2.0 * f64::from(step));
                let scale = slope.abs().max(numeric_slope.abs()).max(LEAST_SLOPE * (1.0 + value.abs()));
                smallest_error = smallest_error.min((numeric_slope - slope).abs() / scale);
            }
            largest_error = largest_error.max(smallest_error);
        }
        let verdict = if largest_error <= TOLERANCE { Verdict::Kept } else { Verdict::Broken };
        let detail = format!("largest relative error {largest_error:.1e} along {DIRECTIONS} directions");
        findings.push(finding("its pullback agrees with differences", verdict, detail));
        Ok(())
    }

    /// The score of the video plus `step * direction`. Fails if there is nothing to score.
    fn score_moved(&self, scorer: &mut dyn RewardScorer, direction: &[f32], step: f32) -> Result<f64> {
        let frames = self.video.frames();
        let values = frames.f32s()?.iter().zip(direction).map(|(v, d)| v + step * d).collect::<Vec<f32>>();
        match self.score(scorer, &Video::new(Tensor::new(values, frames.shape())?, self.video.fps())?)? {
            Score::Value { value, .. } => Ok(value),
            Score::Missing { reason } => Err(Error::Misuse(format!("nothing to score after a small change: {reason}"))),
        }
    }
}
