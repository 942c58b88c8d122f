//! Convolution with 3 x 3 kernels (and any number of kernel frames) by Winograd's minimal filtering, F(2x2, 3x3).
//!
//! A tile of 2 x 2 outputs of one frame needs a patch of 4 x 4 inputs. With the patch d and the kernel g transformed
//! (`B^T d B` and `G g G^T`, 16 numbers each), their elementwise product, summed over input channels and kernel frames,
//! transforms back to the tile (`A^T m A`): 16 multiplications instead of 36. The sums are sixteen matrix products
//! `[outputs, kernel frames * inputs] x [kernel frames * inputs, tiles]`, one for each position ("place") in a patch.
//! They are computed for a block of [`MR`] output channels and a panel of [`NR`] tiles at a time.
//!
//! All entries of the three transforms are 0, 1 or 1/2 in magnitude, so that little precision is lost: results are as
//! accurate as those of the plain sum. (F(4x4, 3x3), with 36 multiplications instead of 144, loses a digit.)

#[cfg(test)]
mod tests;
pub mod transforms;

use rayon::prelude::*;

use super::geometry::Shape;
use super::parallel::within;
use super::tile::{KC, MR, NR, SUMS, accumulate};
use transforms::{kernel_transform, patch_transform, result_transform};

/// Number of elements ("places") of a transformed patch or kernel.
pub const PLACES: usize = 16;
/// Blocks of output channels per task: their kernels stay in the L2 cache for all panels.
const BLOCKS: usize = 8;
/// Panels that a task transforms.
const PANELS: usize = 2;
/// Bytes of transformed patches and sums per thread that exist at a time: they fit the L3 cache.
const TOGETHER: usize = 8 << 20;
/// Maximum number of threads that this bound is multiplied with.
const MOST_THREADS: usize = 8;

/// Convolves x `[inputs, size]` and adds the bias of each output channel. The weight is `[outputs, inputs, kernel]`. If
/// `turned`, computes the input cotangent of a convolution whose output cotangent is x: the weight is then that
/// convolution's, `[inputs, outputs, kernel]`, and is read with reversed taps. Panics unless the kernel is 3 x 3.
pub fn convolve(shape: Shape, x: &[f32], weight: &[f32], turned: bool, bias: Option<&[f32]>) -> Vec<f32> {
    let bytes = TOGETHER * rayon::current_num_threads().min(MOST_THREADS);
    let places: usize = shape.output().map_or(0, |size| size.iter().product());
    within(places * weight.len(), || convolve_within(bytes, shape, x, weight, turned, bias))
}

/// [`convolve`] with at most `bytes` of transformed patches and sums (but at least one panel) at a time. The result is
/// bit-identical for any bound.
fn convolve_within(
    bytes: usize,
    shape: Shape,
    x: &[f32],
    weight: &[f32],
    turned: bool,
    bias: Option<&[f32]>,
) -> Vec<f32> {
    let Some([frames, rows, columns]) = shape.output() else { return Vec::new() };
    let taps: usize = shape.kernel.iter().product();
    assert_eq!(shape.kernel[1..], [3, 3], "rows and columns of the kernel");
    assert_eq!(x.len(), shape.inputs * shape.size.iter().product::<usize>(), "the input of {shape:?}");
    assert_eq!(weight.len(), shape.outputs * shape.inputs * taps, "the weight of {shape:?}");
    let mut y = vec![0.0; shape.outputs * frames * rows * columns];
    if y.is_empty() {
        return y;
    }
    let kernels = Kernels::new(shape, weight, turned);
    let grid = Grid::new(shape, [frames, rows, columns]);
    let seen = frames + shape.kernel[0] - 1;
    let blocks = shape.outputs.div_ceil(MR);
    let (patches, sums) = (PLACES * seen * shape.inputs * NR, PLACES * blocks * frames * SUMS);
    let together = (bytes / size_of::<f32>() / (patches + sums)).clamp(1, grid.panels());
    let (mut all_patches, mut all_sums) = (vec![0.0; together * patches], vec![0.0; together * sums]);
    for first in (0..grid.panels()).step_by(together) {
        let panels = together.min(grid.panels() - first);
        let (patches, sums) = (&mut all_patches[..panels * patches], &mut all_sums[..panels * sums]);
        patches_of(shape, grid, x, first, kernels.stretch, patches);
        products(shape, &kernels, patches, panels, sums);
        results_of(grid, sums, first, panels, bias, &mut y);
    }
    y
}

/// The tiles of a frame: row by row, in panels of [`NR`]; the last panel may be partial.
#[derive(Clone, Copy)]
pub struct Grid {
    /// Frames of the output.
    frames: usize,
    /// Rows and columns of the output.
    result: [usize; 2],
    /// Rows and columns of the input.
    input: [usize; 2],
    /// Zeros above and to the left of the input.
    padding: [usize; 2],
    /// Tiles per row.
    across: usize,
    /// Number of tiles of a frame.
    tiles: usize,
}

/// Adjacent tiles of a panel that lie in one row.
pub struct Run {
    /// Index of the first tile in its panel.
    lane: usize,
    count: usize,
    /// Row and column of the first tile in the grid.
    at: [usize; 2],
}

impl Grid {
    fn new(shape: Shape, [frames, result @ ..]: [usize; 3]) -> Self {
        let [down, across] = result.map(|n| n.div_ceil(2));
        let ([_, rows, columns], [_, above, left]) = (shape.size, shape.padding);
        Self { frames, result, input: [rows, columns], padding: [above, left], across, tiles: down * across }
    }

    fn panels(&self) -> usize {
        self.tiles.div_ceil(NR)
    }

    fn runs(self, panel: usize) -> impl Iterator<Item = Run> {
        let (start, end) = (panel * NR, ((panel + 1) * NR).min(self.tiles));
        let mut next = start;
        std::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let at = [next / self.across, next % self.across];
            let run = Run { lane: next - start, count: (self.across - at[1]).min(end - next), at };
            next += run.count;
            Some(run)
        })
    }

    /// Writes both output rows of a panel's tiles into one frame.
    fn write(self, panel: usize, tiles: &[[f32; 2 * NR]; 2], y: &mut [f32]) {
        let [rows, columns] = self.result;
        for run in self.runs(panel) {
            for (tiles, row) in tiles.iter().zip(2 * run.at[0]..rows) {
                let to = &mut y[row * columns..][2 * run.at[1]..columns];
                match to.first_chunk_mut() {
                    Some(to) if run.count == NR => *to = *tiles,
                    _ => {
                        let count = to.len().min(2 * run.count);
                        to[..count].copy_from_slice(&tiles[2 * run.lane..][..count]);
                    }
                }
            }
        }
    }
}

/// A transformed weight, packed for [`accumulate`] in the order: block of output channels, place, stretch of input
/// channels, kernel frame, input channel of the stretch, output channel of the block.
#[derive(Debug)]
pub struct Kernels {
    values: Vec<f32>,
    /// Kernel frames.
    taps: usize,
    inputs: usize,
    /// Input channels per stretch; the last stretch may have fewer.
    stretch: usize,
}

impl Kernels {
    /// Transforms `weight` (see [`convolve`] for its shape and `turned`). The size and padding of `shape` are not read.
    pub fn new(shape: Shape, weight: &[f32], turned: bool) -> Self {
        let Shape { inputs, outputs, kernel: [taps, ..], .. } = shape;
        let stretch = (KC / taps).clamp(1, inputs.max(1));
        let depth = taps * inputs;
        let mut values = vec![0.0; outputs.div_ceil(MR) * PLACES * depth * MR];
        let block = PLACES * depth * MR;
        values.par_chunks_mut(block.max(1)).enumerate().for_each(|(b, values)| {
            let lanes = MR.min(outputs - b * MR);
            for first in (0..inputs).step_by(stretch) {
                let width = stretch.min(inputs - first);
                for c in 0..width {
                    for tap in 0..taps {
                        let mut g = [[0.0; 8]; 9];
                        for lane in 0..lanes {
                            let (input, output) = (first + c, b * MR + lane);
                            let pair = if turned { input * outputs + output } else { output * inputs + input };
                            let from = if turned { taps - 1 - tap } else { tap };
                            let from = &weight[(pair * taps + from) * 9..][..9];
                            for (i, &value) in from.iter().enumerate() {
                                g[if turned { 8 - i } else { i }][lane] = value;
                            }
                        }
                        kernel_transform(&g, &mut values[(first * taps + tap * width + c) * MR..], depth * MR);
                    }
                }
            }
        });
        Self { values, taps, inputs, stretch }
    }

    /// The packed kernels of a block of output channels at a place.
    pub fn at(&self, block: usize, place: usize) -> &[f32] {
        let size = self.taps * self.inputs * MR;
        &self.values[(block * PLACES + place) * size..][..size]
    }
}

/// Transforms the patches of some panels to the order panel, place, stretch of input channels, frame, input channel of
/// the stretch, tile. Lanes of a partial panel keep their old content.
fn patches_of(shape: Shape, grid: Grid, x: &[f32], first: usize, stretch: usize, patches: &mut [f32]) {
    let seen = shape.size[0] + 2 * shape.padding[0];
    let panel_size = PLACES * seen * shape.inputs * NR;
    let [frames, rows, columns] = shape.size;
    patches.par_chunks_mut((PANELS * panel_size).max(1)).enumerate().for_each(|(group, patches)| {
        for frame in 0..seen {
            // Frames of padding are never read.
            let Some(from) = frame.checked_sub(shape.padding[0]).filter(|from| *from < frames) else { continue };
            for c in 0..shape.inputs {
                let plane = &x[(c * frames + from) * rows * columns..][..rows * columns];
                let start = c / stretch * stretch;
                let width = stretch.min(shape.inputs - start);
                let at = (start * seen + frame * width + c - start) * NR;
                for (i, patches) in patches.chunks_exact_mut(panel_size).enumerate() {
                    for run in grid.runs(first + group * PANELS + i) {
                        patch_transform(plane, grid, &run, &mut patches[at..], seen * shape.inputs * NR);
                    }
                }
            }
        }
    });
}

/// Computes the sums over input channels and kernel frames, in the order place, block of output channels, panel, frame,
/// output channel of the block, tile.
fn products(shape: Shape, kernels: &Kernels, patches: &[f32], panels: usize, sums: &mut [f32]) {
    let Kernels { taps, inputs, stretch, .. } = *kernels;
    let seen = shape.size[0] + 2 * shape.padding[0];
    let frames = seen + 1 - taps;
    let (before, after) = (shape.padding[0], shape.padding[0] + shape.size[0]);
    let group = BLOCKS * panels * frames * SUMS;
    let place = sums.len() / PLACES;
    sums.par_chunks_mut(place).enumerate().for_each(|(place, sums)| {
        sums.par_chunks_mut(group).enumerate().for_each(|(group, sums)| {
            let blocks = sums.len() / (panels * frames * SUMS);
            for panel in 0..panels {
                let patches = &patches[(panel * PLACES + place) * seen * inputs * NR..][..seen * inputs * NR];
                for frame in 0..frames {
                    // The kernel frames that read real input frames.
                    let (from, to) = (before.saturating_sub(frame).min(taps), (after - frame).min(taps));
                    for first in (0..inputs).step_by(stretch) {
                        let width = stretch.min(inputs - first);
                        let patches = &patches[(first * seen + (frame + from) * width) * NR..];
                        let patches = &patches[..(to - from) * width * NR];
                        for block in 0..blocks {
                            let weights = kernels.at(group * BLOCKS + block, place);
                            let weights = &weights[(first * taps + from * width) * MR..][..(to - from) * width * MR];
                            let at = ((block * panels + panel) * frames + frame) * SUMS;
                            let Some(sums) = sums[at..].first_chunk_mut() else { continue };
                            accumulate(weights, patches, sums, first > 0);
                        }
                    }
                }
            }
        });
    });
}

/// Transforms the sums of some panels back to the output `[outputs, frames, rows, columns]` and adds the bias.
fn results_of(grid: Grid, sums: &[f32], first: usize, panels: usize, bias: Option<&[f32]>, y: &mut [f32]) {
    let picture = grid.result[0] * grid.result[1];
    let channel = grid.frames * picture;
    y.par_chunks_mut(MR * channel).enumerate().for_each(|(block, y)| {
        for panel in 0..panels {
            for (o, y) in y.chunks_exact_mut(channel).enumerate() {
                let bias = bias.map_or(0.0, |bias| bias[block * MR + o]);
                for (frame, y) in y.chunks_exact_mut(picture).enumerate() {
                    let start = ((block * panels + panel) * grid.frames + frame) * SUMS + o * NR;
                    let tiles = result_transform(&sums[start..], sums.len() / PLACES, bias);
                    grid.write(first + panel, &tiles, y);
                }
            }
        }
    });
}
