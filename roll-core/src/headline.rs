//! Metrics that show a person the progress of training.

use serde::{Deserialize, Serialize};

/// A metric that progress lines, summaries and plots show first. See [`crate::Algorithm::headlines`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Headline {
    /// Its name in [`crate::StepReport::metrics`]: `actor/score`.
    pub metric: String,
    /// A word for progress lines and summaries: `score`. Empty: the metric is plotted only.
    pub label: String,
    /// Title of its panel in plots: `Score`.
    pub title: String,
    /// How a value is written in a line.
    pub format: HeadlineFormat,
    /// The same quantity on data that is not trained on, if the algorithm validates.
    pub held_out: Option<HeldOut>,
    /// Whether it is the reward's score: evaluations of the reward are plotted with it.
    pub is_score: bool,
    /// The question that it answers.
    #[serde(default)]
    pub subject: Subject,
}

/// The question that a metric answers in reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// Whether the model learns.
    Learning,
    /// How far the model is from the one that the training started from.
    Divergence,
    /// Whether the training is stable.
    #[default]
    Stability,
}

/// How a number is written for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadlineFormat {
    /// A number with four decimals.
    #[default]
    Decimal,
    /// As a power of ten with two decimals: values that vary by orders of magnitude.
    Scientific,
    /// A fraction as a percentage with one decimal.
    Percent,
}

/// A metric of [`crate::Validation`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldOut {
    /// Its name: `val/env/success`.
    pub metric: String,
    /// Its name in summaries: `success`.
    pub label: String,
    /// The data, in words: "starts that were not trained on".
    pub data: String,
    /// The configuration key that names or enables the data; empty if the data do not depend on a key.
    #[serde(default)]
    pub key: String,
}

impl Headline {
    /// A metric with a word for lines and a title for plots, written with four decimals.
    pub fn new(metric: &str, label: &str, title: &str) -> Self {
        Self {
            metric: metric.into(),
            label: label.into(),
            title: title.into(),
            format: HeadlineFormat::Decimal,
            held_out: None,
            is_score: false,
            subject: Subject::default(),
        }
    }

    /// Writes the values of the metric in `format`.
    pub fn written(self, format: HeadlineFormat) -> Self {
        Self { format, ..self }
    }

    /// Adds the same quantity on held-out data: metric, name in summaries, and the data in words. It shows whether the
    /// model learns.
    pub fn validated_by(self, metric: &str, label: &str, data: &str) -> Self {
        let key = String::new();
        let held_out = Some(HeldOut { metric: metric.into(), label: label.into(), data: data.into(), key });
        Self { held_out, subject: Subject::Learning, ..self }
    }

    /// Names the configuration key that enables the held-out data of [`Headline::validated_by`].
    pub fn enabled_by(mut self, key: &str) -> Self {
        if let Some(held_out) = &mut self.held_out {
            held_out.key = key.into();
        }
        self
    }

    /// Marks the metric as the score of the reward, which shows whether the model learns.
    pub fn score(self) -> Self {
        Self { is_score: true, subject: Subject::Learning, ..self }
    }

    /// Marks the metric as a divergence from the model that the training started from.
    pub fn divergence(self) -> Self {
        Self { subject: Subject::Divergence, ..self }
    }
}

/// Maximum number of decimals that are added to tell two values apart.
const MAX_ADDITIONAL_DECIMALS: usize = 8;

impl HeadlineFormat {
    /// `value` in this format.
    pub fn write(self, value: f64) -> String {
        self.with_decimals(value, 0)
    }

    /// Both values in this format, with the fewest additional decimals (at most 8) that make their texts differ.
    pub fn write_apart(self, values: [f64; 2]) -> [String; 2] {
        let written = |additional: usize| values.map(|value| self.with_decimals(value, additional));
        (0..=MAX_ADDITIONAL_DECIMALS).map(written).find(|[first, second]| first != second).unwrap_or_else(|| written(0))
    }

    fn with_decimals(self, value: f64, additional: usize) -> String {
        match self {
            Self::Decimal => format!("{value:.*}", 4 + additional),
            Self::Scientific if value == 0.0 => "0".into(),
            Self::Scientific => format!("{value:.*e}", 2 + additional),
            Self::Percent => format!("{:.*} %", 1 + additional, 100.0 * value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_differ_look_different() {
        let written = HeadlineFormat::Decimal.write_apart([0.375_18, 0.375_16]);
        assert_eq!(written, ["0.37518", "0.37516"]);
        assert_eq!(HeadlineFormat::Percent.write_apart([0.25, 0.5]), ["25.0 %", "50.0 %"]);
        assert_eq!(HeadlineFormat::Scientific.write_apart([0.0, 0.0]), ["0", "0"]);
    }
}
