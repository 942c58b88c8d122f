//! One HTML page that shows a run, or compares several. It contains all that it shows: it needs no other file or
//! server.

mod figures;
mod questions;
mod source;
mod timing;
mod videos;
mod warnings;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value};
use roll_core::{Error, Headline, Result};
use roll_external::files::write_atomically;
use serde::Serialize;

use super::curves::{self, Curves, Sketch};
use super::plot;
use source::Source;

/// The values of `page.html`.
#[derive(Serialize)]
struct Page<'a> {
    title: String,
    /// Whether the page compares several runs.
    several: bool,
    runs: Vec<Run<'a>>,
    figures: Vec<figures::Row>,
    clips: videos::Clips,
    questions: Vec<Question>,
    other_panels: Vec<Panel>,
    /// Settings in which the runs differ, with one value per run.
    differences: Vec<figures::Row>,
    /// CSS variables of the colours on a light page and on a dark one.
    palettes: [Value; 2],
}

#[derive(Serialize)]
struct Question {
    title: &'static str,
    id: &'static str,
    answers: Vec<questions::Answer>,
    panels: Vec<Panel>,
}

#[derive(Serialize)]
struct Run<'a> {
    name: &'a str,
    status: String,
    warnings: Vec<String>,
    samples: Vec<videos::TrainingSample>,
    timing: timing::Timing,
    /// The text of `config.yaml`.
    config: &'a str,
}

#[derive(Serialize)]
struct Panel {
    title: String,
    /// Empty for a single series.
    legend: Vec<Key>,
    svg: Value,
}

#[derive(Serialize)]
struct Key {
    name: String,
    colour: String,
    line: bool,
}

/// Writes the page of the runs in these directories.
pub fn write(path: &Path, runs: &[PathBuf]) -> Result<()> {
    let mut sources = runs.iter().map(|run| Source::read(run)).collect::<Result<Vec<_>>>()?;
    disambiguate(&mut sources);
    let html = render(&page(&sources)?).map_err(|e| Error::Misuse(format!("rendering the report: {e:#}")))?;
    write_atomically(path, html.as_bytes())
}

/// Names runs of the same name by their whole path.
fn disambiguate(sources: &mut [Source]) {
    let names: Vec<String> = sources.iter().map(|s| s.name.clone()).collect();
    for source in sources.iter_mut().filter(|s| names.iter().filter(|n| **n == s.name).count() > 1) {
        source.name = source.path.display().to_string();
    }
}

fn render(page: &Page<'_>) -> std::result::Result<String, minijinja::Error> {
    let mut environment = Environment::new();
    // Names and reasons come from other people's data.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.add_template("page.css", include_str!("page.css"))?;
    environment.add_template("page.js", include_str!("page.js"))?;
    environment.add_template("page.html", include_str!("page.html"))?;
    environment.get_template("page.html")?.render(page)
}

fn page(sources: &[Source]) -> Result<Page<'_>> {
    let mut budget = videos::Budget::default();
    let clips = videos::clips(sources, &mut budget)?;
    let runs = sources.iter().map(|run| {
        Ok(Run {
            name: &run.name,
            status: figures::status(run),
            warnings: warnings::warnings(run),
            samples: videos::training_samples(run, &mut budget)?,
            timing: timing::timing(run),
            config: &run.config,
        })
    });
    let runs = runs.collect::<Result<Vec<_>>>()?;

    let mut headlines: Vec<Headline> = Vec::new();
    for headline in sources.iter().flat_map(|run| &run.headlines) {
        if !headlines.iter().any(|known| known.metric == headline.metric) {
            headlines.push(headline.clone());
        }
    }
    let curves: Vec<Curves<'_>> = sources.iter().map(|run| Curves { name: &run.name, rows: &run.rows }).collect();
    let questions = questions::questions(sources, &curves, &headlines);
    let shown: Vec<&Sketch> = questions.iter().flat_map(|question| &question.sketches).collect();
    let other_panels = panels(curves::other_panels(&curves, &shown))?;
    let questions = questions.into_iter().map(|question| {
        let panels = panels(curves::drawn(&question.sketches, &curves))?;
        Ok(Question { title: question.title, id: question.id, answers: question.answers, panels })
    });
    Ok(Page {
        title: sources.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", "),
        several: sources.len() > 1,
        runs,
        figures: figures::table(sources),
        clips,
        questions: questions.collect::<Result<_>>()?,
        other_panels,
        differences: differences(sources),
        palettes: plot::css_palettes().map(Value::from_safe_string),
    })
}

fn panels(panels: Vec<plot::Panel>) -> Result<Vec<Panel>> {
    let panel = |panel: plot::Panel| -> Result<Panel> {
        let svg = Value::from_safe_string(plot::svg(&panel)?);
        let legend =
            panel.series.into_iter().map(|s| Key { name: s.name, colour: plot::css_colour(s.colour), line: s.line });
        let mut legend: Vec<Key> = legend.collect();
        if legend.len() == 1 {
            legend.clear();
        }
        Ok(Panel { title: panel.title, legend, svg })
    };
    panels.into_iter().map(panel).collect()
}

/// Settings in which the runs differ. A run without a setting has an empty value.
fn differences(runs: &[Source]) -> Vec<figures::Row> {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    let row = |key: &String| figures::Row {
        name: key.clone(),
        values: runs.iter().map(|run| run.settings.get(key).cloned().unwrap_or_default()).collect(),
    };
    keys.into_iter().map(row).filter(|row| row.values.iter().any(|value| *value != row.values[0])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(dir: &Path, name: &str, learning_rate: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::create_dir_all(path.join("samples/before")).unwrap();
        let config = format!("exp_name: \"a<script>\"\nsteps: 3\ntraining:\n  learning_rate: {learning_rate}\n");
        std::fs::write(path.join("config.yaml"), config).unwrap();
        let rows = "{\"step\":1,\"actor/loss\":0.5,\"actor/grad_norm\":3.0,\"time/pull\":1.5,\"time/total\":2.0}\n\
                    {\"step\":2,\"actor/loss\":null,\"actor/grad_norm\":0.5,\"actor/skipped\":1,\"time/total\":2.0}\n";
        std::fs::write(path.join("metrics.jsonl"), rows).unwrap();
        std::fs::write(path.join("samples/before/unseen-000.mp4"), "no video").unwrap();
        path
    }

    #[test]
    fn a_run_that_is_not_over_is_shown_with_its_warnings_and_nothing_from_outside() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(dir.path(), "r<b>un", "1e-5");
        let page = dir.path().join("report.html");
        write(&page, &[run]).unwrap();
        let html = std::fs::read_to_string(page).unwrap();
        assert!(html.contains("a&lt;script&gt;") && html.contains("r&lt;b&gt;un") && !html.contains("<b>un"), "{html}");
        for said in [
            "2 of 3 steps",
            "1 sample was left out",
            "clipped in 1 of 2",
            "data:video/mp4;base64,bm8gdmlkZW8=",
            "Is it learning?",
            "1 metric not finite at some step",
            "2.0 s a step: pull 75 %",
            "1 step left: 2 s",
            "prefers-color-scheme: dark",
        ] {
            assert!(html.contains(said), "no {said} in: {html}");
        }
        // Without a reward and its KL there is nothing to hack.
        assert!(!html.contains("Is it hacking"), "{html}");
        assert!(!html.contains("http://") && !html.contains("https://") && !html.contains("src=\"/"));
    }

    #[test]
    fn figures_are_escaped_and_paths_may_break_behind_a_slash() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(dir.path(), "r", "1e-5");
        let summary = r#"{"seconds": 1.0, "parameters": 319488, "adapter": ["a<i>/step/adapter.safetensors"]}"#;
        std::fs::write(run.join("summary.json"), summary).unwrap();
        let page = dir.path().join("report.html");
        write(&page, &[run]).unwrap();
        let html = std::fs::read_to_string(page).unwrap();
        assert!(html.contains("319,488"), "{html}");
        assert!(html.contains("a&lt;i&gt;/<wbr>step/<wbr>adapter.safetensors"), "{html}");
    }

    #[test]
    fn runs_are_compared_by_what_differs() {
        let dir = tempfile::tempdir().unwrap();
        let runs = [run(dir.path(), "a", "1e-5"), run(dir.path(), "b", "2e-5")];
        let page = dir.path().join("report.html");
        write(&page, &runs).unwrap();
        let html = std::fs::read_to_string(&page).unwrap();
        let differs = html.split("What differs").nth(1).unwrap().split("</table>").next().unwrap().to_string();
        assert!(differs.contains("training.learning_rate") && !differs.contains("steps"), "{differs}");
        assert!(html.contains("a: mean of 8 steps"));
        assert!(write(&page, &[dir.path().join("none")]).is_err());
    }
}
