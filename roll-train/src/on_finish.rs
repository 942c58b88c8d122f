//! Runs the command of `on_finish` when a run ends, whether it succeeds, fails or is interrupted. The command learns
//! the outcome from environment variables, and in full from JSON on its standard input.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use roll_core::{Error, Fault, Result};
use roll_external::process::ChildGroup;
use serde_json::{Value, json};

use crate::config::{RunConfig, without_secrets};
use crate::on_metrics::RUN_DIR;
use crate::trainer::RunSummary;

/// A command that takes longer is killed, with the processes that it started, because a run that is over must not hold
/// its machine.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Maximum number of characters of `ROLL_RUN_ERROR`. Linux allows 128 KiB for a variable.
const MAX_ERROR: usize = 4096;

/// The variables that the command gets: the status ("done", "stopped", "failed" or "interrupted"), the run directory,
/// the steps done, and the error of a run that failed.
pub const VARIABLES: [&str; 4] = ["ROLL_RUN_STATUS", RUN_DIR, "ROLL_RUN_STEPS", "ROLL_RUN_ERROR"];

/// A note for each program of `on_finish` and `on_metrics` that does not exist. Without the note, the user would learn
/// that only when the program is started, which for `on_finish` is the end of the run.
pub(crate) fn missing_programs(config: &RunConfig) -> Vec<String> {
    let mut notes = Vec::new();
    for (key, command) in [("on_finish", &config.on_finish), ("on_metrics", &config.on_metrics)] {
        if let Some(program) = command.first()
            && !is_program(Path::new(program))
        {
            notes.push(format!("`{key}`: the program `{program}` is not there and cannot be started"));
        }
    }
    notes
}

/// Whether the program exists: at its path, or in a directory of `PATH` if it is a bare name.
fn is_program(program: &Path) -> bool {
    // On Windows, the name may lack `.exe`.
    let is_file = |path: PathBuf| path.is_file() || path.with_extension(std::env::consts::EXE_EXTENSION).is_file();
    let is_bare_name = program.components().count() == 1;
    if is_bare_name {
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|dir| is_file(dir.join(program)))
    } else {
        is_file(program.into())
    }
}

/// The command of `on_finish`, and the run whose end it reports.
pub(crate) struct OnFinish {
    /// The program and its arguments.
    command: Vec<String>,
    /// The run directory.
    dir: PathBuf,
}

impl OnFinish {
    /// The command for the run in `dir`. `None` without a command, and on all ranks but 0, which have no directory.
    pub(crate) fn new(command: &[String], dir: Option<&Path>) -> Option<Self> {
        if command.is_empty() {
            return None;
        }
        Some(Self { command: command.to_vec(), dir: dir?.to_path_buf() })
    }

    /// Runs the command after `steps_done` steps. Its failure is only a warning, because the run has ended already.
    pub(crate) fn run(&self, steps_done: u64, outcome: &Result<RunSummary>) {
        if let Err(problem) = self.run_within(steps_done, outcome, TIME_LIMIT) {
            // The arguments are not logged, because they may hold a password.
            tracing::warn!("`on_finish`: {} {problem}", self.command[0]);
        }
    }

    /// Runs the command, and kills it after `limit`.
    fn run_within(&self, steps_done: u64, outcome: &Result<RunSummary>, limit: Duration) -> Result<(), String> {
        let dir = std::path::absolute(&self.dir).unwrap_or_else(|_| self.dir.clone());
        let error = outcome.as_ref().err().map(error_text).unwrap_or_default();
        let facts = facts_for_command(&dir, steps_done, outcome);
        let status = facts["status"].as_str().unwrap_or_default().to_string();
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::piped()).stdout(std::io::stderr()).stderr(Stdio::inherit());
        let values = [status.as_str().into(), dir.into_os_string(), steps_done.to_string().into(), error.into()];
        command.envs(VARIABLES.into_iter().zip(values));
        let mut group = ChildGroup::spawn(&mut command).map_err(|e| format!("cannot be started: {e}"))?;
        if let Some(mut stdin) = group.child().stdin.take() {
            // A command that does not read its input must not block this thread.
            let write = move || drop(stdin.write_all(facts.to_string().as_bytes()));
            std::thread::Builder::new().spawn(write).map_err(|e| format!("cannot be started: {e}"))?;
        }
        match group.wait_for(limit).map_err(|e| format!("cannot be waited for: {e}"))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("failed ({status})")),
            None => Err(format!("took longer than {} s and was killed", limit.as_secs_f64())),
        }
    }
}

/// The error as text for a variable: without secrets, without NUL characters, which would end the variable, and at most
/// [`MAX_ERROR`] characters.
fn error_text(error: &Error) -> String {
    let text = without_secrets(&error.chain()).replace('\0', "\u{fffd}");
    match text.char_indices().nth(MAX_ERROR) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The JSON on the standard input of the command.
fn facts_for_command(dir: &Path, steps_done: u64, outcome: &Result<RunSummary>) -> Value {
    let (status, error) = match outcome {
        Ok(summary) if summary.stopped.is_some() => ("stopped", None),
        Ok(_) => ("done", None),
        Err(error) if error.fault() == Fault::Interrupt => ("interrupted", None),
        Err(error) => ("failed", Some(error_text(error))),
    };
    let summary = outcome.as_ref().ok().and_then(|summary| serde_json::to_value(summary).ok());
    json!({ "status": status, "run": dir, "steps": steps_done, "error": error, "summary": summary })
}

#[cfg(unix)]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, dir: &Path) -> OnFinish {
        OnFinish::new(&["sh", "-c", script].map(String::from), Some(dir)).unwrap()
    }

    #[test]
    fn the_command_receives_the_outcome_in_variables_and_as_json() {
        let dir = tempfile::tempdir().unwrap();
        let script = format!(
            "cat > '{0}/in'; echo \"$ROLL_RUN_STATUS $ROLL_RUN_STEPS $ROLL_RUN_DIR $ROLL_RUN_ERROR\" > '{0}/env'",
            dir.path().display()
        );
        for (outcome, status, error) in [
            (Err(Error::Interrupted), "interrupted", Value::Null),
            (Err(Error::Misuse("the disk is full".into())), "failed", json!("the disk is full")),
        ] {
            shell(&script, dir.path()).run_within(7, &outcome, TIME_LIMIT).unwrap();
            let facts: Value = serde_json::from_slice(&std::fs::read(dir.path().join("in")).unwrap()).unwrap();
            assert_eq!((&facts["status"], &facts["steps"], &facts["error"]), (&json!(status), &json!(7), &error));
            let env = std::fs::read_to_string(dir.path().join("env")).unwrap();
            assert!(env.starts_with(&format!("{status} 7 {}", dir.path().display())), "{env}");
        }
    }

    #[test]
    fn long_errors_and_those_with_a_nul_reach_the_command() {
        let dir = tempfile::tempdir().unwrap();
        let script = format!("printf %s \"$ROLL_RUN_ERROR\" > '{}/error'", dir.path().display());
        for (text, length) in [("e".repeat(1_000_000), MAX_ERROR + 3), ("a\0b".into(), 5)] {
            shell(&script, dir.path()).run_within(1, &Err(Error::Misuse(text)), TIME_LIMIT).unwrap();
            assert_eq!(std::fs::read(dir.path().join("error")).unwrap().len(), length);
        }
    }

    #[test]
    fn a_command_that_fails_hangs_or_is_missing_is_only_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let problem = |script: &str, limit| {
            shell(script, dir.path()).run_within(1, &Err(Error::Interrupted), limit).err().unwrap_or_default()
        };
        assert!(problem("exit 3", TIME_LIMIT).contains("failed (exit status: 3)"));
        assert!(problem("exec sleep 600", Duration::from_millis(50)).contains("took longer than 0.05 s"));
        let none = OnFinish::new(&["./no-such-program".into()], Some(dir.path())).unwrap();
        none.run(1, &Err(Error::Interrupted));
        assert!(none.run_within(1, &Err(Error::Interrupted), TIME_LIMIT).unwrap_err().contains("cannot be started"));
        assert!(OnFinish::new(&[], Some(dir.path())).is_none() && OnFinish::new(&["true".into()], None).is_none());
    }
}
