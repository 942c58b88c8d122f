//! Runs a program with limits on its time and output.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::Failure;

/// Maximum running time of a program: decoding a clip takes seconds.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(600);
/// Maximum size of ffprobe's listing: the index of hours of video. Parsed values take ten times as much memory.
pub(super) const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Interval at which a program is asked whether it has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum number of bytes of standard error that are kept.
const MAX_STDERR_BYTES: usize = 4096;
/// Maximum length of a line of standard error; longer ones are split.
const MAX_LINE_BYTES: u64 = 1024;

/// Parts of ffmpeg's messages, in lower case, that report damaged or missing frames. After such a message ffmpeg goes
/// on, and its exit status is 0. Other messages, about timestamps, supplemental information or missing references of
/// frames that are not shown, do not concern pixels.
const DAMAGE: [&str; 18] = [
    // Decoders.
    "corrupt decoded frame",
    "error while decoding",
    "error submitting packet",
    "damaged",
    "overread",
    "error count",
    "error y=",
    "error at mb",
    "invalid nal unit size",
    "error splitting the input into nal units",
    // Readers of containers.
    "file ended prematurely",
    "partial file",
    "exceeds containing master element",
    "invalid as first byte of an ebml number",
    "crc mismatch",
    "packet mismatch",
    "asf bad header",
    "truncating packet",
];
/// A part of the message for a packet that is cut short. In a transport stream the message is harmless: it may only
/// mean that packets are not numbered in order, as where two streams were joined. If data is missing, decoders report
/// that.
const CORRUPT_PACKET: &str = "corrupt input packet";
/// A part of the message that appears if frames change their size or format, because ffmpeg then sets up its filters
/// anew: "Non-monotonous DTS", or "Non-monotonic DTS" in later versions.
const CHANGED_FRAMES: &str = "non-monoton";

/// A program of the ffmpeg suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    Ffmpeg,
    Ffprobe,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Ffmpeg => "ffmpeg",
            Self::Ffprobe => "ffprobe",
        }
    }

    /// Starts the program; returns it and its standard output.
    pub fn start(
        self,
        arguments: &[OsString],
        is_transport_stream: bool,
    ) -> Result<(FfmpegProcess, ChildStdout), Failure> {
        self.start_within(TIME_LIMIT, arguments, is_transport_stream)
    }

    /// As [`Program::start`], with another time limit.
    fn start_within(
        self,
        limit: Duration,
        arguments: &[OsString],
        is_transport_stream: bool,
    ) -> Result<(FfmpegProcess, ChildStdout), Failure> {
        let mut command = Command::new(self.name());
        command.args(["-hide_banner", "-v", "error"]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("AV_LOG_FORCE_NOCOLOR", "1");
        let mut child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::NotInstalled(self.name()),
            _ => Failure::Failed(format!("{} cannot be started: {error}", self.name())),
        })?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(Failure::Failed(format!("{} has no pipes", self.name())));
        };
        let child = Arc::new(Mutex::new(child));
        // If a thread cannot be started, the program is ended, because nothing would watch it.
        let watch_failure = |error| {
            let _ = lock(&child).kill();
            Failure::Failed(format!("{} cannot be watched: {error}", self.name()))
        };
        let watchdog_sender = start_watchdog(&child, limit).map_err(watch_failure)?;
        let read = move || Messages::read(stderr, is_transport_stream);
        let reader = thread::Builder::new().spawn(read).map_err(watch_failure)?;
        Ok((
            FfmpegProcess {
                program: self,
                child,
                reader: Some(reader),
                messages: Messages::default(),
                _watchdog_sender: watchdog_sender,
                limit,
                started: Instant::now(),
            },
            stdout,
        ))
    }

    /// Runs the program and returns its output. Fails if the output exceeds [`MAX_INDEX_BYTES`].
    pub fn output(self, arguments: &[OsString]) -> Result<Vec<u8>, Failure> {
        let is_transport_stream = false;
        let (mut ffmpeg, stdout) = self.start(arguments, is_transport_stream)?;
        let mut output = Vec::new();
        let read = stdout.take(MAX_INDEX_BYTES + 1).read_to_end(&mut output);
        if output.len() as u64 > MAX_INDEX_BYTES {
            return Err(Failure::Failed(format!("its index is longer than {MAX_INDEX_BYTES} bytes")));
        }
        ffmpeg.finish()?;
        read.map_err(|e| format!("{} cannot be read: {e}", self.name()))?;
        Ok(output)
    }
}

/// Starts a thread that kills the program after `limit`. Dropping the returned sender ends the thread earlier.
fn start_watchdog(child: &Arc<Mutex<Child>>, limit: Duration) -> io::Result<mpsc::Sender<()>> {
    // Nothing is sent.
    let (sender, receiver) = mpsc::channel::<()>();
    let watched = Arc::clone(child);
    let watch = move || {
        if receiver.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = lock(&watched).kill();
        }
    };
    thread::Builder::new().spawn(watch)?;
    Ok(sender)
}

/// A running program, which is killed when this value is dropped.
pub(super) struct FfmpegProcess {
    program: Program,
    child: Arc<Mutex<Child>>,
    /// The thread that reads the messages, until it is joined.
    reader: Option<thread::JoinHandle<Messages>>,
    /// The messages, after the thread was joined.
    messages: Messages,
    /// Dropping this sender ends the watchdog.
    _watchdog_sender: mpsc::Sender<()>,
    limit: Duration,
    started: Instant,
}

impl FfmpegProcess {
    /// Waits until the program has ended. Fails with the program's message if it failed.
    pub fn finish(&mut self) -> Result<(), String> {
        let status = loop {
            // The lock is not held while waiting, because the watchdog needs it.
            let status = lock(&self.child).try_wait();
            match status {
                Ok(Some(status)) => break status,
                Ok(None) => thread::sleep(POLL_INTERVAL),
                Err(error) => return Err(format!("{} cannot be waited for: {error}", self.program.name())),
            }
        };
        let (name, limit) = (self.program.name(), self.limit);
        let was_ended_by_watchdog = self.started.elapsed() >= limit;
        if status.success() {
            return Ok(());
        }
        if was_ended_by_watchdog {
            return Err(format!("{name} took longer than {} s and was ended", limit.as_secs_f64()));
        }
        let messages = self.messages();
        let cause = messages.damage.clone().or_else(|| cause_in(&messages.beginning));
        Err(format!("{name}: {}", cause.unwrap_or_else(|| status.to_string())))
    }

    /// The first message about damage. The program must have ended.
    pub fn damage(&mut self) -> Option<String> {
        let damage = self.messages().damage.clone()?;
        Some(format!("{}: {damage}", self.program.name()))
    }

    /// All messages. The program must have ended.
    fn messages(&mut self) -> &Messages {
        if let Some(reader) = self.reader.take() {
            self.messages = reader.join().unwrap_or_default();
        }
        &self.messages
    }

    /// Kills the program.
    pub fn end(&mut self) {
        let mut child = lock(&self.child);
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for FfmpegProcess {
    fn drop(&mut self) {
        self.end();
    }
}

/// The messages that a program writes to standard error.
#[derive(Debug, Default)]
struct Messages {
    /// The first bytes of the output.
    beginning: String,
    /// The first message about damage, without its prefix.
    damage: Option<String>,
}

impl Messages {
    /// Reads standard error to its end, so that the program never waits for a reader.
    fn read(stderr: impl Read, is_transport_stream: bool) -> Self {
        let (mut stderr, mut line, mut messages) = (BufReader::new(stderr), Vec::new(), Self::default());
        while (&mut stderr).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line);
            if messages.beginning.len() < MAX_STDERR_BYTES {
                messages.beginning += &text;
            }
            if messages.damage.is_none() {
                messages.damage = damage_in(&text, is_transport_stream);
            }
            line.clear();
        }
        messages
    }
}

/// The message in a line of standard error, if it reports damage.
fn damage_in(line: &str, is_transport_stream: bool) -> Option<String> {
    let text = line.to_lowercase();
    if text.contains(CHANGED_FRAMES) {
        return Some("its frames change their size or format in the middle; convert it to one size".into());
    }
    let is_cut_packet = !is_transport_stream && text.contains(CORRUPT_PACKET);
    let is_damage = is_cut_packet || DAMAGE.iter().any(|part| text.contains(part));
    if is_damage { cause_in(line) } else { None }
}

/// The first line of a program's messages, without the prefix that names the component (`[mov @ 0x5581]`).
fn cause_in(stderr_text: &str) -> Option<String> {
    let line = stderr_text.lines().map(str::trim).find(|line| !line.is_empty())?;
    let after_component = line.strip_prefix('[').and_then(|rest| rest.split_once("] "));
    let line = match (after_component, line.rsplit_once(": ")) {
        (Some((_component, message)), _) => message,
        // `file:NAME: MESSAGE`.
        (None, Some((_name, message))) if line.starts_with("file:") => message,
        (None, _) => line,
    };
    // The original message continues with a list.
    let line = if line.starts_with("Format not on whitelist") {
        "a playlist, or another format that is not read"
    } else {
        line
    };
    Some(line.to_string())
}

/// Whether ffmpeg has `-fps_mode` (since 5.1) instead of `-vsync`, which later versions lack.
pub(super) fn has_fps_mode() -> bool {
    static HAS_FPS_MODE: OnceLock<bool> = OnceLock::new();
    *HAS_FPS_MODE.get_or_init(|| {
        let output = Program::Ffmpeg.output(&["-version".into()]).unwrap_or_default();
        let output = String::from_utf8_lossy(&output);
        // "ffmpeg version 5.1.9-0+deb12u1 ...", "ffmpeg version n6.0", and "N-109000-g..." between releases.
        let version = output.split_whitespace().nth(2).unwrap_or_default().trim_start_matches('n');
        let mut numbers = version.split(['.', '-']).map(str::parse::<u32>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), minor) => (major, minor.and_then(Result::ok).unwrap_or(0)) >= (5, 1),
            _ => true,
        }
    })
}

/// Locks a child. A poisoned lock is used all the same, because a panic elsewhere does not change the child process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_program_is_killed_at_the_limit() {
        // Runs endlessly in real time.
        let arguments = ["-nostdin", "-re", "-f", "lavfi", "-i", "testsrc2=size=16x16", "-f", "rawvideo", "pipe:1"];
        let arguments = arguments.map(OsString::from);
        let (mut ffmpeg, mut stdout) = match Program::Ffmpeg.start_within(Duration::from_millis(300), &arguments, false)
        {
            Err(Failure::NotInstalled(_)) => roll_testing::skip!("ffmpeg is not in the PATH", needs = "ffmpeg"),
            started => started.unwrap(),
        };
        io::copy(&mut stdout, &mut io::sink()).unwrap();
        let stderr_text = ffmpeg.finish().unwrap_err();
        assert!(stderr_text.contains("took longer than 0.3 s"), "{stderr_text}");
        // A process that is not waited for ends when its last owner is dropped.
        let (ffmpeg, mut stdout) = Program::Ffmpeg.start(&arguments, false).unwrap();
        drop(ffmpeg);
        io::copy(&mut stdout, &mut io::sink()).unwrap();
    }

    #[test]
    fn messages_about_pixels_are_told_from_harmless_ones() {
        let lines = "[h264 @ 0x1] SEI type 0 size 512 truncated at 440\n[h264 @ 0x1] mmco: unref short failure\n\
                     [mpegts @ 0x2] Packet corrupt (stream = 0, dts = 1).\nfile:a: corrupt input packet in stream 0\n";
        assert_eq!(Messages::read(lines.as_bytes(), true).damage, None);
        assert_eq!(Messages::read(lines.as_bytes(), false).damage.as_deref(), Some("corrupt input packet in stream 0"));
        let lines = "x".repeat(5000) + "\nfile:a: corrupt decoded frame in stream 0\n";
        let messages = Messages::read(lines.as_bytes(), true);
        assert_eq!(messages.damage.as_deref(), Some("corrupt decoded frame in stream 0"));
        assert!(messages.beginning.len() < 6000);
        let changed = "[yuv4mpegpipe @ 0x1] Non-monotonous DTS in output stream 0:0; previous: 2, current: 0\n";
        assert!(damage_in(changed, true).unwrap().contains("size"));
    }

    #[test]
    fn error_message_has_no_component_prefix() {
        let stderr_text = "[mov,mp4,m4a @ 0x55b2] moov atom not found\nfile:/x/a.mp4: Invalid data found\n";
        assert_eq!(cause_in(stderr_text).as_deref(), Some("moov atom not found"));
        assert_eq!(cause_in("file:/x/a: b.mp4: Invalid data found\n").as_deref(), Some("Invalid data found"));
        assert_eq!(cause_in("Unknown decoder\n").as_deref(), Some("Unknown decoder"));
        assert_eq!(cause_in("\n"), None);
    }
}
