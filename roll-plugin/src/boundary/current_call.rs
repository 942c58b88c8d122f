//! The plugin call that a thread is in. Native code may end the process without returning; a signal handler can then
//! report which plugin was called.

use std::cell::Cell;

use super::source::Source;

/// A plugin, as messages name it, and the function that is called.
type Call = (&'static str, &'static str);

thread_local! {
    // Without a destructor and made at compile time: a signal handler may read it.
    static CURRENT_CALL: Cell<Option<Call>> = const { Cell::new(None) };
}

/// Records a call of its thread until it is dropped.
pub(super) struct CallGuard(Option<Call>);

impl CallGuard {
    /// The thread begins to call `function`. Functions that the host offers to plugins are not recorded.
    pub(super) fn begin(source: &Source, function: &'static str) -> Self {
        match source {
            Source::Host => Self(CURRENT_CALL.get()),
            Source::Plugin(origin) => Self(CURRENT_CALL.replace(Some((origin.label, function)))),
        }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        CURRENT_CALL.set(self.0);
    }
}

/// The plugin, by name and file, and its function that this thread is calling. Allocates nothing and never blocks, so
/// that signal handlers may call it.
pub fn current_call() -> Option<(&'static str, &'static str)> {
    CURRENT_CALL.get()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::source::Origin;
    use super::*;

    #[test]
    fn the_innermost_call_of_a_thread_is_recorded() {
        let source = |name: &str| Source::Plugin(Arc::new(Origin::new(name.into(), format!("{name}.so").into())));
        assert_eq!(current_call(), None);
        let outer = CallGuard::begin(&source("a"), "train_step");
        {
            let _host = CallGuard::begin(&Source::Host, "velocity");
            let _inner = CallGuard::begin(&source("b"), "score");
            assert_eq!(current_call(), Some(("`b` (b.so)", "score")));
            let elsewhere = std::thread::spawn(current_call).join();
            assert!(matches!(elsewhere, Ok(None)));
        }
        assert_eq!(current_call(), Some(("`a` (a.so)", "train_step")));
        drop(outer);
        assert_eq!(current_call(), None);
    }
}
