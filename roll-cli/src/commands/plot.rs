//! `roll plot`: metrics of one or several runs in one picture.

use std::path::{Path, PathBuf};

use roll_core::{Error, Result, nearest};
use roll_train::metrics::read_jsonl;
use roll_train::results::headlines;
use roll_train::results::plot::{Panel, Series, SeriesStyle, write};
use roll_train::run_dir::RunDir;

use crate::args::Plot;
use crate::output::refuse_existing;

/// Draws one line per run: the metric `--y` against the metric `--x`.
pub fn plot(args: Plot) -> Result<()> {
    if args.output.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("svg")) {
        let problem = format!("--output: plots are written as SVG; {} does not end in .svg", args.output.display());
        return Err(Error::Unsupported(problem));
    }
    refuse_existing(&args.output, args.force)?;
    let y = match args.y {
        Some(y) => y,
        None => first_headline(&args.runs)?,
    };
    let mut series = Vec::new();
    for run in &args.runs {
        let points = points(run, &args.x, &y)?;
        let name = run.file_name().unwrap_or(run.as_os_str()).to_string_lossy().into_owned();
        // Runs take the colours of the palette in turn, and no line is dashed.
        series.push(Series { name, points, style: SeriesStyle::Line, colour: series.len(), dashes: 0 });
    }
    let title = format!("{y} against {}", args.x);
    let panel = Panel { title, axes: [args.x, y], series };
    write(&args.output, &[panel])?;
    println!("{}", args.output.display());
    Ok(())
}

/// The metric that the runs' algorithm calls its most important one.
fn first_headline(runs: &[PathBuf]) -> Result<String> {
    for run in runs {
        if let Some(headline) = headlines::read(&RunDir::open(run)?)?.into_iter().next() {
            return Ok(headline.metric);
        }
    }
    Err(Error::Unsupported("these runs do not say which metric matters most: name one with `--y METRIC`".into()))
}

/// The points `[x, y]` of a run: one for each line of its `metrics.jsonl` that holds both metrics.
fn points(run: &Path, x: &str, y: &str) -> Result<Vec<[f64; 2]>> {
    let path = run.join("metrics.jsonl");
    let rows = read_jsonl(&path)?;
    let points: Vec<[f64; 2]> =
        rows.iter().filter_map(|row| Some([row.get(x)?.as_f64()?, row.get(y)?.as_f64()?])).collect();
    if points.is_empty() {
        let mut names: Vec<&str> = rows.iter().flat_map(|row| row.keys()).map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        let near = [x, y]
            .into_iter()
            .filter(|name| !names.contains(name))
            .find_map(|name| nearest(name, names.iter().copied()));
        let near = near.map(|near| format!(" (is `{near}` meant?)")).unwrap_or_default();
        let problem = format!(
            "no line holds both `{x}` and `{y}`{near}; `--x` and `--y` name metrics; there are: {}",
            names.join(", ")
        );
        return Err(Error::bad_file(&path, problem));
    }
    Ok(points)
}
