//! Convolution with 3 x 3 kernels (and any number of kernel frames) by Winograd's minimal filtering, F(2x2, 3x3).
//!
//! A tile of 2 x 2 outputs of one frame needs a patch of 4 x 4 inputs. With the patch d and the kernel g transformed
//! (`B^T d B` and `G g G^T`, 16 numbers each), their elementwise product, summed over input channels and kernel frames,
//! transforms back to the tile (`A^T m A`): 16 multiplications instead of 36. The sums are sixteen matrix products
//! `[outputs, kernel frames * inputs] x [kernel frames * inputs, tiles]`, one for each element of a patch.
//!
//! Terms: an *element* is one of these 16 numbers of a patch or kernel. A *panel* is [`NR`] tiles, and a *block* [`MR`]
//! output channels: the micro-kernel computes the sums of one element for a panel and a block at a time. A *run* is the
//! tiles of a panel that are adjacent in one row of tiles.
//!
//! All entries of the three transforms are 0, 1 or 1/2 in magnitude, so that little precision is lost: results are as
//! accurate as those of the plain sum. (F(4x4, 3x3), with 36 multiplications instead of 144, loses a digit.)

#[cfg(test)]
mod tests;
pub mod transforms;

use std::ops::Range;

use rayon::prelude::*;

use super::geometry::{ConvKind, ConvShape};
use super::parallel::in_pool;
use super::simd::prefetch;
use super::tile::{KC, Line, MR, NR, SUMS, accumulate};
use crate::ops::tiled::ranges;
use transforms::{kernel_transform, patch_transform, result_transform};

/// Number of elements of a transformed patch or kernel.
pub const ELEMENTS: usize = 16;
/// Taps of a 3 x 3 kernel.
pub const TAPS: usize = 9;
/// Kernels that are transformed at a time: a register has eight lanes.
pub const KERNEL_LANES: usize = 8;
/// Input channels between the kernels that are fetched and those that are transformed.
const KERNELS_AHEAD: usize = 8;
/// Blocks of output channels per task: their kernels stay in the L2 cache for all panels.
const BLOCKS_PER_TASK: usize = 8;
/// Panels whose patches a task transforms.
const PANELS_PER_TASK: usize = 2;
/// Bytes of transformed patches and sums per thread that exist at a time: they fit the L3 cache.
const CACHED_BYTES: usize = 8 << 20;
/// Maximum number of threads that [`CACHED_BYTES`] is multiplied by.
const MAX_COUNTED_THREADS: usize = 8;

/// Convolves x `[inputs, size]` and adds the bias of each output channel. The weight is `[outputs, inputs, kernel]`.
/// The transposed kind computes the input cotangent of a convolution whose output cotangent is x: the weight is then
/// that convolution's, `[inputs, outputs, kernel]`, and is read with reversed taps. Panics unless the kernel is 3 x 3.
pub fn convolve(shape: ConvShape, x: &[f32], weight: &[f32], kind: ConvKind, bias: Option<&[f32]>) -> Vec<f32> {
    let bytes = CACHED_BYTES * rayon::current_num_threads().min(MAX_COUNTED_THREADS);
    let positions: usize = shape.output().map_or(0, |size| size.iter().product());
    in_pool(positions * weight.len(), || convolve_within(bytes, shape, x, weight, kind, bias))
}

/// [`convolve`] with at most `bytes` of transformed patches and sums (but at least one panel) at a time. The result is
/// bit-identical for any bound.
fn convolve_within(
    bytes: usize,
    shape: ConvShape,
    x: &[f32],
    weight: &[f32],
    kind: ConvKind,
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
    let kernels = Kernels::new(shape, weight, kind);
    let grid = TileGrid::new(1, [rows, columns]);
    let padded_frames = frames + shape.kernel[0] - 1;
    let blocks = shape.outputs.div_ceil(MR);
    // Numbers of a panel.
    let (patch_size, sum_size) = (ELEMENTS * padded_frames * shape.inputs * NR, ELEMENTS * blocks * frames * SUMS);
    let panels_at_once = (bytes / size_of::<f32>() / (patch_size + sum_size)).clamp(1, grid.panels());
    let [mut all_patches, mut all_sums] =
        [patch_size, sum_size].map(|size| bytemuck::zeroed_vec::<Line>(panels_at_once * size / NR));
    let (all_patches, all_sums) = (bytemuck::cast_slice_mut(&mut all_patches), bytemuck::cast_slice_mut(&mut all_sums));
    for first_panel in (0..grid.panels()).step_by(panels_at_once) {
        let panels = panels_at_once.min(grid.panels() - first_panel);
        let (patches, sums) = (&mut all_patches[..panels * patch_size], &mut all_sums[..panels * sum_size]);
        transform_patches(shape, grid, x, first_panel, kernels.channel_block, patches);
        products(shape, &kernels, patches, panels, sums);
        transform_results(grid, [frames, rows, columns], sums, first_panel..first_panel + panels, bias, &mut y);
    }
    y
}

/// The tiles of some images of one size, counted row by row and image by image, in panels of [`NR`]. The last panel may
/// be partial.
#[derive(Clone, Copy)]
pub struct TileGrid {
    /// Rows of tiles of an image.
    down: usize,
    /// Tiles per row.
    across: usize,
    /// Number of tiles of all images.
    pub tiles: usize,
}

/// Adjacent tiles of a panel that lie in one row of an image.
pub struct TileRun {
    /// Index of the first tile in its panel.
    pub lane: usize,
    pub count: usize,
    pub image: usize,
    /// Row and column of the first output.
    pub at: [usize; 2],
}

impl TileGrid {
    /// The tiles of `images` images with the given rows and columns of outputs.
    pub fn new(images: usize, outputs: [usize; 2]) -> Self {
        let [down, across] = outputs.map(|n| n.div_ceil(2));
        Self { down, across, tiles: images * down * across }
    }

    /// Number of panels.
    pub fn panels(self) -> usize {
        self.tiles.div_ceil(NR)
    }

    /// The runs of a panel.
    pub fn runs(self, panel: usize) -> impl Iterator<Item = TileRun> {
        let (start, end) = (panel * NR, ((panel + 1) * NR).min(self.tiles));
        let mut next = start;
        std::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let (row_of_all, column) = (next / self.across, next % self.across);
            let count = (self.across - column).min(end - next);
            let at = [2 * (row_of_all % self.down), 2 * column];
            let run = TileRun { lane: next - start, count, image: row_of_all / self.down, at };
            next += count;
            Some(run)
        })
    }
}

/// Writes both output rows of the tiles of a panel into a frame of `[rows, columns]`.
fn write_tiles(
    runs: impl Iterator<Item = TileRun>,
    tiles: &[[f32; 2 * NR]; 2],
    [rows, columns]: [usize; 2],
    y: &mut [f32],
) {
    for run in runs {
        for (tiles, row) in tiles.iter().zip(run.at[0]..rows) {
            let to = &mut y[row * columns..][run.at[1]..columns];
            match to.first_chunk_mut() {
                Some(to) if run.count == NR => *to = *tiles,
                // Tiles may reach one column beyond the frame.
                _ => {
                    let count = to.len().min(2 * run.count);
                    to[..count].copy_from_slice(&tiles[2 * run.lane..][..count]);
                }
            }
        }
    }
}

/// A transformed weight, packed for [`accumulate`] in the order: block of output channels, element, block of input
/// channels, kernel frame, input channel of the block, output channel of the block.
#[derive(Debug)]
pub struct Kernels {
    values: Vec<f32>,
    kernel_frames: usize,
    inputs: usize,
    /// Input channels per block; the last block may have fewer.
    channel_block: usize,
}

impl Kernels {
    /// Transforms `weight` (see [`convolve`] for its shape and kind). Size and padding of `shape` are not read.
    pub fn new(shape: ConvShape, weight: &[f32], kind: ConvKind) -> Self {
        let is_transposed = kind == ConvKind::Transposed;
        let ConvShape { inputs, outputs, kernel: [kernel_frames, ..], .. } = shape;
        let channel_block = (KC / kernel_frames).clamp(1, inputs.max(1));
        let depth = kernel_frames * inputs;
        let mut values = vec![0.0; outputs.div_ceil(MR) * ELEMENTS * depth * MR];
        let block_size = ELEMENTS * depth * MR;
        values.par_chunks_mut(block_size.max(1)).enumerate().for_each(|(block, values)| {
            let lanes = MR.min(outputs - block * MR);
            for first in (0..inputs).step_by(channel_block) {
                let width = channel_block.min(inputs - first);
                for c in 0..width {
                    if is_transposed {
                        // The kernels of an input channel lie together, far from those of the next one.
                        let ahead = (first + c + KERNELS_AHEAD) * outputs + block * MR;
                        let size = kernel_frames * TAPS;
                        prefetch(weight.get(ahead * size..(ahead + lanes) * size).unwrap_or_default());
                    }
                    for packed_frame in 0..kernel_frames {
                        // The 3 x 3 kernels of the block's output channels, one per lane.
                        let mut g = [[0.0; KERNEL_LANES]; TAPS];
                        for lane in 0..lanes {
                            let (input, output) = (first + c, block * MR + lane);
                            let pair = if is_transposed { input * outputs + output } else { output * inputs + input };
                            let frame = if is_transposed { kernel_frames - 1 - packed_frame } else { packed_frame };
                            let kernel = &weight[(pair * kernel_frames + frame) * TAPS..][..TAPS];
                            for (i, &value) in kernel.iter().enumerate() {
                                let position = if is_transposed { TAPS - 1 - i } else { i };
                                g[position][lane] = value;
                            }
                        }
                        let start = (first * kernel_frames + packed_frame * width + c) * MR;
                        kernel_transform(&g, &mut values[start..], depth * MR);
                    }
                }
            }
        });
        Self { values, kernel_frames, inputs, channel_block }
    }

    /// The packed kernels of a block of output channels for an element.
    pub fn at(&self, block: usize, element: usize) -> &[f32] {
        let size = self.kernel_frames * self.inputs * MR;
        &self.values[(block * ELEMENTS + element) * size..][..size]
    }
}

/// Transforms the patches of the panels from `first_panel` on to the order panel, element, block of input channels,
/// frame, input channel of the block, tile. Lanes beyond the last tile of a partial panel keep their old content; their
/// sums are not used.
fn transform_patches(
    shape: ConvShape,
    grid: TileGrid,
    x: &[f32],
    first_panel: usize,
    channel_block: usize,
    patches: &mut [f32],
) {
    let padded_frames = shape.size[0] + 2 * shape.padding[0];
    let panel_size = ELEMENTS * padded_frames * shape.inputs * NR;
    let [frames, rows, columns] = shape.size;
    let before = [shape.padding[1] as isize, shape.padding[2] as isize];
    let element_stride = padded_frames * shape.inputs * NR;
    patches.par_chunks_mut((PANELS_PER_TASK * panel_size).max(1)).enumerate().for_each(|(group, patches)| {
        for frame in 0..padded_frames {
            // Frames of padding are never read.
            let input_frame = frame.checked_sub(shape.padding[0]).filter(|input_frame| *input_frame < frames);
            let Some(input_frame) = input_frame else { continue };
            for c in 0..shape.inputs {
                let plane = &x[(c * frames + input_frame) * rows * columns..][..rows * columns];
                // First channel and number of channels of the block of input channels.
                let start = c / channel_block * channel_block;
                let width = channel_block.min(shape.inputs - start);
                let at = (start * padded_frames + frame * width + c - start) * NR;
                for (i, patches) in patches.chunks_exact_mut(panel_size).enumerate() {
                    for run in grid.runs(first_panel + group * PANELS_PER_TASK + i) {
                        patch_transform(plane, [rows, columns], before, &run, &mut patches[at..], element_stride);
                    }
                }
            }
        }
    });
}

/// Computes the sums over input channels and kernel frames, in the order element, block of output channels, panel,
/// frame, output channel of the block, tile.
fn products(shape: ConvShape, kernels: &Kernels, patches: &[f32], panels: usize, sums: &mut [f32]) {
    let Kernels { kernel_frames, inputs, channel_block, .. } = *kernels;
    let padded_frames = shape.size[0] + 2 * shape.padding[0];
    let frames = padded_frames + 1 - kernel_frames;
    // The input's frames among the padded ones.
    let (input_start, input_end) = (shape.padding[0], shape.padding[0] + shape.size[0]);
    let group_size = BLOCKS_PER_TASK * panels * frames * SUMS;
    let element_size = sums.len() / ELEMENTS;
    sums.par_chunks_mut(element_size).enumerate().for_each(|(element, sums)| {
        sums.par_chunks_mut(group_size).enumerate().for_each(|(group, sums)| {
            let sums = sums.as_chunks_mut::<SUMS>().0;
            let blocks = sums.len() / (panels * frames);
            for pair in ranges(panels, 2) {
                for frame in 0..frames {
                    // The kernel frames that read real input frames.
                    let first_kernel_frame = input_start.saturating_sub(frame).min(kernel_frames);
                    let kernel_end = (input_end - frame).min(kernel_frames);
                    let read_frames = kernel_end - first_kernel_frame;
                    for first in (0..inputs).step_by(channel_block) {
                        let width = channel_block.min(inputs - first);
                        let patches = |panel: usize| {
                            let start = (panel * ELEMENTS + element) * padded_frames * inputs;
                            let start = start + first * padded_frames + (frame + first_kernel_frame) * width;
                            &patches[start * NR..][..read_frames * width * NR]
                        };
                        let weights = |block: usize| {
                            let weights = kernels.at(group * BLOCKS_PER_TASK + block, element);
                            let weights = &weights[(first * kernel_frames + first_kernel_frame * width) * MR..];
                            &weights[..read_frames * width * MR]
                        };
                        let products = Products { weights, patches, adds_to_sums: first > 0 };
                        products.of_panels(pair.clone(), blocks, sums, |block, panel| {
                            (block * panels + panel) * frames + frame
                        });
                    }
                }
            }
        });
    });
}

/// The products of some blocks of output channels and some panels, over a block of input channels.
struct Products<W, P> {
    /// The packed kernels of a block.
    weights: W,
    /// The transformed patches of a panel.
    patches: P,
    /// Whether the products are added to the sums or overwrite them.
    adds_to_sums: bool,
}

impl<'a, W: Fn(usize) -> &'a [f32], P: Fn(usize) -> &'a [f32]> Products<W, P> {
    /// Computes the sums of one or two panels for blocks 0 to `blocks`: two by two tiles at a time, fewer where a block
    /// or panel is left over. `tile` returns the index in `sums` of a block and a panel.
    fn of_panels(
        &self,
        panels: Range<usize>,
        blocks: usize,
        sums: &mut [[f32; SUMS]],
        tile: impl Fn(usize, usize) -> usize,
    ) {
        let (panel, next_panel) = (panels.start, panels.end - 1);
        for pair in ranges(blocks, 2) {
            let (block, next_block) = (pair.start, pair.end - 1);
            let tiles = [(block, panel), (block, next_panel), (next_block, panel), (next_block, next_panel)];
            if let Ok([a, b, c, d]) = sums.get_disjoint_mut(tiles.map(|(block, panel)| tile(block, panel))) {
                let weights = [(self.weights)(block), (self.weights)(next_block)];
                let patches = [(self.patches)(panel), (self.patches)(next_panel)];
                accumulate(weights, patches, [[a, b], [c, d]], self.adds_to_sums);
                continue;
            }
            if let Ok([a, b]) = sums.get_disjoint_mut([tile(block, panel), tile(next_block, panel)]) {
                let weights = [(self.weights)(block), (self.weights)(next_block)];
                accumulate(weights, [(self.patches)(panel)], [[a], [b]], self.adds_to_sums);
                continue;
            }
            for panel in panels.clone() {
                let sums = &mut sums[tile(block, panel)];
                accumulate([(self.weights)(block)], [(self.patches)(panel)], [[sums]], self.adds_to_sums);
            }
        }
    }
}

/// Transforms the sums of some panels back to the output `[outputs, frames, rows, columns]` and adds the bias.
fn transform_results(
    grid: TileGrid,
    [frames, rows, columns]: [usize; 3],
    sums: &[f32],
    panels: Range<usize>,
    bias: Option<&[f32]>,
    y: &mut [f32],
) {
    let channel_size = frames * rows * columns;
    y.par_chunks_mut(MR * channel_size).enumerate().for_each(|(block, y)| {
        for (i, panel) in panels.clone().enumerate() {
            for (o, y) in y.chunks_exact_mut(channel_size).enumerate() {
                let bias = bias.map_or(0.0, |bias| bias[block * MR + o]);
                for (frame, y) in y.chunks_exact_mut(rows * columns).enumerate() {
                    let start = ((block * panels.len() + i) * frames + frame) * SUMS + o * NR;
                    let tiles = result_transform(&sums[start..], sums.len() / ELEMENTS, bias);
                    write_tiles(grid.runs(panel), &tiles, [rows, columns], y);
                }
            }
        }
    });
}
