//! Plots: panels of series over two axes, drawn as PNG. The report draws the same panels by `charts.js`, with the
//! colours here.

use std::ops::Range;
use std::path::Path;
use std::sync::Once;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{BoldPoints, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};
use roll_core::{Error, Result};
use roll_external::files::write_atomically;
use roll_media::{Picture, encode_png};

use crate::progress::counted;

/// Width and height of a panel in a PNG, in pixels.
const PNG_PANEL: (u32, u32) = (820, 300);
/// Name of the bundled font.
const FONT: &str = "sans-serif";
/// Font sizes in pixels.
const TITLE: u32 = 19;
const TEXT: u32 = 15;
/// The palette, for a light page.
const COLOURS: [RGBColor; 6] = [
    RGBColor(38, 98, 182),
    RGBColor(205, 92, 28),
    RGBColor(46, 134, 72),
    RGBColor(128, 72, 160),
    RGBColor(196, 160, 30),
    RGBColor(30, 160, 170),
];
/// The palette for a dark page.
const LIGHT_COLOURS: [RGBColor; 6] = [
    RGBColor(110, 168, 255),
    RGBColor(255, 148, 88),
    RGBColor(98, 202, 130),
    RGBColor(200, 156, 236),
    RGBColor(230, 200, 92),
    RGBColor(80, 208, 218),
];
const GREY: RGBColor = RGBColor(90, 90, 90);
const GRID: RGBColor = RGBColor(228, 228, 228);
const AXIS: RGBColor = RGBColor(150, 150, 150);
/// Most labels on the x axis and on the y axis.
const TICKS: [usize; 2] = [8, 6];
/// Most points of a series, about. A series with more is thinned out.
const POINTS: usize = 1500;
/// Most points of a line that has a mark at each point.
const MARKED: usize = 12;
/// Largest value that is drawn. The range of larger ones would overflow.
const LARGEST: f64 = 1e300;
/// Smallest margin of an axis beyond its values, as a part of the largest of them. On a narrower axis the rounding of
/// f32 would fill the panel, and plotters' search for ticks might not end.
const MIN_MARGIN_SHARE: f64 = 1e-6;
/// The same as an absolute number, for values near 0.
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
    /// Index of the dash pattern on a page. A PNG has solid lines.
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
    /// Drawn above the axes of a PNG.
    pub title: String,
    /// Names of the x and y axes; an empty name is not drawn.
    pub axes: [String; 2],
    /// Later series cover earlier ones.
    pub series: Vec<Series>,
}

/// Writes the panels as a PNG, one below the other, with titles and legends.
pub fn write(path: &Path, panels: &[Panel]) -> Result<()> {
    let (width, height) = (PNG_PANEL.0, PNG_PANEL.1 * panels.len().max(1) as u32);
    let mut rgb = vec![255; 3 * (width * height) as usize];
    draw_all(&mut rgb, (width, height), panels).map_err(|e| problem(&path.display().to_string(), &e))?;
    let picture = Picture { width: width as usize, height: height as usize, rgb };
    write_atomically(path, &encode_png(&picture)?)
}

fn draw_all<'a>(
    rgb: &'a mut [u8],
    size: (u32, u32),
    panels: &[Panel],
) -> std::result::Result<(), DrawError<BitMapBackend<'a>>> {
    let root = BitMapBackend::with_buffer(rgb, size).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, panel) in root.split_evenly((panels.len().max(1), 1)).iter().zip(panels) {
        draw(area, panel)?;
    }
    root.present()
}

/// The CSS variables of the palette, for a light page and for a dark one.
pub fn css_palettes() -> [String; 2] {
    let variables = |colours: &[RGBColor]| -> String {
        colours.iter().enumerate().map(|(i, colour)| format!("--c{i}: {}; ", hex(*colour))).collect()
    };
    [variables(&COLOURS), variables(&LIGHT_COLOURS)]
}

fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
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

/// Axes over a drawing area.
type Chart<'a, B> = ChartContext<'a, B, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type DrawError<B> = DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>;

fn problem(plot: &str, error: &dyn std::error::Error) -> Error {
    Error::Misuse(format!("drawing the plot {plot}: {error}"))
}

/// Draws a panel over the whole area.
fn draw<B: DrawingBackend>(area: &DrawingArea<B, Shift>, panel: &Panel) -> std::result::Result<(), DrawError<B>> {
    static FONTS: Once = Once::new();
    FONTS.call_once(|| {
        // The only failure is a font that cannot be parsed; drawing then reports it.
        let _ = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
    let (names, series): (Vec<String>, Vec<Vec<[f64; 2]>>) = panel.series.iter().map(Series::drawn).unzip();
    let ranges = [0, 1].map(|axis| padded(series.iter().flatten().map(|p| p[axis])));
    let max_ticks = [most_ticks(&series), TICKS[1]];
    let ticks = [0, 1].map(|axis| (max_ticks[axis], ticks(&ranges[axis], max_ticks[axis])));
    let [x_range, y_range] = ranges;
    let legend = legend_position(&series, &x_range, &y_range);

    let mut chart = ChartBuilder::on(area);
    chart.margin(10).x_label_area_size(40).y_label_area_size(70).caption(&panel.title, (FONT, TITLE));
    let mut chart = chart.build_cartesian_2d(x_range, y_range)?;
    draw_axes(&mut chart, panel, ticks)?;
    draw_series(&mut chart, panel, names, series)?;
    if panel.series.len() > 1 {
        chart
            .configure_series_labels()
            .position(legend)
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .label_font((FONT, TEXT))
            .draw()?;
    }
    Ok(())
}

/// Draws axes and grid. `ticks` has, for the x axis and the y axis, the most labels and the labelled values.
fn draw_axes<B: DrawingBackend>(
    chart: &mut Chart<'_, B>,
    panel: &Panel,
    ticks: [(usize, Vec<f64>); 2],
) -> std::result::Result<(), DrawError<B>> {
    let [max_x_labels, max_y_labels] = [ticks[0].0, ticks[1].0];
    let formatters = ticks.map(|(_, ticks)| move |value: &f64| label(*value, &ticks));
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(AXIS)
        .label_style((FONT, TEXT).into_font().color(&GREY))
        .set_all_tick_mark_size(4)
        .x_labels(max_x_labels)
        .y_labels(max_y_labels)
        .x_label_formatter(&formatters[0])
        .y_label_formatter(&formatters[1]);
    if !panel.axes[0].is_empty() {
        mesh.x_desc(&panel.axes[0]);
    }
    if !panel.axes[1].is_empty() {
        mesh.y_desc(&panel.axes[1]);
    }
    mesh.draw()
}

/// Draws the series, whose names and points are as [`Series::drawn`] returns them.
fn draw_series<B: DrawingBackend>(
    chart: &mut Chart<'_, B>,
    panel: &Panel,
    names: Vec<String>,
    series: Vec<Vec<[f64; 2]>>,
) -> std::result::Result<(), DrawError<B>> {
    for ((drawn, name), points) in panel.series.iter().zip(names).zip(series) {
        let colour = COLOURS[drawn.colour % COLOURS.len()];
        let mark = if points.len() <= MARKED { 3 } else { 0 };
        let points = points.into_iter().map(|[x, y]| (x, y));
        let drawn = match drawn.is_line() {
            true => {
                let style = colour.stroke_width(2).filled();
                chart.draw_series(LineSeries::new(points, style).point_size(mark))?
            }
            false => chart.draw_series(points.map(|p| Circle::new(p, 2, colour.mix(0.5).filled())))?,
        };
        drawn.label(name).legend(move |(x, y)| Rectangle::new([(x, y - 2), (x + 16, y + 2)], colour.filled()));
    }
    Ok(())
}

/// Points without those that cannot be drawn.
pub fn finite(points: &[[f64; 2]]) -> Vec<[f64; 2]> {
    points.iter().copied().filter(|point| point.iter().all(|v| v.abs() <= LARGEST)).collect()
}

/// Every n-th point, and the last.
pub fn thinned(points: Vec<[f64; 2]>) -> Vec<[f64; 2]> {
    let (every, last) = (points.len().div_ceil(POINTS).max(1), points.len().saturating_sub(1));
    points.into_iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last).map(|(_, p)| p).collect()
}

/// A range a little wider than that of the values.
fn padded(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    // No values.
    if low > high {
        return 0.0..1.0;
    }
    let margin = match high - low {
        0.0 if low == 0.0 => 1.0,
        0.0 => 0.5 * low.abs().max(1e-6),
        range => (0.05 * range).max(MIN_MARGIN_SHARE * low.abs().max(high.abs())).max(MIN_MARGIN),
    };
    low - margin..high + margin
}

/// The most ticks of the x axis. If all x are whole numbers, such as steps, there are no ticks between them.
fn most_ticks(series: &[Vec<[f64; 2]>]) -> usize {
    let xs = || series.iter().flatten().map(|point| point[0]);
    let (low, high) = xs().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    match xs().all(|x| x.fract() == 0.0) && high - low < TICKS[0] as f64 {
        true => (high - low).max(0.0) as usize + 1,
        false => TICKS[0],
    }
}

/// The corner of the panel, of two fifths of its sides, that has the fewest points.
fn legend_position(series: &[Vec<[f64; 2]>], x: &Range<f64>, y: &Range<f64>) -> SeriesLabelPosition {
    let share = |value: f64, range: &Range<f64>| (value - range.start) / (range.end - range.start);
    let corners = [
        (SeriesLabelPosition::LowerRight, [1.0, 0.0]),
        (SeriesLabelPosition::UpperRight, [1.0, 1.0]),
        (SeriesLabelPosition::UpperLeft, [0.0, 1.0]),
        (SeriesLabelPosition::LowerLeft, [0.0, 0.0]),
    ];
    let points_near = |corner: [f64; 2]| {
        let is_near =
            |p: &&[f64; 2]| (share(p[0], x) - corner[0]).abs() < 0.4 && (share(p[1], y) - corner[1]).abs() < 0.4;
        series.iter().flatten().filter(is_near).count()
    };
    let [first, others @ ..] = corners.map(|(position, corner)| (points_near(corner), position));
    others.into_iter().fold(first, |best, other| if other.0 < best.0 { other } else { best }).1
}

/// The values that plotters labels.
fn ticks(range: &Range<f64>, at_most: usize) -> Vec<f64> {
    RangedCoordf64::from(range.clone()).key_points(BoldPoints(at_most))
}

/// A tick's value, with as many digits as tell it from its neighbours.
fn label(value: f64, ticks: &[f64]) -> String {
    let [first, second, ..] = ticks else { return format!("{value:.2e}") };
    let step = second - first;
    let largest = ticks.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    // A 0 on the axis that rounding has made a tiny number.
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

    #[test]
    fn draws_extreme_and_missing_values() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plot.png");
        let at = |ys: &[f64]| ys.iter().enumerate().map(|(i, &y)| [i as f64, y]).collect::<Vec<_>>();
        // Steps without a value.
        let steps = [u64::MAX as f64, u64::MAX as f64 - 4096.0, i64::MAX as f64, -5.0, 1e308, f64::MIN_POSITIVE];
        for [x, y] in steps.iter().flat_map(|&x| [0.0, 0.5, 1e308].map(|y| [x, y])) {
            write(&path, &[panel(vec![[0.0, 1.0], [x, y], [x, -y]])]).unwrap();
            write(&path, &[panel(vec![[x, y]])]).unwrap();
        }
        for ys in [
            &[][..],
            &[1.0],
            &[f64::NAN, 2.0, 1e-9],
            &[1e300, -1e300],
            &[f64::MAX, f64::MIN, f64::INFINITY],
            &[0.0, f64::MIN_POSITIVE],
            &[4096.0, 4096.000000000001],
            &[1e300, 1.0000000000000002e300],
        ] {
            let panel = panel(at(ys));
            write(&path, &[panel]).unwrap();
            let drawn = roll_media::read_image(&path, roll_media::Sizing::Exact([304, 816])).unwrap();
            assert!(drawn.f32s().unwrap().iter().any(|&v| v < 0.0), "nothing is drawn");
        }
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
        assert!(matches!(legend_position(&falling, &(0.0..9.0), &(-9.0..0.0)), SeriesLabelPosition::UpperRight));
        let rising = vec![(0..10).map(|i| [f64::from(i), f64::from(i)]).collect()];
        assert!(matches!(legend_position(&rising, &(0.0..9.0), &(0.0..9.0)), SeriesLabelPosition::LowerRight));
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
