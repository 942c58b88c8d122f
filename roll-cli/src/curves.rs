//! The curves of one or several runs, from their `metrics.jsonl`.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::plot::{Panel, Series, smoothed};

/// Steps that a smoothed curve is the mean of.
const SMOOTHING: usize = 8;
/// Metrics that have a panel of their own, and its title.
const MAIN: [(&str, &str); 8] = [
    ("actor/face_score", "Score"),
    ("env/success", "Success, fraction of episodes"),
    ("actor/kl_loss", "KL to the base model"),
    ("actor/loss", "Loss"),
    ("actor/entropy", "Entropy of tokens"),
    ("env/num_actions", "Turns of an episode"),
    ("env/action_is_valid", "Valid actions"),
    ("actor/grad_norm", "Gradient norm"),
];
/// The same on what is held out: it stands with the metric that was trained on.
const HELD_OUT: (&str, &str, &str) = ("env/success", "val/env/success", "validation, starts that were not trained on");

/// The metrics of one run.
pub struct Curves<'a> {
    /// What the run is called.
    pub name: &'a str,
    /// The lines of its `metrics.jsonl`.
    pub rows: &'a [Map<String, Value>],
}

impl Curves<'_> {
    /// Step and value of a metric, where it has one.
    pub fn of(&self, metric: &str) -> Vec<[f64; 2]> {
        self.rows.iter().filter_map(|row| Some([row.get("step")?.as_f64()?, row.get(metric)?.as_f64()?])).collect()
    }
}

/// Score or success, divergence, loss and the like, as far as there are any. Evaluations stand with the score.
pub fn main_panels(runs: &[Curves<'_>]) -> Vec<Panel> {
    let panels = MAIN.iter().map(|(metric, title)| {
        let mut panel = panel(runs, metric, title);
        if *metric == MAIN[0].0 {
            for name in names(runs).iter().filter(|n| is_evaluation(n)) {
                let label = name.trim_start_matches("eval/").replace('_', " ");
                panel.series.extend(series(runs, panel.series.len(), |run| vec![(label.clone(), run.of(name), true)]));
            }
        }
        if *metric == HELD_OUT.0 {
            let held_out = |run: &Curves<'_>| vec![(HELD_OUT.2.to_string(), run.of(HELD_OUT.1), true)];
            panel.series.extend(series(runs, panel.series.len(), held_out));
        }
        panel
    });
    panels.filter(|panel| panel.series.iter().any(|s| !s.points.is_empty())).collect()
}

/// The other metrics, without times.
pub fn other_panels(runs: &[Curves<'_>]) -> Vec<Panel> {
    let shown = |name: &str| {
        name == "step" || name == HELD_OUT.1 || is_evaluation(name) || MAIN.iter().any(|(metric, _)| *metric == name)
    };
    let names = names(runs).into_iter().filter(|name| !shown(name) && !name.starts_with("time/"));
    names.map(|name| panel(runs, &name, &name)).collect()
}

fn is_evaluation(name: &str) -> bool {
    name.starts_with("eval/") && !name.ends_with("_kl")
}

fn names(runs: &[Curves<'_>]) -> BTreeSet<String> {
    runs.iter().flat_map(|run| run.rows).flat_map(|row| row.keys().cloned()).collect()
}

/// One metric: every step as a dot and their running mean as a line; of several runs the means alone.
fn panel(runs: &[Curves<'_>], metric: &str, title: &str) -> Panel {
    let alone = runs.len() == 1;
    let series = series(runs, 0, |run| {
        let points = run.of(metric);
        let mean = (format!("mean of {SMOOTHING} steps"), smoothed(&points, SMOOTHING), true);
        match alone {
            true => vec![mean, ("step".into(), points, false)],
            false => vec![mean],
        }
    });
    Panel { title: title.into(), axes: ["step".into(), String::new()], series }
}

/// The series of each run that are not empty. Colours tell the series of one run apart, or else the runs.
fn series(
    runs: &[Curves<'_>],
    first_colour: usize,
    of: impl Fn(&Curves<'_>) -> Vec<(String, Vec<[f64; 2]>, bool)>,
) -> Vec<Series> {
    let alone = runs.len() == 1;
    let mut all = Vec::new();
    for (r, run) in runs.iter().enumerate() {
        for (i, (name, points, line)) in of(run).into_iter().enumerate().filter(|(_, s)| !s.1.is_empty()) {
            let name = if alone { name } else { format!("{}: {name}", run.name) };
            all.push(Series { name, points, line, colour: if alone { first_colour + i } else { r } });
        }
    }
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Vec<Map<String, Value>> {
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn evaluations_stand_with_the_score_and_times_nowhere() {
        let rows = rows(
            "{\"step\":0,\"eval/unseen\":0.5,\"eval/unseen_kl\":0}\n\
             {\"step\":1,\"actor/face_score\":0.6,\"time/step\":2,\"actor/skipped\":0}\n\
             {\"step\":2,\"actor/face_score\":null,\"eval/unseen\":0.7}",
        );
        let one = [Curves { name: "a", rows: &rows }];
        let panels = main_panels(&one);
        assert_eq!(panels.len(), 1);
        let names: Vec<&str> = panels[0].series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["mean of 8 steps", "step", "unseen"]);
        assert_eq!(panels[0].series[2].points, [[0.0, 0.5], [2.0, 0.7]]);
        let others: Vec<String> = other_panels(&one).into_iter().map(|p| p.title).collect();
        assert_eq!(others, ["actor/skipped", "eval/unseen_kl"]);

        let two = [Curves { name: "a", rows: &rows }, Curves { name: "b", rows: &rows }];
        let score = &main_panels(&two)[0];
        assert_eq!(score.series.iter().map(|s| s.colour).collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert_eq!(score.series[3].name, "b: unseen");
    }
}
