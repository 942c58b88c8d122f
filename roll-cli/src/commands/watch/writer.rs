//! Finds the process that writes a run, and stops it.
//!
//! A process writes a run if `/proc` lists it as the holder of the run's lock ([`RunDir::lock`]), and the run names it
//! by the time of its start. The files of a run alone are not believed, because another person may have written them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result};
use roll_train::run_dir::{RunDir, process_start};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The signal by which a run stops with a checkpoint, however often it comes. A second SIGINT would end the process at
/// once.
const STOP: Signal = Signal::USR1;

/// A process. A later process with the same number is not equal to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pid: Pid,
    /// When it started, see [`process_start`].
    start: u64,
}

impl Process {
    fn of(pid: Pid) -> Option<Self> {
        Some(Self { pid, start: process_start(&pid.as_raw_nonzero().to_string())? })
    }

    /// Whether the process holds the lock of the run in this directory, and the run names it.
    fn writes(self, run: &Path) -> bool {
        let named = RunDir::open(run).ok().and_then(|run| run.locked_by());
        named == Some(self.start) && Self::of(self.pid) == Some(self) && locks_directory(self.pid, run)
    }

    /// The most bytes of host memory that the process had so far.
    pub fn peak_memory(self) -> Option<u64> {
        let kilobytes: u64 = status(self.pid, "VmHWM")?.strip_suffix("kB")?.trim().parse().ok()?;
        Some(kilobytes << 10)
    }

    /// Asks the process to stop if it writes the run, and catches the signal to write a checkpoint.
    pub fn stop(self, run: &Path) -> Result<()> {
        let failed = || Error::failed(format!("process {} cannot be stopped", self.pid.as_raw_nonzero()));
        // The handle means this process, even if it ends and another one gets its number.
        let process = pidfd_open(self.pid, PidfdFlags::empty()).map_err(failed())?;
        let caught = status(self.pid, "SigCgt").and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or(0);
        // Signal n is bit n - 1 of the mask.
        let catches = caught >> (STOP.as_raw() - 1) & 1 == 1;
        if !(catches && self.writes(run)) {
            return Err(Error::bad_file(run, "no process that could write a checkpoint writes this run"));
        }
        pidfd_send_signal(&process, STOP).map_err(failed())
    }
}

/// The process that writes the run; `None` if no process of this user does.
pub fn of(run: &Path) -> Option<Process> {
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // A line is `5: FLOCK  ADVISORY  WRITE 31465 fe:00:11116657 0 EOF`, with the process as its fifth word. Device and
    // inode after it are not compared, since the device is not always that of the directory.
    let locks_of_files = locks.lines().filter(|line| line.contains(" FLOCK "));
    let pids = locks_of_files.filter_map(|line| line.split_whitespace().nth(4));
    let processes = pids.filter_map(|pid| Process::of(Pid::from_raw(pid.parse().ok()?)?));
    processes.into_iter().find(|process| process.writes(run))
}

/// Whether one of the open files of a process is this directory, locked for writing.
fn locks_directory(pid: Pid, directory: &Path) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).map(|m| (m.is_dir(), m.dev(), m.ino())).ok();
    let process = directory_of(pid);
    let Some(wanted) = identity(directory) else { return false };
    let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let is_write_lock = |line: &str| line.starts_with("lock:") && line.contains(" FLOCK ") && line.contains(" WRITE ");
    files.filter(|file| identity(&file.path()) == Some(wanted)).any(|file| {
        let about = std::fs::read_to_string(process.join("fdinfo").join(file.file_name())).unwrap_or_default();
        about.lines().any(is_write_lock)
    })
}

fn directory_of(pid: Pid) -> PathBuf {
    Path::new("/proc").join(pid.as_raw_nonzero().to_string())
}

/// The value of a line of `/proc/PID/status`.
fn status(pid: Pid, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(directory_of(pid).join("status")).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.trim().to_string())
}
