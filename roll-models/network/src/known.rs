//! Networks that `roll inspect` recognises by the names of their weights.
//!
//! A model whose weight files shall be described submits a [`KnownNetworks`].

use crate::weights::Checkpoint;

/// What the weights of a file are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkFacts {
    /// Name of the network.
    pub what: String,
    /// Further facts as (name, value), in the order of printing.
    pub details: Vec<(String, String)>,
}

impl NetworkFacts {
    /// Facts about the network `what`.
    pub fn new<const N: usize>(what: &str, details: [(&str, String); N]) -> Self {
        Self { what: what.into(), details: details.map(|(name, value)| (name.into(), value)).into() }
    }
}

/// The networks of one family of models.
#[derive(Debug)]
pub struct KnownNetworks {
    /// Describes the network to which the weights belong; `None` if it is not one of the family. Only headers are read.
    pub describe: fn(&Checkpoint) -> Option<NetworkFacts>,
}

roll_core::inventory::collect!(KnownNetworks);

/// Describes the network to which the weights belong; `None` if no model that is linked in knows it.
pub fn describe(weights: &Checkpoint) -> Option<NetworkFacts> {
    roll_core::inventory::iter::<KnownNetworks>.into_iter().find_map(|family| (family.describe)(weights))
}
