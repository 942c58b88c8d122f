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
pub enum PluginError {
    // Before the system's loader sees the file
    /// The file is not a library that this program can load.
    #[error("the plugin {} cannot be loaded: {problem}", path.display())]
    NotLoadable {
        /// The file.
        path: PathBuf,
        /// Expected and found.
        problem: String,
    },

    // Before any code of the plugin is called
    /// The system's loader refused it.
    #[error("the plugin {} cannot be loaded", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The loader's reason.
        #[source]
        source: libloading::Error,
    },
    /// A library that is not a plugin.
    #[error(
        "{} is a library but no plugin of roll: it has no symbol `{symbol}` (a Rust plugin needs \
         `crate-type = [\"cdylib\"]` and a line such as `roll_plugin::export_reward!(...)`)",
        path.display()
    )]
    NotAPlugin {
        /// The file.
        path: PathBuf,
        /// The symbol that is missing.
        symbol: &'static str,
    },
    /// Built against another version of the interface.
    #[error(
        "the plugin {} was built for plugin ABI {}.{}, this roll has {}.{}: rebuild it with the roll-plugin of this roll",
        path.display(), found[0], found[1], expected[0], expected[1]
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Major and minor version of this program.
        expected: [u32; 2],
        /// Major and minor version of the plugin.
        found: [u32; 2],
    },
    /// Its types have another layout although its version is compatible.
    #[error(
        "the plugin {} was built with other types at the boundary: {difference}; rebuild it with the roll-plugin of this \
         roll", path.display()
    )]
    Layout {
        /// The file.
        path: PathBuf,
        /// The first difference.
        difference: String,
    },

    // Calls
    /// Its description of itself is invalid.
    #[error("the plugin {} has an invalid description: {problem}", path.display())]
    Description {
        /// The file.
        path: PathBuf,
        /// Expected and found.
        problem: String,
    },
    /// A call failed.
    #[error("the plugin `{plugin}` ({}) failed in `{call}`", path.display())]
    Call {
        /// Its name.
        plugin: String,
        /// Its file.
        path: PathBuf,
        /// The method.
        call: &'static str,
        /// Its message.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
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
    #[source]
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
