//! Curves and bars as inline SVG.

use std::fmt::Write;

use super::escaped;
use crate::results::plot::{COLOURS, Panel, padded, short};

/// Units of a panel's own coordinates.
const SIZE: [f64; 2] = [520.0, 240.0];
/// Room for labels: left, top, right, bottom.
const MARGIN: [f64; 4] = [62.0, 10.0, 12.0, 30.0];
/// A series with more points is thinned out.
const POINTS: usize = 1500;
/// Up to so many points of a line are marked.
const MARKED: usize = 12;

/// A colour of the palette in CSS.
pub fn colour(index: usize) -> String {
    let c = COLOURS[index % COLOURS.len()];
    format!("rgb({},{},{})", c.0, c.1, c.2)
}

/// The same for many: after its end the palette begins again, paler.
pub fn part_colour(index: usize) -> String {
    let c = COLOURS[index % COLOURS.len()];
    format!("rgba({},{},{},{})", c.0, c.1, c.2, if index < COLOURS.len() { 1.0 } else { 0.45 })
}

/// A panel: title, legend and curves.
pub fn panel(panel: &Panel) -> String {
    let finite = |points: &[[f64; 2]]| -> Vec<[f64; 2]> {
        points.iter().copied().filter(|p| p.iter().all(|v| v.is_finite())).collect()
    };
    let all: Vec<[f64; 2]> = panel.series.iter().flat_map(|s| finite(&s.points)).collect();
    let [xs, ys] = [0, 1].map(|axis| padded(all.iter().map(|p| p[axis])));
    let [left, top, right, bottom] = MARGIN;
    let x = |v: f64| left + (v - xs.start) / (xs.end - xs.start) * (SIZE[0] - left - right);
    let y = |v: f64| SIZE[1] - bottom - (v - ys.start) / (ys.end - ys.start) * (SIZE[1] - top - bottom);

    // Writing to a string cannot fail.
    let mut html = format!("<figure><figcaption><b>{}</b>", escaped(&panel.title));
    for series in panel.series.iter().filter(|_| panel.series.len() > 1) {
        let mark = if series.line { "&#9472;&#9472;" } else { "&#9679;" };
        let _ = write!(
            html,
            " <span class=\"key\"><span style=\"color:{}\">{mark}</span> {}</span>",
            colour(series.colour),
            escaped(&series.name)
        );
    }
    let _ = write!(html, "</figcaption><svg viewBox=\"0 0 {} {}\" role=\"img\">", SIZE[0], SIZE[1]);
    let (x_ticks, y_ticks) = (ticks(xs.start, xs.end), ticks(ys.start, ys.end));
    for &v in &y_ticks {
        let at = y(v);
        let _ = write!(
            html,
            "<line class=\"grid\" x1=\"{left}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            SIZE[0] - right,
            left - 6.0,
            at + 4.0,
            label(v, &y_ticks)
        );
    }
    for &v in &x_ticks {
        let (at, low) = (x(v), SIZE[1] - bottom);
        let _ = write!(
            html,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{low}\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            low + 16.0,
            label(v, &x_ticks)
        );
    }
    for series in &panel.series {
        let points = thinned(finite(&series.points));
        let colour = colour(series.colour);
        if series.line {
            let path: Vec<String> = points.iter().map(|p| format!("{:.1},{:.1}", x(p[0]), y(p[1]))).collect();
            let _ = write!(html, "<polyline points=\"{}\" stroke=\"{colour}\"/>", path.join(" "));
        }
        if !series.line || points.len() <= MARKED {
            let (r, opacity) = if series.line { (3.0, 1.0) } else { (2.2, 0.45) };
            for [px, py] in points {
                let _ = write!(
                    html,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{r}\" fill=\"{colour}\" fill-opacity=\"{opacity}\">\
                     <title>{} {}: {}</title></circle>",
                    x(px),
                    y(py),
                    escaped(&panel.axes[0]),
                    short(px),
                    short(py)
                );
            }
        }
    }
    html + "</svg></figure>\n"
}

/// Parts of a whole as one bar; names stand in the legend.
pub fn bar(parts: &[(String, f64)]) -> String {
    let total: f64 = parts.iter().map(|(_, v)| v).sum();
    let mut html =
        String::from("<svg viewBox=\"0 0 1000 26\" preserveAspectRatio=\"none\" class=\"bar\" role=\"img\">");
    let mut at = 0.0;
    for (i, (name, value)) in parts.iter().enumerate().filter(|_| total > 0.0) {
        let width = 1000.0 * value / total;
        let _ = write!(
            html,
            "<rect x=\"{at:.2}\" y=\"0\" width=\"{width:.2}\" height=\"26\" fill=\"{}\"><title>{}: {value:.3} s</title></rect>",
            part_colour(i),
            escaped(name)
        );
        at += width;
    }
    html + "</svg>\n"
}

/// At most about five round values in the range.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let step = (high - low) / 5.0;
    if !(step.is_finite() && step > 0.0) {
        return Vec::new();
    }
    let power = 10f64.powf(step.log10().floor());
    let step = power * [1.0, 2.0, 5.0, 10.0].into_iter().find(|m| m * power >= step).unwrap_or(10.0);
    let first = (low / step).ceil() as i64;
    (first..first + 12).map(|i| i as f64 * step).take_while(|v| *v <= high).collect()
}

/// A tick with as many digits as tell it from its neighbours.
fn label(value: f64, ticks: &[f64]) -> String {
    let step = match ticks {
        [a, b, ..] => b - a,
        _ => return short(value),
    };
    let largest = ticks.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    if value.abs() < 1e-9 * largest {
        return "0".into();
    }
    // Ticks that rounding makes equal have no digit that tells them apart.
    let digits = |range: f64| (-range.log10() - 1e-9).ceil().clamp(0.0, 12.0) as usize;
    match (1e-3..1e6).contains(&largest) {
        true => format!("{value:.*}", digits(step)),
        false => format!("{value:.*e}", digits(step / largest)),
    }
}

/// Every n-th point, and the last.
fn thinned(points: Vec<[f64; 2]>) -> Vec<[f64; 2]> {
    let (every, last) = (points.len().div_ceil(POINTS).max(1), points.len().saturating_sub(1));
    points.into_iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last).map(|(_, p)| p).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::results::plot::Series;

    #[test]
    fn ticks_that_are_equal_have_labels() {
        assert_eq!(label(1.0, &[1.0, 1.0]), "1.000000000000");
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(-0.3, 0.3).iter().map(|v| format!("{v:.1}")).collect::<Vec<_>>(), ["-0.2", "0.0", "0.2"]);
        assert!(ticks(1.0, 1.0).is_empty() && ticks(f64::NAN, 1.0).is_empty());
        assert!(ticks(1e-9, 9e-9).len() > 2);
        for range in [[0.3385, 0.3392], [-0.003, -0.0015], [1e-9, 9e-9], [12345.0, 12346.0], [0.0, 3e8]] {
            let ticks = ticks(range[0], range[1]);
            let labels: BTreeSet<String> = ticks.iter().map(|v| label(*v, &ticks)).collect();
            assert_eq!(labels.len(), ticks.len(), "{labels:?}");
        }
    }

    #[test]
    fn a_panel_survives_any_values() {
        for points in [vec![], vec![[0.0, 1.0]], vec![[1.0, f64::NAN], [2.0, 3.0]], vec![[0.0, 1e300], [1.0, -1e300]]] {
            let series = vec![Series { name: "<s>".into(), points, line: true, colour: 9 }];
            let html = panel(&Panel { title: "a<b".into(), axes: ["step".into(), String::new()], series });
            assert!(html.contains("a&lt;b") && html.ends_with("</svg></figure>\n"));
            assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
        }
        let many: Vec<[f64; 2]> = (0..100_000).map(|i| [f64::from(i), 0.0]).collect();
        let thin = thinned(many);
        assert!(thin.len() <= POINTS + 1 && thin.last() == Some(&[99_999.0, 0.0]));
    }
}
