//! Lets panics pass that `roll` turns into errors.

use std::sync::Once;

/// cargo-fuzz ends the process at every panic. Those on the thread `contained` (`roll_external::contain`) become errors
/// in `roll`, so from the first call on they pass.
pub fn panics_pass() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let end = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if std::thread::current().name() != Some("contained") {
                end(panic);
            }
        }));
    });
}
