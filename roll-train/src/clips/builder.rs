//! Sections of runs on clips in a run that a program describes.

use roll_data::DataConfig;

use super::EvaluationConfig;
use crate::run::RunBuilder;

impl RunBuilder<'_> {
    /// The training data.
    pub fn data(self, data: DataConfig) -> Self {
        self.section(data)
    }

    /// Evaluations before, during and after the training.
    pub fn evaluation(self, evaluation: EvaluationConfig) -> Self {
        self.section(evaluation)
    }
}
