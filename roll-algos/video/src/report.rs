//! The parts of a step's report that all algorithms on videos have in common.

use std::collections::BTreeMap;

use roll_core::{
    Headline, HeadlineFormat, Result, Sample, StepContext, StepReport, StrategyReport, Video, communicator,
};
use roll_step::stopwatch::Stopwatch;

/// Name of the metric for the mean score.
pub(crate) const SCORE: &str = "actor/score";

/// The metrics that algorithms with a reward on videos show first.
pub(crate) fn headlines() -> Vec<Headline> {
    vec![
        Headline::new(SCORE, "score", "Score").score(),
        Headline::new("actor/kl_loss", "kl", "KL to the reference policy")
            .written(HeadlineFormat::Scientific)
            .divergence(),
        Headline::new("actor/loss", "loss", "Loss"),
        Headline::new("actor/grad_norm", "grad norm", "Gradient norm").written(HeadlineFormat::Scientific),
    ]
}

/// The metric for a detail that a reward reports next to its score.
pub(crate) fn detail_metric(name: &str) -> String {
    // Durations are metrics `time/...`, because they differ from run to run.
    match name.strip_prefix("time/") {
        Some(duration) => format!("time/score/{duration}"),
        None => format!("reward/{name}"),
    }
}

/// The samples and videos of a step that this rank reports. The algorithm sums its losses and scores itself and passes
/// them to [`StepOutcome::report`].
#[derive(Default)]
pub(crate) struct StepOutcome {
    /// Origin and reason of each sample that was left out.
    skipped: Vec<(String, String)>,
    /// Name and frames of each video to show.
    videos: Vec<(String, Video)>,
    /// Description and value of a number that was not finite.
    pub(crate) nonfinite: Option<(String, f64)>,
}

impl StepOutcome {
    /// Adds a sample that was left out.
    pub(crate) fn skip(&mut self, sample: &Sample, reason: impl Into<String>) {
        self.skipped.push((sample.origin.clone(), reason.into()));
    }

    /// Adds a video of a sample that already occurred `repeats` times in the same step.
    pub(crate) fn show(&mut self, sample: &Sample, repeats: u64, video: Video) {
        let suffix = if repeats > 0 { format!("-{}", repeats + 1) } else { String::new() };
        self.videos.push((format!("sample-{:06}{suffix}", sample.index), video));
    }

    /// The report of a step with `updates`, over all ranks; videos stay on their rank. `metrics` are the algorithm's
    /// own. The mean score is also reported under the alias of the reward, if it has one.
    pub(crate) fn report(
        self,
        ctx: &StepContext<'_>,
        watch: Stopwatch<'_>,
        updates: &[StrategyReport],
        mut metrics: BTreeMap<String, f64>,
    ) -> Result<StepReport> {
        let ranks = ctx.strategy.ranks().data.as_ref();
        let skipped = communicator::join(ranks, &self.skipped)?.concat();
        metrics.extend(watch.seconds(ranks)?);
        metrics.insert("actor/skipped".into(), skipped.len() as f64);
        let alias = ctx.reward.as_deref().and_then(|reward| reward.measures().alias);
        if let (Some(alias), Some(score)) = (alias, metrics.get(SCORE).copied()) {
            metrics.insert(alias, score);
        }
        if let Some(update) = updates.last() {
            metrics.insert("actor/grad_norm".into(), update.grad_norm);
        }
        if self.nonfinite.is_some() {
            metrics.insert("actor/nonfinite".into(), 1.0);
        }
        let applied = updates.iter().any(|update| update.applied);
        Ok(StepReport { metrics, skipped, videos: self.videos, records: Vec::new(), applied })
    }
}
