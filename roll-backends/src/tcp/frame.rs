//! The messages between rank 0 and another process: a kind, a number, and bytes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::CheckedBitPattern)]
#[repr(u8)]
pub(super) enum Kind {
    /// Asks to join; the bytes are the JSON of a [`super::hello::Hello`].
    Hello = b'r',
    /// The job has assembled, with the proof of rank 0 if the job has a secret; or a result, with its values.
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
    // Proofs of the job's secret
    /// Random bytes of rank 0.
    Challenge,
    /// Random bytes of the process, and its proof.
    Proof,
}

/// The longest text of a failure.
pub(super) const LONGEST_TEXT: u64 = 16 << 20;
/// Bytes of the largest collective: four times the largest buckets of `zero` (2^24 values) from each of 64 ranks.
pub(super) const LARGEST: u64 = 16 << 30;

impl Kind {
    /// The most bytes of a message to rank 0 once the job has assembled.
    pub(super) fn longest_request(self) -> u64 {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::AllGather | Self::Broadcast | Self::AllToAll => LARGEST,
            Self::Fail => LONGEST_TEXT,
            _ => 0,
        }
    }
}

pub(super) struct Frame {
    pub kind: Kind,
    pub number: u64,
    pub bytes: Vec<u8>,
}

/// Bytes of the kind, the number and the length.
const HEADER: usize = 17;
/// Bytes that are allocated before any of a message has arrived.
const AT_ONCE: u64 = 1 << 16;

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

/// Reads the next message. `longest` returns the most bytes of a message of a kind. Memory grows with the bytes that
/// arrive, whatever length the message claims.
pub(super) fn read(mut stream: impl Read, longest: impl FnOnce(Kind) -> u64) -> io::Result<Frame> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let at = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| header[i + k]));
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, format!("no message of roll: {what}"));
    let kind: Kind =
        bytemuck::checked::try_pod_read_unaligned(&header[..1]).map_err(|_| invalid(format!("kind {}", header[0])))?;
    let (length, longest) = (at(9), longest(kind));
    if length > longest {
        return Err(invalid(format!("{kind:?} of {length} bytes, expected at most {longest}")));
    }
    let mut bytes = Vec::with_capacity(length.min(AT_ONCE) as usize);
    match stream.take(length).read_to_end(&mut bytes)? as u64 == length {
        true => Ok(Frame { kind, number: at(1), bytes }),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Reads from a connection until a point in time, however slowly bytes come.
pub(super) struct Until<'a> {
    pub stream: &'a TcpStream,
    pub end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
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
            (all_reduce, LARGEST + 1, "AllReduce of 17179869185 bytes, expected at most 17179869184"),
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
        let cut = request(&[header(all_reduce, LARGEST), vec![0; 100]].concat());
        assert_eq!(cut.err().unwrap().kind(), io::ErrorKind::UnexpectedEof);
    }
}
