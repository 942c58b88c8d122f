//! Errors of communication between ranks.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Error, Fault};

/// The reason why a collective failed. After such a failure the ranks no longer make the same calls, and the
/// job is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum RanksError {
    /// A rank reported its failure.
    #[error("rank {rank} failed: {reason}")]
    Failed { rank: usize, reason: String },
    /// A rank ended while others wait for it.
    #[error("rank {rank} ended while the others wait for it in {what}")]
    Ended { rank: usize, what: String },
    /// Ranks did not come to a collective in time.
    #[error(
        "{} did not come to {what} within {} s: it hangs, was lost, or works longer than that \
         (`strategy.timeout_seconds`)", list(.absent), .waited.as_secs_f64()
    )]
    Absent {
        /// The ranks that did not come; empty if they cannot be known.
        absent: Vec<usize>,
        what: String,
        waited: Duration,
    },
    /// Ranks called different collectives.
    #[error("the ranks are out of step: rank 0 calls {first}, rank {rank} {other}")]
    Disagree { first: String, rank: usize, other: String },
    /// The longer buffer of a collective is not one part per rank.
    #[error("{what} over {ranks} ranks: {whole} values are not {ranks} parts of {part}")]
    Length { what: String, whole: usize, part: usize, ranks: usize },
    /// No such rank.
    #[error("there is no rank {rank}: the job has ranks 0 to {}", .ranks - 1)]
    NoSuchRank { rank: usize, ranks: usize },
}

impl RanksError {
    /// The [`RanksError`] in `error`, also inside [`Error::Context`]; `None` for other errors.
    pub fn within(error: &Error) -> Option<&Self> {
        match error {
            Error::Component { source, .. } => source.downcast_ref(),
            Error::Context { source, .. } => Self::within(source),
            _ => None,
        }
    }
}

fn list(ranks: &[usize]) -> String {
    match ranks {
        [] => "another rank".into(),
        [one] => format!("rank {one}"),
        many => format!("ranks {}", many.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

impl From<RanksError> for Error {
    fn from(e: RanksError) -> Self {
        Error::component(Fault::Failure, e)
    }
}
