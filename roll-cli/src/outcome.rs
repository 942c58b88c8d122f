//! What a run leaves for people: figures before and after, curves, videos side by side, one page with everything.

use std::collections::BTreeMap;
use std::path::PathBuf;

use roll_core::run_dir::{RunDir, write_atomically};
use roll_core::{Evaluated, Result};
use roll_data::{Picture, encode_gif, encode_png, write_mp4};
use serde_json::{Value, json};

use crate::comparison;
use crate::evaluation::{self, Change, Evaluator, Results, SetName};
use crate::plot::{self, Panel, Series};
use crate::report::{self, Report};

/// Steps that a smoothed curve is the mean of.
const SMOOTHING: usize = 8;
/// Further metrics that have a curve, and its title.
const PLOTTED: [(&str, &str); 6] = [
    ("actor/kl_loss", "KL to the base model"),
    ("actor/loss", "Loss"),
    ("actor/entropy", "Entropy of tokens"),
    ("env/num_actions", "Turns of an episode"),
    ("env/action_is_valid", "Valid actions"),
    ("actor/grad_norm", "Gradient norm"),
];
/// Longer side of the comparison in the report, in pixels.
const REPORT_SIDE: usize = 1040;

/// Collected while a run goes on.
#[derive(Default)]
pub struct Outcome {
    /// Metrics of every step, from 1.
    history: Vec<(u64, BTreeMap<String, f64>)>,
    /// Evaluations by the number of steps taken before them.
    evaluations: Vec<(u64, Results)>,
    /// Metrics of validations by the number of steps taken before them.
    validations: Vec<(u64, BTreeMap<String, f64>)>,
}

/// What validations measure that has a before and an after: metric, and its name in `summary.json`.
const VALIDATED: [(&str, &str); 2] = [("val/env/success", "success"), ("val/score/mean", "score")];

/// Names of the figures in `summary.json`: for the identity reward they say what they are.
fn label(name: SetName, identity: bool) -> &'static str {
    match (name, identity) {
        (SetName::Train, true) => "identity",
        (SetName::Train, false) => "train",
        (SetName::Unseen, _) => "unseen",
    }
}

impl Outcome {
    /// Remembers the metrics of a step.
    pub fn step(&mut self, step: u64, metrics: &BTreeMap<String, f64>) {
        self.history.push((step, metrics.clone()));
    }

    /// Remembers an evaluation. The videos of all but the first and the last are dropped.
    pub fn evaluated(&mut self, step: u64, results: Results) {
        if self.evaluations.len() > 1
            && let Some((_, last)) = self.evaluations.last_mut()
        {
            last.iter_mut().flat_map(|(_, e)| e).for_each(|e| e.video = None);
        }
        self.evaluations.push((step, results));
    }

    /// Metrics of an evaluation: `eval/unseen`, `eval/unseen_check`, `eval/unseen_kl`.
    pub fn metrics(results: &Results, identity: bool) -> BTreeMap<String, f64> {
        let mut metrics = BTreeMap::new();
        for (name, evaluated) in results {
            let label = label(*name, identity);
            let values = [
                (format!("eval/{label}"), evaluation::mean_score(evaluated, 0)),
                (format!("eval/{label}_check"), evaluation::mean_score(evaluated, 1)),
                (format!("eval/{label}_kl"), evaluation::mean_kl(evaluated)),
            ];
            metrics.extend(values.into_iter().filter_map(|(name, value)| Some((name, value?))));
        }
        metrics
    }

    /// Remembers the metrics of a validation.
    pub fn validated(&mut self, step: u64, metrics: BTreeMap<String, f64>) {
        self.validations.push((step, metrics));
    }

    /// What validations measured before and after, by the names of `summary.json`.
    fn validation_ends(&self) -> Vec<(&'static str, f64, f64)> {
        let [(_, first), .., (_, last)] = self.validations.as_slice() else { return Vec::new() };
        let ends = VALIDATED.iter();
        ends.filter_map(|(metric, name)| Some((*name, *first.get(*metric)?, *last.get(*metric)?))).collect()
    }

    fn ends(&self) -> Option<(&Results, &Results)> {
        match self.evaluations.as_slice() {
            [(_, first), .., (_, last)] => Some((first, last)),
            _ => None,
        }
    }

    /// Each set before and after, by the reward (0) or by what is measured only (1).
    fn changes(&self, identity: bool) -> Vec<(String, Change)> {
        let Some((before, after)) = self.ends() else { return Vec::new() };
        let mut changes = Vec::new();
        for (reward, suffix) in [(0, ""), (1, "_check")] {
            for (name, evaluated) in before {
                if let Some(change) = evaluation::change(evaluated, evaluation::of(after, *name), reward) {
                    changes.push((format!("{}{suffix}", label(*name, identity)), change));
                }
            }
        }
        changes
    }

    /// Figures for `summary.json`: `success_before` and `success_after` of an agent, `unseen_before`, `unseen_after`, `unseen_gain` (with its confidence interval), the
    /// same for each set and for the rewards that are measured only, and `kl` after training.
    pub fn figures(&self, identity: bool) -> BTreeMap<String, Value> {
        let mut figures = BTreeMap::new();
        for (name, before, after) in self.validation_ends() {
            figures.insert(format!("{name}_before"), json!(before));
            figures.insert(format!("{name}_after"), json!(after));
        }
        for (name, change) in self.changes(identity) {
            figures.insert(format!("{name}_before"), json!(change.before));
            figures.insert(format!("{name}_after"), json!(change.after));
            figures.insert(format!("{name}_gain"), json!(change.gain));
            figures.insert(format!("{name}_clips"), json!(change.clips));
            figures.insert(format!("{name}_missing"), json!(change.missing));
        }
        if let Some(kl) = self.kl() {
            figures.insert("kl".into(), json!(kl));
        }
        figures
    }

    /// Mean divergence of the trained model from the base, over all evaluated clips.
    fn kl(&self) -> Option<f64> {
        let (_, after) = self.ends()?;
        let all: Vec<Evaluated> =
            after.iter().flat_map(|(_, e)| e).map(|e| Evaluated { video: None, ..e.clone() }).collect();
        evaluation::mean_kl(&all)
    }

    /// Lines for people.
    pub fn lines(&self, identity: bool) -> Vec<(String, String)> {
        let mut lines = Vec::new();
        for (name, before, after) in self.validation_ends() {
            lines.push((name.to_string(), format!("{before:.3} -> {after:.3}, on starts that were not trained on")));
        }
        for (name, Change { clips, missing, before, after, gain }) in self.changes(identity) {
            let [low, high] = gain.ci95;
            let gone = if missing > 0 { format!(", {missing} without a score") } else { String::new() };
            lines.push((
                name.replace('_', " "),
                format!(
                    "{before:.3} -> {after:.3}, {:+.3} (95 % {low:+.3} to {high:+.3}; {clips} clips{gone})",
                    gain.mean
                ),
            ));
        }
        if let Some(kl) = self.kl() {
            lines.push(("kl".into(), format!("{kl:.3e}")));
        }
        lines
    }

    /// Writes videos, curves and the report; returns name and path of what a person would open.
    pub fn write(
        &self,
        dir: &RunDir,
        title: &str,
        config: &str,
        evaluator: Option<&Evaluator>,
        identity: bool,
    ) -> Result<Vec<(&'static str, PathBuf)>> {
        let mut written = Vec::new();
        let curves = dir.path().join("curves.png");
        plot::write(&curves, &self.panels(identity))?;
        written.push(("curves", curves.clone()));
        let mut gif = None;
        if let (Some((before, after)), Some(evaluator)) = (self.ends(), evaluator) {
            for (moment, results) in [("before", before), ("after", after)] {
                let folder = dir.path().join("samples").join(moment);
                std::fs::create_dir_all(&folder).map_err(roll_core::Error::file("create the directory", &folder))?;
                for (name, evaluated) in results {
                    for (i, video) in evaluated.iter().enumerate().filter_map(|(i, e)| Some((i, e.video.as_ref()?))) {
                        write_mp4(folder.join(format!("{}-{i:03}.mp4", label(*name, identity))), video)?;
                    }
                }
                written.push((moment, folder));
            }
            let shown = before.last().map_or(SetName::Train, |(name, _)| *name);
            let grid = comparison::grid(
                evaluator.samples(shown),
                evaluation::of(before, shown),
                evaluation::of(after, shown),
            )?;
            if let Some(grid) = grid {
                let path = dir.path().join("comparison.mp4");
                write_mp4(&path, &grid)?;
                written.push(("comparison", path));
                let last = Picture::from_frame(&grid, grid.dims()[0] - 1);
                write_atomically(&dir.path().join("comparison.png"), &encode_png(&last)?)?;
                gif = Some(encode_gif(&grid, REPORT_SIDE)?);
            }
        }
        let curves = std::fs::read(&curves).map_err(roll_core::Error::file("read", &curves))?;
        let page = dir.path().join("report.html");
        let mut figures = self.lines(identity);
        if let Some((steps, last)) = self.history.last() {
            figures.push(("steps".into(), steps.to_string()));
            figures.extend(last.iter().map(|(name, value)| (format!("{name}, last step"), format!("{value:.4}"))));
        }
        let report = Report { title, figures: &figures, comparison: gif.as_deref(), curves: Some(&curves), config };
        report::write(&page, &report)?;
        written.push(("report", page));
        Ok(written)
    }

    fn panels(&self, identity: bool) -> Vec<Panel> {
        let of = |metric: &str| -> Vec<[f64; 2]> {
            self.history.iter().filter_map(|(step, m)| Some([*step as f64, *m.get(metric)?])).collect()
        };
        let steps = |y: &str| ["step".to_string(), y.to_string()];
        let mut panels = Vec::new();
        let success = of("env/success");
        let validated = |metric: &str| -> Vec<[f64; 2]> {
            self.validations.iter().filter_map(|(step, m)| Some([*step as f64, *m.get(metric)?])).collect()
        };
        if !success.is_empty() {
            let series = vec![
                Series {
                    name: "validation, starts that were not trained on".into(),
                    points: validated("val/env/success"),
                    line: true,
                },
                Series {
                    name: format!("training, mean of {SMOOTHING} steps"),
                    points: plot::smoothed(&success, SMOOTHING),
                    line: true,
                },
                Series { name: "training, step".into(), points: success, line: false },
            ];
            panels.push(Panel { title: "Success".into(), axes: steps("fraction of episodes"), series });
        }
        let score = of("actor/face_score");
        if !score.is_empty() || !self.evaluations.is_empty() {
            let mut series = vec![
                Series {
                    name: format!("mean of {SMOOTHING} steps"),
                    points: plot::smoothed(&score, SMOOTHING),
                    line: true,
                },
                Series { name: "step".into(), points: score, line: false },
            ];
            let mut sets: BTreeMap<String, Vec<[f64; 2]>> = BTreeMap::new();
            for (step, results) in &self.evaluations {
                for (name, value) in Self::metrics(results, identity).into_iter().filter(|(n, _)| !n.ends_with("_kl")) {
                    sets.entry(name).or_default().push([*step as f64, value]);
                }
            }
            series.extend(sets.into_iter().map(|(name, points)| Series {
                name: name.trim_start_matches("eval/").replace('_', " "),
                points,
                line: true,
            }));
            panels.push(Panel { title: "Score".into(), axes: steps("score"), series });
        }
        for (metric, title) in PLOTTED {
            let points = of(metric);
            if !points.is_empty() {
                let smooth = Series {
                    name: format!("mean of {SMOOTHING} steps"),
                    points: plot::smoothed(&points, SMOOTHING),
                    line: true,
                };
                let series = vec![smooth, Series { name: "step".into(), points, line: false }];
                panels.push(Panel { title: title.into(), axes: steps(""), series });
            }
        }
        panels
    }
}
