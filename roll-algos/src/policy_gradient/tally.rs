//! Sums of a round, and the metrics that come of them.

use std::collections::BTreeMap;

use roll_core::{
    Communicator, Headline, HeadlineFormat, Result, Sample, StepReport, StrategyReport, Video, communicator,
};
use serde::{Deserialize, Serialize};

use super::advantages::GroupStatistics;

/// The metric of the mean score.
pub(crate) const SCORE: &str = "actor/score";
/// That of the mean loss on the clips.
pub(crate) const DATA_LOSS: &str = "actor/data_loss";

/// The metrics to show first.
pub(crate) fn headlines() -> Vec<Headline> {
    vec![
        Headline::new(SCORE, "score", "Score").score(),
        Headline::new("actor/kl_loss", "kl", "KL to the base model").written(HeadlineFormat::Scientific),
        Headline::new("actor/loss", "loss", "Loss"),
        Headline::new("actor/grad_norm", "grad norm", "Gradient norm").written(HeadlineFormat::Scientific),
    ]
}

/// Sums over the videos of a round.
#[derive(Default)]
pub(crate) struct Tally {
    /// Sums and weights of metrics that are means.
    means: BTreeMap<String, (f64, f64)>,
    skipped: Vec<(String, String)>,
    pub(crate) videos: Vec<(String, Video)>,
    /// Name and value of a number that was not finite.
    pub(crate) nonfinite: Option<(String, f64)>,
    /// Videos that were trained on.
    pub(crate) trained: usize,
    /// Updates that were made, and the last one's report.
    pub(crate) updates: Vec<StrategyReport>,
    /// Statistics of the groups of all ranks.
    pub(crate) groups: GroupStatistics,
    /// Weight of the loss on the clips, which is added to that of the videos.
    data_weight: f64,
}

impl Tally {
    /// An empty tally.
    pub(crate) fn new(data_weight: f64) -> Self {
        Self { data_weight, ..Self::default() }
    }

    /// Adds a value to the mean `metric`.
    pub(crate) fn mean(&mut self, metric: impl Into<String>, value: f64) {
        self.weigh(metric, value, 1.0);
    }

    /// Adds a value of some weight.
    pub(crate) fn weigh(&mut self, metric: impl Into<String>, value: f64, weight: f64) {
        let (sum, weights) = self.means.entry(metric.into()).or_default();
        *sum += weight * value;
        *weights += weight;
    }

    /// A sample of which no video could be trained on.
    pub(crate) fn skip(&mut self, sample: &Sample, reason: String) {
        self.skipped.push((sample.origin.clone(), reason));
    }

    /// Adds up the tallies of all ranks, in rank order. Videos stay on their rank.
    pub(crate) fn joined(self, ranks: &dyn Communicator) -> Result<Self> {
        if ranks.world_size() == 1 {
            return Ok(self);
        }
        let bits = |(name, (sum, weight)): (String, (f64, f64))| (name, (sum.to_bits(), weight.to_bits()));
        let own = Share {
            means: self.means.into_iter().map(bits).collect(),
            skipped: self.skipped,
            nonfinite: self.nonfinite.map(|(what, value)| (what, value.to_bits())),
            trained: self.trained,
        };
        let Self { videos, updates, groups, data_weight, .. } = self;
        let mut all = Self { videos, updates, groups, data_weight, ..Self::default() };
        for share in communicator::join(ranks, &own)? {
            for (name, (sum, weight)) in share.means {
                let (sums, weights) = all.means.entry(name).or_default();
                *sums += f64::from_bits(sum);
                *weights += f64::from_bits(weight);
            }
            all.skipped.extend(share.skipped);
            all.trained += share.trained;
            all.nonfinite = all.nonfinite.or(share.nonfinite.map(|(what, bits)| (what, f64::from_bits(bits))));
        }
        Ok(all)
    }

    /// The metrics; the mean score once more under its second name, if it has one.
    pub(crate) fn report(
        self,
        learning_rate: f64,
        alias: Option<String>,
        seconds: BTreeMap<&'static str, f64>,
    ) -> StepReport {
        let mut metrics: BTreeMap<String, f64> = seconds.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
        metrics.insert("lr".into(), learning_rate);
        metrics.insert("actor/skipped".into(), self.skipped.len() as f64);
        metrics.insert("actor/trained".into(), self.trained as f64);
        let scored = self.means.get(SCORE).map_or(0.0, |(_, n)| *n);
        metrics.insert("actor/samples".into(), scored);
        for (name, (sum, weight)) in &self.means {
            metrics.insert(name.clone(), sum / weight);
        }
        if let Some(data) = metrics.get(DATA_LOSS).copied() {
            *metrics.entry("actor/loss".into()).or_default() += self.data_weight * data;
        }
        if let (Some(alias), Some(score)) = (alias, metrics.get(SCORE).copied()) {
            metrics.insert(alias, score);
        }
        let GroupStatistics { groups, uninformative, deviation } = self.groups;
        if groups > 0 {
            metrics.insert("actor/score_std".into(), deviation);
            metrics.insert("actor/equal_groups".into(), uninformative as f64 / groups as f64);
        }
        if let Some(update) = self.updates.last() {
            metrics.insert("actor/grad_norm".into(), update.grad_norm);
        }
        if self.nonfinite.is_some() {
            metrics.insert("actor/nonfinite".into(), 1.0);
        }
        let applied = self.updates.iter().any(|update| update.applied);
        StepReport { metrics, skipped: self.skipped, videos: self.videos, records: Vec::new(), applied }
    }
}

/// A rank's message to the others on a round. Numbers are bits: a detail need not be finite.
#[derive(Serialize, Deserialize)]
struct Share {
    means: BTreeMap<String, (u64, u64)>,
    skipped: Vec<(String, String)>,
    nonfinite: Option<(String, u64)>,
    trained: usize,
}
