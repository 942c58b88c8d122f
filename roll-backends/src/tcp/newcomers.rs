//! Connections to rank 0 that have not said who they are.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::Place;
use super::frame::{self, Kind, Until};
use super::hello::{Hello, INTRODUCTION, LONGEST, RANDOM, configure};
use super::secret::{Prover, VARIABLE};

/// Most connections that introduce themselves at a time. The others wait in the system's queue.
const MOST: usize = 512;
/// A connection that is silent for so long makes room for another one, if there are [`MOST`].
const MAKES_ROOM: Duration = Duration::from_secs(1);
/// How long rank 0 waits for an introduction before it looks for new connections.
const PAUSE: Duration = Duration::from_millis(5);
/// Refusals that are logged: their number is up to strangers.
const LOGGED: usize = 20;
/// Stack of the thread of a connection, which parses one small JSON object.
const STACK: usize = 256 << 10;

/// A process that belongs to the job.
pub(super) struct Joined {
    pub rank: usize,
    pub stream: Arc<TcpStream>,
    /// The proof of rank 0, sent when the job has assembled.
    pub welcome: Vec<u8>,
}

enum Introduction {
    Joins(Joined),
    /// Rank and reason.
    Refused(usize, String),
}

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
    number: u64,
    refused: usize,
    tell: mpsc::Sender<(u64, io::Result<Introduction>)>,
    told: mpsc::Receiver<(u64, io::Result<Introduction>)>,
}

impl<'a> Newcomers<'a> {
    pub(super) fn new(place: &'a Place) -> Self {
        let (tell, told) = mpsc::channel();
        Self { place, waiting: Vec::new(), number: 0, refused: 0, tell, told }
    }

    /// Accepts the connections that wait, a bounded number at a time.
    pub(super) fn accept(&mut self, listener: &TcpListener) {
        for _ in 0..MOST {
            if self.waiting.len() >= MOST && !self.make_room() {
                return;
            }
            match listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                // Somebody who went away again.
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // The system has no descriptor left.
                Err(_) => {
                    self.make_room();
                    return;
                }
            }
        }
    }

    /// Closes the oldest connection if it has had its time. Returns false if it has not.
    fn make_room(&mut self) -> bool {
        let is_old = self.waiting.first().is_some_and(|oldest| oldest.since.elapsed() > MAKES_ROOM);
        if is_old {
            let _ = self.waiting.remove(0).stream.shutdown(Shutdown::Both);
        }
        is_old
    }

    fn admit(&mut self, stream: TcpStream) {
        self.number += 1;
        let (number, since, stream) = (self.number, Instant::now(), Arc::new(stream));
        let (place, tell, own) = (self.place.clone(), self.tell.clone(), stream.clone());
        let introduces = move || {
            let introduced = introduce(&own, &place, since + INTRODUCTION);
            // The connection of a stranger ends with this thread.
            let _ = tell.send((number, introduced));
        };
        // A connection for which there is no thread is closed.
        if std::thread::Builder::new().name("newcomer".into()).stack_size(STACK).spawn(introduces).is_ok() {
            self.waiting.push(Newcomer { number, since, stream });
        }
    }

    /// Waits a moment, and returns the processes that belong to the job.
    pub(super) fn introduced(&mut self) -> Vec<Joined> {
        let mut joined = Vec::new();
        let mut next = self.told.recv_timeout(PAUSE).ok();
        while let Some((number, introduced)) = next {
            self.waiting.retain(|newcomer| newcomer.number != number);
            match introduced {
                Ok(Introduction::Joins(newcomer)) => joined.push(newcomer),
                Ok(Introduction::Refused(rank, reason)) => self.log(rank, &reason),
                // It said nothing sensible, so it is somebody else's.
                Err(error) => tracing::debug!("a connection to rank 0 is closed: {error}"),
            }
            next = self.told.try_recv().ok();
        }
        joined
    }

    /// Tells a process why it cannot take part.
    pub(super) fn refuse(&mut self, process: &Joined, reason: &str) {
        self.log(process.rank, reason);
        let _ = frame::write(&process.stream, Kind::Refused, 0, reason.as_bytes());
    }

    fn log(&mut self, rank: usize, reason: &str) {
        self.refused += 1;
        if self.refused <= LOGGED {
            tracing::warn!("a process that wants to be rank {rank} is refused: {reason}");
        }
        if self.refused == LOGGED {
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

/// Reads who has connected, and has it prove that it knows the secret of the job.
fn introduce(stream: &Arc<TcpStream>, place: &Place, end: Instant) -> io::Result<Introduction> {
    stream.set_nonblocking(false)?;
    configure(stream, INTRODUCTION)?;
    let said = next(stream, end, Kind::Hello)?;
    let hello: Hello = serde_json::from_slice(&said)?;
    let refused = |reason: String| {
        let _ = frame::write(stream, Kind::Refused, 0, reason.as_bytes());
        Ok(Introduction::Refused(hello.rank, reason))
    };
    if let Some(reason) = hello.refusal(&Hello::of(place)) {
        return refused(reason);
    }
    let mut welcome = Vec::new();
    if let Some(secret) = &place.secret {
        let challenge: [u8; RANDOM] = rand::random();
        frame::write(stream, Kind::Challenge, 0, &challenge)?;
        let answer = next(stream, end, Kind::Proof)?;
        let (random, proof) = answer.split_at_checked(RANDOM).ok_or(io::ErrorKind::InvalidData)?;
        let exchanged = [&challenge[..], random, &said].concat();
        if !secret.verifies(Prover::Peer, &exchanged, proof) {
            return refused(format!("its {VARIABLE} is not that of rank 0"));
        }
        welcome = secret.proof(Prover::Root, &exchanged);
    }
    Ok(Introduction::Joins(Joined { rank: hello.rank, stream: stream.clone(), welcome }))
}

/// The bytes of the next message, which must be of this kind.
fn next(stream: &TcpStream, end: Instant, kind: Kind) -> io::Result<Vec<u8>> {
    let longest = |found| if found == kind { LONGEST } else { 0 };
    let said = frame::read(Until { stream, end }, longest)?;
    match said.kind == kind {
        true => Ok(said.bytes),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, format!("expected {kind:?}, found {:?}", said.kind))),
    }
}
