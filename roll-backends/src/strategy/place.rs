//! Where AdamW works.

use roll_core::{DeviceUpdates, Error, Model, Result};

/// Where the optimizer works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerPlace {
    /// On GPUs, where their memory is hardly touched by it.
    #[default]
    Auto,
    /// Where the parameters are.
    Device,
    /// In host memory.
    Host,
}

/// Parameters up to which `auto` works on a GPU: moments of 2 GiB.
const FEW: usize = 1 << 28;

impl OptimizerPlace {
    /// Parameters up to which a GPU updates them itself, and has their moments.
    pub(super) fn most_on_gpu(self, bf16_states: bool) -> usize {
        match self {
            Self::Host => 0,
            Self::Auto if bf16_states => 0,
            Self::Auto => FEW,
            Self::Device => usize::MAX,
        }
    }

    /// Updates on the device of `model`, if they are to be made there by a rank that has the moments of `count`
    /// parameters. Fails if they cannot be made where they must.
    pub(super) fn updates(
        self,
        model: &mut dyn Model,
        count: usize,
        bf16_states: bool,
    ) -> Result<Option<Box<dyn DeviceUpdates>>> {
        let mut on_device = || model.parts().and_then(|parts| parts.device_updates());
        let refused = |problem: &str| Err(Error::config("strategy.optimizer_on", problem));
        match (self, bf16_states) {
            (Self::Host, _) | (Self::Auto, true) => Ok(None),
            (Self::Auto, false) if count > FEW => Ok(None),
            (Self::Auto, false) => Ok(on_device().filter(|updates| updates.has_own_memory())),
            (Self::Device, true) => refused(
                "moments in bf16 (`strategy.bf16_optimizer_states`) are updated in host memory alone: expected `host` or \
                 `auto`, found `device`",
            ),
            (Self::Device, false) => match on_device() {
                None => refused(
                    "this model's parameters can be updated in host memory alone: expected `host` or `auto`, found `device`",
                ),
                updates => Ok(updates),
            },
        }
    }
}
