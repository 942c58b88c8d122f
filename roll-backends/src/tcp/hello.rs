//! What both sides of a new connection know: the message of a process that joins, and limits.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Place;
use super::secret::VARIABLE;

/// How long a new connection may take to say who it is, all its messages together.
pub(super) const INTRODUCTION: Duration = Duration::from_secs(5);
/// Bytes of the longest message while the job assembles.
pub(super) const LONGEST: u64 = 4096;
/// Random bytes of each side in a proof.
pub(super) const RANDOM: usize = 32;

/// What a process says when it connects.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Version of roll: processes of different ones would compute differently.
    pub version: String,
    pub job: String,
    pub size: usize,
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

    /// The reason why this process cannot take part, if there is one. `own` is rank 0.
    pub(super) fn refusal(&self, own: &Self) -> Option<String> {
        let differs = |what: &str, expected: &dyn std::fmt::Display, found: &dyn std::fmt::Display| {
            Some(format!("expected {what} {expected}, found {found}"))
        };
        let secret = |with: &str, without: &str| Some(format!("{with} has a {VARIABLE}, and {without} has none"));
        match self {
            _ if self.version != own.version => differs("roll", &own.version, &self.version),
            _ if own.secret && !self.secret => secret("rank 0", "this process"),
            _ if self.secret && !own.secret => secret("this process", "rank 0"),
            _ if self.job != own.job => differs("the job", &own.job, &self.job),
            _ if self.size != own.size => differs("a job of so many processes:", &own.size, &self.size),
            _ if !(1..own.size).contains(&self.rank) => differs("a rank below", &own.size, &self.rank),
            _ => None,
        }
    }
}

pub(super) fn configure(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(silence))?;
    stream.set_write_timeout(Some(silence))
}
