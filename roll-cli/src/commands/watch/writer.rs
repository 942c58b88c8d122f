//! The process that writes a run: the holder of the lock that [`roll_train::run_dir::RunDir::lock`] takes, as `/proc`
//! lists it. Files of the run are not asked: they may be another person's.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The process that holds the lock of the run directory; `None` if no process of this user does.
pub fn of(run: &Path) -> Option<Pid> {
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // `5: FLOCK  ADVISORY  WRITE 31465 fe:00:11116657 0 EOF`. The device there is not always that of the directory.
    let pids = locks.lines().filter(|line| line.contains(" FLOCK ")).filter_map(|line| line.split_whitespace().nth(4));
    pids.filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).find(|pid| locks_directory(*pid, run))
}

/// Whether a process holds the lock of the directory by one of its open files.
fn locks_directory(pid: Pid, directory: &Path) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).map(|m| (m.is_dir(), m.dev(), m.ino())).ok();
    let process = process(pid);
    let Some(wanted) = identity(directory) else { return false };
    let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    files.filter(|file| identity(&file.path()) == Some(wanted)).any(|file| {
        let locks = std::fs::read_to_string(process.join("fdinfo").join(file.file_name())).unwrap_or_default();
        locks.lines().any(|line| line.starts_with("lock:") && line.contains(" FLOCK ") && line.contains(" WRITE "))
    })
}

fn process(pid: Pid) -> PathBuf {
    Path::new("/proc").join(pid.as_raw_nonzero().to_string())
}

/// The value of a line of `/proc/PID/status`.
fn status(pid: Pid, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(process(pid).join("status")).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.trim().to_string())
}

/// The most bytes of host memory that the process had so far.
pub fn peak_memory(pid: Pid) -> Option<u64> {
    let kilobytes: u64 = status(pid, "VmHWM")?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes << 10)
}

/// Sends the signal of Ctrl-C to the process if it holds the lock of the run, and catches that signal to write a
/// checkpoint.
pub fn stop(run: &Path, pid: Pid) -> Result<()> {
    let failed = || Error::failed(format!("process {} cannot be stopped", pid.as_raw_nonzero()));
    // From here on, no other process is meant by this handle, even if the number passes to one.
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(failed())?;
    let caught = status(pid, "SigCgt").and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or(0);
    let catches = caught >> (Signal::INT.as_raw() - 1) & 1 == 1;
    if !(catches && locks_directory(pid, run)) {
        return Err(Error::bad_file(run, "no process that could write a checkpoint writes this run"));
    }
    pidfd_send_signal(&process, Signal::INT).map_err(failed())
}
