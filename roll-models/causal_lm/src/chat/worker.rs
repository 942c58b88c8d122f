//! A worker process that renders one template with limited memory and time: [`serve`] is its program, [`Worker`] the
//! caller's side.
//!
//! Each request and each answer is one line of JSON. The first request is the template, and its answer the variables
//! that the template reads. All further requests are conversations, and their answers rendered texts.

use std::io::{BufRead, BufReader, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use roll_external::json;
use roll_external::process::{ChildGroup, limit_memory};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::template::{Conversation, Template, TemplateSource};

/// The only argument of a process that must call [`serve`].
pub const WORKER: &str = "template-worker";

/// Memory limit in bytes, in addition to the memory of the program itself.
const MEMORY: u64 = 512 << 20;
/// Stack size in bytes, a part of the memory limit. Templates nest a few levels.
const STACK: usize = 64 << 20;
/// Maximal size of an answer in bytes. A million tokens take a few megabytes.
const MAX_ANSWER: u64 = 64 << 20;
/// Time limit of a request. Usual templates take less than a millisecond.
const LIMIT: Duration = Duration::from_secs(20);
/// Time to wait for the exit of a process that has closed its output.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

/// The answer to a request, or the problem.
type Answer<T> = Result<T, String>;

/// Reads requests from the standard input and writes answers to the standard output until the input ends. A process
/// with the argument [`WORKER`] does nothing else.
pub fn serve() -> std::process::ExitCode {
    let (lines, requests) = sync_channel::<String>(1);
    let started = limit_memory(MEMORY).and_then(|()| {
        thread::Builder::new().name("template".into()).stack_size(STACK).spawn(move || {
            let _ = catch_unwind(AssertUnwindSafe(|| answer(&requests)));
            // The whole process ends, because the main thread may be waiting for input.
            std::process::exit(1);
        })
    });
    if started.is_err() {
        return std::process::ExitCode::FAILURE;
    }
    for line in std::io::stdin().lock().lines() {
        match line.map(|line| lines.send(line)) {
            Ok(Ok(())) => {}
            _ => break,
        }
    }
    // The caller is gone, so a text that is still being rendered is not needed.
    std::process::ExitCode::SUCCESS
}

/// Answers all requests.
fn answer(requests: &Receiver<String>) {
    let mut out = std::io::stdout().lock();
    let mut template: Option<Template> = None;
    for line in requests {
        let answer = match &template {
            None => {
                let parsed = parse::<TemplateSource>(&line).and_then(Template::new);
                to_line(parsed.map(|parsed| template.insert(parsed).variables()))
            }
            Some(template) => to_line(parse::<Conversation<'static>>(&line).and_then(|c| template.render(&c))),
        };
        if out.write_all(answer.as_bytes()).and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

fn parse<T: DeserializeOwned>(line: &str) -> Answer<T> {
    json::parse(line).map_err(|e| e.to_string())
}

fn to_line<T: Serialize>(answer: Answer<T>) -> String {
    let line = serde_json::to_string(&answer).unwrap_or_else(|e| format!(r#"{{"Err":"{e}"}}"#));
    line + "\n"
}

/// A template that a worker process renders.
pub(super) struct Worker {
    program: PathBuf,
    source: TemplateSource,
    /// `None` after a failure; the next request starts another process.
    process: Option<WorkerProcess>,
}

impl Worker {
    /// Starts `program` for `source`. Also returns the variables that the template reads.
    pub fn start(program: &Path, source: TemplateSource) -> Answer<(Self, Vec<String>)> {
        let mut worker = Self { program: program.into(), source, process: None };
        let variables = worker.start_process()?;
        Ok((worker, variables))
    }

    /// Starts a process and sends the template. Returns the variables that the template reads.
    fn start_process(&mut self) -> Answer<Vec<String>> {
        let mut process = WorkerProcess::start(&self.program)?;
        let variables: Answer<Vec<String>> = process
            .request(&self.source)
            .map_err(|problem| format!("the chat template cannot be parsed: {problem}"))?;
        self.process = Some(process);
        variables
    }

    /// Renders a conversation.
    pub fn render(&mut self, conversation: &Conversation<'_>) -> Answer<String> {
        if self.process.is_none() {
            self.start_process()?;
        }
        let Some(mut process) = self.process.take() else { return Err("its process is gone".into()) };
        let rendered = process.request(conversation)?;
        self.process = Some(process);
        rendered
    }
}

/// A running worker process, and the channels of the thread that writes to it and reads from it.
struct WorkerProcess {
    group: ChildGroup,
    requests: SyncSender<String>,
    answers: Receiver<Vec<u8>>,
}

impl WorkerProcess {
    fn start(program: &Path) -> Answer<Self> {
        let mut command = Command::new(program);
        // What a process prints when the system ends it does not concern the user.
        command.arg(WORKER).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let failed = |e| format!("the process that renders it cannot be started: {e}");
        let mut group = ChildGroup::spawn(&mut command).map_err(failed)?;
        let pipes = group.child().stdin.take().zip(group.child().stdout.take());
        let (mut stdin, stdout) = pipes.ok_or("the process that renders it has no pipes")?;
        let (requests, lines) = sync_channel::<String>(1);
        let (sender, answers) = sync_channel(1);
        let converse = move || {
            let mut stdout = BufReader::new(stdout);
            for line in lines {
                let mut answer = Vec::new();
                let written = stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush());
                let read = written.and_then(|()| stdout.by_ref().take(MAX_ANSWER).read_until(b'\n', &mut answer));
                if read.is_err() || !answer.ends_with(b"\n") || sender.send(answer).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().spawn(converse).map_err(failed)?;
        Ok(Self { group, requests, answers })
    }

    /// Sends a request and returns the answer. The outer error means that no answer came and the process is unusable.
    fn request<T: DeserializeOwned>(&mut self, request: &impl Serialize) -> Answer<Answer<T>> {
        let line = serde_json::to_string(request).map_err(|e| e.to_string())?;
        // If the thread is gone, `answers` is disconnected.
        let _ = self.requests.send(line + "\n");
        match self.answers.recv_timeout(LIMIT) {
            Ok(answer) => Ok(serde_json::from_slice(&answer).map_err(|e| format!("its answer is not valid: {e}"))?),
            Err(RecvTimeoutError::Timeout) => Err(format!("it took longer than {} s and was ended", LIMIT.as_secs())),
            Err(RecvTimeoutError::Disconnected) => {
                let ended = self.group.wait_for(EXIT_LIMIT);
                let cause = ended.ok().flatten().map_or("its answer is too long".into(), |status| status.to_string());
                Err(format!(
                    "it took more than {} MB of memory, {} MB of stack or {} MB of text, and was ended ({cause})",
                    MEMORY >> 20,
                    STACK >> 20,
                    MAX_ANSWER >> 20
                ))
            }
        }
    }
}
