//! ffprobe's description of a video stream.

use std::ffi::OsString;
use std::path::Path;

use roll_core::serde_json::{self, Value};

use super::process::Program;
use super::y4m::Planes;
use super::{Failure, input};
use crate::color::{DeclaredColor, Matrix, Yuv420, to_rgb, to_rgb_444};
use crate::orientation::Orientation;
use crate::picture::{Picture, check_size};

/// The properties of a video stream.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StreamDescription {
    /// Width and height as stored.
    pub size: [usize; 2],
    pub fps: f64,
    pub pixel_aspect: Option<[u32; 2]>,
    pub orientation: Orientation,
    pub duration: Option<f64>,
    /// Whether the container is an MPEG transport stream, whose parts may be joined as they are.
    pub is_transport_stream: bool,
    pixel_format: PixelFormat,
    color: DeclaredColor,
}

/// Frame rates that a stream may have.
const PLAUSIBLE_FPS: std::ops::RangeInclusive<f64> = 0.01..=1000.0;
/// Frame rate of a stream that states no plausible one.
const DEFAULT_FPS: f64 = 25.0;

/// The kinds of pixel formats that need different filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PixelFormat {
    /// Y'CbCr 4:2:0.
    Yuv420p,
    /// Other Y'CbCr, and grey.
    Other,
    Rgb,
}

impl StreamDescription {
    /// Describes a file of the format that ffmpeg calls `format`; `None` lets ffmpeg detect it.
    pub fn of(path: &Path, format: Option<&str>) -> Result<Self, Failure> {
        let entries = "stream=width,height,pix_fmt,sample_aspect_ratio,avg_frame_rate,r_frame_rate,color_range,\
                       color_space,duration:stream_side_data=displaymatrix:format=duration,format_name";
        Self::parse(&ffprobe(path, format, entries)?).map_err(Failure::Failed)
    }

    /// Reads ffprobe's answer.
    fn parse(description: &Value) -> Result<Self, String> {
        let stream = &description["streams"][0];
        if !stream.is_object() {
            return Err("there is no video in it".into());
        }
        let text = |key: &str| stream[key].as_str().unwrap_or_default();
        let pixels = |key: &str| stream[key].as_u64().unwrap_or(0) as usize;
        let size = [pixels("width"), pixels("height")];
        check_size(size[0], size[1])?;
        let format = text("pix_fmt");
        let yuv420_formats = ["yuv420p", "yuvj420p", "yuva420p", "nv12", "nv21", "p010", "p016"];
        let is_yuv420 = yuv420_formats.iter().any(|begin| format.starts_with(begin));
        let is_rgb = format == "pal8" || ["rgb", "bgr", "gbr"].iter().any(|part| format.contains(part));
        let pixel_format = match (is_yuv420, is_rgb) {
            (true, _) => PixelFormat::Yuv420p,
            (false, true) => PixelFormat::Rgb,
            (false, false) => PixelFormat::Other,
        };
        // The codes of matrix coefficients in ITU-T H.273.
        let matrix_code = match text("color_space") {
            "bt709" => 1,
            "fcc" => 4,
            "bt470bg" => 5,
            "smpte170m" => 6,
            "smpte240m" => 7,
            "bt2020nc" | "bt2020c" => 9,
            "" | "unknown" | "unspecified" | "reserved" => DeclaredColor::UNSPECIFIED_MATRIX,
            _ if pixel_format == PixelFormat::Rgb => DeclaredColor::UNSPECIFIED_MATRIX,
            other => return Err(format!("the colour space `{other}` is not supported")),
        };
        let rate = |key: &str| ratio(text(key), '/').map(|[n, d]| f64::from(n) / f64::from(d));
        let is_plausible = |fps: &f64| PLAUSIBLE_FPS.contains(fps);
        let side_data = stream["side_data_list"].as_array().into_iter().flatten();
        let orientation = side_data.filter_map(|data| matrix_of(data["displaymatrix"].as_str()?)).next();
        let seconds = |value: &Value| value.as_str()?.parse::<f64>().ok().filter(|s| s.is_finite() && *s > 0.0);
        Ok(Self {
            size,
            fps: rate("avg_frame_rate")
                .filter(is_plausible)
                .or(rate("r_frame_rate").filter(is_plausible))
                .unwrap_or(DEFAULT_FPS),
            pixel_aspect: ratio(text("sample_aspect_ratio"), ':'),
            orientation: orientation.map(Orientation::from_matrix).unwrap_or_default(),
            duration: seconds(&stream["duration"]).or(seconds(&description["format"]["duration"])),
            is_transport_stream: description["format"]["format_name"] == "mpegts",
            pixel_format,
            color: DeclaredColor {
                matrix_code,
                is_full_range: text("color_range") == "pc" || format.starts_with("yuvj"),
            },
        })
    }

    /// The ffmpeg filters that convert the stream to 8-bit planes.
    pub fn filters(&self) -> String {
        let chroma = if self.has_yuv420_planes() { "yuv420p" } else { "yuv444p" };
        match (self.pixel_format, self.color.is_full_range) {
            (PixelFormat::Rgb, _) => format!("scale=out_color_matrix=bt601:out_range=tv,format={chroma}"),
            (_, true) => format!("scale=in_range=pc:out_range=pc,format={chroma}"),
            (PixelFormat::Yuv420p, false) => format!("format={chroma}"),
            (PixelFormat::Other, false) => format!("scale=out_range=tv,format={chroma}"),
        }
    }

    /// Whether the planes have 4:2:0 chroma. An odd last row or column has chroma of its own, which only 4:4:4 planes
    /// represent.
    fn has_yuv420_planes(&self) -> bool {
        self.pixel_format == PixelFormat::Yuv420p && self.size.iter().all(|side| side % 2 == 0)
    }

    /// Converts planes that [`StreamDescription::filters`] produced to RGB.
    pub fn to_rgb(&self, planes: &Planes) -> Result<Picture, String> {
        let is_rgb = self.pixel_format == PixelFormat::Rgb;
        let matrix = if is_rgb { Matrix::BT601_LIMITED } else { self.declared_matrix()? };
        let (width, height, [y, u, v]) = (planes.width, planes.height, planes.split());
        if planes.is_yuv420 {
            let yuv = Yuv420 { width, height, y, u, v, y_stride: width, uv_stride: width / 2 };
            if !yuv.is_consistent() {
                return Err(format!("ffmpeg gives odd frames of {width} x {height} pixels"));
            }
            return Ok(to_rgb(yuv, matrix));
        }
        Ok(to_rgb_444(width, height, [y, u, v], matrix))
    }

    fn declared_matrix(&self) -> Result<Matrix, String> {
        let DeclaredColor { matrix_code, is_full_range } = self.color;
        let unknown = || format!("matrix coefficients {matrix_code} are not supported");
        Matrix::from_code(matrix_code, is_full_range).ok_or_else(unknown)
    }
}

/// The answer of ffprobe about these entries of the video stream.
pub(super) fn ffprobe(path: &Path, format: Option<&str>, entries: &str) -> Result<Value, Failure> {
    let mut arguments: Vec<OsString> = input(path, format);
    arguments.extend(["-select_streams", "V:0", "-show_entries", entries, "-of", "json"].map(Into::into));
    let output = Program::Ffprobe.output(&arguments)?;
    Ok(serde_json::from_slice(&output).map_err(|e| format!("ffprobe's answer is no JSON: {e}"))?)
}

/// Parses a display matrix: three lines such as "00000000: 0 65536 0". Returns the first two numbers of the first two
/// lines, which are the rotation.
fn matrix_of(text: &str) -> Option<[i32; 4]> {
    let mut rows = text.lines().filter_map(|line| line.split_once(':')).map(|(_, row)| {
        let mut numbers = row.split_whitespace().map_while(|word| word.parse::<i32>().ok());
        Some([numbers.next()?, numbers.next()?])
    });
    let ([a, b], [c, d]) = (rows.next()??, rows.next()??);
    Some([a, b, c, d])
}

/// Parses a ratio such as "30000/1001".
fn ratio(text: &str, separator: char) -> Option<[u32; 2]> {
    let (a, b) = text.split_once(separator)?;
    Some([a.parse().ok()?, b.parse().ok().filter(|b| *b != 0)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ffprobe_fields_select_the_conversion() {
        let description = |stream: Value| StreamDescription::parse(&serde_json::json!({"streams": [stream]}));
        let matrix = "\n00000000:            0       65536           0\n00000001:       -65536           0           0\n\
                      00000002:            0           0  1073741824\n";
        let stream = |format: &str| {
            serde_json::json!({
                "width": 64, "height": 48, "pix_fmt": format, "color_space": "bt709", "sample_aspect_ratio": "4:3",
                "avg_frame_rate": "0/0", "r_frame_rate": "30000/1001", "side_data_list": [{}, {"displaymatrix": matrix}],
            })
        };
        let ten_bits = description(stream("yuv420p10le")).unwrap();
        assert_eq!((ten_bits.filters().as_str(), ten_bits.color.matrix_code), ("format=yuv420p", 1));
        assert_eq!(
            (ten_bits.pixel_aspect, ten_bits.orientation),
            (Some([4, 3]), Orientation { is_mirrored: false, quarters: 1 })
        );
        assert!((ten_bits.fps - 29.97).abs() < 0.001);
        assert_eq!(description(stream("yuvj420p")).unwrap().filters(), "scale=in_range=pc:out_range=pc,format=yuv420p");
        assert_eq!(description(stream("yuv422p")).unwrap().filters(), "scale=out_range=tv,format=yuv444p");
        assert!(description(stream("gbrp")).unwrap().filters().contains("bt601"));
        assert!(description(Value::Null).unwrap_err().contains("no video"));
        let mut odd = stream("yuv420p");
        odd["width"] = 63.into();
        assert_eq!(description(odd.clone()).unwrap().filters(), "format=yuv444p");
        odd["width"] = 1_000_000.into();
        assert!(description(odd).unwrap_err().contains("not accepted"));
        let mut other = stream("yuv420p");
        other["color_space"] = "ycgco".into();
        assert!(description(other).unwrap_err().contains("ycgco"));
    }
}
