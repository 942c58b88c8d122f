//! States of a chain that wait for the pull.

use roll_backends::{NdTensor, Offloaded};
use roll_core::Result;

use super::chain::State;

/// A state that waits, where the chain computes or in host memory.
pub(super) enum Kept {
    /// Where the chain computes.
    Here(State),
    /// In host memory, or on its way there or back.
    Away { first: bool, caches: Vec<Option<Offloaded>> },
}

impl Kept {
    /// Sends a state to the host.
    pub fn away(state: &State) -> Result<Self> {
        let send = |cache: &Option<NdTensor>| cache.clone().map(Offloaded::new).transpose();
        Ok(Self::Away { first: state.first, caches: state.caches.iter().map(send).collect::<Result<_>>()? })
    }

    /// Gives up its memory on the device.
    pub fn settle(&mut self) -> Result<()> {
        self.each(Offloaded::settle)
    }

    /// Sends it back.
    pub fn begin_return(&mut self) -> Result<()> {
        self.each(Offloaded::begin_return)
    }

    /// It, where the chain computes.
    pub fn back(self) -> Result<State> {
        match self {
            Self::Here(state) => Ok(state),
            Self::Away { first, caches } => {
                let caches = caches.into_iter().map(|cache| cache.map(Offloaded::back).transpose());
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
