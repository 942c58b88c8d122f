//! Logs go to standard error, in step with the progress bar.

use std::io::{IsTerminal, Write};

use tracing_indicatif::IndicatifLayer;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::{EnvFilter, fmt, prelude::*};

/// Starts logging: `ROLL_LOG` holds a filter ("debug", "roll_models=trace"), else notices and warnings are shown. Of
/// several ranks each says which it is, and those after the first only warn.
pub fn init(quiet: bool, rank: Option<usize>) {
    let default = if quiet || rank.is_some_and(|rank| rank > 0) { "warn" } else { "info" };
    let filter = EnvFilter::try_from_env("ROLL_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    let bars = IndicatifLayer::new();
    let lines = fmt::layer()
        .with_writer(Prefixed { writer: bars.get_stderr_writer(), prefix: prefix(rank) })
        .with_target(false)
        .without_time()
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(filter).with(lines).with(bars).init();
}

/// What stands before the lines of a rank.
pub fn prefix(rank: Option<usize>) -> String {
    rank.map(|rank| format!("[rank {rank}] ")).unwrap_or_default()
}

/// Writes something before each event.
struct Prefixed<W> {
    writer: W,
    prefix: String,
}

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for Prefixed<W> {
    type Writer = PrefixedLine<'a, W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        PrefixedLine { writer: self.writer.make_writer(), prefix: &self.prefix }
    }
}

/// One event: it is written at once.
struct PrefixedLine<'a, W> {
    writer: W,
    prefix: &'a str,
}

impl<W: Write> Write for PrefixedLine<'_, W> {
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        self.writer.write_all(&[self.prefix.as_bytes(), event].concat())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.writer.flush()
    }
}
