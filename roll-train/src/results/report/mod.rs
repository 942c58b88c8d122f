//! One HTML page that shows a run, or compares several, with everything it shows inside: no file or server beside it.

mod chart;
mod figures;
mod source;
mod videos;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use roll_core::files::write_atomically;
use roll_core::{Headline, Result};

use crate::results::curves::{self, Curves};
use source::Source;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Writes the page of the runs in these directories.
pub fn write(path: &Path, runs: &[PathBuf]) -> Result<()> {
    let mut sources = runs.iter().map(|run| Source::read(run)).collect::<Result<Vec<_>>>()?;
    tell_apart(&mut sources);
    write_atomically(path, page(&sources)?.as_bytes())
}

/// Runs of one name get their whole path.
fn tell_apart(sources: &mut [Source]) {
    let names: Vec<String> = sources.iter().map(|s| s.name.clone()).collect();
    for source in sources.iter_mut().filter(|s| names.iter().filter(|n| **n == s.name).count() > 1) {
        source.name = source.path.display().to_string();
    }
}

fn page(runs: &[Source]) -> Result<String> {
    let title = escaped(&runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", "));
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\n<style>\n{STYLE}</style></head>\n\
         <body><h1>{title}</h1>\n"
    );
    // Writing to a string cannot fail.
    for run in runs {
        let _ = writeln!(html, "<p class=\"under\">{}</p>", escaped(&figures::status(run)));
    }
    for run in runs {
        let of = if runs.len() > 1 { format!("{}: ", run.name) } else { String::new() };
        for warning in figures::warnings(run) {
            let _ = writeln!(html, "<div class=\"warning\">{}{}</div>", escaped(&of), escaped(&warning));
        }
    }
    html += &figures::table(runs);
    html += &videos::section(runs)?;

    let mut headlines: Vec<Headline> = Vec::new();
    for headline in runs.iter().flat_map(|run| &run.headlines) {
        if !headlines.iter().any(|known| known.metric == headline.metric) {
            headlines.push(headline.clone());
        }
    }
    let curves: Vec<Curves<'_>> = runs.iter().map(|run| Curves { name: &run.name, rows: &run.rows }).collect();
    html += "<h2>Curves</h2>\n<div class=\"charts\">\n";
    curves::main_panels(&curves, &headlines).iter().for_each(|panel| html += &chart::panel(panel));
    html += "</div>\n<details><summary>Every other metric</summary><div class=\"charts\">\n";
    curves::other_panels(&curves, &headlines).iter().for_each(|panel| html += &chart::panel(panel));
    html += "</div></details>\n";
    html += &figures::timing(runs);
    html += &configuration(runs);
    let _ = write!(html, "<script>\n{SCRIPT}</script>\n</body></html>\n");
    Ok(html)
}

/// What differs, and everything.
fn configuration(runs: &[Source]) -> String {
    let mut html = String::from("<h2>Configuration</h2>\n");
    if runs.len() > 1 {
        let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
        let value = |run: &Source, key: &str| run.settings.get(key).cloned().unwrap_or_default();
        let differs = |key: &&&String| runs.iter().any(|run| value(run, key) != value(&runs[0], key));
        html += "<p>What differs:</p>\n<div class=\"wide\"><table><tr><th></th>";
        runs.iter().for_each(|run| html += &format!("<th>{}</th>", escaped(&run.name)));
        html += "</tr>\n";
        for key in keys.iter().filter(differs) {
            html += &format!("<tr><td>{}</td>", escaped(key));
            runs.iter().for_each(|run| html += &format!("<td>{}</td>", escaped(&value(run, key))));
            html += "</tr>\n";
        }
        html += "</table></div>\n";
    }
    for run in runs {
        let name = if runs.len() > 1 { escaped(&run.name) } else { "config.yaml".into() };
        html += &format!("<details><summary>{name}</summary><pre>{}</pre></details>\n", escaped(&run.config));
    }
    html
}

/// As text in HTML, also in attributes.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
        for said in ["2 of 3 steps", "1 sample was left out", "clipped in 1 of 2", "data:video/mp4;base64,bm8gdmlkZW8="]
        {
            assert!(html.contains(said), "no {said} in: {html}");
        }
        assert!(!html.contains("http://") && !html.contains("https://") && !html.contains("src=\"/"));
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
