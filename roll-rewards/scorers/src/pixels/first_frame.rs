//! The reward `first_frame`: similarity of frames to the reference picture.

use rayon::prelude::*;
use roll_core::{
    BuildContext, Error, Grad, Measure, OnMissing, Pullback, Result, RewardScorer, Score, Target, Tensor, Video,
};
use roll_external::Fingerprint;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{magnitude, ssim::ssim};
use crate::RewardError;
use crate::onnx_reward::{self, Measurement, OnnxReward};
use crate::picture::{Filter, Frames, Input, Resize};

const NAME: &str = "first_frame";
/// Name of the target's tensor: the reference's first frame, f32 `[3, H, W]` in [-1, 1].
const PICTURE: &str = "picture";

/// Options of the reward `first_frame`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FirstFrameConfig {
    /// How frames are compared with the reference's first frame: `l1`, `ssim` or `perceptual`.
    pub measure: Likeness,
    /// Which frames are compared.
    pub frames: Frames,
    /// ONNX file of the network whose outputs `perceptual` compares.
    pub file: String,
    /// How frames become the input of this network.
    pub input: Input,
    /// Name of the output that `perceptual` compares. If absent, the first output.
    pub output: Option<String>,
    /// Handling of a video that has no frame to score.
    pub on_missing: OnMissing,
}

impl Default for FirstFrameConfig {
    fn default() -> Self {
        Self {
            measure: Likeness::Ssim,
            frames: Frames::First,
            file: String::new(),
            input: Input::default(),
            output: None,
            on_missing: OnMissing::Skip,
        }
    }
}

/// How a frame is compared with the picture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Likeness {
    /// Minus the mean absolute difference of pixels, whose values are scaled to 0 to 1.
    L1,
    /// Structural similarity per channel, at most 1.
    #[default]
    Ssim,
    /// Minus the root mean square difference between a network's outputs for frame and picture.
    Perceptual,
}

/// The similarity of frames to the reference's first frame.
#[derive(Debug)]
pub struct FirstFrame {
    config: FirstFrameConfig,
    /// The network of [`Likeness::Perceptual`].
    network: Option<OnnxReward>,
}

impl FirstFrame {
    /// Creates the reward, and opens the network of [`Likeness::Perceptual`].
    pub fn new(config: FirstFrameConfig, context: &BuildContext) -> Result<Self> {
        config.frames.check()?;
        let network = match config.measure {
            Likeness::Perceptual => {
                let options = onnx_reward::OnnxConfig {
                    file: config.file.clone(),
                    frames: config.frames,
                    input: config.input.clone(),
                    output: config.output.clone(),
                    score: Measurement::Distance,
                    ..Default::default()
                };
                options.check()?;
                let device = roll_backends::device(&context.backend)?;
                Some(OnnxReward::open(options, &context.resolve(&config.file), &device)?)
            }
            _ if config.file.is_empty() => None,
            _ => return Err(Error::config("reward.file", "goes with `measure: perceptual`")),
        };
        Ok(Self { config, network })
    }
}

impl RewardScorer for FirstFrame {
    fn name(&self) -> &str {
        NAME
    }

    fn measures(&self) -> Measure {
        Measure::new("first frame")
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        let [frames, height, width] = reference.dims();
        if frames * height * width == 0 {
            return Err(Error::nothing_to_score("the reference has no frames"));
        }
        let picture = Tensor::new(reference.frame(0).to_vec(), [3, height, width])?;
        match &mut self.network {
            Some(network) => network.prepare(&Video::new(picture.reshape([1, 3, height, width])?, reference.fps())?),
            None => Ok(Target::of([(PICTURE.to_string(), picture)].into())),
        }
    }

    fn computes_on_device(&self) -> bool {
        self.network.is_some()
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        if let Some(network) = &mut self.network {
            return network.score(video, prompt, target, grad);
        }
        let bad_target = || RewardError::InvalidTarget { reward: NAME.into(), tensor: PICTURE.into() };
        let picture = target.tensors.get(PICTURE).ok_or_else(bad_target)?;
        let [3, rows, columns] = *picture.shape() else { return Err(bad_target().into()) };
        let [count, height, width] = video.dims();
        let frames = self.config.frames.of(count);
        if frames.is_empty() || height * width == 0 {
            return Ok((Score::Missing { reason: "the video has no pixels".into() }, None));
        }
        let picture = if [rows, columns] == [height, width] {
            picture.to_f32_vec()
        } else {
            Resize::new([rows, columns], [height, width], Filter::Bilinear).forward(picture.f32s()?)
        };
        let measure = self.config.measure;
        let compare = |&t: &usize| similarity(measure, video.frame(t), &picture, [height, width]);
        let compared: Vec<(f64, Vec<f32>)> = frames.par_iter().map(compare).collect();
        let value = compared.iter().map(|(value, _)| value).sum::<f64>() / frames.len() as f64;
        let shape = video.frames().shape().to_vec();
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |cotangent| {
                let scale = cotangent.item()? / frames.len() as f32;
                let mut gradient = vec![0.0; shape.iter().product()];
                for (t, (_, slopes)) in frames.iter().zip(&compared) {
                    let frame = &mut gradient[t * slopes.len()..][..slopes.len()];
                    frame.iter_mut().zip(slopes).for_each(|(g, slope)| *g += scale * slope);
                }
                Tensor::new(gradient, shape)
            })
        });
        Ok((Score::of(value), pullback))
    }

    fn target_key(&self) -> Result<Option<String>> {
        match &self.network {
            Some(network) => {
                let network_key = network.target_key()?;
                Ok(network_key.map(|key| Fingerprint::new(NAME).text("network", key).finish()))
            }
            None => Ok(Some(Fingerprint::new(NAME).finish())),
        }
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

/// The similarity of `frame` and `picture`, both `[3, H, W]` in [-1, 1], and its gradient with respect to the frame.
fn similarity(measure: Likeness, frame: &[f32], picture: &[f32], dims: [usize; 2]) -> (f64, Vec<f32>) {
    if measure == Likeness::L1 {
        let count = frame.len() as f64;
        let magnitudes = || frame.iter().zip(picture).map(|(f, p)| magnitude((f - p) / 2.0));
        let value = -magnitudes().map(|(value, _)| f64::from(value)).sum::<f64>() / count;
        return (value, magnitudes().map(|(_, slope)| -slope / (2.0 * count) as f32).collect());
    }
    let to_unit_range = |plane: &[f32]| plane.iter().map(|v| (v + 1.0) / 2.0).collect::<Vec<f32>>();
    let plane = dims[0] * dims[1];
    let (mut value, mut gradient) = (0.0, Vec::with_capacity(frame.len()));
    for (x, y) in frame.chunks_exact(plane).zip(picture.chunks_exact(plane)) {
        let (channel_value, slope) = ssim(&to_unit_range(x), &to_unit_range(y), dims);
        // The mean over three channels. The unit range halves the slope.
        value += channel_value / 3.0;
        gradient.extend(slope.iter().map(|g| g / 6.0));
    }
    (value, gradient)
}

roll_core::register! {
    Reward, NAME, FirstFrameConfig,
    "Likeness of the first frame to the reference's: L1, SSIM, or features of any ONNX network",
    FirstFrame::new,
    is_default_check: true,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pixels::check;

    fn reward(measure: Likeness, frames: Frames) -> FirstFrame {
        let context = BuildContext::new("flex");
        FirstFrame::new(FirstFrameConfig { measure, frames, ..FirstFrameConfig::default() }, &context).unwrap()
    }

    fn video(frames: usize, level: f32) -> Video {
        let values = (0..frames * 3 * 12 * 14).map(|i| level + (i % 7) as f32 / 20.0).collect();
        Video::new(Tensor::new(values, [frames, 3, 12, 14]).unwrap(), 8.0).unwrap()
    }

    #[test]
    fn gradient_matches_finite_differences() {
        for measure in [Likeness::L1, Likeness::Ssim] {
            check(&mut reward(measure, Frames::First));
            check(&mut reward(measure, Frames::Every(2)));
        }
    }

    #[test]
    fn reference_itself_scores_highest_at_any_size() {
        for (measure, best) in [(Likeness::L1, 0.0), (Likeness::Ssim, 1.0)] {
            let mut reward = reward(measure, Frames::First);
            let target = reward.prepare(&video(1, 0.0)).unwrap();
            let mut of = |video: &Video| match reward.score(video, "", &target, Grad::Skip).unwrap().0 {
                Score::Value { value, .. } => value,
                Score::Missing { reason } => panic!("{reason}"),
            };
            assert!((of(&video(3, 0.0)) - best).abs() < 1e-5);
            assert!(of(&video(3, 0.2)) < best - 1e-3);
            let large = Video::new(Tensor::full([1, 3, 24, 28], 0.1), 8.0).unwrap();
            assert!(of(&large) < best);
        }
    }

    #[test]
    fn rejects_file_without_perceptual() {
        let context = BuildContext::new("flex");
        let config = FirstFrameConfig { file: "a.onnx".into(), ..FirstFrameConfig::default() };
        assert!(FirstFrame::new(config, &context).unwrap_err().to_string().contains("reward.file"));
    }
}
