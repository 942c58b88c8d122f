//! Pictures between the words of an agent's text.

use serde::{Deserialize, Serialize};

use crate::{DType, Error, Result, Tensor};

/// The place of a picture in a text: Unicode's object replacement character.
pub const PICTURE_MARK: char = '\u{fffc}';

/// `text` with U+FFFD in place of each [`PICTURE_MARK`]: a text that shows no picture.
pub fn without_picture_marks(text: impl Into<String>) -> String {
    let text = text.into();
    match text.contains(PICTURE_MARK) {
        true => text.replace(PICTURE_MARK, "\u{fffd}"),
        false => text,
    }
}

/// Token ids from this one on represent parts of pictures. No vocabulary is as large.
pub const FIRST_PICTURE_ID: u32 = 1 << 31;

/// A picture that an agent sees.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "Tensor", into = "Tensor")]
pub struct Picture(Tensor);

impl Picture {
    /// Takes sRGB pixels, u8 `[H, W, 3]`. Fails on another dtype or shape, or without a pixel.
    pub fn new(pixels: Tensor) -> Result<Self> {
        match (pixels.dtype(), pixels.shape()) {
            (DType::U8, [height, width, 3]) if height * width > 0 => Ok(Self(pixels)),
            (dtype, shape) => {
                let found = shape.to_vec();
                Err(Error::shape(format!("picture of {dtype}"), "u8 [H, W, 3] with H and W of at least 1", &found))
            }
        }
    }

    /// The pixels, u8 `[H, W, 3]`.
    pub fn pixels(&self) -> &Tensor {
        &self.0
    }

    /// Height and width in pixels.
    pub fn size(&self) -> [usize; 2] {
        [self.0.shape()[0], self.0.shape()[1]]
    }
}

impl PartialEq for Picture {
    fn eq(&self, other: &Self) -> bool {
        self.size() == other.size() && self.0.as_bytes() == other.0.as_bytes()
    }
}

impl TryFrom<Tensor> for Picture {
    type Error = Error;
    fn try_from(pixels: Tensor) -> Result<Self> {
        Self::new(pixels)
    }
}

impl From<Picture> for Tensor {
    fn from(picture: Picture) -> Self {
        picture.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_picture_has_pixels_of_three_bytes() {
        assert_eq!(Picture::new(Tensor::new(vec![0u8; 24], [4, 2, 3]).unwrap()).unwrap().size(), [4, 2]);
        for shape in [vec![3, 4, 2], vec![0, 2, 3], vec![1, 4, 2, 3]] {
            let pixels = Tensor::new(vec![0u8; shape.iter().product()], shape.clone()).unwrap();
            assert!(Picture::new(pixels).is_err(), "{shape:?}");
        }
        assert!(Picture::new(Tensor::zeros([4, 2, 3])).is_err());
    }
}
