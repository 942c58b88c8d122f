//! Progress bars of long work: steps, what is going on, time left. Nothing where there is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use roll_train::progress::{Bar, Display};

/// Bars in the terminal; indicatif hides them by itself when standard error is none.
pub struct Terminal;

impl Display for Terminal {
    fn begin(&self, total: u64, unit: &str) -> Box<dyn Bar> {
        Box::new(TerminalBar::new(total, unit))
    }
}

/// A bar over optimizer or denoising steps.
pub struct TerminalBar(ProgressBar);

impl TerminalBar {
    /// A bar of `total` units.
    pub fn new(total: u64, unit: &str) -> Self {
        let bar = ProgressBar::new(total);
        let template = format!("{{bar:30}} {{pos}}/{{len}} {unit}, {{eta}} left  {{msg}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Self(bar)
    }
}

impl Bar for TerminalBar {
    fn set(&self, done: u64) {
        self.0.set_position(done);
    }

    fn phase(&self, phase: &str) {
        self.0.set_message(phase.to_string());
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}

impl roll_core::Progress for TerminalBar {
    fn phase(&self, phase: &str) {
        Bar::phase(self, phase);
    }
}
