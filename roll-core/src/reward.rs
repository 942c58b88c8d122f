//! Rewards: how good a video is.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Columns, Grad, Progress, Pullback, Result, Tensor, Video};

/// The facts about a sample that a reward scores against, besides the prompt. The default is empty.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Target {
    /// The result of [`RewardScorer::prepare`], computed from the reference once per sample: tensors whose names and
    /// meaning the scorer chooses. They are cached, and sent to scorers in other processes.
    pub tensors: BTreeMap<String, Tensor>,
    /// The columns of the sample's row. [`RewardScorer::prepare`] leaves them empty, and the algorithm sets them.
    #[serde(with = "crate::carried::shared")]
    pub columns: Columns,
}

impl Target {
    /// A target without columns.
    pub fn of(tensors: BTreeMap<String, Tensor>) -> Self {
        Self { tensors, columns: Columns::default() }
    }
}

/// The outcome of scoring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ScoreText", into = "ScoreText")]
pub enum Score {
    /// There was something to score.
    Value {
        /// Higher is better. Algorithms count a value that is not finite as nothing to score.
        value: f64,
        /// Numbers worth logging, by name: parts of a sum, frames with a face.
        details: BTreeMap<String, f64>,
    },
    /// There was nothing to score (no face in any frame). It is never silently scored 0: the scorer's `on_missing`
    /// decides.
    Missing {
        /// The reason, for logs.
        reason: String,
    },
}

/// A score as it is written: `{"value": 0.5, "details": {}}`, or `{"missing": "no face"}`.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct ScoreText {
    #[serde(with = "crate::number", skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
    #[serde(with = "crate::number", skip_serializing_if = "BTreeMap::is_empty")]
    details: BTreeMap<String, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<String>,
}

impl TryFrom<ScoreText> for Score {
    type Error = &'static str;
    fn try_from(text: ScoreText) -> Result<Self, Self::Error> {
        match (text.value, text.missing) {
            (Some(value), None) => Ok(Self::Value { value, details: text.details }),
            (None, Some(reason)) => Ok(Self::Missing { reason }),
            _ => Err("a score has either a `value`, or in `missing` the reason why there is none"),
        }
    }
}

impl From<Score> for ScoreText {
    fn from(score: Score) -> Self {
        match score {
            Score::Value { value, details } => Self { value: Some(value), details, missing: None },
            Score::Missing { reason } => Self { missing: Some(reason), ..Self::default() },
        }
    }
}

impl Score {
    /// A score without details.
    pub fn of(value: f64) -> Self {
        Self::Value { value, details: BTreeMap::new() }
    }

    /// The score as algorithms count it: a value that is not finite becomes [`Score::Missing`], with a warning that
    /// names `reward`.
    #[must_use]
    pub fn finite_or_missing(self, reward: &str) -> Self {
        match self {
            Self::Value { value, .. } if !value.is_finite() => {
                tracing::warn!(reward, "the score is {value}: it counts as nothing to score (`reward.on_missing`)");
                Self::Missing { reason: format!("the score is {value}") }
            }
            other => other,
        }
    }

    /// The value, if there is one.
    pub fn value(&self) -> Option<f64> {
        match self {
            Self::Value { value, .. } => Some(*value),
            Self::Missing { .. } => None,
        }
    }
}

/// Reaction to a sample with nothing to score, or with a score that is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnMissing {
    /// Leave the sample out of the update, count it and log it.
    #[default]
    Skip,
    /// Stop the run.
    Error,
    /// Score it as this value, without gradient.
    Value(f64),
}

/// The quantity that a reward measures, for labels, file names and metrics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measure {
    /// A noun in lower case: `identity`, `sharpness`.
    pub label: String,
    /// A second name under which the score is logged besides `actor/score`, such as ROLL's name `actor/face_score`.
    pub alias: Option<String>,
}

impl Measure {
    /// The label of rewards without a more specific one.
    pub const SCORE: &str = "score";

    /// A measure without a second name.
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: label.into(), alias: None }
    }
}

impl Default for Measure {
    fn default() -> Self {
        Self::new(Self::SCORE)
    }
}

/// Scores videos against a reference.
///
/// ```
/// use roll_core::{Grad, Pullback, Result, RewardScorer, Score, Target, Tensor, Video};
///
/// /// Minus the mean square of the difference to the reference's mean value.
/// struct Likeness;
///
/// impl RewardScorer for Likeness {
///     fn name(&self) -> &str {
///         "likeness"
///     }
///     fn differentiable(&self) -> bool {
///         true
///     }
///     fn prepare(&mut self, reference: &Video) -> Result<Target> {
///         let values = reference.frames().f32s()?;
///         let mean = values.iter().sum::<f32>() / values.len() as f32;
///         Ok(Target::of([("mean".to_string(), Tensor::scalar(mean))].into()))
///     }
///     fn score(&mut self, video: &Video, _: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
///         let (x, mean) = (video.frames().clone(), target.tensors["mean"].item()?);
///         let n = x.len() as f32;
///         let value = -x.f32s()?.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n;
///         let pull = move |d: &Tensor| {
///             let slope = -2.0 * d.item()? / n;
///             Tensor::new(x.f32s()?.iter().map(|x| slope * (x - mean)).collect(), x.shape())
///         };
///         Ok((Score::of(f64::from(value)), grad.is_on().then(|| Pullback::new(pull))))
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let grey = |level: f32| Video::new(Tensor::full([1, 3, 2, 2], level), 16.0);
/// let target = Likeness.prepare(&grey(0.5)?)?;
/// let (score, pullback) = Likeness.score(&grey(0.0)?, "", &target, Grad::Record)?;
/// assert_eq!(score, Score::of(-0.25));
///
/// let gradient = pullback.expect("it was recorded").pull(&Tensor::scalar(1.0))?;
/// assert!(gradient.f32s()?.iter().all(|slope| *slope > 0.0), "brighter frames would score higher");
/// # Ok(())
/// # }
/// ```
pub trait RewardScorer: Send {
    /// Name for logs and messages.
    fn name(&self) -> &str;

    /// The quantity that the reward measures.
    fn measures(&self) -> Measure {
        Measure::default()
    }

    /// Whether [`RewardScorer::score`] can return a pullback.
    fn differentiable(&self) -> bool;

    /// Computes the part of the score that depends on the reference alone. Fails with [`crate::Error::NothingToScore`]
    /// when the reference holds nothing to compare with (no face in it): that is the fault of one sample, and
    /// [`RewardScorer::on_missing`] chooses the reaction. Any other error ends the run.
    ///
    /// The default returns an empty target, for rewards that do not look at the reference.
    fn prepare(&mut self, _reference: &Video) -> Result<Target> {
        Ok(Target::default())
    }

    /// Whether [`RewardScorer::prepare`] looks at the reference, which a row without a clip lacks. If true, a run on
    /// such rows is refused before it starts. If false, such rows have an empty target, and `prepare` is not called for
    /// them.
    fn reads_reference(&self) -> bool {
        true
    }

    /// Scores `video`. With [`Grad::Record`], and when there is a value, the pullback takes the cotangent of the score
    /// (scalar) and returns that of the frames (`[T, 3, H, W]`).
    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)>;

    /// Whether a score is the result of comparing the videos of one prompt. If true, [`RewardScorer::score_group`]
    /// scores training videos, [`RewardScorer::score`] returns [`Score::Missing`], and evaluations leave the reward
    /// out.
    fn compares(&self) -> bool {
        false
    }

    /// Scores the videos of one prompt, in their order. A reward that waits for people reports a phase to `progress`,
    /// and returns [`crate::Error::Interrupted`] once [`Progress::interrupted`] is true.
    ///
    /// The default scores each video by itself.
    fn score_group(
        &mut self,
        videos: &[Video],
        prompt: &str,
        target: &Target,
        _progress: &dyn Progress,
    ) -> Result<Vec<Score>> {
        videos.iter().map(|video| Ok(self.score(video, prompt, target, Grad::Skip)?.0)).collect()
    }

    /// The terms of a reward that is a weighted sum of rewards: the name of the term's score among the details of
    /// [`Score::Value`], and its weight. Empty if this reward is not a sum.
    fn terms(&self) -> Vec<(String, f64)> {
        Vec::new()
    }

    /// A cache key for the result of [`RewardScorer::prepare`], with the rules of
    /// [`crate::DiffusionModel::encoding_key`].
    fn target_key(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Whether another process computes the score, so that this process only waits. If true, other rewards are scored
    /// meanwhile, and algorithms that need no gradient of the reward generate the next video.
    fn is_elsewhere(&self) -> bool {
        false
    }

    /// Fails on a prompt with which no video can be scored, such as one that holds a token of the reward's own question.
    /// A check asks about all prompts before a run.
    fn check_prompt(&self, _prompt: &str) -> Result<()> {
        Ok(())
    }

    /// Whether the reward computes on [`crate::BuildContext::backend`]. If false, a device of its own has no effect.
    fn computes_on_device(&self) -> bool {
        true
    }

    /// The reason why no video can be scored: the reward was made for a check ([`crate::BuildContext::headers_only`]),
    /// which reads no weights. `None`: videos can be scored.
    fn unscorable(&self) -> Option<String> {
        None
    }

    /// The reaction to a [`Score::Missing`], and to a reference that fails with [`crate::Error::NothingToScore`].
    fn on_missing(&self) -> OnMissing {
        OnMissing::Skip
    }
}
