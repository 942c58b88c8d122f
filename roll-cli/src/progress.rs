//! The progress bar of long work: steps, what is going on, time left. Nothing where there is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::interrupt::Interrupt;

/// A bar over optimizer or denoising steps.
pub struct Bar {
    bar: ProgressBar,
    interrupt: Option<Interrupt>,
}

impl Bar {
    /// A bar of `steps`; indicatif hides it by itself when standard error is no terminal. One rank shows it.
    pub fn new(steps: u64, unit: &str, shown: bool) -> Self {
        let bar = if shown { ProgressBar::new(steps) } else { ProgressBar::hidden() };
        let template = format!("{{bar:30}} {{pos}}/{{len}} {unit}, {{eta}} left  {{msg}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar, interrupt: None }
    }

    /// What is under way may stop in its middle when the user asks.
    pub fn stopping(self, interrupt: Option<&Interrupt>) -> Self {
        Self { interrupt: interrupt.cloned(), ..self }
    }

    /// So many were done before.
    pub fn skip(&self, steps: u64) {
        self.bar.set_position(steps);
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

    fn interrupted(&self) -> bool {
        self.interrupt.as_ref().is_some_and(Interrupt::is_asked)
    }
}
