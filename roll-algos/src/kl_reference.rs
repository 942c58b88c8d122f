//! The policy that a KL compares with.

use roll_core::{Adapter, IdleKeys, When};

/// The policy that a KL compares with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlReference {
    /// The policy that training starts from: the KL of the first step is 0.
    #[default]
    Start,
    /// The model without `model.lora_checkpoint`.
    Base,
}

impl KlReference {
    /// The adapter of the passes that compute this policy.
    pub fn adapter(self) -> Adapter {
        match self {
            Self::Start => Adapter::Start,
            Self::Base => Adapter::Off,
        }
    }
}

/// The key in a run that starts from its base.
pub(crate) const KL_REFERENCE: IdleKeys = IdleKeys {
    keys: &["algo.kl_reference"],
    when: When::Is("model.lora_checkpoint", &["null"]),
    because: "without `model.lora_checkpoint` training starts from the base",
};

/// The key in a run without a KL.
pub(crate) const NO_KL: IdleKeys = IdleKeys {
    keys: &["algo.kl_reference"],
    when: When::Is("algo.kl_weight", &["0"]),
    because: "`algo.kl_weight` is 0",
};
