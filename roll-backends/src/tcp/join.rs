//! Assembling a job: rank 0 listens ([`as_root`]), the other processes connect ([`as_peer`]).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use roll_core::{ThreadRanks, threads};

use super::frame::{self, Frame, Kind, NO_NUMBER, Until};
use super::hello::{Hello, INTRODUCTION_LIMIT, MAX_MESSAGE_BYTES, RANDOM_BYTES, configure};
use super::newcomers::{Joined, Newcomers};
use super::peer::Peer;
use super::secret::{Prover, VARIABLE};
use super::{Place, SILENCE, Side, TcpError, TcpRanks, server};

/// Pause before the next attempt to connect.
const PAUSE: Duration = Duration::from_millis(50);
/// Timeout of collectives until the strategy sets its own.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Listens until all other processes have joined, at most for `patience`, and then starts the threads that serve them.
pub(super) fn as_root(place: &Place, patience: Duration) -> Result<TcpRanks, TcpError> {
    let address = format!("{}:{}", place.host, place.port);
    let listen_error = |source| TcpError::Listen { address: address.clone(), source };
    let listener = bind_listener(place).map_err(listen_error)?;
    listener.set_nonblocking(true).map_err(listen_error)?;
    let bound = listener.local_addr().map_err(listen_error)?;
    if place.secret.is_none() && !bound.ip().is_loopback() {
        tracing::warn!(
            "whoever reaches {bound} can be a rank of this job, and read and change what it trains: set {VARIABLE} to \
             one random text for all processes, such as that of `openssl rand -hex 32`"
        );
    }
    let start = Instant::now();
    // The processes in the order of their ranks; the entry of rank 0 stays empty.
    let mut joined: Vec<Option<Joined>> = (0..place.size).map(|_| None).collect();
    let mut newcomers = Newcomers::new(place);
    while joined.iter().skip(1).any(Option::is_none) {
        if start.elapsed() > patience {
            let missing = (1..place.size).filter(|rank| joined[*rank].is_none()).collect();
            return Err(TcpError::Missing { missing, size: place.size, address, waited: patience });
        }
        newcomers.accept(&listener);
        for newcomer in newcomers.introduced() {
            match &mut joined[newcomer.rank] {
                free @ None => *free = Some(newcomer),
                Some(other) => {
                    newcomers.refuse(&newcomer, &format!("another process is rank {} already", other.rank));
                }
            }
        }
    }
    drop(newcomers);
    let mut ranks = ThreadRanks::group(place.size, DEFAULT_TIMEOUT);
    let rank_0 = ranks.remove(0);
    let serve = |(rank, joined): (ThreadRanks, Joined)| {
        threads::spawn("a rank", move || server::serve(&joined.stream, rank, &joined.welcome))
    };
    let servers: io::Result<_> = ranks.into_iter().zip(joined.into_iter().flatten()).map(serve).collect();
    let servers = servers.map_err(|source| TcpError::NoThread { size: place.size, source })?;
    Ok(TcpRanks { ranks: Arc::new(rank_0), side: Side::Root(servers) })
}

/// Listens at the address of rank 0. If that is not an address of this machine, but of a service or router in front of
/// it, listens at all addresses of this machine.
fn bind_listener(place: &Place) -> io::Result<TcpListener> {
    let root_addresses: Vec<SocketAddr> = (place.host.as_str(), place.port).to_socket_addrs()?.collect();
    match TcpListener::bind(&root_addresses[..]) {
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
            let every_address: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
            TcpListener::bind(&every_address.map(|ip| SocketAddr::new(ip, place.port))[..])
        }
        bound => bound,
    }
}

/// Connects to rank 0, again and again for at most `patience`, introduces this process, and waits until all processes
/// have joined.
pub(super) fn as_peer(place: &Place, patience: Duration) -> Result<TcpRanks, TcpError> {
    let (rank, address) = (place.rank, format!("{}:{}", place.host, place.port));
    let start = Instant::now();
    let stream = loop {
        let source = match connect(place) {
            Ok(stream) => break stream,
            Err(source) => source,
        };
        if start.elapsed() > patience {
            return Err(TcpError::NoRoot { rank, address, waited: patience, source });
        }
        std::thread::sleep(PAUSE);
    };
    let end = (start + patience).max(Instant::now() + INTRODUCTION_LIMIT);
    let closed = |source| TcpError::Closed { rank, address: address.clone(), source };
    let (answer, proof) = introduce_oneself(&stream, place, end).map_err(closed)?;
    match answer.kind {
        Kind::Done if proof.accepts(&answer.bytes) => {}
        Kind::Done => return Err(TcpError::Unproven { rank, address }),
        Kind::Refused => {
            let reason = String::from_utf8_lossy(&answer.bytes).into_owned();
            return Err(TcpError::Refused { rank, address, reason });
        }
        _ => return Err(closed(unexpected())),
    }
    configure(&stream, SILENCE).map_err(closed)?;
    let peer = Arc::new(Peer::new(rank, place.size, stream).map_err(closed)?);
    Ok(TcpRanks { ranks: peer.clone(), side: Side::Peer(peer) })
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it sent another message than expected")
}

/// The proof that this process expects from rank 0.
enum ExpectedProof<'a> {
    /// None, because this process has no secret.
    Nothing,
    /// A proof of the secret for these bytes, which both sides have exchanged.
    Of(&'a super::Secret, Vec<u8>),
    /// A proof that cannot come: this process has a secret, and rank 0 asked for no proof of it.
    Impossible,
}

impl ExpectedProof<'_> {
    fn accepts(&self, found: &[u8]) -> bool {
        match self {
            Self::Nothing => true,
            Self::Of(secret, exchanged) => secret.verifies(Prover::Root, exchanged, found),
            Self::Impossible => false,
        }
    }
}

/// Asks to join, and proves that this process knows the secret of the job if it has one. Returns the last answer of
/// rank 0 and the proof that it must contain. The steps are drawn at the top of `tcp`.
fn introduce_oneself<'a>(stream: &TcpStream, place: &'a Place, end: Instant) -> io::Result<(Frame, ExpectedProof<'a>)> {
    configure(stream, INTRODUCTION_LIMIT)?;
    let hello = serde_json::to_vec(&Hello::of(place))?;
    frame::write(stream, Kind::Hello, NO_NUMBER, &hello)?;
    let next_answer = || frame::read(Until { stream, end }, |_| MAX_MESSAGE_BYTES);
    let answer = next_answer()?;
    match (&place.secret, answer.kind) {
        (Some(secret), Kind::Challenge) => {
            let own_random: [u8; RANDOM_BYTES] = rand::random();
            let exchanged = [&answer.bytes, &own_random[..], &hello].concat();
            let own_proof = secret.proof(Prover::Peer, &exchanged);
            frame::write(stream, Kind::Proof, NO_NUMBER, &[&own_random[..], &own_proof].concat())?;
            Ok((next_answer()?, ExpectedProof::Of(secret, exchanged)))
        }
        (Some(_), _) => Ok((answer, ExpectedProof::Impossible)),
        (None, _) => Ok((answer, ExpectedProof::Nothing)),
    }
}

/// Connects to rank 0, at the first of its addresses that answers. Looks the host name up at each call, because it may
/// become known only when rank 0 has started.
fn connect(place: &Place) -> io::Result<TcpStream> {
    let mut last_error = io::Error::from(io::ErrorKind::NotFound);
    for address in (place.host.as_str(), place.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, INTRODUCTION_LIMIT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}
