//! One frame as 8-bit RGB, between files and tensors.

use roll_core::{Result, Tensor, Video};

/// Frames larger than this in either direction are refused: they exceed H.264's levels, and a file that claims them
/// wants memory.
pub(crate) const MAX_SIDE: usize = 16_384;
/// As [`MAX_SIDE`], for the product: 8K with some room.
pub(crate) const MAX_PIXELS: usize = 40_000_000;

/// 8-bit RGB, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels per row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// `height * width * 3` bytes.
    pub rgb: Vec<u8>,
}

impl Picture {
    /// The frame `t` of `video`: value v becomes the byte nearest to (v + 1) * 127.5.
    pub fn from_frame(video: &Video, t: usize) -> Self {
        let [_, height, width] = video.dims();
        let frame = video.frame(t);
        let plane = height * width;
        let mut rgb = vec![0; plane * 3];
        for (i, pixel) in rgb.chunks_exact_mut(3).enumerate() {
            for (c, byte) in pixel.iter_mut().enumerate() {
                // NaN becomes 0, as everywhere a float is cast.
                *byte = ((frame[c * plane + i] + 1.0) * 127.5).round() as u8;
            }
        }
        Self { width, height, rgb }
    }

    /// Appends `[3, H, W]` in [-1, 1]: byte b becomes b / 127.5 - 1.
    pub(crate) fn append_planes(&self, out: &mut Vec<f32>) {
        for c in 0..3 {
            out.extend(self.rgb.iter().skip(c).step_by(3).map(|&b| f32::from(b) / 127.5 - 1.0));
        }
    }

    /// `[3, H, W]` in [-1, 1].
    pub fn to_tensor(&self) -> Result<Tensor> {
        let mut values = Vec::with_capacity(self.rgb.len());
        self.append_planes(&mut values);
        Tensor::new(values, [3, self.height, self.width])
    }

    /// Turned clockwise by `quarters` times 90 degrees.
    pub(crate) fn rotated(self, quarters: u8) -> Self {
        let (w, h) = (self.width, self.height);
        let (width, height) = if quarters % 2 == 1 { (h, w) } else { (w, h) };
        if quarters % 4 == 0 {
            return self;
        }
        let mut rgb = Vec::with_capacity(self.rgb.len());
        for y in 0..height {
            for x in 0..width {
                let (sx, sy) = match quarters % 4 {
                    1 => (y, h - 1 - x),
                    2 => (w - 1 - x, h - 1 - y),
                    _ => (w - 1 - y, x),
                };
                rgb.extend(&self.rgb[(sy * w + sx) * 3..][..3]);
            }
        }
        Self { width, height, rgb }
    }
}

/// Whether a frame of this size is accepted.
pub(crate) fn check_size(width: usize, height: usize) -> Result<(), String> {
    if width == 0 || height == 0 || width > MAX_SIDE || height > MAX_SIDE || width * height > MAX_PIXELS {
        return Err(format!("frames of {width} x {height} pixels are not accepted (at most {MAX_PIXELS} pixels)"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_way_through_floats() {
        let rgb: Vec<u8> = (0..=255).chain(0..2).collect();
        let picture = Picture { width: 43, height: 2, rgb };
        let tensor = picture.to_tensor().unwrap();
        assert_eq!(tensor.f32s().unwrap()[0], -1.0);
        let video = Video::new(tensor.reshape([1, 3, 2, 43]).unwrap(), 1.0).unwrap();
        assert_eq!(Picture::from_frame(&video, 0), picture);
    }

    #[test]
    fn four_quarter_turns_are_none() {
        let picture = Picture { width: 3, height: 2, rgb: (0..18).collect() };
        let turned = picture.clone().rotated(1);
        // Clockwise: the lower left pixel comes to the upper left.
        assert_eq!((turned.width, turned.height, &turned.rgb[..3]), (2, 3, &picture.rgb[9..12]));
        assert_eq!(turned.clone().rotated(1), picture.clone().rotated(2));
        assert_eq!(turned.rotated(3), picture);
    }
}
