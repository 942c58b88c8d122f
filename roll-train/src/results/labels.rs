//! Names of the evaluated sets and of their measurements, in metrics, summaries and file names.

use roll_core::Measure;

use super::scores::SetName;

/// A label for each evaluated set, and a suffix for each score.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetLabels {
    /// The label of the training clips.
    train: String,
    /// The labels of the rewards of `evaluation.check`.
    checks: Vec<String>,
}

impl SetLabels {
    /// Labels the set of training clips by the quantity that the reward measures, such as `identity`, or `train` if the
    /// reward names none. `checks` are the labels of the rewards of `evaluation.check`.
    pub fn new(measure: &Measure, checks: Vec<String>) -> Self {
        let train = if measure.label == Measure::SCORE { "train" } else { &measure.label };
        Self { train: train.into(), checks }
    }

    /// The labels of the rewards of `evaluation.check`.
    pub fn checks(&self) -> &[String] {
        &self.checks
    }

    /// The suffix of each score of a clip, by position: empty for the trained reward, `_check` for the sum of the
    /// checks, and `_check_NAME` for each of several checks.
    pub fn suffixes(&self) -> Vec<String> {
        let mut suffixes = vec![String::new(), "_check".into()];
        if self.checks.len() > 1 {
            suffixes.extend(self.checks.iter().map(|name| format!("_check_{name}")));
        }
        suffixes
    }

    /// The label of a set.
    pub fn of(&self, name: SetName) -> &str {
        match name {
            SetName::Train => &self.train,
            SetName::Unseen => "unseen",
        }
    }
}
