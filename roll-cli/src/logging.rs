//! Log lines: they go to standard error, above the progress bars, without secrets and control characters.

use std::io::{IsTerminal, Write};

use roll_train::config::without_secrets;
use roll_train::ranks;
use tracing::Level;
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::{EnvFilter, fmt, prelude::*};

use crate::output::{printable, wrapped};
use crate::progress;

/// Width of a line's level, such as ` INFO `: wrapped lines are indented by it.
const LEVEL: usize = 6;

/// Variables that hold a filter, such as "debug" or "roll_wan=trace". The first one that is set counts.
const FILTERS: [&str; 2] = ["ROLL_LOG", "RUST_LOG"];

roll_core::inventory::submit! { roll_core::Variable(FILTERS[0]) }

/// The filter, and whether an argument or a variable set it.
fn filter(quiet: bool, verbose: u8) -> (EnvFilter, bool) {
    let level = match (quiet, verbose) {
        (true, _) => Some("warn"),
        (false, 0) => None,
        (false, 1) => Some("info,roll=debug"),
        (false, 2..) => Some("debug,roll=trace"),
    };
    match (level, FILTERS.into_iter().find_map(variable)) {
        (Some(level), _) => (EnvFilter::new(level), true),
        (None, Some(filter)) => (EnvFilter::new(filter), true),
        (None, None) => (EnvFilter::new("info"), false),
    }
}

/// Starts logging.
///
/// `quiet` leaves only warnings and errors, and no progress bars. A `verbose` of 1 adds what each part does, 2
/// everything else. A capable terminal shows colours and progress bars; elsewhere each line begins with its time.
///
/// `rank` is that of this process in a job; `None` if it is alone. Lines of a job begin with the rank of their process.
/// If this process is alone and its ranks are threads, lines of all ranks but the first begin with their rank. Ranks
/// after the first log only warnings, unless a filter is set.
pub fn init(quiet: bool, verbose: u8, rank: Option<usize>) {
    let terminal = std::io::stderr().is_terminal();
    let dumb = variable("TERM").is_some_and(|term| term == "dumb");
    let colours = terminal && !dumb && variable("NO_COLOR").is_none();
    if quiet || !terminal || dumb {
        progress::hide();
    }
    let shown_rank = move || match rank {
        Some(rank) => Some(rank),
        None => ranks::of_thread().filter(|rank| *rank > 0),
    };
    let lines = fmt::layer()
        .with_writer(move || LogLine { prefix: prefix(shown_rank()) })
        .with_target(false)
        .with_ansi(colours);
    let (filter, filter_is_set) = filter(quiet, verbose);
    // Levels are ordered from errors to traces.
    let of_rank = dynamic_filter_fn(move |event, _| {
        filter_is_set || *event.level() <= Level::WARN || rank.or_else(ranks::of_thread).unwrap_or(0) == 0
    });
    match terminal && verbose == 0 {
        true => tracing_subscriber::registry().with(filter).with(lines.without_time().with_filter(of_rank)).init(),
        false => tracing_subscriber::registry().with(filter).with(lines.with_filter(of_rank)).init(),
    }
}

/// The value of an environment variable. An empty one counts as not set, as <https://no-color.org> asks for.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The prefix of a rank's lines.
pub fn prefix(rank: Option<usize>) -> String {
    rank.map(|rank| format!("[rank {rank}] ")).unwrap_or_default()
}

/// The writer of one event, which the formatter passes to it as a whole.
struct LogLine {
    prefix: String,
}

impl Write for LogLine {
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        let line = [self.prefix.as_bytes(), event].concat();
        let line = fitted(&coloured(&without_secrets(&String::from_utf8_lossy(&line))));
        // A write fails if the reader went away or the terminal was closed, which is no reason to stop.
        progress::above_bars(|| drop(std::io::stderr().write_all(line.as_bytes())));
        Ok(event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// An event made [`printable`], except for the escape characters of its colours. The formatter has already escaped
/// those in messages and fields.
fn coloured(event: &str) -> String {
    event.split('\u{1b}').map(printable).collect::<Vec<_>>().join("\u{1b}")
}

/// The text with long lines wrapped, if standard error is a terminal.
pub fn fitted(text: &str) -> String {
    progress::columns().map_or_else(|| text.into(), |columns| wrapped(text, columns, |_| LEVEL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_keep_colours_alone() {
        assert_eq!(
            coloured("\u{1b}[32m INFO\u{1b}[0m a\u{202e}b\u{7}\n"),
            "\u{1b}[32m INFO\u{1b}[0m a\\u202eb\\u0007\n"
        );
    }

    #[test]
    fn arguments_override_variables() {
        let filter = |quiet, verbose| super::filter(quiet, verbose).0.to_string();
        assert_eq!(filter(true, 0), "warn");
        assert!(filter(false, 1).contains("roll=debug"));
        assert!(filter(false, 3).contains("roll=trace"));
    }
}
