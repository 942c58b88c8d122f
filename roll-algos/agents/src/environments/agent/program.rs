//! The program of an episode: its start, its requests, its end.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use roll_core::threads;
use roll_external::process::{ChildGroup, answers_on_stdout};

use super::endpoint::{Call, Endpoint, Key};

/// Interval at which a wait for a request checks whether the program has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time for the output of a program that has ended to arrive.
const GRACE_PERIOD: Duration = Duration::from_secs(2);
/// Largest line of standard output that is kept, in bytes.
const MAX_LINE: u64 = 1 << 20;
/// Number of bytes of standard error that an error repeats, from the end.
const KEPT_ERRORS: usize = 600;

/// What the program reports at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize)]
pub struct Report {
    /// The reward of the episode.
    pub reward: f64,
    /// Whether the task is solved; without it, a positive reward counts.
    pub solved: Option<bool>,
}

/// What the program does next.
pub enum Event {
    /// It asks the model.
    Asks(Call),
    /// It ended.
    Ended(Report),
}

/// A running program. It is killed with the programs that it started when this is dropped.
pub struct Program {
    group: ChildGroup,
    calls: Receiver<Call>,
    /// The last report in its standard output, when that is closed.
    report: Receiver<Option<Report>>,
    errors: Receiver<String>,
    _key: Key,
}

impl Program {
    /// Starts the program for the episode that the JSON text `episode` describes.
    pub fn start(command: &[String], directory: &Path, episode: &str) -> Result<Self, String> {
        let endpoint = Endpoint::of_this_program().map_err(|e| format!("no endpoint can be opened for it: {e}"))?;
        let (key, calls) = endpoint.open();
        let (name, arguments) = command.split_first().ok_or("no command is given")?;
        let mut command = Command::new(name);
        command.args(arguments).current_dir(directory);
        answers_on_stdout(&mut command).env("ROLL_EPISODE", episode);
        command.env("OPENAI_BASE_URL", endpoint.url()).env("OPENAI_API_KEY", key.text());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let unstarted = |e: std::io::Error| format!("it cannot be started: {e}");
        let mut group = ChildGroup::spawn(&mut command).map_err(unstarted)?;
        let child = group.child();
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err("it has no pipes".into());
        };
        let report = read("its output", move || last_report(stdout)).map_err(unstarted)?;
        let errors = read("its errors", move || end(stderr)).map_err(unstarted)?;
        Ok(Self { group, calls, report, errors, _key: key })
    }

    /// Waits for the program's next request or its end, for at most `limit`. The error describes a program that takes
    /// longer, fails, or ends without a report.
    pub fn next(&mut self, limit: Duration) -> Result<Event, String> {
        let begun = Instant::now();
        loop {
            match self.calls.recv_timeout(POLL_INTERVAL) {
                Ok(call) => return Ok(Event::Asks(call)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            if let Some(status) = self.group.try_wait().map_err(|e| format!("it cannot be waited for: {e}"))? {
                let report = self.report.recv_timeout(GRACE_PERIOD).ok().flatten();
                return match report.filter(|_| status.success()) {
                    Some(report) => Ok(Event::Ended(report)),
                    None if status.success() => Err(format!(
                        "it ended without a line `{{\"reward\": ...}}` on its standard output{}",
                        self.last_words()
                    )),
                    None => Err(format!("it failed ({status}){}", self.last_words())),
                };
            }
            if begun.elapsed() > limit {
                let limit = limit.as_secs_f64();
                return Err(format!("it neither asked nor ended within {limit} s (`env.timeout`) and was killed"));
            }
        }
    }

    /// The end of its standard error, for a message.
    fn last_words(&self) -> String {
        let words = self.errors.recv_timeout(GRACE_PERIOD).unwrap_or_default();
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        if words.is_empty() { words } else { format!("; its last words: {words}") }
    }
}

/// Reads on a thread, which sends the result.
fn read<T: Send + 'static>(name: &str, read: impl FnOnce() -> T + Send + 'static) -> std::io::Result<Receiver<T>> {
    let (sender, receiver) = sync_channel(1);
    threads::spawn(name, move || {
        let _ = sender.send(read());
    })?;
    Ok(receiver)
}

/// The last line that is a report.
fn last_report(output: impl Read) -> Option<Report> {
    let (mut reader, mut last, mut line) = (BufReader::new(output), None, Vec::new());
    while let Ok(1..) = reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
        let report: Option<Report> = serde_json::from_slice(&line).ok();
        last = report.or(last);
        line.clear();
    }
    last
}

/// The last [`KEPT_ERRORS`] bytes.
fn end(mut pipe: impl Read) -> String {
    let (mut kept, mut piece) = (Vec::new(), [0; 1024]);
    while let Ok(n @ 1..) = pipe.read(&mut piece) {
        kept.extend_from_slice(&piece[..n]);
        kept.drain(..kept.len().saturating_sub(KEPT_ERRORS));
    }
    String::from_utf8_lossy(&kept).into_owned()
}
