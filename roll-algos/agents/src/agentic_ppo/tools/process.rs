//! Runs a tool's program for one call. The program is limited in time and output, and is killed with all that it
//! started.

use std::io::{self, Read, Write};
use std::process::{self, ChildStderr, ChildStdout, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use roll_core::threads;
use roll_external::process::ChildGroup;

use super::ToolOptions;

/// Interval at which a wait checks whether the program has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time to wait for the output of a program that has ended, because a child that left the program's group may hold the
/// pipe open.
const GRACE_PERIOD: Duration = Duration::from_millis(500);
/// Number of bytes of a failed program's standard error that the agent reads, from the end.
const KEPT_ERRORS: usize = 400;

/// A tool with valid options.
#[derive(Clone, Debug)]
pub(super) struct Tool {
    pub options: ToolOptions,
    pub timeout: Duration,
}

impl Tool {
    /// Runs the program with `input` on its standard input, and returns its output.
    pub fn run(&self, input: &str) -> Result<String, String> {
        let ToolOptions { command: program_and_arguments, directory, environment, max_output_bytes, .. } =
            &self.options;
        let (program, arguments) = program_and_arguments.split_first().ok_or("the tool has no command")?;
        let mut command = process::Command::new(program);
        command.args(arguments).env_clear();
        command.envs(environment.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        if let Some(directory) = directory {
            command.current_dir(directory);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = ChildGroup::spawn(&mut command).map_err(|e| format!("the tool cannot be started: {e}"))?;
        let begun = Instant::now();
        let child = group.child();
        let (Some(mut stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err("the tool has no pipes".into());
        };
        // One thread per pipe, so that a program that does not read, or that floods a pipe, cannot block this thread.
        let input = input.as_bytes().to_vec();
        let write_input = move || {
            // Fails for a program that does not read its input, which is no error.
            let _ = stdin.write_all(&input);
        };
        threads::spawn("its input", write_input).map_err(no_thread)?;
        // One byte more than allowed distinguishes an output that is too long from one that just fits.
        let output_receiver = read_start(stdout, *max_output_bytes as u64 + 1).map_err(no_thread)?;
        let stderr_receiver = read_end(stderr).map_err(no_thread)?;

        let timed_out = || format!("the tool took longer than {} s", self.timeout.as_secs_f64());
        let (mut ended, mut output) = (None, None);
        // Waits until the program has ended and its output was read to the end. When the program ends, its group is
        // killed, which closes the pipes that the group holds.
        while ended.is_none() || output.is_none() {
            if output.is_none() {
                match output_receiver.recv_timeout(POLL_INTERVAL) {
                    Ok(read) => output = Some(read.map_err(|e| format!("the tool's output cannot be read: {e}"))?),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Err("the tool's output is gone".into()),
                }
            } else {
                thread::sleep(POLL_INTERVAL);
            }
            if output.as_ref().is_some_and(|output| output.len() > *max_output_bytes) {
                return Err(format!("the tool wrote more than {max_output_bytes} bytes"));
            }
            if ended.is_none() {
                let status = group.try_wait().map_err(|e| format!("the tool cannot be waited for: {e}"))?;
                ended = status.map(|status| (status, Instant::now()));
            }
            match &ended {
                None if begun.elapsed() > self.timeout => return Err(timed_out()),
                Some((_, at)) if output.is_none() && at.elapsed() > GRACE_PERIOD => {
                    return Err("the tool ended and left its output open".into());
                }
                _ => {}
            }
        }
        let (Some((status, _)), Some(output)) = (ended, output) else { return Err(timed_out()) };
        if !status.success() {
            let errors = stderr_receiver.recv_timeout(GRACE_PERIOD).unwrap_or_default();
            let errors = String::from_utf8_lossy(&errors).trim().to_string();
            let errors = if errors.is_empty() { errors } else { format!(": {errors}") };
            return Err(format!("the tool failed ({status}){errors}"));
        }
        String::from_utf8(output).map_err(|_| "the tool wrote no UTF-8".to_string())
    }
}

fn no_thread(error: io::Error) -> String {
    format!("the tool cannot be started: {error}")
}

/// Reads the first `limit` bytes of a pipe on a thread, which sends them when they are read.
fn read_start(pipe: ChildStdout, limit: u64) -> io::Result<Receiver<io::Result<Vec<u8>>>> {
    let (sender, receiver) = sync_channel(1);
    let read = move || {
        let mut output = Vec::new();
        let read = pipe.take(limit).read_to_end(&mut output);
        let _ = sender.send(read.map(|_| output));
    };
    threads::spawn("its output", read).map(|_| receiver)
}

/// Reads a pipe to its end on a thread, which then sends the last [`KEPT_ERRORS`] bytes.
fn read_end(mut pipe: ChildStderr) -> io::Result<Receiver<Vec<u8>>> {
    let (sender, receiver) = sync_channel(1);
    let read = move || {
        let (mut kept, mut piece) = (Vec::new(), [0; 1024]);
        while let Ok(n @ 1..) = pipe.read(&mut piece) {
            kept.extend_from_slice(&piece[..n]);
            kept.drain(..kept.len().saturating_sub(KEPT_ERRORS));
        }
        let _ = sender.send(kept);
    };
    threads::spawn("its output", read).map(|_| receiver)
}
