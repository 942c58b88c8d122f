//! The mean time of a step, by phase.

use std::collections::BTreeSet;

use minijinja::{Value, context};

use super::run_files::RunFiles;
use crate::results::plot;

/// Mean duration of a step and of its phases, for the page. There are no phases if the run measured no times.
pub fn timing(run: &RunFiles) -> Value {
    let (phases, total) = phases(run);
    let sum = sum_of_phases(&phases);
    let to_context = |(i, (name, seconds)): (usize, (String, f64))| {
        context! {
            name,
            colour => plot::css_part_colour(i),
            seconds => format!("{seconds:.3}"),
            percent => format!("{:.1}", 100.0 * seconds / sum),
        }
    };
    let phases: Vec<Value> = phases.into_iter().enumerate().map(to_context).collect();
    // If the phases sum up to more than the step, which ranks that wait for one another cause, the page explains the
    // sum.
    let overlap = (sum > 1.005 * total).then(|| format!("{sum:.3}"));
    context! { phases, total => format!("{total:.3}"), overlap }
}

/// Sum of the seconds of all phases. With several ranks it may exceed the time of the step, since the time of each
/// phase is that of its slowest rank.
pub fn sum_of_phases(phases: &[(String, f64)]) -> f64 {
    phases.iter().map(|(_, seconds)| seconds).sum()
}

/// Mean seconds of each phase, longest first, and of the whole step. Time that no phase covers is a last phase.
pub fn phases(run: &RunFiles) -> (Vec<(String, f64)>, f64) {
    let mean = |name: &str| {
        let values = run.values(name);
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let names: BTreeSet<&String> = run.rows.iter().flat_map(|row| row.keys()).collect();
    let mut phases: Vec<(String, f64)> = names
        .into_iter()
        // `time/score/NAME` is a part of `time/score`.
        .filter(|name| !matches!(name.as_str(), "time/total" | "time/step") && name.matches('/').count() == 1)
        .filter_map(|name| Some((name.strip_prefix("time/")?.to_string(), mean(name)?)))
        .filter(|(_, seconds)| *seconds > 0.0)
        .collect();
    phases.sort_by(|a, b| b.1.total_cmp(&a.1));
    let covered = sum_of_phases(&phases);
    // The trainer measures `time/total`, with reading the data; the algorithm measures `time/step`, without.
    let total = mean("time/total").or(mean("time/step")).unwrap_or(covered);
    // Less than half a percent is left out.
    if total - covered > 0.005 * total {
        phases.push(("reading data, and the rest".into(), total - covered));
    }
    (phases, total)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_total_is_the_steps_time_even_if_phases_of_several_ranks_sum_to_more() {
        let run = RunFiles::of_rows(json!([{"time/total": 2.0, "time/step": 2.0, "time/a": 2.0, "time/b": 1.0}]));
        let (parts, total) = phases(&run);
        assert_eq!((total, sum_of_phases(&parts)), (2.0, 3.0));
        let page = timing(&run).to_string();
        assert!(page.contains("66.7") && page.contains("33.3") && page.contains("3.000"), "{page}");
        let one = timing(&RunFiles::of_rows(json!([{"time/total": 2.0, "time/a": 1.5}])));
        assert!(one.get_attr("overlap").unwrap().is_none(), "{one}");
    }
}
