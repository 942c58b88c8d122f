//! Plots as PNG.

use std::path::Path;
use std::sync::Once;

use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};
use roll_core::files::write_atomically;
use roll_core::{Error, Result};
use roll_data::{Picture, encode_png};

/// Pixels of a panel.
const PANEL: (u32, u32) = (820, 300);
const FONT: &str = "sans-serif";
/// Colours of series.
pub const COLOURS: [RGBColor; 6] = [
    RGBColor(38, 98, 182),
    RGBColor(205, 92, 28),
    RGBColor(46, 134, 72),
    RGBColor(128, 72, 160),
    RGBColor(196, 160, 30),
    RGBColor(30, 160, 170),
];

/// A line and what it is called.
pub struct Series {
    /// For the legend.
    pub name: String,
    /// x and y; values that are not finite are left out.
    pub points: Vec<[f64; 2]>,
    /// Joined by a line, or dots alone.
    pub line: bool,
    /// Which of the colours.
    pub colour: usize,
}

/// Axes with some series.
pub struct Panel {
    /// Above it.
    pub title: String,
    /// Names of x and y.
    pub axes: [String; 2],
    /// What is drawn.
    pub series: Vec<Series>,
}

/// Writes panels below one another.
pub fn write(path: &Path, panels: &[Panel]) -> Result<()> {
    let (width, height) = (PANEL.0, PANEL.1 * panels.len().max(1) as u32);
    let mut rgb = vec![255; 3 * (width * height) as usize];
    draw(&mut rgb, (width, height), panels)
        .map_err(|e| Error::Misuse(format!("drawing the plot {}: {e}", path.display())))?;
    let picture = Picture { width: width as usize, height: height as usize, rgb };
    write_atomically(path, &encode_png(&picture)?)
}

fn draw(rgb: &mut [u8], size: (u32, u32), panels: &[Panel]) -> std::result::Result<(), Box<dyn std::error::Error>> {
    static FONTS: Once = Once::new();
    FONTS.call_once(|| {
        // The only failure is a font that cannot be parsed; drawing then reports it.
        let _ = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
    let root = BitMapBackend::with_buffer(rgb, size).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, panel) in root.split_evenly((panels.len().max(1), 1)).iter().zip(panels) {
        let points = || panel.series.iter().flat_map(|s| &s.points).filter(|p| p.iter().all(|v| v.is_finite()));
        let range = |axis: usize| padded(points().map(|p| p[axis]));
        let mut chart = ChartBuilder::on(area)
            .caption(&panel.title, (FONT, 19))
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d(range(0), range(1))?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(228, 228, 228))
            .label_style((FONT, 14))
            .x_desc(&panel.axes[0])
            .y_desc(&panel.axes[1])
            .y_label_formatter(&|v| short(*v))
            .x_label_formatter(&|v| short(*v))
            .draw()?;
        for series in &panel.series {
            let colour = COLOURS[series.colour % COLOURS.len()];
            let points = series.points.iter().filter(|p| p.iter().all(|v| v.is_finite())).map(|&[x, y]| (x, y));
            let drawn = match series.line {
                true => chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?,
                false => chart.draw_series(points.map(|p| Circle::new(p, 3, colour.mix(0.6).filled())))?,
            };
            drawn
                .label(&series.name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 2), (x + 16, y + 2)], colour.filled()));
        }
        if panel.series.len() > 1 {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::LowerRight)
                .background_style(WHITE.mix(0.8))
                .border_style(RGBColor(200, 200, 200))
                .label_font((FONT, 14))
                .draw()?;
        }
    }
    root.present()?;
    Ok(())
}

/// A little more than the values cover.
pub fn padded(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return 0.0..1.0;
    }
    let space = match high - low {
        0.0 => 0.5 * low.abs().max(1e-6),
        range => 0.05 * range,
    };
    low - space..high + space
}

/// A number in few characters.
pub fn short(value: f64) -> String {
    match value.abs() {
        // What rounding leaves of a 0 on the axis.
        v if v < 1e-12 => "0".into(),
        v if !(1e-3..1e5).contains(&v) => format!("{value:.1e}"),
        v if v >= 100.0 => format!("{value:.0}"),
        _ => format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').into(),
    }
}

/// Means over a window of `width` points that ends at each.
pub fn smoothed(points: &[[f64; 2]], width: usize) -> Vec<[f64; 2]> {
    let window = |i: usize| &points[(i + 1).saturating_sub(width.max(1))..=i];
    let mean = |i: usize| window(i).iter().map(|p| p[1]).sum::<f64>() / window(i).len() as f64;
    (0..points.len()).map(|i| [points[i][0], mean(i)]).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_is_drawn_whatever_the_values_are() {
        let dir = tempfile::tempdir().unwrap();
        let series = |points: Vec<[f64; 2]>| Series { name: "s".into(), points, line: true, colour: 0 };
        for points in [vec![], vec![[0.0, 1.0]], vec![[0.0, f64::NAN], [1.0, 2.0], [2.0, 1e-9]]] {
            let panel = Panel { title: "t".into(), axes: ["x".into(), "y".into()], series: vec![series(points)] };
            let path = dir.path().join("plot.png");
            write(&path, &[panel]).unwrap();
            let drawn = roll_data::read_image(&path, roll_data::Sizing::Exact([304, 816])).unwrap();
            assert!(drawn.f32s().unwrap().iter().any(|&v| v < 0.0), "nothing is drawn");
        }
    }

    #[test]
    fn smoothing_takes_the_mean_of_what_came_before() {
        let points: Vec<[f64; 2]> = [1.0, 3.0, 5.0].iter().enumerate().map(|(i, &y)| [i as f64, y]).collect();
        assert_eq!(smoothed(&points, 2), [[0.0, 1.0], [1.0, 2.0], [2.0, 4.0]]);
    }
}
