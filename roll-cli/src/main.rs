//! The command line of roll.
fn main() {}
