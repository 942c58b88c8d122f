//! Helpers that unit tests of several modules share.
#![allow(clippy::unwrap_used)]

pub(crate) mod device_model;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_tensor::Device;
use roll_core::{Communicator, Rank, Result};

use crate::Backend;

/// Devices of this build that work on this machine and are selected by ROLL_TEST_BACKENDS.
pub(crate) fn devices() -> impl Iterator<Item = (Backend, Device)> {
    let tested = Backend::ALL.into_iter().filter(|b| roll_testing::is_tested(b.name()) && b.check_usable(0).is_ok());
    tested.map(|backend| (backend, crate::device(backend.name()).unwrap()))
}

pub(crate) fn assert_near(what: &str, found: &[f32], expected: &[f32]) {
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * b.abs().max(5e-2);
    assert!(found.len() == expected.len() && found.iter().zip(expected).all(near), "{what}");
}

/// A communicator that counts its collectives.
pub(crate) struct CountingRanks {
    ranks: Arc<dyn Communicator>,
    /// Number of reduce-scatters that have finished.
    pub(crate) reduced: AtomicUsize,
    /// Number of all-gathers that have started, without those that exchange requests, which are shorter.
    pub(crate) gathered: AtomicUsize,
}

impl CountingRanks {
    pub(crate) fn new(ranks: Arc<dyn Communicator>) -> Arc<Self> {
        Arc::new(Self { ranks, reduced: AtomicUsize::default(), gathered: AtomicUsize::default() })
    }
}

impl Communicator for CountingRanks {
    fn rank(&self) -> Rank {
        self.ranks.rank()
    }
    fn world_size(&self) -> usize {
        self.ranks.world_size()
    }
    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        self.ranks.all_reduce(values)
    }
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.ranks.reduce_scatter(values, out)?;
        self.reduced.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        self.gathered.fetch_add(usize::from(part.len() > 3), Ordering::SeqCst);
        self.ranks.all_gather(part, out)
    }
    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        self.ranks.broadcast(values, root)
    }
    fn barrier(&self) -> Result<()> {
        self.ranks.barrier()
    }
}
