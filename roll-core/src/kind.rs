//! The kinds of components, and their names in listings, configurations and at the plugin boundary.

use std::fmt;

/// Kinds of components.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

    /// Its number at the plugin boundary, which never changes.
    pub const fn id(self) -> u32 {
        match self {
            Self::Reward => 1,
            Self::Model => 2,
            Self::Strategy => 3,
            Self::Algorithm => 4,
            Self::Environment => 5,
        }
    }

    /// The kind with this number.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.id() == id)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_number() {
        assert!(Kind::ALL.iter().all(|kind| Kind::from_id(kind.id()) == Some(*kind)));
        assert_eq!(Kind::from_id(0), None);
    }
}
