//! A child process that answers requests over its pipes, one at a time: a reward, an environment, the renderer of a
//! chat template. [`Responder`] starts the child, limits the time of its answers, describes how it ended, and ends it
//! together with the processes that it started. The caller decides the form of requests and answers by a function that
//! writes a request and reads its answer.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, BufReader, BufWriter, Read};
use std::process::{ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use roll_core::threads;

use crate::process::ChildGroup;

/// Number of lines of standard error that an error repeats.
const LAST_LINES: usize = 8;
/// Length of such a line in bytes; a longer line is split.
const LINE_BYTES: u64 = 4096;
/// Time for a child whose output is closed to end, and then for the rest of its standard error to arrive.
const GRACE_PERIOD: Duration = Duration::from_secs(2);
/// Interval at which the reader of standard error is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time after which a slow answer is logged.
const SLOW_ANSWER: Duration = Duration::from_secs(5);

/// Number of requests that wait for an answer at a time.
const UNANSWERED_REQUESTS: usize = 1;

/// How a child is treated, apart from its requests.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The use of the child's standard error.
    pub stderr: StderrUse,
    /// Time for the child to end by itself after its standard input is closed. Then it is killed.
    pub time_to_end: Duration,
    /// The subject of the note "waiting for ...", which is logged once when an answer takes longer than five seconds.
    /// `None` logs nothing.
    pub slow_note: Option<&'static str>,
}

/// The use of a child's standard error.
#[derive(Clone, Debug, Default)]
pub enum StderrUse {
    /// Standard error is not read.
    Discarded,
    /// An error about the child repeats the last lines of standard error.
    #[default]
    Kept,
    /// As `Kept`, and each line is logged after this name.
    Logged(String),
}

/// The pipes of a child.
pub struct Pipes {
    /// Standard input of the child. Flush it after a request.
    pub stdin: BufWriter<ChildStdin>,
    /// Standard output of the child.
    pub stdout: BufReader<ChildStdout>,
}

impl Pipes {
    /// Whether the child wrote a line that no request asked for. White space before an answer is no line.
    pub fn has_unasked_line(&mut self) -> io::Result<bool> {
        // Reading blocks if there is no output.
        Ok(self.has_output() && self.stdout.fill_buf()?.contains(&b'\n'))
    }

    /// Whether output can be read without blocking. On systems other than Unix, only what is buffered already is known.
    fn has_output(&self) -> bool {
        if !self.stdout.buffer().is_empty() {
            return true;
        }
        #[cfg(unix)]
        {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let mut descriptors = [PollFd::new(self.stdout.get_ref(), PollFlags::IN)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut descriptors, Some(&now)).is_ok() && descriptors[0].revents().contains(PollFlags::IN)
        }
        #[cfg(not(unix))]
        false
    }
}

/// The reason why no answer was read.
#[derive(Debug)]
pub enum Unanswered {
    /// A pipe is closed.
    Closed,
    /// The output is not an answer. The text is a sentence about the child, such as "it wrote no UTF-8".
    Invalid(String),
}

impl From<io::Error> for Unanswered {
    fn from(_: io::Error) -> Self {
        Self::Closed
    }
}

/// A request without an answer. The child cannot be used any more.
#[derive(Debug)]
pub struct NoAnswer {
    /// What happened instead of an answer.
    pub reason: Reason,
    /// The last lines of the child's standard error.
    pub last_lines: Vec<String>,
}

/// What happened instead of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// The child did not answer within this time, and was killed.
    Late(Duration),
    /// The child ended.
    Ended(ExitStatus),
    /// The child closed its standard output.
    Closed,
    /// As [`Unanswered::Invalid`].
    Invalid(String),
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            Reason::Late(limit) => write!(f, "it did not answer within {} s and was ended", limit.as_secs_f64())?,
            Reason::Ended(status) => write!(f, "it ended ({status})")?,
            Reason::Closed => write!(f, "it closed its standard output")?,
            Reason::Invalid(problem) => f.write_str(problem)?,
        }
        match self.last_lines.is_empty() {
            true => Ok(()),
            false => write!(f, "; its last lines: {}", self.last_lines.join(" / ")),
        }
    }
}

impl std::error::Error for NoAnswer {}

/// A running child that answers requests `Q` by `A`. Dropping it closes the child's standard input, and kills the child
/// after [`Settings::time_to_end`].
pub struct Responder<Q, A> {
    group: ChildGroup,
    requests: Option<SyncSender<Q>>,
    answers: Receiver<Result<A, Unanswered>>,
    last_lines: Arc<Mutex<VecDeque<String>>>,
    stderr_reader: Option<JoinHandle<()>>,
    settings: Settings,
    is_slow_logged: bool,
}

impl<Q: Send + 'static, A: Send + 'static> Responder<Q, A> {
    /// Starts `command`, whose pipes it sets. `converse` writes a request and reads its answer. It runs on a thread of
    /// its own, because a child that does not read, or writes nothing, would block it.
    pub fn start(
        command: &mut Command,
        settings: Settings,
        mut converse: impl FnMut(&mut Pipes, Q) -> Result<A, Unanswered> + Send + 'static,
    ) -> io::Result<Self> {
        let program = format!("`{}`", command.get_program().to_string_lossy());
        let reads_stderr = !matches!(settings.stderr, StderrUse::Discarded);
        let stderr = if reads_stderr { Stdio::piped() } else { Stdio::null() };
        let mut group = ChildGroup::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr))?;
        let child = group.child();
        let last_lines = Arc::default();
        let stderr_reader = match child.stderr.take() {
            Some(stderr) => {
                let (kept, stderr_use) = (Arc::clone(&last_lines), settings.stderr.clone());
                Some(threads::spawn(&program, move || read_lines(stderr, &stderr_use, &kept))?)
            }
            None => None,
        };
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("it has no pipes"));
        };
        let mut pipes = Pipes { stdin: BufWriter::new(stdin), stdout: BufReader::new(stdout) };
        let (requests, received) = sync_channel::<Q>(UNANSWERED_REQUESTS);
        let (results, answers) = sync_channel(UNANSWERED_REQUESTS);
        let answer_all = move || {
            for request in received {
                let answer = converse(&mut pipes, request);
                let is_last = answer.is_err();
                if results.send(answer).is_err() || is_last {
                    return;
                }
            }
        };
        threads::spawn(&program, answer_all)?;
        let requests = Some(requests);
        Ok(Self { group, requests, answers, last_lines, stderr_reader, settings, is_slow_logged: false })
    }

    /// Sends a request and waits for its answer, for at most `limit`.
    pub fn ask(&mut self, request: Q, limit: Duration) -> Result<A, NoAnswer> {
        if let Some(requests) = &self.requests {
            // If the thread has ended, `answers` says so.
            let _ = requests.send(request);
        }
        let reason = match self.wait(limit) {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(Unanswered::Invalid(problem))) => {
                self.group.kill();
                Reason::Invalid(problem)
            }
            Ok(Err(Unanswered::Closed)) | Err(RecvTimeoutError::Disconnected) => {
                // The child's output is closed, so that it usually ends soon. `wait_for` then kills the rest of its
                // group, which may hold its standard error open.
                match self.group.wait_for(GRACE_PERIOD) {
                    Ok(Some(status)) => Reason::Ended(status),
                    _ => Reason::Closed,
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                self.group.kill();
                Reason::Late(limit)
            }
        };
        Err(NoAnswer { reason, last_lines: self.last_lines() })
    }

    /// Waits for the answer to the latest request. Logs once that an answer is slow.
    fn wait(&mut self, limit: Duration) -> Result<Result<A, Unanswered>, RecvTimeoutError> {
        let may_be_logged = limit > SLOW_ANSWER && !self.is_slow_logged;
        let note = match self.settings.slow_note {
            Some(note) if may_be_logged => note,
            _ => return self.answers.recv_timeout(limit),
        };
        match self.answers.recv_timeout(SLOW_ANSWER) {
            Err(RecvTimeoutError::Timeout) => {
                self.is_slow_logged = true;
                tracing::info!("waiting for {note}, at most {} s", limit.as_secs_f64());
                self.answers.recv_timeout(limit - SLOW_ANSWER)
            }
            answered => answered,
        }
    }

    /// The last lines of standard error. Waits until standard error is read to its end, for at most the grace period.
    fn last_lines(&self) -> Vec<String> {
        let start = Instant::now();
        let is_reading = || self.stderr_reader.as_ref().is_some_and(|reader| !reader.is_finished());
        while is_reading() && start.elapsed() < GRACE_PERIOD {
            thread::sleep(POLL_INTERVAL);
        }
        self.last_lines.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl<Q, A> Drop for Responder<Q, A> {
    fn drop(&mut self) {
        self.requests = None;
        // The group kills the processes that are left.
        let _ = self.group.wait_for(self.settings.time_to_end);
    }
}

/// Reads standard error to its end as bytes, in lines of limited length: a child may write anything.
fn read_lines(stderr: ChildStderr, stderr_use: &StderrUse, kept: &Mutex<VecDeque<String>>) {
    let (mut stderr, mut bytes) = (BufReader::new(stderr), Vec::new());
    while let Ok(1..) = stderr.by_ref().take(LINE_BYTES).read_until(b'\n', &mut bytes) {
        let line = String::from_utf8_lossy(&bytes).trim_end().to_string();
        bytes.clear();
        if let StderrUse::Logged(name) = stderr_use {
            tracing::info!(target: "plugin", "{name}: {line}");
        }
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back(line);
        if kept.len() > LAST_LINES {
            kept.pop_front();
        }
    }
}

/// Reads a line of at most `max_bytes` bytes and removes its end. A last line without an end does not count as a line,
/// because the child ended while it wrote.
pub fn read_line(stdout: &mut impl BufRead, max_bytes: usize) -> Result<Vec<u8>, Unanswered> {
    let mut line = Vec::new();
    // One byte more than allowed distinguishes a line that is too long from one that just fits.
    stdout.by_ref().take(max_bytes as u64 + 1).read_until(b'\n', &mut line)?;
    match line.pop() {
        Some(b'\n') => Ok(line),
        Some(_) if line.len() >= max_bytes => {
            Err(Unanswered::Invalid(format!("it wrote a line of more than {max_bytes} bytes")))
        }
        _ => Err(Unanswered::Closed),
    }
}

#[cfg(unix)]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn lines(script: &str, settings: Settings) -> Responder<String, String> {
        let converse = |pipes: &mut Pipes, request: String| {
            if pipes.has_unasked_line()? {
                return Err(Unanswered::Invalid("it wrote without a request".into()));
            }
            pipes.stdin.write_all(format!("{request}\n").as_bytes()).and_then(|()| pipes.stdin.flush())?;
            let line = read_line(&mut pipes.stdout, 100)?;
            String::from_utf8(line).map_err(|_| Unanswered::Invalid("it wrote no UTF-8".into()))
        };
        Responder::start(Command::new("sh").args(["-c", script]), settings, converse).unwrap()
    }

    #[test]
    fn each_end_of_a_child_is_described_with_its_last_lines() {
        let long = Duration::from_secs(60);
        let short = Duration::from_millis(200);
        for (script, limit, expected) in [
            ("read -r line; echo 'no ice' >&2; exit 3", long, "it ended (exit status: 3); its last lines: no ice"),
            ("read -r line; exec >&-; exec sleep 600", long, "it closed its standard output"),
            ("exec sleep 600", short, "it did not answer within 0.2 s and was ended"),
            (r"read -r line; printf '\377\n'; exec sleep 600", long, "it wrote no UTF-8"),
            ("echo early; exec sleep 600", long, "without a request"),
            ("printf ' '; read -r line; exit 4", long, "it ended (exit status: 4)"),
            ("read -r line; head -c 1000 /dev/zero; exec sleep 600", long, "a line of more than 100 bytes"),
        ] {
            let mut child = lines(script, Settings::default());
            // Output without a request is there a little after the start.
            thread::sleep(short);
            let error = child.ask("x".into(), limit).unwrap_err().to_string();
            assert!(error.contains(expected), "{script}: {error}");
            assert!(child.ask("x".into(), limit).is_err(), "{script}: a child that failed answers no more");
        }
    }

    #[test]
    fn a_child_may_end_by_itself_when_its_input_ends() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ended");
        let script = format!("while read -r line; do echo \"$line\"; done; sleep 0.1; echo > '{}'", file.display());
        for (time_to_end, ends) in [(Duration::from_secs(60), true), (Duration::ZERO, false)] {
            let _ = std::fs::remove_file(&file);
            let mut child = lines(&script, Settings { time_to_end, ..Settings::default() });
            assert_eq!(child.ask("a".into(), Duration::from_secs(60)).unwrap(), "a");
            drop(child);
            thread::sleep(Duration::from_millis(300));
            assert_eq!(file.exists(), ends);
        }
    }
}
