//! `roll report`: one page of one or several runs.

use std::path::PathBuf;

use roll_core::Result;
use roll_train::results::report;

use crate::args::Report;

/// Writes the page and prints its path.
pub fn write(args: Report) -> Result<()> {
    let page = args.output.unwrap_or_else(|| match args.runs.as_slice() {
        [run] => run.join("report.html"),
        _ => PathBuf::from("report.html"),
    });
    report::write(&page, &args.runs)?;
    println!("{}", page.display());
    Ok(())
}
