//! Reports a crash inside a plugin: native code that crashes never returns to its caller, so that a signal handler has
//! to name the plugin.

use std::ptr;
use std::sync::OnceLock;

use libc::{c_int, c_void, sigaction, siginfo_t};

/// The signals of a fault, and how a message says that the process ended by them.
const FAULTS: [(c_int, &str); 4] = [
    (libc::SIGSEGV, "the process was ended by SIGSEGV, an access to memory that is not its own,"),
    (libc::SIGBUS, "the process was ended by SIGBUS, an access to memory that is not there,"),
    (libc::SIGILL, "the process was ended by SIGILL, a trap or an instruction that this processor does not have,"),
    (libc::SIGFPE, "the process was ended by SIGFPE, such as a division of whole numbers by zero,"),
];

/// The action of each of [`FAULTS`] before [`report_plugin_crashes`] replaced it. It is set before the handler can run,
/// so the handler may read it.
static FORMER_ACTIONS: [OnceLock<sigaction>; FAULTS.len()] = [const { OnceLock::new() }; FAULTS.len()];

/// Installs handlers that name the plugin whose call ends the process by a fault or an abort. Its code may have
/// called `abort`, panicked while it panicked, overflowed its stack, or followed a bad pointer.
pub fn report_plugin_crashes() {
    // SAFETY: `on_abort` has the signature of a handler. It reads a variable of its thread and writes to a descriptor:
    // it neither allocates nor locks, and it does not panic.
    if unsafe { libc::signal(libc::SIGABRT, on_abort as extern "C" fn(c_int) as usize) } == libc::SIG_ERR {
        tracing::debug!("a plugin that aborts will not be named: {}", std::io::Error::last_os_error());
    }
    for ((number, _), former) in FAULTS.iter().zip(&FORMER_ACTIONS) {
        // SAFETY: the structure is plain data, for which zeros are valid; the pointers are valid for the calls; and
        // `on_fault` has the signature that SA_SIGINFO asks for.
        let is_installed = unsafe {
            let mut old: sigaction = std::mem::zeroed();
            let is_stored = libc::sigaction(*number, ptr::null(), &mut old) == 0 && former.set(old).is_ok();
            let mut new: sigaction = std::mem::zeroed();
            new.sa_sigaction = on_fault as *const () as usize;
            // The handler runs on the alternate stack that the standard library makes for each thread.
            new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut new.sa_mask);
            is_stored && libc::sigaction(*number, &new, ptr::null_mut()) == 0
        };
        if !is_installed {
            tracing::debug!("a plugin that is ended by signal {number} will not be named");
        }
    }
}

/// `abort` ends the process once this returns.
extern "C" fn on_abort(_: c_int) {
    report("the process was aborted");
}

/// Passes the signal to its former handler, names the plugin, and lets the signal end the process.
extern "C" fn on_fault(number: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let Some(fault) = FAULTS.iter().position(|(fault, _)| *fault == number) else { return };
    if let Some(former) = FORMER_ACTIONS[fault].get()
        && ![libc::SIG_DFL, libc::SIG_IGN].contains(&former.sa_sigaction)
    {
        let handler = former.sa_sigaction as *const ();
        // SAFETY: the handler is the function that the system would have called, with the arguments that its flags ask
        // for. The standard library's handler aborts if a stack has overflowed, and returns otherwise.
        unsafe {
            if former.sa_flags & libc::SA_SIGINFO != 0 {
                type WithInfo = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
                std::mem::transmute::<*const (), WithInfo>(handler)(number, info, context);
            } else {
                std::mem::transmute::<*const (), extern "C" fn(c_int)>(handler)(number);
            }
        }
    }
    let (_, how) = FAULTS[fault];
    report(how);
    // SAFETY: both functions may be called in signal handlers. The signal is blocked until this handler returns, and
    // then ends the process.
    unsafe {
        libc::signal(number, libc::SIG_DFL);
        libc::raise(number);
    }
}

/// Reports `how` the process ended if the thread is in a call of a plugin.
fn report(how: &str) {
    let Some((plugin, function)) = roll_plugin::current_call() else { return };
    for part in [
        "error: ",
        how,
        " while it was calling `",
        function,
        "` of the plugin ",
        plugin,
        "\n  because: native code that ends the process cannot be held back; a run goes on from its newest checkpoint \
         with `roll run --resume RUN`\n",
    ] {
        // Nothing can be done about a reader that went away.
        let _ = rustix::io::write(std::io::stderr(), part.as_bytes());
    }
}
