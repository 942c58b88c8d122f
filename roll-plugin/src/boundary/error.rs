//! Errors of plugins: those of loading and calling one, and the form in which an error crosses the boundary.

#[cfg(feature = "host")]
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{Error, Fault};

/// An error of loading or calling a plugin; every message names the file.
#[cfg(feature = "host")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum PluginError {
    // Before the system's loader sees the file
    #[error("the plugin {} cannot be loaded: {problem}", path.display())]
    NotLoadable { path: PathBuf, problem: String },

    // Before any code of the plugin is called
    /// The system's loader refused it.
    #[error("the plugin {} cannot be loaded", path.display())]
    Open { path: PathBuf, source: libloading::Error },
    #[error(
        "{} is a library but no plugin of roll: it has no symbol `{symbol}` (a Rust plugin needs \
         `crate-type = [\"cdylib\"]` and a line such as `roll_plugin::export_reward!(...)`)",
        path.display()
    )]
    NotAPlugin { path: PathBuf, symbol: &'static str },
    #[error(
        "the plugin {} was built for plugin ABI {}.{}, this roll has {}.{}: rebuild it with the roll-plugin of this roll",
        path.display(), found[0], found[1], expected[0], expected[1]
    )]
    Version { path: PathBuf, expected: [u32; 2], found: [u32; 2] },
    /// Its types have another layout although its version is compatible.
    #[error(
        "the plugin {} was built with other types at the boundary: {difference}; rebuild it with the roll-plugin of this \
         roll", path.display()
    )]
    Layout { path: PathBuf, difference: String },

    // Calls
    #[error("the plugin {} has an invalid description: {problem}", path.display())]
    Description { path: PathBuf, problem: String },
    #[error("the plugin `{plugin}` ({}) failed in `{call}`", path.display())]
    Call { plugin: String, path: PathBuf, call: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
}

#[cfg(feature = "host")]
impl From<PluginError> for Error {
    fn from(error: PluginError) -> Self {
        Error::component(Fault::User, error)
    }
}

/// Maximum number of messages that are kept of an error of the other side. A chain of errors is dropped by recursion,
/// which must not go deep.
const MAX_MESSAGES: usize = 64;

/// The messages of an error of the other side, outermost first.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ErrorChain {
    message: String,
    source: Option<Box<ErrorChain>>,
}

impl ErrorChain {
    fn new(messages: Vec<String>) -> Self {
        let mut messages: Vec<String> = messages.into_iter().filter(|m| !m.is_empty()).collect();
        if messages.len() > MAX_MESSAGES {
            let more = messages.len() - (MAX_MESSAGES - 1);
            messages.truncate(MAX_MESSAGES - 1);
            messages.push(format!("and {more} more causes"));
        }
        let mut messages = messages.into_iter().rev();
        let innermost = messages.next().unwrap_or_else(|| "it returned no reason".into());
        let innermost = Self { message: innermost, source: None };
        messages.fold(innermost, |source, message| Self { message, source: Some(Box::new(source)) })
    }
}

/// An error in the form in which it crosses the boundary (P7 of the contract in [`crate::abi`]).
#[derive(Serialize, Deserialize)]
pub(super) struct Failure {
    #[serde(default)]
    fault: WireFault,
    #[serde(default)]
    messages: Vec<String>,
}

/// The fault of a [`Failure`].
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WireFault {
    User,
    Interrupt,
    /// There is nothing to score, which concerns one sample.
    Nothing,
    /// Also any fault that this version does not know.
    #[default]
    #[serde(other)]
    Failure,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(&error)
    }
}

impl Failure {
    /// The form in which `error` crosses the boundary.
    pub(super) fn new(error: &Error) -> Self {
        let fault = match error.fault() {
            _ if error.missing_reason().is_some() => WireFault::Nothing,
            Fault::User => WireFault::User,
            Fault::Failure => WireFault::Failure,
            Fault::Interrupt => WireFault::Interrupt,
        };
        Self { fault, messages: crate::messages(error) }
    }

    /// The error that this side returns for a failure of the other side.
    pub(super) fn error(self) -> Error {
        let fault = match self.fault {
            WireFault::Interrupt => return Error::Interrupted,
            WireFault::Nothing => return Error::nothing_to_score(self.messages.join(": ")),
            WireFault::User => Fault::User,
            WireFault::Failure => Fault::Failure,
        };
        Error::component(fault, ErrorChain::new(self.messages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_a_bounded_number_of_messages() {
        let messages: Vec<String> = (0..200_000).map(|i| format!("cause {i}")).collect();
        let found = crate::messages(&Failure { fault: WireFault::Failure, messages }.error());
        assert_eq!(found.len(), MAX_MESSAGES);
        assert_eq!([&found[0], &found[62], &found[63]], ["cause 0", "cause 62", "and 199937 more causes"]);
    }
}
