//! Components as a configuration names them: a map with the name of an implementation and its options.

use serde::{Deserialize, Serialize};

use crate::Options;

/// The name of an implementation, and its options; [`crate::Registration::defaults`] lists them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Component {
    /// Name in the registry: `roll plugins` lists them.
    pub name: String,
    /// The other keys of the map. A loaded configuration has the defaults filled in.
    #[serde(flatten)]
    pub options: Options,
}

impl Component {
    /// `name` without options.
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), options: Options::new() }
    }
}

/// A reward and its weight in the sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RewardComponent {
    /// Name in the registry: `roll plugins` lists them.
    pub name: String,
    /// Factor of the reward's score in the sum.
    #[serde(default = "one")]
    pub weight: f64,
    /// The other keys of the map, as [`Component::options`].
    #[serde(flatten)]
    pub options: Options,
}

/// For `#[serde(default)]`: the usual weight.
fn one() -> f64 {
    1.0
}
