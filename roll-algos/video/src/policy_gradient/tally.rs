//! Sums of a round, and the metrics derived from them.

use std::collections::BTreeMap;

use roll_core::{Communicator, Result, StrategyReport, communicator};
use roll_step::ranks::Bits;
use serde::{Deserialize, Serialize};

use super::advantages::GroupStatistics;
use crate::report::SCORE;

/// Name of the metric for the mean loss on the clips.
pub(crate) const DATA_LOSS: &str = "actor/data_loss";

/// Sums over the videos of a round.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Tally {
    /// Weighted sum and total weight of each metric that is a mean.
    means: BTreeMap<String, (Bits, Bits)>,
    /// Videos that were trained on.
    pub(crate) trained: usize,
    /// Reports of the updates.
    #[serde(skip)]
    pub(crate) updates: Vec<StrategyReport>,
    /// Statistics of the groups of all ranks.
    #[serde(skip)]
    pub(crate) groups: GroupStatistics,
}

impl Tally {
    /// Adds a value to the mean `metric`.
    pub(crate) fn add_to_mean(&mut self, metric: impl Into<String>, value: f64) {
        self.add_weighted(metric, value, 1.0);
    }

    /// Adds a value with a weight to the mean `metric`.
    pub(crate) fn add_weighted(&mut self, metric: impl Into<String>, value: f64, weight: f64) {
        self.add(metric.into(), [weight * value, weight]);
    }

    fn add(&mut self, metric: String, [sum, weight]: [f64; 2]) {
        let (Bits(sums), Bits(weights)) = self.means.entry(metric).or_default();
        *sums += sum;
        *weights += weight;
    }

    /// Adds up the sums of all ranks, in the order of the ranks.
    pub(crate) fn joined(self, ranks: &dyn Communicator) -> Result<Self> {
        let all = communicator::join(ranks, &self)?;
        let mut joined = Self { updates: self.updates, groups: self.groups, ..Self::default() };
        for tally in all {
            joined.trained += tally.trained;
            tally.means.into_iter().for_each(|(name, (sum, weight))| joined.add(name, [sum.0, weight.0]));
        }
        Ok(joined)
    }

    /// The metrics of the round. `data_weight` is the weight of the flow-matching loss on the clips, which is part of
    /// `actor/loss`.
    pub(crate) fn metrics(&self, data_weight: f64) -> BTreeMap<String, f64> {
        let means = self.means.iter().map(|(name, (sum, weight))| (name.clone(), sum.0 / weight.0));
        let mut metrics: BTreeMap<String, f64> = means.collect();
        metrics.insert("actor/trained".into(), self.trained as f64);
        metrics.insert("actor/samples".into(), self.means.get(SCORE).map_or(0.0, |(_, scored)| scored.0));
        if let Some(data) = metrics.get(DATA_LOSS).copied() {
            *metrics.entry("actor/loss".into()).or_default() += data_weight * data;
        }
        let GroupStatistics { groups, uninformative, deviation } = self.groups;
        if groups > 0 {
            metrics.insert("actor/score_std".into(), deviation);
            metrics.insert("actor/equal_groups".into(), uninformative as f64 / groups as f64);
        }
        metrics
    }
}
