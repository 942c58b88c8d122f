//! What the sets of an evaluation are called in metrics, summaries and file names.

use roll_core::Measure;

use crate::evaluation::SetName;

/// Labels of the sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetLabels {
    train: String,
}

impl SetLabels {
    /// The clips that are trained on are called after what the reward measures, where it says that.
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
