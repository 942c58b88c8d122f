//! [`Communicator`] across the boundary: the ranks of the job, and those of a strategy.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use crate::abi::{RollCommunicatorTable, RollError, RollObject, RollRanks};

use super::crossing::crossing;
use super::foreign::{Foreign, ForeignObject};
use super::served::{Served, serve_shared};
use super::source::Source;
use crate::{Communicator, Rank, Result};

crossing! {
    Communicator for ForeignCommunicator, table RollCommunicatorTable of Ranks {
        ref fn all_reduce(values: &mut [f32]);
        ref fn reduce_scatter(values: &[f32], out: &mut [f32]);
        ref fn all_gather(part: &[f32], out: &mut [f32]);
        ref fn broadcast(values: &mut [f32], root: Rank);
        ref fn barrier();
        ref fn set_timeout(timeout: Duration), or (), absent ();
        ref fn fail(reason: &str), or (), absent ();
    }
    by hand [ranks] {
        fn rank(&self) -> Rank {
            Rank(self.facts.rank)
        }

        fn world_size(&self) -> usize {
            self.facts.size
        }
    }
}

unsafe extern "C" fn ranks(state: *mut c_void, out: *mut RollRanks, error: *mut RollError) -> u32 {
    let body = |ranks: &Ranks| Ok(RollRanks { rank: ranks.rank().0, size: ranks.world_size() });
    // SAFETY: P4, P7 and P8.
    unsafe { serve_shared(state, out, error, body) }
}

/// An own communicator that the other side calls.
type Ranks = Arc<dyn Communicator>;

pub(super) fn give(ranks: Ranks) -> RollObject {
    Served::give(Box::new(ranks), &TABLE)
}

pub(super) type ForeignCommunicator = ForeignObject<RollCommunicatorTable, RollRanks>;

// SAFETY: P4: its functions may be called by several threads.
unsafe impl Sync for ForeignCommunicator {}

impl ForeignCommunicator {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let (object, table) = unsafe { Foreign::new::<RollCommunicatorTable>(object, source) }?;
        let ranks = object.ask("communicator", table.ranks)?;
        Ok(Self { facts: object.must("ranks", ranks)?, object, table })
    }
}
