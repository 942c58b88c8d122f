//! The location of AdamW's moments and updates.

use roll_core::{DeviceUpdates, Error, Model, Result};

/// The location of the optimizer's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerLocation {
    /// The GPU, if the state is small; else host memory.
    #[default]
    Auto,
    /// The parameters' device.
    Device,
    /// Host memory.
    Host,
}

/// Maximum number of parameters that `auto` updates on a GPU (2 GiB of moments).
const AUTO_LIMIT: usize = 1 << 28;

impl OptimizerLocation {
    /// The most parameters that a GPU updates itself, with their moments in its memory.
    pub(super) fn max_on_gpu(self) -> usize {
        match self {
            Self::Host => 0,
            Self::Auto => AUTO_LIMIT,
            Self::Device => usize::MAX,
        }
    }

    /// Returns the device updates of `model` if a rank that has the moments of `count` parameters should update them on
    /// the device; `None` if it should update them in host memory. Fails if the device is required and the model has no
    /// device updates.
    pub(super) fn updates(self, model: &mut dyn Model, count: usize) -> Result<Option<Box<dyn DeviceUpdates>>> {
        let mut on_device = || model.parts().and_then(|parts| parts.device_updates());
        match self {
            Self::Host => Ok(None),
            Self::Auto if count > AUTO_LIMIT => Ok(None),
            Self::Auto => Ok(on_device().filter(|updates| updates.has_own_memory())),
            Self::Device => on_device().map(Some).ok_or_else(|| {
                let problem = "this model's parameters can be updated in host memory alone: expected `host` or `auto`, \
                               found `device`";
                Error::config("strategy.optimizer_on", problem)
            }),
        }
    }
}
