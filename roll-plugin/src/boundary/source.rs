//! The owner of an object of the other side: the host, or a plugin that error messages name. P2 and P3 are numbers of
//! the contract in [`crate::abi`].

#[cfg(feature = "host")]
use std::{path::PathBuf, sync::Arc};

use crate::abi::RollObject;

use super::error::Failure;
use crate::{Error, Result};

/// The owner of an object of the other side.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Host,
    #[cfg(feature = "host")]
    Plugin(Arc<Origin>),
}

/// Name and file of a plugin.
#[cfg(feature = "host")]
#[derive(Debug)]
pub(super) struct Origin {
    pub(super) plugin: String,
    pub(super) path: PathBuf,
    /// Name and file in one text, for the signal handler of a process that is dying ([`super::current_call`]). Leaked,
    /// because the library is never unloaded (P3).
    pub(super) label: &'static str,
}

#[cfg(feature = "host")]
impl Origin {
    pub(super) fn new(plugin: String, path: PathBuf) -> Self {
        let label = format!("`{plugin}` ({})", path.display());
        Self { plugin, path, label: Box::leak(label.into_boxed_str()) }
    }
}

impl Source {
    /// Whether the owner is a plugin, and not the host.
    pub(super) fn is_plugin(&self) -> bool {
        !matches!(self, Self::Host)
    }

    /// Records that this thread is in a function of the other side, until the result is dropped.
    #[cfg(feature = "host")]
    pub(super) fn entered(&self, function: &'static str) -> super::current_call::CallGuard {
        let plugin = match self {
            Self::Host => None,
            Self::Plugin(origin) => Some(origin.label),
        };
        super::current_call::CallGuard::begin(plugin, function)
    }

    /// Only a host records the calls that it makes.
    #[cfg(not(feature = "host"))]
    pub(super) fn entered(&self, _function: &'static str) {}

    /// Releases an object of the other side, unless it is lent.
    ///
    /// # Safety
    /// P2: the object is ours, or lent.
    pub(super) unsafe fn release(&self, object: RollObject) {
        if let Some(release) = object.release {
            let _entered = self.entered("release");
            // SAFETY: as the caller promises.
            unsafe { release(object.state) };
        }
    }

    /// Adds the plugin's name, its file and the method to an error.
    pub(super) fn blame(&self, _call: &'static str, problem: Error) -> Error {
        match self {
            // Errors of the host stay as they are.
            Self::Host => problem,
            // An interrupt is no failure of the plugin.
            #[cfg(feature = "host")]
            Self::Plugin(_) if matches!(problem, Error::Interrupted) => problem,
            #[cfg(feature = "host")]
            Self::Plugin(origin) => {
                let fault = problem.fault();
                let (plugin, path) = (origin.plugin.clone(), origin.path.clone());
                let source = Box::new(problem);
                Error::component(fault, super::PluginError::Call { plugin, path, call: _call, source })
            }
        }
    }

    /// The cache key for a key that the other side returned. For a plugin it includes the contents of the library,
    /// because another version of the library may compute something else under the same key.
    pub(super) fn key(&self, returned: Option<String>) -> Result<Option<String>> {
        match self {
            Self::Host => Ok(returned),
            #[cfg(feature = "host")]
            Self::Plugin(origin) => match returned {
                None => Ok(None),
                Some(returned) => {
                    let key =
                        roll_external::Fingerprint::new("plugin").text("key", returned).whole_file(&origin.path)?;
                    Ok(Some(key.finish()))
                }
            },
        }
    }

    /// The error that the other side answered a call with.
    pub(super) fn failure(&self, call: &'static str, answer: Result<Failure>) -> Error {
        match answer.map(Failure::error) {
            // "Nothing to score" is not attributed to the plugin, which did nothing wrong.
            Ok(error) if error.missing_reason().is_some() => error,
            Ok(error) => self.blame(call, error),
            Err(unreadable) => {
                let source = Box::new(unreadable);
                self.blame(call, Error::Context { doing: "it failed, and its error cannot be read".into(), source })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_to_score_stays_a_fault_of_the_sample() {
        let failure = Failure::new(&Error::nothing_to_score("no face"));
        let error = Source::Host.failure("prepare", Ok(failure));
        assert_eq!(error.missing_reason(), Some("no face"));
    }
}
