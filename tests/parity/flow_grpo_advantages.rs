//! Advantages of groups of rewards, and which of a group are trained.

use roll_video::policy_gradient::advantages::{
    Floor, GroupStatistics, Normalization, Spread, best_and_worst, normalized, normalized_apart,
};
use serde::Deserialize;
use serde_json::Value;

use crate::case::{Case, Outcome, Report};
use crate::exact::{Exact, entries, wide};

#[derive(Deserialize)]
struct Entry {
    index: usize,
    variant: String,
    inputs: String,
    #[serde(default)]
    prompts: Vec<String>,
    #[serde(default)]
    global_std: bool,
    by_std: Option<bool>,
    group: Option<usize>,
    #[serde(default)]
    weights: Vec<f64>,
    best_of_n: Option<usize>,
    #[serde(default)]
    selected: Vec<usize>,
    #[serde(default)]
    metrics: Value,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let inputs = case.tensors("inputs.safetensors")?;
    let mut exact = Exact::open(case)?;
    for entry in entries::<Entry>(case)? {
        let name = format!("{:03}.advantages", entry.index);
        let rewards = wide(&inputs, &format!("{}.rewards", entry.inputs))?;
        let some = |values: &[f64]| values.iter().copied().map(Some).collect::<Vec<Option<f64>>>();
        let spread = if entry.global_std { Spread::Step } else { Spread::Group };
        match entry.variant.as_str() {
            "flow_grpo" => {
                // `[N, steps]`: each column on its own.
                let columns = rewards.len() / entry.prompts.len();
                let mut found = vec![0.0; rewards.len()];
                for column in 0..columns {
                    let own: Vec<f64> = rewards.iter().copied().skip(column).step_by(columns).collect();
                    let own = normalized(&some(&own), &entry.prompts, Normalization::new(spread));
                    own.into_iter().enumerate().for_each(|(i, a)| found[i * columns + column] = a);
                }
                exact.compare(&name, &found)?;
                metrics(&entry, &some(&rewards), &found, columns, &mut exact);
            }
            "verl" => {
                let spread = if entry.by_std == Some(false) { Spread::None } else { spread };
                let how = Normalization { spread, unbiased: true, floor: Floor::Added(1e-4) };
                exact.compare(&name, &normalized(&some(&rewards), &entry.prompts, how))?;
            }
            "dance" => {
                let how = Normalization { spread: Spread::Group, unbiased: true, floor: Floor::Added(1e-8) };
                let size = entry.group.ok_or("no size of groups")?;
                let groups: Vec<usize> = (0..rewards.len()).map(|i| i / size).collect();
                exact.compare(&name, &normalized(&some(&rewards), &groups, how))?;
            }
            "sum" => {
                let how = Normalization { spread, unbiased: false, floor: Floor::AtLeast(1e-6) };
                let n = entry.prompts.len();
                let sum = |i: usize| entry.weights.iter().enumerate().map(|(k, w)| w * rewards[k * n + i]).sum();
                let sums: Vec<f64> = (0..n).map(sum).collect();
                exact.compare(&name, &normalized(&some(&sums), &entry.prompts, how))?;
            }
            "gdpo" => {
                let apart: Vec<_> = rewards.chunks_exact(entry.prompts.len()).map(some).collect();
                exact.compare(&name, &normalized_apart(&apart, &entry.weights, &entry.prompts, Spread::Group))?;
            }
            "best_of_n" => {
                let found = best_and_worst(&some(&rewards), entry.best_of_n.ok_or("no number of samples")?);
                let same = found == entry.selected;
                exact.report.check(same, || format!("case {}: {found:?}, not {:?}", entry.index, entry.selected));
            }
            other => return Err(format!("an unknown variant, `{other}`").into()),
        }
    }
    Ok(exact.report)
}

fn metrics(entry: &Entry, scores: &[Option<f64>], advantages: &[f64], columns: usize, exact: &mut Exact) {
    if columns != 1 || entry.metrics.is_null() {
        return;
    }
    let statistics = GroupStatistics::of(scores, &entry.prompts);
    let groups = statistics.groups as f64;
    exact.metric(&entry.metrics, "group_size", scores.len() as f64 / groups);
    exact.metric(&entry.metrics, "trained_prompt_num", groups);
    exact.metric(&entry.metrics, "zero_std_ratio", statistics.uninformative as f64 / groups);
    exact.metric(&entry.metrics, "reward_std_mean", statistics.deviation);
    exact.metric(&entry.metrics, "nonzero", advantages.iter().filter(|a| **a != 0.0).count() as f64);
}
