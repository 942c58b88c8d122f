//! A frame as 8-bit RGB, between files and tensors.

use roll_core::{Error, Result, Tensor, Video};

/// Maximum width and height of a frame. Larger sizes exceed H.264's levels, and a file that claims one would only make
/// this process allocate memory.
pub(crate) const MAX_SIDE: usize = 16_384;
/// Maximum number of pixels of a frame: 8K with some margin.
pub(crate) const MAX_PIXELS: usize = 40_000_000;

/// An 8-bit RGB image, row by row.
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
    /// Converts frame `t` of `video`: value v becomes the byte nearest to (v + 1) * 127.5.
    pub fn from_frame(video: &Video, t: usize) -> Self {
        let [_, height, width] = video.dims();
        let frame = video.frame(t);
        let plane = height * width;
        let mut rgb = vec![0; plane * 3];
        for (i, pixel) in rgb.chunks_exact_mut(3).enumerate() {
            for (c, byte) in pixel.iter_mut().enumerate() {
                // NaN becomes 0, as in every float cast.
                *byte = ((frame[c * plane + i] + 1.0) * 127.5).round() as u8;
            }
        }
        Self { width, height, rgb }
    }

    /// Appends the picture to `out` as `[3, H, W]` in [-1, 1]: byte b becomes b / 127.5 - 1.
    pub(crate) fn append_planes(&self, out: &mut Vec<f32>) {
        for c in 0..3 {
            out.extend(self.rgb.iter().skip(c).step_by(3).map(|&b| f32::from(b) / 127.5 - 1.0));
        }
    }

    /// Converts to `[3, H, W]` in [-1, 1].
    pub fn to_tensor(&self) -> Result<Tensor> {
        let mut values = Vec::with_capacity(self.rgb.len());
        self.append_planes(&mut values);
        Tensor::new(values, [3, self.height, self.width])
    }
}

impl From<&roll_core::Picture> for Picture {
    fn from(picture: &roll_core::Picture) -> Self {
        let [height, width] = picture.size();
        Self { width, height, rgb: picture.pixels().as_bytes().to_vec() }
    }
}

/// Fails for a picture without pixels.
impl TryFrom<Picture> for roll_core::Picture {
    type Error = Error;
    fn try_from(Picture { width, height, rgb }: Picture) -> Result<Self> {
        Self::new(Tensor::new(rgb, [height, width, 3])?)
    }
}

/// Height and width in square pixels. The side along which pixels are longer is stretched, so that no pixels are lost.
/// An invalid ratio, or one beyond 10, counts as square.
pub(crate) fn square_size([height, width]: [usize; 2], pixel_aspect: Option<[u32; 2]>) -> [usize; 2] {
    let Some([w, h]) = pixel_aspect else { return [height, width] };
    let ratio = f64::from(w) / f64::from(h);
    let stretched = |side: usize, by: f64| (side as f64 * by).round() as usize;
    match ratio {
        0.1..1.0 => [stretched(height, 1.0 / ratio), width],
        1.0..=10.0 => [height, stretched(width, ratio)],
        _ => [height, width],
    }
}

/// Fails if a frame of this size is not accepted.
pub fn check_size(width: usize, height: usize) -> Result<(), String> {
    if width == 0 || height == 0 || width > MAX_SIDE || height > MAX_SIDE || width * height > MAX_PIXELS {
        let most = format!("at most {MAX_SIDE} a side and {MAX_PIXELS} in all");
        return Err(format!("frames of {width} x {height} pixels are not accepted ({most})"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip_through_floats() {
        let rgb: Vec<u8> = (0..=255).chain(0..2).collect();
        let picture = Picture { width: 43, height: 2, rgb };
        let tensor = picture.to_tensor().unwrap();
        assert_eq!(tensor.f32s().unwrap()[0], -1.0);
        let video = Video::new(tensor.reshape([1, 3, 2, 43]).unwrap(), 1.0).unwrap();
        assert_eq!(Picture::from_frame(&video, 0), picture);
    }

    #[test]
    fn anamorphic_pixels_are_stretched_to_squares() {
        assert_eq!(square_size([144, 176], Some([128, 117])), [144, 193]);
        assert_eq!(square_size([576, 720], Some([16, 15])), [576, 768]);
        assert_eq!(square_size([480, 720], Some([8, 9])), [540, 720]);
        for none in [None, Some([1, 1]), Some([0, 0]), Some([0, 1]), Some([1, 0]), Some([99, 1]), Some([1, 99])] {
            assert_eq!(square_size([30, 40], none), [30, 40]);
        }
    }
}
