//! `roll completions`: completions for a shell, generated from the description of the arguments.

use std::io::{ErrorKind, Write};

use clap::CommandFactory;
use roll_core::{Error, Result};

use crate::args::Args;

pub fn completions(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "roll", &mut script);
    match std::io::stdout().write_all(&script) {
        // The reader closed the pipe, as `head` does.
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(Error::file("write", "the standard output")),
    }
}
