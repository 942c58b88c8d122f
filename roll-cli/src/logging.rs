//! Logs go to standard error, in step with the progress bar.

use std::io::IsTerminal;

use tracing_indicatif::IndicatifLayer;
use tracing_subscriber::{EnvFilter, fmt, prelude::*};

/// Starts logging: `ROLL_LOG` holds a filter ("debug", "roll_models=trace"), else notices and warnings are shown.
pub fn init(quiet: bool) {
    let default = if quiet { "warn" } else { "info" };
    let filter = EnvFilter::try_from_env("ROLL_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    let bars = IndicatifLayer::new();
    let lines = fmt::layer()
        .with_writer(bars.get_stderr_writer())
        .with_target(false)
        .without_time()
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(filter).with(lines).with(bars).init();
}
