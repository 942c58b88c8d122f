//! Passes each line of metrics to the standard input of the `on_metrics` command, for example of a tracker.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use roll_core::threads;
use roll_external::process::ChildGroup;

/// The environment variable with the run directory, for this command and that of `on_finish`.
pub(crate) const RUN_DIR: &str = "ROLL_RUN_DIR";
/// Time that the command has at the end of the run to finish its work, before it is killed.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of lines that wait for a slow command. Further lines are left out, because training must not wait.
const MAX_WAITING: usize = 4096;

/// The running command of `on_metrics`.
#[derive(Debug)]
pub(crate) struct OnMetrics {
    /// The name of the program, for warnings.
    program: String,
    /// The program, with the processes that it starts.
    group: ChildGroup,
    /// Passes lines to the thread that writes them to the command; `None` at the end of the run.
    lines: Option<SyncSender<String>>,
    /// Whether a warning about lost lines was logged.
    has_warned: bool,
    /// Time that the program has to end, once its input has ended.
    limit: Duration,
}

impl OnMetrics {
    /// Starts the command, which finds the run directory in [`RUN_DIR`]. `None` without a command. A command that
    /// cannot be started is only a warning, because the metrics are in the files of the run, too.
    pub(crate) fn start(command: &[String], run: &Path) -> Option<Self> {
        let [program, arguments @ ..] = command else { return None };
        let dir = std::path::absolute(run).unwrap_or_else(|_| run.into());
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(std::io::stderr()).stderr(Stdio::inherit());
        command.env(RUN_DIR, dir);
        let mut group = match ChildGroup::spawn(&mut command) {
            Ok(group) => group,
            Err(error) => {
                // The arguments are not logged, because they may hold a password.
                tracing::warn!("`on_metrics`: {program} cannot be started: {error}");
                return None;
            }
        };
        let (lines, received_lines) = sync_channel::<String>(MAX_WAITING);
        if let Some(mut stdin) = group.child().stdin.take() {
            // A command that does not read its input must not block the training.
            let writer = threads::spawn("`on_metrics`", move || {
                // Ends with the channel, or at the first line that cannot be written.
                for line in received_lines {
                    if stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()).is_err() {
                        break;
                    }
                }
            });
            if let Err(error) = writer {
                tracing::warn!("`on_metrics`: {program} gets no lines: {error}");
                return None;
            }
        }
        Some(Self { program: program.clone(), group, lines: Some(lines), has_warned: false, limit: TIME_LIMIT })
    }

    /// Passes on a line, which must end with a line break. The first line that is lost is a warning.
    pub(crate) fn write(&mut self, line: &str) {
        let Some(lines) = &self.lines else { return };
        let problem = match lines.try_send(line.into()) {
            Ok(()) => return,
            Err(TrySendError::Full(_)) => format!("is slow: {MAX_WAITING} lines wait, and further ones are left out"),
            Err(TrySendError::Disconnected(_)) => "reads no more lines, and further ones are left out".into(),
        };
        if !self.has_warned {
            self.has_warned = true;
            tracing::warn!("`on_metrics`: {} {problem}; metrics.jsonl has all of them", self.program);
        }
    }

    /// Ends the input, and waits for the command.
    fn finish(&mut self) -> Result<(), String> {
        self.lines = None;
        match self.group.wait_for(self.limit).map_err(|e| format!("cannot be waited for: {e}"))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("failed ({status})")),
            None => Err(format!("did not end within {} s of its input and was killed", self.limit.as_secs_f64())),
        }
    }
}

impl Drop for OnMetrics {
    fn drop(&mut self) {
        if let Err(problem) = self.finish() {
            tracing::warn!("`on_metrics`: {} {problem}", self.program);
        }
    }
}

#[cfg(unix)]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn shell(script: &str, run: &Path) -> OnMetrics {
        OnMetrics::start(&["sh", "-c", script].map(String::from), run).unwrap()
    }

    #[test]
    fn the_command_reads_each_line_and_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = shell("cat > \"$ROLL_RUN_DIR/lines\"", dir.path());
        command.write("{\"step\":1}\n");
        command.write("{\"step\":2}\n");
        assert_eq!(command.finish(), Ok(()));
        assert_eq!(std::fs::read_to_string(dir.path().join("lines")).unwrap(), "{\"step\":1}\n{\"step\":2}\n");
    }

    #[test]
    fn a_command_that_fails_hangs_or_does_not_read_never_blocks_the_run() {
        let dir = tempfile::tempdir().unwrap();
        assert!(OnMetrics::start(&[], dir.path()).is_none());
        assert!(OnMetrics::start(&["./no-such-program".into()], dir.path()).is_none());
        assert!(shell("exit 3", dir.path()).finish().unwrap_err().contains("failed (exit status: 3)"));
        let begun = Instant::now();
        let mut deaf = shell("exec sleep 600", dir.path());
        deaf.limit = Duration::from_millis(50);
        let line = format!("{}\n", "x".repeat(1000));
        (0..2 * MAX_WAITING).for_each(|_| deaf.write(&line));
        assert!(deaf.has_warned && deaf.finish().unwrap_err().contains("did not end within 0.05 s"));
        drop(deaf);
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}
