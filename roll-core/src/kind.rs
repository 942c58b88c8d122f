//! The kinds of components, and their names in listings, configurations and at the plugin boundary.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kinds of components.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// [`crate::Algorithm`].
    Algorithm,
    /// [`crate::Environment`].
    Environment,
    /// [`crate::Model`].
    Model,
    /// [`crate::RewardScorer`].
    Reward,
    /// [`crate::Strategy`].
    Strategy,
}

impl Kind {
    /// All kinds, in the order of listings.
    pub const ALL: [Self; 5] = [Self::Algorithm, Self::Environment, Self::Model, Self::Reward, Self::Strategy];

    /// The noun for messages and listings.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Algorithm => "algorithm",
            Self::Environment => "environment",
            Self::Model => "model",
            Self::Reward => "reward",
            Self::Strategy => "strategy",
        }
    }

    /// The section of the configuration that names a component of this kind; keys of its options begin with it.
    pub const fn section(self) -> &'static str {
        match self {
            Self::Algorithm => "algo",
            Self::Environment => "env",
            Self::Model => "model",
            Self::Reward => "reward",
            Self::Strategy => "strategy",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}
