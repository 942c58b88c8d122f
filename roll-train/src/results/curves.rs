//! Panels of curves from the metrics of one or several runs, for the report, and for `curves.svg`. A [`PanelSpec`] says
//! which metrics a panel shows, and becomes a [`Panel`] with the values of the runs.

use std::collections::BTreeSet;
use std::path::PathBuf;

use roll_core::{Headline, Result};
use serde_json::{Map, Value};

use super::plot::{self, Panel, Series, SeriesStyle};
use super::scores::FALLING;
use crate::metrics::read_jsonl;
use crate::run_dir::RunDir;

/// Number of steps in the running mean that is drawn.
const MEAN_STEPS: usize = 8;

/// The metrics of one run.
pub struct RunMetrics<'a> {
    /// The run's name, for legends.
    pub name: &'a str,
    /// The lines of the run's `metrics.jsonl`.
    pub rows: &'a [Map<String, Value>],
}

impl RunMetrics<'_> {
    /// `[step, value]` of a metric for each step that has it.
    pub fn of(&self, metric: &str) -> Vec<[f64; 2]> {
        self.rows.iter().filter_map(|row| Some([row.get("step")?.as_f64()?, row.get(metric)?.as_f64()?])).collect()
    }
}

/// Writes the headline metrics of a run as `curves.svg`; returns its path.
pub fn write(dir: &RunDir, headlines: &[Headline]) -> Result<PathBuf> {
    let path = dir.path().join("curves.svg");
    let rows = read_jsonl(&dir.metrics_path())?;
    plot::write(&path, &main_panels(&[RunMetrics { name: "", rows: &rows }], headlines))?;
    Ok(path)
}

/// The description of a panel: its title, and the metrics that share its axes.
pub struct PanelSpec {
    /// The panel's title.
    pub title: String,
    /// Metrics and their styles.
    pub curves: Vec<(String, CurveStyle)>,
}

/// How the values of a metric are drawn.
pub enum CurveStyle {
    /// A dot for each step, and a line for the running mean. If several runs are shown, only the running means are
    /// drawn, each named by its run.
    Steps,
    /// A line with this name.
    Line(String),
    /// The change since the first value, as a line with this name.
    Change(String),
}

impl PanelSpec {
    /// The panel of one metric, with a value for each step.
    pub fn steps(metric: &str, title: &str) -> Self {
        Self { title: title.into(), curves: vec![(metric.into(), CurveStyle::Steps)] }
    }

    /// A headline metric, with the same quantity on held-out data where it is measured.
    pub fn headline(headline: &Headline) -> Self {
        let mut spec = Self::steps(&headline.metric, &headline.title);
        if let Some(held_out) = &headline.held_out {
            let name = format!("validation, {}", held_out.data);
            spec.curves.push((held_out.metric.clone(), CurveStyle::Line(name)));
        }
        spec
    }

    /// Adds a line for each of the metrics of evaluations, named by the metric without `eval/`.
    pub fn with_evaluations(mut self, metrics: impl IntoIterator<Item = String>) -> Self {
        for metric in metrics {
            let name = metric.trim_start_matches("eval/").replace('_', " ");
            self.curves.push((metric, CurveStyle::Line(name)));
        }
        self
    }

    /// The panel with the values of the runs. It has no series if the runs do not have these metrics. If there is one
    /// run, each series has its own colour. If there are several, each run has a colour and each metric a dash pattern.
    pub fn panel(&self, runs: &[RunMetrics<'_>]) -> Panel {
        let is_one_run = runs.len() == 1;
        let mut series = Vec::new();
        // The index of the metric among the metrics that any run has.
        let mut metric_index = 0;
        for (metric, curve_style) in &self.curves {
            let series_before = series.len();
            for (run_index, run) in runs.iter().enumerate() {
                for (name, points, style) in curve_style.series(run.of(metric), is_one_run) {
                    let name = match (is_one_run, style) {
                        (true, _) => name,
                        (false, SeriesStyle::Mean(_)) => run.name.to_string(),
                        (false, _) => format!("{}: {name}", run.name),
                    };
                    let (colour, dashes) = if is_one_run { (series.len(), 0) } else { (run_index, metric_index) };
                    series.push(Series { name, points, style, colour, dashes });
                }
            }
            let has_metric = series.len() > series_before;
            if has_metric {
                metric_index += 1;
            }
        }
        Panel { title: self.title.clone(), axes: ["step".into(), String::new()], series }
    }
}

impl CurveStyle {
    /// Name, points and style of the series that draw these points; none without points.
    fn series(&self, points: Vec<[f64; 2]>, is_one_run: bool) -> Vec<(String, Vec<[f64; 2]>, SeriesStyle)> {
        let Some(&[_, first_value]) = points.first() else { return Vec::new() };
        match self {
            Self::Steps => {
                let mean = ("running mean".into(), points.clone(), SeriesStyle::Mean(MEAN_STEPS));
                if is_one_run { vec![mean, ("step".into(), points, SeriesStyle::Dots)] } else { vec![mean] }
            }
            Self::Line(name) => vec![(name.clone(), points, SeriesStyle::Line)],
            Self::Change(name) => {
                let changes = points.iter().map(|[step, value]| [*step, value - first_value]).collect();
                vec![(name.clone(), changes, SeriesStyle::Line)]
            }
        }
    }
}

/// A panel for each headline metric that the runs have. The panel of the score also shows the scores of evaluations. If
/// no headline is a score, the scores of evaluations have a panel of their own. The panel of a metric that is also
/// measured on held-out data shows both.
pub fn main_panels(runs: &[RunMetrics<'_>], headlines: &[Headline]) -> Vec<Panel> {
    let evaluations = || metric_names(runs).into_iter().filter(|name| is_evaluation(name));
    let spec = |headline: &Headline| match headline.is_score {
        true => PanelSpec::headline(headline).with_evaluations(evaluations()),
        false => PanelSpec::headline(headline),
    };
    let mut specs: Vec<PanelSpec> = headlines.iter().map(spec).collect();
    if !headlines.iter().any(|headline| headline.is_score) {
        let title = "Evaluations".into();
        specs.insert(0, PanelSpec { title, curves: Vec::new() }.with_evaluations(evaluations()));
    }
    panels(&specs, runs)
}

/// A panel for each metric that the panels of `shown` do not have. Times are left out.
pub fn other_panels(runs: &[RunMetrics<'_>], shown: &[&PanelSpec]) -> Vec<Panel> {
    let shown_metrics: BTreeSet<&String> =
        shown.iter().flat_map(|spec| &spec.curves).map(|(metric, _)| metric).collect();
    let is_other = |name: &String| name != "step" && !name.starts_with("time/") && !shown_metrics.contains(name);
    let specs: Vec<PanelSpec> =
        metric_names(runs).into_iter().filter(is_other).map(|name| PanelSpec::steps(&name, &name)).collect();
    panels(&specs, runs)
}

/// The panels that are not empty.
pub fn panels<'a>(specs: impl IntoIterator<Item = &'a PanelSpec>, runs: &[RunMetrics<'_>]) -> Vec<Panel> {
    specs.into_iter().map(|spec| spec.panel(runs)).filter(|panel| !panel.series.is_empty()).collect()
}

/// Whether a metric is a score of evaluations that can share an axis with other scores. The KL and each of several
/// checks have scales of their own.
pub fn is_evaluation(name: &str) -> bool {
    let has_own_scale = name.ends_with("_kl") || name.contains("_check_") || name == FALLING;
    name.starts_with("eval/") && !has_own_scale
}

/// The names of all metrics of the runs.
pub fn metric_names(runs: &[RunMetrics<'_>]) -> BTreeSet<String> {
    runs.iter().flat_map(|run| run.rows).flat_map(|row| row.keys().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Vec<Map<String, Value>> {
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn evaluations_share_the_panel_of_the_score_and_times_are_omitted() {
        let rows = rows(
            "{\"step\":0,\"eval/unseen\":0.5,\"eval/unseen_kl\":0}\n\
             {\"step\":1,\"actor/score\":0.6,\"time/step\":2,\"actor/skipped\":0}\n\
             {\"step\":2,\"actor/score\":null,\"eval/unseen\":0.7}",
        );
        let one = [RunMetrics { name: "a", rows: &rows }];
        let headlines = [Headline::new("actor/score", "score", "Score").score()];
        let panels = main_panels(&one, &headlines);
        assert_eq!(panels.len(), 1);
        let names: Vec<&str> = panels[0].series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["running mean", "step", "unseen"]);
        assert_eq!(panels[0].series[2].points, [[0.0, 0.5], [2.0, 0.7]]);
        let shown = PanelSpec::headline(&headlines[0]).with_evaluations(["eval/unseen".into()]);
        let others: Vec<String> = other_panels(&one, &[&shown]).into_iter().map(|p| p.title).collect();
        assert_eq!(others, ["actor/skipped", "eval/unseen_kl"]);

        let two = [RunMetrics { name: "a", rows: &rows }, RunMetrics { name: "b", rows: &rows }];
        let score = &main_panels(&two, &headlines)[0];
        assert_eq!(score.series.iter().map(|s| s.colour).collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert_eq!(score.series.iter().map(|s| s.dashes).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert_eq!(score.series[1].name, "b");
        assert_eq!(score.series[3].name, "b: unseen");
    }

    #[test]
    fn changes_are_relative_to_the_first_value() {
        let rows = rows("{\"step\":0,\"eval/unseen\":0.5}\n{\"step\":2,\"eval/unseen\":0.75}");
        let curves = vec![("eval/unseen".into(), CurveStyle::Change("reward".into()))];
        let panel = PanelSpec { title: "t".into(), curves }.panel(&[RunMetrics { name: "a", rows: &rows }]);
        assert_eq!(panel.series[0].points, [[0.0, 0.0], [2.0, 0.25]]);
    }
}
