//! Numbers of the report: how far a run came, what it reached, what was left out, where the time went.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde_json::Value;

use super::source::Source;
use super::{chart, escaped};

/// A larger part of the pixels at the decoder's clamp is worth a word.
const CLAMPED: f64 = 0.1;

/// How far the run came.
pub fn status(run: &Source) -> String {
    let (done, wanted) = run.steps();
    let seconds = match &run.summary {
        Some(summary) => summary.get("seconds").and_then(Value::as_f64).unwrap_or_default(),
        None => run.values("time/total").iter().sum(),
    };
    let of = wanted.map(|wanted| format!(" of {wanted}")).unwrap_or_default();
    let over = if run.summary.is_some() && wanted.is_none_or(|wanted| done >= wanted) { "" } else { ", not finished" };
    format!("{}: {done}{of} steps in {seconds:.0} s{over}", run.path.display())
}

/// What the user should know before trusting the curves.
pub fn warnings(run: &Source) -> Vec<String> {
    let mut warnings = Vec::new();
    let sum = |metric: &str| run.values(metric).iter().sum::<f64>() as u64;
    let skipped = sum("actor/skipped").max(run.record.skipped_samples);
    if skipped > 0 {
        let mut text = match skipped {
            1 => "1 sample was left out".to_string(),
            n => format!("{n} samples were left out"),
        };
        let mut reasons: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
        for left_out in &run.record.skipped {
            reasons.entry(&left_out.reason).or_insert((0, &left_out.sample)).0 += 1;
        }
        for (reason, (count, sample)) in reasons {
            let _ = write!(text, "; {count} times: {reason} (first {sample})");
        }
        warnings.push(text);
    }
    if run.record.skipped_updates > 0 {
        let n = run.record.skipped_updates;
        warnings.push(format!("{n} updates were left out because nothing was scored or a value was not finite"));
    }
    let norms = run.values("actor/grad_norm");
    let limit = run.number("training.max_grad_norm").filter(|limit| *limit > 0.0);
    if let Some(limit) = limit {
        let clipped = norms.iter().filter(|norm| **norm > limit).count();
        if clipped > 0 {
            warnings.push(format!(
                "gradients were clipped in {clipped} of {} steps: their norm is above training.max_grad_norm ({limit})",
                norms.len()
            ));
        }
    }
    let lost: BTreeSet<&str> = run
        .rows
        .iter()
        .flat_map(|row| row.iter().filter(|(_, value)| value.is_null()).map(|(name, _)| name.as_str()))
        .collect();
    if !lost.is_empty() {
        warnings.push(format!("not finite at some step: {}", lost.into_iter().collect::<Vec<_>>().join(", ")));
    }
    let clamped = run.values("actor/clamped_fraction");
    let mean = clamped.iter().sum::<f64>() / clamped.len().max(1) as f64;
    if mean > CLAMPED {
        warnings.push(format!(
            "{:.0} % of the pixels are black or white at the end of the range, where no gradient passes",
            100.0 * mean
        ));
    }
    warnings
}

/// Figures of `summary.json`, or else the last values; a column per run.
pub fn table(runs: &[Source]) -> String {
    let columns: Vec<BTreeMap<String, String>> = runs.iter().map(of).collect();
    let names: BTreeSet<&String> = columns.iter().flat_map(BTreeMap::keys).collect();
    let mut html = String::from("<h2>Figures</h2>\n<div class=\"wide\"><table>\n");
    if runs.len() > 1 {
        html += "<tr><th></th>";
        runs.iter().for_each(|run| html += &format!("<th>{}</th>", escaped(&run.name)));
        html += "</tr>\n";
    }
    for name in names {
        let _ = write!(html, "<tr><td>{}</td>", escaped(name));
        for column in &columns {
            let _ = write!(html, "<td>{}</td>", escaped(column.get(name).map_or("", String::as_str)));
        }
        html += "</tr>\n";
    }
    html + "</table></div>\n"
}

fn number(value: f64) -> String {
    match value.abs() {
        v if v != 0.0 && !(1e-3..1e5).contains(&v) => format!("{value:.2e}"),
        _ => format!("{value:.4}"),
    }
}

fn of(run: &Source) -> BTreeMap<String, String> {
    let mut figures = BTreeMap::new();
    let summary = run.summary.clone().unwrap_or_default();
    for (name, before) in summary.iter().filter_map(|(name, v)| Some((name.strip_suffix("_before")?, v.as_f64()?))) {
        let number = |suffix: &str| summary.get(&format!("{name}_{suffix}")).and_then(Value::as_f64);
        let gain = summary.get(&format!("{name}_gain"));
        let mut text = format!("{before:.4} \u{2192} {:.4}", number("after").unwrap_or(f64::NAN));
        if let Some((mean, low, high)) =
            gain.and_then(|g| Some((g["mean"].as_f64()?, g["ci95"][0].as_f64()?, g["ci95"][1].as_f64()?)))
        {
            let clips = number("clips").unwrap_or_default();
            let _ = write!(text, ", {mean:+.4} (95 % {low:+.4} to {high:+.4}; {clips} clips)");
        }
        figures.insert(name.replace('_', " "), text);
    }
    for headline in run.headlines.iter().filter(|headline| !headline.label.is_empty()) {
        if let [first, .., last] = run.values(&headline.metric)[..] {
            let name = format!("{}, training", headline.label);
            figures.insert(name, format!("{} \u{2192} {}", number(first), number(last)));
        }
    }
    if let Some(kl) = summary.get("kl").and_then(Value::as_f64) {
        figures.insert("kl".into(), number(kl));
    }
    if let Some(parameters) = summary.get("parameters").and_then(Value::as_u64) {
        figures.insert("trainable parameters".into(), parameters.to_string());
    }
    if let Some([adapter, ..]) = summary.get("adapter").and_then(Value::as_array).map(Vec::as_slice) {
        figures.insert("weights".into(), adapter.as_str().unwrap_or_default().into());
    }
    figures
}

/// Where the time of a step went, in the mean.
pub fn timing(runs: &[Source]) -> String {
    let mut html = String::from("<h2>Time of a step</h2>\n");
    for run in runs {
        let (parts, total) = phases(run);
        if parts.is_empty() {
            continue;
        }
        if runs.len() > 1 {
            let _ = writeln!(html, "<p><b>{}</b></p>", escaped(&run.name));
        }
        html += &chart::bar(&parts);
        html += "<table>\n";
        for (i, (name, seconds)) in parts.iter().enumerate() {
            let _ = writeln!(
                html,
                "<tr><td><span class=\"swatch\" style=\"background:{}\"></span>{}</td><td>{seconds:.3} s</td>\
                 <td>{:.1} %</td></tr>",
                chart::part_colour(i),
                escaped(name),
                100.0 * seconds / total
            );
        }
        let _ = writeln!(html, "<tr><td><b>whole step</b></td><td>{total:.3} s</td><td></td></tr>\n</table>");
    }
    html
}

/// Mean seconds of each phase, and of the whole step. What no phase covers is a phase too.
fn phases(run: &Source) -> (Vec<(String, f64)>, f64) {
    let mean = |name: &str| {
        let values = run.values(name);
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let names: BTreeSet<&String> = run.rows.iter().flat_map(|row| row.keys()).collect();
    let mut parts: Vec<(String, f64)> = names
        .into_iter()
        .filter(|name| !matches!(name.as_str(), "time/total" | "time/step"))
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
