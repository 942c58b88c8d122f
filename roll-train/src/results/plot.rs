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
const TITLE: u32 = 18;
const TEXT: u32 = 13;
/// Width of a character of the legend: an estimate that suits common fonts.
const CHARACTER: f64 = 0.58 * TEXT as f64;
const COLOURS: [&str; 6] = ["#2662B6", "#CD5C1C", "#2E8648", "#8048A0", "#C4A01E", "#1EA0AA"];
/// The colours on a dark page.
const LIGHT_COLOURS: [&str; 6] = ["#6EA8FF", "#FF9458", "#62CA82", "#C89CEC", "#E6C85C", "#50D0DA"];
/// Dash patterns of lines, as in `charts.js`.
pub const DASHES: [&str; 4] = ["", "7 4", "2 4", "9 3 2 3"];
/// Most labels on the x axis and on the y axis.
const TICKS: [usize; 2] = [8, 6];
/// Approximate maximum of the points of a series. A series with more points is thinned out.
const POINTS: usize = 1500;
/// Most points of a line that has a mark at each point.
const MARKED: usize = 12;
/// Largest magnitude of a value that is drawn. The range of larger values would overflow.
const LARGEST: f64 = 1e300;
/// Smallest margin of an axis beyond its values, as a part of the largest of them. The rounding of f32 would fill the
/// panel of a narrower axis.
const MIN_MARGIN_SHARE: f64 = 1e-6;
/// Smallest margin of an axis beyond its values if these are near 0.
const MIN_MARGIN: f64 = 1e-12;

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
    /// A line of running means over this many points. If there are fewer than twice this number of points, over half of
    /// the points.
    Mean(usize),
}

impl Series {
    /// Whether a line is drawn.
    pub fn is_line(&self) -> bool {
        self.style != SeriesStyle::Dots
    }

    /// Name and points as they are drawn.
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

fn picture(svg: &mut String, panels: &[Panel]) -> fmt::Result {
    let [width, height] = [PANEL[0], PANEL[1] * panels.len().max(1) as f64];
    writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"{TEXT}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    )?;
    for (i, panel) in panels.iter().enumerate() {
        writeln!(svg, "<g transform=\"translate(0 {})\">", PANEL[1] * i as f64)?;
        draw(svg, panel)?;
        writeln!(svg, "</g>")?;
    }
    writeln!(svg, "</svg>")
}

/// The CSS variables of the palette, for a light page and for a dark one.
pub fn css_palettes() -> [String; 2] {
    let variables = |colours: &[&str]| -> String {
        colours.iter().enumerate().map(|(i, colour)| format!("--c{i}: {colour}; ")).collect()
    };
    [variables(&COLOURS), variables(&LIGHT_COLOURS)]
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

/// The ranges of x and y that a panel shows.
struct Axes([Range<f64>; 2]);

impl Axes {
    const LEFT: f64 = MARGINS[0];
    const TOP: f64 = MARGINS[1];
    const RIGHT: f64 = PANEL[0] - MARGINS[2];
    const BOTTOM: f64 = PANEL[1] - MARGINS[3];

    /// The pixel of a point.
    fn at(&self, [x, y]: [f64; 2]) -> [f64; 2] {
        let [x_range, y_range] = &self.0;
        [
            Self::LEFT + share(x, x_range) * (Self::RIGHT - Self::LEFT),
            Self::BOTTOM - share(y, y_range) * (Self::BOTTOM - Self::TOP),
        ]
    }
}

/// The fraction of the range that lies below a value.
fn share(value: f64, range: &Range<f64>) -> f64 {
    (value - range.start) / (range.end - range.start)
}

fn draw(svg: &mut String, panel: &Panel) -> fmt::Result {
    let (names, series): (Vec<String>, Vec<Vec<[f64; 2]>>) = panel.series.iter().map(Series::drawn).unzip();
    let axes = Axes([0, 1].map(|axis| padded(series.iter().flatten().map(|p| p[axis]))));
    draw_axes(svg, panel, &axes, most_ticks(&series))?;
    for (drawn, points) in panel.series.iter().zip(&series) {
        draw_series(svg, drawn, points, &axes)?;
    }
    if panel.series.len() > 1 {
        draw_legend(svg, panel, &names, legend_corner(&series, &axes.0))?;
    }
    Ok(())
}

fn draw_axes(svg: &mut String, panel: &Panel, axes: &Axes, most_x: usize) -> fmt::Result {
    let (left, top, right, bottom) = (Axes::LEFT, Axes::TOP, Axes::RIGHT, Axes::BOTTOM);
    let [x_middle, y_middle] = [(left + right) / 2.0, (top + bottom) / 2.0];
    let text = |svg: &mut String, attributes: fmt::Arguments<'_>, text: &str| {
        writeln!(svg, "<text {attributes}>{}</text>", escaped(text))
    };
    let middle = "text-anchor=\"middle\"";
    text(svg, format_args!("x=\"{x_middle}\" y=\"26\" {middle} font-size=\"{TITLE}\""), &panel.title)?;
    writeln!(svg, "<g fill=\"#5A5A5A\" stroke-width=\"1\">")?;
    let [xs, ys] = [ticks(&axes.0[0], most_x), ticks(&axes.0[1], TICKS[1])];
    for value in &xs {
        let x = axes.at([*value, axes.0[1].start])[0];
        writeln!(svg, "<path d=\"M{x:.1} {top}V{bottom}\" stroke=\"#E4E4E4\"/>")?;
        text(svg, format_args!("x=\"{x:.1}\" y=\"{}\" {middle}", bottom + 17.0), &label(*value, &xs))?;
    }
    for value in &ys {
        let y = axes.at([axes.0[0].start, *value])[1];
        writeln!(svg, "<path d=\"M{left} {y:.1}H{right}\" stroke=\"#E4E4E4\"/>")?;
        let at = format_args!("x=\"{}\" y=\"{:.1}\" text-anchor=\"end\"", left - 6.0, y + 4.0);
        text(svg, at, &label(*value, &ys))?;
    }
    let [x_name, y_name] = &panel.axes;
    if !x_name.is_empty() {
        text(svg, format_args!("x=\"{x_middle}\" y=\"{}\" {middle}", bottom + 38.0), x_name)?;
    }
    if !y_name.is_empty() {
        text(svg, format_args!("transform=\"translate(16 {y_middle}) rotate(-90)\" {middle}"), y_name)?;
    }
    writeln!(svg, "<path d=\"M{left} {top}V{bottom}H{right}\" fill=\"none\" stroke=\"#969696\"/>\n</g>")
}

fn draw_series(svg: &mut String, series: &Series, points: &[[f64; 2]], axes: &Axes) -> fmt::Result {
    let colour = COLOURS[series.colour % COLOURS.len()];
    let points = points.iter().map(|point| axes.at(*point));
    if series.is_line() {
        write!(svg, "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{} points=\"", dashes(series))?;
        points.clone().try_for_each(|[x, y]| write!(svg, "{x:.1},{y:.1} "))?;
        writeln!(svg, "\"/>")?;
    }
    let (radius, opacity) = if series.is_line() { (3, 1.0) } else { (2, 0.5) };
    if !series.is_line() || points.len() <= MARKED {
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

fn draw_legend(svg: &mut String, panel: &Panel, names: &[String], [right, top]: [bool; 2]) -> fmt::Result {
    let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let (width, line) = (40.0 + CHARACTER * longest as f64, 19.0);
    let height = line * names.len() as f64 + 6.0;
    let x = if right { Axes::RIGHT - width - 8.0 } else { Axes::LEFT + 8.0 };
    let y = if top { Axes::TOP + 8.0 } else { Axes::BOTTOM - height - 8.0 };
    writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"white\" \
         fill-opacity=\"0.8\" stroke=\"#C8C8C8\"/>"
    )?;
    for (i, (series, name)) in panel.series.iter().zip(names).enumerate() {
        let (colour, y) = (COLOURS[series.colour % COLOURS.len()], y + 12.0 + line * i as f64);
        match series.is_line() {
            true => {
                let (from, pattern) = (x + 7.0, dashes(series));
                writeln!(svg, "<path d=\"M{from:.1} {y:.1}h20\" stroke=\"{colour}\" stroke-width=\"3\"{pattern}/>")?;
            }
            false => writeln!(svg, "<circle cx=\"{:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>", x + 17.0)?,
        }
        writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + 33.0, y + 4.5, escaped(name))?;
    }
    Ok(())
}

/// Text as XML. Control characters, which XML does not allow, are replaced.
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

/// The points that can be drawn.
pub fn finite(points: &[[f64; 2]]) -> Vec<[f64; 2]> {
    points.iter().copied().filter(|point| point.iter().all(|v| v.abs() <= LARGEST)).collect()
}

/// About `POINTS` of the points, evenly chosen, and the last point.
pub fn thinned(points: Vec<[f64; 2]>) -> Vec<[f64; 2]> {
    let (every, last) = (points.len().div_ceil(POINTS).max(1), points.len().saturating_sub(1));
    points.into_iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last).map(|(_, p)| p).collect()
}

/// A range a little wider than the range of the values.
fn padded(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    // No values.
    if low > high {
        return 0.0..1.0;
    }
    let margin = match high - low {
        // All values are 0.
        0.0 if low == 0.0 => 1.0,
        // All values are equal.
        0.0 => 0.5 * low.abs().max(1e-6),
        range => (0.05 * range).max(MIN_MARGIN_SHARE * low.abs().max(high.abs())).max(MIN_MARGIN),
    };
    low - margin..high + margin
}

/// The maximum of ticks on the x axis. If all x are whole numbers, such as steps, it allows no ticks between them.
fn most_ticks(series: &[Vec<[f64; 2]>]) -> usize {
    let xs = || series.iter().flatten().map(|point| point[0]);
    let (low, high) = xs().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    match xs().all(|x| x.fract() == 0.0) && high - low < TICKS[0] as f64 {
        true => (high - low).max(0.0) as usize + 1,
        false => TICKS[0],
    }
}

/// The corner of a panel that holds the fewest points: whether it is on the right, and whether it is at the top.
fn legend_corner(series: &[Vec<[f64; 2]>], ranges: &[Range<f64>; 2]) -> [bool; 2] {
    let points = |corner: [bool; 2]| {
        let is_near = |point: &&[f64; 2]| {
            (0..2).all(|axis| (share(point[axis], &ranges[axis]) - f64::from(u8::from(corner[axis]))).abs() < 0.4)
        };
        series.iter().flatten().filter(is_near).count()
    };
    // If several corners hold as few, the first of these is taken.
    let corners = [[true, false], [true, true], [false, true], [false, false]];
    corners.into_iter().min_by_key(|corner| points(*corner)).unwrap_or(corners[0])
}

/// The ticks in a range: multiples of 1, 2 or 5 times a power of ten, about `at_most` of them.
fn ticks(range: &Range<f64>, at_most: usize) -> Vec<f64> {
    let least_step = (range.end - range.start) / at_most as f64;
    let power = 10f64.powf(least_step.log10().floor());
    let step = [1.0, 2.0, 5.0].map(|digit| digit * power).into_iter().find(|step| *step >= least_step * (1.0 - 1e-9));
    let step = step.unwrap_or(10.0 * power);
    let first = (range.start / step - 1e-9).ceil();
    let ticks = (0..=at_most).map(|i| (first + i as f64) * step);
    ticks.take_while(|value| *value <= range.end + 1e-9 * step).collect()
}

/// The label of a tick: its value, with enough digits to tell it from the neighbouring ticks.
fn label(value: f64, ticks: &[f64]) -> String {
    let [first, second, ..] = ticks else { return format!("{value:.2e}") };
    let step = second - first;
    let largest = ticks.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    // A tick at 0, which rounding has made a tiny number.
    if value.abs() < 1e-9 * largest {
        return "0".into();
    }
    let digits = |range: f64| (-range.log10() - 1e-9).ceil().clamp(0.0, 12.0) as usize;
    match (1e-3..1e6).contains(&largest) {
        true => format!("{value:.*}", digits(step)),
        false => format!("{value:.*e}", digits(step / largest)),
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
        assert!(points.len() <= POINTS + 1 && points.last() == Some(&[99_999.0, 0.0]));
    }

    #[test]
    fn ticks_of_steps_are_whole_and_zeros_are_not_magnified() {
        let steps = |count: usize| most_ticks(&[(1..=count).map(|step| [step as f64, 0.5]).collect()]);
        assert_eq!([1, 2, 5, 100].map(steps), [1, 2, 5, TICKS[0]]);
        assert_eq!(ticks(&padded([1.0, 2.0].into_iter()), steps(2)), [1.0, 2.0]);
        assert_eq!(most_ticks(&[vec![[0.5, 0.0], [1.5, 0.0]]]), TICKS[0]);
        assert_eq!(padded([0.0, 0.0].into_iter()), -1.0..1.0);
    }

    #[test]
    fn the_legend_is_in_the_emptiest_corner() {
        let falling = vec![(0..10).map(|i| [f64::from(i), -f64::from(i)]).collect()];
        assert_eq!(legend_corner(&falling, &[0.0..9.0, -9.0..0.0]), [true, true]);
        let rising = vec![(0..10).map(|i| [f64::from(i), f64::from(i)]).collect()];
        assert_eq!(legend_corner(&rising, &[0.0..9.0, 0.0..9.0]), [true, false]);
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
