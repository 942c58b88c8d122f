//! Options of DPO.

use std::path::PathBuf;

use roll_core::keys::check_ranges;
use roll_core::{LanguageModel, Result};
use roll_step::update::OnNonfinite;

/// Options of the algorithm `dpo`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DpoConfig {
    /// File with preferences: JSON lines or a JSON list, each entry `{"prompt": ..., "chosen": ..., "rejected": ...}`
    /// with texts or lists of messages. Without `prompt`, it is what `chosen` and `rejected` begin with. An entry may
    /// have `system` (a text) and `tools`. Pairs without a difference are left out and counted.
    pub data: Option<PathBuf>,
    /// File with preferences that are not trained on, in the form of `data`. They are measured before and after
    /// training, and every `evaluation.every` steps; the model answers the first three prompts for the report. `null`:
    /// none.
    pub val_data: Option<PathBuf>,
    /// Pairs of one update, over all ranks.
    #[schemars(range(min = 1))]
    pub batch_size: usize,
    /// Pairs whose gradient is computed at once.
    #[schemars(range(min = 1))]
    pub micro_batch_size: usize,
    /// Maximum number of tokens of a prompt with one of its answers; longer pairs are left out and counted. `null`: the
    /// model's context length.
    pub sequence_length: Option<usize>,
    /// How strongly the policy is held near the reference: the larger, the nearer.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub beta: f64,
    /// Whether the loss is that of IPO: the squared distance of the difference of mean log-ratios per token from
    /// 1 / (2 `beta`). Otherwise the logistic loss of DPO.
    pub ipo: bool,
    /// Assumed fraction of pairs whose answers are swapped (conservative DPO).
    #[schemars(range(min = 0.0), extend("exclusiveMaximum" = 0.5))]
    pub label_smoothing: f64,
    /// Whether an answer's log-probability is divided by its number of tokens, so that long answers count no more than
    /// short ones. Choose a larger `beta` then, such as 2.
    pub length_normalised: bool,
    /// Whether log-probabilities are taken as they are, and not relative to the reference policy. With
    /// `length_normalised` the loss is that of SimPO.
    pub reference_free: bool,
    /// Target for the difference between the rewards of the chosen and the rejected answer (SimPO's gamma).
    #[schemars(range(min = 0.0))]
    pub margin: f64,
    /// Whether each pass over the pairs has another order, drawn with `seed`.
    pub shuffle: bool,
    /// Reaction to a loss or gradient that is not finite.
    pub on_nonfinite: OnNonfinite,
}

impl Default for DpoConfig {
    fn default() -> Self {
        Self {
            data: None,
            val_data: None,
            batch_size: 32,
            micro_batch_size: 4,
            sequence_length: None,
            beta: 0.1,
            ipo: false,
            label_smoothing: 0.0,
            length_normalised: false,
            reference_free: false,
            margin: 0.0,
            shuffle: true,
            on_nonfinite: OnNonfinite::Skip,
        }
    }
}

impl DpoConfig {
    /// Fails on values that are out of range.
    pub(super) fn check(&self) -> Result<()> {
        check_ranges("algo", self)
    }

    /// Whether an answer counts by its mean log-probability per token.
    pub(super) fn normalises_lengths(&self) -> bool {
        self.length_normalised || self.ipo
    }

    /// Maximum number of tokens of a prompt with one of its answers.
    pub(super) fn limit(&self, model: &dyn LanguageModel) -> usize {
        self.sequence_length.unwrap_or(usize::MAX).min(model.context_length())
    }
}
