//! Names of the evaluated sets in metrics, summaries and file names.

use roll_core::Measure;

use crate::evaluation::SetName;

/// A label for each evaluated set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetLabels {
    train: String,
}

impl SetLabels {
    /// The set of training clips is called by what the reward measures, or `train` if the reward does not declare it.
    pub(crate) fn new(measure: &Measure) -> Self {
        let said = measure.label != Measure::SCORE;
        Self { train: if said { measure.label.clone() } else { "train".into() } }
    }

    /// The label of a set.
    pub(crate) fn of(&self, name: SetName) -> &str {
        match name {
            SetName::Train => &self.train,
            SetName::Unseen => "unseen",
        }
    }
}
