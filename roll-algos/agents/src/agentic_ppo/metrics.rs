//! Metrics of micro-batches, and their reduction to the metrics of a step.

use std::collections::BTreeMap;

use roll_step::ranks::Bits;
use serde::{Deserialize, Serialize};

/// How the values of one metric, one per micro-batch, are reduced to one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reduction {
    /// The sum: each value is a share of the whole.
    Sum,
    /// The largest value.
    Max,
    /// The smallest value.
    Min,
    /// The mean.
    Mean,
}

impl Reduction {
    fn of(self, values: &[f64]) -> f64 {
        match self {
            Self::Sum => values.iter().sum(),
            Self::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            Self::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
            Self::Mean => values.iter().sum::<f64>() / values.len() as f64,
        }
    }

    /// The reference's suffix to the name of a metric.
    fn suffix(self) -> &'static str {
        match self {
            Self::Sum => "@sum",
            Self::Max => "@max",
            Self::Min => "@min",
            Self::Mean => "",
        }
    }
}

/// Metrics by name, each with its reduction over micro-batches. Names lack the prefix `actor/`, which all of these
/// metrics have in logs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ActorMetrics {
    values: BTreeMap<String, (Reduction, f64)>,
}

impl ActorMetrics {
    /// Sets a share of a sum.
    pub fn sum(&mut self, name: impl Into<String>, value: f64) {
        self.values.insert(name.into(), (Reduction::Sum, value));
    }

    /// Sets a value of which the largest counts.
    pub fn max(&mut self, name: impl Into<String>, value: f64) {
        self.values.insert(name.into(), (Reduction::Max, value));
    }

    /// Sets a value of which the least counts.
    pub fn min(&mut self, name: impl Into<String>, value: f64) {
        self.values.insert(name.into(), (Reduction::Min, value));
    }

    /// Sets a value that is averaged.
    pub fn mean(&mut self, name: impl Into<String>, value: f64) {
        self.values.insert(name.into(), (Reduction::Mean, value));
    }

    /// Adds the metrics of `other`, which replace metrics of the same name.
    pub fn extend(&mut self, other: Self) {
        self.values.extend(other.values);
    }

    /// The value of `name`.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).map(|(_, value)| *value)
    }

    /// Whether there are no metrics.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The values as they are logged: `actor/pg_loss`, `actor/ratio_max`, `actor/grad_norm`.
    pub fn logged(&self) -> BTreeMap<String, f64> {
        self.values.iter().map(|(name, (_, value))| (format!("actor/{name}"), *value)).collect()
    }

    /// The values under the names that the reference uses within a step, which include the reduction:
    /// `actor/pg_loss@sum`, `actor/ratio_max@max`, `actor/grad_norm`.
    pub fn named(&self) -> BTreeMap<String, f64> {
        let with_suffix = |name: &str, how: Reduction| format!("actor/{name}{}", how.suffix());
        self.values.iter().map(|(name, (how, value))| (with_suffix(name, *how), *value)).collect()
    }
}

/// The values of metrics, a list with one value per micro-batch (or per update) each.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MicroBatchMetrics {
    values: BTreeMap<String, (Reduction, Vec<Bits>)>,
}

impl MicroBatchMetrics {
    /// Adds the values of one micro-batch.
    pub fn add(&mut self, metrics: &ActorMetrics) {
        for (name, (how, value)) in &metrics.values {
            self.values_of(name, *how).push(Bits(*value));
        }
    }

    /// Adds all values of `other`.
    pub fn append(&mut self, other: Self) {
        for (name, (how, values)) in other.values {
            self.values_of(&name, how).extend(values);
        }
    }

    fn values_of(&mut self, name: &str, how: Reduction) -> &mut Vec<Bits> {
        &mut self.values.entry(name.into()).or_insert_with(|| (how, Vec::new())).1
    }

    /// Reduces the values of each metric to one.
    pub fn reduced(&self) -> ActorMetrics {
        let reduce = |(how, values): &(Reduction, Vec<Bits>)| {
            (*how, how.of(&values.iter().map(|Bits(value)| *value).collect::<Vec<f64>>()))
        };
        ActorMetrics { values: self.values.iter().map(|(name, values)| (name.clone(), reduce(values))).collect() }
    }

    /// Reduces the values of each metric to one, given that these are all micro-batches of an update. A sum is then
    /// complete: it becomes a [`Reduction::Mean`], because the sums of several updates are averaged.
    pub fn whole(&self) -> ActorMetrics {
        let mut metrics = self.reduced();
        for (how, _) in metrics.values.values_mut().filter(|(how, _)| *how == Reduction::Sum) {
            *how = Reduction::Mean;
        }
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined() -> MicroBatchMetrics {
        let mut joined = MicroBatchMetrics::default();
        for (a, b) in [(1.0, 2.0), (3.0, 6.0)] {
            let mut metrics = ActorMetrics::default();
            metrics.sum("pg_loss", a);
            metrics.max("ratio_max", b);
            metrics.min("ratio_min", b);
            metrics.mean("score", a);
            joined.add(&metrics);
        }
        joined
    }

    #[test]
    fn a_metric_is_joined_as_it_says() {
        let named = joined().reduced().named();
        let expected = [
            ("actor/pg_loss@sum", 4.0),
            ("actor/ratio_max@max", 6.0),
            ("actor/ratio_min@min", 2.0),
            ("actor/score", 2.0),
        ];
        assert_eq!(named, expected.map(|(name, value)| (name.to_string(), value)).into());
    }

    #[test]
    fn sums_of_whole_updates_are_averaged() {
        let mut updates = MicroBatchMetrics::default();
        let mut other = joined();
        other.append(joined());
        updates.add(&joined().whole());
        updates.add(&other.whole());
        let metrics = updates.reduced();
        assert_eq!((metrics.get("pg_loss"), metrics.get("ratio_max")), (Some(6.0), Some(6.0)));
        assert!(metrics.named().contains_key("actor/pg_loss"));
        assert!(metrics.logged().keys().eq(["actor/pg_loss", "actor/ratio_max", "actor/ratio_min", "actor/score"]));
    }
}
