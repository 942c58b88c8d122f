//! Log lines: they go to standard error, above the progress bars, without secrets and control characters.

use std::fmt::{Debug, Write as _};
use std::io::{IsTerminal, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use roll_train::config::without_secrets;
use roll_train::ranks;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

use crate::output::{printable, wrapped};
use crate::progress;

/// Width of a line's level, such as ` INFO `. Wrapped lines are indented by this width.
const LEVEL_WIDTH: usize = 6;

/// Variables that hold a filter, such as "debug" or "roll_wan=trace". The first one that is set counts.
const FILTERS: [&str; 2] = ["ROLL_LOG", "RUST_LOG"];

roll_core::inventory::submit! { roll_core::Variable(FILTERS[0]) }

/// The least severe level that is logged, by the beginning of the event's target.
struct Filter(Vec<(String, LevelFilter)>);

impl Filter {
    /// Reads directives that commas separate: `LEVEL`, `TARGET` or `TARGET=LEVEL`. Returns the filter, and the
    /// directives that are invalid.
    fn parse(text: &str) -> (Self, Vec<&str>) {
        let mut invalid = Vec::new();
        let mut levels = Vec::new();
        for directive in text.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
            let (target, level) = match directive.split_once('=') {
                Some((target, level)) => (target, level.parse().ok()),
                None => match directive.parse() {
                    Ok(level) => ("", Some(level)),
                    Err(_) => (directive, Some(LevelFilter::TRACE)),
                },
            };
            let is_target = target.chars().all(|c| c.is_alphanumeric() || "_:-".contains(c));
            match level {
                Some(level) if is_target => levels.push((target.to_string(), level)),
                _ => invalid.push(directive),
            }
        }
        if levels.is_empty() {
            // Errors are shown whatever the filter, for example if all of its directives are wrong.
            levels.push((String::new(), LevelFilter::ERROR));
        }
        // The last entry that fits counts: the longest beginning, and the last of several equal ones.
        levels.sort_by_key(|(target, _)| target.len());
        (Self(levels), invalid)
    }

    /// The least severe level of this target.
    fn level(&self, target: &str) -> LevelFilter {
        let known = self.0.iter().rev().find(|(beginning, _)| target.starts_with(beginning));
        known.map_or(LevelFilter::OFF, |(_, level)| *level)
    }

    /// The least severe level of any target.
    fn max(&self) -> LevelFilter {
        self.0.iter().map(|(_, level)| *level).max().unwrap_or(LevelFilter::OFF)
    }
}

/// The filter that the arguments set: `-q`, or `-v` that is given `verbose` times. `None` without either.
fn filter_of_arguments(quiet: bool, verbose: u8) -> Option<&'static str> {
    match (quiet, verbose) {
        (true, _) => Some("warn"),
        (false, 0) => None,
        (false, 1) => Some("info,roll=debug"),
        (false, 2..) => Some("debug,roll=trace"),
    }
}

/// Starts logging.
///
/// `quiet` leaves only warnings and errors, and no progress bars. A `verbose` of 1 adds what each part does, 2
/// everything else. A capable terminal shows colours and progress bars; elsewhere each line begins with its time.
///
/// `rank` is the rank of this process in a job; `None` if it is alone. Lines of a job begin with the rank of their
/// process. If this process is alone and its ranks are threads, lines of all ranks but the first begin with their rank.
/// Ranks after the first log only warnings, unless a filter is set.
pub fn init(quiet: bool, verbose: u8, rank: Option<usize>) {
    let is_terminal = std::io::stderr().is_terminal();
    let is_dumb = variable("TERM").is_some_and(|term| term == "dumb");
    if quiet || !is_terminal || is_dumb {
        progress::hide();
    }
    let named = FILTERS.into_iter().find_map(|name| Some((name, variable(name)?)));
    let (source, text) = match filter_of_arguments(quiet, verbose) {
        Some(filter) => ("", filter.to_string()),
        None => named.unwrap_or(("", "info".into())),
    };
    let (filter, invalid) = Filter::parse(&text);
    let log = Log {
        max: filter.max(),
        filter,
        is_set: filter_of_arguments(quiet, verbose).is_some() || !source.is_empty(),
        rank,
        has_colours: is_terminal && !is_dumb && variable("NO_COLOR").is_none(),
        has_time: !is_terminal || verbose > 0,
    };
    let log: &'static Log = Box::leak(Box::new(log));
    // Both calls fail if a logger was set before, which nothing in this program does.
    let _ = tracing::subscriber::set_global_default(log);
    if log::set_logger(log).is_ok() {
        log::set_max_level(log.max.to_string().parse().unwrap_or(log::LevelFilter::Off));
    }
    for directive in invalid {
        // Past the filter, which may hide warnings.
        log.write(
            Level::WARN,
            &format!("{source}: expected LEVEL or TARGET=LEVEL, found `{directive}`, which is ignored"),
        );
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

/// Writes events, of `tracing` and of crates that use `log`. This program has no spans.
struct Log {
    filter: Filter,
    max: LevelFilter,
    /// Whether an argument or a variable set the filter.
    is_set: bool,
    rank: Option<usize>,
    has_colours: bool,
    has_time: bool,
}

impl Log {
    fn is_enabled(&self, target: &str, level: Level) -> bool {
        let is_first_rank = || self.own_rank().unwrap_or(0) == 0;
        level <= self.filter.level(target) && (self.is_set || level <= Level::WARN || is_first_rank())
    }

    fn own_rank(&self) -> Option<usize> {
        self.rank.or_else(ranks::of_thread)
    }

    /// Writes a line at once, above the bars.
    fn write(&self, level: Level, message: &str) {
        // Without a job, the first of several threads has no prefix.
        let shown_rank = self.own_rank().filter(|own| self.rank.is_some() || *own > 0);
        let line = self.line(&prefix(shown_rank), SystemTime::now(), level, message);
        // A reader that went away, or a terminal that was closed, is no reason to stop.
        progress::above_bars(|| drop(std::io::stderr().write_all(wrapped_to_terminal(&line).as_bytes())));
    }

    fn line(&self, prefix: &str, now: SystemTime, level: Level, message: &str) -> String {
        let message = without_secrets(message);
        let message = printable(&message);
        let [dim, colour, plain] = match self.has_colours {
            true => ["\u{1b}[2m", colour(level), "\u{1b}[0m"],
            false => [""; 3],
        };
        let time = if self.has_time { format!("{dim}{}{plain} ", utc(now)) } else { String::new() };
        format!("{prefix}{time}{colour}{:>5}{plain} {message}\n", level.as_str())
    }
}

fn colour(level: Level) -> &'static str {
    match level {
        Level::ERROR => "\u{1b}[31m",
        Level::WARN => "\u{1b}[33m",
        Level::INFO => "\u{1b}[32m",
        Level::DEBUG => "\u{1b}[34m",
        Level::TRACE => "\u{1b}[35m",
    }
}

/// A time as in RFC 3339, with microseconds. Dates by Howard Hinnant's `civil_from_days`.
fn utc(time: SystemTime) -> String {
    const SECONDS_PER_DAY: u64 = 86_400;
    /// Days from 0000-03-01 to the epoch.
    const DAYS_BEFORE_EPOCH: u64 = 719_468;
    /// Days of an era, which has 400 years.
    const DAYS_PER_ERA: u64 = 146_097;
    let passed = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (passed.as_secs() / SECONDS_PER_DAY, passed.as_secs() % SECONDS_PER_DAY);
    // Years are counted from March, so that a leap day is the last day of its year.
    let days = days + DAYS_BEFORE_EPOCH;
    let (era, day) = (days / DAYS_PER_ERA, days % DAYS_PER_ERA);
    // Without its leap days, an era has years of 365 days.
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // From March on, each five months have 153 days.
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let [hour, minute, second] = [second / 3600, second / 60 % 60, second % 60];
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:06}Z", passed.subsec_micros())
}

impl Subscriber for &'static Log {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        // Not `Interest::always`, because the rank of a thread may change, by which `is_enabled` decides.
        match *metadata.level() <= self.filter.level(metadata.target()) {
            true => Interest::sometimes(),
            false => Interest::never(),
        }
    }
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.max)
    }
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && self.is_enabled(metadata.target(), *metadata.level())
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = EventText::default();
        event.record(&mut text);
        self.write(*event.metadata().level(), &[text.message, text.fields].concat());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl log::Log for Log {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        self.is_enabled(metadata.target(), level_of(metadata.level()))
    }
    fn log(&self, record: &log::Record<'_>) {
        if log::Log::enabled(self, record.metadata()) {
            self.write(level_of(record.level()), &record.args().to_string());
        }
    }
    fn flush(&self) {}
}

fn level_of(level: log::Level) -> Level {
    match level {
        log::Level::Error => Level::ERROR,
        log::Level::Warn => Level::WARN,
        log::Level::Info => Level::INFO,
        log::Level::Debug => Level::DEBUG,
        log::Level::Trace => Level::TRACE,
    }
}

/// The message of an event, and ` name=value` for each of its other fields.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// The text with long lines wrapped, if standard error is a terminal.
pub fn wrapped_to_terminal(text: &str) -> String {
    progress::columns().map_or_else(|| text.into(), |columns| wrapped(text, columns, |_| LEVEL_WIDTH))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn log(has_colours: bool, has_time: bool) -> Log {
        let (filter, _) = Filter::parse("info");
        Log { max: filter.max(), filter, is_set: false, rank: None, has_colours, has_time }
    }

    #[test]
    fn log_lines_keep_colours_alone() {
        let message = "a\u{202e}b\u{7}\u{1b}[1m";
        let line = |log: Log| log.line("[rank 1] ", UNIX_EPOCH, Level::INFO, message);
        assert_eq!(line(log(true, false)), "[rank 1] \u{1b}[32m INFO\u{1b}[0m a\\u202eb\\u0007\\u001b[1m\n");
        assert_eq!(line(log(false, true)), "[rank 1] 1970-01-01T00:00:00.000000Z  INFO a\\u202eb\\u0007\\u001b[1m\n");
    }

    #[test]
    fn times_are_dates_and_hours() {
        let at = |seconds, micros: u32| utc(UNIX_EPOCH + Duration::new(seconds, 1000 * micros));
        // `date --utc --date=@SECONDS`
        assert_eq!(at(951_782_399, 999_999), "2000-02-28T23:59:59.999999Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000000Z");
        assert_eq!(at(951_868_800, 1), "2000-03-01T00:00:00.000001Z");
        assert_eq!(at(1_798_761_599, 0), "2026-12-31T23:59:59.000000Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000000Z");
    }

    #[test]
    fn the_longest_beginning_of_a_target_decides() {
        let (filter, wrong) = Filter::parse("warn, roll=debug,roll_wan=trace,ureq,roll_wan::vae=off");
        assert!(wrong.is_empty(), "{wrong:?}");
        let level = |target| filter.level(target);
        assert_eq!(
            ["burn", "roll_core", "roll_wan::dit"].map(level),
            [LevelFilter::WARN, LevelFilter::DEBUG, LevelFilter::TRACE]
        );
        assert_eq!(["ureq::tls", "roll_wan::vae"].map(level), [LevelFilter::TRACE, LevelFilter::OFF]);
        assert_eq!(filter.max(), LevelFilter::TRACE);
        let (filter, wrong) = Filter::parse("roll=3x,a=b=c,roll[span]=info,,ureq=info");
        assert_eq!(wrong, ["roll=3x", "a=b=c", "roll[span]=info"]);
        assert_eq!((filter.level("roll"), filter.max()), (LevelFilter::OFF, LevelFilter::INFO));
    }

    #[test]
    fn arguments_set_levels() {
        let max = |quiet, verbose| filter_of_arguments(quiet, verbose).map(|text| Filter::parse(text).0.max());
        assert_eq!([max(true, 3), max(false, 0)], [Some(LevelFilter::WARN), None]);
        assert_eq!([max(false, 1), max(false, 2)], [Some(LevelFilter::DEBUG), Some(LevelFilter::TRACE)]);
        let (filter, _) = Filter::parse(filter_of_arguments(false, 1).unwrap());
        assert_eq!([filter.level("burn_flex"), filter.level("roll_wan")], [LevelFilter::INFO, LevelFilter::DEBUG]);
    }
}
