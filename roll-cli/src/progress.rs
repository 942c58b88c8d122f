//! Progress bars of long work: steps, what is going on, time left. Nothing where there is no terminal.

use std::fmt::Write;
use std::sync::{Mutex, OnceLock, PoisonError};
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
}

impl TerminalBar {
    /// A bar of `total` units.
    pub fn new(total: u64, unit: &str) -> Self {
        let bar = bars().add(ProgressBar::new(total));
        // The message takes what is left of the line, and is cut there.
        let template = format!("{{bar:20}} {{pos}}/{{len}} {unit}{{prefix}}  {{wide_msg}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar, first: Mutex::default() }
    }
}

impl Bar for TerminalBar {
    fn set(&self, done: u64) {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, begun) = *first.get_or_insert((Instant::now(), done));
        self.bar.set_position(done);
        let total = self.bar.length().unwrap_or(done);
        self.bar.set_prefix(time_left(since.elapsed(), done - begun.min(done), total.saturating_sub(done)));
    }

    fn phase(&self, phase: &str) {
        self.bar.set_message(phase.to_string());
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
pub struct Spinner(ProgressBar);

impl Spinner {
    /// Begins with this.
    pub fn new(phase: &str) -> Self {
        let line = bars().add(ProgressBar::new_spinner());
        let elapsed = |state: &ProgressState, line: &mut dyn Write| {
            let _ = write!(line, "{:.0} s", state.elapsed().as_secs_f64()); // a line that cannot be drawn is no failure
        };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {taken}  {wide_msg}") {
            line.set_style(style.with_key("taken", elapsed));
        }
        line.set_message(phase.to_string());
        line.enable_steady_tick(Duration::from_millis(500));
        Self(line)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
        bars().remove(&self.0);
    }
}

impl roll_core::Progress for Spinner {
    fn phase(&self, phase: &str) {
        self.0.set_message(phase.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
