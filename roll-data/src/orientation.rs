//! Rotation and mirroring between stored and shown images.

use crate::picture::Picture;

/// The transformation from stored to shown pixels: an optional horizontal mirror, then a rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Orientation {
    pub mirrored: bool,
    /// Clockwise quarter turns, 0 to 3.
    pub quarters: u8,
}

impl Orientation {
    /// From the upper left of a transformation matrix: a pixel (x, y) is shown at (a x + c y, b x + d y), y downwards
    /// (ISO/IEC 14496-12, `tkhd`). Only quarter turns and mirrors are supported; other matrices are ignored.
    pub fn from_matrix([a, b, c, d]: [i32; 4]) -> Self {
        let mirrored = i64::from(a) * i64::from(d) < i64::from(b) * i64::from(c);
        // The direction of the first column of the pure rotation, which the preceding mirror inverted.
        let sign = if mirrored { -1 } else { 1 };
        let quarters = match (sign * a.signum(), sign * b.signum()) {
            (1, 0) => 0,
            (0, 1) => 1,
            (-1, 0) => 2,
            (0, -1) => 3,
            _ => return Self::default(),
        };
        Self { mirrored, quarters }
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
                let (sx, sy) = match self.quarters {
                    0 => (x, y),
                    1 => (y, h - 1 - x),
                    2 => (w - 1 - x, h - 1 - y),
                    _ => (w - 1 - y, x),
                };
                let sx = if self.mirrored { w - 1 - sx } else { sx };
                rgb.extend(&picture.rgb[(sy * w + sx) * 3..][..3]);
            }
        }
        Picture { width, height, rgb }
    }

    /// The orientation that EXIF data (a TIFF file) specifies, if it specifies one and is valid.
    pub fn from_exif(exif: &[u8]) -> Option<Self> {
        let u16_of: fn([u8; 2]) -> u16 = match exif.get(..4)? {
            b"II*\0" => u16::from_le_bytes,
            b"MM\0*" => u16::from_be_bytes,
            _ => return None,
        };
        let u16_at = |bytes: &[u8], at: usize| Some(u16_of([*bytes.get(at)?, *bytes.get(at + 1)?]));
        let u32_at = |bytes: &[u8], at: usize| {
            let halves = [u16_at(bytes, at)?, u16_at(bytes, at + 2)?].map(u32::from);
            let [high, low] = if exif[0] == b'M' { halves } else { [halves[1], halves[0]] };
            Some(high << 16 | low)
        };
        let directory = exif.get(u32_at(exif, 4)? as usize..)?;
        for i in 0..usize::from(u16_at(directory, 0)?) {
            // Tag, type (3: u16), number of values, value.
            let entry = directory.get(2 + 12 * i..)?.get(..12)?;
            if (u16_at(entry, 0)?, u16_at(entry, 2)?, u32_at(entry, 4)?) == (0x112, 3, 1) {
                return Self::from_exif_code(u16_at(entry, 8)?);
            }
        }
        None
    }

    fn from_exif_code(code: u16) -> Option<Self> {
        // EXIF rotates first; moving the mirror before a quarter turn inverts the turn.
        let (mirrored, quarters) = match code {
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
        Some(Self { mirrored, quarters })
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
