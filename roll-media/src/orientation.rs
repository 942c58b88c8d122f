//! Rotation and mirroring between stored and shown images.

use crate::picture::Picture;
use crate::tiff::Tiff;

/// The transformation from stored to shown pixels: an optional horizontal mirror, then a rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Orientation {
    /// Whether left and right are exchanged, before the rotation.
    pub is_mirrored: bool,
    /// Clockwise quarter turns, 0 to 3.
    pub quarters: u8,
}

impl Orientation {
    /// The orientation of the upper left `[a, b, c, d]` of a transformation matrix: a pixel (x, y) is shown at (a x + c
    /// y, b x + d y), y downwards (ISO/IEC 14496-12, `tkhd`). Only quarter turns and mirrors are supported. Other
    /// matrices are ignored.
    pub fn from_matrix([a, b, c, d]: [i32; 4]) -> Self {
        // A mirror makes the determinant negative.
        let is_mirrored = i64::from(a) * i64::from(d) < i64::from(b) * i64::from(c);
        // The first column of the rotation determines its angle. The mirror before the rotation inverted this column.
        let sign = if is_mirrored { -1 } else { 1 };
        let quarters = match (sign * a.signum(), sign * b.signum()) {
            (1, 0) => 0,
            (0, 1) => 1,
            (-1, 0) => 2,
            (0, -1) => 3,
            _ => return Self::default(),
        };
        Self { is_mirrored, quarters }
    }

    /// Whether height and width are swapped.
    pub fn is_sideways(self) -> bool {
        self.quarters % 2 == 1
    }

    /// Returns the image as it is shown.
    pub fn apply(self, picture: Picture) -> Picture {
        if self == Self::default() {
            return picture;
        }
        let (w, h) = (picture.width, picture.height);
        let (width, height) = if self.is_sideways() { (h, w) } else { (w, h) };
        let mut rgb = Vec::with_capacity(picture.rgb.len());
        for y in 0..height {
            for x in 0..width {
                // The position of the stored pixel that is shown at (x, y).
                let (stored_x, stored_y) = match self.quarters {
                    0 => (x, y),
                    1 => (y, h - 1 - x),
                    2 => (w - 1 - x, h - 1 - y),
                    _ => (w - 1 - y, x),
                };
                let stored_x = if self.is_mirrored { w - 1 - stored_x } else { stored_x };
                rgb.extend(&picture.rgb[(stored_y * w + stored_x) * 3..][..3]);
            }
        }
        Picture { width, height, rgb }
    }

    /// This orientation, followed by a rotation of `quarters` quarter turns counter-clockwise.
    pub fn turned_left(self, quarters: u8) -> Self {
        Self { quarters: (self.quarters + 4 - quarters % 4) % 4, ..self }
    }

    /// This orientation, followed by a mirror that exchanges left and right or, otherwise, top and bottom.
    pub fn then_mirrored(self, left_and_right: bool) -> Self {
        // Moving the mirror before the rotation inverts the rotation. A mirror of top and bottom is one of left and
        // right with half a turn.
        let inverted = (4 - self.quarters) % 4;
        let quarters = if left_and_right { inverted } else { (inverted + 2) % 4 };
        Self { is_mirrored: !self.is_mirrored, quarters }
    }

    /// The orientation that EXIF data (a TIFF file) specifies, if the data is valid and specifies one. Some programs
    /// write EXIF data into WebP and PNG with the prefix that it has in JPEG.
    pub fn from_exif(exif: &[u8]) -> Option<Self> {
        Self::from_tiff(&Tiff::new(exif.strip_prefix(b"Exif\0\0").unwrap_or(exif))?)
    }

    /// The orientation of a TIFF file, if a valid one is specified.
    pub fn from_tiff(tiff: &Tiff<'_>) -> Option<Self> {
        tiff.orientation_code().and_then(Self::from_exif_code)
    }

    /// The orientation for a value of the EXIF tag, 1 to 8.
    pub fn from_exif_code(code: u64) -> Option<Self> {
        // EXIF rotates first, and then mirrors. Moving the mirror before a quarter turn inverts the turn.
        let (is_mirrored, quarters) = match code {
            1 => (false, 0),
            2 => (true, 0),
            3 => (false, 2),
            4 => (true, 2),
            5 => (true, 3),
            6 => (false, 1),
            7 => (true, 1),
            8 => (false, 3),
            _ => return None,
        };
        Some(Self { is_mirrored, quarters })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(rows: [&str; 2]) -> Picture {
        Picture { width: 3, height: 2, rgb: rows.concat().bytes().flat_map(|b| [b; 3]).collect() }
    }

    fn shown(orientation: Orientation) -> Vec<String> {
        let picture = orientation.apply(picture(["abc", "def"]));
        let bytes: Vec<u8> = picture.rgb.iter().step_by(3).copied().collect();
        bytes.chunks(picture.width).map(|row| String::from_utf8(row.to_vec()).unwrap()).collect()
    }

    #[test]
    fn exif_orientations_match_pil() {
        // Expected results are from PIL's `ImageOps.exif_transpose`.
        let expected = [
            ["abc", "def"].as_slice(),
            &["cba", "fed"],
            &["fed", "cba"],
            &["def", "abc"],
            &["ad", "be", "cf"],
            &["da", "eb", "fc"],
            &["fc", "eb", "da"],
            &["cf", "be", "ad"],
        ];
        for (code, expected) in (1..).zip(expected) {
            assert_eq!(shown(Orientation::from_exif_code(code).unwrap()), expected, "{code}");
        }
    }

    #[test]
    fn exif_orientation_is_read_in_every_spelling() {
        let number = |value: u32, width: usize, big: bool| match big {
            true => value.to_be_bytes()[4 - width..].to_vec(),
            false => value.to_le_bytes()[..width].to_vec(),
        };
        let exif = |big: bool, kind: u32, width: usize| {
            let [mark, version]: [&[u8]; 2] = if big { [b"MM", b"\0*"] } else { [b"II", b"*\0"] };
            let mut bytes = [mark, version].concat();
            bytes.extend([number(8, 4, big), number(2, 2, big)].concat());
            // The width of the picture comes before.
            for (tag, kind, value, width) in [(0x100, 4, 96, 4), (0x112, kind, 6, width)] {
                bytes.extend([number(tag, 2, big), number(kind, 2, big), number(1, 4, big)].concat());
                bytes.extend(number(value, width, big));
                bytes.extend(vec![0; 4 - width]);
            }
            bytes
        };
        let turned = Some(Orientation { is_mirrored: false, quarters: 1 });
        for big in [false, true] {
            for (kind, width) in [(1, 1), (3, 2), (4, 4), (8, 2), (9, 4)] {
                let exif = exif(big, kind, width);
                assert_eq!(Orientation::from_exif(&exif), turned, "{big} {kind}");
                assert_eq!(Orientation::from_exif(&[b"Exif\0\0", &exif[..]].concat()), turned, "{big} {kind}");
                assert_eq!(Orientation::from_exif(&exif[..exif.len() - 5]), None);
            }
            // A text, and a number that is no orientation.
            assert_eq!(Orientation::from_exif(&exif(big, 2, 1)), None);
            let mut ninth = exif(big, 3, 2);
            ninth[8 + 2 + 12 + 8 + usize::from(big)] = 9;
            assert_eq!(Orientation::from_exif(&ninth), None);
        }
        assert_eq!(Orientation::from_exif(b"Exif\0\0MM\0*\xff\xff\xff\xff"), None);
    }

    #[test]
    fn display_matrices_rotate_and_mirror() {
        let one = 0x1_0000;
        for (matrix, expected) in [
            ([one, 0, 0, one], ["abc", "def"].as_slice()),
            ([0, one, -one, 0], &["da", "eb", "fc"]),
            ([-one, 0, 0, -one], &["fed", "cba"]),
            ([0, -one, one, 0], &["cf", "be", "ad"]),
            ([-one, 0, 0, one], &["cba", "fed"]),
            ([one, 0, 0, -one], &["def", "abc"]),
            ([0, one, one, 0], &["ad", "be", "cf"]),
            ([0, -one, -one, 0], &["fc", "eb", "da"]),
            ([one, one, -one, one], &["abc", "def"]),
            ([i32::MIN, 0, 0, i32::MIN], &["fed", "cba"]),
        ] {
            assert_eq!(shown(Orientation::from_matrix(matrix)), expected, "{matrix:?}");
        }
    }
}
