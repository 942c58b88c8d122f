//! A process that renders one template for another process, and may come to harm.
//!
//! It is asked one line of JSON at a time, and answers with one: first the template, then conversations.

use std::io::{BufRead, BufReader, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use roll_external::process::{ChildGroup, limit_memory};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::template::{Conversation, Source, Template};

/// The argument of the program that is to call [`serve`].
pub const WORKER: &str = "template-worker";

/// Memory of the process beyond that of the program itself.
const MEMORY: u64 = 512 << 20;
/// Bytes of the worker's stack, a part of the limit above: templates nest a few levels.
const STACK: usize = 64 << 20;
/// Bytes of an answer, at most: a million tokens are a few megabytes.
const MAX_ANSWER: u64 = 64 << 20;
/// A template that takes longer hangs: usual ones take less than a millisecond.
const LIMIT: Duration = Duration::from_secs(20);
/// How long the end of a process whose output is closed is waited for.
const LAST_MOMENT: Duration = Duration::from_secs(2);

type Answer<T> = Result<T, String>;

/// Answers requests on the standard input on the standard output, until it ends: all that a process with the argument
/// [`WORKER`] does. Ends with the code of an error where it cannot.
pub fn serve() -> std::process::ExitCode {
    let (lines, asked) = sync_channel::<String>(1);
    let served = limit_memory(MEMORY).and_then(|()| {
        thread::Builder::new().name("template".into()).stack_size(STACK).spawn(move || {
            let _ = catch_unwind(AssertUnwindSafe(|| answer(&asked)));
            // Its end is the end of the process, which waits for more to read.
            std::process::exit(1);
        })
    });
    if served.is_err() {
        return std::process::ExitCode::FAILURE;
    }
    for line in std::io::stdin().lock().lines() {
        match line.map(|line| lines.send(line)) {
            Ok(Ok(())) => {}
            _ => break,
        }
    }
    // The caller is gone, and waits for no text that is still being rendered.
    std::process::ExitCode::SUCCESS
}

fn answer(asked: &Receiver<String>) {
    let mut out = std::io::stdout().lock();
    let mut template: Option<Template> = None;
    for line in asked {
        let answer = match &template {
            None => tell(parse::<Source>(&line).and_then(Template::new).map(|made| template.insert(made).reads())),
            Some(template) => tell(parse::<Conversation<'_>>(&line).and_then(|asked| template.render(&asked))),
        };
        if out.write_all(answer.as_bytes()).and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

fn parse<'a, T: Deserialize<'a>>(line: &'a str) -> Answer<T> {
    serde_json::from_str(line).map_err(|e| e.to_string())
}

fn tell<T: Serialize>(answer: Answer<T>) -> String {
    let line = serde_json::to_string(&answer).unwrap_or_else(|e| format!(r#"{{"Err":"{e}"}}"#));
    line + "\n"
}

/// A process that renders a template.
pub(super) struct Worker {
    program: PathBuf,
    source: Source,
    /// `None` after it came to harm; the next conversation starts another.
    running: Option<Running>,
}

impl Worker {
    /// Starts `program` for `source`, and returns the variables that the template reads.
    pub fn start(program: &Path, source: Source) -> Answer<(Self, Vec<String>)> {
        let mut worker = Self { program: program.into(), source, running: None };
        let reads = worker.begin()?;
        Ok((worker, reads))
    }

    fn begin(&mut self) -> Answer<Vec<String>> {
        let mut running = Running::start(&self.program)?;
        let reads: Answer<Vec<String>> =
            running.ask(&self.source).map_err(|problem| format!("the chat template cannot be parsed: {problem}"))?;
        self.running = Some(running);
        reads
    }

    /// The text of a conversation.
    pub fn render(&mut self, conversation: &Conversation<'_>) -> Answer<String> {
        if self.running.is_none() {
            self.begin()?;
        }
        let Some(mut running) = self.running.take() else { return Err("its process is gone".into()) };
        let rendered = running.ask(conversation)?;
        self.running = Some(running);
        rendered
    }
}

struct Running {
    group: ChildGroup,
    requests: SyncSender<String>,
    answers: Receiver<Vec<u8>>,
}

impl Running {
    fn start(program: &Path) -> Answer<Self> {
        let mut command = Command::new(program);
        // The system's message about its end is no news for the user.
        command.arg(WORKER).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let failed = |e| format!("the process that renders it cannot be started: {e}");
        let mut group = ChildGroup::spawn(&mut command).map_err(failed)?;
        let pipes = group.child().stdin.take().zip(group.child().stdout.take());
        let (mut stdin, stdout) = pipes.ok_or("the process that renders it has no pipes")?;
        let (requests, to_write) = sync_channel::<String>(1);
        let (heard, answers) = sync_channel(1);
        thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            for line in to_write {
                let mut answer = Vec::new();
                let asked = stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush());
                let read = asked.and_then(|()| stdout.by_ref().take(MAX_ANSWER).read_until(b'\n', &mut answer));
                if read.is_err() || !answer.ends_with(b"\n") || heard.send(answer).is_err() {
                    return;
                }
            }
        });
        Ok(Self { group, requests, answers })
    }

    /// Asks the worker. The outer error means that no answer came and the process is unusable.
    fn ask<T: DeserializeOwned>(&mut self, question: &impl Serialize) -> Answer<Answer<T>> {
        let line = serde_json::to_string(question).map_err(|e| e.to_string())?;
        // A thread that is gone says so through `answers`.
        let _ = self.requests.send(line + "\n");
        match self.answers.recv_timeout(LIMIT) {
            Ok(answer) => Ok(serde_json::from_slice(&answer).map_err(|e| format!("its answer is not valid: {e}"))?),
            Err(RecvTimeoutError::Timeout) => Err(format!("it took longer than {} s and was ended", LIMIT.as_secs())),
            Err(RecvTimeoutError::Disconnected) => {
                let ended = self.group.wait_for(LAST_MOMENT);
                let how = ended.ok().flatten().map_or("its answer is too long".into(), |status| status.to_string());
                Err(format!(
                    "it took more than {} MB of memory, {} MB of stack or {} MB of text, and was ended ({how})",
                    MEMORY >> 20,
                    STACK >> 20,
                    MAX_ANSWER >> 20
                ))
            }
        }
    }
}
