//! An HTTP server for one person on this machine.
//!
//! A connection carries one request, and everything that comes in is limited in size and time. A request is answered
//! only if it has the secret token of the address; until then its connection is a *newcomer*, which a newer one may
//! end.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use subtle::ConstantTimeEq;

/// Request line and headers have at most this many bytes.
const MAX_HEAD: usize = 8 << 10;
/// A request has at most this many headers.
const MAX_HEADERS: usize = 64;
/// A newcomer's connection ends after this time.
const HEAD_TIME: Duration = Duration::from_secs(1);
/// Most newcomers at a time. A further one ends the oldest one, so that strangers who connect and send nothing cannot
/// keep out a browser, which sends its request at once.
const MAX_NEWCOMERS: usize = 64;
/// Most connections with the token that are served at a time. Others get the status 503.
const MAX_CONNECTIONS: usize = 32;
/// The bytes that a reader sends besides its request are read until this time after the beginning of the answer.
const CLOSE_TIME: Duration = Duration::from_secs(1);
/// Bytes of a part of an answer.
const PART_BYTES: usize = 64 << 10;
/// The reader must take each part of the answer within this time.
const PART_TIME: Duration = Duration::from_secs(5);
/// Time before the next connection is accepted after one could not be.
const RETRY_TIME: Duration = Duration::from_millis(50);
/// The reader must take the whole answer within this time. It is long, because a clip may go through a slow tunnel.
const ANSWER_TIME: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Head,
    Post,
}

/// A request with the token.
#[derive(Debug)]
pub struct Request {
    pub method: Method,
    /// The path without its query, as it was sent.
    pub path: String,
    query: String,
    /// The header `Range`.
    range: Option<String>,
}

impl Request {
    /// A value of the query, as it was sent.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }
}

#[derive(Debug)]
pub enum Body {
    Text(Arc<str>),
    /// A page, and the nonce of its scripts and style sheets.
    Page(Arc<str>, String),
    /// A video, which is read as it is sent.
    /// With its media type.
    Video(File, &'static str),
}

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub body: Body,
}

impl Response {
    /// An answer without a page.
    pub fn text(status: u16, body: &str) -> Self {
        Self { status, body: Body::Text(body.into()) }
    }

    /// The status line and the headers for an answer with the bytes `sent` of a body of `length` bytes. The policy of a
    /// page lets it run its own scripts, show videos and pictures of this server and in its own text, and send requests to this
    /// server.
    fn head(&self, status: u16, sent: &Range<u64>, length: u64) -> String {
        let (kind, policy) = match &self.body {
            Body::Page(_, nonce) => (
                "text/html; charset=utf-8",
                format!(
                    "script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; style-src-attr 'unsafe-inline'; \
                     img-src 'self' data:; media-src 'self' data:; connect-src 'self'; "
                ),
            ),
            Body::Text(_) => ("text/plain; charset=utf-8", String::new()),
            Body::Video(_, kind) => (*kind, String::new()),
        };
        let range = match status {
            206 => format!("Content-Range: bytes {}-{}/{length}\r\n", sent.start, sent.end - 1),
            416 => format!("Content-Range: bytes */{length}\r\n"),
            _ => String::new(),
        };
        format!(
            "HTTP/1.1 {status} \r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{range}Connection: close\r\n\
             Accept-Ranges: {}\r\nCache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n\
             X-Content-Type-Options: nosniff\r\nCross-Origin-Resource-Policy: same-origin\r\n\
             Content-Security-Policy: default-src 'none'; {policy}base-uri 'none'; form-action 'none'; \
             frame-ancestors 'none'\r\n\r\n",
            sent.end - sent.start,
            if matches!(self.body, Body::Video(..)) { "bytes" } else { "none" },
        )
    }
}

/// The status of an answer with a video of `length` bytes, and the bytes of the video that the header `Range` asks for.
/// The whole video is sent if there is no such header, if it cannot be read, or if it asks for several ranges.
fn byte_range(header: Option<&str>, length: u64) -> (u16, Range<u64>) {
    let limits = header.and_then(|range| range.trim().strip_prefix("bytes=")?.split_once('-'));
    let sent = match limits.map(|(from, to)| (from, to, from.parse::<u64>(), to.parse::<u64>())) {
        // `bytes=100-`: from byte 100 to the end.
        Some((_, "", Ok(from), _)) => from..length,
        // `bytes=100-199`: both ends are included.
        Some((_, _, Ok(from), Ok(to))) if from <= to => from..length.min(to.saturating_add(1)),
        // `bytes=-100`: the last 100 bytes.
        Some(("", _, _, Ok(last))) => length.saturating_sub(last)..length,
        // The whole video.
        _ => return (200, 0..length),
    };
    if sent.is_empty() { (416, 0..0) } else { (206, sent) }
}

/// The host and the secret that a request must name to be answered.
#[derive(Clone, Debug)]
pub struct Access {
    pub port: u16,
    /// The secret in the address that `roll watch` prints.
    pub token: String,
}

impl Access {
    /// Parses the head of a request and checks host, token and origin. The error is the HTTP status that refuses it.
    fn admit(&self, head: &[u8]) -> Result<Request, u16> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Err(httparse::Error::TooManyHeaders) => return Err(431),
            _ => return Err(400),
        }
        let method = match parsed.method {
            Some("GET") => Method::Get,
            Some("HEAD") => Method::Head,
            Some("POST") => Method::Post,
            _ => return Err(405),
        };
        // The value of a header. A header that comes twice counts as missing.
        let header = |name: &str| {
            let mut headers = parsed.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
            match (headers.next(), headers.next()) {
                (Some(only), None) => Some(only.value),
                _ => None,
            }
        };
        // The host is checked because the name of another site may resolve to this machine (DNS rebinding), and the
        // origin because a page of another site may send a POST.
        let names = ["127.0.0.1", "localhost"].map(|name| format!("{name}:{}", self.port));
        let is_ours = |value: &[u8]| names.iter().any(|name| value.eq_ignore_ascii_case(name.as_bytes()));
        let host_is_ours = header("host").is_some_and(is_ours);
        let origin_is_ours = header("origin").and_then(|origin| origin.strip_prefix(b"http://")).is_some_and(is_ours);
        let target = parsed.path.unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let range = header("range").and_then(|range| std::str::from_utf8(range).ok()).map(String::from);
        let request = Request { method, path: path.into(), query: query.into(), range };
        let token = match method {
            Method::Post => header("x-roll-token"),
            Method::Get | Method::Head => request.value("token").map(str::as_bytes),
        };
        let token_is_right = token.is_some_and(|token| token.ct_eq(self.token.as_bytes()).into());
        let is_admitted = host_is_ours && token_is_right && (method != Method::Post || origin_is_ours);
        if is_admitted { Ok(request) } else { Err(403) }
    }
}

/// Connections that have not shown the token yet, the oldest first, each with its number.
#[derive(Default)]
struct Newcomers(Mutex<VecDeque<(u64, TcpStream)>>);

impl Newcomers {
    /// Adds a connection; ends the oldest one if there are too many.
    fn add(&self, number: u64, stream: TcpStream) {
        let mut waiting = self.waiting();
        waiting.push_back((number, stream));
        if waiting.len() > MAX_NEWCOMERS
            && let Some((_, oldest)) = waiting.pop_front()
        {
            // Fails if the connection has ended already.
            let _ = oldest.shutdown(Shutdown::Both);
        }
    }

    fn remove(&self, number: u64) {
        self.waiting().retain(|(other, _)| *other != number);
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of [`MAX_CONNECTIONS`] slots, held while a connection is served.
struct ConnectionSlot<'a>(&'a AtomicUsize);

impl<'a> ConnectionSlot<'a> {
    /// Takes a slot, counted in `taken`; `None` if all are taken.
    fn take(taken: &'a AtomicUsize) -> Option<Self> {
        let one_more = |count: usize| (count < MAX_CONNECTIONS).then_some(count + 1);
        taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok().map(|_| Self(taken))
    }
}

impl Drop for ConnectionSlot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The state that the threads of all connections share.
struct Server<F> {
    access: Access,
    answer: F,
    newcomers: Newcomers,
    /// Number of [`ConnectionSlot`]s that are taken.
    taken: AtomicUsize,
}

/// Answers requests until the process ends.
pub fn serve(
    listener: &TcpListener,
    access: Access,
    answer: impl Fn(&Request) -> Response + Send + Sync + 'static,
) -> ! {
    let server = Arc::new(Server { access, answer, newcomers: Newcomers::default(), taken: AtomicUsize::new(0) });
    let mut number = 0;
    loop {
        number += 1;
        let accepted = listener.accept().and_then(|(stream, _)| Ok((stream.try_clone()?, stream)));
        let Ok((handle, stream)) = accepted else {
            // Too many files are open, for example.
            std::thread::sleep(RETRY_TIME);
            continue;
        };
        server.newcomers.add(number, handle);
        let server_of_thread = server.clone();
        if std::thread::Builder::new().spawn(move || server_of_thread.serve_one(stream, number)).is_err() {
            server.newcomers.remove(number);
        }
    }
}

impl<F: Fn(&Request) -> Response> Server<F> {
    /// Reads the request of a connection and answers it.
    fn serve_one(&self, mut stream: TcpStream, number: u64) {
        let deadline = Instant::now() + HEAD_TIME;
        match read_head(&mut stream, deadline).and_then(|head| self.access.admit(&head)) {
            Ok(request) => {
                self.newcomers.remove(number);
                // Held until the answer is sent.
                let slot = ConnectionSlot::take(&self.taken);
                let response = match &slot {
                    Some(_) => (self.answer)(&request),
                    None => Response::text(503, "too many connections\n"),
                };
                // Fails if the browser has closed the connection.
                let _ = send(stream, response, Some(&request), Instant::now() + CLOSE_TIME);
            }
            Err(status) => {
                let reason = match status {
                    403 => "use the address that `roll watch` printed\n",
                    _ => "the request cannot be read\n",
                };
                let refused = None;
                let _ = send(stream, Response::text(status, reason), refused, deadline);
                self.newcomers.remove(number);
            }
        }
    }
}

/// Reads the head of a request: the bytes up to the empty line behind the headers. The error is an HTTP status. The
/// body of a request is not read.
fn read_head(stream: &mut TcpStream, deadline: Instant) -> Result<Vec<u8>, u16> {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let room = buffer.len().min(MAX_HEAD - head.len());
        if room == 0 {
            return Err(431);
        }
        match read_before(stream, &mut buffer[..room], deadline) {
            Ok(0) => return Err(400),
            Ok(n) => head.extend_from_slice(&buffer[..n]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Err(408),
            Err(_) => return Err(400),
        }
    }
    Ok(head)
}

/// Reads some bytes; fails with [`ErrorKind::TimedOut`] after the deadline.
fn read_before(stream: &mut TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
    // A timeout of zero would mean no limit.
    let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
    stream.set_read_timeout(Some(left.ok_or(ErrorKind::TimedOut)?))?;
    stream.read(buffer)
}

/// Sends the answer to `request`, without its body if the request is `HEAD`. `request` is `None` if it was refused.
///
/// Then reads the bytes that still arrive, until the reader closes the connection or the `deadline` passes. A
/// connection that is closed with unread bytes would be reset, and the reader might lose the answer.
fn send(mut stream: TcpStream, response: Response, request: Option<&Request>, deadline: Instant) -> io::Result<()> {
    let answer_deadline = Instant::now() + ANSWER_TIME;
    stream.set_write_timeout(Some(PART_TIME))?;
    let length = match &response.body {
        Body::Text(text) | Body::Page(text, _) => text.len() as u64,
        Body::Video(file, _) => file.metadata()?.len(),
    };
    let (status, sent) = match &response.body {
        Body::Video(..) => byte_range(request.and_then(|request| request.range.as_deref()), length),
        _ => (response.status, 0..length),
    };
    stream.write_all(response.head(status, &sent, length).as_bytes())?;
    if request.is_none_or(|request| request.method != Method::Head) {
        let mut write = |bytes: &[u8]| match Instant::now() > answer_deadline {
            true => Err(ErrorKind::TimedOut.into()),
            false => stream.write_all(bytes),
        };
        match response.body {
            Body::Text(text) | Body::Page(text, _) => text.as_bytes().chunks(PART_BYTES).try_for_each(&mut write)?,
            Body::Video(mut file, _) => {
                file.seek(SeekFrom::Start(sent.start))?;
                let (mut bytes, mut buffer) = (file.take(sent.end - sent.start), vec![0; PART_BYTES]);
                loop {
                    match bytes.read(&mut buffer)? {
                        0 => break,
                        read => write(&buffer[..read])?,
                    }
                }
            }
        }
    }
    stream.shutdown(Shutdown::Write)?;
    let mut unread = [0; 1024];
    // At most 64 KiB are read.
    for _ in 0..64 {
        if read_before(&mut stream, &mut unread, deadline)? == 0 {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        Access { port: 4711, token: "5ec3e7".into() }
    }

    /// The status that refuses a request of this first line with these headers; 0 if none does.
    fn refusal(line: &str, headers: &[&str]) -> u16 {
        let head = format!("{line} HTTP/1.1\r\n{}\r\n", headers.iter().map(|h| format!("{h}\r\n")).collect::<String>());
        access().admit(head.as_bytes()).map_or_else(|status| status, |_| 0)
    }

    #[test]
    fn only_requests_with_the_token_and_our_host_are_admitted() {
        for (expected, line, host) in [
            (0, "GET /?token=5ec3e7", "Host: 127.0.0.1:4711"),
            (0, "HEAD /version?a=b&token=5ec3e7", "host: LOCALHOST:4711"),
            (403, "GET /", "Host: 127.0.0.1:4711"),
            (403, "GET /?token=", "Host: 127.0.0.1:4711"),
            (403, "GET /?token=5ec3e8", "Host: 127.0.0.1:4711"),
            (403, "GET /?token=5ec3e70", "Host: 127.0.0.1:4711"),
            (403, "GET /?atoken=5ec3e7", "Host: 127.0.0.1:4711"),
            (403, "GET /?token=5ec3e7", "Host: 127.0.0.1"),
            (403, "GET /?token=5ec3e7", "Host: 127.0.0.1:4712"),
            (403, "GET /?token=5ec3e7", "Host: evil.example:4711"),
            (403, "GET /?token=5ec3e7", "X-Host: 127.0.0.1:4711"),
            (403, "GET /?token=5ec3e7", "Host: 127.0.0.1:4711\r\nHost: 127.0.0.1:4711"),
            (405, "PUT /?token=5ec3e7", "Host: 127.0.0.1:4711"),
            (405, "OPTIONS *", "Host: 127.0.0.1:4711"),
            (400, "GET", "Host: 127.0.0.1:4711"),
            (400, "GET /\0?token=5ec3e7", "Host: 127.0.0.1:4711"),
            (400, "GET /?token=5ec3e7", "no header"),
        ] {
            assert_eq!(refusal(line, &[host]), expected, "{line} {host}");
        }
        assert_eq!(refusal("GET /?token=5ec3e7", &["a: b"; MAX_HEADERS + 1]), 431);
        assert_eq!(access().admit(b"\xff\xfe\r\n\r\n").err(), Some(400));
    }

    #[test]
    fn a_post_has_the_token_in_a_header_and_our_origin() {
        let (host, token, origin) = ("Host: localhost:4711", "X-Roll-Token: 5ec3e7", "Origin: http://localhost:4711");
        assert_eq!(refusal("POST /stop?run=0", &[host, token, origin]), 0);
        assert_eq!(refusal("POST /stop?run=0", &[host, token]), 403);
        assert_eq!(refusal("POST /stop?run=0&token=5ec3e7", &[host, origin]), 403);
        for other in ["null", "https://localhost:4711", "http://localhost", "http://evil.example"] {
            assert_eq!(refusal("POST /stop?run=0", &[host, token, &format!("Origin: {other}")]), 403, "{other}");
        }
    }

    #[test]
    fn values_of_a_query_are_found_by_their_whole_name() {
        let request = Request { method: Method::Get, path: "/".into(), query: "run=&runs=2&run=3".into(), range: None };
        assert_eq!((request.value("run"), request.value("runs"), request.value("ru")), (Some(""), Some("2"), None));
    }

    /// A server of pages that say "page" and of a video, and its port.
    fn server() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let video = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(video.path(), "0123456789").unwrap();
        let answer = move |request: &Request| {
            let body = match request.path.as_str() {
                "/video" => Body::Video(File::open(video.path()).unwrap(), "video/mp4"),
                _ => Body::Page("page".into(), "a1".into()),
            };
            Response { status: 200, body }
        };
        std::thread::spawn(move || serve(&listener, Access { port, ..access() }, answer));
        port
    }

    fn connect(port: u16) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn answer(mut stream: TcpStream) -> String {
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    }

    fn ask(port: u16, line: &str) -> String {
        let mut stream = connect(port);
        write!(stream, "{line} HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n").unwrap();
        answer(stream)
    }

    #[test]
    fn pages_have_headers_that_keep_others_out() {
        let port = server();
        let page = ask(port, "GET /?token=5ec3e7");
        assert!(page.starts_with("HTTP/1.1 200 ") && page.ends_with("\r\n\r\npage"), "{page}");
        for part in [
            "default-src 'none'; script-src 'nonce-a1'",
            "frame-ancestors 'none'",
            "X-Content-Type-Options: nosniff",
            "Referrer-Policy: no-referrer",
            "Cache-Control: no-store",
        ] {
            assert!(page.contains(part), "no {part} in {page}");
        }
        let head = ask(port, "HEAD /?token=5ec3e7");
        assert!(head.contains("Content-Length: 4\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        assert!(ask(port, "GET /").starts_with("HTTP/1.1 403 "));
    }

    #[test]
    fn videos_are_sent_in_the_parts_that_are_asked_for() {
        let port = server();
        for (range, status, line, bytes) in [
            ("", 200, "Accept-Ranges: bytes", "0123456789"),
            ("Range: bytes=0-", 206, "Content-Range: bytes 0-9/10", "0123456789"),
            ("Range: bytes=2-4", 206, "Content-Range: bytes 2-4/10", "234"),
            ("Range: bytes=7-99", 206, "Content-Range: bytes 7-9/10", "789"),
            ("Range: bytes=-3", 206, "Content-Range: bytes 7-9/10", "789"),
            ("Range: bytes=-18446744073709551615", 206, "Content-Range: bytes 0-9/10", "0123456789"),
            ("Range: bytes=2-18446744073709551615", 206, "Content-Range: bytes 2-9/10", "23456789"),
            ("Range: bytes=10-", 416, "Content-Range: bytes */10", ""),
            ("Range: bytes=-0", 416, "Content-Range: bytes */10", ""),
            ("Range: bytes=4-2", 200, "Content-Length: 10", "0123456789"),
            ("Range: bytes=0-1,4-5", 200, "Content-Length: 10", "0123456789"),
            ("Range: lines=1-2", 200, "Content-Length: 10", "0123456789"),
        ] {
            let mut stream = connect(port);
            let lines = format!("GET /video?token=5ec3e7 HTTP/1.1\r\nHost: localhost:{port}\r\n{range}\r\n\r\n");
            stream.write_all(lines.replace("\r\n\r\n\r\n", "\r\n\r\n").as_bytes()).unwrap();
            let found = answer(stream);
            assert!(found.starts_with(&format!("HTTP/1.1 {status} ")) && found.contains(line), "{range}: {found}");
            assert!(found.ends_with(&format!("\r\n\r\n{bytes}")) && found.contains("video/mp4"), "{range}: {found}");
        }
    }

    #[test]
    fn strangers_end_after_a_second_and_take_no_place_of_others() {
        let port = server();
        let mut long = connect(port);
        write!(long, "GET /?token=5ec3e7 HTTP/1.1\r\nHost: localhost:{port}\r\nA: {}\r\n\r\n", "a".repeat(20_000))
            .unwrap();
        assert!(answer(long).starts_with("HTTP/1.1 431 "));
        // Few strangers get the status of a late request; of many, the oldest end before.
        for (strangers, late) in [(40, 40), (400, 0)] {
            let begun = Instant::now();
            let waiting: Vec<TcpStream> = (0..strangers)
                .map(|_| {
                    let mut stream = connect(port);
                    let _ = stream.write_all(b"GET / HTTP/1.1\r\n");
                    stream
                })
                .collect();
            for _ in 0..20 {
                assert!(ask(port, "GET /?token=5ec3e7").ends_with("page"), "{strangers} strangers");
            }
            let ends: Vec<String> = waiting.into_iter().map(answer).collect();
            assert!(ends.iter().filter(|end| end.starts_with("HTTP/1.1 408 ")).count() >= late, "{ends:?}");
            assert!(begun.elapsed() < HEAD_TIME + Duration::from_secs(5), "{:?}", begun.elapsed());
        }
    }

    #[test]
    fn connections_with_the_token_are_bounded_in_number() {
        let taken = AtomicUsize::new(0);
        let places: Vec<_> = (0..MAX_CONNECTIONS).map_while(|_| ConnectionSlot::take(&taken)).collect();
        assert!(places.len() == MAX_CONNECTIONS && ConnectionSlot::take(&taken).is_none());
        drop(places);
        assert!(ConnectionSlot::take(&taken).is_some());
    }
}
