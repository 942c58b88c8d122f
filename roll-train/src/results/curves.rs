//! Panels of curves from the `metrics.jsonl` of one or several runs, and `curves.png`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use roll_core::{Headline, Result};
use serde_json::{Map, Value};

use super::plot::{self, Panel, Series};
use crate::evaluation::hacking::FALLING;
use crate::metrics::read_jsonl;
use crate::run_dir::RunDir;

/// A smoothed curve is the running mean of this many steps.
const SMOOTHING: usize = 8;

/// The metrics of one run.
pub struct Curves<'a> {
    /// The run's name, for legends.
    pub name: &'a str,
    /// The lines of its `metrics.jsonl`.
    pub rows: &'a [Map<String, Value>],
}

impl Curves<'_> {
    /// Step and value of a metric at each step that has it.
    pub fn of(&self, metric: &str) -> Vec<[f64; 2]> {
        self.rows.iter().filter_map(|row| Some([row.get("step")?.as_f64()?, row.get(metric)?.as_f64()?])).collect()
    }
}

/// Writes the headline metrics of a run as `curves.png`; returns its path.
pub fn write(dir: &RunDir, headlines: &[Headline]) -> Result<PathBuf> {
    let path = dir.path().join("curves.png");
    let rows = read_jsonl(&dir.metrics_path())?;
    plot::write(&path, &main_panels(&[Curves { name: "", rows: &rows }], headlines))?;
    Ok(path)
}

/// A panel for each headline metric that the runs have. The score's panel also shows evaluations, and the panel of a
/// metric that is also measured on held-out data shows both.
pub fn main_panels(runs: &[Curves<'_>], headlines: &[Headline]) -> Vec<Panel> {
    let mut panels: Vec<Panel> = headlines.iter().map(|headline| headline_panel(runs, headline)).collect();
    if !headlines.iter().any(|headline| headline.is_score) {
        panels.insert(
            0,
            Panel { title: "Evaluations".into(), axes: ["step".into(), String::new()], series: evaluations(runs, 0) },
        );
    }
    panels.retain(|panel| panel.series.iter().any(|s| !s.points.is_empty()));
    panels
}

fn headline_panel(runs: &[Curves<'_>], headline: &Headline) -> Panel {
    let mut panel = panel(runs, &headline.metric, &headline.title);
    if headline.is_score {
        panel.series.extend(evaluations(runs, panel.series.len()));
    }
    if let Some(held_out) = &headline.held_out {
        let label = format!("validation, {}", held_out.data);
        let points = |run: &Curves<'_>| vec![(label.clone(), run.of(&held_out.metric), true)];
        panel.series.extend(series(runs, panel.series.len(), points));
    }
    panel
}

/// The scores of evaluations, one series per set.
fn evaluations(runs: &[Curves<'_>], first_colour: usize) -> Vec<Series> {
    let mut all = Vec::new();
    for name in names(runs).iter().filter(|n| is_evaluation(n)) {
        let label = name.trim_start_matches("eval/").replace('_', " ");
        all.extend(series(runs, first_colour + all.len(), |run| vec![(label.clone(), run.of(name), true)]));
    }
    all
}

/// A panel for each other metric. Times are left out.
pub fn other_panels(runs: &[Curves<'_>], headlines: &[Headline]) -> Vec<Panel> {
    let is_headline = |name: &str| {
        headlines
            .iter()
            .any(|h| h.metric == name || h.held_out.as_ref().is_some_and(|held_out| held_out.metric == name))
    };
    let shown = |name: &str| name == "step" || is_evaluation(name) || is_headline(name);
    let names = names(runs).into_iter().filter(|name| !shown(name) && !name.starts_with("time/"));
    names.map(|name| panel(runs, &name, &name)).collect()
}

/// Scores that share an axis; each of several checks has a scale of its own.
fn is_evaluation(name: &str) -> bool {
    let apart = name.ends_with("_kl") || name.contains("_check_") || name == FALLING;
    name.starts_with("eval/") && !apart
}

fn names(runs: &[Curves<'_>]) -> BTreeSet<String> {
    runs.iter().flat_map(|run| run.rows).flat_map(|row| row.keys().cloned()).collect()
}

/// The panel of one metric: each step as a dot and the running mean as a line; of several runs only the running means.
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

/// The series of each run that are not empty. Each series of a single run has its own colour; of several runs, each run.
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

/// Means over a window of `width` points that ends at each point.
fn smoothed(points: &[[f64; 2]], width: usize) -> Vec<[f64; 2]> {
    let window = |i: usize| &points[(i + 1).saturating_sub(width.max(1))..=i];
    let mean = |i: usize| window(i).iter().map(|p| p[1]).sum::<f64>() / window(i).len() as f64;
    (0..points.len()).map(|i| [points[i][0], mean(i)]).collect()
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
             {\"step\":1,\"actor/score\":0.6,\"time/step\":2,\"actor/skipped\":0}\n\
             {\"step\":2,\"actor/score\":null,\"eval/unseen\":0.7}",
        );
        let one = [Curves { name: "a", rows: &rows }];
        let headlines = [Headline::new("actor/score", "score", "Score").score()];
        let panels = main_panels(&one, &headlines);
        assert_eq!(panels.len(), 1);
        let names: Vec<&str> = panels[0].series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["mean of 8 steps", "step", "unseen"]);
        assert_eq!(panels[0].series[2].points, [[0.0, 0.5], [2.0, 0.7]]);
        let others: Vec<String> = other_panels(&one, &headlines).into_iter().map(|p| p.title).collect();
        assert_eq!(others, ["actor/skipped", "eval/unseen_kl"]);

        let two = [Curves { name: "a", rows: &rows }, Curves { name: "b", rows: &rows }];
        let score = &main_panels(&two, &headlines)[0];
        assert_eq!(score.series.iter().map(|s| s.colour).collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert_eq!(score.series[3].name, "b: unseen");
    }

    #[test]
    fn smoothing_takes_the_mean_of_what_came_before() {
        let points: Vec<[f64; 2]> = [1.0, 3.0, 5.0].iter().enumerate().map(|(i, &y)| [i as f64, y]).collect();
        assert_eq!(smoothed(&points, 2), [[0.0, 1.0], [1.0, 2.0], [2.0, 4.0]]);
    }
}
