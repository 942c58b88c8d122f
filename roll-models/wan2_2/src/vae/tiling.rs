//! Tiles of the latent plane, and the weights with which their results are blended. [`Tiling::tiles`] maps the size of
//! a plane to the list of its tiles.

use std::ops::Range;

use roll_core::{Error, Result};

/// Overlapping tiles for encoding and decoding, in latent pixels `[height, width]`. They apply to videos of any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Size of a tile.
    pub size: [usize; 2],
    /// Distance between the starts of neighbouring tiles, at most their size.
    pub stride: [usize; 2],
}

impl Default for Tiling {
    /// The tiling of the reference implementation: 34 x 34 every 18 x 16.
    fn default() -> Self {
        Self { size: [34, 34], stride: [18, 16] }
    }
}

/// One tile.
#[derive(Clone, Debug)]
pub struct Tile {
    /// Rows and columns in the plane of the input.
    pub input: [Range<usize>; 2],
    /// Rows and columns in the plane of the blended output.
    pub output: [Range<usize>; 2],
    /// Weight of this tile at each pixel of its output, row-major. The weights of all tiles sum to one. `None` means
    /// one.
    pub blend: Option<Vec<f32>>,
}

impl Tiling {
    /// Divides a latent plane of `extent`, `[height, width]`, into tiles. The planes of `[input, output]` are `scales`
    /// times as large as the latent plane. Fails on tiles that leave gaps.
    pub fn tiles(tiling: Option<&Self>, extent: [usize; 2], scales: [usize; 2]) -> Result<Vec<Tile>> {
        // Maps rows and columns of the latent plane to those of `[input, output]`.
        let scaled = |latent: &[Range<usize>; 2]| {
            scales.map(|scale| latent.clone().map(|range| range.start * scale..range.end * scale))
        };
        let [input, output] = scaled(&extent.map(|n| 0..n));
        let whole = Tile { input, output, blend: None };
        let Some(tiling) = tiling else { return Ok(vec![whole]) };
        tiling.check()?;
        // An axis that one tile covers has no borders to blend, so the tile can be cut to the axis.
        let size = [0, 1].map(|axis| tiling.size[axis].min(extent[axis]));
        let rows = intervals(extent[0], size[0], tiling.stride[0]);
        let columns = intervals(extent[1], size[1], tiling.stride[1]);
        if rows.len() * columns.len() == 1 {
            return Ok(vec![whole]);
        }
        // From here, all pixels are the output's.
        let [_, scale] = scales;
        let overlap = [0, 1].map(|axis| size[axis].saturating_sub(tiling.stride[axis]) * scale);
        let width = extent[1] * scale;
        // Sum of the masks of all tiles at each pixel.
        let mut mask_sums = vec![0f32; extent[0] * scale * width];
        let mut tiles = Vec::with_capacity(rows.len() * columns.len());
        for y in &rows {
            for x in &columns {
                let [input, output] = scaled(&[y.clone(), x.clone()]);
                let [at_top, at_bottom] = [y.start == 0, y.end == extent[0]];
                let [at_left, at_right] = [x.start == 0, x.end == extent[1]];
                let sides = [at_top, at_bottom, at_left, at_right];
                let mask = blend_mask([output[0].len(), output[1].len()], overlap, sides);
                for (row, values) in output[0].clone().zip(mask.chunks_exact(output[1].len())) {
                    let sums = &mut mask_sums[row * width..][output[1].clone()];
                    sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
                }
                tiles.push(Tile { input, output, blend: Some(mask) });
            }
        }
        masks_to_weights(&mut tiles, &mask_sums, width);
        Ok(tiles)
    }

    /// Number of latent pixels in all tiles of a plane of `extent`. A pixel counts once per tile that contains it.
    pub fn covered_pixels(&self, extent: [usize; 2]) -> usize {
        let [rows, columns] = [0, 1].map(|axis| {
            let cuts = intervals(extent[axis], self.size[axis].min(extent[axis]), self.stride[axis].max(1));
            cuts.iter().map(Range::len).sum::<usize>()
        });
        rows * columns
    }

    /// Fails on tiles that leave gaps. Errors name the model's options without their section, which the caller adds.
    pub fn check(&self) -> Result<()> {
        for (size, stride) in self.size.into_iter().zip(self.stride) {
            if stride == 0 || stride > size {
                return Err(Error::config(
                    "vae_tile_stride",
                    format!("the stride of tiles must be at least 1 and at most their size {size}, found {stride}"),
                ));
            }
        }
        Ok(())
    }
}

/// Divides the masks of all tiles by their sums, row-major in a plane of `width` pixels. The quotients sum to one.
fn masks_to_weights(tiles: &mut [Tile], mask_sums: &[f32], width: usize) {
    for Tile { output, blend, .. } in tiles {
        let rows = blend.iter_mut().flat_map(|mask| mask.chunks_exact_mut(output[1].len()));
        for (row, values) in output[0].clone().zip(rows) {
            let sums = &mask_sums[row * width..][output[1].clone()];
            values.iter_mut().zip(sums).for_each(|(v, sum)| *v /= sum);
        }
    }
}

/// Cuts one axis into intervals of at most `size`, whose starts are `stride` apart, until the end is covered.
fn intervals(extent: usize, size: usize, stride: usize) -> Vec<Range<usize>> {
    let mut cuts: Vec<_> = std::iter::once(0..size.min(extent)).collect();
    while let Some(last) = cuts.last().filter(|last| last.start + size < extent) {
        let start = last.start + stride;
        cuts.push(start..(start + size).min(extent));
    }
    cuts
}

/// The blend mask of the reference implementation, row-major: the minimum of the two axes' ramps. A ramp rises linearly
/// over `border` pixels from each side of the tile, except from a side of the picture, where the ramp is 1. `at_sides`
/// says whether the tile's top, bottom, left and right are sides of the picture.
pub fn blend_mask(size: [usize; 2], border: [usize; 2], at_sides: [bool; 4]) -> Vec<f32> {
    let [at_top, at_bottom, at_left, at_right] = at_sides;
    let rows = ramps(size[0], border[0], [at_top, at_bottom]);
    let columns = ramps(size[1], border[1], [at_left, at_right]);
    rows.iter().flat_map(|r| columns.iter().map(|c| c.min(*r))).collect()
}

/// The ramps of one axis. `at_sides` says whether its start and its end are sides of the picture.
fn ramps(length: usize, border: usize, at_sides: [bool; 2]) -> Vec<f32> {
    let [starts_at_side, ends_at_side] = at_sides;
    let ramp = |i: usize| (i + 1) as f32 / border as f32;
    let mut values = vec![1.0; length];
    if !starts_at_side {
        (0..border.min(length)).for_each(|i| values[i] = ramp(i));
    }
    if !ends_at_side {
        // The far ramp takes precedence where the two overlap, as in the reference.
        (0..border.min(length)).for_each(|i| values[length - 1 - i] = ramp(i));
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blend_weights_sum_to_one() {
        for (size, stride) in [([3, 4], [2, 1]), ([3, 3], [3, 3]), ([5, 2], [1, 2]), ([9, 9], [4, 4])] {
            for extent in [[1, 1], [7, 6], [4, 11], [3, 3]] {
                let tiles = Tiling::tiles(Some(&Tiling { size, stride }), extent, [1, 2]).unwrap();
                let mut sum = vec![0f32; extent[0] * extent[1] * 4];
                for tile in &tiles {
                    assert!(tile.input[0].len() <= size[0].max(extent[0]) && tile.input[0].end <= extent[0]);
                    let mut weights = tile.blend.clone().unwrap_or(vec![1.0; sum.len()]).into_iter();
                    for y in tile.output[0].clone() {
                        for x in tile.output[1].clone() {
                            sum[y * extent[1] * 2 + x] += weights.next().unwrap();
                        }
                    }
                }
                assert!(sum.iter().all(|s| (s - 1.0).abs() < 1e-6), "{size:?} {stride:?} {extent:?}");
                let pixels: usize = tiles.iter().map(|tile| tile.input[0].len() * tile.input[1].len()).sum();
                assert_eq!(Tiling { size, stride }.covered_pixels(extent), pixels, "{size:?} {stride:?} {extent:?}");
            }
        }
    }

    #[test]
    fn rejects_strides_of_zero_or_above_the_tile_size() {
        for stride in [[0, 1], [1, 4]] {
            assert!(Tiling::tiles(Some(&Tiling { size: [3, 3], stride }), [8, 8], [1, 8]).is_err());
        }
    }
}
