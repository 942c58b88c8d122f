//! The messages between rank 0 and another process: a kind, a number, and bytes.

use std::io::{self, Read, Write};
use std::net::TcpStream;

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::CheckedBitPattern)]
#[repr(u8)]
pub(super) enum Kind {
    /// Asks to join; the bytes are the JSON of a [`super::join::Hello`].
    Hello = b'r',
    /// The job has assembled; or a result, with its values.
    Done,
    /// The process is not accepted; the bytes are the reason.
    Refused,
    /// The JSON of a [`roll_core::RanksError`].
    Lost,
    /// A sign of life.
    Beat,
    /// The rank failed; the bytes are the reason.
    Fail,
    Leave,
    /// Sets the timeout to the number, in milliseconds.
    Timeout,
    // Collectives, with their values
    AllReduce,
    ReduceScatter,
    AllGather,
    /// The number is the root.
    Broadcast,
    AllToAll,
    Barrier,
    /// Asks whether a rank failed.
    Check,
}

pub(super) struct Frame {
    pub kind: Kind,
    pub number: u64,
    pub bytes: Vec<u8>,
}

/// Bytes of the kind, the number and the length.
const HEADER: usize = 17;

/// Writes a message as a whole.
pub(super) fn write(mut stream: &TcpStream, kind: Kind, number: u64, bytes: &[u8]) -> io::Result<()> {
    let mut header = [kind as u8; HEADER];
    header[1..9].copy_from_slice(&number.to_le_bytes());
    header[9..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    // One packet for a small message.
    match bytes.len() {
        0..=4096 => stream.write_all(&[&header, bytes].concat()),
        _ => stream.write_all(&header).and_then(|()| stream.write_all(bytes)),
    }
}

/// Reads the next message, of at most `most` bytes.
pub(super) fn read(mut stream: &TcpStream, most: usize) -> io::Result<Frame> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let at = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| header[i + k]));
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("no message of roll: {what}"));
    let kind = bytemuck::checked::try_pod_read_unaligned(&header[..1]).map_err(|_| invalid("its kind"))?;
    let length = usize::try_from(at(9)).ok().filter(|length| *length <= most).ok_or_else(|| invalid("its length"))?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length).map_err(io::Error::other)?;
    bytes.resize(length, 0);
    stream.read_exact(&mut bytes)?;
    Ok(Frame { kind, number: at(1), bytes })
}
