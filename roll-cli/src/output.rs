//! Standard output, whose reader may go away before all is written: `roll config | head`.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// As the standard macro, which panics when the reader has closed the pipe.
macro_rules! println {
    () => {
        $crate::output::line(format_args!(""))
    };
    ($($text:tt)*) => {
        $crate::output::line(format_args!($($text)*))
    };
}

/// Prints a line, unless the reader went away. What else goes wrong, such as a full disk behind a redirection, ends the
/// process: nothing that is printed comes before the work is done.
pub fn line(text: Arguments<'_>) {
    if let Err(error) = writeln!(std::io::stdout(), "{text}")
        && error.kind() != ErrorKind::BrokenPipe
    {
        eprintln!("error: cannot write to the standard output: {error}");
        std::process::exit(1);
    }
}
