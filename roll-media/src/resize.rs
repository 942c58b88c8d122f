//! Resizes and crops images exactly like the reference implementation.
//!
//! The reference is DiffSynth-Studio 1.1.8 (`ImageCropAndResize`), which processes PIL images through torchvision:
//!
//! 1. Target size: the configured height and width, or the image's own size. If the image has more than
//!    `max_pixels`, its own size is divided by sqrt(width * height / max_pixels) and truncated. Both sides are then
//!    rounded down to multiples of the model's unit (16 in the reference).
//! 2. Scale by max(target_width / width, target_height / height) with Pillow's antialiased bilinear filter. Sizes are
//!    rounded half to even.
//! 3. Crop the centre. Offsets are rounded half to even.
//!
//! The filter is bit-identical to Pillow's: a triangle widened by the reduction factor, weights in 22-bit fixed point,
//! and 8 bits between the horizontal and the vertical pass.

use rayon::prelude::*;

use crate::picture::{Picture, check_size, square_size};

/// Returns the target height and width (multiples of `unit`) of an image of `[height, width]`. Fails if the image is
/// too small.
pub fn target_size([height, width]: [usize; 2], max_pixels: usize, unit: [usize; 2]) -> Result<[usize; 2], String> {
    let pixels = (width * height) as f64;
    let (mut h, mut w) = (height, width);
    if width * height > max_pixels {
        let scale = (pixels / max_pixels as f64).sqrt();
        h = (height as f64 / scale) as usize;
        w = (width as f64 / scale) as usize;
    }
    let [unit_height, unit_width] = unit.map(|side| side.max(1));
    let (h, w) = (h / unit_height * unit_height, w / unit_width * unit_width);
    if h == 0 || w == 0 {
        return Err(format!(
            "frames of {width} x {height} pixels come to {w} x {h} after rounding down to multiples of {unit_width} x \
             {unit_height} (max_pixels {max_pixels}): they need at least these"
        ));
    }
    Ok([h, w])
}

/// Scales `picture` to cover `[height, width]` and crops the centre.
pub fn crop_and_resize(picture: Picture, [height, width]: [usize; 2]) -> Picture {
    if (picture.height, picture.width) == (height, width) {
        return picture;
    }
    let scale = (width as f64 / picture.width as f64).max(height as f64 / picture.height as f64);
    let scaled = |side: usize, least: usize| ((side as f64 * scale).round_ties_even() as usize).max(least);
    let (h, w) = (scaled(picture.height, height), scaled(picture.width, width));
    let resized = resize(picture, [h, w]);
    let offset = |have: usize, want: usize| ((have - want) as f64 / 2.0).round_ties_even() as usize;
    let (top, left) = (offset(h, height), offset(w, width));
    let mut rgb = Vec::with_capacity(height * width * 3);
    for row in top..top + height {
        rgb.extend(&resized.rgb[(row * w + left) * 3..][..width * 3]);
    }
    Picture { width, height, rgb }
}

/// Resizes to `[height, width]` (at least 1), like Pillow's `Image.resize` with `BILINEAR`.
pub fn resize(picture: Picture, [height, width]: [usize; 2]) -> Picture {
    let horizontal = if picture.width == width { picture } else { resize_rows(&picture, width) };
    if horizontal.height == height { horizontal } else { resize_columns(&horizontal, height) }
}

/// Resamples to square pixels.
pub(crate) fn square_pixels(picture: Picture, pixel_aspect: Option<[u32; 2]>) -> Result<Picture, String> {
    let size = square_size([picture.height, picture.width], pixel_aspect);
    check_size(size[1], size[0])?;
    Ok(resize(picture, size))
}

/// Number of fractional bits of the weights.
const PRECISION_BITS: u32 = 22;

/// The input samples that make an output sample.
struct Window {
    /// The first of them.
    first: usize,
    /// The weight of each, in fixed point.
    weights: Vec<i32>,
}

/// The window of each output sample, for a row or column of `input` samples that becomes one of `output` samples.
fn windows(input: usize, output: usize) -> Vec<Window> {
    let scale = input as f64 / output as f64;
    let support = scale.max(1.0);
    let window = |i: usize| -> Window {
        let center = (i as f64 + 0.5) * scale;
        let first = ((center - support + 0.5) as i64).max(0) as usize;
        let end = ((center + support + 0.5) as usize).min(input);
        let triangle = |x: usize| (1.0 - ((x as f64 - center + 0.5) / support).abs()).max(0.0);
        let raw: Vec<f64> = (first..end).map(triangle).collect();
        let sum: f64 = raw.iter().sum();
        // Adding a half rounds to the nearest number.
        let fixed_point = |weight: &f64| (0.5 + weight / sum * f64::from(1u32 << PRECISION_BITS)) as i32;
        Window { first, weights: raw.iter().map(fixed_point).collect() }
    };
    (0..output).map(window).collect()
}

/// A weighted sum as a byte. Sums begin with [`HALF`], so that the shift rounds.
fn byte(sum: i32) -> u8 {
    (sum >> PRECISION_BITS).clamp(0, 255) as u8
}

/// A half in fixed point.
const HALF: i32 = 1 << (PRECISION_BITS - 1);

fn resize_rows(picture: &Picture, width: usize) -> Picture {
    let windows = windows(picture.width, width);
    let mut rgb = vec![0; picture.height * width * 3];
    let rows = picture.rgb.par_chunks_exact(picture.width * 3);
    rgb.par_chunks_exact_mut(width * 3).zip(rows).for_each(|(out, row)| {
        for (pixel, Window { first, weights }) in out.chunks_exact_mut(3).zip(&windows) {
            let mut sums = [HALF; 3];
            for (source, &weight) in row[first * 3..].chunks_exact(3).zip(weights) {
                for (sum, &value) in sums.iter_mut().zip(source) {
                    *sum += i32::from(value) * weight;
                }
            }
            pixel.copy_from_slice(&sums.map(byte));
        }
    });
    Picture { width, height: picture.height, rgb }
}

fn resize_columns(picture: &Picture, height: usize) -> Picture {
    let row_bytes = picture.width * 3;
    let windows = windows(picture.height, height);
    let mut rgb = vec![0; height * row_bytes];
    rgb.par_chunks_exact_mut(row_bytes).zip(&windows).for_each(|(out, Window { first, weights })| {
        let mut sums = vec![HALF; row_bytes];
        for (row, &weight) in picture.rgb[first * row_bytes..].chunks_exact(row_bytes).zip(weights) {
            for (sum, &value) in sums.iter_mut().zip(row) {
                *sum += i32::from(value) * weight;
            }
        }
        for (byte_out, sum) in out.iter_mut().zip(sums) {
            *byte_out = byte(sum);
        }
    });
    Picture { width: picture.width, height, rgb }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_sizes_match_diffsynth() {
        let max = 480 * 480;
        // Expected values are from ImageCropAndResize.get_height_width.
        for (size, expected) in [
            ([144, 176], [144, 176]),
            ([1080, 1920], [352, 640]),
            ([1920, 1080], [640, 352]),
            ([480, 481], [464, 480]),
            ([500, 500], [464, 464]), // 479.99999999999994 in f64, there as here
            ([17, 31], [16, 16]),
        ] {
            assert_eq!(target_size(size, max, [16, 16]), Ok(expected));
        }
        assert!(target_size([15, 400], max, [16, 16]).unwrap_err().contains("multiples of 16 x 16"));
        assert_eq!(target_size([144, 176], max, [32, 32]), Ok([128, 160]));
        assert_eq!(target_size([480, 832], max, [32, 32]), Ok([352, 608]));
    }

    /// Compares with sums and polynomial hashes of the results of torchvision 0.24.0 and Pillow 13.0.0 for the same
    /// images.
    #[test]
    fn resize_is_bit_identical_to_pillow() {
        let cases = [
            ([144, 176], [48, 64], 1_173_773, 0xbd52_e66d),
            ([101, 77], [32, 32], 392_450, 0x9e9b_fe64),
            ([30, 45], [64, 96], 2_357_031, 0x9309_b74d),
        ];
        for ([height, width], target, sum, hash) in cases {
            let byte = |i: u64| (((i * i).wrapping_mul(2_654_435_761) % (1 << 32)) >> 24) as u8;
            let rgb = (0..(height * width * 3) as u64).map(byte).collect();
            let out = crop_and_resize(Picture { width, height, rgb }, target).rgb;
            assert_eq!(out.iter().map(|&b| u64::from(b)).sum::<u64>(), sum);
            assert_eq!(out.iter().fold(0u32, |h, &b| h.wrapping_mul(31).wrapping_add(b.into())), hash);
        }
    }

    #[test]
    fn flat_picture_stays_flat_and_centre_is_cropped() {
        let picture = Picture { width: 50, height: 30, rgb: vec![137; 50 * 30 * 3] };
        let small = crop_and_resize(picture, [16, 16]);
        assert!(small.rgb.len() == 16 * 16 * 3 && small.rgb.iter().all(|&b| b == 137));

        let rgb = (0..64).flat_map(|i| [if (24..40).contains(&(i % 64)) { 255 } else { 0 }; 3]).collect::<Vec<u8>>();
        let picture = Picture { width: 64, height: 16, rgb: rgb.repeat(16) };
        let centre = crop_and_resize(picture, [16, 16]);
        assert!(centre.rgb.iter().all(|&b| b == 255));
    }
}
