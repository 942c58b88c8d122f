//! The side of the processes other than rank 0: a [`Communicator`] that asks rank 0 to call each collective for it.

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roll_core::communicator::{check_lengths, check_parts};
use roll_core::{Communicator, Rank, RanksError, Result};

use super::frame::{self, Kind, LARGEST_COLLECTIVE, LONGEST_TEXT, NO_NUMBER};
use super::{BEAT, TcpError};
use crate::sync::lock;

/// Most bytes of a reason that are sent. Less than [`LONGEST_TEXT`], because rank 0 quotes the reason to the others as
/// JSON, which may be longer.
const LONGEST_REASON: usize = 1 << 20;

/// The connection of a process to that of rank 0.
pub(super) struct Peer {
    rank: usize,
    size: usize,
    /// Locked during a collective, so that only one is under way.
    reader: Mutex<TcpStream>,
    /// Locked for one message at a time.
    writer: Arc<Mutex<TcpStream>>,
    /// The failure after which no further collective is started.
    lost: Mutex<Option<RanksError>>,
}

impl Peer {
    pub(super) fn new(rank: usize, size: usize, stream: TcpStream) -> io::Result<Self> {
        let writer = Arc::new(Mutex::new(stream.try_clone()?));
        let writer_of_thread = Arc::downgrade(&writer);
        let send_signs_of_life = move || {
            loop {
                std::thread::sleep(BEAT);
                let Some(writer) = writer_of_thread.upgrade() else { return };
                if frame::write(&lock(&writer), Kind::Beat, NO_NUMBER, &[]).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("signs of life".into()).spawn(send_signs_of_life)?;
        Ok(Self { rank, size, reader: Mutex::new(stream), writer, lost: Mutex::default() })
    }

    /// Leaves the job. If a process ends without leaving, rank 0 reports that it failed.
    pub(super) fn leave(&self) {
        let _ = self.write(Kind::Leave, NO_NUMBER, &[]);
    }

    /// Sends a message. `number` is the root of a broadcast, the milliseconds of a timeout, and else [`NO_NUMBER`].
    /// Other threads may send signs of life and failures while a collective waits for its answer.
    fn write(&self, kind: Kind, number: u64, bytes: &[u8]) -> io::Result<()> {
        frame::write(&lock(&self.writer), kind, number, bytes)
    }

    /// Sends `values` to rank 0 for a collective, and waits for the result, which has `expected` values. `what` names
    /// the collective in errors; `number` is as in [`Peer::write`]. The first failure is kept, and is the error of
    /// every later call.
    fn call(&self, kind: Kind, what: &str, number: u64, values: &[f32], expected: usize) -> Result<Vec<f32>> {
        let max_values = LARGEST_COLLECTIVE / size_of::<f32>() as u64;
        let larger_len = values.len().max(expected);
        if larger_len as u64 > max_values {
            return Err(TcpError::TooLarge { what: what.into(), values: larger_len, most: max_values }.into());
        }
        let reader = lock(&self.reader);
        if let Some(lost) = lock(&self.lost).clone() {
            return Err(lost.into());
        }
        let sent = self.write(kind, number, bytemuck::cast_slice(values));
        let result = match sent.and_then(|()| answer(&reader, expected)) {
            Ok(result) => result,
            // The connection failed.
            Err(_) => Err(RanksError::Ended { rank: 0, what: what.into() }),
        };
        result.map_err(|lost| lock(&self.lost).get_or_insert(lost).clone().into())
    }
}

/// Waits for the answer to a request: the values, or the error of the job (the inner result). Fails if the connection
/// fails or is silent for too long (the outer result). While rank 0 lives the connection is not silent, because rank 0
/// returns each sign of life.
fn answer(reader: &TcpStream, expected: usize) -> io::Result<Result<Vec<f32>, RanksError>> {
    let expected_bytes = size_of::<f32>() * expected;
    let longest = |kind| match kind {
        Kind::Done => expected_bytes as u64,
        Kind::Lost => LONGEST_TEXT,
        _ => 0,
    };
    loop {
        let frame = frame::read(reader, longest)?;
        return match frame.kind {
            Kind::Beat => continue,
            Kind::Done if frame.bytes.len() == expected_bytes => Ok(Ok(bytemuck::pod_collect_to_vec(&frame.bytes))),
            Kind::Lost => Ok(Err(serde_json::from_slice(&frame.bytes)?)),
            kind => Err(io::Error::new(io::ErrorKind::InvalidData, format!("rank 0 answered with {kind:?}"))),
        };
    }
}

impl Communicator for Peer {
    fn rank(&self) -> Rank {
        Rank(self.rank)
    }

    fn world_size(&self) -> usize {
        self.size
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        values.copy_from_slice(&self.call(Kind::AllReduce, "all_reduce", NO_NUMBER, values, values.len())?);
        Ok(())
    }

    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("reduce_scatter", values.len(), out.len(), self.size)?;
        out.copy_from_slice(&self.call(Kind::ReduceScatter, "reduce_scatter", NO_NUMBER, values, out.len())?);
        Ok(())
    }

    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        check_lengths("all_gather", out.len(), part.len(), self.size)?;
        out.copy_from_slice(&self.call(Kind::AllGather, "all_gather", NO_NUMBER, part, out.len())?);
        Ok(())
    }

    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        if root.0 >= self.size {
            return Err(RanksError::NoSuchRank { rank: root.0, ranks: self.size }.into());
        }
        values.copy_from_slice(&self.call(Kind::Broadcast, "broadcast", root.0 as u64, values, values.len())?);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.call(Kind::Barrier, "a barrier", NO_NUMBER, &[], 0).map(drop)
    }

    fn all_to_all(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        check_parts(values, out, self.size)?;
        out.copy_from_slice(&self.call(Kind::AllToAll, "all_to_all", NO_NUMBER, values, out.len())?);
        Ok(())
    }

    fn set_timeout(&self, timeout: Duration) {
        // A connection that is gone is reported by the next collective.
        let _ = self.write(Kind::Timeout, timeout.as_millis() as u64, &[]);
    }

    fn fail(&self, reason: &str) {
        let failure = RanksError::Failed { rank: self.rank, reason: reason.into() };
        lock(&self.lost).get_or_insert(failure);
        let bytes = reason.as_bytes();
        let _ = self.write(Kind::Fail, NO_NUMBER, &bytes[..bytes.len().min(LONGEST_REASON)]);
    }

    fn check(&self) -> Result<()> {
        self.call(Kind::Check, "a check", NO_NUMBER, &[], 0).map(drop)
    }
}
