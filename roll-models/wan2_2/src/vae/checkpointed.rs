//! Checkpointed states of a chain.

use roll_backends::{NdTensor, Offloaded};
use roll_core::Result;

use super::chain::ChainState;

/// A checkpointed state, on the device or in host memory.
pub(super) enum CheckpointedState {
    OnDevice(ChainState),
    /// The state lies in host memory, or is being copied from or to it.
    OnHost {
        first: bool,
        caches: Vec<Option<Offloaded>>,
    },
}

impl CheckpointedState {
    /// Starts the copy of a state to host memory.
    pub fn offload(state: &ChainState) -> Result<Self> {
        let send = |cache: &Option<NdTensor>| cache.clone().map(Offloaded::new).transpose();
        Ok(Self::OnHost { first: state.first, caches: state.caches.iter().map(send).collect::<Result<_>>()? })
    }

    /// Waits for the copy to host memory and frees the state's memory on the device.
    pub fn settle(&mut self) -> Result<()> {
        self.each(Offloaded::release)
    }

    /// Starts the copy back to the device.
    pub fn prefetch(&mut self) -> Result<()> {
        self.each(Offloaded::prefetch)
    }

    /// Returns the state on the device.
    pub fn restore(self) -> Result<ChainState> {
        match self {
            Self::OnDevice(state) => Ok(state),
            Self::OnHost { first, caches } => {
                let caches = caches.into_iter().map(|cache| cache.map(Offloaded::into_device).transpose());
                Ok(ChainState { first, caches: caches.collect::<Result<_>>()? })
            }
        }
    }

    fn each(&mut self, f: impl Fn(&mut Offloaded) -> Result<()>) -> Result<()> {
        match self {
            Self::OnDevice(_) => Ok(()),
            Self::OnHost { caches, .. } => caches.iter_mut().flatten().try_for_each(f),
        }
    }
}
