//! Ranks over TCP: processes that a launcher started with the address of rank 0.
//!
//! The process of rank 0 holds all ranks as [`roll_core::ThreadRanks`]. Each other process has a connection to rank 0,
//! and sends the arguments of a collective. A thread of rank 0 calls the collective in the name of that process, and
//! sends back the result or the error. So sums, the order of calls and the names of missing ranks are those of
//! `ThreadRanks`.
//!
//! All values pass through rank 0. That suffices for adapters, metrics and failures. Large values belong on NCCL, which
//! runs over these ranks.
//!
//! Every process sends a sign of life each 5 s. If a process ends, or is silent for 25 s, it has failed, and all other
//! processes get an error at once.
//!
//! While the job assembles, anyone may connect. A connection has 5 s for its introduction and a thread of its own, and
//! the number of connections is bounded, so that strangers cannot delay the job. With a [`Secret`], rank 0 and the
//! other processes prove to each other that they know it:
//!
//! ```text
//! process                                   rank 0
//!    Hello  {version, job, size, rank}  ->
//!                                       <-  Challenge  32 random bytes
//!    Proof  32 random bytes, HMAC       ->
//!                                       <-  Done  HMAC, when all have joined
//! ```
//!
//! Both HMACs (SHA-256, the secret as the key) cover the random bytes of both sides and the `Hello`. Connections are
//! not encrypted, as with NCCL: who can change packets on their way can change values. Ranks belong on a network that
//! only their owner reaches.

mod frame;
mod hello;
mod join;
mod newcomers;
mod peer;
mod secret;
mod server;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use roll_core::{Communicator, Error, Fault};

pub use secret::{Secret, VARIABLE as SECRET_VARIABLE};

/// Interval between two signs of life of a process.
const BEAT: Duration = Duration::from_secs(5);
/// A process that sends nothing for so long is lost.
const SILENCE: Duration = Duration::from_secs(25);
/// How long rank 0 waits at the end for the other processes to receive their last results.
const GRACE: Duration = Duration::from_secs(5);
/// Interval of rank 0's checks during this wait.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The place of a process in a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Rank of this process: its index among the processes.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Host name or IP address of rank 0.
    pub host: String,
    /// Port where rank 0 listens while the job assembles.
    pub port: u16,
    /// Name of the job. Processes of another job are refused.
    pub job: String,
    /// The secret of the job. Processes that do not know it are refused.
    pub secret: Option<Secret>,
}

/// The reason why a process could not join its job, or could not call a collective.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum TcpError {
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen at {address}; another MASTER_PORT may be free")]
    Listen { address: String, source: std::io::Error },
    /// Rank 0 cannot start the threads that serve the other ranks.
    #[error("rank 0 cannot serve the other ranks of {size}, each of which takes two threads of it")]
    NoThread { size: usize, source: std::io::Error },
    /// Some ranks did not connect.
    #[error("{} of {size} ranks did not connect to {address} within {} s: {}", .missing.len(), .waited.as_secs(),
        list(.missing))]
    Missing { missing: Vec<usize>, size: usize, address: String, waited: Duration },
    /// Rank 0 cannot be reached.
    #[error("rank {rank} found no rank 0 at {address} within {} s: is it the host of rank 0, is the port open, and \
        does rank 0 run?", .waited.as_secs())]
    NoRoot { rank: usize, address: String, waited: Duration, source: std::io::Error },
    /// Rank 0 does not accept this process.
    #[error("rank 0 at {address} refuses rank {rank}: {reason}")]
    Refused { rank: usize, address: String, reason: String },
    /// What listens at the address of rank 0 does not know the job's secret.
    #[error(
        "rank {rank} leaves {address}: what listens there has not proved that it knows this process's {SECRET_VARIABLE}"
    )]
    Unproven { rank: usize, address: String },
    /// A collective is too large for this transport.
    #[error(
        "`{what}` of {values} values is more than ranks over TCP pass at once ({most}): lower \
         `strategy.reduce_bucket_size`, or use `--collectives nccl`"
    )]
    TooLarge { what: String, values: usize, most: u64 },
    /// Rank 0 closed the connection before the job had assembled.
    #[error(
        "{address} closed the connection of rank {rank} before the job had assembled: rank 0 failed, or another \
        program listens there"
    )]
    Closed { rank: usize, address: String, source: std::io::Error },
}

impl From<TcpError> for Error {
    fn from(e: TcpError) -> Self {
        let is_fault_of_user =
            matches!(e, TcpError::Refused { .. } | TcpError::Unproven { .. } | TcpError::TooLarge { .. });
        let fault = if is_fault_of_user { Fault::User } else { Fault::Failure };
        Error::component(fault, e)
    }
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// A process among the processes of a job.
pub struct TcpRanks {
    ranks: Arc<dyn Communicator>,
    side: Side,
}

/// The side of the connections that this process is on.
enum Side {
    /// Rank 0, with the threads that serve the other processes.
    Root(Vec<JoinHandle<()>>),
    /// Another process.
    Peer(Arc<peer::Peer>),
}

impl TcpRanks {
    /// Joins the job. Returns when all processes have joined; waits at most `patience` for them.
    pub fn join(place: &Place, patience: Duration) -> Result<Self, TcpError> {
        match place.rank {
            0 => join::as_root(place, patience),
            _ => join::as_peer(place, patience),
        }
    }

    /// The collectives of this process.
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        self.ranks.clone()
    }

    /// Leaves the job; to be called before the process ends. Rank 0, through which all values pass, waits a moment for
    /// processes that have not received their last result.
    pub fn leave(&self) {
        match &self.side {
            Side::Peer(peer) => peer.leave(),
            Side::Root(servers) => {
                let start = Instant::now();
                while start.elapsed() < GRACE && !servers.iter().all(JoinHandle::is_finished) {
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
        }
    }
}
