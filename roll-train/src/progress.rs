//! How a run shows its progress and is asked to stop, and how counts and durations are written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use roll_core::{Communicator, Result};

/// A count with its noun: `3 clips`, `1 clip`.
pub fn counted(count: u64, singular: &str) -> String {
    match count {
        1 => format!("1 {singular}"),
        count => format!("{count} {singular}s"),
    }
}

/// A duration in words: "5.3 s", "12 min", "3.4 h", "2.5 days".
pub fn duration(seconds: f64) -> String {
    match seconds {
        ..100.0 => format!("{seconds:.1} s"),
        ..6000.0 => format!("{:.0} min", seconds / 60.0),
        ..360_000.0 => format!("{:.1} h", seconds / 3600.0),
        _ => format!("{:.1} days", seconds / 86_400.0),
    }
}

/// A number with commas, for people: `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of epochs, with two decimals below 1, and with one from 1 on.
pub fn epochs(epochs: f64) -> String {
    if epochs < 1.0 { format!("{epochs:.2}") } else { format!("{epochs:.1}") }
}

/// A line of the overview of a run: the subject in a column of its own, then the text.
pub fn overview_line(subject: &str, text: &str) -> String {
    format!("{subject:<11} {text}")
}

/// The display of progress and the signal to stop, which the caller of a run provides. The default shows nothing and
/// never stops.
pub struct RunSession {
    /// Shows progress on rank 0.
    pub display: Box<dyn Display>,
    /// Asks the run to stop after a checkpoint.
    pub stop: StopSignal,
}

impl Default for RunSession {
    fn default() -> Self {
        Self { display: Box::new(Hidden), stop: StopSignal::default() }
    }
}

/// Shows the progress of long work, for instance as bars in a terminal.
pub trait Display: Send + Sync {
    /// Begins to show work of `total` units: "steps", "clips".
    fn begin(&self, total: u64, unit: &str) -> Box<dyn Bar>;
}

/// Progress of one piece of work.
pub trait Bar: Send + Sync {
    /// Shows that `done` units are done.
    fn set(&self, done: u64);
    /// Shows the current phase, such as "denoising step 3 of 8".
    fn phase(&self, phase: &str);
    /// Ends the display, since the work is over.
    fn finish(&self);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hidden;

impl Display for Hidden {
    fn begin(&self, _total: u64, _unit: &str) -> Box<dyn Bar> {
        Box::new(Hidden)
    }
}

impl Bar for Hidden {
    fn set(&self, _done: u64) {}
    fn phase(&self, _phase: &str) {}
    fn finish(&self) {}
}

/// A flag that asks a run to stop. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Asks the run to stop. It stops where it next can, after a checkpoint. Signal handlers may call this.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the run was asked to stop.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A progress bar, together with the signal that may stop the work.
pub struct StoppableBar {
    bar: Box<dyn Bar>,
    stop: StopSignal,
    /// Whether the work may stop between any two phases.
    may_stop_between_phases: bool,
}

impl StoppableBar {
    /// Begins work of `total` units. The bar is shown if `is_shown` is true, as on rank 0. With
    /// `may_stop_between_phases`, the work may stop between any two phases; otherwise only where it asks
    /// [`StoppableBar::is_asked_to_stop`].
    pub fn begin(session: &RunSession, total: u64, unit: &str, is_shown: bool, may_stop_between_phases: bool) -> Self {
        let bar = if is_shown { session.display.begin(total, unit) } else { Box::new(Hidden) };
        Self { bar, stop: session.stop.clone(), may_stop_between_phases }
    }

    /// Whether any rank was asked to stop. All ranks must call it: signals do not reach all ranks at the same time, and
    /// the ranks must agree.
    pub fn is_asked_to_stop(&self, ranks: &dyn Communicator) -> Result<bool> {
        let is_asked: f32 = if self.stop.is_asked() { 1.0 } else { 0.0 };
        let mut asked_ranks = [is_asked];
        ranks.all_reduce(&mut asked_ranks)?;
        Ok(asked_ranks[0] > 0.0)
    }

    /// Shows that `done` units are done.
    pub fn set(&self, done: u64) {
        self.bar.set(done);
    }

    /// Ends the display, since the work is over.
    pub fn finish(&self) {
        self.bar.finish();
    }
}

impl roll_core::Progress for StoppableBar {
    fn phase(&self, phase: &str) {
        self.bar.phase(phase);
    }

    fn interrupted(&self) -> bool {
        self.may_stop_between_phases && self.stop.is_asked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_numbers_and_durations() {
        assert_eq!([7, 1234, 123_456, 1_234_567].map(grouped), ["7", "1,234", "123,456", "1,234,567"]);
        assert_eq!([5.3, 720.0, 12_240.0, 432_000.0].map(duration), ["5.3 s", "12 min", "3.4 h", "5.0 days"]);
    }
}
