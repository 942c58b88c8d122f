//! [`Communicator`] across the boundary: the ranks of the job, which a plugin gets, and the ranks of a plugin's
//! strategy. P1 to P9 are the numbers of the contract in [`crate::abi`].

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::message::{Incoming, Outgoing};
use super::object::{Answered, Gift, Remote};
use super::remote::{Fact, remote};
use crate::{Communicator, Rank, Result};

remote! {
    trait Communicator for RemoteCommunicator {
        fn all_reduce(&self, values: &mut [f32]) -> Result<()>;
        fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()>;
        fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()>;
        fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()>;
        fn barrier(&self) -> Result<()>;
        fn check(&self) -> Result<()> { Ok(()) }
        fn set_timeout(&self, timeout: Duration) { () }
        fn fail(&self, reason: &str) { () }
    }
    by hand {
        fn rank(&self) -> Rank {
            self.about.rank
        }
        fn world_size(&self) -> usize {
            self.about.world_size
        }
    }
}

/// Facts of a communicator that do not change, asked for once.
#[derive(Serialize, Deserialize)]
struct About {
    rank: Rank,
    world_size: usize,
}

impl Fact for About {}

/// Ranks of the other side.
pub(super) struct RemoteCommunicator {
    remote: Remote,
    about: About,
}

// SAFETY: P4: several threads may call it.
unsafe impl Sync for RemoteCommunicator {}

impl RemoteCommunicator {
    pub(super) fn new(remote: Remote) -> Result<Self> {
        Ok(Self { about: remote.call_required("about", &[])?, remote })
    }
}

/// Hands over a communicator.
pub(super) fn give(ranks: Arc<dyn Communicator>) -> Gift {
    Gift::shared(move |method, message: &Incoming| -> Answered {
        match method {
            "about" => Outgoing::of(&About { rank: ranks.rank(), world_size: ranks.world_size() }).map(Some),
            _ => answer_shared(ranks.as_ref(), method, message),
        }
    })
}
