//! Components as a configuration names them: a map with the name of an implementation and its options.

use serde::{Deserialize, Serialize};

use crate::{BuildContext, Options};

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
    /// Device of the reward's networks, as `backend` names it: `libtorch-cuda:1`. If absent, that of the run. If several
    /// ranks name one device, each has its own copy of the networks there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The other keys of the map, as [`Component::options`].
    #[serde(flatten)]
    pub options: Options,
}

impl RewardComponent {
    /// `name` with a weight of 1, without options.
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), weight: one(), device: None, options: Options::new() }
    }

    /// The context in which the reward is made: `context` with the reward's own device, if it has one.
    pub fn context(&self, context: &BuildContext) -> BuildContext {
        let backend = self.device.as_ref().unwrap_or(&context.backend).clone();
        BuildContext { backend, ..context.clone() }
    }
}

/// For `#[serde(default)]`: the usual weight.
fn one() -> f64 {
    1.0
}
