//! Progress bars in a terminal: the completed part of the work, the phase, and the time left. Elsewhere nothing is
//! drawn.

use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use console::Term;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle, TermLike};
use roll_train::progress::{Bar, Display, duration};

use crate::output::printable;

/// All bars of this process, below its log lines.
fn bars() -> &'static MultiProgress {
    static BARS: OnceLock<MultiProgress> = OnceLock::new();
    BARS.get_or_init(|| {
        let terminal = UnpaddedTerminal { term: Term::buffered_stderr(), held_back: Mutex::default() };
        MultiProgress::with_draw_target(ProgressDrawTarget::term_like_with_hz(Box::new(terminal), DRAWS_A_SECOND))
    })
}

/// Upper limit on how often the bars are drawn.
const DRAWS_A_SECOND: u8 = 20;
/// Time between two drawings while no progress is reported; a spinner then shows the new number of seconds.
const TICK: Duration = Duration::from_millis(500);

/// Draws no bars from now on.
pub fn hide() {
    bars().set_draw_target(ProgressDrawTarget::hidden());
    IS_HIDDEN.store(true, Ordering::Relaxed);
}

/// Whether [`hide`] was called.
static IS_HIDDEN: AtomicBool = AtomicBool::new(false);
/// Number of visible bars, each a line.
static LINES: AtomicUsize = AtomicUsize::new(0);

/// Clears the bars. A signal handler that ends the process may call this, because it neither allocates nor waits.
#[cfg(unix)]
pub fn clear() {
    if IS_HIDDEN.load(Ordering::Relaxed) {
        return;
    }
    for line in 0..LINES.load(Ordering::Relaxed) {
        // The cursor is on the lowest line. `ESC [1A` moves it up a line, and `ESC [2K` clears its line.
        let text = if line == 0 { "\r\x1b[2K" } else { "\x1b[1A\r\x1b[2K" };
        // Nothing can be done about a terminal that went away.
        let _ = rustix::io::write(std::io::stderr(), text.as_bytes());
    }
}

/// Leaves the bars as they are, on systems other than Unix.
#[cfg(not(unix))]
pub fn clear() {}

/// A terminal whose last line ends where its text ends.
///
/// indicatif pads lines with spaces to the full width. After a padded last line, the `^C` that the terminal echoes
/// would go to a further line, and clearing that one would leave the bar above it on the screen. So the spaces after a
/// line are held back, and written only if another line follows.
#[derive(Debug)]
struct UnpaddedTerminal<T> {
    term: T,
    /// The spaces after the line that was written last.
    held_back: Mutex<String>,
}

impl<T: TermLike> UnpaddedTerminal<T> {
    /// Writes the spaces that were held back.
    fn write_held_back(&self) -> io::Result<()> {
        let spaces = std::mem::take(&mut *locked(&self.held_back));
        if spaces.is_empty() { Ok(()) } else { self.term.write_str(&spaces) }
    }
}

impl<T: TermLike> TermLike for UnpaddedTerminal<T> {
    fn width(&self) -> u16 {
        self.term.width()
    }

    fn height(&self) -> u16 {
        self.term.height()
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.term.move_cursor_up(n)
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.term.move_cursor_down(n)
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.term.move_cursor_right(n)
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.term.move_cursor_left(n)
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write_held_back()?;
        self.term.write_line(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.write_held_back()?;
        match !text.is_empty() && text.bytes().all(|byte| byte == b' ') {
            true => *locked(&self.held_back) = text.into(),
            false => self.term.write_str(text)?,
        }
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.term.clear_line()
    }

    fn flush(&self) -> io::Result<()> {
        // No line follows in this drawing.
        locked(&self.held_back).clear();
        self.term.flush()
    }
}

/// Runs `write` while the bars are cleared, so that its lines are above them.
pub fn above_bars(write: impl FnOnce()) {
    bars().suspend(write);
}

/// Number of columns of the terminal on standard error; `None` if standard error is not a terminal.
pub fn columns() -> Option<usize> {
    let size = Term::stderr().size_checked().filter(|_| std::io::stderr().is_terminal());
    size.map(|(_, columns)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Columns of a terminal that does not report its width.
const DEFAULT_COLUMNS: usize = 80;
/// Columns that stay free at the end of a line for the `^C` that a terminal writes there. A line that it wraps could be
/// cleared only in part.
const MARGIN_COLUMNS: usize = 3;
/// Columns of a bar and of the space behind it.
const BAR_COLUMNS: usize = 21;
/// Columns of a spinner and of its seconds.
const SPINNER_COLUMNS: usize = 10;

/// The beginning of `text` that fits into a line of `columns` behind `taken` ones.
fn fitting(text: &str, taken: usize, columns: usize) -> String {
    printable(text).chars().take(columns.saturating_sub(taken + MARGIN_COLUMNS)).collect()
}

/// The text behind a bar.
#[derive(Default)]
struct BarText {
    /// As [`time_left`] words it.
    time_left: String,
    phase: String,
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows `bar` as a line by `template`, in which `{text}` is the result of `text`.
fn show(bar: &ProgressBar, template: &str, text: impl Fn(&ProgressState) -> String + Clone + Send + Sync + 'static) {
    let write = move |state: &ProgressState, line: &mut dyn Write| {
        // A line that cannot be drawn is not a failure.
        let _ = line.write_str(&text(state));
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.with_key("text", write));
    }
    bar.enable_steady_tick(TICK);
    LINES.fetch_add(1, Ordering::Relaxed);
}

/// Removes the line of `bar`, which [`show`] added.
fn remove(bar: &ProgressBar) {
    bar.finish_and_clear();
    bars().remove(bar);
    LINES.fetch_sub(1, Ordering::Relaxed);
}

/// Shows the progress of a run as a bar in the terminal.
pub struct Terminal;

impl Display for Terminal {
    fn begin(&self, total: u64, unit: &str) -> Box<dyn Bar> {
        Box::new(TerminalBar::new(total, unit))
    }
}

/// A bar over optimizer steps or clips.
pub struct TerminalBar {
    bar: ProgressBar,
    /// When the first position was reported, and that position. The time left is reckoned from there, because steps
    /// before it were done by the process that this one continues.
    first_report: Mutex<Option<(Instant, u64)>>,
    text: Arc<Mutex<BarText>>,
    is_shown: AtomicBool,
}

impl TerminalBar {
    pub fn new(total: u64, unit: &str) -> Self {
        let bar = bars().add(ProgressBar::new(total));
        let text = Arc::new(Mutex::new(BarText::default()));
        let (text_to_draw, unit) = (Arc::clone(&text), unit.to_string());
        show(&bar, "{bar:20} {text}", move |state| {
            let BarText { time_left, phase } = &*locked(&text_to_draw);
            let text = format!("{}/{} {unit}{time_left}  {phase}", state.pos(), state.len().unwrap_or(total));
            fitting(&text, BAR_COLUMNS, columns().unwrap_or(DEFAULT_COLUMNS))
        });
        Self { bar, first_report: Mutex::default(), text, is_shown: AtomicBool::new(true) }
    }
}

// Also clears the bar if the work failed without an end.
impl Drop for TerminalBar {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Bar for TerminalBar {
    fn set(&self, done: u64) {
        let (since, first) = *locked(&self.first_report).get_or_insert((Instant::now(), done));
        let total = self.bar.length().unwrap_or(done);
        locked(&self.text).time_left = time_left(since.elapsed(), done - first.min(done), total.saturating_sub(done));
        self.bar.set_position(done);
    }

    fn phase(&self, phase: &str) {
        locked(&self.text).phase = phase.to_string();
        // Makes indicatif draw the bar at once. The message itself is not shown.
        self.bar.set_message(String::new());
    }

    fn finish(&self) {
        if self.is_shown.swap(false, Ordering::Relaxed) {
            remove(&self.bar);
        }
    }
}

/// ", 12 min left" if `done` units took the time `elapsed` and `left` units remain. Empty before the first unit is
/// done, since the time is not known, and after the last.
fn time_left(elapsed: Duration, done: u64, left: u64) -> String {
    if done == 0 || left == 0 {
        return String::new();
    }
    let seconds = elapsed.as_secs_f64() / done as f64 * left as f64;
    match seconds {
        ..100.0 => format!(", {:.0} s left", seconds.ceil()),
        _ => format!(", {} left", duration(seconds)),
    }
}

/// A line for work whose length is not known. It shows the phase and the seconds since the work began.
pub struct Spinner {
    line: ProgressBar,
    text: Arc<Mutex<String>>,
}

impl Spinner {
    pub fn new(phase: &str) -> Self {
        let line = bars().add(ProgressBar::new_spinner());
        let text = Arc::new(Mutex::new(phase.to_string()));
        let text_to_draw = Arc::clone(&text);
        show(&line, "{spinner} {text}", move |state| {
            let phase = fitting(&locked(&text_to_draw), SPINNER_COLUMNS, columns().unwrap_or(DEFAULT_COLUMNS));
            format!("{:.0} s  {phase}", state.elapsed().as_secs_f64())
        });
        Self { line, text }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        remove(&self.line);
    }
}

impl roll_core::Progress for Spinner {
    fn phase(&self, phase: &str) {
        *locked(&self.text) = phase.to_string();
        self.line.set_message(String::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The written text, escape sequences left out.
    #[derive(Debug, Default)]
    struct Paper(Mutex<String>);

    impl TermLike for Paper {
        fn width(&self) -> u16 {
            20
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(&format!("{text}\n"))
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            locked(&self.0).push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_the_last_line_is_not_filled_with_spaces() -> io::Result<()> {
        let paper = UnpaddedTerminal { term: Paper::default(), held_back: Mutex::default() };
        for _ in 0..2 {
            for text in ["0/4 steps", "           ", "1/9 clips", "           "] {
                paper.write_str(text)?;
            }
            paper.flush()?;
        }
        assert_eq!(*locked(&paper.term.0), format!("0/4 steps{:11}1/9 clips", "").repeat(2));
        Ok(())
    }

    #[test]
    fn the_text_behind_a_bar_leaves_a_margin() {
        let text = "2/40 steps, 81 s left  pulling back through reward and decoder";
        let cut = fitting(text, BAR_COLUMNS, 80);
        assert_eq!((cut.chars().count(), text.starts_with(&cut)), (80 - BAR_COLUMNS - MARGIN_COLUMNS, true));
        assert_eq!(fitting(text, BAR_COLUMNS, 120), text);
        assert_eq!(fitting(text, BAR_COLUMNS, 10), "");
    }

    #[test]
    fn the_remaining_time_is_shown_once_it_is_known() {
        let left = |seconds, done, left| time_left(Duration::from_secs(seconds), done, left);
        assert_eq!(left(90, 0, 5), "");
        assert_eq!(left(90, 5, 0), "");
        assert_eq!(left(90, 10, 4), ", 36 s left");
        assert_eq!(left(1, 10, 4), ", 1 s left");
        assert_eq!(left(90, 1, 20), ", 30 min left");
        assert_eq!(left(3600, 2, 50), ", 25.0 h left");
        assert_eq!(left(86_400, 1, 9), ", 9.0 days left");
    }
}
