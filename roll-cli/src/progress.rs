//! The progress bar of long work: steps, what is going on, time left. Nothing where there is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over optimizer or denoising steps.
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A bar of `steps`; indicatif hides it by itself when standard error is no terminal.
    pub fn new(steps: u64, unit: &str) -> Self {
        let bar = ProgressBar::new(steps);
        let template = format!("{{bar:30}} {{pos}}/{{len}} {unit}, {{eta}} left  {{msg}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar }
    }

    /// One more is done.
    pub fn advance(&self) {
        self.bar.inc(1);
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl roll_core::Progress for Bar {
    fn phase(&self, phase: &str) {
        self.bar.set_message(phase.to_string());
    }
}
