//! Checkpointed states of a chain: a [`ChainState`] goes in, is kept on the device or in host memory, and comes out
//! again.

use roll_backends::{NdTensor, Offloaded};
use roll_core::Result;

use super::chain::ChainState;

/// A checkpointed state, on the device or in host memory.
pub(super) enum CheckpointedState {
    OnDevice(ChainState),
    /// The state lies in host memory, or is being copied from or to it.
    OnHost {
        /// See [`ChainState::is_first_chunk`].
        is_first_chunk: bool,
        caches: Vec<Option<Offloaded>>,
    },
}

impl CheckpointedState {
    /// Starts the copy of a state to host memory.
    pub fn offload(state: &ChainState) -> Result<Self> {
        let offload = |cache: &Option<NdTensor>| cache.clone().map(Offloaded::new).transpose();
        let caches = state.caches.iter().map(offload).collect::<Result<_>>()?;
        Ok(Self::OnHost { is_first_chunk: state.is_first_chunk, caches })
    }

    /// Waits for the copy to host memory and frees the state's memory on the device. Does nothing to a state that stays
    /// on the device.
    pub fn settle(&mut self) -> Result<()> {
        self.for_each_offloaded(Offloaded::release)
    }

    /// Starts the copy back to the device. Does nothing to a state that stays on the device.
    pub fn prefetch(&mut self) -> Result<()> {
        self.for_each_offloaded(Offloaded::prefetch)
    }

    /// Returns the state on the device.
    pub fn restore(self) -> Result<ChainState> {
        match self {
            Self::OnDevice(state) => Ok(state),
            Self::OnHost { is_first_chunk, caches } => {
                let caches = caches.into_iter().map(|cache| cache.map(Offloaded::into_device).transpose());
                Ok(ChainState { is_first_chunk, caches: caches.collect::<Result<_>>()? })
            }
        }
    }

    fn for_each_offloaded(&mut self, f: impl Fn(&mut Offloaded) -> Result<()>) -> Result<()> {
        match self {
            Self::OnDevice(_) => Ok(()),
            Self::OnHost { caches, .. } => caches.iter_mut().flatten().try_for_each(f),
        }
    }
}
