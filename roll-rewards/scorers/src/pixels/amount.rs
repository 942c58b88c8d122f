//! The common part of the rewards `motion`, `sharpness` and `flicker`, which measure an amount of luma variation in
//! time or space. Each of them implements [`Amount`].

use std::marker::PhantomData;

use roll_core::{Error, Grad, Measure, OnMissing, Pullback, Result, RewardScorer, Score, Target, Tensor, Video};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::RewardError;
use crate::picture::luma;

/// Options of `motion`, `sharpness` and `flicker`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(bound = "", rename = "AmountConfig")]
pub struct AmountConfig<A: Amount> {
    /// Target for the amount: `more`, `less`, `{level: ...}` or `reference`.
    pub wanted: Wanted,
    /// What happens with a video that is too short.
    pub on_missing: OnMissing,
    /// Selects the measure; not an option.
    #[serde(skip)]
    pub amount: PhantomData<A>,
}

impl<A: Amount> Default for AmountConfig<A> {
    fn default() -> Self {
        Self { wanted: A::WANTED, on_missing: OnMissing::Skip, amount: PhantomData }
    }
}

/// The target for an amount.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// The score is the amount.
    More,
    /// The score is minus the amount.
    Less,
    /// The score is `-(amount / level - 1)^2`.
    Level(f64),
    /// Like `level`, with the reference's amount as the level.
    Reference,
}

/// An amount of luma variation, at least 0.
pub trait Amount: Send + 'static {
    /// The reward's name.
    const NAME: &'static str;
    /// Minimum number of frames.
    const FRAMES: usize;
    /// The default target.
    const WANTED: Wanted;

    /// Measures the amount in `lumas`: at least [`Amount::FRAMES`] planes `[height, width]`. Adds the gradient of the
    /// amount to `gradient`, if there is one. Returns `None` if the planes are too small.
    fn measure(lumas: &[Vec<f32>], size: [usize; 2], gradient: Option<&mut [Vec<f32>]>) -> Option<f64>;
}

/// The reward for an [`Amount`].
#[derive(Clone, Debug)]
pub struct AmountReward<A: Amount> {
    config: AmountConfig<A>,
}

/// Name of the target's tensor: the reference's amount.
const LEVEL: &str = "level";

impl<A: Amount> AmountReward<A> {
    /// Fails unless the level is above 0.
    pub fn new(config: AmountConfig<A>) -> Result<Self> {
        match config.wanted {
            Wanted::Level(level) if !(level > 0.0 && level.is_finite()) => {
                Err(Error::config("reward.wanted.level", format!("expected a number above 0, found {level}")))
            }
            _ => Ok(Self { config }),
        }
    }

    /// The amount in a video; `None` if the video is too short or too small. Sets `gradient` to the gradient with
    /// respect to the lumas.
    fn measure(video: &Video, gradient: Option<&mut Vec<Vec<f32>>>) -> Option<f64> {
        let [frames, height, width] = video.dims();
        if frames < A::FRAMES || height * width == 0 {
            return None;
        }
        let lumas = luma::lumas(video);
        let gradient = gradient.map(|planes| {
            *planes = vec![vec![0.0; height * width]; frames];
            planes.as_mut_slice()
        });
        A::measure(&lumas, [height, width], gradient)
    }

    /// The score of an amount, and the derivative of the score with respect to the amount.
    fn score_of(&self, amount: f64, target: &Target) -> Result<(f64, f64)> {
        let level = match self.config.wanted {
            Wanted::More => return Ok((amount, 1.0)),
            Wanted::Less => return Ok((-amount, -1.0)),
            Wanted::Level(level) => level,
            Wanted::Reference => {
                let bad_target = || RewardError::InvalidTarget { reward: A::NAME.into(), tensor: LEVEL.into() };
                f64::from(target.tensors.get(LEVEL).ok_or_else(bad_target)?.item()?)
            }
        };
        let deviation = amount / level - 1.0;
        Ok((-deviation * deviation, -2.0 * deviation / level))
    }
}

impl<A: Amount> RewardScorer for AmountReward<A> {
    fn name(&self) -> &str {
        A::NAME
    }

    fn measures(&self) -> Measure {
        Measure::new(A::NAME)
    }

    fn computes_on_device(&self) -> bool {
        false
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn reads_reference(&self) -> bool {
        self.config.wanted == Wanted::Reference
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        if !self.reads_reference() {
            return Ok(Target::default());
        }
        let no_gradient = None;
        match Self::measure(reference, no_gradient) {
            Some(level) if level > 0.0 => Ok(Target::of([(LEVEL.to_string(), Tensor::scalar(level as f32))].into())),
            Some(_) => Err(Error::nothing_to_score(format!("the reference has no {} at all", A::NAME))),
            None => Err(Error::nothing_to_score(format!("the reference has fewer than {} frames", A::FRAMES))),
        }
    }

    /// Details: `amount`.
    fn score(&mut self, video: &Video, _: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let mut planes = Vec::new();
        let Some(amount) = Self::measure(video, grad.is_on().then_some(&mut planes)) else {
            let reason = format!("expected {} frames or more of a few pixels, found {:?}", A::FRAMES, video.dims());
            return Ok((Score::Missing { reason }, None));
        };
        let (value, slope) = self.score_of(amount, target)?;
        let shape = video.frames().shape().to_vec();
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |cotangent| {
                let scale = (f64::from(cotangent.item()?) * slope) as f32;
                let frames = luma::pull(&planes).into_iter().map(|g| scale * g).collect();
                Tensor::new(frames, shape)
            })
        });
        Ok((Score::Value { value, details: [("amount".to_string(), amount)].into() }, pullback))
    }

    fn target_key(&self) -> Result<Option<String>> {
        Ok(Some(
            roll_external::Fingerprint::new(A::NAME).text("wanted", format_args!("{:?}", self.config.wanted)).finish(),
        ))
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

/// Registers the reward for an [`Amount`].
macro_rules! register_amount {
    ($amount:ty, $summary:literal $(, is_default_check: $check:expr)?) => {
        roll_core::register! {
            Reward, <$amount as $crate::pixels::Amount>::NAME, $crate::pixels::AmountConfig<$amount>,
            $summary,
            |options, _| $crate::pixels::AmountReward::<$amount>::new(options)
            $(, is_default_check: $check)?
        }
    };
}
pub(super) use register_amount;
