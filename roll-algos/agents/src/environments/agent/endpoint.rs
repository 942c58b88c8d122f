//! An OpenAI-compatible endpoint on this machine, one for all episodes of the program. A request's API key names the
//! episode that it belongs to.
//!
//! A thread serves each connection: it hands a request to the episode and waits for the answer. Only programs of this
//! machine can connect, and only those that know a key get an answer.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use roll_core::threads;
use serde_json::{Value, json};

/// Largest head of a request in bytes.
const MAX_HEAD: u64 = 64 << 10;
/// Largest body of a request in bytes.
const MAX_BODY: usize = 64 << 20;

/// A request that waits for its answer.
pub struct Call {
    /// The body.
    pub request: Value,
    answer: SyncSender<(u16, Value)>,
}

impl Call {
    /// Answers with a completion.
    pub fn complete(self, completion: Value) {
        // A program that has closed the connection gets no answer.
        let _ = self.answer.send((200, completion));
    }

    /// Answers that the request cannot be served.
    pub fn refuse(self, problem: &str) {
        let _ = self.answer.send((400, refusal(problem)));
    }
}

/// A key of the endpoint; it is invalid once this is dropped.
pub struct Key(String);

impl Key {
    /// The key, which programs send as their API key.
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        if let Some(endpoint) = ENDPOINT.get() {
            endpoint.lock().remove(&self.0);
        }
    }
}

/// The endpoint of this program.
pub struct Endpoint {
    url: String,
    /// Where the calls of each key go.
    calls: Mutex<HashMap<String, Sender<Call>>>,
}

static ENDPOINT: OnceLock<Endpoint> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());

impl Endpoint {
    /// The endpoint, which the first call starts.
    pub fn of_this_program() -> io::Result<&'static Self> {
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(endpoint) = ENDPOINT.get() {
            return Ok(endpoint);
        }
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let endpoint = ENDPOINT.get_or_init(|| Self { url, calls: Mutex::default() });
        threads::spawn("the endpoint of agents", move || endpoint.accept(&listener))?;
        Ok(endpoint)
    }

    /// The address, `http://127.0.0.1:PORT/v1`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A new key, and the calls that come with it.
    pub fn open(&self) -> (Key, Receiver<Call>) {
        let (sender, receiver) = channel();
        // Not derived from the run's seed: no result depends on it, and nobody must guess it.
        let key = format!("roll-{:032x}", rand::random::<u128>());
        self.lock().insert(key.clone(), sender);
        (Key(key), receiver)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Sender<Call>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(&'static self, listener: &TcpListener) {
        for stream in listener.incoming().filter_map(io::Result::ok) {
            // Without a thread the connection closes, and the program may try again.
            if let Err(error) = threads::spawn("a connection of an agent", move || self.serve(stream)) {
                tracing::warn!("a request of an agent's program is lost: {error}");
            }
        }
    }

    /// Serves the requests of a connection until it ends.
    fn serve(&self, mut stream: TcpStream) {
        let Ok(clone) = stream.try_clone() else { return };
        let mut reader = BufReader::new(clone);
        while let Ok(Some(request)) = read(&mut reader, &mut stream) {
            let Some((status, body)) = self.answer(request) else { return };
            let body = body.to_string();
            let head = format!(
                "HTTP/1.1 {status} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
                if status == 200 { "OK" } else { "Refused" },
                body.len()
            );
            if stream.write_all((head + &body).as_bytes()).is_err() {
                return;
            }
        }
    }

    /// Status and body of the answer; `None` if the episode is over.
    fn answer(&self, request: Request) -> Option<(u16, Value)> {
        let Request { method, path, key, body } = request;
        let known = self.lock().get(&key).cloned();
        let Some(calls) = known else {
            return Some((401, refusal("no episode has this API key: it is over, or the key is wrong")));
        };
        match (method.as_str(), path.as_str()) {
            ("GET", "/v1/models") => {
                Some((200, json!({"object": "list", "data": [{"id": "policy", "object": "model"}]})))
            }
            ("POST", "/v1/chat/completions") => {
                let Ok(request) = serde_json::from_slice(&body) else {
                    return Some((400, refusal("the body is not JSON")));
                };
                let (answer, answered) = sync_channel(1);
                calls.send(Call { request, answer }).ok()?;
                answered.recv().ok()
            }
            _ => Some((404, refusal("this endpoint has `POST /v1/chat/completions` and `GET /v1/models`"))),
        }
    }
}

fn refusal(problem: &str) -> Value {
    json!({ "error": { "message": problem, "type": "invalid_request_error", "param": null, "code": null } })
}

struct Request {
    method: String,
    path: String,
    key: String,
    body: Vec<u8>,
}

/// Reads a request; `None` at the end of the connection. Fails on a head or body that is too long or of another form.
fn read(reader: &mut BufReader<TcpStream>, writer: &mut TcpStream) -> io::Result<Option<Request>> {
    let invalid = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem);
    let mut request = Request { method: String::new(), path: String::new(), key: String::new(), body: Vec::new() };
    let (mut length, mut left) = (0, MAX_HEAD);
    loop {
        let mut line = String::new();
        let read = reader.by_ref().take(left).read_line(&mut line)? as u64;
        left -= read;
        if read == 0 {
            return Ok(None);
        }
        let line = line.trim_end();
        if request.method.is_empty() {
            let mut words = line.split(' ');
            request.method = words.next().unwrap_or_default().into();
            let path = words.next().ok_or_else(|| invalid("no path"))?;
            request.path = path.split('?').next().unwrap_or_default().into();
            continue;
        }
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').ok_or_else(|| invalid("no header"))?;
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().map_err(|_| invalid("no length"))?,
            "authorization" => request.key = value.trim().trim_start_matches("Bearer ").into(),
            "transfer-encoding" => return Err(invalid("bodies in chunks are not read")),
            "expect" => writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?,
            _ => {}
        }
    }
    if length > MAX_BODY {
        return Err(invalid("the body is too long"));
    }
    request.body = vec![0; length];
    reader.read_exact(&mut request.body)?;
    Ok(Some(request))
}
