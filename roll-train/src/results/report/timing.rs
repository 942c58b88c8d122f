//! Time of a step by phase.

use std::collections::BTreeSet;

use minijinja::{Value, context};

use super::run_files::RunFiles;
use crate::results::plot;

/// The mean step of a run, for the page: its phases (empty if the run measured no times) and the seconds of the whole.
pub fn timing(run: &RunFiles) -> Value {
    let (parts, total) = phases(run);
    let phase = |(i, (name, seconds)): (usize, (String, f64))| {
        context! {
            name,
            colour => plot::css_part_colour(i),
            seconds => format!("{seconds:.3}"),
            percent => format!("{:.1}", 100.0 * seconds / total),
        }
    };
    let phases: Vec<Value> = parts.into_iter().enumerate().map(phase).collect();
    context! { phases, total => format!("{total:.3}") }
}

/// Mean seconds of each phase, longest first, and of the whole step. Time that no phase covers is the last phase.
pub fn phases(run: &RunFiles) -> (Vec<(String, f64)>, f64) {
    let mean = |name: &str| {
        let values = run.values(name);
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let names: BTreeSet<&String> = run.rows.iter().flat_map(|row| row.keys()).collect();
    let mut parts: Vec<(String, f64)> = names
        .into_iter()
        // `time/score/NAME` is a part of `time/score`.
        .filter(|name| !matches!(name.as_str(), "time/total" | "time/step") && name.matches('/').count() == 1)
        .filter_map(|name| Some((name.strip_prefix("time/")?.to_string(), mean(name)?)))
        .filter(|(_, seconds)| *seconds > 0.0)
        .collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let covered: f64 = parts.iter().map(|(_, seconds)| seconds).sum();
    let total = mean("time/total").or(mean("time/step")).unwrap_or(covered).max(covered);
    if total - covered > 0.005 * total {
        parts.push(("reading data, and the rest".into(), total - covered));
    }
    (parts, total)
}
