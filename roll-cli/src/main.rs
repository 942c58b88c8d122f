//! The command line of roll: the program `roll`.
//!
//! *What it is for*: arguments, configuration layers, logs, progress bars and reports on errors. *What it is not*: a
//! library, or a place for training; a program that trains depends on `roll-train`.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

// This module defines the `println!` of all modules that follow.
#[macro_use]
mod output;

mod args;
mod commands;
mod configuration;
#[cfg(unix)]
mod crash;
mod demo;
mod interrupt;
mod launch;
mod logging;
mod progress;
mod ranks;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use roll_causal_lm::chat;
use roll_core::Fault;
use roll_train::config::without_secrets;
use roll_train::signature;

// A crate that is only named in Cargo.toml registers nothing: these are here for their registrations.
use roll_backends as _;
use roll_rewards as _;
use {roll_agents as _, roll_video as _};
use {roll_causal_lm as _, roll_qwen_vl as _, roll_wan as _, roll_z_image as _};

/// Exit codes: 0 done, 1 something failed, 2 the user can put it right, 3 ended by `evaluation.stop_when`, 130
/// interrupted.
fn main() -> ExitCode {
    // Chat templates of foreign models are rendered in a child process, which is this program with another argument.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == chat::WORKER) {
        return chat::serve();
    }
    if let Ok(program) = std::env::current_exe() {
        chat::render_in_worker(program);
    }
    signature::keep_key_in(signature::directory_of_user(|name| std::env::var_os(name)));
    let args = args::Args::parse();
    let place = ranks::place();
    let rank = place.as_ref().ok().and_then(|place| Some(place.as_ref()?.rank));
    logging::init(args.quiet, args.verbose, rank);
    let job = place.and_then(|place| ranks::Job::join(place, args.collectives));
    #[cfg(unix)]
    crash::report_plugin_crashes();
    let (job, result) = match job {
        Ok(job) => {
            let result = job.run(|| commands::dispatch(args.command));
            (Some(job), result)
        }
        Err(error) => (None, Err(error)),
    };
    let fault = result.as_ref().err().map(roll_core::Error::fault);
    if let Err(error) = &result {
        report(error, rank);
    }
    let code = match (&result, fault) {
        (Ok(commands::Ended::Done), _) => 0,
        (Ok(commands::Ended::Stopped), _) => 3,
        (_, Some(Fault::User)) => 2,
        (_, Some(Fault::Interrupt)) => 130,
        (Err(_), _) => 1,
    };
    if let Some(job) = job {
        job.leave(fault, code);
    }
    ExitCode::from(code)
}

/// Prints an error and its causes, each message once.
fn report(error: &roll_core::Error, rank: Option<usize>) {
    let prefix = logging::prefix(rank);
    let errors = match error {
        roll_core::Error::Several(errors) => errors.as_slice(),
        one => std::slice::from_ref(one),
    };
    let numbered = errors.iter().flat_map(|error| error.messages().into_iter().enumerate());
    let lines = numbered.map(|(depth, message)| match depth {
        // An interrupted run did as it was asked, so this is not called an error.
        0 if error.fault() == Fault::Interrupt => format!("{prefix}{message}\n"),
        0 => format!("{prefix}error: {message}\n"),
        _ => format!("{prefix}  because: {message}\n"),
    });
    let lines = lines.collect::<String>();
    // One write, so that the lines of several ranks do not mix. It fails if the reader has closed the pipe.
    let wrapped = logging::wrapped_to_terminal(&output::printable(&without_secrets(&lines)));
    let _ = std::io::stderr().write_all(wrapped.as_bytes());
}
