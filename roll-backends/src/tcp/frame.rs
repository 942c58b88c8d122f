//! The messages between rank 0 and another process: a kind, a number, and bytes.
//!
//! A message on the wire is one byte for the kind, the number (u64), the length of the bytes (u64) and the bytes, all
//! little-endian. The number is the root of a broadcast, the milliseconds of a timeout, and else 0.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

/// The kind of a message. Kinds are counted from the letter `r`, so that the first byte of other protocols (HTTP, TLS)
/// is not a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::CheckedBitPattern)]
#[repr(u8)]
pub(super) enum Kind {
    /// Asks to join; the bytes are the JSON of a [`super::hello::Hello`].
    Hello = b'r',
    /// Rank 0's answer to what the process asked for last. To `Hello`: the job has assembled; the bytes are the proof
    /// of rank 0 if the job has a secret. To a collective: its result; the bytes are its values.
    Done,
    /// The process is not accepted; the bytes are the reason.
    Refused,
    /// A collective failed; the bytes are the JSON of a [`roll_core::RanksError`].
    Lost,
    /// A sign of life, which rank 0 returns.
    Beat,
    /// The rank failed; the bytes are the reason.
    Fail,
    /// The process leaves the job, which is no failure.
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
    // Proofs of the job's secret
    /// Random bytes of rank 0.
    Challenge,
    /// Random bytes of the process, and its proof.
    Proof,
}

/// Bytes of the longest text of a failure.
pub(super) const LONGEST_TEXT: u64 = 16 << 20;
/// Bytes of the largest collective: four times a default bucket of `zero` (2^24 values of four bytes) from each of 64
/// ranks.
pub(super) const LARGEST_COLLECTIVE: u64 = 16 << 30;

impl Kind {
    /// The most bytes of a message to rank 0 once the job has assembled.
    pub(super) fn longest_request(self) -> u64 {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::AllGather | Self::Broadcast | Self::AllToAll => {
                LARGEST_COLLECTIVE
            }
            Self::Fail => LONGEST_TEXT,
            _ => 0,
        }
    }
}

/// A message.
pub(super) struct Frame {
    pub kind: Kind,
    /// The root of a broadcast, the milliseconds of a timeout, and else [`NO_NUMBER`].
    pub number: u64,
    pub bytes: Vec<u8>,
}

/// The number of a message that has none.
pub(super) const NO_NUMBER: u64 = 0;

// The header's fields: the kind is the first byte.
const NUMBER_AT: usize = size_of::<Kind>();
const LENGTH_AT: usize = NUMBER_AT + size_of::<u64>();
const HEADER_LEN: usize = LENGTH_AT + size_of::<u64>();
/// Most bytes of a message that are sent with its header, in one packet.
const MAX_IN_ONE_PACKET: usize = 4096;
/// Most bytes that are allocated for a message before any of its bytes has arrived.
const FIRST_ALLOCATION: u64 = 1 << 16;

/// Writes a message as a whole.
pub(super) fn write(mut stream: &TcpStream, kind: Kind, number: u64, bytes: &[u8]) -> io::Result<()> {
    let mut header = [kind as u8; HEADER_LEN];
    header[NUMBER_AT..LENGTH_AT].copy_from_slice(&number.to_le_bytes());
    header[LENGTH_AT..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    match bytes.len() {
        0..=MAX_IN_ONE_PACKET => stream.write_all(&[&header, bytes].concat()),
        _ => stream.write_all(&header).and_then(|()| stream.write_all(bytes)),
    }
}

/// Reads the next message. `longest_of` returns the most bytes that a message of a kind may have. Memory grows with the
/// bytes that arrive, whatever length the message claims.
pub(super) fn read(mut stream: impl Read, longest_of: impl FnOnce(Kind) -> u64) -> io::Result<Frame> {
    let mut header = [0; HEADER_LEN];
    stream.read_exact(&mut header)?;
    let u64_at = |start: usize| u64::from_le_bytes(std::array::from_fn(|i| header[start + i]));
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, format!("no message of roll: {what}"));
    let kind: Kind =
        bytemuck::checked::try_pod_read_unaligned(&header[..1]).map_err(|_| invalid(format!("kind {}", header[0])))?;
    let (length, longest) = (u64_at(LENGTH_AT), longest_of(kind));
    if length > longest {
        return Err(invalid(format!("{kind:?} of {length} bytes, expected at most {longest}")));
    }
    let mut bytes = Vec::with_capacity(length.min(FIRST_ALLOCATION) as usize);
    if stream.take(length).read_to_end(&mut bytes)? as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Frame { kind, number: u64_at(NUMBER_AT), bytes })
}

/// Reads from a connection, and fails at `end` even if bytes still come, however slowly.
pub(super) struct Until<'a> {
    pub stream: &'a TcpStream,
    pub end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let time_left = self.end.saturating_duration_since(Instant::now());
        if time_left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(time_left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: u8, length: u64) -> Vec<u8> {
        [&[kind][..], &[0; 8], &length.to_le_bytes()].concat()
    }

    #[test]
    fn messages_have_the_kinds_and_lengths_that_are_expected() {
        let request = |bytes: &[u8]| read(bytes, Kind::longest_request);
        let all_reduce = Kind::AllReduce as u8;
        let frame = request(&[header(all_reduce, 8), vec![1; 9]].concat()).unwrap();
        assert_eq!((frame.kind, frame.bytes), (Kind::AllReduce, vec![1; 8]));
        for (kind, length, named) in [
            (all_reduce, LARGEST_COLLECTIVE + 1, "AllReduce of 17179869185 bytes, expected at most 17179869184"),
            (Kind::Barrier as u8, 1, "Barrier of 1 bytes, expected at most 0"),
            (Kind::Beat as u8, u64::MAX, "Beat of"),
            (Kind::Hello as u8, 1, "Hello of 1"),
            (Kind::Fail as u8, LONGEST_TEXT + 1, "Fail of"),
            (0, 0, "kind 0"),
            (255, 0, "kind 255"),
        ] {
            let said = request(&header(kind, length)).err().unwrap().to_string();
            assert!(said.starts_with("no message of roll") && said.contains(named), "{said}");
        }
        // Nothing of a length that is only claimed is allocated: this would be 16 GiB.
        let cut = request(&[header(all_reduce, LARGEST_COLLECTIVE), vec![0; 100]].concat());
        assert_eq!(cut.err().unwrap().kind(), io::ErrorKind::UnexpectedEof);
    }
}
