//! Progress bars of long work: steps, what is going on, time left. Nothing where there is no terminal.

use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use roll_train::progress::{Bar, Display};

/// All bars of this process, below its log lines.
fn bars() -> &'static MultiProgress {
    static BARS: OnceLock<MultiProgress> = OnceLock::new();
    BARS.get_or_init(MultiProgress::new)
}

/// From now on no bar is drawn.
pub fn hide() {
    bars().set_draw_target(ProgressDrawTarget::hidden());
}

/// Writes something while no bar is there.
pub fn above_bars(write: impl FnOnce()) {
    bars().suspend(write);
}

/// Columns of the terminal that standard error is; `None` where it is none.
pub fn columns() -> Option<usize> {
    let size = console::Term::stderr().size_checked().filter(|_| std::io::stderr().is_terminal());
    size.map(|(_, columns)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Columns at the end of a line that stay free: a terminal writes `^C` behind it, and clearing a line that was wrapped
/// clears half of it.
const MARGIN: usize = 3;
/// Columns of a bar, with the space behind it.
const BAR: usize = 21;
/// Columns of a spinner and of its time.
const SPINNER: usize = 10;

/// `text` as far as it fits behind `taken` columns.
fn fitting(text: &str, taken: usize, columns: usize) -> String {
    text.chars().take(columns.saturating_sub(taken + MARGIN)).collect()
}

/// What stands behind a bar.
#[derive(Default)]
struct Told {
    left: String,
    phase: String,
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bars in the terminal.
pub struct Terminal;

impl Display for Terminal {
    fn begin(&self, total: u64, unit: &str) -> Box<dyn Bar> {
        Box::new(TerminalBar::new(total, unit))
    }
}

/// A bar over optimizer steps or clips.
pub struct TerminalBar {
    bar: ProgressBar,
    /// When the first position was told, and which: what a process before this one did took no time of this one.
    first: Mutex<Option<(Instant, u64)>>,
    told: Arc<Mutex<Told>>,
}

impl TerminalBar {
    /// A bar of `total` units.
    pub fn new(total: u64, unit: &str) -> Self {
        let bar = bars().add(ProgressBar::new(total));
        let told = Arc::new(Mutex::new(Told::default()));
        let (shown, unit) = (Arc::clone(&told), unit.to_string());
        let text = move |state: &ProgressState, line: &mut dyn Write| {
            let Told { left, phase } = &*locked(&shown);
            let text = format!("{}/{} {unit}{left}  {phase}", state.pos(), state.len().unwrap_or(total));
            // A line that cannot be drawn is no failure.
            let _ = line.write_str(&fitting(&text, BAR, columns().unwrap_or(80)));
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:20} {text}") {
            bar.set_style(style.with_key("text", text));
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar, first: Mutex::default(), told }
    }
}

impl Bar for TerminalBar {
    fn set(&self, done: u64) {
        let (since, begun) = *locked(&self.first).get_or_insert((Instant::now(), done));
        let total = self.bar.length().unwrap_or(done);
        locked(&self.told).left = time_left(since.elapsed(), done - begun.min(done), total.saturating_sub(done));
        self.bar.set_position(done);
    }

    fn phase(&self, phase: &str) {
        locked(&self.told).phase = phase.to_string();
        // Draws it at once: the text is not in the template.
        self.bar.set_message(String::new());
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
        bars().remove(&self.bar);
    }
}

/// ", 12 min left"; nothing before one unit is done, as the time is not known.
fn time_left(taken: Duration, done: u64, left: u64) -> String {
    if done == 0 || left == 0 {
        return String::new();
    }
    let seconds = taken.as_secs_f64() / done as f64 * left as f64;
    match seconds {
        ..100.0 => format!(", {:.0} s left", seconds.ceil()),
        ..6000.0 => format!(", {:.0} min left", seconds / 60.0),
        ..360_000.0 => format!(", {:.1} h left", seconds / 3600.0),
        _ => format!(", {:.1} days left", seconds / 86_400.0),
    }
}

/// A line for work whose length is not known: what is going on, and for how long.
pub struct Spinner {
    line: ProgressBar,
    told: Arc<Mutex<String>>,
}

impl Spinner {
    /// Begins with this.
    pub fn new(phase: &str) -> Self {
        let line = bars().add(ProgressBar::new_spinner());
        let told = Arc::new(Mutex::new(phase.to_string()));
        let shown = Arc::clone(&told);
        let text = move |state: &ProgressState, line: &mut dyn Write| {
            let phase = fitting(&locked(&shown), SPINNER, columns().unwrap_or(80));
            // As above.
            let _ = write!(line, "{:.0} s  {phase}", state.elapsed().as_secs_f64());
        };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {text}") {
            line.set_style(style.with_key("text", text));
        }
        line.enable_steady_tick(Duration::from_millis(500));
        Self { line, told }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.line.finish_and_clear();
        bars().remove(&self.line);
    }
}

impl roll_core::Progress for Spinner {
    fn phase(&self, phase: &str) {
        *locked(&self.told) = phase.to_string();
        self.line.set_message(String::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_behind_a_bar_leaves_room_at_the_end_of_the_line() {
        let text = "2/40 steps, 81 s left  pulling back through reward and decoder";
        let cut = fitting(text, BAR, 80);
        assert_eq!((cut.chars().count(), text.starts_with(&cut)), (80 - BAR - MARGIN, true));
        assert_eq!(fitting(text, BAR, 120), text);
        assert_eq!(fitting(text, BAR, 10), "");
    }

    #[test]
    fn the_time_left_is_told_once_it_is_known() {
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
