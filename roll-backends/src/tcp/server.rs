//! The side of rank 0 of a connection: calls the collectives that the other process asks for, as the rank of that
//! process.

use std::io;
use std::net::TcpStream;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use roll_core::{Communicator, Error, Rank, RanksError, Result, ThreadRanks, threads};

use super::SILENCE;
use super::frame::{self, Frame, Kind, NO_NUMBER};
use crate::sync::lock;

/// The reported reason of failure of a process whose connection ended.
const GONE: &str = "its process ended, or its machine or network is gone";

/// Serves a process until it leaves; `ranks` is its rank. First sends `welcome`, the bytes of the message that the job
/// has assembled.
///
/// There are two threads. A new one calls collectives, which may wait long for other ranks. The calling thread reads,
/// and so notices a failure or the end of the process meanwhile.
pub(super) fn serve(stream: &TcpStream, ranks: ThreadRanks, welcome: &[u8]) {
    // Room for one request: a process must not send a second one before it has the answer to the first.
    let (sender, requests) = mpsc::sync_channel::<Frame>(1);
    let (ranks, writer) = (&ranks, &Mutex::new(stream));
    std::thread::scope(|scope| {
        let answer_requests = move || {
            for frame in requests {
                let written = match answer(ranks, frame) {
                    Ok(values) => write(writer, Kind::Done, bytemuck::cast_slice(&values)),
                    Err(error) => write(writer, Kind::Lost, &serde_json::to_vec(&error).unwrap_or_default()),
                };
                if written.is_err() {
                    return;
                }
            }
        };
        if let Err(error) = threads::spawn_scoped(scope, "a rank", answer_requests) {
            return ranks.fail(&error.to_string());
        }
        let welcome_and_read = || {
            stream.set_read_timeout(Some(SILENCE))?;
            stream.set_write_timeout(Some(SILENCE))?;
            write(writer, Kind::Done, welcome)?;
            read_until_it_leaves(stream, ranks, writer, &sender)
        };
        if welcome_and_read().is_err() {
            ranks.fail(GONE); // has no effect if the process reported a reason before
        }
        drop(sender); // ends the thread that calls collectives
    });
}

/// Reads messages of the process: passes requests for collectives on to `requests`, and handles all other messages.
/// Returns when the process leaves; fails if the connection ends before.
fn read_until_it_leaves(
    stream: &TcpStream,
    ranks: &ThreadRanks,
    writer: &Mutex<&TcpStream>,
    requests: &mpsc::SyncSender<Frame>,
) -> io::Result<()> {
    loop {
        let frame = frame::read(stream, Kind::longest_request)?;
        match frame.kind {
            Kind::Leave => return Ok(()),
            Kind::Beat => write(writer, Kind::Beat, &[])?,
            Kind::Fail => ranks.fail(&String::from_utf8_lossy(&frame.bytes)),
            Kind::Timeout => ranks.set_timeout(Duration::from_millis(frame.number)),
            _ => requests.try_send(frame).map_err(io::Error::other)?,
        }
    }
}

fn write(writer: &Mutex<&TcpStream>, kind: Kind, bytes: &[u8]) -> io::Result<()> {
    frame::write(&lock(writer), kind, NO_NUMBER, bytes)
}

/// Calls the collective that a frame asks for. Its values are the answer.
fn answer(ranks: &ThreadRanks, Frame { kind, number, bytes }: Frame) -> Result<Vec<f32>, RanksError> {
    collective(ranks, kind, number, bytemuck::pod_collect_to_vec(&bytes)).map_err(|error| {
        let failed = || RanksError::Failed { rank: ranks.rank().0, reason: error.chain() };
        RanksError::within(&error).cloned().unwrap_or_else(failed)
    })
}

fn collective(ranks: &ThreadRanks, kind: Kind, number: u64, mut values: Vec<f32>) -> Result<Vec<f32>> {
    // 0 for collectives that change `values` in place or have no values.
    let out_len = match kind {
        Kind::ReduceScatter => values.len() / ranks.world_size(),
        Kind::AllGather => values.len() * ranks.world_size(),
        Kind::AllToAll => values.len(),
        _ => 0,
    };
    let mut out = vec![0.0; out_len];
    match kind {
        Kind::AllReduce => ranks.all_reduce(&mut values)?,
        Kind::Broadcast => ranks.broadcast(&mut values, Rank(number as usize))?,
        Kind::ReduceScatter => ranks.reduce_scatter(&values, &mut out)?,
        Kind::AllGather => ranks.all_gather(&values, &mut out)?,
        Kind::AllToAll => ranks.all_to_all(&values, &mut out)?,
        Kind::Barrier => ranks.barrier()?,
        Kind::Check => ranks.check()?,
        _ => return Err(Error::Misuse(format!("{kind:?} is no collective"))),
    }
    Ok(if out_len == 0 { values } else { out })
}
