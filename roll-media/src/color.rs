//! Conversion between Y'CbCr 4:2:0 and RGB.
//!
//! The matrices are those of ITU-T H.273. Chroma samples have the default location of H.264: horizontally at every
//! second luma sample, vertically between two rows of luma. Decoding interpolates chroma linearly from these locations,
//! and encoding averages to them. All arithmetic of decoding is on integers and whole rows, which compilers vectorise.

use crate::picture::Picture;

/// The conversion between RGB and Y'CbCr.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Matrix {
    /// Weight of red in luma.
    kr: f64,
    /// Weight of blue in luma.
    kb: f64,
    /// Whether luma uses all code values, 0 to 255, instead of 16 to 235.
    is_full_range: bool,
}

/// The colour of a stream as a header declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeclaredColor {
    /// Code of the matrix (`matrix_coefficients` of H.273).
    pub matrix_code: u8,
    /// Whether luma uses all code values, 0 to 255, instead of 16 to 235.
    pub is_full_range: bool,
}

impl DeclaredColor {
    /// The code of a matrix that is not specified.
    pub const UNSPECIFIED_MATRIX: u8 = 2;
}

impl Matrix {
    /// BT.601 with limited range, which SD video and this crate's writer use.
    pub const BT601_LIMITED: Self = Self { kr: 0.299, kb: 0.114, is_full_range: false };

    /// The matrix of a code of H.273 (`matrix_coefficients`). An unspecified matrix is BT.601, as in ffmpeg at every
    /// size. `None` for codes without such a matrix (RGB, YCgCo, constant luminance).
    pub fn from_code(code: u8, is_full_range: bool) -> Option<Self> {
        let (kr, kb) = match code {
            // BT.709.
            1 => (0.2126, 0.0722),
            // BT.601 of 625 lines (5) and of 525 lines (6).
            DeclaredColor::UNSPECIFIED_MATRIX | 5 | 6 => (0.299, 0.114),
            // FCC.
            4 => (0.30, 0.11),
            // SMPTE 240M.
            7 => (0.212, 0.087),
            // BT.2020.
            9 => (0.2627, 0.0593),
            _ => return None,
        };
        Some(Self { kr, kb, is_full_range })
    }

    /// Weight of green in luma.
    fn kg(self) -> f64 {
        1.0 - self.kr - self.kb
    }

    /// The extents of luma and of chroma in code values, and the luma of black.
    fn range(self) -> (f64, f64, i32) {
        if self.is_full_range { (255.0, 255.0, 0) } else { (219.0, 224.0, 16) }
    }
}

/// The planes of a decoded 4:2:0 frame: chroma has half the width and height.
#[derive(Clone, Copy)]
pub(crate) struct Yuv420<'a> {
    pub width: usize,
    pub height: usize,
    pub y: &'a [u8],
    pub u: &'a [u8],
    pub v: &'a [u8],
    pub y_stride: usize,
    pub uv_stride: usize,
}

impl Yuv420<'_> {
    /// Whether the planes are large enough for the sizes and strides.
    pub fn is_consistent(&self) -> bool {
        let (w, h) = (self.width, self.height);
        let holds = |plane: &[u8], stride: usize, w: usize, h: usize| {
            w > 0 && h > 0 && stride >= w && plane.len() >= (h - 1) * stride + w
        };
        w % 2 == 0
            && h % 2 == 0
            && holds(self.y, self.y_stride, w, h)
            && holds(self.u, self.uv_stride, w / 2, h / 2)
            && holds(self.v, self.uv_stride, w / 2, h / 2)
    }
}

/// Number of fractional bits of the fixed-point factors.
const FACTOR_BITS: u32 = 16;
/// Number of fractional bits of interpolated chroma: vertical interpolation has quarters, horizontal has halves.
const CHROMA_BITS: u32 = 3;

/// Converts a 4:2:0 frame to RGB. The planes must be consistent ([`Yuv420::is_consistent`]).
pub(crate) fn to_rgb(yuv: Yuv420<'_>, matrix: Matrix) -> Picture {
    let (w, h) = (yuv.width, yuv.height);
    let factors = Factors::of(matrix);
    let mut rgb = vec![0; w * h * 3];
    let (mut u, mut v) = (vec![0; w], vec![0; w]);
    let mut blended = vec![0; w / 2];
    for (row, out) in rgb.chunks_exact_mut(w * 3).enumerate() {
        // The rows of chroma nearest to and second nearest to the row of luma.
        let near = row / 2;
        let far = if row % 2 == 0 { near.saturating_sub(1) } else { (near + 1).min(h / 2 - 1) };
        for (plane, upsampled) in [(yuv.u, &mut u), (yuv.v, &mut v)] {
            let line = |r: usize| &plane[r * yuv.uv_stride..][..w / 2];
            upsample(line(near), line(far), &mut blended, upsampled);
        }
        convert_row(&yuv.y[row * yuv.y_stride..][..w], &u, &v, &factors, out);
    }
    Picture { width: w, height: h, rgb }
}

/// Converts the planes of a 4:4:4 frame to RGB. Each plane must have `width * height` bytes.
pub(crate) fn to_rgb_444(width: usize, height: usize, [y, u, v]: [&[u8]; 3], matrix: Matrix) -> Picture {
    let factors = Factors::of(matrix);
    let mut rgb = vec![0; width * height * 3];
    let scaled = |row: &[u8], out: &mut [i32]| {
        out.iter_mut().zip(row).for_each(|(out, &value)| *out = (i32::from(value) - 128) << CHROMA_BITS);
    };
    let (mut u_row, mut v_row) = (vec![0; width], vec![0; width]);
    for (row, out) in rgb.chunks_exact_mut(width * 3).enumerate() {
        let here = row * width..(row + 1) * width;
        scaled(&u[here.clone()], &mut u_row);
        scaled(&v[here.clone()], &mut v_row);
        convert_row(&y[here], &u_row, &v_row, &factors, out);
    }
    Picture { width, height, rgb }
}

/// Fixed-point factors of the conversion to RGB.
struct Factors {
    /// Factor of luma above black.
    y: i32,
    /// The luma of black.
    black: i32,
    /// Factor of v in red.
    rv: i32,
    /// Factors of u and v in green, which are subtracted.
    gu: i32,
    gv: i32,
    /// Factor of u in blue.
    bu: i32,
}

impl Factors {
    fn of(matrix: Matrix) -> Self {
        let (luma, chroma, black) = matrix.range();
        let fixed = |x: f64, bits: u32| (x * f64::from(1u32 << bits)).round() as i32;
        let of_chroma = |x: f64| fixed(x * 255.0 / chroma, FACTOR_BITS - CHROMA_BITS);
        Self {
            y: fixed(255.0 / luma, FACTOR_BITS),
            black,
            rv: of_chroma(2.0 * (1.0 - matrix.kr)),
            gu: of_chroma(2.0 * matrix.kb * (1.0 - matrix.kb) / matrix.kg()),
            gv: of_chroma(2.0 * matrix.kr * (1.0 - matrix.kr) / matrix.kg()),
            bu: of_chroma(2.0 * (1.0 - matrix.kb)),
        }
    }
}

/// Interpolates chroma at the columns of one row of luma, from the two nearest rows of chroma. `blended` is scratch
/// memory of the length of `near`. Values of `out` are offset by -128 and scaled by 2^[`CHROMA_BITS`].
fn upsample(near: &[u8], far: &[u8], blended: &mut [i32], out: &mut [i32]) {
    // A row of luma lies a quarter of the distance between two rows of chroma from the nearer one: weights 3/4, 1/4.
    for ((blend, &near), &far) in blended.iter_mut().zip(near).zip(far) {
        *blend = 3 * i32::from(near) + i32::from(far) - 4 * 128;
    }
    for (i, pair) in out.chunks_exact_mut(2).enumerate() {
        let here = blended[i];
        let next = blended[(i + 1).min(blended.len() - 1)];
        pair[0] = 2 * here;
        pair[1] = here + next;
    }
}

/// Converts a row to RGB. `u` and `v` are in the form that [`upsample`] writes.
fn convert_row(y: &[u8], u: &[i32], v: &[i32], factors: &Factors, out: &mut [u8]) {
    // Added before the shift, so that the shift rounds to the nearest byte.
    let half = 1 << (FACTOR_BITS - 1);
    let byte = |x: i32| (x >> FACTOR_BITS).clamp(0, 255) as u8;
    for (((pixel, &y), &u), &v) in out.chunks_exact_mut(3).zip(y).zip(u).zip(v) {
        let luma = (i32::from(y) - factors.black) * factors.y + half;
        pixel[0] = byte(luma + factors.rv * v);
        pixel[1] = byte(luma - factors.gu * u - factors.gv * v);
        pixel[2] = byte(luma + factors.bu * u);
    }
}

/// The planes of a frame for an encoder.
pub(crate) struct YuvPlanes {
    pub y: Vec<u8>,
    pub u: Vec<u8>,
    pub v: Vec<u8>,
}

/// Converts RGB to a 4:2:0 frame. Width and height must be even.
pub(crate) fn from_rgb(picture: &Picture, matrix: Matrix) -> YuvPlanes {
    let (w, h) = (picture.width, picture.height);
    let (luma, chroma, black) = matrix.range();
    let (kr, kg, kb) = (matrix.kr as f32, matrix.kg() as f32, matrix.kb as f32);
    let (y_scale, black) = (luma as f32 / 255.0, black as f32);
    let u_scale = chroma as f32 / 255.0 / (2.0 * (1.0 - kb));
    let v_scale = chroma as f32 / 255.0 / (2.0 * (1.0 - kr));

    let mut planes = YuvPlanes { y: vec![0; w * h], u: vec![0; w * h / 4], v: vec![0; w * h / 4] };
    // Colour differences are summed over two rows, and then weighted 1, 2, 1 around every second column.
    let (mut du, mut dv) = (vec![0f32; w], vec![0f32; w]);
    for pair in 0..h / 2 {
        du.fill(0.0);
        dv.fill(0.0);
        for row in [2 * pair, 2 * pair + 1] {
            let line = &picture.rgb[row * w * 3..][..w * 3];
            let out = &mut planes.y[row * w..][..w];
            for (((pixel, y_out), du), dv) in line.chunks_exact(3).zip(out).zip(&mut du).zip(&mut dv) {
                let [r, g, b] = [f32::from(pixel[0]), f32::from(pixel[1]), f32::from(pixel[2])];
                let y = kr * r + kg * g + kb * b;
                // Adding a half rounds to the nearest byte.
                *y_out = (y * y_scale + black + 0.5) as u8;
                *du += (b - y) * u_scale;
                *dv += (r - y) * v_scale;
            }
        }
        for (sums, plane) in [(&du, &mut planes.u), (&dv, &mut planes.v)] {
            for (i, out) in plane[pair * (w / 2)..][..w / 2].iter_mut().enumerate() {
                let (left, here, right) = (sums[(2 * i).saturating_sub(1)], sums[2 * i], sums[2 * i + 1]);
                // Four weights over two rows make 8. The centre of chroma is 128, and a half rounds.
                *out = ((left + 2.0 * here + right) / 8.0 + 128.5) as u8;
            }
        }
    }
    planes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planes(y: u8, u: u8, v: u8) -> [Vec<u8>; 3] {
        [vec![y; 16], vec![u; 4], vec![v; 4]]
    }
    fn rgb_of(y: u8, u: u8, v: u8, matrix: Matrix) -> [u8; 3] {
        let [y, u, v] = planes(y, u, v);
        let yuv = Yuv420 { width: 4, height: 4, y: &y, u: &u, v: &v, y_stride: 4, uv_stride: 2 };
        assert!(yuv.is_consistent());
        let rgb = to_rgb(yuv, matrix).rgb;
        assert_eq!(to_rgb_444(2, 2, [&y[..4], &u, &v], matrix).rgb, rgb[..12]);
        rgb[..3].try_into().unwrap()
    }

    #[test]
    fn known_colours_match_the_standards() {
        let sd = Matrix::BT601_LIMITED;
        let hd = Matrix::from_code(1, false).unwrap();
        assert_eq!(rgb_of(16, 128, 128, sd), [0, 0, 0]);
        assert_eq!(rgb_of(235, 128, 128, hd), [255, 255, 255]);
        assert_eq!(rgb_of(81, 90, 240, sd), [254, 0, 0]);
        assert_eq!(rgb_of(63, 102, 240, hd), [255, 1, 0]);
        assert_eq!(rgb_of(200, 128, 128, Matrix::from_code(6, true).unwrap()), [200, 200, 200]);
        assert!(Matrix::from_code(0, true).is_none());
    }

    #[test]
    fn yuv_round_trip_of_smooth_pictures_is_within_4() {
        let (width, height) = (64, 48);
        let rgb = (0..width * height)
            .flat_map(|i| {
                let (x, y) = (i % width, i / width);
                [60 + x * 2, 200 - y * 3, 40 + x + y].map(|v| v as u8)
            })
            .collect();
        let picture = Picture { width, height, rgb };
        for matrix in [Matrix::BT601_LIMITED, Matrix::from_code(1, true).unwrap()] {
            let p = from_rgb(&picture, matrix);
            let yuv = Yuv420 { width, height, y: &p.y, u: &p.u, v: &p.v, y_stride: width, uv_stride: width / 2 };
            let back = to_rgb(yuv, matrix);
            let worst = back.rgb.iter().zip(&picture.rgb).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
            assert!(worst <= 4, "{worst}");
        }
    }

    #[test]
    fn too_short_planes_are_inconsistent() {
        let [y, u, v] = planes(0, 0, 0);
        let yuv = Yuv420 { width: 4, height: 4, y: &y, u: &u, v: &v[..3], y_stride: 4, uv_stride: 2 };
        assert!(!yuv.is_consistent());
        assert!(!Yuv420 { width: 5, v: &v, ..yuv }.is_consistent());
        assert!(!Yuv420 { y_stride: 3, v: &v, ..yuv }.is_consistent());
    }
}
