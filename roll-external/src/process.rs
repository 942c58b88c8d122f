//! Child processes that end together with this process, and limits of this process: on memory and on open files.

use std::io;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which a child is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Environment variables with a secret of the Hugging Face hub or of the job.
const SECRETS: [&str; 3] = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "ROLL_JOB_SECRET"];

/// Prepares the environment of a program that answers for a component on its standard output. Removes the secrets of
/// the Hugging Face hub and of the job, because the program may be somebody else's. `ROLL_ANSWERS_ON_STDOUT` makes the
/// Python package `roll_reward` keep the output of `print` out of the answers.
pub fn answers_on_stdout(command: &mut Command) -> &mut Command {
    for name in SECRETS {
        command.env_remove(name);
    }
    command.env("ROLL_ANSWERS_ON_STDOUT", "1")
}

/// A child process and the processes that it starts: a process group of its own (Unix). When the child ends, the rest
/// of its group is killed. The whole group is killed when this value is dropped or this process ends, even by SIGKILL.
///
/// A process that leaves the group (`setsid`) is not killed. Systems other than Unix kill only the child.
#[derive(Debug)]
pub struct ChildGroup {
    child: Child,
    status: Option<ExitStatus>,
}

impl ChildGroup {
    /// Starts `command`.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(command, 0);
        let child = command.spawn()?;
        tell_guard('+', &child);
        Ok(Self { child, status: None })
    }

    /// The child, for access to its pipes. Do not call `wait` on it: its group would not be killed.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The exit status, if the child has ended. In that case the rest of its group is killed.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() && has_ended(&mut self.child)? {
            kill_group(&mut self.child);
            tell_guard('-', &self.child);
            self.status = Some(self.child.wait()?);
        }
        Ok(self.status)
    }

    /// As [`ChildGroup::try_wait`]; waits for at most `limit`.
    pub fn wait_for(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            match self.try_wait()? {
                None if start.elapsed() < limit => thread::sleep(POLL_INTERVAL),
                ended => return Ok(ended),
            }
        }
    }

    /// Kills the group and waits for the child. Has no effect if the child has ended.
    pub fn kill(&mut self) {
        if self.status.is_none() {
            kill_group(&mut self.child);
            tell_guard('-', &self.child);
            self.status = self.child.wait().ok();
        }
    }
}

impl Drop for ChildGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether the child has ended. Does not reap it, so that its process id stays valid for the group.
#[cfg(unix)]
fn has_ended(child: &mut Child) -> io::Result<bool> {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(Pid::from_child(child)), options)?.is_some())
}

#[cfg(not(unix))]
fn has_ended(child: &mut Child) -> io::Result<bool> {
    Ok(child.try_wait()?.is_some())
}

/// Kills the child and its group. Errors are ignored: they mean that the child has just ended.
fn kill_group(child: &mut Child) {
    #[cfg(unix)]
    let _ = rustix::process::kill_process_group(rustix::process::Pid::from_child(child), rustix::process::Signal::KILL);
    let _ = child.kill();
}

/// The guard: a shell script that keeps a list of process groups. It reads lines `+ GROUP` and `- GROUP` until its
/// input ends, which happens when this process ends, in whatever way; then it kills the groups in the list.
/// `PR_SET_PDEATHSIG` was rejected: it ends the child with the thread that started it, and spares the child's own
/// children.
#[cfg(unix)]
const GUARD: &str = r#"trap '' HUP INT TERM
groups=
while read -r sign group; do
    case $sign in
        +) groups="$groups $group " ;;
        -) groups="${groups%%" $group "*}${groups#*" $group "}" ;;
    esac
done
for group in $groups; do kill -s KILL -- "-$group"; done"#;

/// Adds the child's group to the guard's list (`+`) or removes it (`-`). The first call starts the guard; if it cannot
/// be started, the children survive a kill of this process.
///
/// A group must be removed before the child is reaped, because another process may then get its number.
#[cfg(unix)]
fn tell_guard(sign: char, child: &Child) {
    use std::io::Write;
    use std::process::{ChildStdin, Stdio};
    static PIPE: std::sync::OnceLock<Option<ChildStdin>> = std::sync::OnceLock::new();
    let start = || {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", GUARD]).env_clear().current_dir("/");
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        std::os::unix::process::CommandExt::process_group(&mut shell, 0);
        shell.spawn().ok()?.stdin
    };
    if let Some(mut pipe) = PIPE.get_or_init(start).as_ref() {
        // Each line is one write, so that the lines of several threads do not mix.
        let _ = pipe.write_all(format!("{sign} {}\n", child.id()).as_bytes());
    }
}

#[cfg(not(unix))]
fn tell_guard(_sign: char, _child: &Child) {}

/// Limits the memory of this process to its present address space plus `further_bytes`, and disables core dumps. An
/// allocation beyond the limit ends the process. Has no effect on systems other than Linux.
pub fn limit_memory(further_bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        // The first number is the size of the address space in pages.
        let statm = std::fs::read_to_string("/proc/self/statm")?;
        let pages: u64 = statm.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or_default();
        let reserved = pages.saturating_mul(rustix::param::page_size() as u64);
        let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
        setrlimit(Resource::Core, limit(0))?;
        setrlimit(Resource::As, limit(reserved.saturating_add(further_bytes)))?;
    }
    let _ = further_bytes;
    Ok(())
}

/// Largest limit that [`raise_open_files_limit`] sets: some programs close every descriptor below it when they start.
#[cfg(unix)]
const MAX_OPEN_FILES: u64 = 1 << 16;

/// Raises the number of files that this process may have open to the most that the system permits, but to no more than
/// 65,536, and returns the limit. `None`: there is no limit, or the system is no Unix.
pub fn raise_open_files_limit() -> Option<u64> {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        let new_limit = maximum.unwrap_or(MAX_OPEN_FILES).min(MAX_OPEN_FILES);
        let is_raised = current.is_some_and(|current| current < new_limit)
            && setrlimit(Resource::Nofile, Rlimit { current: Some(new_limit), maximum }).is_ok();
        if is_raised { Some(new_limit) } else { current }
    }
    #[cfg(not(unix))]
    None
}

#[cfg(target_os = "linux")]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::path::PathBuf;
    use std::process::Stdio;

    use super::*;

    /// A shell that starts a child of its own, and the directory of that one under `/proc`.
    fn family(rest: &str) -> (ChildGroup, PathBuf) {
        let script = format!("sleep 600 & echo $!; {rest}");
        let mut group = ChildGroup::spawn(Command::new("sh").args(["-c", &script]).stdout(Stdio::piped())).unwrap();
        let mut line = String::new();
        BufReader::new(group.child().stdout.take().unwrap()).read_line(&mut line).unwrap();
        let grandchild = PathBuf::from(format!("/proc/{}", line.trim()));
        assert!(grandchild.exists());
        (group, grandchild)
    }

    fn leaves(grandchild: PathBuf) {
        let begun = Instant::now();
        // Its new parent takes it off the system's table; until then it is dead (`Z`).
        let is_gone = || std::fs::read_to_string(grandchild.join("stat")).map_or(true, |stat| stat.contains(") Z "));
        while !is_gone() {
            assert!(begun.elapsed() < Duration::from_secs(10), "{} is left behind", grandchild.display());
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Runs [`families_of_a_killed_process`] in a process of its own, which is killed.
    #[test]
    fn groups_end_with_a_process_that_is_killed() {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::tests::families_of_a_killed_process", "--ignored", "--nocapture"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let named = |line: std::io::Result<String>| line.unwrap().split_once("living: ").map(|(_, p)| PathBuf::from(p));
        let grandchild = lines.filter_map(named).next().unwrap();
        assert!(grandchild.exists());
        process.kill().unwrap();
        process.wait().unwrap();
        leaves(grandchild);
    }

    #[test]
    #[ignore = "never ends: `groups_end_with_a_process_that_is_killed` runs it"]
    fn families_of_a_killed_process() {
        let ended = family("exit 0").0.wait_for(Duration::from_secs(10)).unwrap();
        assert!(ended.is_some());
        let (_first, _) = family("wait");
        let (_second, grandchild) = family("wait");
        println!("living: {}", grandchild.display());
        thread::sleep(Duration::from_secs(600));
    }

    #[test]
    fn secrets_are_removed_from_an_environment() {
        let mut command = Command::new("true");
        answers_on_stdout(&mut command);
        for secret in ["HF_TOKEN", "ROLL_JOB_SECRET"] {
            assert!(command.get_envs().any(|(name, value)| name == secret && value.is_none()), "{secret}");
        }
    }

    #[test]
    fn grandchildren_end_with_the_child() {
        let (mut group, grandchild) = family("exit 3");
        let status = group.wait_for(Duration::from_secs(10)).unwrap().unwrap();
        assert_eq!(status.code(), Some(3));
        leaves(grandchild);
        assert_eq!(group.try_wait().unwrap(), Some(status));

        let (mut group, grandchild) = family("wait");
        assert_eq!(group.wait_for(Duration::from_millis(20)).unwrap(), None);
        group.kill();
        leaves(grandchild);
        assert!(group.try_wait().unwrap().is_some());

        let (group, grandchild) = family("wait");
        drop(group);
        leaves(grandchild);
    }
}
