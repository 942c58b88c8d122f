//! The command line of roll.

mod args;
mod commands;
mod comparison;
mod demo;
mod evaluation;
mod logging;
mod outcome;
mod plot;
mod progress;
mod report;
mod statistics;
mod trainer;
mod trajectories;

use std::process::ExitCode;

use clap::Parser;
use roll_core::Fault;

// A crate that is only named in Cargo.toml registers nothing: these are here for what they submit to the registry.
use roll_algos as _;
use roll_backends as _;
use roll_models as _;
use roll_rewards as _;

/// Exit codes: 0 done, 1 something failed, 2 the user can put it right, 130 interrupted.
fn main() -> ExitCode {
    let args = args::Args::parse();
    logging::init(args.quiet);
    match commands::dispatch(args.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::from(match error.fault() {
                Fault::User => 2,
                Fault::Failure => 1,
                Fault::Interrupt => 130,
            })
        }
    }
}

/// Prints an error and what caused it, each message once.
fn report(error: &roll_core::Error) {
    let mut last = error.to_string();
    eprintln!("error: {last}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let message = cause.to_string();
        if message != last {
            eprintln!("  because: {message}");
            last = message;
        }
        source = cause.source();
    }
}
