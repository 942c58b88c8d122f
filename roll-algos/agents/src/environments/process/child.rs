//! The process of an environment: it answers each line with a line. Anything else that it does is an error with a
//! description.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use roll_external::process::answers_on_stdout;
use roll_external::responder::{self, Pipes, Responder, Settings, Unanswered};

use super::limits::StartPermit;
use crate::environments::protocol::shortened;

/// How a process is started and called.
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

/// A running process. It is killed together with its own children when this is dropped.
pub struct Child(Responder<String, String>);

impl Child {
    /// Starts the process. The error describes what is wrong with the command.
    pub fn start(options: &ChildOptions, _permit: &StartPermit) -> Result<Self, String> {
        let (program, arguments) = options.command.split_first().ok_or("no command is given")?;
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&options.directory);
        let line_bytes = options.line_bytes;
        let converse = move |pipes: &mut Pipes, request: String| exchange(pipes, &request, line_bytes);
        Responder::start(answers_on_stdout(&mut command), Settings::default(), converse)
            .map(Self)
            .map_err(|e| format!("`{program}` cannot be started: {e}"))
    }

    /// Sends a line and waits for the answer, for at most `limit`. The process is unusable after an error.
    pub fn ask(&mut self, request: String, limit: Duration) -> Result<String, String> {
        self.0.ask(request, limit).map_err(|no_answer| no_answer.to_string())
    }
}

/// Writes a line and reads the line that answers it.
fn exchange(pipes: &mut Pipes, request: &str, line_bytes: usize) -> Result<String, Unanswered> {
    if pipes.has_unasked_line()? {
        let line = read_line(pipes, line_bytes)?;
        return Err(Unanswered::Invalid(format!("it wrote a line without a request: {}", shortened(&line))));
    }
    pipes.stdin.write_all(format!("{request}\n").as_bytes())?;
    pipes.stdin.flush()?;
    let line = read_line(pipes, line_bytes)?;
    String::from_utf8(line)
        .map_err(|e| Unanswered::Invalid(format!("its answer is not UTF-8: {}", shortened(e.as_bytes()))))
}

fn read_line(pipes: &mut Pipes, line_bytes: usize) -> Result<Vec<u8>, Unanswered> {
    responder::read_line(&mut pipes.stdout, line_bytes).map_err(|unanswered| match unanswered {
        Unanswered::Invalid(problem) => Unanswered::Invalid(format!("{problem} (`max_line_bytes`)")),
        Unanswered::Closed => Unanswered::Closed,
    })
}
