//! Forwards the events of a plugin, which has a `tracing` of its own, to the host. P4 is a number of the contract in
//! [`crate::abi`].

use std::fmt::Write;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

#[cfg(feature = "host")]
use super::message::{Incoming, Outgoing};
use super::object::Remote;
#[cfg(feature = "host")]
use super::object::{Answered, Loan};
#[cfg(feature = "host")]
use super::panics::quietly;

/// The object `host`, which a plugin is lent, with the methods `log_level` and `log`. `label` precedes the plugin's
/// messages. A panic while logging does not poison the object.
#[cfg(feature = "host")]
pub(super) fn host(label: String) -> Loan<'static> {
    Loan::shared(move |method: &str, message: &Incoming| -> Answered {
        match method {
            // The most verbose level that is logged; the plugin drops other events.
            "log_level" => Outgoing::of(&LevelFilter::current().to_string()).map(Some),
            "log" => {
                let entry: Entry = message.read()?;
                quietly(|| log(&label, &entry));
                Outgoing::of(&()).map(Some)
            }
            _ => Ok(None),
        }
    })
}

/// Arguments of `log`.
#[cfg(feature = "host")]
#[derive(serde::Deserialize)]
struct Entry {
    level: String,
    #[serde(default)]
    target: String,
    message: String,
}

/// Logs a message of a plugin. There is one statement per level, because `tracing` fixes the level of an event where it
/// is written.
#[cfg(feature = "host")]
fn log(label: &str, Entry { level, target, message }: &Entry) {
    match level.as_str() {
        "error" => tracing::error!(target: "plugin", from = target, "{label}: {message}"),
        "warn" => tracing::warn!(target: "plugin", from = target, "{label}: {message}"),
        "info" => tracing::info!(target: "plugin", from = target, "{label}: {message}"),
        "debug" => tracing::debug!(target: "plugin", from = target, "{label}: {message}"),
        _ => tracing::trace!(target: "plugin", from = target, "{label}: {message}"),
    }
}

/// Sends this plugin's events to the host from now on. Only the first call has an effect.
pub(super) fn forward_to(host: Remote) {
    let _ = tracing::subscriber::set_global_default(Forward(host));
}

/// The `tracing` subscriber of a plugin. It forwards events, and ignores spans, which mean nothing to the host.
struct Forward(Remote);

// SAFETY: P4: several threads may call it.
unsafe impl Sync for Forward {}

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let level: Option<String> = self.0.ask("log_level", &[]).ok().flatten();
        let level: Option<LevelFilter> = level.and_then(|level| level.parse().ok());
        level.is_some_and(|level| *metadata.level() <= level)
    }
    // The host's level may change, so that `enabled` must be asked for every event.
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        // Spans are ignored: all may have the same id.
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = EventText(String::new());
        event.record(&mut text);
        let level = event.metadata().level().to_string().to_lowercase();
        let arguments: [(_, &dyn super::message::Write); 3] =
            [("level", &level), ("target", &event.metadata().target()), ("message", &text.0)];
        // If the call fails, the message is lost. The failure could only be reported by another such call.
        let _ = self.0.ask::<()>("log", &arguments);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The text of an event: `message key=value key=value`.
struct EventText(String);

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string never fails. The message comes first, wherever it is among the fields.
        let _ = match field.name() {
            "message" => {
                self.0 = format!("{value:?}{}", self.0);
                Ok(())
            }
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
