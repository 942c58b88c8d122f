//! The introduction of a process that joins a job, as both sides of the connection know it: its first message, and the
//! limits.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Place;
use super::secret::VARIABLE;

/// Time limit of an introduction, for all its messages together.
pub(super) const INTRODUCTION_LIMIT: Duration = Duration::from_secs(5);
/// Bytes of the longest message while the job assembles.
pub(super) const MAX_MESSAGE_BYTES: u64 = 4096;
/// Random bytes of each side in a proof.
pub(super) const RANDOM_BYTES: usize = 32;

/// The first message of a process that connects.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Version of roll, which must be the same for all processes, because another version may compute differently.
    pub version: String,
    /// Name of the job.
    pub job: String,
    /// Number of processes of the job.
    pub size: usize,
    /// Rank that the process wants to have.
    pub rank: usize,
    /// Whether the process has a secret to prove.
    #[serde(default)]
    pub secret: bool,
}

impl Hello {
    pub(super) fn of(place: &Place) -> Self {
        let version = env!("CARGO_PKG_VERSION").into();
        Self { version, job: place.job.clone(), size: place.size, rank: place.rank, secret: place.secret.is_some() }
    }

    /// The reason why this process cannot take part; `None` if it can. `root` is the `Hello` that rank 0 would send.
    pub(super) fn refusal(&self, root: &Self) -> Option<String> {
        let differs = |what: &str, expected: &dyn std::fmt::Display, found: &dyn std::fmt::Display| {
            Some(format!("expected {what} {expected}, found {found}"))
        };
        let one_secret = |with: &str, without: &str| Some(format!("{with} has a {VARIABLE}, and {without} has none"));
        if self.version != root.version {
            differs("roll", &root.version, &self.version)
        } else if root.secret && !self.secret {
            one_secret("rank 0", "this process")
        } else if self.secret && !root.secret {
            one_secret("this process", "rank 0")
        } else if self.job != root.job {
            differs("the job", &root.job, &self.job)
        } else if self.size != root.size {
            differs("a job of so many processes:", &root.size, &self.size)
        } else if !(1..root.size).contains(&self.rank) {
            differs("a rank above 0 and below", &root.size, &self.rank)
        } else {
            None
        }
    }
}

/// Configures a connection: messages are sent at once, and reads and writes fail after `silence`.
pub(super) fn configure(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(silence))?;
    stream.set_write_timeout(Some(silence))
}
