//! `roll report`: one page of one or several runs.

use std::path::PathBuf;

use roll_core::{Error, Result};
use roll_train::results::report;
use roll_train::run_dir::RunDir;

use crate::args::Report;
use crate::output::refuse_existing;

/// Writes the page and prints its path.
pub fn write(args: Report) -> Result<()> {
    let is_named = args.output.is_some();
    let runs: Vec<PathBuf> = args.runs.iter().flat_map(|run| RunDir::runs_at(run)).collect();
    let page = args.output.unwrap_or_else(|| match runs.as_slice() {
        [run] => run.join("report.html"),
        _ => PathBuf::from("report.html"),
    });
    if !page.extension().is_some_and(|extension| extension == "html" || extension == "htm") {
        let problem = format!("a report is a page; {} does not end in .html", page.display());
        return Err(Error::config("--output", problem));
    }
    if is_named {
        refuse_existing(&page, args.force)?;
    }
    report::write(&page, &runs)?;
    println!("{}", page.display());
    Ok(())
}
