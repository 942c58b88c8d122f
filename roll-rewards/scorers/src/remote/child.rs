//! The program of the reward `command`: a child process that answers messages, one at a time.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use roll_core::Tensor;
use roll_external::process::answers_on_stdout;
use roll_external::responder::{NoAnswer, Pipes, Responder, Settings, StderrUse, Unanswered};
use serde_json::{Value as Json, json};

use super::Message;
use super::frame::{self, FrameError};
use super::shared_memory::SharedMemory;

/// Time that a program may take to end after its standard input is closed.
const TIME_TO_END: Duration = Duration::from_secs(2);

/// Why a program did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// It could not be started.
    #[error("it cannot be started")]
    Start(#[source] std::io::Error),
    /// It runs no more, or wrote something that is no message.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
}

/// How the tensors of a message reach the program.
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

/// A running program.
pub struct ChildProcess {
    responder: Responder<Request, Message>,
}

impl ChildProcess {
    /// Starts `command` in `directory`. Its standard error is logged.
    pub fn start(command: &[String], directory: &Path) -> Result<Self, ChildError> {
        let (program, arguments) = command.split_first().ok_or_else(|| {
            ChildError::Start(std::io::Error::new(std::io::ErrorKind::InvalidInput, "the command is empty"))
        })?;
        let settings = Settings {
            stderr: StderrUse::Logged(program.clone()),
            time_to_end: TIME_TO_END,
            slow_note: Some("the reward's program"),
        };
        let mut command = Command::new(program);
        command.args(arguments).current_dir(directory);
        let mut shared_memory = None;
        let converse = move |pipes: &mut Pipes, request| exchange(pipes, request, &mut shared_memory);
        let responder = Responder::start(answers_on_stdout(&mut command), settings, converse);
        responder.map(|responder| Self { responder }).map_err(ChildError::Start)
    }

    /// Sends a message and waits for the answer, at most for `limit`. The program is unusable after an error.
    pub fn call(&mut self, message: Message, tensor_path: TensorPath, limit: Duration) -> Result<Message, ChildError> {
        Ok(self.responder.ask(Request { message, tensor_path }, limit)?)
    }
}

/// Writes a message as a frame and reads the frame of its answer.
fn exchange(
    pipes: &mut Pipes,
    Request { message: (mut header, tensors), tensor_path }: Request,
    shared_memory: &mut Option<Arc<SharedMemory>>,
) -> Result<Message, Unanswered> {
    let max_bytes = frame::answer_bytes(&tensors);
    let offsets = if tensor_path == TensorPath::SharedMemory && !tensors.is_empty() {
        place_in_shared_memory(shared_memory, &mut header, &tensors)
    } else {
        vec![]
    };
    let answer = frame::write_with(&mut pipes.stdin, &header, &tensors, &offsets)
        .and_then(|()| frame::read_with::<Json>(&mut pipes.stdout, max_bytes, shared_memory.as_ref()));
    answer.map_err(|error| match error {
        FrameError::Io(_) => Unanswered::Closed,
        FrameError::NotAFrame(problem) => Unanswered::Invalid(problem),
    })
}

/// Writes tensors to shared memory and adds the description of the memory to the header. Returns the offsets of the
/// tensors, or an empty list if there is no shared memory; in that case the tensors are sent through the pipe.
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

/// Copies tensors into the region of shared memory. Replaces a region that is too small, or of which parts of an answer
/// are still in use. Returns the offsets of the tensors and the description of the region.
fn copy_to_shared_memory(
    shared_memory: &mut Option<Arc<SharedMemory>>,
    tensors: &[(String, Tensor)],
) -> std::io::Result<(Vec<u64>, Json)> {
    let needed = SharedMemory::needed(tensors);
    let mut region = match shared_memory.take().and_then(Arc::into_inner) {
        Some(region) if region.bytes() >= needed => region,
        _ => SharedMemory::new(needed)?,
    };
    let offsets = region.copy_in(tensors);
    let shared = json!({ "path": region.path(), "bytes": region.bytes(), "id": region.id() });
    *shared_memory = Some(Arc::new(region));
    Ok((offsets, shared))
}
