//! A child process that answers each request, a line on its standard input, with one line on its standard output.
//! Anything else that it does is an error with a description.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{ChildStderr, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use roll_core::threads;
use roll_external::process::{ChildGroup, answers_on_stdout};

use super::limits::StartPermit;
use crate::environments::protocol::shortened;

/// Number of output lines that are buffered. A child that writes more lines without a request is blocked.
const WAITING_LINES: usize = 4;
/// Number of bytes of a child's standard error that are kept, from the end.
const KEPT_ERRORS: usize = 2048;

/// Time to wait for the end of a child whose output is closed, and for the rest of its standard error.
const GRACE_PERIOD: Duration = Duration::from_millis(500);

/// How a child is started and called.
#[derive(Clone, Debug)]
pub struct ChildOptions {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Working directory.
    pub directory: PathBuf,
    /// Time limit of an answer.
    pub timeout: Duration,
    /// Greatest length of a line in bytes.
    pub line_bytes: usize,
}

/// A message from the thread that reads the child's output.
enum ChildOutput {
    Line(Vec<u8>),
    TooLong,
    End,
}

/// A running child. It is killed together with its own children when this is dropped.
pub struct Child {
    running: ChildGroup,
    /// To the thread that writes standard input.
    requests: Sender<Vec<u8>>,
    /// From the thread that reads standard output.
    answers: Receiver<ChildOutput>,
    /// The end of standard error.
    errors: Arc<Mutex<Vec<u8>>>,
    /// The thread that reads standard error until its end.
    stderr_reader: thread::JoinHandle<()>,
    options: ChildOptions,
}

impl Child {
    /// Starts the child. The error describes what is wrong with the command.
    pub fn start(options: &ChildOptions, _permit: &StartPermit) -> Result<Self, String> {
        let (program, arguments) = options.command.split_first().ok_or("no command is given")?;
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&options.directory);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = ChildGroup::spawn(answers_on_stdout(&mut command))
            .map_err(|e| format!("`{program}` cannot be started: {e}"))?;
        let child = running.child();
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(stdout), Some(stderr)) = pipes else {
            return Err(format!("`{program}` has no pipes"));
        };
        let (requests, to_write) = channel::<Vec<u8>>();
        // One thread per pipe, so that a child that does not read, or that floods a pipe, cannot block this thread.
        let spawn = |work: Box<dyn FnOnce() + Send>| {
            threads::spawn(&format!("`{program}`"), work).map_err(|error| error.to_string())
        };
        let write_requests = move || {
            while let Ok(line) = to_write.recv() {
                if stdin.write_all(&line).and_then(|()| stdin.flush()).is_err() {
                    break;
                }
            }
        };
        spawn(Box::new(write_requests))?;
        let (outputs, answers) = sync_channel(WAITING_LINES);
        let line_bytes = options.line_bytes;
        spawn(Box::new(move || listen(stdout, line_bytes, &outputs)))?;
        let errors = Arc::new(Mutex::new(Vec::new()));
        let kept = errors.clone();
        let stderr_reader = spawn(Box::new(move || keep_errors(stderr, &kept)))?;
        Ok(Self { running, requests, answers, errors, stderr_reader, options: options.clone() })
    }

    /// Sends a line and waits for the answer, for at most `limit`. After an error, the child must not be asked again.
    pub fn ask(&mut self, request: &str, limit: Duration) -> Result<String, String> {
        // Nothing may have arrived before the request.
        match self.answers.try_recv() {
            Err(TryRecvError::Empty) => {}
            Ok(ChildOutput::Line(line)) => {
                return Err(format!("it wrote a line without a request: {}", shortened(&line)));
            }
            Ok(ChildOutput::TooLong) => return Err(self.too_long()),
            Ok(ChildOutput::End) | Err(TryRecvError::Disconnected) => return Err(self.gone()),
        }
        if self.requests.send(format!("{request}\n").into_bytes()).is_err() {
            return Err(self.gone());
        }
        match self.answers.recv_timeout(limit) {
            Ok(ChildOutput::Line(line)) => {
                String::from_utf8(line).map_err(|e| format!("its answer is not UTF-8: {}", shortened(e.as_bytes())))
            }
            Ok(ChildOutput::TooLong) => Err(self.too_long()),
            Ok(ChildOutput::End) | Err(RecvTimeoutError::Disconnected) => Err(self.gone()),
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("it did not answer within {} s{}", limit.as_secs_f64(), self.last_errors()))
            }
        }
    }

    fn too_long(&self) -> String {
        format!("it wrote a line of more than {} bytes (`max_line_bytes`)", self.options.line_bytes)
    }

    /// Describes how the child ended.
    fn gone(&mut self) -> String {
        // A child that closed its output usually ends soon. `wait_for` then kills the rest of its group, which may hold
        // the pipe of standard error open.
        let ended = self.running.wait_for(GRACE_PERIOD);
        let begun = Instant::now();
        while !self.stderr_reader.is_finished() && begun.elapsed() < GRACE_PERIOD {
            thread::sleep(Duration::from_millis(5));
        }
        match ended {
            Ok(Some(status)) => format!("it ended ({status}){}", self.last_errors()),
            _ => format!("it closed its output{}", self.last_errors()),
        }
    }

    fn last_errors(&self) -> String {
        let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&errors);
        match text.trim() {
            "" => String::new(),
            text => format!("; the end of its stderr: {text}"),
        }
    }
}

/// Sends the lines of `stdout` to `outputs`, up to the end or the first line of more than `line_bytes` bytes.
fn listen(stdout: ChildStdout, line_bytes: usize, outputs: &SyncSender<ChildOutput>) {
    let mut reader = BufReader::new(stdout);
    loop {
        let mut line = Vec::new();
        // One byte more than allowed, to distinguish a line that is too long from one that just fits.
        let read = reader.by_ref().take(line_bytes as u64 + 1).read_until(b'\n', &mut line);
        let message = match read {
            Ok(0) | Err(_) => ChildOutput::End,
            Ok(_) if line.ends_with(b"\n") => {
                line.pop();
                ChildOutput::Line(line)
            }
            Ok(n) if n > line_bytes => ChildOutput::TooLong,
            // A line without a line break at the end of the output: the child died while writing it.
            Ok(_) => ChildOutput::End,
        };
        let is_last = !matches!(message, ChildOutput::Line(_));
        if outputs.send(message).is_err() || is_last {
            return;
        }
    }
}

/// Reads `stderr` to its end; `kept` has the last bytes at any time.
fn keep_errors(mut stderr: ChildStderr, kept: &Mutex<Vec<u8>>) {
    let mut piece = [0; 1024];
    while let Ok(n @ 1..) = stderr.read(&mut piece) {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(&piece[..n]);
        let surplus = kept.len().saturating_sub(KEPT_ERRORS);
        kept.drain(..surplus);
    }
}
