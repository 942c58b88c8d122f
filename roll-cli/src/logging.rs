//! Logs go to standard error, in step with the progress bars.

use std::io::{IsTerminal, Write};

use roll_train::config::without_secrets;
use roll_train::ranks;
use tracing::Level;
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::{EnvFilter, fmt, prelude::*};

use crate::output::{printable, wrapped};
use crate::progress;

/// Columns of the level before a message.
const LEVEL: usize = 6;

/// Variables that hold a filter ("debug", "roll_wan=trace"), the first one that is there counts.
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

/// Starts logging. `quiet`: warnings and errors only, and no progress bars; `verbose` 1 adds what each part does, 2
/// everything else. A capable terminal shows colours and progress bars; elsewhere each line has its time. Lines of
/// several processes have their rank as prefix, and so have those of threads that are ranks, but for the first. Ranks
/// after the first only warn, unless a filter is set.
pub fn init(quiet: bool, verbose: u8, rank: Option<usize>) {
    let terminal = std::io::stderr().is_terminal();
    let dumb = variable("TERM").is_some_and(|term| term == "dumb");
    let colours = terminal && !dumb && variable("NO_COLOR").is_none();
    if quiet || !terminal || dumb {
        progress::hide();
    }
    let own = move || rank.or_else(ranks::of_thread).filter(|own| rank.is_some() || *own > 0);
    let lines =
        fmt::layer().with_writer(move || LogLine { prefix: prefix(own()) }).with_target(false).with_ansi(colours);
    let (filter, asked) = filter(quiet, verbose);
    let of_rank = dynamic_filter_fn(move |event, _| {
        asked || *event.level() <= Level::WARN || rank.or_else(ranks::of_thread).unwrap_or(0) == 0
    });
    match terminal && verbose == 0 {
        true => tracing_subscriber::registry().with(filter).with(lines.without_time().with_filter(of_rank)).init(),
        false => tracing_subscriber::registry().with(filter).with(lines.with_filter(of_rank)).init(),
    }
}

/// A variable that is set to something, as <https://no-color.org> has it.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The prefix of a rank's lines.
pub fn prefix(rank: Option<usize>) -> String {
    rank.map(|rank| format!("[rank {rank}] ")).unwrap_or_default()
}

/// One event: it is written at once, above the bars.
struct LogLine {
    prefix: String,
}

impl Write for LogLine {
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        let line = [self.prefix.as_bytes(), event].concat();
        let line = fitted(&coloured(&without_secrets(&String::from_utf8_lossy(&line))));
        // A reader that went away, or a terminal that was closed, is no reason to stop.
        progress::above_bars(|| drop(std::io::stderr().write_all(line.as_bytes())));
        Ok(event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// An event as [`printable`], with its colours: the formatter has escaped the ESC of fields.
fn coloured(event: &str) -> String {
    event.split('\u{1b}').map(printable).collect::<Vec<_>>().join("\u{1b}")
}

/// The text as the terminal shows it, where standard error is one.
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
