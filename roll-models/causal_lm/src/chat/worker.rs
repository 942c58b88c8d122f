//! A worker process that renders one template with limited memory and time: [`serve`] is its program, [`Worker`] the
//! caller's side.
//!
//! Each request and each answer is one line of JSON. The first request is the template, and its answer the variables
//! that the template reads. All further requests are conversations, and their answers rendered texts.

use std::io::{BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::Duration;

use roll_external::json;
use roll_external::process::limit_memory;
use roll_external::responder::{self, Pipes, Reason, Responder, Settings, StderrUse};
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
const MAX_ANSWER: usize = 64 << 20;
/// Time limit of a request. Usual templates take less than a millisecond.
const LIMIT: Duration = Duration::from_secs(20);

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

/// A running worker process: requests are lines of JSON, and so are answers.
struct WorkerProcess(Responder<String, Vec<u8>>);

impl WorkerProcess {
    fn start(program: &Path) -> Answer<Self> {
        let mut command = Command::new(program);
        command.arg(WORKER);
        // Discards messages of the system when it ends a process, because they do not concern the user.
        let settings = Settings { stderr: StderrUse::Discarded, ..Settings::default() };
        let converse = |pipes: &mut Pipes, line: String| {
            pipes.stdin.write_all(line.as_bytes())?;
            pipes.stdin.flush()?;
            responder::read_line(&mut pipes.stdout, MAX_ANSWER)
        };
        Responder::start(&mut command, settings, converse)
            .map(Self)
            .map_err(|e| format!("the process that renders it cannot be started: {e}"))
    }

    /// Sends a request and returns the answer. The outer error means that no answer came and the process is unusable.
    fn request<T: DeserializeOwned>(&mut self, request: &impl Serialize) -> Answer<Answer<T>> {
        let line = serde_json::to_string(request).map_err(|e| e.to_string())?;
        let answer = self.0.ask(line + "\n", LIMIT).map_err(|no_answer| problem_of(no_answer.reason))?;
        serde_json::from_slice(&answer).map_err(|e| format!("its answer is not valid: {e}"))
    }
}

/// The problem of a template whose process did not answer. A process that exceeds its memory or stack ends; one whose
/// answer exceeds [`MAX_ANSWER`] is ended.
fn problem_of(reason: Reason) -> String {
    let cause = match reason {
        Reason::Late(limit) => return format!("it took longer than {} s and was ended", limit.as_secs()),
        Reason::Ended(status) => status.to_string(),
        Reason::Closed => "its output is closed".into(),
        Reason::Invalid(_) => "its answer is too long".into(),
    };
    format!(
        "it took more than {} MB of memory, {} MB of stack or {} MB of text, and was ended ({cause})",
        MEMORY >> 20,
        STACK >> 20,
        MAX_ANSWER >> 20
    )
}
