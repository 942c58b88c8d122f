//! The table of results at the top of the report, and the status line of each run. "Figures" are numbers here; `charts`
//! draws the pictures on the page.

use std::fmt::Write;

use minijinja::context;
use roll_core::HeadlineFormat;
use serde_json::{Map, Value};

use super::run_files::RunFiles;
use crate::progress::grouped;
use crate::results::record::Comparison;
use crate::statistics::Gain;

/// The status line: steps done, seconds, and whether the run has ended.
pub fn status(run: &RunFiles) -> String {
    let (steps_done, steps_wanted) = run.steps();
    let seconds = match &run.summary {
        Some(summary) => summary.get("seconds").and_then(Value::as_f64).unwrap_or_default(),
        // Not `sum`, which returns -0 for no values.
        None => run.values("time/total").iter().fold(0.0, |sum, seconds| sum + seconds),
    };
    let of_wanted = steps_wanted.map(|wanted| format!(" of {wanted}")).unwrap_or_default();
    let end = match &run.summary {
        Some(summary) if summary.contains_key("stopped") => ", stopped by `evaluation.stop_when`",
        Some(_) if steps_wanted.is_none_or(|wanted| steps_done >= wanted) => "",
        _ => ", not finished",
    };
    format!("{}: {steps_done}{of_wanted} steps in {seconds:.0} s{end}", run.path.display())
}

/// The rows of the table: a name, and a value for each run. A run without this value has an empty text.
pub fn table(runs: &[RunFiles]) -> Vec<minijinja::Value> {
    let columns: Vec<Vec<(String, String)>> = runs.iter().map(column).collect();
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in columns.iter().flatten() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let value = |column: &[(String, String)], name: &String| {
        column.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone()).unwrap_or_default()
    };
    let row = |name: &String| {
        let values: Vec<String> = columns.iter().map(|column| value(column, name)).collect();
        context! { name, values }
    };
    names.into_iter().map(row).collect()
}

/// A number with four decimals, or with an exponent if it is tiny or huge.
fn number(value: f64) -> String {
    let needs_exponent = value != 0.0 && !(1e-3..1e5).contains(&value.abs());
    if needs_exponent { format!("{value:.2e}") } else { format!("{value:.4}") }
}

/// The column of one run: names and values. Scores before and after training come first, with the scores on held-out
/// data at the beginning. Then come the first and last values of headline metrics, and facts about the model.
fn column(run: &RunFiles) -> Vec<(String, String)> {
    let mut figures = scores_before_and_after(&run.figures);
    if let Some(Comparison { after, before, equal }) = run.record.comparison {
        figures.push(("after against before".into(), format!("{after} won, {before} lost, {equal} equal")));
    }
    for headline in run.headlines.iter().filter(|headline| !headline.label.is_empty()) {
        if let [first, .., last] = run.values(&headline.metric)[..] {
            let name = format!("{}, training", headline.label);
            let [first, last] = headline.format.write_apart([first, last]);
            figures.push((name, format!("{first} \u{2192} {last}")));
        }
    }
    if let Some(kl) = run.figures.get("kl").and_then(Value::as_f64) {
        figures.push(("kl, evaluated".into(), number(kl)));
    }
    if let Some(parameters) = run.figures.get("parameters").and_then(Value::as_u64) {
        figures.push(("trainable parameters".into(), grouped(parameters)));
    }
    if let Some([adapter, ..]) = run.figures.get("adapter").and_then(Value::as_array).map(Vec::as_slice) {
        figures.push(("weights".into(), adapter.as_str().unwrap_or_default().into()));
    }
    figures
}

/// Each quantity that `summary` has before training, with its value after training: for example "unseen" by
/// `unseen_before`, `unseen_after`, `unseen_gain` and `unseen_clips`.
fn scores_before_and_after(summary: &Map<String, Value>) -> Vec<(String, String)> {
    let mut scores: Vec<(&str, f64)> =
        summary.iter().filter_map(|(name, value)| Some((name.strip_suffix("_before")?, value.as_f64()?))).collect();
    scores.sort_by_key(|(name, _)| !name.starts_with("unseen"));
    let mut figures = Vec::new();
    for (name, before) in scores {
        let figure = |suffix: &str| summary.get(&format!("{name}_{suffix}")).and_then(Value::as_f64);
        let gain = summary.get(&format!("{name}_gain"));
        let after = figure("after").unwrap_or(f64::NAN);
        let [before, after] = HeadlineFormat::Decimal.write_apart([before, after]);
        let mut text = format!("{before} \u{2192} {after}");
        if let Some(gain) = gain.and_then(|gain| serde_json::from_value::<Gain>(gain.clone()).ok()) {
            let _ = write!(text, ", {}", gain.in_words());
            if let Some(clips) = figure("clips") {
                let _ = write!(text, ", {clips} clips");
            }
        }
        figures.push((name.replace('_', " "), text));
    }
    figures
}
