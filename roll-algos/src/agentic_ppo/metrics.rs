//! Joining the metrics of micro-batches.

use std::collections::BTreeMap;

/// How values of one metric are joined, as its name says: `@sum`, `@max`, `@min`; otherwise `_max`, `_min` and `_sum`
/// at the end, and the mean for the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Largest.
    Max,
    /// Least.
    Min,
    /// Mean.
    Mean,
}

impl Reduction {
    /// That of the metric `name`.
    pub fn of(name: &str) -> Self {
        let ends = |word: &str| name.ends_with(&format!("@{word}")) || name.ends_with(&format!("_{word}"));
        match () {
            () if ends("sum") => Self::Sum,
            () if ends("max") => Self::Max,
            () if ends("min") => Self::Min,
            () => Self::Mean,
        }
    }
}

/// Metrics of many micro-batches.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Joined {
    /// The bits of the values: they pass between ranks as JSON, which has no infinity.
    values: BTreeMap<String, Vec<u64>>,
}

impl Joined {
    /// Adds those of one.
    pub fn add(&mut self, metrics: &BTreeMap<String, f64>) {
        for (name, value) in metrics {
            self.values.entry(name.clone()).or_default().push(value.to_bits());
        }
    }

    /// Adds those of `other`.
    pub fn append(&mut self, other: Self) {
        for (name, values) in other.values {
            self.values.entry(name).or_default().extend(values);
        }
    }

    /// One value each.
    pub fn reduced(&self) -> BTreeMap<String, f64> {
        let reduce = |name: &str, values: &[f64]| match Reduction::of(name) {
            Reduction::Sum => values.iter().sum(),
            Reduction::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            Reduction::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
            Reduction::Mean => values.iter().sum::<f64>() / values.len() as f64,
        };
        let floats = |bits: &[u64]| bits.iter().map(|bits| f64::from_bits(*bits)).collect::<Vec<f64>>();
        self.values.iter().map(|(name, values)| (name.clone(), reduce(name, &floats(values)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_how_its_values_are_joined() {
        let mut joined = Joined::default();
        for (a, b) in [(1.0, 2.0), (3.0, 6.0)] {
            let metrics = [("actor/pg_loss@sum", a), ("actor/ratio_max@max", b), ("score/min", a), ("x_min", b)];
            joined.add(&metrics.into_iter().map(|(k, v)| (k.to_string(), v)).collect());
        }
        let reduced = joined.reduced();
        assert_eq!(reduced["actor/pg_loss@sum"], 4.0);
        assert_eq!(reduced["actor/ratio_max@max"], 6.0);
        assert_eq!(reduced["score/min"], 2.0);
        assert_eq!(reduced["x_min"], 2.0);
    }
}
