//! The location of AdamW's moments and updates.

use roll_core::{DeviceUpdates, Error, Model, Result};

/// The location of the optimizer's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerPlace {
    /// The GPU, if the state is small; else host memory.
    #[default]
    Auto,
    /// The parameters' device.
    Device,
    /// Host memory.
    Host,
}

/// Maximum number of parameters that `auto` updates on a GPU (2 GiB of moments).
const FEW: usize = 1 << 28;

impl OptimizerPlace {
    /// Parameters up to which a GPU updates them itself, and has their moments.
    pub(super) fn most_on_gpu(self) -> usize {
        match self {
            Self::Host => 0,
            Self::Auto => FEW,
            Self::Device => usize::MAX,
        }
    }

    /// Updates on the device of `model`, if they are to be made there by a rank that has the moments of `count`
    /// parameters. Fails if they cannot be made where they must.
    pub(super) fn updates(self, model: &dyn Model, count: usize) -> Result<Option<Box<dyn DeviceUpdates>>> {
        match self {
            Self::Host => Ok(None),
            Self::Auto if count > FEW => Ok(None),
            Self::Auto => Ok(model.device_updates().filter(|updates| updates.has_own_memory())),
            Self::Device => match model.device_updates() {
                None => Err(Error::config(
                    "strategy.optimizer_on",
                    "this model's parameters can be updated in host memory alone: expected `host` or `auto`, found `device`",
                )),
                updates => Ok(updates),
            },
        }
    }
}
