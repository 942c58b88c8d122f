//! The mean time of a step, by phase.

use std::collections::BTreeSet;

use minijinja::{Value, context};

use super::run_files::RunFiles;
use crate::results::plot;

/// Share of a step's time by which the sum of its phases may differ from it without a word about the difference.
const NEGLIGIBLE_SHARE: f64 = 0.005;

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
    // The phases of several ranks may sum up to more than the step (see `sum_of_phases`). The page explains such a sum.
    let overlap = (sum > (1.0 + NEGLIGIBLE_SHARE) * total).then(|| format!("{sum:.3}"));
    context! { phases, total => format!("{total:.3}"), overlap }
}

/// Sum of the seconds of all phases. With several ranks it may exceed the time of the step, since the time of each
/// phase is that of its slowest rank.
pub fn sum_of_phases(phases: &[(String, f64)]) -> f64 {
    phases.iter().map(|(_, seconds)| seconds).sum()
}

/// The mean seconds of each phase, longest first, and the mean seconds of the whole step. Time that no phase covers is
/// the last phase.
pub fn phases(run: &RunFiles) -> (Vec<(String, f64)>, f64) {
    let mean = |name: &str| {
        let values = run.values(name);
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let names: BTreeSet<&String> = run.rows.iter().flat_map(|row| row.keys()).collect();
    let mut phases = Vec::new();
    for name in names {
        let Some(phase) = name.strip_prefix("time/") else { continue };
        let is_whole_step = matches!(phase, "total" | "step");
        // `time/score/NAME` is a part of the phase `time/score`.
        let is_part_of_phase = phase.contains('/');
        if let Some(seconds) = mean(name).filter(|seconds| *seconds > 0.0)
            && !is_whole_step
            && !is_part_of_phase
        {
            phases.push((phase.to_string(), seconds));
        }
    }
    phases.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let covered = sum_of_phases(&phases);
    // The trainer's `time/total` includes reading the data. The algorithm's `time/step` does not.
    let total = mean("time/total").or(mean("time/step")).unwrap_or(covered);
    let uncovered = total - covered;
    if uncovered > NEGLIGIBLE_SHARE * total {
        phases.push(("reading data, and the rest".into(), uncovered));
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
