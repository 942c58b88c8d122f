//! `roll plot`: metrics of one or several runs in one picture.

use std::path::Path;

use roll_core::metrics::read_jsonl;
use roll_core::{Error, Result};

use crate::args::Plot;
use crate::plot::{Panel, Series, write};

/// One line per run, of one metric against another.
pub fn plot(args: Plot) -> Result<()> {
    let mut series = Vec::new();
    for run in &args.runs {
        let points = points(run, &args.x, &args.y)?;
        let name = run.file_name().unwrap_or(run.as_os_str()).to_string_lossy().into_owned();
        series.push(Series { name, points, line: true, colour: series.len() });
    }
    let title = format!("{} against {}", args.y, args.x);
    let panel = Panel { title, axes: [args.x, args.y], series };
    write(&args.output, &[panel])?;
    println!("{}", args.output.display());
    Ok(())
}

/// The lines of a run's `metrics.jsonl` that hold both.
fn points(run: &Path, x: &str, y: &str) -> Result<Vec<[f64; 2]>> {
    let path = run.join("metrics.jsonl");
    let rows = read_jsonl(&path)?;
    let points: Vec<[f64; 2]> =
        rows.iter().filter_map(|row| Some([row.get(x)?.as_f64()?, row.get(y)?.as_f64()?])).collect();
    if points.is_empty() {
        let mut names: Vec<&str> = rows.iter().flat_map(|row| row.keys()).map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        let problem = format!("no line holds both `{x}` and `{y}`; there are: {}", names.join(", "));
        return Err(Error::bad_file(&path, problem));
    }
    Ok(points)
}
