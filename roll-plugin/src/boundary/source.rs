//! The owner of an object: the host or a plugin, which error messages name.

use std::ffi::c_void;
#[cfg(feature = "host")]
use std::{path::PathBuf, sync::Arc};

use crate::abi::{CHAIN, FAULT_INTERRUPT, FAULT_NOTHING, FAULT_USER, Grows, OK, RollError};

use super::error::ErrorChain;
use super::memory::take_text;
use crate::{Error, Fault, Result};

/// The owner of an object, for messages.
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
    /// Both, for messages of a process that is dying. Leaked, because the library is never unloaded (P3).
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

    /// `problem` with the plugin's name, file and method before it.
    pub(super) fn blame(&self, _call: &'static str, problem: Error) -> Error {
        match self {
            Self::Host => problem,
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

    /// A cache key that the other side returned. The key of a plugin includes its library, since other code may return
    /// something else.
    pub(super) fn key(&self, own: Option<String>) -> Result<Option<String>> {
        match self {
            Self::Host => Ok(own),
            #[cfg(feature = "host")]
            Self::Plugin(origin) => match own {
                None => Ok(None),
                Some(own) => {
                    let key = roll_external::Fingerprint::new("plugin").text("key", own).whole_file(&origin.path)?;
                    Ok(Some(key.finish()))
                }
            },
        }
    }

    /// The outcome of a call that the other side answered.
    pub(super) fn outcome<R>(&self, call: &'static str, status: u32, out: R, error: RollError) -> Result<R> {
        if status == OK {
            return Ok(out);
        }
        let fault = match error.fault {
            FAULT_INTERRUPT => return Err(Error::Interrupted),
            FAULT_USER => Fault::User,
            _ => Fault::Failure,
        };
        // SAFETY: P2 and P7.
        let text = unsafe { take_text(error.text) }.unwrap_or_default();
        if error.fault == FAULT_NOTHING {
            // Not attributed to the plugin, which did nothing wrong.
            return Err(Error::nothing_to_score(text.replace(CHAIN, ": ")));
        }
        Err(self.blame(call, Error::component(fault, ErrorChain::parse(&text))))
    }

    /// A table of the other side: a copy of the part that both sides know.
    ///
    /// # Safety
    /// P3 and P8.
    pub(super) unsafe fn table<Table: Grows>(&self, call: &'static str, table: *const c_void) -> Result<Table> {
        if table.is_null() {
            return Err(self.blame(call, Error::Misuse("it returned an object without functions".into())));
        }
        // SAFETY: as the caller promises.
        let read = unsafe { crate::abi::read(table.cast::<Table>()) };
        read.map_err(|e| self.blame(call, Error::Misuse(format!("{e}; rebuild it with the roll-core of this roll"))))
    }

    /// As [`Source::table`], for an optional table of an object.
    ///
    /// # Safety
    /// P3 and P8.
    pub(super) unsafe fn part<Table: Grows>(&self, table: *const c_void) -> Result<Option<Table>> {
        // SAFETY: as the caller promises.
        (!table.is_null()).then(|| unsafe { self.table("make", table) }).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::super::served::answer;
    use super::*;

    #[test]
    fn nothing_to_score_stays_a_fault_of_the_sample() {
        let (mut out, mut error) = ((), RollError::default());
        // SAFETY: P7.
        let status = unsafe { answer(&mut out, &mut error, || Err::<(), _>(Error::nothing_to_score("no face"))) };
        let error = Source::Host.outcome("prepare", status, out, error).unwrap_err();
        assert_eq!(error.missing_reason(), Some("no face"));
    }
}
