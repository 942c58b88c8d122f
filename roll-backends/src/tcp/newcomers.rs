//! Connections to rank 0 that have not finished their introduction. Any stranger can make one. Their number, their time
//! and the bytes that they may send are therefore bounded.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::Place;
use super::frame::{self, Kind, NO_NUMBER, Until};
use super::hello::{Hello, INTRODUCTION_LIMIT, MAX_MESSAGE_BYTES, RANDOM_BYTES, configure};
use super::secret::{Prover, VARIABLE};

/// Maximum number of connections that introduce themselves at the same time. Further ones wait in the system's queue.
const MAX_WAITING: usize = 512;
/// If there are [`MAX_WAITING`] connections, the oldest is closed to make room for a new one if it is older than this.
const MIN_AGE_TO_CLOSE: Duration = Duration::from_secs(1);
/// How long rank 0 waits for an introduction before it looks for new connections.
const PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of refusals that are logged, because strangers could cause any number of them.
const MAX_LOGGED: usize = 20;
/// Stack of the thread of a connection, which parses one small JSON object.
const STACK: usize = 256 << 10;

/// A process that belongs to the job.
pub(super) struct Joined {
    pub rank: usize,
    pub stream: Arc<TcpStream>,
    /// The proof of rank 0, sent when the job has assembled; empty if the job has no secret.
    pub welcome: Vec<u8>,
}

/// The result of an introduction.
enum Introduction {
    Joins(Joined),
    Refused { rank: usize, reason: String },
}

/// A connection whose introduction is under way.
struct Newcomer {
    number: u64,
    since: Instant,
    stream: Arc<TcpStream>,
}

/// The connections that introduce themselves, each in a thread. Dropping this closes them.
pub(super) struct Newcomers<'a> {
    place: &'a Place,
    /// The oldest first.
    waiting: Vec<Newcomer>,
    /// Number of connections so far.
    accepted: u64,
    /// Number of refusals so far.
    refused: usize,
    /// The threads send the number of the connection and the result.
    sender: mpsc::Sender<(u64, io::Result<Introduction>)>,
    results: mpsc::Receiver<(u64, io::Result<Introduction>)>,
}

impl<'a> Newcomers<'a> {
    pub(super) fn new(place: &'a Place) -> Self {
        let (sender, results) = mpsc::channel();
        Self { place, waiting: Vec::new(), accepted: 0, refused: 0, sender, results }
    }

    /// Accepts the connections in the system's queue, a bounded number per call.
    pub(super) fn accept(&mut self, listener: &TcpListener) {
        for _ in 0..MAX_WAITING {
            if self.waiting.len() >= MAX_WAITING && !self.make_room() {
                return;
            }
            match listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                // The other side has closed the connection again.
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                // The queue is empty.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // The system has no descriptor left.
                Err(_) => {
                    self.make_room();
                    return;
                }
            }
        }
    }

    /// Closes the oldest connection if it is older than [`MIN_AGE_TO_CLOSE`]. Returns whether it was.
    fn make_room(&mut self) -> bool {
        let is_old = self.waiting.first().is_some_and(|oldest| oldest.since.elapsed() > MIN_AGE_TO_CLOSE);
        if is_old {
            let _ = self.waiting.remove(0).stream.shutdown(Shutdown::Both);
        }
        is_old
    }

    /// Starts the introduction of a connection.
    fn admit(&mut self, stream: TcpStream) {
        self.accepted += 1;
        let (number, since, stream) = (self.accepted, Instant::now(), Arc::new(stream));
        let (place, sender, stream_of_thread) = (self.place.clone(), self.sender.clone(), stream.clone());
        let introduction = move || {
            let result = introduce(&stream_of_thread, &place, since + INTRODUCTION_LIMIT);
            // Sending fails if the job has assembled; the stranger's connection ends with this thread.
            let _ = sender.send((number, result));
        };
        // Without a thread, the connection is closed here.
        if std::thread::Builder::new().name("newcomer".into()).stack_size(STACK).spawn(introduction).is_ok() {
            self.waiting.push(Newcomer { number, since, stream });
        }
    }

    /// Waits up to [`PAUSE`] for results of introductions, and returns the processes that belong to the job.
    pub(super) fn introduced(&mut self) -> Vec<Joined> {
        let mut joined = Vec::new();
        let mut next = self.results.recv_timeout(PAUSE).ok();
        while let Some((number, result)) = next {
            self.waiting.retain(|newcomer| newcomer.number != number);
            match result {
                Ok(Introduction::Joins(process)) => joined.push(process),
                Ok(Introduction::Refused { rank, reason }) => self.log_refusal(rank, &reason),
                // The other side is no process of roll, or it is gone.
                Err(error) => tracing::debug!("a connection to rank 0 is closed: {error}"),
            }
            next = self.results.try_recv().ok();
        }
        joined
    }

    /// Sends a process the reason why it cannot take part.
    pub(super) fn refuse(&mut self, process: &Joined, reason: &str) {
        self.log_refusal(process.rank, reason);
        let _ = frame::write(&process.stream, Kind::Refused, NO_NUMBER, reason.as_bytes());
    }

    fn log_refusal(&mut self, rank: usize, reason: &str) {
        self.refused += 1;
        if self.refused <= MAX_LOGGED {
            tracing::warn!("a process that wants to be rank {rank} is refused: {reason}");
        }
        if self.refused == MAX_LOGGED {
            tracing::warn!("further processes that are refused are not logged");
        }
    }
}

impl Drop for Newcomers<'_> {
    fn drop(&mut self) {
        for newcomer in &self.waiting {
            let _ = newcomer.stream.shutdown(Shutdown::Both);
        }
    }
}

/// The side of rank 0 of an introduction: checks the `Hello` of the process, and if the job has a secret, checks the
/// process's proof and prepares that of rank 0. The steps are drawn at the top of `tcp`.
fn introduce(stream: &Arc<TcpStream>, place: &Place, end: Instant) -> io::Result<Introduction> {
    stream.set_nonblocking(false)?;
    configure(stream, INTRODUCTION_LIMIT)?;
    let hello_bytes = next(stream, end, Kind::Hello)?;
    let hello: Hello = serde_json::from_slice(&hello_bytes)?;
    let refused = |reason: String| {
        let _ = frame::write(stream, Kind::Refused, NO_NUMBER, reason.as_bytes());
        Ok(Introduction::Refused { rank: hello.rank, reason })
    };
    if let Some(reason) = hello.refusal(&Hello::of(place)) {
        return refused(reason);
    }
    let mut welcome = Vec::new();
    if let Some(secret) = &place.secret {
        let challenge: [u8; RANDOM_BYTES] = rand::random();
        frame::write(stream, Kind::Challenge, NO_NUMBER, &challenge)?;
        let answer = next(stream, end, Kind::Proof)?;
        let (random, proof) = answer.split_at_checked(RANDOM_BYTES).ok_or(io::ErrorKind::InvalidData)?;
        let exchanged = [&challenge[..], random, &hello_bytes].concat();
        if !secret.verifies(Prover::Peer, &exchanged, proof) {
            return refused(format!("its {VARIABLE} is not that of rank 0"));
        }
        welcome = secret.proof(Prover::Root, &exchanged);
    }
    Ok(Introduction::Joins(Joined { rank: hello.rank, stream: stream.clone(), welcome }))
}

/// The bytes of the next message, which must be of this kind.
fn next(stream: &TcpStream, end: Instant, kind: Kind) -> io::Result<Vec<u8>> {
    let longest = |found| if found == kind { MAX_MESSAGE_BYTES } else { 0 };
    let message = frame::read(Until { stream, end }, longest)?;
    if message.kind != kind {
        let problem = format!("expected {kind:?}, found {:?}", message.kind);
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    Ok(message.bytes)
}
