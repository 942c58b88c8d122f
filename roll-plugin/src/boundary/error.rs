//! Errors of plugins.

#[cfg(feature = "host")]
use {
    crate::{Error, Fault},
    std::path::PathBuf,
};

use crate::abi::CHAIN;

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

/// The messages of an error of the other side, outermost first.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct ErrorChain {
    message: String,
    source: Option<Box<ErrorChain>>,
}

impl ErrorChain {
    /// From messages joined with [`CHAIN`].
    pub(super) fn parse(text: &str) -> Self {
        let mut messages = text.split(CHAIN).filter(|m| !m.is_empty()).rev();
        let last = messages.next().unwrap_or("it returned no reason");
        let innermost = Self { message: last.into(), source: None };
        messages.fold(innermost, |source, message| Self { message: message.into(), source: Some(Box::new(source)) })
    }

    /// The messages of `error` and its causes, joined with [`CHAIN`].
    pub(super) fn write(error: &dyn std::error::Error) -> String {
        crate::messages(error).join(&CHAIN.to_string())
    }
}
