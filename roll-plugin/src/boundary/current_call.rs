//! The plugin call that a thread is in. Native code may end the process without returning; a signal handler can then
//! report which plugin was called.

use std::cell::Cell;

/// A plugin ([`super::source::Origin::label`]), and its function that is called.
type Call = (&'static str, &'static str);

thread_local! {
    // Without a destructor and initialised at compile time, so that a signal handler may read it.
    static CURRENT_CALL: Cell<Option<Call>> = const { Cell::new(None) };
}

/// Records a call of this thread until the guard is dropped. The guard holds the call that was current before, and
/// makes it current again.
pub(super) struct CallGuard(Option<Call>);

impl CallGuard {
    /// Records that this thread calls `function` of `plugin`. A call of the host (`None`) is not recorded.
    pub(super) fn begin(plugin: Option<&'static str>, function: &'static str) -> Self {
        match plugin {
            None => Self(CURRENT_CALL.get()),
            Some(label) => Self(CURRENT_CALL.replace(Some((label, function)))),
        }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        CURRENT_CALL.set(self.0);
    }
}

/// Name and file of the plugin that this thread is calling, and the plugin's function. Allocates nothing and never
/// blocks, so that signal handlers may call it.
pub fn current_call() -> Option<(&'static str, &'static str)> {
    CURRENT_CALL.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_call_of_a_thread_is_recorded() {
        assert_eq!(current_call(), None);
        let outer = CallGuard::begin(Some("`a` (a.so)"), "train_step");
        {
            let _host = CallGuard::begin(None, "velocity");
            let _inner = CallGuard::begin(Some("`b` (b.so)"), "score");
            assert_eq!(current_call(), Some(("`b` (b.so)", "score")));
            let elsewhere = std::thread::spawn(current_call).join();
            assert!(matches!(elsewhere, Ok(None)));
        }
        assert_eq!(current_call(), Some(("`a` (a.so)", "train_step")));
        drop(outer);
        assert_eq!(current_call(), None);
    }
}
