//! `roll completions` and `roll man`: made of the command line's own description.

use std::io::Write;
use std::path::Path;

use clap::CommandFactory;
use roll_core::{Error, Result};

use crate::args::Args;

/// Prints completions.
pub fn completions(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "roll", &mut script);
    print(&script)
}

/// Prints the page of `roll`, or writes one for every command into `out`.
pub fn man(out: Option<&Path>) -> Result<()> {
    match out {
        Some(directory) => {
            std::fs::create_dir_all(directory).map_err(Error::file("create the directory", directory))?;
            clap_mangen::generate_to(Args::command(), directory)
                .map_err(Error::file("write manual pages to", directory))
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Args::command())
                .render(&mut page)
                .map_err(Error::file("write", "the manual page"))?;
            print(&page)
        }
    }
}

/// To a reader that may go away, as `head` does.
fn print(text: &[u8]) -> Result<()> {
    match std::io::stdout().write_all(text) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(Error::file("write", "the standard output")),
    }
}
