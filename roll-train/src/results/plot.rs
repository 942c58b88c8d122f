//! Plots: panels of series over two axes, drawn as SVG. The report draws the same panels by `charts.js`, with the
//! colours here.

use std::fmt::{self, Write};
use std::ops::Range;
use std::path::Path;

use roll_core::{Error, Result};
use roll_external::files::write_atomically;

use crate::progress::counted;

/// Width and height of a panel, in pixels.
const PANEL: [f64; 2] = [820.0, 300.0];
/// Space between the edges of a panel and its axes: left, top, right and bottom.
const MARGINS: [f64; 4] = [80.0, 40.0, 10.0, 50.0];
/// Font sizes in pixels.
const TITLE_SIZE: u32 = 18;
const TEXT_SIZE: u32 = 13;
/// Width of a character of the legend: an estimate that suits common fonts.
const CHARACTER_WIDTH: f64 = 0.58 * TEXT_SIZE as f64;
/// Vertical position of the title's baseline, in pixels.
const TITLE_BASELINE: f64 = 26.0;
/// Distances from the x axis down to the baselines of its labels and of its name, in pixels.
const X_LABELS_BELOW: f64 = 17.0;
const X_NAME_BELOW: f64 = 38.0;
/// Distance from the y axis to the ends of its labels, in pixels.
const Y_LABELS_BEFORE: f64 = 6.0;
/// Horizontal position of the y axis's name, which is rotated, in pixels.
const Y_NAME_BASELINE: f64 = 16.0;
/// Distance from the middle of a line of text down to its baseline, in pixels.
const HALF_TEXT_HEIGHT: f64 = 4.5;
/// Distance of the legend from the axes, in pixels.
const LEGEND_DISTANCE: f64 = 8.0;
/// Height of an entry of the legend, in pixels.
const LEGEND_LINE_HEIGHT: f64 = 19.0;
/// Length of the line in an entry of the legend, in pixels.
const LEGEND_SAMPLE_WIDTH: f64 = 20.0;
/// Space in the legend, in pixels: on its left and right, and between a line and its name. Above and below all entries
/// is half of it.
const LEGEND_SPACE: f64 = 6.0;
/// A point is near a corner if its distance along each axis is below this fraction of the axis.
const NEAR_CORNER: f64 = 0.4;
/// The colours on a light page.
const COLOURS: [&str; 6] = ["#2662B6", "#CD5C1C", "#2E8648", "#8048A0", "#C4A01E", "#1EA0AA"];
/// The colours on a dark page.
const COLOURS_ON_DARK: [&str; 6] = ["#6EA8FF", "#FF9458", "#62CA82", "#C89CEC", "#E6C85C", "#50D0DA"];
/// Dash patterns of lines, as in `charts.js`. An empty pattern is a solid line.
pub const DASHES: [&str; 4] = ["", "7 4", "2 4", "9 3 2 3"];
/// Maximum numbers of labels on the x axis and on the y axis.
const MAX_TICKS: [usize; 2] = [8, 6];
/// Maximum number of points of a series, besides its last point. A series with more points is thinned out.
const MAX_POINTS: usize = 1500;
/// Maximum number of points of a line that has a mark at each point.
const MAX_MARKED_POINTS: usize = 12;
/// Largest magnitude of a value that is drawn. The range of larger values would overflow.
const MAX_MAGNITUDE: f64 = 1e300;
/// Margin of an axis beyond its values, as a part of their range.
const MARGIN_SHARE: f64 = 0.05;
/// Smallest margin of an axis beyond its values, as a part of the largest of them. The rounding of f32 would fill the
/// panel of a narrower axis.
const MIN_MARGIN_SHARE: f64 = 1e-6;
/// Smallest margin of an axis beyond its values if these are near 0.
const MIN_MARGIN: f64 = 1e-12;
/// Tolerance for the rounding of ticks, as a part of their step.
const TICK_TOLERANCE: f64 = 1e-9;

/// A named sequence of points.
pub struct Series {
    /// The name in the legend.
    pub name: String,
    /// `[x, y]` of each point. Points that are not finite are left out.
    pub points: Vec<[f64; 2]>,
    /// How the points are drawn.
    pub style: SeriesStyle,
    /// Index of the colour. The palette repeats.
    pub colour: usize,
    /// Index of the dash pattern. The patterns repeat.
    pub dashes: usize,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesStyle {
    /// A line that joins the points.
    Line,
    /// A dot for each point.
    Dots,
    /// A line of running means over this number of points, but at most over half of the points.
    Mean(usize),
}

impl Series {
    /// Whether a line is drawn.
    pub fn is_line(&self) -> bool {
        self.style != SeriesStyle::Dots
    }

    /// The name in the legend, and the points, as they are drawn.
    fn drawn(&self) -> (String, Vec<[f64; 2]>) {
        let points = finite(&self.points);
        match self.style {
            SeriesStyle::Line | SeriesStyle::Dots => (self.name.clone(), thinned(points)),
            SeriesStyle::Mean(width) => {
                let width = width.min(points.len() / 2).max(1);
                (format!("{} of {}", self.name, counted(width as u64, "step")), thinned(smoothed(&points, width)))
            }
        }
    }
}

/// The mean over a window of `width` points that ends at each point. The first `width - 1` points have no mean, since
/// the noise of means over fewer points would look like an event.
fn smoothed(points: &[[f64; 2]], width: usize) -> Vec<[f64; 2]> {
    let mean = |window: &[[f64; 2]]| window.iter().map(|point| point[1]).sum::<f64>() / width as f64;
    points.windows(width).map(|window| [window[width - 1][0], mean(window)]).collect()
}

/// One pair of axes with its series.
pub struct Panel {
    /// Drawn above the axes.
    pub title: String,
    /// Names of the x and y axes; an empty name is not drawn.
    pub axes: [String; 2],
    /// Later series cover earlier ones.
    pub series: Vec<Series>,
}

/// Writes the panels below one another as SVG, with titles and legends.
pub fn write(path: &Path, panels: &[Panel]) -> Result<()> {
    let mut svg = String::new();
    picture(&mut svg, panels).map_err(Error::failed(format!("the plot {} cannot be drawn", path.display())))?;
    write_atomically(path, svg.as_bytes())
}

/// Appends the SVG of the panels.
fn picture(svg: &mut String, panels: &[Panel]) -> fmt::Result {
    let [width, height] = [PANEL[0], PANEL[1] * panels.len().max(1) as f64];
    writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"{TEXT_SIZE}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    )?;
    for (i, panel) in panels.iter().enumerate() {
        writeln!(svg, "<g transform=\"translate(0 {})\">", PANEL[1] * i as f64)?;
        draw_panel(svg, panel)?;
        writeln!(svg, "</g>")?;
    }
    writeln!(svg, "</svg>")
}

/// The CSS variables of the palette, for a light page and for a dark one.
pub fn css_palettes() -> [String; 2] {
    let variables = |colours: &[&str]| -> String {
        colours.iter().enumerate().map(|(i, colour)| format!("--c{i}: {colour}; ")).collect()
    };
    [variables(&COLOURS), variables(&COLOURS_ON_DARK)]
}

/// The colour of a series in CSS.
pub fn css_colour(index: usize) -> String {
    format!("var(--c{})", index % COLOURS.len())
}

/// The colour of one of many parts in CSS. The second round of the palette is paler than the first.
pub fn css_part_colour(index: usize) -> String {
    match index < COLOURS.len() {
        true => css_colour(index),
        false => format!("color-mix(in srgb, {} 45%, transparent)", css_colour(index)),
    }
}

/// The ranges of x and y that a panel shows, and the pixels where they lie.
struct Axes {
    x: Range<f64>,
    y: Range<f64>,
}

impl Axes {
    const LEFT: f64 = MARGINS[0];
    const TOP: f64 = MARGINS[1];
    const RIGHT: f64 = PANEL[0] - MARGINS[2];
    const BOTTOM: f64 = PANEL[1] - MARGINS[3];

    /// The horizontal pixel of a value of x.
    fn pixel_x(&self, x: f64) -> f64 {
        Self::LEFT + share(x, &self.x) * (Self::RIGHT - Self::LEFT)
    }

    /// The vertical pixel of a value of y.
    fn pixel_y(&self, y: f64) -> f64 {
        Self::BOTTOM - share(y, &self.y) * (Self::BOTTOM - Self::TOP)
    }
}

/// The fraction of the range that lies below a value.
fn share(value: f64, range: &Range<f64>) -> f64 {
    (value - range.start) / (range.end - range.start)
}

/// Draws the axes and series of a panel, and a legend if there are several series.
fn draw_panel(svg: &mut String, panel: &Panel) -> fmt::Result {
    let (names, points): (Vec<String>, Vec<Vec<[f64; 2]>>) = panel.series.iter().map(Series::drawn).unzip();
    let axes = Axes {
        x: padded(points.iter().flatten().map(|[x, _]| *x)),
        y: padded(points.iter().flatten().map(|[_, y]| *y)),
    };
    draw_axes(svg, panel, &axes, most_ticks(&points))?;
    for (series, points) in panel.series.iter().zip(&points) {
        draw_series(svg, series, points, &axes)?;
    }
    if panel.series.len() > 1 {
        draw_legend(svg, panel, &names, legend_corner(&points, &axes))?;
    }
    Ok(())
}

/// Draws the title, the axes with at most `most_x_ticks` ticks on the x axis, and their names.
fn draw_axes(svg: &mut String, panel: &Panel, axes: &Axes, most_x_ticks: usize) -> fmt::Result {
    let (left, top, right, bottom) = (Axes::LEFT, Axes::TOP, Axes::RIGHT, Axes::BOTTOM);
    let [x_middle, y_middle] = [(left + right) / 2.0, (top + bottom) / 2.0];
    let text = |svg: &mut String, attributes: fmt::Arguments<'_>, text: &str| {
        writeln!(svg, "<text {attributes}>{}</text>", escaped(text))
    };
    let middle = "text-anchor=\"middle\"";
    let title_at = format_args!("x=\"{x_middle}\" y=\"{TITLE_BASELINE}\" {middle} font-size=\"{TITLE_SIZE}\"");
    text(svg, title_at, &panel.title)?;
    writeln!(svg, "<g fill=\"#5A5A5A\" stroke-width=\"1\">")?;
    let x_ticks = ticks(&axes.x, most_x_ticks);
    for tick in &x_ticks {
        let x = axes.pixel_x(*tick);
        writeln!(svg, "<path d=\"M{x:.1} {top}V{bottom}\" stroke=\"#E4E4E4\"/>")?;
        let label_at = format_args!("x=\"{x:.1}\" y=\"{}\" {middle}", bottom + X_LABELS_BELOW);
        text(svg, label_at, &label(*tick, &x_ticks))?;
    }
    let y_ticks = ticks(&axes.y, MAX_TICKS[1]);
    for tick in &y_ticks {
        let y = axes.pixel_y(*tick);
        writeln!(svg, "<path d=\"M{left} {y:.1}H{right}\" stroke=\"#E4E4E4\"/>")?;
        let (end, baseline) = (left - Y_LABELS_BEFORE, y + HALF_TEXT_HEIGHT);
        let label_at = format_args!("x=\"{end}\" y=\"{baseline:.1}\" text-anchor=\"end\"");
        text(svg, label_at, &label(*tick, &y_ticks))?;
    }
    let [x_name, y_name] = &panel.axes;
    if !x_name.is_empty() {
        text(svg, format_args!("x=\"{x_middle}\" y=\"{}\" {middle}", bottom + X_NAME_BELOW), x_name)?;
    }
    if !y_name.is_empty() {
        let turned = format_args!("transform=\"translate({Y_NAME_BASELINE} {y_middle}) rotate(-90)\" {middle}");
        text(svg, turned, y_name)?;
    }
    writeln!(svg, "<path d=\"M{left} {top}V{bottom}H{right}\" fill=\"none\" stroke=\"#969696\"/>\n</g>")
}

/// Draws a line through the points, and a mark at each point if the series has no line or few points.
fn draw_series(svg: &mut String, series: &Series, points: &[[f64; 2]], axes: &Axes) -> fmt::Result {
    let colour = COLOURS[series.colour % COLOURS.len()];
    let points = points.iter().map(|[x, y]| [axes.pixel_x(*x), axes.pixel_y(*y)]);
    if series.is_line() {
        write!(svg, "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{} points=\"", dashes(series))?;
        points.clone().try_for_each(|[x, y]| write!(svg, "{x:.1},{y:.1} "))?;
        writeln!(svg, "\"/>")?;
    }
    let (radius, opacity) = if series.is_line() { (3, 1.0) } else { (2, 0.5) };
    if !series.is_line() || points.len() <= MAX_MARKED_POINTS {
        writeln!(svg, "<g fill=\"{colour}\" fill-opacity=\"{opacity}\">")?;
        for [x, y] in points {
            writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\"/>")?;
        }
        writeln!(svg, "</g>")?;
    }
    Ok(())
}

/// The attribute with the dash pattern of a series; empty for a solid line.
fn dashes(series: &Series) -> String {
    match DASHES[series.dashes % DASHES.len()] {
        "" => String::new(),
        pattern => format!(" stroke-dasharray=\"{pattern}\""),
    }
}

/// Draws the legend into a corner of the panel. `names` has the name of each series.
fn draw_legend(svg: &mut String, panel: &Panel, names: &[String], corner: Corner) -> fmt::Result {
    let longest_name = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    // A space, the sample of the line, a space, the name, and a space.
    let name_offset = LEGEND_SAMPLE_WIDTH + 2.0 * LEGEND_SPACE;
    let width = name_offset + CHARACTER_WIDTH * longest_name as f64 + LEGEND_SPACE;
    let height = LEGEND_LINE_HEIGHT * names.len() as f64 + LEGEND_SPACE;
    let x = if corner.is_right { Axes::RIGHT - width - LEGEND_DISTANCE } else { Axes::LEFT + LEGEND_DISTANCE };
    let y = if corner.is_top { Axes::TOP + LEGEND_DISTANCE } else { Axes::BOTTOM - height - LEGEND_DISTANCE };
    writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"white\" \
         fill-opacity=\"0.8\" stroke=\"#C8C8C8\"/>"
    )?;
    for (i, (series, name)) in panel.series.iter().zip(names).enumerate() {
        let colour = COLOURS[series.colour % COLOURS.len()];
        let middle = y + (LEGEND_LINE_HEIGHT + LEGEND_SPACE) / 2.0 + LEGEND_LINE_HEIGHT * i as f64;
        let sample = x + LEGEND_SPACE;
        if series.is_line() {
            let (length, pattern) = (LEGEND_SAMPLE_WIDTH, dashes(series));
            writeln!(
                svg,
                "<path d=\"M{sample:.1} {middle:.1}h{length}\" stroke=\"{colour}\" stroke-width=\"3\"{pattern}/>"
            )?;
        } else {
            let centre = sample + LEGEND_SAMPLE_WIDTH / 2.0;
            writeln!(svg, "<circle cx=\"{centre:.1}\" cy=\"{middle:.1}\" r=\"3\" fill=\"{colour}\"/>")?;
        }
        let (start, baseline) = (x + name_offset, middle + HALF_TEXT_HEIGHT);
        writeln!(svg, "<text x=\"{start:.1}\" y=\"{baseline:.1}\">{}</text>", escaped(name))?;
    }
    Ok(())
}

/// Text as XML. Characters that XML does not allow, such as control characters, are replaced.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(char::REPLACEMENT_CHARACTER),
            c => out.push(c),
        }
    }
    out
}

/// The points that can be drawn: those whose coordinates are finite, and at most `MAX_MAGNITUDE`.
pub fn finite(points: &[[f64; 2]]) -> Vec<[f64; 2]> {
    points.iter().copied().filter(|point| point.iter().all(|v| v.abs() <= MAX_MAGNITUDE)).collect()
}

/// At most `MAX_POINTS` of the points, evenly chosen, and the last point.
pub fn thinned(points: Vec<[f64; 2]>) -> Vec<[f64; 2]> {
    let stride = points.len().div_ceil(MAX_POINTS).max(1);
    let last = points.len().saturating_sub(1);
    points.into_iter().enumerate().filter(|(i, _)| i % stride == 0 || *i == last).map(|(_, point)| point).collect()
}

/// A range a little wider than the range of the values.
fn padded(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) =
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    let has_values = low <= high;
    if !has_values {
        return 0.0..1.0;
    }
    let margin = if low == 0.0 && high == 0.0 {
        1.0
    } else if low == high {
        // Half of the value, and wide enough for a value near 0.
        0.5 * low.abs().max(1e-6)
    } else {
        let largest = low.abs().max(high.abs());
        (MARGIN_SHARE * (high - low)).max(MIN_MARGIN_SHARE * largest).max(MIN_MARGIN)
    };
    low - margin..high + margin
}

/// The maximum number of ticks on the x axis. If all x are whole numbers, such as steps, it allows no ticks between
/// them.
fn most_ticks(series: &[Vec<[f64; 2]>]) -> usize {
    let xs = || series.iter().flatten().map(|[x, _]| *x);
    let (low, high) = xs().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    let are_few_whole_numbers = xs().all(|x| x.fract() == 0.0) && high - low < MAX_TICKS[0] as f64;
    if are_few_whole_numbers { (high - low).max(0.0) as usize + 1 } else { MAX_TICKS[0] }
}

/// A corner of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Corner {
    is_right: bool,
    is_top: bool,
}

impl Corner {
    const BOTTOM_RIGHT: Self = Self { is_right: true, is_top: false };
    const TOP_RIGHT: Self = Self { is_right: true, is_top: true };
    const TOP_LEFT: Self = Self { is_right: false, is_top: true };
    const BOTTOM_LEFT: Self = Self { is_right: false, is_top: false };

    /// Whether the point is within [`NEAR_CORNER`] of this corner.
    fn is_near(self, [x, y]: [f64; 2], axes: &Axes) -> bool {
        // From 0, at the left or at the bottom, to 1.
        let (x_share, y_share) = (share(x, &axes.x), share(y, &axes.y));
        let x_distance = if self.is_right { 1.0 - x_share } else { x_share };
        let y_distance = if self.is_top { 1.0 - y_share } else { y_share };
        x_distance.abs() < NEAR_CORNER && y_distance.abs() < NEAR_CORNER
    }
}

/// The corner with the fewest points near it; of several such corners, the first in this order.
fn legend_corner(series: &[Vec<[f64; 2]>], axes: &Axes) -> Corner {
    let points_near = |corner: Corner| series.iter().flatten().filter(|point| corner.is_near(**point, axes)).count();
    let corners = [Corner::BOTTOM_RIGHT, Corner::TOP_RIGHT, Corner::TOP_LEFT, Corner::BOTTOM_LEFT];
    corners.into_iter().min_by_key(|corner| points_near(*corner)).unwrap_or(Corner::BOTTOM_RIGHT)
}

/// The ticks in a range: multiples of 1, 2 or 5 times a power of ten, about `at_most` of them.
fn ticks(range: &Range<f64>, at_most: usize) -> Vec<f64> {
    let least_step = (range.end - range.start) / at_most as f64;
    let power_of_ten = 10f64.powf(least_step.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power_of_ten);
    let step = steps.into_iter().find(|step| *step >= least_step * (1.0 - TICK_TOLERANCE)).unwrap_or(steps[3]);
    let first = (range.start / step - TICK_TOLERANCE).ceil();
    let ticks = (0..=at_most).map(|i| (first + i as f64) * step);
    ticks.take_while(|tick| *tick <= range.end + TICK_TOLERANCE * step).collect()
}

/// The label of a tick: its value, with enough digits to tell it from the neighbouring ticks.
fn label(value: f64, ticks: &[f64]) -> String {
    let [first, second, ..] = ticks else { return format!("{value:.2e}") };
    let step = second - first;
    let largest = ticks.iter().fold(0.0f64, |largest, tick| largest.max(tick.abs()));
    // A tick at 0, which rounding has made a tiny number.
    if value.abs() < TICK_TOLERANCE * largest {
        return "0".into();
    }
    // Decimals that show a difference.
    let decimals = |difference: f64| (-difference.log10() - TICK_TOLERANCE).ceil().clamp(0.0, 12.0) as usize;
    let needs_no_exponent = (1e-3..1e6).contains(&largest);
    if needs_no_exponent {
        format!("{value:.*}", decimals(step))
    } else {
        format!("{value:.*e}", decimals(step / largest))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn panel(points: Vec<[f64; 2]>) -> Panel {
        let style = SeriesStyle::Line;
        let series = vec![Series { name: "s".into(), points, style, colour: 9, dashes: 0 }];
        Panel { title: "t".into(), axes: ["a<b".into(), "y".into()], series }
    }

    /// The picture, and how many numbers its lines and marks have.
    fn drawn(panels: &[Panel]) -> (String, usize) {
        let mut svg = String::new();
        picture(&mut svg, panels).unwrap();
        let mut count = 0;
        for (attribute, most) in [("points=\"", PANEL[0]), ("cx=\"", PANEL[0]), ("cy=\"", PANEL[1])] {
            for found in svg.split(attribute).skip(1) {
                for number in found.split('"').next().unwrap().split([' ', ',']).filter(|text| !text.is_empty()) {
                    let number: f64 = number.parse().unwrap();
                    assert!((0.0..=most).contains(&number), "{number} in {svg}");
                    count += 1;
                }
            }
        }
        (svg, count)
    }

    #[test]
    fn draws_extreme_and_missing_values() {
        let at = |ys: &[f64]| ys.iter().enumerate().map(|(i, &y)| [i as f64, y]).collect::<Vec<_>>();
        // Steps without a value.
        let steps = [u64::MAX as f64, u64::MAX as f64 - 4096.0, i64::MAX as f64, -5.0, 1e308, f64::MIN_POSITIVE];
        for [x, y] in steps.iter().flat_map(|&x| [0.0, 0.5, 1e308].map(|y| [x, y])) {
            drawn(&[panel(vec![[0.0, 1.0], [x, y], [x, -y]]), panel(vec![[x, y]])]);
        }
        for (ys, finite) in [
            (&[][..], 0),
            (&[1.0], 1),
            (&[f64::NAN, 2.0, 1e-9], 2),
            (&[1e300, -1e300], 2),
            (&[f64::MAX, f64::MIN, f64::INFINITY], 0),
            (&[0.0, f64::MIN_POSITIVE], 2),
            (&[4096.0, 4096.000000000001], 2),
            (&[1e300, 1.0000000000000002e300], 1),
        ] {
            // In the line, and as the centre of a mark.
            assert_eq!(drawn(&[panel(at(ys))]).1, 4 * finite, "{ys:?}");
        }
    }

    #[test]
    fn the_picture_has_titles_axes_series_and_a_legend() {
        let series = |name: &str, style, colour| {
            let points = (0..20).map(|i| [f64::from(i), f64::from(i * i)]).collect();
            Series { name: name.into(), points, style, colour, dashes: colour }
        };
        let all = vec![series("a & b", SeriesStyle::Line, 0), series("\u{1b}[1m", SeriesStyle::Dots, 1)];
        let both = Panel { title: "<title>".into(), axes: ["step".into(), "y".into()], series: all };
        let mean = Panel { series: vec![series("m", SeriesStyle::Mean(4), 1)], ..panel(Vec::new()) };
        let (svg, _) = drawn(&[both, mean]);
        for part in [
            "height=\"600\"",
            ">&lt;title&gt;</text>",
            ">step</text>",
            ">a &amp; b</text>",
            ">\u{fffd}[1m</text>",
            ">a&lt;b</text>",
            ">300</text>",
            "stroke-dasharray=\"7 4\"",
        ] {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
        assert_eq!((svg.matches("<polyline").count(), svg.matches("<circle").count()), (2, 20 + 1));
        assert_eq!(svg.matches('<').count(), svg.matches('>').count());
    }

    #[test]
    fn a_running_mean_begins_once_its_window_is_full() {
        let points: Vec<[f64; 2]> = [1.0, 3.0, 5.0].iter().enumerate().map(|(i, &y)| [i as f64, y]).collect();
        assert_eq!(smoothed(&points, 2), [[1.0, 2.0], [2.0, 4.0]]);
        let style = SeriesStyle::Mean(8);
        let series = Series { name: "mean".into(), points: points.clone(), style, colour: 0, dashes: 0 };
        assert_eq!(series.drawn(), ("mean of 1 step".into(), points));
        let points: Vec<[f64; 2]> = (0..6).map(|i| [f64::from(i), f64::from(i)]).collect();
        let series = Series { points, ..series };
        assert_eq!(series.drawn(), ("mean of 3 steps".into(), vec![[2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [5.0, 4.0]]));
    }

    #[test]
    fn thinning_keeps_the_last_point() {
        let points = thinned((0..100_000).map(|i| [f64::from(i), 0.0]).collect());
        assert!(points.len() <= MAX_POINTS + 1 && points.last() == Some(&[99_999.0, 0.0]));
    }

    #[test]
    fn ticks_of_steps_are_whole_and_zeros_are_not_magnified() {
        let steps = |count: usize| most_ticks(&[(1..=count).map(|step| [step as f64, 0.5]).collect()]);
        assert_eq!([1, 2, 5, 100].map(steps), [1, 2, 5, MAX_TICKS[0]]);
        assert_eq!(ticks(&padded([1.0, 2.0].into_iter()), steps(2)), [1.0, 2.0]);
        assert_eq!(most_ticks(&[vec![[0.5, 0.0], [1.5, 0.0]]]), MAX_TICKS[0]);
        assert_eq!(padded([0.0, 0.0].into_iter()), -1.0..1.0);
    }

    #[test]
    fn the_legend_is_in_the_emptiest_corner() {
        let falling = vec![(0..10).map(|i| [f64::from(i), -f64::from(i)]).collect()];
        assert_eq!(legend_corner(&falling, &Axes { x: 0.0..9.0, y: -9.0..0.0 }), Corner::TOP_RIGHT);
        let rising = vec![(0..10).map(|i| [f64::from(i), f64::from(i)]).collect()];
        assert_eq!(legend_corner(&rising, &Axes { x: 0.0..9.0, y: 0.0..9.0 }), Corner::BOTTOM_RIGHT);
    }

    #[test]
    fn tick_labels_are_distinct() {
        let ranges = [[0.3385, 0.3392], [-0.003, -0.0015], [1e-9, 9e-9], [12345.0, 12346.0], [0.0, 3e8], [-0.3, 0.3]];
        for [low, high] in ranges {
            let ticks = ticks(&padded([low, high].into_iter()), 8);
            let labels: BTreeSet<String> = ticks.iter().map(|v| label(*v, &ticks)).collect();
            assert!((3..=8).contains(&ticks.len()) && labels.len() == ticks.len(), "{ticks:?}: {labels:?}");
        }
        assert_eq!([-0.2, 5e-17, 0.2].map(|v| label(v, &[-0.2, 5e-17, 0.2])), ["-0.2", "0", "0.2"]);
        assert_eq!(label(1.0, &[1.0, 1.0]), "1.000000000000");
    }
}
