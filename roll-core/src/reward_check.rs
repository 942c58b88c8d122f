//! Does a reward keep its promises? On random inputs, with its pullback against differences.

use std::time::Instant;

use crate::{Error, Grad, Noise, Purpose, Result, RewardScorer, Score, Target, Tensor, Video};

/// Frames, height and width of the videos a reward is tried on.
const SIZES: [[usize; 3]; 3] = [[1, 32, 32], [5, 24, 40], [9, 64, 48]];
/// Directions that the gradient is compared along, per size.
const DIRECTIONS: u64 = 3;
/// Steps of the central differences; the best counts, since frames are f32 and rewards bend.
const STEPS: [f32; 6] = [3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 3e-5];
/// Largest relative error that passes.
const TOLERANCE: f64 = 2e-2;

/// The result of testing one promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the variants are their own documentation
pub enum Verdict {
    Kept,
    Broken,
    NotTried,
}

/// One promise.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The promise, as a sentence.
    pub promise: String,
    /// The result.
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
        let result = Trial::new(scorer, seed, i as u64, size).and_then(|mut trial| trial.run(scorer, &mut findings));
        if let Err(error) = result {
            let promise = format!("it scores videos of {}", dims(size));
            findings.push(finding(&promise, Verdict::Broken, crate::error::one_line(&error)));
            // A reward that panicked is not called again.
            break;
        }
    }
    findings
}

/// A video and its reference.
struct Trial {
    size: [usize; 3],
    noise: Noise,
    sample: u64,
    video: Video,
    target: Target,
}

fn dims([frames, height, width]: [usize; 3]) -> String {
    format!("{frames} x {height} x {width}")
}

/// Frames without edges or sharp noise, within [-0.8, 0.8]: a few random waves per channel.
fn random_video(noise: &Noise, sample: u64, [frames, height, width]: [usize; 3]) -> Result<Video> {
    let mut draw = noise.uniform(Purpose::Synthetic, 0, sample);
    let waves: [[[f32; 5]; 3]; 3] = std::array::from_fn(|_| std::array::from_fn(|_| std::array::from_fn(|_| draw())));
    let mut values = Vec::with_capacity(frames * 3 * height * width);
    for t in 0..frames {
        for channel in &waves {
            for y in 0..height {
                for x in 0..width {
                    let at = [t as f32 / 9.0, y as f32 / height as f32, x as f32 / width as f32];
                    let wave =
                        |[a, b, c, d, e]: &[f32; 5]| a * (6.0 * (b * at[0] + c * at[1] + d * at[2]) + 3.0 * e).sin();
                    values.push(channel.iter().map(wave).sum::<f32>() * 0.8 / 3.0);
                }
            }
        }
    }
    Video::new(Tensor::new(values, [frames, 3, height, width])?, 16.0)
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
        Ok(scorer.score(video, "a prompt", &self.target, Grad::Skip)?.0)
    }

    fn run(&mut self, scorer: &mut dyn RewardScorer, findings: &mut Vec<Finding>) -> Result<()> {
        use Verdict::{Broken, Kept, NotTried};
        let begun = Instant::now();
        let first = self.score(scorer, &self.video)?;
        let seconds = begun.elapsed().as_secs_f64();
        let promise = format!("it scores videos of {}", dims(self.size));
        let value = match &first {
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

        let same = self.score(scorer, &self.video)? == first;
        findings.push(finding("the same video gets the same score", if same { Kept } else { Broken }, ""));

        let (recorded, pullback) = scorer.score(&self.video, "a prompt", &self.target, Grad::Record)?;
        // A pass without gradient may add in another order.
        let apart = match recorded {
            Score::Value { value: recorded, .. } => (recorded - value).abs(),
            _ => f64::INFINITY,
        };
        let same = apart <= 1e-5 * value.abs().max(1e-2);
        findings.push(finding("the score is the same when a gradient is wanted", if same { Kept } else { Broken }, ""));
        let Some(pullback) = pullback else {
            let (verdict, detail) = match scorer.differentiable() {
                true => (Broken, "it calls itself differentiable but gave no pullback"),
                false => (NotTried, "it is not differentiable"),
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
        self.compare(scorer, value, gradient, findings)
    }

    /// The gradient along random directions against central differences of the score.
    fn compare(
        &self,
        scorer: &mut dyn RewardScorer,
        value: f64,
        gradient: &[f32],
        findings: &mut Vec<Finding>,
    ) -> Result<()> {
        let length = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let mut worst = 0.0f64;
        for direction in 0..DIRECTIONS {
            // Towards the gradient, and away from it: along a random direction alone the slope of a video of many
            // pixels drowns in rounding.
            let mut draw = self.noise.uniform(Purpose::Synthetic, 1 + direction, self.sample);
            let along: Vec<f32> = gradient
                .iter()
                .map(|g| draw() + if length > 0.0 { 8.0 * (f64::from(*g) / length) as f32 } else { 0.0 })
                .collect();
            let slope: f64 = gradient.iter().zip(&along).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
            let mut least = f64::INFINITY;
            for step in STEPS {
                let (above, below) = (self.moved(scorer, &along, step)?, self.moved(scorer, &along, -step)?);
                let numeric = (above - below) / (2.0 * f64::from(step));
                // A reward that is flat here has nothing to compare but rounding.
                let scale = slope.abs().max(numeric.abs()).max(1e-6 * (1.0 + value.abs()));
                least = least.min((numeric - slope).abs() / scale);
            }
            worst = worst.max(least);
        }
        let verdict = if worst <= TOLERANCE { Verdict::Kept } else { Verdict::Broken };
        let detail = format!("largest relative error {worst:.1e} along {DIRECTIONS} directions");
        findings.push(finding("its pullback agrees with differences", verdict, detail));
        Ok(())
    }

    fn moved(&self, scorer: &mut dyn RewardScorer, along: &[f32], step: f32) -> Result<f64> {
        let frames = self.video.frames();
        let values = frames.f32s()?.iter().zip(along).map(|(v, d)| v + step * d).collect::<Vec<f32>>();
        match self.score(scorer, &Video::new(Tensor::new(values, frames.shape())?, self.video.fps())?)? {
            Score::Value { value, .. } => Ok(value),
            Score::Missing { reason } => Err(Error::Misuse(format!("nothing to score after a small change: {reason}"))),
        }
    }
}
