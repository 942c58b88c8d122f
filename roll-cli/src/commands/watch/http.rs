//! An HTTP server for one person on this machine: one request a connection, and a limit to everything that comes in.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use subtle::ConstantTimeEq;

/// Request line and headers have at most this many bytes.
const MAX_HEAD: usize = 8 << 10;
/// They arrive within this time.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// The answer is taken within this time.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// At most this many connections are served at a time; others get 503.
const MAX_CONNECTIONS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Head,
    Post,
}

/// A request that may be answered.
#[derive(Debug)]
pub struct Request {
    pub method: Method,
    /// The path without its query, as it was sent.
    pub path: String,
    query: String,
}

impl Request {
    /// A value of the query, as it was sent.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }
}

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub body: Arc<str>,
    /// Nonce of the scripts and style sheets of a page; `None` for a text.
    pub nonce: Option<String>,
}

impl Response {
    /// An answer without a page.
    pub fn text(status: u16, body: &str) -> Self {
        Self { status, body: body.into(), nonce: None }
    }

    /// The answer's first lines. A page may run its own scripts, show its own videos, and ask this server.
    fn head(&self) -> String {
        let (kind, policy) = match &self.nonce {
            Some(nonce) => (
                "text/html",
                format!(
                    "script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; style-src-attr 'unsafe-inline'; \
                     media-src data: blob:; connect-src 'self'; "
                ),
            ),
            None => ("text/plain", String::new()),
        };
        format!(
            "HTTP/1.1 {} \r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\
             Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\nContent-Security-Policy: default-src 'none'; {policy}\
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\r\n",
            self.status,
            self.body.len()
        )
    }
}

/// The conditions of an answer.
#[derive(Clone, Debug)]
pub struct Access {
    pub port: u16,
    /// The secret of the address.
    pub token: String,
}

impl Access {
    /// The request in the bytes of its head, or the status that refuses it.
    fn admit(&self, head: &[u8]) -> Result<Request, u16> {
        let mut headers = [httparse::EMPTY_HEADER; 64];
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
        // A header that comes twice counts as missing.
        let header = |name: &str| {
            let mut values = parsed.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
            values.next().filter(|_| values.next().is_none()).map(|header| header.value)
        };
        // A name of another site may lead to this machine (DNS rebinding), and a page of another site may send a POST.
        let names = ["127.0.0.1", "localhost"].map(|name| format!("{name}:{}", self.port));
        let is_ours = |value: &[u8]| names.iter().any(|name| value.eq_ignore_ascii_case(name.as_bytes()));
        let is_host = header("host").is_some_and(is_ours);
        let is_origin = header("origin").and_then(|origin| origin.strip_prefix(b"http://")).is_some_and(is_ours);
        let (path, query) =
            parsed.path.unwrap_or_default().split_once('?').unwrap_or((parsed.path.unwrap_or_default(), ""));
        let request = Request { method, path: path.into(), query: query.into() };
        let token = match method {
            Method::Post => header("x-roll-token"),
            Method::Get | Method::Head => request.value("token").map(str::as_bytes),
        };
        let is_token = token.is_some_and(|token| token.ct_eq(self.token.as_bytes()).into());
        let admitted = is_host && is_token && (method != Method::Post || is_origin);
        if admitted { Ok(request) } else { Err(403) }
    }
}

/// Answers requests until the process ends.
pub fn serve(
    listener: &TcpListener,
    access: Access,
    answer: impl Fn(&Request) -> Response + Send + Sync + 'static,
) -> ! {
    let server = Arc::new((access, answer));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Too many open files, for example.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        // One reference is this loop's, each connection has another.
        if Arc::strong_count(&server) > MAX_CONNECTIONS {
            let _ = send(stream, &Response::text(503, "too many connections\n"), false, Duration::ZERO);
            continue;
        }
        let server = server.clone();
        // A thread that cannot be started closes its connection.
        let _ = std::thread::Builder::new().spawn(move || converse(stream, &server.0, &server.1));
    }
}

fn converse(mut stream: TcpStream, access: &Access, answer: &impl Fn(&Request) -> Response) {
    let admitted = read_head(&mut stream).and_then(|head| access.admit(&head));
    let is_head = admitted.as_ref().is_ok_and(|request| request.method == Method::Head);
    let response = match &admitted {
        Ok(request) => answer(request),
        Err(403) => Response::text(403, "use the address that `roll watch` printed\n"),
        Err(status) => Response::text(*status, "the request cannot be read\n"),
    };
    // The browser may be gone.
    let _ = send(stream, &response, is_head, HEAD_TIME);
}

/// The bytes up to the empty line behind the headers, or the status that refuses them. The body of a request is not
/// read.
fn read_head(stream: &mut TcpStream) -> Result<Vec<u8>, u16> {
    let deadline = Instant::now() + HEAD_TIME;
    let mut head = Vec::new();
    let mut part = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let room = part.len().min(MAX_HEAD - head.len());
        if room == 0 {
            return Err(431);
        }
        match read_before(stream, &mut part[..room], deadline) {
            Ok(0) => return Err(400),
            Ok(n) => head.extend_from_slice(&part[..n]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Err(408),
            Err(_) => return Err(400),
        }
    }
    Ok(head)
}

fn read_before(stream: &mut TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
    // No duration of zero, which would mean no limit.
    let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
    stream.set_read_timeout(Some(left.ok_or(ErrorKind::TimedOut)?))?;
    stream.read(buffer)
}

/// Sends the answer, without its body if only the head was asked for. Then takes the bytes that still come within
/// `linger`: closing the connection before would take the answer away from its reader.
fn send(mut stream: TcpStream, response: &Response, is_head: bool, linger: Duration) -> io::Result<()> {
    let deadline = Instant::now() + ANSWER_TIME;
    stream.set_write_timeout(Some(HEAD_TIME))?;
    stream.write_all(response.head().as_bytes())?;
    let body = if is_head { &[] } else { response.body.as_bytes() };
    for part in body.chunks(1 << 16) {
        if Instant::now() > deadline {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.write_all(part)?;
    }
    stream.shutdown(Shutdown::Write)?;
    let deadline = Instant::now() + linger;
    let mut rest = [0; 1024];
    for _ in 0..64 {
        if linger.is_zero() || read_before(&mut stream, &mut rest, deadline)? == 0 {
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
        assert_eq!(refusal("GET /?token=5ec3e7", &["a: b"; 65]), 431);
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
        let request = Request { method: Method::Get, path: "/".into(), query: "run=&runs=2&run=3".into() };
        assert_eq!((request.value("run"), request.value("runs"), request.value("ru")), (Some(""), Some("2"), None));
    }

    /// A server of pages that say "page", and its port.
    fn server() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let page = |_: &Request| Response { status: 200, body: "page".into(), nonce: Some("a1".into()) };
        std::thread::spawn(move || serve(&listener, Access { port, ..access() }, page));
        port
    }

    fn answer(mut stream: TcpStream) -> String {
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    }

    #[test]
    fn pages_have_headers_that_keep_others_out() {
        let port = server();
        let ask = |line: &str| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            write!(stream, "{line} HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n").unwrap();
            answer(stream)
        };
        let page = ask("GET /?token=5ec3e7");
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
        let head = ask("HEAD /?token=5ec3e7");
        assert!(head.contains("Content-Length: 4\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        assert!(ask("GET /").starts_with("HTTP/1.1 403 "));
    }

    #[test]
    fn requests_are_bounded_in_size_and_time_and_connections_in_number() {
        let port = server();
        let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut long = connect();
        write!(long, "GET /?token=5ec3e7 HTTP/1.1\r\nHost: localhost:{port}\r\nA: {}\r\n\r\n", "a".repeat(20_000))
            .unwrap();
        assert!(answer(long).starts_with("HTTP/1.1 431 "));
        let begun = Instant::now();
        let waiting: Vec<TcpStream> = (0..MAX_CONNECTIONS)
            .map(|_| {
                let mut stream = connect();
                stream.write_all(b"GET / HTTP/1.1\r\n").unwrap();
                stream
            })
            .collect();
        // The connection before may not have ended yet.
        let refused = answer(connect());
        assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
        let ends = waiting.into_iter().map(answer).collect::<Vec<_>>();
        assert!(ends.iter().filter(|end| end.starts_with("HTTP/1.1 408 ")).count() >= MAX_CONNECTIONS - 1, "{ends:?}");
        assert!((HEAD_TIME..2 * HEAD_TIME).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        let mut again = connect();
        write!(again, "GET /?token=5ec3e7 HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n").unwrap();
        assert!(answer(again).ends_with("page"));
    }
}
