//! One HTML page that shows a run, or compares several. It needs no other file and no server.
//!
//! `run_files` reads the files that runs have written. `questions`, `figures`, `videos`, `episodes`, `timing` and
//! `warnings` make the parts of the page from them, and `charts` its curves. `page.html`, `page.css`, `page.js`,
//! `enlarge.js` and `charts.js` are the template. [`live`] is the same page while the runs go on, with `live.html`,
//! `live.css` and `live.js`. `vote.html`, `vote.css` and `vote.js` are the page on which people vote.

pub mod live;

mod charts;
mod episodes;
mod figures;
mod questions;
mod run_files;
mod timing;
mod videos;
mod warnings;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value, context};
use roll_core::{Error, Headline, Result};
use roll_external::files::write_atomically;

use super::curves::{self, PanelSpec, RunMetrics};
use super::plot;
use run_files::RunFiles;
use videos::Videos;

/// Writes the page of the runs in the directories `runs` to the file at `path`.
pub fn write(path: &Path, runs: &[PathBuf]) -> Result<()> {
    let mut files = runs.iter().map(|run| RunFiles::read(run)).collect::<Result<Vec<_>>>()?;
    disambiguate(&mut files);
    let not_live = Value::from(());
    let html = html(&files, not_live, Videos::Embedded { budget: videos::MAX_PAGE_BYTES })?;
    write_atomically(path, html.as_bytes())
}

/// The page of these runs. `live` has the values of `live.html` for a page that `roll watch` serves; `()` for a file.
fn html(files: &[RunFiles], live: Value, videos: Videos<'_>) -> Result<String> {
    render("page.html", &context! { live, ..page(files, videos)? })
}

/// Changes the names of runs that have the same name to their paths.
fn disambiguate(runs: &mut [RunFiles]) {
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    for run in runs.iter_mut().filter(|run| names.iter().filter(|name| **name == run.name).count() > 1) {
        run.name = run.path.display().to_string();
    }
}

/// Renders a template with values.
fn render(template: &str, values: &Value) -> Result<String> {
    let rendered = environment().and_then(|environment| environment.get_template(template)?.render(values));
    rendered.map_err(|e| Error::Misuse(format!("rendering {template}: {e:#}")))
}

/// The templates and their filters.
fn environment() -> std::result::Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    // Every value is escaped, because names and reasons come from other people's data.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.add_filter("code", code);
    environment.add_filter("parts", parts);
    environment.add_template("page.css", include_str!("page.css"))?;
    environment.add_template("page.js", include_str!("page.js"))?;
    environment.add_template("charts.js", include_str!("charts.js"))?;
    environment.add_template("enlarge.js", include_str!("enlarge.js"))?;
    environment.add_template("page.html", include_str!("page.html"))?;
    environment.add_template("live.css", include_str!("live.css"))?;
    environment.add_template("live.js", include_str!("live.js"))?;
    environment.add_template("live.html", include_str!("live.html"))?;
    environment.add_template("vote.css", include_str!("vote.css"))?;
    environment.add_template("vote.js", include_str!("vote.js"))?;
    environment.add_template("vote.html", include_str!("vote.html"))?;
    Ok(environment)
}

/// The filter `code` of the template: the text as HTML, in which text between backticks is code.
fn code(text: String) -> Value {
    let escaped = minijinja::HtmlEscape(&text).to_string();
    let mut html = String::new();
    for (i, piece) in escaped.split('`').enumerate() {
        let is_between_backticks = i % 2 == 1;
        html += &if is_between_backticks { format!("<code>{piece}</code>") } else { piece.to_string() };
    }
    Value::from_safe_string(html)
}

/// The filter `parts` of the template: the text of a table's cell as HTML that breaks lines only between parts. A comma
/// ends a part, and a bracket begins one, so that no number is torn apart. Paths and other long parts may break within,
/// paths after each slash.
fn parts(text: String) -> Value {
    /// Maximum number of bytes of a part that never breaks.
    const MAX_UNBROKEN: usize = 30;
    /// A slash in escaped HTML.
    const SLASH: &str = "&#x2f;";
    let to_html = |part: &str| {
        let escaped = minijinja::HtmlEscape(part).to_string();
        let may_break = escaped.contains(SLASH) || part.len() > MAX_UNBROKEN;
        match may_break {
            true => escaped.replace(SLASH, "/<wbr>"),
            false => format!("<span class=\"part\">{escaped}</span>"),
        }
    };
    // One line for each part.
    let lines = text.replace(" (", "\n(").replace(", ", ",\n");
    Value::from_safe_string(lines.lines().map(to_html).collect::<Vec<_>>().join(" "))
}

/// The values of `page.html` for the runs with these files.
fn page(files: &[RunFiles], mut source: Videos<'_>) -> Result<Value> {
    let clips = videos::clips(files, &mut source)?;
    let runs = files.iter().map(|run| {
        let texts = episodes::Texts::read(&run.path)?;
        Ok(context! {
            name => run.name,
            status => figures::status(run),
            warnings => warnings::warnings(run),
            samples => videos::training_samples(run, &mut source)?,
            episodes => episodes::episodes(&texts),
            answers => episodes::answers(&texts),
            starts => episodes::starts(&texts),
            first_text => episodes::first_text(&texts),
            timing => timing::timing(run),
            config => run.config,
        })
    });
    let runs = runs.collect::<Result<Vec<Value>>>()?;

    // The headline metrics of all runs, each once.
    let mut headlines: Vec<Headline> = Vec::new();
    for headline in files.iter().flat_map(|run| &run.headlines) {
        if !headlines.iter().any(|known| known.metric == headline.metric) {
            headlines.push(headline.clone());
        }
    }
    let metrics: Vec<RunMetrics<'_>> =
        files.iter().map(|run| RunMetrics { name: &run.name, rows: &run.rows }).collect();
    let questions = questions::questions(files, &metrics, &headlines);
    let shown_panels: Vec<&PanelSpec> = questions.iter().flat_map(|question| &question.specs).collect();
    let other_panels = charts::charts(curves::other_panels(&metrics, &shown_panels))?;
    let questions = questions.into_iter().map(|question| {
        let panels = charts::charts(curves::panels(&question.specs, &metrics))?;
        Ok(context! { title => question.title, id => question.id, answers => question.answers, panels })
    });
    Ok(context! {
        title => files.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", "),
        several => files.len() > 1,
        runs,
        figures => figures::table(files),
        clips,
        questions => questions.collect::<Result<Vec<Value>>>()?,
        other_panels,
        differences => differences(files),
        // CSS variables of the colours on a light page and on a dark one.
        palettes => plot::css_palettes().map(Value::from_safe_string),
    })
}

/// The settings in which the runs differ, each with a value for every run. A run without the setting has an empty
/// value.
fn differences(runs: &[RunFiles]) -> Vec<Value> {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    let value = |run: &RunFiles, key| run.settings.get(key).cloned().unwrap_or_default();
    let rows = keys.into_iter().map(|key| (key, runs.iter().map(|run| value(run, key)).collect::<Vec<_>>()));
    let differing = rows.filter(|(_, values)| values.iter().any(|value| *value != values[0]));
    differing.map(|(name, values)| context! { name, values }).collect()
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
    fn a_clip_of_one_frame_is_shown_as_a_picture() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(dir.path(), "run", "1e-5");
        std::fs::write(run.join("samples/before/unseen-001.png"), "no picture").unwrap();
        let page = dir.path().join("report.html");
        write(&page, &[run]).unwrap();
        let html = std::fs::read_to_string(page).unwrap();
        let shown = html.split("<img class=\"clip\"").nth(1).and_then(|rest| rest.split('>').next()).unwrap();
        assert!(shown.contains("alt=\"unseen-001, before\"") && shown.contains("data:image/png;base64,"), "{shown}");
    }

    #[test]
    fn an_unfinished_run_is_shown_with_its_warnings_in_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(dir.path(), "r<b>un", "1e-5");
        let page = dir.path().join("report.html");
        write(&page, &[run]).unwrap();
        let html = std::fs::read_to_string(page).unwrap();
        assert!(html.contains("a&lt;script&gt;") && html.contains("r&lt;b&gt;un") && !html.contains("<b>un"), "{html}");
        for part in [
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
            assert!(html.contains(part), "no {part} in: {html}");
        }
        assert!(!html.contains("<img class=\"clip\""), "{html}");
        // Without a reward and its KL there is nothing to hack.
        assert!(!html.contains("Is it hacking"), "{html}");
        assert!(!html.contains("http://") && !html.contains("https://") && !html.contains("src=\"/"));
    }

    #[test]
    fn escapes_figures_and_breaks_paths_at_slashes() {
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

    #[cfg(unix)]
    #[test]
    fn a_report_follows_no_links() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        std::fs::write(&secret, "seed: 4711").unwrap();
        for (i, name) in
            ["config.yaml", "summary.json", "headlines.json", "progress.json", "samples/before/unseen-001.mp4"]
                .iter()
                .enumerate()
        {
            let run = run(dir.path(), &i.to_string(), "1e-5");
            let _ = std::fs::remove_file(run.join(name));
            std::os::unix::fs::symlink(&secret, run.join(name)).unwrap();
            let message = write(&dir.path().join("report.html"), &[run]).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains("symbolic link"), "{message}");
        }
        assert!(!dir.path().join("report.html").exists());
    }

    #[test]
    fn lists_the_settings_in_which_runs_differ() {
        let dir = tempfile::tempdir().unwrap();
        let runs = [run(dir.path(), "a", "1e-5"), run(dir.path(), "b", "2e-5")];
        let page = dir.path().join("report.html");
        write(&page, &runs).unwrap();
        let html = std::fs::read_to_string(&page).unwrap();
        let differs = html.split("What differs").nth(1).unwrap().split("</table>").next().unwrap().to_string();
        let second_section = html.split("<h2>").nth(2).unwrap();
        assert!(second_section.starts_with("What differs"), "{second_section}");
        assert!(differs.contains("training.learning_rate") && !differs.contains("steps"), "{differs}");
        assert!(html.contains("&quot;name&quot;:&quot;a&quot;"), "{html}");
        assert!(write(&page, &[dir.path().join("none")]).is_err());
    }
}
