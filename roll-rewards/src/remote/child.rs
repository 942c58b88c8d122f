//! A child process that answers messages, one at a time. Messages are sent in the format of [`super::frame`].

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, BufWriter, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use roll_core::Tensor;
use roll_external::process::{ChildGroup, answers_on_stdout};
use serde_json::{Value as Json, json};

use super::Message;
use super::frame::{self, FrameError};
use super::shared_memory::SharedMemory;

/// Number of lines of standard error that an error message repeats.
const TAIL_LINES: usize = 8;
/// Length of such a line in bytes; a longer line is split.
const MAX_LINE: u64 = 4096;
/// Time that a child may take to end after its standard input is closed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time to wait for the last lines of a child that has ended.
const STDERR_DELAY: Duration = Duration::from_millis(200);
/// Time after which a slow answer is logged (once per child), so that a user sees why nothing happens.
const SLOW_ANSWER: Duration = Duration::from_secs(5);

/// Why a child did not answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum ChildError {
    /// The child could not be started.
    #[error("it cannot be started")]
    Start(#[source] std::io::Error),
    /// The child did not answer in time and was killed.
    #[error("it did not answer within {seconds} s and was ended{stderr_tail}")]
    Timeout { seconds: f64, stderr_tail: String },
    /// The child ended, or wrote something that is not a message.
    #[error("{how}{stderr_tail}")]
    Broken { how: String, stderr_tail: String },
}

/// How the tensors of a message reach the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorPath {
    /// Within the message, through the pipe.
    Pipe,
    /// In shared memory.
    SharedMemory,
}

/// A message to send.
struct Request {
    message: Message,
    tensor_path: TensorPath,
}

/// A running child. A thread of its own talks to the child, so that a child that neither reads nor writes can be
/// abandoned. At most one message is in flight. Processes that the child started end with it.
pub struct ChildProcess {
    group: ChildGroup,
    /// Messages for the thread; `None` closes the child's standard input.
    requests: Option<SyncSender<Request>>,
    /// Answers from the thread.
    answers: Receiver<Result<Message, FrameError>>,
    /// The last lines of the child's standard error.
    stderr_tail: Arc<Mutex<VecDeque<String>>>,
    /// Whether a slow answer was logged already.
    slow_answer_logged: bool,
}

impl ChildProcess {
    /// Starts `command` in `directory`. The child's standard error is logged.
    pub fn start(command: &[String], directory: &Path) -> Result<Self, ChildError> {
        let (program, arguments) = command.split_first().ok_or_else(|| {
            ChildError::Start(std::io::Error::new(std::io::ErrorKind::InvalidInput, "the command is empty"))
        })?;
        let mut command = Command::new(program);
        command.args(arguments).current_dir(directory);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = ChildGroup::spawn(answers_on_stdout(&mut command)).map_err(ChildError::Start)?;
        let child = group.child();
        let stderr_tail = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(stderr) = child.stderr.take() {
            let (stderr_tail, program) = (Arc::clone(&stderr_tail), program.clone());
            let log = move || {
                let (mut stderr, mut bytes) = (BufReader::new(stderr), Vec::new());
                // Reads bytes instead of text, in pieces of limited length, because a child may write anything.
                while let Ok(1..) = stderr.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes) {
                    let line = String::from_utf8_lossy(&bytes).trim_end().to_string();
                    bytes.clear();
                    tracing::info!(target: "plugin", "{program}: {line}");
                    let mut stderr_tail = stderr_tail.lock().unwrap_or_else(PoisonError::into_inner);
                    stderr_tail.push_back(line);
                    if stderr_tail.len() > TAIL_LINES {
                        stderr_tail.pop_front();
                    }
                }
            };
            std::thread::Builder::new().spawn(log).map_err(ChildError::Start)?;
        }
        // Both pipes exist, because they were requested above.
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (requests, received_requests) = sync_channel::<Request>(1);
        let (answer_sender, answers) = sync_channel(1);
        let converse = move || {
            let Some((stdin, stdout)) = pipes else { return };
            let (mut stdin, mut stdout) = (BufWriter::new(stdin), BufReader::new(stdout));
            let mut shared_memory: Option<Arc<SharedMemory>> = None;
            for Request { message: (mut header, tensors), tensor_path } in received_requests {
                let max_bytes = frame::answer_bytes(&tensors);
                let offsets = if tensor_path == TensorPath::SharedMemory && !tensors.is_empty() {
                    place_in_shared_memory(&mut shared_memory, &mut header, &tensors)
                } else {
                    vec![]
                };
                let answer = frame::write_with(&mut stdin, &header, &tensors, &offsets)
                    .and_then(|()| frame::read_with::<Json>(&mut stdout, max_bytes, shared_memory.as_ref()));
                if answer_sender.send(answer).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().spawn(converse).map_err(ChildError::Start)?;
        Ok(Self { group, requests: Some(requests), answers, stderr_tail, slow_answer_logged: false })
    }

    /// Sends a message and waits for the answer, at most for `limit`. The child is unusable after an error.
    pub fn call(&mut self, message: Message, tensor_path: TensorPath, limit: Duration) -> Result<Message, ChildError> {
        if let Some(requests) = &self.requests {
            // If the thread has ended, `answers` reports it.
            let _ = requests.send(Request { message, tensor_path });
        }
        let mut answer = self.answers.recv_timeout(limit.min(SLOW_ANSWER));
        if matches!(answer, Err(RecvTimeoutError::Timeout)) && limit > SLOW_ANSWER {
            if !std::mem::replace(&mut self.slow_answer_logged, true) {
                tracing::info!("waiting for the reward's program, at most {} s", limit.as_secs_f64());
            }
            answer = self.answers.recv_timeout(limit - SLOW_ANSWER);
        }
        match answer {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(FrameError::NotAFrame(how))) => Err(ChildError::Broken { how, stderr_tail: self.stderr_tail() }),
            Ok(Err(FrameError::Io(_))) | Err(RecvTimeoutError::Disconnected) => {
                let how = match self.group.wait_for(EXIT_TIMEOUT) {
                    Ok(Some(status)) => format!("it ended ({status})"),
                    _ => "it closed its standard output".into(),
                };
                Err(ChildError::Broken { how, stderr_tail: self.stderr_tail() })
            }
            Err(RecvTimeoutError::Timeout) => {
                self.group.kill();
                Err(ChildError::Timeout { seconds: limit.as_secs_f64(), stderr_tail: self.stderr_tail() })
            }
        }
    }

    /// The last lines of standard error for an error message: "; its last lines: ...".
    fn stderr_tail(&mut self) -> String {
        // The thread that reads standard error may be slightly late.
        std::thread::sleep(STDERR_DELAY);
        let stderr_tail = self.stderr_tail.lock().unwrap_or_else(PoisonError::into_inner);
        if stderr_tail.is_empty() {
            return String::new();
        }
        format!("; its last lines: {}", stderr_tail.iter().cloned().collect::<Vec<_>>().join(" / "))
    }
}

/// Writes tensors to shared memory and adds a description of this memory to the header. Returns the offsets of the
/// tensors. Returns an empty list if there is no shared memory; the tensors are then sent through the pipe.
fn place_in_shared_memory(
    shared_memory: &mut Option<Arc<SharedMemory>>,
    header: &mut Json,
    tensors: &[(String, Tensor)],
) -> Vec<u64> {
    match copy_to_shared_memory(shared_memory, tensors) {
        Ok((offsets, shared)) => {
            header["shared"] = shared;
            offsets
        }
        Err(error) => {
            tracing::debug!("no shared memory, tensors go through the pipe: {error}");
            *shared_memory = None;
            vec![]
        }
    }
}

/// Copies tensors to the region `shared_memory`. Replaces the region if it is too small, or if tensors of an answer in
/// it are still in use. Returns the offsets of the tensors and the description of the region.
fn copy_to_shared_memory(
    shared_memory: &mut Option<Arc<SharedMemory>>,
    tensors: &[(String, Tensor)],
) -> std::io::Result<(Vec<u64>, Json)> {
    let needed = SharedMemory::needed(tensors);
    // A region in use has further owners, and `into_inner` returns `None`.
    let mut region = match shared_memory.take().and_then(Arc::into_inner) {
        Some(region) if region.bytes() >= needed => region,
        _ => SharedMemory::new(needed)?,
    };
    let offsets = region.copy_in(tensors);
    let description = json!({ "path": region.path(), "bytes": region.bytes(), "id": region.id() });
    *shared_memory = Some(Arc::new(region));
    Ok((offsets, description))
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Closing standard input asks the child to end. If it does not, it is killed together with its process group.
        self.requests = None;
        let _ = self.group.wait_for(EXIT_TIMEOUT);
    }
}
