//! Patches of pictures and clips: their order, the values of each, and the transpose for gradients.

use std::ops::Range;

use burn_tensor::{Device, Tensor};
use roll_backends::host::values_to_device;
use roll_core::{Medium, Result, VisionLanguageFacts};

use super::config::VisionConfig;

/// The number of time steps, and of patches along height and width, of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub steps: usize,
    pub rows: usize,
    pub columns: usize,
}

impl Grid {
    /// The grid of pixels of the shape `[T, 3, H, W]`. Fails if the shape does not fit the network.
    pub fn of(shape: &[usize], facts: &VisionLanguageFacts) -> Result<Self> {
        facts.tokens_of(shape)?;
        Ok(Self { steps: shape[0] / facts.patch_frames, rows: shape[2] / facts.patch, columns: shape[3] / facts.patch })
    }
}

/// A patch: its time step, row and column.
pub type Place = [usize; 3];

/// The order in which the vision tower processes the patches of one or more media, and the spans of its attention.
///
/// Patches of a square of `merge x merge` are neighbours, because the merger joins them. Squares are ordered by time
/// step, then by window, then row by row. Without windows, this is the order of the tokens.
#[derive(Clone, Debug, Default)]
pub struct PatchOrder {
    /// The medium of each patch, and its place there.
    pub patches: Vec<(usize, Place)>,
    /// For each square, in the order of processing: its number in the order of tokens.
    pub squares: Vec<usize>,
    /// Spans of patches of one time step.
    pub steps: Vec<Range<usize>>,
    /// Spans of patches of one window; those of `steps` without windows.
    pub windows: Vec<Range<usize>>,
}

impl PatchOrder {
    /// The order of the patches of `grids`.
    pub fn new(config: &VisionConfig, grids: &[Grid]) -> Self {
        let mut order = Self::default();
        let mut squares_before = 0;
        for (medium, grid) in grids.iter().enumerate() {
            let (high, wide) = (grid.rows / config.merge, grid.columns / config.merge);
            let side = config.windows.as_ref().map_or(high.max(wide), |windows| windows.side);
            for step in 0..grid.steps {
                let step_start = order.patches.len();
                for (top, left) in tiles(high, wide, side) {
                    let window_start = order.patches.len();
                    for y in top..high.min(top + side) {
                        for x in left..wide.min(left + side) {
                            order.squares.push(squares_before + (step * high + y) * wide + x);
                            order.add_square(medium, step, [y, x], config.merge);
                        }
                    }
                    order.windows.push(window_start..order.patches.len());
                }
                order.steps.push(step_start..order.patches.len());
            }
            squares_before += grid.steps * high * wide;
        }
        order
    }

    fn add_square(&mut self, medium: usize, step: usize, [y, x]: [usize; 2], merge: usize) {
        for row in 0..merge {
            for column in 0..merge {
                self.patches.push((medium, [step, y * merge + row, x * merge + column]));
            }
        }
    }

    /// The values of all patches, one row each: channel, frame, row, column.
    pub fn gather(&self, config: &VisionConfig, media: &[&Medium]) -> Result<Vec<f32>> {
        let pixels = media.iter().map(|medium| medium.pixels.f32s()).collect::<Result<Vec<_>>>()?;
        let mut values = Vec::with_capacity(self.patches.len() * config.patch_values());
        for (medium, place) in &self.patches {
            let source = pixels[*medium];
            for_each_run(config, media[*medium].pixels.shape(), *place, |start| {
                values.extend_from_slice(&source[start..start + config.patch]);
            });
        }
        Ok(values)
    }

    /// The values of all patches on `device`, `[N, values of a patch]`.
    pub fn patches(&self, config: &VisionConfig, media: &[&Medium], device: &Device) -> Result<Tensor<2>> {
        let shape = [self.patches.len(), config.patch_values()];
        Ok(values_to_device(self.gather(config, media)?.into(), shape, device))
    }

    /// The row of each square, in the order of tokens, among the rows in the order of processing.
    pub fn rows(&self) -> Vec<usize> {
        let mut rows = vec![0; self.squares.len()];
        self.squares.iter().enumerate().for_each(|(row, square)| rows[*square] = row);
        rows
    }

    /// The transpose of [`PatchOrder::gather`]: pixels of each medium from rows of patches.
    pub fn scatter(&self, config: &VisionConfig, shapes: &[&[usize]], rows: &[f32]) -> Vec<Vec<f32>> {
        let mut pixels: Vec<Vec<f32>> = shapes.iter().map(|shape| vec![0.0; shape.iter().product()]).collect();
        let mut runs = rows.chunks_exact(config.patch);
        for (medium, place) in &self.patches {
            let target = &mut pixels[*medium];
            for_each_run(config, shapes[*medium], *place, |start| {
                if let Some(run) = runs.next() {
                    target[start..start + config.patch].copy_from_slice(run);
                }
            });
        }
        pixels
    }
}

/// The top left corners of tiles of a plane, row by row.
fn tiles(high: usize, wide: usize, side: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..high).step_by(side).flat_map(move |top| (0..wide).step_by(side).map(move |left| (top, left)))
}

/// Calls `f` with the start of each run of `patch` neighbouring pixels of the patch at `place`, in the order of the
/// patch's values, in pixels of `shape`, `[T, 3, H, W]`.
fn for_each_run(config: &VisionConfig, shape: &[usize], [step, row, column]: Place, mut f: impl FnMut(usize)) {
    let [_, channels, height, width] = shape else { return };
    for channel in 0..*channels {
        for frame in 0..config.patch_frames {
            let plane = ((step * config.patch_frames + frame) * channels + channel) * height;
            for y in 0..config.patch {
                f((plane + row * config.patch + y) * width + column * config.patch);
            }
        }
    }
}
