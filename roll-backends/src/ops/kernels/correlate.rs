//! The micro-kernel of the 3-d convolution: a tile of six output channels by sixteen positions stays in registers while
//! the kernel taps of a few input channels are accumulated. There is no im2col: the padded input is read in place.

use rayon::prelude::*;

use super::geometry::{ConvKind, ConvShape, Padded, tap_offsets};
use super::matrix::ViewMut;
use super::simd::vectorised;
use super::tile::{MR, NR};

/// Input channels that are accumulated in a tile before the next tile (KC in BLIS terms): their weights (10 KiB at 27
/// taps) stay in the L1 cache.
const CHANNEL_BLOCK: usize = 16;
/// Positions per task (NC in BLIS terms): their input stays in the L2 cache.
const NC: usize = 512;

/// A weight packed for [`correlate`]: blocks of [`CHANNEL_BLOCK`] input channels. Each consists of blocks of [`MR`]
/// output channels, the last padded with zeros. Within these, the order is input channel, tap, output channel.
pub struct CorrelationWeight {
    values: Vec<f32>,
    taps: usize,
    inputs: usize,
    outputs: usize,
}

impl CorrelationWeight {
    /// Packs `weight`, `[outputs, inputs, taps]` of `shape`, for a convolution of this kind.
    pub fn new(shape: ConvShape, weight: &[f32], kind: ConvKind) -> Self {
        let taps: usize = shape.kernel.iter().product();
        let (inputs, outputs) = match kind {
            ConvKind::Forward => (shape.inputs, shape.outputs),
            ConvKind::Transposed => (shape.outputs, shape.inputs),
        };
        // The weight between two channels at a tap. The taps of a transposed convolution are in reverse order.
        let weight_at = |input: usize, output: usize, tap: usize| match kind {
            ConvKind::Forward => weight[(output * shape.inputs + input) * taps + tap],
            ConvKind::Transposed => weight[(input * shape.inputs + output) * taps + taps - 1 - tap],
        };
        let per_input = taps * outputs.next_multiple_of(MR);
        let mut values = vec![0.0; inputs * per_input];
        if per_input > 0 {
            values.par_chunks_mut(CHANNEL_BLOCK * per_input).enumerate().for_each(|(input_block, values)| {
                let channels = values.len() / per_input;
                for (output_block, values) in values.chunks_exact_mut(channels * taps * MR).enumerate() {
                    let first_output = output_block * MR;
                    for (channel, values) in values.chunks_exact_mut(taps * MR).enumerate() {
                        let input = input_block * CHANNEL_BLOCK + channel;
                        for (tap, lanes) in values.chunks_exact_mut(MR).enumerate() {
                            for (value, output) in lanes.iter_mut().zip(first_output..outputs) {
                                *value = weight_at(input, output, tap);
                            }
                        }
                    }
                }
            });
        }
        Self { values, taps, inputs, outputs }
    }

    /// The weights of input channels `first..first + channels` (one block), for each block of output channels.
    fn block(&self, first: usize, channels: usize) -> std::slice::ChunksExact<'_, f32> {
        let per_input = self.taps * self.outputs.next_multiple_of(MR);
        self.values[first * per_input..][..channels * per_input].chunks_exact(channels * self.taps * MR)
    }
}

/// Returns `[outputs, frames, rows, columns]`: the sum over input channels and taps of weight times shifted input, plus
/// the bias of each output channel.
pub fn correlate(shape: ConvShape, x: &Padded, weight: &CorrelationWeight, bias: Option<&[f32]>) -> Vec<f32> {
    let Some([frames, rows, columns]) = shape.output() else { return Vec::new() };
    // Width of a row and size of a channel of the padded input.
    let stride = x.size[2];
    let channel_size: usize = x.size.iter().product();
    // Where each tap reads, relative to the first tap.
    let offsets: Vec<usize> = tap_offsets(shape.kernel).map(|[t, r, c]| (t * x.size[1] + r) * stride + c).collect();
    let mut y = vec![0.0; shape.outputs * frames * rows * columns];
    // A task computes some rows of one frame, for all output channels. It has about `NC` positions, or fewer, so that
    // each thread gets two tasks.
    let rows_for_all_threads = (frames * rows).div_ceil(2 * rayon::current_num_threads());
    let height = (NC / stride).max(1).min(rows_for_all_threads).min(rows);
    let tasks: Vec<_> = ViewMut::new(&mut y, shape.outputs, frames * rows * columns)
        .split_columns(rows * columns)
        .into_iter()
        .enumerate()
        .flat_map(|(frame, y_of_frame)| {
            let parts = y_of_frame.split_columns(height * columns).into_iter().enumerate();
            parts.map(move |(i, y_part)| (frame, i * height, y_part)).collect::<Vec<_>>()
        })
        .collect();
    let padded_outputs = shape.outputs.next_multiple_of(MR);
    tasks.into_par_iter().for_each_init(Vec::new, |sums, (frame, first_row, mut y_part)| {
        // Sums are computed for rows as wide as the padded input's; the columns beyond the output's are dropped below.
        let length = ((height.min(rows - first_row) - 1) * stride + columns).next_multiple_of(NR);
        sums.clear();
        sums.resize(padded_outputs * length, 0.0);
        let start = (frame * x.size[1] + first_row) * stride;
        for channel in (0..weight.inputs).step_by(CHANNEL_BLOCK) {
            let channels = CHANNEL_BLOCK.min(weight.inputs - channel);
            let inputs = &x.values[channel * channel_size + start..];
            for (weight, sums) in weight.block(channel, channels).zip(sums.chunks_exact_mut(MR * length)) {
                accumulate(inputs, channel_size, &offsets, weight, sums, length);
            }
        }
        for (c, sums) in sums.chunks_exact(length).take(shape.outputs).enumerate() {
            let bias = bias.map_or(0.0, |bias| bias[c]);
            for (row, sums) in y_part.row(c).chunks_exact_mut(columns).zip(sums.chunks(stride)) {
                row.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum + bias);
            }
        }
    });
    y
}

vectorised! {
    /// Accumulates in `sums`, `[MR, length]` (length a multiple of [`NR`]), the products of `weight`, `[channels, taps,
    /// MR]`, with the input channels that begin at `x` and are `channel_size` apart. The last positions may read beyond
    /// their channel, into the next one or into the zeros behind the last (see [`Padded`]); their sums are not used.
    fn accumulate<M>(
        x: &[f32], channel_size: usize, offsets: &[usize], weight: &[f32], sums: &mut [f32], length: usize,
    ) {
        for first in (0..length).step_by(NR) {
            let mut tile = [[0.0f32; NR]; MR];
            for (o, tile) in tile.iter_mut().enumerate() {
                tile.copy_from_slice(&sums[o * length + first..][..NR]);
            }
            for (c, weight) in weight.chunks_exact(MR * offsets.len()).enumerate() {
                let x = &x[c * channel_size + first..];
                for (&offset, weight) in offsets.iter().zip(weight.chunks_exact(MR)) {
                    let inputs = &x[offset..offset + NR];
                    for o in 0..MR {
                        for l in 0..NR {
                            tile[o][l] = M::mul_add(weight[o], inputs[l], tile[o][l]);
                        }
                    }
                }
            }
            for (o, tile) in tile.iter().enumerate() {
                sums[o * length + first..][..NR].copy_from_slice(tile);
            }
        }
    }
}
