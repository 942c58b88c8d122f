//! Checkpointed states of a chain.

use roll_backends::{NdTensor, Offloaded};
use roll_core::Result;

use super::chain::State;

/// A checkpointed state, on the device or in host memory.
pub(super) enum Kept {
    /// The state lies on the device.
    Here(State),
    /// The state lies in host memory, or is being copied from or to it.
    Away { first: bool, caches: Vec<Option<Offloaded>> },
}

impl Kept {
    /// Starts the copy of a state to host memory.
    pub fn away(state: &State) -> Result<Self> {
        let send = |cache: &Option<NdTensor>| cache.clone().map(Offloaded::new).transpose();
        Ok(Self::Away { first: state.first, caches: state.caches.iter().map(send).collect::<Result<_>>()? })
    }

    /// Waits for the copy and frees the state's memory on the device.
    pub fn settle(&mut self) -> Result<()> {
        self.each(Offloaded::release)
    }

    /// Starts the copy back to the device.
    pub fn begin_return(&mut self) -> Result<()> {
        self.each(Offloaded::prefetch)
    }

    /// Returns the state on the device.
    pub fn back(self) -> Result<State> {
        match self {
            Self::Here(state) => Ok(state),
            Self::Away { first, caches } => {
                let caches = caches.into_iter().map(|cache| cache.map(Offloaded::into_device).transpose());
                Ok(State { first, caches: caches.collect::<Result<_>>()? })
            }
        }
    }

    fn each(&mut self, f: impl Fn(&mut Offloaded) -> Result<()>) -> Result<()> {
        match self {
            Self::Here(_) => Ok(()),
            Self::Away { caches, .. } => caches.iter_mut().flatten().try_for_each(f),
        }
    }
}
