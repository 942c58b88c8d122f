//! How a job assembles: rank 0 listens, the others connect.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use roll_core::ThreadRanks;
use serde::{Deserialize, Serialize};

use super::frame::{self, Kind};
use super::peer::Peer;
use super::{Place, SILENCE, Side, TcpError, TcpRanks, server};

/// Pause before the next attempt to accept or to connect.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a new connection may take to say who it is.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// Bytes of the longest message while the job assembles.
const LONGEST: usize = 4096;
/// Timeout of collectives until the strategy sets its own.
const TIMEOUT: Duration = Duration::from_secs(1800);

/// What a process says when it connects.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Version of roll: processes of different ones would compute differently.
    pub version: String,
    pub job: String,
    pub size: usize,
    pub rank: usize,
}

impl Hello {
    fn of(place: &Place) -> Self {
        let version = env!("CARGO_PKG_VERSION").into();
        Self { version, job: place.job.clone(), size: place.size, rank: place.rank }
    }

    /// The reason why this process cannot take its place, if there is one. `own` is rank 0.
    fn refusal(&self, own: &Self, joined: &[Option<TcpStream>]) -> Option<String> {
        let differs = |what: &str, expected: &dyn std::fmt::Display, found: &dyn std::fmt::Display| {
            Some(format!("expected {what} {expected}, found {found}"))
        };
        match self {
            _ if self.version != own.version => differs("roll", &own.version, &self.version),
            _ if self.job != own.job => differs("the job", &own.job, &self.job),
            _ if self.size != own.size => differs("a job of so many processes:", &own.size, &self.size),
            _ if !(1..own.size).contains(&self.rank) => differs("a rank below", &own.size, &self.rank),
            _ if joined[self.rank].is_some() => Some(format!("another process is rank {} already", self.rank)),
            _ => None,
        }
    }
}

pub(super) fn as_root(place: &Place, patience: Duration) -> Result<TcpRanks, TcpError> {
    let address = format!("{}:{}", place.host, place.port);
    let listen = |source| TcpError::Listen { address: address.clone(), source };
    let listener = listener(place).map_err(listen)?;
    listener.set_nonblocking(true).map_err(listen)?;
    let since = Instant::now();
    let mut joined: Vec<Option<TcpStream>> = (0..place.size).map(|_| None).collect();
    while joined.iter().skip(1).any(Option::is_none) {
        // A connection that says nothing sensible is somebody else's.
        if let Some((rank, stream)) = listener.accept().ok().and_then(|(stream, _)| introduce(stream, place, &joined)) {
            joined[rank] = Some(stream);
        } else if since.elapsed() < patience {
            std::thread::sleep(PAUSE);
        } else {
            let missing = (1..place.size).filter(|rank| joined[*rank].is_none()).collect();
            return Err(TcpError::Missing { missing, size: place.size, address, waited: patience });
        }
    }
    let mut group = ThreadRanks::group(place.size, TIMEOUT);
    let own = group.remove(0);
    let serve = |(ranks, stream)| std::thread::spawn(move || server::serve(&stream, ranks));
    let servers = group.into_iter().zip(joined.into_iter().flatten()).map(serve).collect();
    Ok(TcpRanks { ranks: Arc::new(own), side: Side::Root(servers) })
}

/// Listens at the address of rank 0, or, where that is not this machine's (a service's or a router's), everywhere.
fn listener(place: &Place) -> io::Result<TcpListener> {
    let own: Vec<SocketAddr> = (place.host.as_str(), place.port).to_socket_addrs()?.collect();
    match TcpListener::bind(&own[..]) {
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
            let all: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
            TcpListener::bind(&all.map(|ip| SocketAddr::new(ip, place.port))[..])
        }
        bound => bound,
    }
}

/// Reads who has connected. Returns its rank, or `None` if it cannot take part, after telling it why.
fn introduce(stream: TcpStream, place: &Place, joined: &[Option<TcpStream>]) -> Option<(usize, TcpStream)> {
    stream.set_nonblocking(false).ok()?;
    configure(&stream, INTRODUCTION).ok()?;
    let said = frame::read(&stream, LONGEST).ok().filter(|said| said.kind == Kind::Hello)?;
    let hello: Hello = serde_json::from_slice(&said.bytes).ok()?;
    if let Some(reason) = hello.refusal(&Hello::of(place), joined) {
        tracing::warn!("a process that wants to be rank {} is refused: {reason}", hello.rank);
        let _ = frame::write(&stream, Kind::Refused, 0, reason.as_bytes());
        return None;
    }
    Some((hello.rank, stream))
}

fn configure(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(silence))?;
    stream.set_write_timeout(Some(silence))
}

pub(super) fn as_peer(place: &Place, patience: Duration) -> Result<TcpRanks, TcpError> {
    let (rank, address) = (place.rank, format!("{}:{}", place.host, place.port));
    let since = Instant::now();
    let stream = loop {
        let source = match connect(place) {
            Ok(stream) => break stream,
            Err(source) => source,
        };
        if since.elapsed() > patience {
            return Err(TcpError::NoRoot { rank, address, waited: patience, source });
        }
        std::thread::sleep(PAUSE);
    };
    let hello = serde_json::to_vec(&Hello::of(place)).unwrap_or_default();
    let left = patience.saturating_sub(since.elapsed()).max(INTRODUCTION);
    let answered = configure(&stream, left)
        .and_then(|()| frame::write(&stream, Kind::Hello, 0, &hello))
        .and_then(|()| frame::read(&stream, LONGEST))
        .and_then(|answer| configure(&stream, SILENCE).map(|()| answer));
    match answered {
        Ok(answer) if answer.kind == Kind::Done => {}
        Ok(answer) if answer.kind == Kind::Refused => {
            let reason = String::from_utf8_lossy(&answer.bytes).into_owned();
            return Err(TcpError::Refused { rank, address, reason });
        }
        Ok(_) => {
            let source = io::Error::new(io::ErrorKind::InvalidData, "it sent another message than expected");
            return Err(TcpError::Closed { rank, address, source });
        }
        Err(source) => return Err(TcpError::Closed { rank, address, source }),
    }
    let peer = Peer::new(rank, place.size, stream).map_err(|source| TcpError::Closed { rank, address, source })?;
    let peer = Arc::new(peer);
    Ok(TcpRanks { ranks: peer.clone(), side: Side::Peer(peer) })
}

/// Looks the name up anew each time: it may become known only when rank 0 has started.
fn connect(place: &Place) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in (place.host.as_str(), place.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, INTRODUCTION) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}
