//! Panels of curves for the page: titles, legends, and points that `charts.js` draws.

use minijinja::{Value, context};
use roll_core::{Error, Result};
use serde_json::json;

use crate::results::plot::{self, Panel, Series, SeriesStyle};

/// The values of the page's template for each panel: title, legend, and the series as JSON. A panel of a single series
/// has an empty legend.
pub fn charts(panels: Vec<Panel>) -> Result<Vec<Value>> {
    let chart = |panel: Panel| {
        let series: Vec<_> = panel.series.iter().map(points).collect();
        let series = serde_json::to_string(&series).map_err(Error::failed("the curves cannot be written as JSON"))?;
        let named_series = if panel.series.len() > 1 { panel.series.as_slice() } else { &[] };
        let legend: Vec<Value> = named_series.iter().map(legend_entry).collect();
        Ok(context! { title => panel.title, legend, series })
    };
    panels.into_iter().map(chart).collect()
}

/// The values of the page's template for the entry of a series in the legend.
fn legend_entry(series: &Series) -> Value {
    context! {
        name => series.name,
        colour => plot::css_colour(series.colour),
        dashes => plot::DASHES[series.dashes % plot::DASHES.len()],
        line => series.is_line(),
    }
}

/// A series as `charts.js` reads it. Its points are flat: x, y, x, y, and so on.
fn points(series: &Series) -> serde_json::Value {
    let points = plot::thinned(plot::finite(&series.points));
    let flat: Vec<f64> = points.into_iter().flat_map(|[x, y]| [x, rounded(y)]).collect();
    // The number of points in a running mean, which `charts.js` computes.
    let mean = if let SeriesStyle::Mean(width) = series.style { Some(width) } else { None };
    json!({
        "name": series.name, "colour": plot::css_colour(series.colour), "dash": series.dashes,
        "line": series.is_line(), "mean": mean, "points": flat,
    })
}

/// The value rounded to seven digits, which are more than a screen can show. This keeps a page of thousands of values
/// small.
fn rounded(value: f64) -> f64 {
    format!("{value:.6e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_finite_rounded_and_thinned() {
        let ys = [f64::NAN, f64::INFINITY, 1.0 / 3.0, 1e300, f64::MIN_POSITIVE];
        let points = ys.iter().enumerate().map(|(i, y)| [i as f64, *y]).collect();
        let series = Series { name: "<s>".into(), points, style: SeriesStyle::Mean(8), colour: 7, dashes: 5 };
        let written = super::points(&series);
        assert_eq!(
            written["points"].as_array().unwrap()[..4],
            [json!(2.0), json!(0.3333333), json!(3.0), json!(1e300)]
        );
        assert_eq!((&written["mean"], &written["colour"]), (&json!(8), &json!("var(--c1)")));
        let long: Vec<[f64; 2]> = (0..100_000).map(|i| [f64::from(i), 0.5]).collect();
        assert!(super::points(&Series { points: long, ..series })["points"].as_array().unwrap().len() < 4000);
    }
}
