//! The reward that a configuration names `judge`: answers of a service or of a network in this process.

use roll_core::{BuildContext, Grad, Measure, OnMissing, Pullback, Result, RewardScorer, Score, Target, Video};

use super::{Judge, JudgeConfig, LocalJudge};

/// Whoever answers the questions of the reward `judge`.
pub(super) struct Answering(Box<dyn RewardScorer>);

impl Answering {
    /// Opens the network of `reward.local`, or the client of the service.
    pub(super) fn new(config: JudgeConfig, context: &BuildContext) -> Result<Self> {
        Ok(Self(match config.local {
            Some(_) => Box::new(LocalJudge::load(config, context)?),
            None => Box::new(Judge::new(config, context)?),
        }))
    }
}

impl RewardScorer for Answering {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn measures(&self) -> Measure {
        self.0.measures()
    }

    fn differentiable(&self) -> bool {
        self.0.differentiable()
    }

    fn reads_reference(&self) -> bool {
        self.0.reads_reference()
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        self.0.score(video, prompt, target, grad)
    }

    fn is_elsewhere(&self) -> bool {
        self.0.is_elsewhere()
    }

    fn on_missing(&self) -> OnMissing {
        self.0.on_missing()
    }
}

roll_core::register! {
    Reward, "judge", JudgeConfig,
    "Answers of a model that sees pictures to questions about the video, over an OpenAI-compatible API or inside",
    Answering::new,
}
