//! The option of where the idle expert's weights are kept.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Location of the weights of the expert that is not in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IdleExpert {
    /// `keep` on the CPU; `host` or `drop` on GPUs if memory is short.
    #[default]
    Auto,
    /// The device.
    Keep,
    /// Host memory, in the dtype of the device.
    Host,
    /// The weight files.
    Drop,
}

impl IdleExpert {
    /// Resolves `Auto` for experts of `bytes` bytes in total. `memory` is that of the GPU, if the device is a GPU whose
    /// memory is known. `is_converted` says whether weights are computed while they are read, because the files have
    /// another dtype or LoRAs are merged. Computing is slower than a copy, so such experts stay in host memory instead
    /// of being read again.
    pub(crate) fn chosen(self, bytes: usize, is_gpu: bool, memory: Option<u64>, is_converted: bool) -> Self {
        let take_at_most_half = |memory: u64| 2 * bytes as u64 <= memory;
        match self {
            // The CPU computes in host memory.
            Self::Auto if !is_gpu => Self::Keep,
            Self::Auto if memory.is_some_and(take_at_most_half) => Self::Keep,
            Self::Auto if is_converted => Self::Host,
            Self::Auto => Self::Drop,
            given => given,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_of_the_idle_expert_follows_the_memory() {
        let chosen = |gpu, memory, converted| IdleExpert::Auto.chosen(57_000_000_000, gpu, memory, converted);
        assert_eq!(chosen(false, None, true), IdleExpert::Keep);
        assert_eq!(chosen(true, Some(141_000_000_000), true), IdleExpert::Keep);
        assert_eq!(chosen(true, Some(80_000_000_000), true), IdleExpert::Host);
        assert_eq!(
            (chosen(true, Some(80_000_000_000), false), chosen(true, None, false)),
            (IdleExpert::Drop, IdleExpert::Drop)
        );
        assert_eq!(IdleExpert::Host.chosen(1, false, None, false), IdleExpert::Host);
    }
}
