//! Prepares frames as a network's input: resizing, cropping or padding, normalisation, the order of channels and axes.
//! Every step has its pullback.

use roll_core::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Filter, Resize};

/// How frames become the input of a network.
///
/// Frames are resized and cropped or padded, then clamped to the range of pixels (like 8-bit pictures), then their
/// channels are reordered, scaled to `range`, reduced by `mean`, and divided by `std`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Input {
    /// Size in pixels: side of a square, or `[height, width]`. If absent, the network's own size if it is fixed,
    /// otherwise the frames' size.
    pub size: Option<Size>,
    /// How a frame of another aspect ratio is fitted into `size`.
    pub fit: Fit,
    /// Length of the frame's shorter side after resizing and before cropping, with `fit: crop`. If absent, the frame is
    /// resized to just cover `size`.
    pub shorter_side: Option<usize>,
    /// Filter of the resizing.
    pub filter: Filter,
    /// Brightness around the frame with `letterbox`, from 0 (black) to 1 (white).
    pub padding: f32,
    /// The values of black and white, such as `[0, 1]`, `[0, 255]` or `[-1, 1]`.
    pub range: [f32; 2],
    /// Subtracted from each channel after `range` was applied; in the network's channel order.
    pub mean: [f32; 3],
    /// Divisor of each channel after `mean` was subtracted; in the network's channel order.
    pub std: [f32; 3],
    /// The network's channel order.
    pub order: ChannelOrder,
    /// The network's order of axes.
    pub layout: Layout,
}

impl Default for Input {
    fn default() -> Self {
        Self {
            size: None,
            fit: Fit::Stretch,
            shorter_side: None,
            filter: Filter::Bilinear,
            padding: 0.0,
            range: [0.0, 1.0],
            mean: [0.0; 3],
            std: [1.0; 3],
            order: ChannelOrder::Rgb,
            layout: Layout::Nchw,
        }
    }
}

/// A size in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Size {
    /// Side of a square.
    Side(usize),
    /// Height and width.
    Sides([usize; 2]),
}

impl Size {
    /// Height and width.
    pub fn sides(self) -> [usize; 2] {
        match self {
            Self::Side(side) => [side, side],
            Self::Sides(sides) => sides,
        }
    }
}

/// The order of a network's colour channels. Frames are RGB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChannelOrder {
    /// Red first.
    Rgb,
    /// Blue first.
    Bgr,
}

/// How a frame of another aspect ratio is fitted into the input's size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// The aspect ratio changes.
    #[default]
    Stretch,
    /// The frame covers the input, and the excess is cropped on both sides.
    Crop,
    /// The frame is centred within the input, surrounded by `padding`.
    Letterbox,
    /// The frame is in the upper left corner of the input.
    LetterboxCorner,
}

/// Axes of a network's input: N items, C channels, T frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// A picture, channels first.
    #[default]
    Nchw,
    /// A picture, channels last.
    Nhwc,
    /// All scored frames as one item, channels first.
    Ncthw,
    /// All scored frames as one item, frames first.
    Ntchw,
}

impl Layout {
    /// Whether all frames form one item of the batch.
    pub fn is_video(self) -> bool {
        matches!(self, Self::Ncthw | Self::Ntchw)
    }

    /// Indices of the axes height and width.
    pub fn sides(self) -> [usize; 2] {
        match self {
            Self::Nchw => [2, 3],
            Self::Nhwc => [1, 2],
            Self::Ncthw | Self::Ntchw => [3, 4],
        }
    }

    /// The shape of an input with `frames` pictures of `[height, width]`.
    pub fn shape(self, frames: usize, [h, w]: [usize; 2]) -> Vec<usize> {
        match self {
            Self::Nchw => vec![frames, 3, h, w],
            Self::Nhwc => vec![frames, h, w, 3],
            Self::Ncthw => vec![1, 3, frames, h, w],
            Self::Ntchw => vec![1, frames, 3, h, w],
        }
    }

    /// Rearranges frames `[T, 3, H, W]` to this layout.
    pub fn frames_to_layout(self, values: Vec<f32>, frames: usize) -> Vec<f32> {
        self.rearranged(values, frames, |in_frames, in_layout| (in_frames, in_layout))
    }

    /// Rearranges values in this layout to frames `[T, 3, H, W]`.
    pub fn layout_to_frames(self, values: Vec<f32>, frames: usize) -> Vec<f32> {
        self.rearranged(values, frames, |in_frames, in_layout| (in_layout, in_frames))
    }

    /// Moves every value. `direction` returns its positions before and after from its positions in `[T, 3, H, W]` and
    /// in this layout.
    fn rearranged(
        self,
        values: Vec<f32>,
        frames: usize,
        direction: impl Fn(usize, usize) -> (usize, usize),
    ) -> Vec<f32> {
        if matches!(self, Self::Nchw | Self::Ntchw) {
            return values;
        }
        let plane = values.len() / (frames * 3).max(1);
        // The position of pixel `i` of channel `c` of frame `t`.
        let position_in_layout = |t: usize, c: usize, i: usize| match self {
            Self::Nchw | Self::Ntchw => (t * 3 + c) * plane + i,
            Self::Nhwc => (t * plane + i) * 3 + c,
            Self::Ncthw => (c * frames + t) * plane + i,
        };
        let mut out = vec![0.0; values.len()];
        for (t, c) in (0..frames).flat_map(|t| (0..3).map(move |c| (t, c))) {
            for i in 0..plane {
                let (from, to) = direction((t * 3 + c) * plane + i, position_in_layout(t, c, i));
                out[to] = values[from];
            }
        }
        out
    }
}

/// Largest side of an input. A frame of 8192 x 8192 pixels takes 800 MB.
const MAX_SIDE: usize = 8192;

impl Input {
    /// Fails, and names the key below `prefix`, if a value is out of range.
    pub fn check(&self, prefix: &str) -> Result<()> {
        let invalid = |key: &str, problem: String| Err(Error::config(format!("{prefix}.{key}"), problem));
        let sides = self.size.into_iter().flat_map(Size::sides).chain(self.shorter_side);
        for side in sides {
            if !(1..=MAX_SIDE).contains(&side) {
                return invalid("size", format!("expected 1 to {MAX_SIDE} pixels, found {side}"));
            }
        }
        if let (Some(shorter), Some(size)) = (self.shorter_side, self.size) {
            let [h, w] = size.sides();
            if self.fit != Fit::Crop || shorter < h.max(w) {
                let problem = format!("goes with `fit: crop` and is at least as large as `size`, found {shorter}");
                return invalid("shorter_side", problem);
            }
        }
        if let Some(std) = self.std.iter().find(|s| !(s.is_finite() && **s != 0.0)) {
            return invalid("std", format!("expected finite numbers other than 0, found {std}"));
        }
        let numbers = self.mean.iter().chain(&self.range).chain([&self.padding]);
        if let Some(odd) = numbers.into_iter().find(|v| !v.is_finite()) {
            return invalid("mean", format!("expected finite numbers here and in `range` and `padding`, found {odd}"));
        }
        Ok(())
    }
}

/// The preparation that an [`Input`] describes, for frames of one size. Linear in the frame, except for the clamp to
/// the range of pixels.
#[derive(Clone, Debug)]
pub struct Preprocess {
    resize: Resize,
    /// Whether resized pixels may exceed the range and are clamped.
    overshoots: bool,
    /// `[height, width]` of the resized frame.
    resized: [usize; 2],
    /// Position (y, x) of the resized frame's upper left corner in the input; negative if the frame is cropped.
    corner: [isize; 2],
    /// `[height, width]` of the input.
    size: [usize; 2],
    /// Pixel around the frame, in [-1, 1].
    padding: f32,
    /// The channels of the input.
    channels: [Channel; 3],
}

/// One channel of the input: `factor * pixel + offset` of a pixel in [-1, 1].
#[derive(Clone, Copy, Debug)]
struct Channel {
    /// The channel of the frame.
    source: usize,
    factor: f32,
    offset: f32,
}

/// One row of the intersection of resized frame and input.
struct Row<'a> {
    channel: &'a Channel,
    /// Offset of the row's first pixel in the resized frame, `[3, height, width]`.
    resized_start: usize,
    /// Offset of the row's first pixel in the input, `[3, height, width]`.
    input_start: usize,
    length: usize,
}

/// Added before a length is rounded down, so that a rounding error does not take a pixel from a whole number.
const ROUNDING: f64 = 1e-9;
/// A pixel that exceeds the range by at most this much, through rounding, still has a gradient.
const SLACK: f32 = 1e-5;

impl Preprocess {
    /// Prepares for frames of `[height, width]`. Fails if a side of the resized frame would have no pixel.
    pub fn new(input: &Input, frame: [usize; 2]) -> Result<Self> {
        let size = input.size.map_or(frame, Size::sides);
        let scales = [0, 1].map(|i| size[i] as f64 / frame[i] as f64);
        let shorter_side_scale = input.shorter_side.map(|side| side as f64 / frame[0].min(frame[1]) as f64);
        let crop_scale = shorter_side_scale.unwrap_or(scales[0].max(scales[1]));
        let resized = match input.fit {
            Fit::Stretch => size,
            // The longer side is rounded down, as by the processors of Hugging Face and torchvision.
            Fit::Crop => frame.map(|side| (side as f64 * crop_scale + ROUNDING) as usize),
            Fit::Letterbox | Fit::LetterboxCorner => [0, 1].map(|i| {
                let side = (frame[i] as f64 * scales[0].min(scales[1])).round() as usize;
                side.min(size[i])
            }),
        };
        if frame.contains(&0) || resized.contains(&0) {
            return Err(Error::shape("frames for a network", "at least one pixel of each side, resized", &frame));
        }
        let corner = match input.fit {
            Fit::LetterboxCorner | Fit::Stretch => [0, 0],
            Fit::Crop => [0, 1].map(|i| -((resized[i].saturating_sub(size[i]) / 2) as isize)),
            Fit::Letterbox => [0, 1].map(|i| ((size[i] - resized[i]) / 2) as isize),
        };
        let [black, white] = input.range;
        let channels = std::array::from_fn(|k| {
            let source = if input.order == ChannelOrder::Bgr { 2 - k } else { k };
            // A pixel p in [-1, 1] becomes black + (white - black) * (p + 1) / 2, minus the mean, divided by std.
            let half = (white - black) / 2.0;
            let (factor, offset) = (half / input.std[k], (black + half - input.mean[k]) / input.std[k]);
            Channel { source, factor, offset }
        });
        Ok(Self {
            resize: Resize::new(frame, resized, input.filter),
            overshoots: input.filter.overshoots(),
            resized,
            corner,
            size,
            padding: 2.0 * input.padding - 1.0,
            channels,
        })
    }

    /// Size of the input, `[height, width]`.
    pub fn size(&self) -> [usize; 2] {
        self.size
    }

    /// Computes the input, `[3, height, width]`, of a frame `[3, H, W]` in [-1, 1].
    pub fn forward(&self, frame: &[f32]) -> Vec<f32> {
        let mut pixels = self.resize.forward(frame);
        if self.overshoots {
            pixels.iter_mut().for_each(|p| *p = p.clamp(-1.0, 1.0));
        }
        let plane = self.size[0] * self.size[1];
        let mut out = Vec::with_capacity(3 * plane);
        for Channel { factor, offset, .. } in &self.channels {
            out.extend(std::iter::repeat_n(factor * self.padding + offset, plane));
        }
        self.for_each_row(|Row { channel: Channel { factor, offset, .. }, resized_start, input_start, length }| {
            let row = pixels[resized_start..][..length].iter();
            out[input_start..][..length].iter_mut().zip(row).for_each(|(o, p)| *o = factor * p + offset);
        });
        out
    }

    /// The pullback: adds the cotangent of the frame to `gradient`, given the cotangent of the input.
    pub fn pull(&self, frame: &[f32], cotangent: &[f32], gradient: &mut [f32]) {
        let mut resized_cotangent = vec![0.0; 3 * self.resized[0] * self.resized[1]];
        self.for_each_row(|Row { channel: Channel { factor, .. }, resized_start, input_start, length }| {
            let row = cotangent[input_start..][..length].iter();
            let resized_row = &mut resized_cotangent[resized_start..][..length];
            resized_row.iter_mut().zip(row).for_each(|(r, g)| *r = factor * g);
        });
        if self.overshoots {
            // Pixels that were clamped have no gradient.
            for (r, pixel) in resized_cotangent.iter_mut().zip(self.resize.forward(frame)) {
                if pixel.abs() > 1.0 + SLACK {
                    *r = 0.0;
                }
            }
        }
        gradient.iter_mut().zip(self.resize.pull(&resized_cotangent)).for_each(|(g, r)| *g += r);
    }

    /// Calls `f` for each row in the intersection of resized frame and input, channel by channel.
    fn for_each_row(&self, mut f: impl FnMut(Row<'_>)) {
        let [height, width] = self.size;
        let [resized_height, resized_width] = self.resized;
        let [top, left] = self.corner;
        // The first column of the intersection, in the resized frame and in the input.
        let (resized_x, input_x) = ((-left).max(0) as usize, left.max(0) as usize);
        let length = (resized_width - resized_x.min(resized_width)).min(width - input_x.min(width));
        for (k, channel) in self.channels.iter().enumerate() {
            for y in 0..height {
                let resized_y = y as isize - top;
                if (0..resized_height as isize).contains(&resized_y) {
                    let resized_row = channel.source * resized_height + resized_y as usize;
                    f(Row {
                        channel,
                        resized_start: resized_row * resized_width + resized_x,
                        input_start: (k * height + y) * width + input_x,
                        length,
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient_check::{dot, noise};

    #[test]
    fn pullback_of_every_fit_matches_finite_differences() {
        for fit in [Fit::Stretch, Fit::Crop, Fit::Letterbox, Fit::LetterboxCorner] {
            for (frame, size) in [([12, 20], Size::Side(9)), ([8, 5], Size::Sides([10, 14]))] {
                let input = Input {
                    size: Some(size),
                    fit,
                    filter: Filter::Bicubic,
                    mean: [0.4, 0.5, 0.6],
                    std: [0.2, 0.3, 0.1],
                    order: ChannelOrder::Bgr,
                    ..Input::default()
                };
                let preprocess = Preprocess::new(&input, frame).unwrap();
                let n = 3 * frame[0] * frame[1];
                let picture: Vec<f32> = noise(1, n).iter().map(|v| 0.5 * v).collect();
                let (direction, cotangent) = (noise(2, n), noise(3, 3 * preprocess.size()[0] * preprocess.size()[1]));
                let value = |step: f32| {
                    let moved: Vec<f32> = picture.iter().zip(&direction).map(|(p, d)| p + step * d).collect();
                    dot(&preprocess.forward(&moved), &cotangent)
                };
                let mut gradient = vec![0.0; n];
                preprocess.pull(&picture, &cotangent, &mut gradient);
                let (numeric, exact) = ((value(0.05) - value(-0.05)) / 0.1, dot(&gradient, &direction));
                assert!((numeric - exact).abs() < 1e-3 * exact.abs().max(1.0), "{fit:?}: {numeric} {exact}");
            }
        }
    }

    #[test]
    fn frames_are_normalised_reordered_and_padded() {
        let input = Input { mean: [0.5, 0.0, 0.0], std: [0.25, 1.0, 1.0], ..Input::default() };
        let preprocess = Preprocess::new(&input, [1, 1]).unwrap();
        assert_eq!(preprocess.forward(&[1.0, 0.0, -1.0]), [2.0, 0.5, 0.0]);
        let boxed = Input { size: Some(Size::Side(4)), fit: Fit::Letterbox, padding: 1.0, ..Input::default() };
        let out = Preprocess::new(&boxed, [2, 4]).unwrap().forward(&[-1.0; 24]);
        assert_eq!(out[..16], [[1.0; 4], [0.0; 4], [0.0; 4], [1.0; 4]].concat());
        let bytes = Input { range: [0.0, 255.0], order: ChannelOrder::Bgr, ..Input::default() };
        assert_eq!(Preprocess::new(&bytes, [1, 1]).unwrap().forward(&[1.0, 0.0, -1.0]), [0.0, 127.5, 255.0]);
    }

    #[test]
    fn shorter_side_is_resized_and_centre_cropped() {
        let input = Input { size: Some(Size::Side(2)), fit: Fit::Crop, shorter_side: Some(4), ..Input::default() };
        let picture: Vec<f32> = (0..3 * 4 * 6).map(|i| (i % 24) as f32 / 24.0).collect();
        let out = Preprocess::new(&input, [4, 6]).unwrap().forward(&picture);
        let expected = [8, 9, 14, 15].map(|i| (i as f32 / 24.0 + 1.0) / 2.0);
        assert!(out[..4].iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{out:?}");
    }

    #[test]
    fn every_layout_round_trips() {
        let values = noise(7, 2 * 3 * 5);
        for layout in [Layout::Nchw, Layout::Nhwc, Layout::Ncthw, Layout::Ntchw] {
            assert_eq!(layout.layout_to_frames(layout.frames_to_layout(values.clone(), 2), 2), values);
        }
        let twelve: Vec<f32> = (0..12).map(|v| v as f32).collect();
        assert_eq!(Layout::Ncthw.frames_to_layout(twelve, 2), [0., 1., 6., 7., 2., 3., 8., 9., 4., 5., 10., 11.]);
    }

    #[test]
    fn out_of_range_values_are_named() {
        for (input, key) in [
            (Input { std: [0.0, 1.0, 1.0], ..Input::default() }, "reward.input.std"),
            (Input { size: Some(Size::Side(0)), ..Input::default() }, "reward.input.size"),
            (Input { mean: [f32::NAN; 3], ..Input::default() }, "reward.input.mean"),
        ] {
            assert!(input.check("reward.input").unwrap_err().to_string().contains(key));
        }
    }
}
