//! Rewards as a configuration opens them: for a run with their network, for a check by its headers alone.

use roll_core::{
    BuildContext, Component, Grad, Measure, OnMissing, Pullback, Result, RewardScorer, Score, Target, Video,
    VisionLanguageRegistration,
};

/// A reward of one of several types.
pub(crate) struct Opened(Box<dyn RewardScorer>);

impl Opened {
    /// A reward that is open already.
    pub(crate) fn new(reward: impl RewardScorer + 'static) -> Self {
        Self(Box::new(reward))
    }

    /// Opens the reward whose network `component` names. `check` checks options and small files, `load` does so and opens
    /// the network. For a check, no weights are read and nothing is downloaded, and the result scores nothing.
    pub(crate) fn with_network<R: RewardScorer + 'static>(
        name: &'static str,
        component: &Component,
        (label, on_missing): (&str, OnMissing),
        context: &BuildContext,
        check: impl FnOnce() -> Result<()>,
        load: impl FnOnce() -> Result<R>,
    ) -> Result<Self> {
        if !context.headers_only {
            return Ok(Self::new(load()?));
        }
        let mut opened: Option<Box<dyn RewardScorer>> = None;
        let missing = (VisionLanguageRegistration::of(component)?.missing)(&component.options, context)?;
        let reason = match missing {
            Some(models) => {
                check()?;
                format!("a run would download {models} first")
            }
            None => {
                opened = Some(Box::new(load()?));
                "a check reads no weights of its network, whose headers fit".into()
            }
        };
        Ok(Self::new(Unscored { name, measure: Measure::new(label), on_missing, reason, opened }))
    }
}

impl RewardScorer for Opened {
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

    fn check_prompt(&self, prompt: &str) -> Result<()> {
        self.0.check_prompt(prompt)
    }

    fn computes_on_device(&self) -> bool {
        self.0.computes_on_device()
    }

    fn unscorable(&self) -> Option<String> {
        self.0.unscorable()
    }

    fn on_missing(&self) -> OnMissing {
        self.0.on_missing()
    }
}

/// A differentiable reward without the weights of its network, for a check.
struct Unscored {
    name: &'static str,
    measure: Measure,
    on_missing: OnMissing,
    /// See [`RewardScorer::unscorable`].
    reason: String,
    /// The reward with a network without weights, which reads prompts as a run does, if its files are on this machine.
    opened: Option<Box<dyn RewardScorer>>,
}

impl RewardScorer for Unscored {
    fn name(&self) -> &str {
        self.name
    }

    fn measures(&self) -> Measure {
        self.measure.clone()
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn reads_reference(&self) -> bool {
        false
    }

    fn score(&mut self, _: &Video, _: &str, _: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
        Ok((Score::Missing { reason: self.reason.clone() }, None))
    }

    fn check_prompt(&self, prompt: &str) -> Result<()> {
        self.opened.as_ref().map_or(Ok(()), |reward| reward.check_prompt(prompt))
    }

    fn unscorable(&self) -> Option<String> {
        Some(self.reason.clone())
    }

    fn on_missing(&self) -> OnMissing {
        self.on_missing
    }
}
