//! Forwards the events of a plugin, which has a `tracing` of its own, to the host.

#[cfg(feature = "host")]
use std::ffi::c_void;
use std::fmt::Write;

use tracing::field::{Field, Visit};
#[cfg(feature = "host")]
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

use crate::abi::{RollHost, RollStr};

#[cfg(feature = "host")]
use super::{memory::text, panics::quietly};

/// The functions of [`RollHost`] for messages; its state is the label that precedes them.
#[cfg(feature = "host")]
pub(super) unsafe extern "C" fn log_level(_: *const c_void) -> u32 {
    LevelFilter::current().into_level().map_or(0, number)
}

/// As [`log_level`].
#[cfg(feature = "host")]
pub(super) unsafe extern "C" fn log(state: *const c_void, level: u32, target: RollStr, message: RollStr) {
    quietly(|| {
        // SAFETY: P1; `state` is the label, which lives for ever.
        let (label, target, message) =
            unsafe { (&*state.cast::<String>(), text(target).unwrap_or(""), text(message).unwrap_or("(no UTF-8)")) };
        // An event's target and level are fixed where it is written.
        match level {
            1 => tracing::error!(target: "plugin", from = target, "{label}: {message}"),
            2 => tracing::warn!(target: "plugin", from = target, "{label}: {message}"),
            3 => tracing::info!(target: "plugin", from = target, "{label}: {message}"),
            4 => tracing::debug!(target: "plugin", from = target, "{label}: {message}"),
            _ => tracing::trace!(target: "plugin", from = target, "{label}: {message}"),
        }
    });
}

fn number(level: Level) -> u32 {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

/// Sends this plugin's events to the host. The first host wins.
pub(super) fn forward_to(host: RollHost) {
    let _ = tracing::subscriber::set_global_default(Forward(host));
}

/// Events only: a span of a plugin means nothing to the host.
struct Forward(RollHost);

// SAFETY: P4; `state` is the host's own.
unsafe impl Send for Forward {}
// SAFETY: as above.
unsafe impl Sync for Forward {}

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // SAFETY: P4.
        self.0.log_level.is_some_and(|level| number(*metadata.level()) <= unsafe { level(self.0.state) })
    }
    // The host's level may change: nothing is decided for good.
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = EventText(String::new());
        event.record(&mut text);
        let (metadata, message) = (event.metadata(), RollStr::lend(&text.0));
        if let Some(log) = self.0.log {
            // SAFETY: P1 and P4.
            unsafe { log(self.0.state, number(*metadata.level()), RollStr::lend(metadata.target()), message) };
        }
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// `message key=value key=value`.
struct EventText(String);

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => {
                self.0 = format!("{value:?}{}", self.0);
                Ok(())
            }
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
