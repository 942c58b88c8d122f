//! One HTML page that shows a run, with everything it shows inside.

use std::fmt::Write;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use roll_core::Result;
use roll_core::run_dir::write_atomically;

/// What the page shows, from top to bottom.
pub struct Report<'a> {
    /// Name of the run.
    pub title: &'a str,
    /// Rows of the table of figures: name, value.
    pub figures: &'a [(String, String)],
    /// Reference, before and after: an animated GIF.
    pub comparison: Option<&'a [u8]>,
    /// The curves: a PNG.
    pub curves: Option<&'a [u8]>,
    /// The configuration, as YAML.
    pub config: &'a str,
}

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#222}\
    table{border-collapse:collapse}td{padding:.15em 1.2em .15em 0;border-bottom:1px solid #ddd}\
    td+td{font-variant-numeric:tabular-nums}img{max-width:100%;height:auto}pre{background:#f5f5f5;padding:1em;overflow:auto}";

/// Writes the page.
pub fn write(path: &Path, report: &Report<'_>) -> Result<()> {
    let mut html = String::new();
    let title = escaped(report.title);
    // Writing to a string cannot fail.
    let _ = write!(
        html,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n<table>\n"
    );
    for (name, value) in report.figures {
        let _ = writeln!(html, "<tr><td>{}</td><td>{}</td></tr>", escaped(name), escaped(value));
    }
    html += "</table>\n";
    if let Some(gif) = report.comparison {
        html += "<h2>Reference, before, after</h2>\n<p>Rows: the reference clip, the base model, the trained model; \
                 same prompt, first frame and noise. Clips that were not trained on.</p>\n";
        let _ = writeln!(html, "<img alt=\"reference, before, after\" src=\"data:image/gif;base64,{}\">", encoded(gif));
    }
    if let Some(png) = report.curves {
        html += "<h2>Curves</h2>\n";
        let _ = writeln!(html, "<img alt=\"curves\" src=\"data:image/png;base64,{}\">", encoded(png));
    }
    let _ = writeln!(html, "<h2>Configuration</h2>\n<pre>{}</pre>\n</body></html>", escaped(report.config));
    write_atomically(path, html.as_bytes())
}

fn encoded(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_a_user_wrote_is_text_and_not_markup() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.html");
        let figures = [("score".into(), "<b>1</b>".into())];
        let report =
            Report { title: "a<script>", figures: &figures, comparison: None, curves: Some(b"png"), config: "a: <b>" };
        write(&path, &report).unwrap();
        let html = std::fs::read_to_string(path).unwrap();
        assert!(!html.contains("<script>") && !html.contains("<b>") && html.contains("data:image/png;base64,cG5n"));
    }
}
