//! Logs go to standard error, in step with the progress bars.

use std::fmt::Result as Formatted;
use std::io::{IsTerminal, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use roll_train::ranks;
use tracing::Level;
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::{EnvFilter, fmt, prelude::*};

use crate::output::wrapped;
use crate::progress;

/// Columns of the level before a message.
const LEVEL: usize = 6;

/// Variables that hold a filter ("debug", "roll_models=trace"), the first one that is there counts.
const FILTERS: [&str; 2] = ["ROLL_LOG", "RUST_LOG"];

roll_core::inventory::submit! { roll_core::Variable(FILTERS[0]) }

/// How much is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verbosity {
    /// Warnings and errors only, and no progress bars.
    pub quiet: bool,
    /// 1: what each part does; 2: everything.
    pub verbose: u8,
}

impl Verbosity {
    /// The filter, and whether somebody asked for it.
    fn filter(self) -> (EnvFilter, bool) {
        let said = match self {
            Self { quiet: true, .. } => Some("warn"),
            Self { verbose: 1, .. } => Some("info,roll=debug"),
            Self { verbose: 2.., .. } => Some("debug,roll=trace"),
            _ => None,
        };
        let of_variable = |name: &&str| std::env::var(name).ok().filter(|value| !value.is_empty());
        match (said, FILTERS.iter().find_map(of_variable)) {
            (Some(said), _) => (EnvFilter::new(said), true),
            (None, Some(filter)) => (EnvFilter::new(filter), true),
            (None, None) => (EnvFilter::new("info"), false),
        }
    }
}

/// Starts logging. In a terminal that can do it there are colours and progress bars; elsewhere each line has its time.
/// Of several processes each says which rank it is, and so do ranks that are threads, but for the first. Ranks after
/// the first only warn, unless all is asked for.
pub fn init(verbosity: Verbosity, rank: Option<usize>) {
    let terminal = std::io::stderr().is_terminal();
    let dumb = variable("TERM").is_some_and(|term| term == "dumb");
    let colours = terminal && !dumb && variable("NO_COLOR").is_none();
    if verbosity.quiet || !terminal || dumb {
        progress::hide();
    }
    let own = move || rank.or_else(ranks::of_thread).filter(|own| rank.is_some() || *own > 0);
    let lines = fmt::layer().with_writer(move || Line { prefix: prefix(own()) }).with_target(false).with_ansi(colours);
    let (filter, asked) = verbosity.filter();
    let of_rank = dynamic_filter_fn(move |event, _| {
        asked || *event.level() <= Level::WARN || rank.or_else(ranks::of_thread).unwrap_or(0) == 0
    });
    match terminal && verbosity.verbose == 0 {
        true => tracing_subscriber::registry().with(filter).with(lines.without_time().with_filter(of_rank)).init(),
        false => tracing_subscriber::registry().with(filter).with(lines.with_timer(Utc).with_filter(of_rank)).init(),
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
struct Line {
    prefix: String,
}

impl Write for Line {
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        let line = [self.prefix.as_bytes(), event].concat();
        let line = fitted(&String::from_utf8_lossy(&line));
        // A reader that went away, or a terminal that was closed, is no reason to stop.
        progress::above_bars(|| drop(std::io::stderr().write_all(line.as_bytes())));
        Ok(event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The text as the terminal shows it, where standard error is one.
pub fn fitted(text: &str) -> String {
    progress::columns().map_or_else(|| text.into(), |columns| wrapped(text, columns, |_| LEVEL))
}

/// `2026-11-22T14:26:51Z`.
struct Utc;

impl FormatTime for Utc {
    fn format_time(&self, writer: &mut Writer<'_>) -> Formatted {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        writer.write_str(&utc(seconds))
    }
}

/// A time of the Gregorian calendar from seconds since 1970, by the days of years that begin in March (Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms").
fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, time) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_795_357_611, "2026-11-22T14:26:51Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), time);
        }
    }

    #[test]
    fn the_arguments_come_before_the_variables() {
        let filter = |quiet, verbose| Verbosity { quiet, verbose }.filter().0.to_string();
        assert_eq!(filter(true, 0), "warn");
        assert!(filter(false, 1).contains("roll=debug"));
        assert!(filter(false, 3).contains("roll=trace"));
    }
}
