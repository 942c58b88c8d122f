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
    /// Maximum number of parameters that are updated on a GPU.
    pub(super) fn most_on_gpu(self, bf16_states: bool) -> usize {
        match self {
            Self::Host => 0,
            Self::Auto if bf16_states => 0,
            Self::Auto => FEW,
            Self::Device => usize::MAX,
        }
    }

    /// Returns the device updates of `model`, if a rank with the moments of `count` parameters should update there,
    /// else `None`. Fails if the device is required but impossible.
    pub(super) fn updates(
        self,
        model: &dyn Model,
        count: usize,
        bf16_states: bool,
    ) -> Result<Option<Box<dyn DeviceUpdates>>> {
        let refused = |problem: &str| Err(Error::config("strategy.optimizer_on", problem));
        match (self, bf16_states) {
            (Self::Host, _) | (Self::Auto, true) => Ok(None),
            (Self::Auto, false) if count > FEW => Ok(None),
            (Self::Auto, false) => Ok(model.device_updates().filter(|updates| updates.has_own_memory())),
            (Self::Device, true) => refused(
                "moments in bf16 (`strategy.bf16_optimizer_states`) are updated in host memory alone: expected `host` or \
                 `auto`, found `device`",
            ),
            (Self::Device, false) => match model.device_updates() {
                None => refused(
                    "this model's parameters can be updated in host memory alone: expected `host` or `auto`, found `device`",
                ),
                updates => Ok(updates),
            },
        }
    }
}
