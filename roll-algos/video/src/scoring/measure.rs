//! The score of a generated video, with the reward's policy for videos that have nothing to score.

use std::collections::BTreeMap;

use roll_core::{Error, Grad, OnMissing, Progress, Pullback, Result, RewardScorer, Sample, Score, Tensor, Video};
use roll_step::AlgorithmError;

use super::prepared::PreparedTarget;

use crate::VideoError;

/// The score of a video, or the reason why it has none.
pub(crate) enum Measured {
    Score {
        value: f64,
        details: BTreeMap<String, f64>,
        /// `None` if it was not requested, or if the score is the constant of [`OnMissing::Value`].
        pullback: Option<Pullback>,
    },
    /// No score, with the reason. The sample is left out.
    Skipped(String),
}

impl Measured {
    /// Scores a generated video.
    pub(crate) fn of(
        video: &Video,
        sample: &Sample,
        target: &PreparedTarget,
        reward: &mut dyn RewardScorer,
        grad: Grad,
    ) -> Result<Self> {
        let target = match target {
            PreparedTarget::Target(target) => target,
            PreparedTarget::Missing(reason) => return Self::missing(sample, reward, reason.clone()),
        };
        let (score, pullback) = reward.score(video, &sample.prompt, target, grad)?;
        match (score.finite_or_missing(reward.name()), pullback) {
            (Score::Value { value, details }, pullback) => {
                if grad.is_on() && pullback.is_none() {
                    return Err(AlgorithmError::NoPullback { what: format!("`{}`", reward.name()) }.into());
                }
                Ok(Self::Score { value, details, pullback })
            }
            (Score::Missing { reason }, _) => Self::missing(sample, reward, reason),
        }
    }

    /// Scores the videos of a sample together, by a reward that compares them with one another.
    pub(crate) fn of_group(
        videos: &[Video],
        sample: &Sample,
        target: &PreparedTarget,
        reward: &mut dyn RewardScorer,
        progress: &dyn Progress,
    ) -> Result<Vec<Self>> {
        let scores = match target {
            PreparedTarget::Target(target) => reward.score_group(videos, &sample.prompt, target, progress)?,
            PreparedTarget::Missing(reason) => vec![Score::Missing { reason: reason.clone() }; videos.len()],
        };
        if scores.len() != videos.len() {
            let (name, found, expected) = (reward.name(), scores.len(), videos.len());
            return Err(Error::Misuse(format!("the reward `{name}` returned {found} scores of {expected} videos")));
        }
        let measured = scores.into_iter().map(|score| match score.finite_or_missing(reward.name()) {
            Score::Value { value, details } => Ok(Self::Score { value, details, pullback: None }),
            Score::Missing { reason } => Self::missing(sample, reward, reason),
        });
        measured.collect()
    }

    /// Applies the reward's policy for missing scores to a sample with nothing to score.
    pub(crate) fn missing(sample: &Sample, reward: &dyn RewardScorer, reason: String) -> Result<Self> {
        match reward.on_missing() {
            OnMissing::Skip => Ok(Self::Skipped(reason)),
            OnMissing::Value(value) => Ok(Self::Score { value, details: BTreeMap::new(), pullback: None }),
            OnMissing::Error => {
                let (sample, reward) = (sample.origin.clone(), reward.name().to_string());
                Err(VideoError::NothingToScore { sample, reward, reason }.into())
            }
        }
    }
}

/// Pulls `d_score`, d loss / d score, back through the reward and the decoder. Returns the cotangent of the latents.
pub(crate) fn pull_frames(pull_score: Pullback, pull_decode: Option<Pullback>, d_score: f64) -> Result<Tensor> {
    let d_frames = pull_score.pull(&Tensor::scalar(d_score as f32))?;
    pull_decode.ok_or_else(|| AlgorithmError::NoPullback { what: "the decoder".into() })?.pull(&d_frames)
}
