//! The plugin call that a thread is in. Native code may end the process without returning; a signal handler can then
//! report which plugin was called.

use std::cell::Cell;

use super::source::Source;

/// A plugin, as messages name it, and the function that is called.
type Call = (&'static str, &'static str);

thread_local! {
    // Without a destructor and made at compile time: a signal handler may read it.
    static UNDER_WAY: Cell<Option<Call>> = const { Cell::new(None) };
}

/// Records a call of its thread until it is dropped.
pub(super) struct UnderWay(Option<Call>);

impl UnderWay {
    /// The thread begins to call `function`. Functions that the host offers to plugins are not recorded.
    pub(super) fn begin(source: &Source, function: &'static str) -> Self {
        match source {
            Source::Host => Self(UNDER_WAY.get()),
            Source::Plugin(origin) => Self(UNDER_WAY.replace(Some((origin.label, function)))),
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        UNDER_WAY.set(self.0);
    }
}

/// The plugin, by name and file, and its function that this thread is calling. Allocates nothing and never blocks, so
/// that signal handlers may call it.
pub fn under_way() -> Option<(&'static str, &'static str)> {
    UNDER_WAY.get()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::source::Origin;
    use super::*;

    #[test]
    fn the_innermost_call_of_a_thread_is_recorded() {
        let source = |name: &str| Source::Plugin(Arc::new(Origin::new(name.into(), format!("{name}.so").into())));
        assert_eq!(under_way(), None);
        let outer = UnderWay::begin(&source("a"), "train_step");
        {
            let _host = UnderWay::begin(&Source::Host, "velocity");
            let _inner = UnderWay::begin(&source("b"), "score");
            assert_eq!(under_way(), Some(("`b` (b.so)", "score")));
            let elsewhere = std::thread::spawn(under_way).join();
            assert!(matches!(elsewhere, Ok(None)));
        }
        assert_eq!(under_way(), Some(("`a` (a.so)", "train_step")));
        drop(outer);
        assert_eq!(under_way(), None);
    }
}
