//! Catches panics at the boundary (P5 of the contract in [`crate::abi`]).

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// Message and place of this thread's last panic, from the hook.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes a panic store its message and place for [`catch`] instead of printing them. Called in a plugin, which has a
/// standard library of its own, so that panics of the host are not changed.
pub(super) fn remember_panics() {
    std::panic::set_hook(Box::new(|info| {
        let message = info.to_string();
        tracing::debug!("{message}");
        LAST_PANIC.with_borrow_mut(|last| *last = Some(message));
    }));
}

/// Runs `f`. Returns the message of a panic as the error.
pub(super) fn catch<R>(f: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        let text = crate::communicator::panic_message(payload.as_ref()).map(String::from);
        // Dropping a payload may panic again.
        std::mem::forget(payload);
        let from_hook = LAST_PANIC.with_borrow_mut(Option::take).map(|m| m.replace('\n', " "));
        from_hook.or(text.map(|s| format!("panicked: {s}"))).unwrap_or_else(|| "panicked".into())
    })
}

/// Runs `f`, which releases an object, for a caller that can take no error. A panic is logged.
pub(super) fn quietly(f: impl FnOnce()) {
    if let Err(message) = catch(f) {
        tracing::error!("while releasing an object across the plugin boundary: {message}");
    }
}
