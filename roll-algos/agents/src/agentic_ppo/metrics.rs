//! Metrics of micro-batches, and how they become those of a step.

use std::collections::BTreeMap;

use roll_step::ranks::Bits;
use serde::{Deserialize, Serialize};

/// How the values that micro-batches have of one metric are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reduction {
    /// Their sum: each is a share of the whole already.
    Sum,
    /// The largest.
    Max,
    /// The least.
    Min,
    /// Their mean.
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

/// Metrics of one micro-batch by name, each with the way it is joined with those of others. Names are without the
/// prefix `actor/`, which all of them have.
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

    /// Adds all of `other`; its values replace those of the same name.
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

    /// The values under the names that the reference has within a step, which say how they are joined:
    /// `actor/pg_loss@sum`, `actor/ratio_max@max`, `actor/grad_norm`.
    pub fn named(&self) -> BTreeMap<String, f64> {
        let name = |name: &str, how: Reduction| format!("actor/{name}{}", how.suffix());
        self.values.iter().map(|(short, (how, value))| (name(short, *how), *value)).collect()
    }
}

/// The values of metrics, one per micro-batch.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MicroBatchMetrics {
    values: BTreeMap<String, (Reduction, Vec<Bits>)>,
}

impl MicroBatchMetrics {
    /// Adds those of one.
    pub fn add(&mut self, metrics: &ActorMetrics) {
        for (name, (how, value)) in &metrics.values {
            self.of(name, *how).push(Bits(*value));
        }
    }

    /// Adds those of `other`.
    pub fn append(&mut self, other: Self) {
        for (name, (how, values)) in other.values {
            self.of(&name, how).extend(values);
        }
    }

    fn of(&mut self, name: &str, how: Reduction) -> &mut Vec<Bits> {
        &mut self.values.entry(name.into()).or_insert_with(|| (how, Vec::new())).1
    }

    /// One value each.
    pub fn reduced(&self) -> ActorMetrics {
        let one = |(how, values): &(Reduction, Vec<Bits>)| {
            (*how, how.of(&values.iter().map(|Bits(value)| *value).collect::<Vec<f64>>()))
        };
        ActorMetrics { values: self.values.iter().map(|(name, values)| (name.clone(), one(values))).collect() }
    }

    /// One value each, for an update of which all micro-batches are here: sums are whole, so that those of several
    /// updates are averaged.
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
