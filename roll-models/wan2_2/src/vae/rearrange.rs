//! Linear maps without weights, from `[C, T, H, W]` to `[C', T', H', W']`: pixel shuffles, and the shortcuts of the
//! Wan2.2 VAE.

use burn_tensor::ops::{InterpolateMode, InterpolateOptions};
use burn_tensor::{DType, Tensor, module};

/// Pixel-unshuffle by 2: `[C, T, 2H, 2W]` to `[C * 4, T, H, W]`, channels in the order (C, column, row).
pub fn patchify(x: Tensor<4>) -> Tensor<4> {
    let [c, t, h, w] = x.dims();
    x.reshape([c, t, h / 2, 2, w / 2, 2]).permute([0, 5, 3, 1, 2, 4]).reshape([c * 4, t, h / 2, w / 2])
}

/// Inverse of [`patchify`].
pub fn unpatchify(x: Tensor<4>) -> Tensor<4> {
    let [c, t, h, w] = x.dims();
    x.reshape([c / 4, 2, 2, t, h, w]).permute([0, 3, 4, 2, 5, 1]).reshape([c / 4, t, h * 2, w * 2])
}

/// Nearest-neighbour upsampling by 2: `[C, T, H, W]` to `[C, T, 2H, 2W]`. At this factor `nearest` and `nearest-exact`
/// are equal.
pub fn nearest_double(x: Tensor<4>) -> Tensor<4> {
    let [c, t, h, w] = x.dims();
    if x.dtype() != DType::F32 {
        // Flex does not support the gradient of an interpolation in bf16.
        let pixels: Tensor<6> = x.reshape([c, t, h, 1, w, 1]);
        return pixels.expand([c, t, h, 2, w, 2]).reshape([c, t, 2 * h, 2 * w]);
    }
    module::interpolate(x, InterpolateOptions::new(InterpolateMode::Nearest).with_output_size([2 * h, 2 * w]))
}

/// Converts pairs of channels into frames: `[2C, T, H, W]` to `[C, 2T, H, W]`. The first half of the channels are the
/// even frames.
pub fn interleave_frames(x: Tensor<4>) -> Tensor<4> {
    let [c, t, h, w] = x.dims();
    x.reshape([2, c / 2, t, h, w]).permute([1, 2, 0, 3, 4]).reshape([c / 2, 2 * t, h, w])
}

/// Appends a row and a column of zeros at the bottom and at the right.
pub fn pad_bottom_right(x: Tensor<4>) -> Tensor<4> {
    let [c, t, h, w] = x.dims();
    let device = x.device();
    let x = Tensor::cat(vec![x, Tensor::zeros([c, t, h, 1], &device)], 3);
    Tensor::cat(vec![x, Tensor::zeros([c, t, 1, w + 1], &device)], 2)
}

/// Factors by which a stage of the Wan2.2 VAE changes time and space, and its output channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factors {
    /// Factor of time.
    pub time: usize,
    /// Factor of height and of width.
    pub space: usize,
    /// Channels of the output.
    pub channels: usize,
}

/// Shortcut of a downsampling stage: the values of a space-time block become channels, and groups of consecutive
/// channels are averaged. If the frames are no multiple of `time`, zeros are put before the first frame.
pub fn average_down(x: Tensor<4>, Factors { time, space, channels }: Factors) -> Tensor<4> {
    let [c, t, h, w] = x.dims();
    let missing = (time - t % time) % time;
    let x = if missing == 0 {
        x
    } else {
        let zeros = Tensor::zeros([c, missing, h, w], &x.device());
        Tensor::cat(vec![zeros, x], 1)
    };
    let [t, h, w] = [(t + missing) / time, h / space, w / space];
    let group_size = c * time * space * space / channels;
    let blocks: Tensor<7> = x.reshape([c, t, time, h, space, w, space]).permute([0, 2, 4, 6, 1, 3, 5]);
    blocks.reshape([channels, group_size, t * h * w]).mean_dim(1).reshape([channels, t, h, w])
}

/// Shortcut of an upsampling stage: channels are repeated, and groups of consecutive channels become space-time blocks.
/// The first chunk of a video has no past, so the first `time - 1` output frames are removed.
pub fn duplicate_up(x: Tensor<4>, Factors { time, space, channels }: Factors, is_first_chunk: bool) -> Tensor<4> {
    let [c, t, h, w] = x.dims();
    let repeats = channels * time * space * space / c;
    let repeated: Tensor<3> = x.reshape([c, 1, t * h * w]).expand([c, repeats, t * h * w]);
    let blocks: Tensor<7> = repeated.reshape([channels, time, space, space, t, h, w]).permute([0, 4, 1, 5, 2, 6, 3]);
    let y = blocks.reshape([channels, t * time, h * space, w * space]);
    if is_first_chunk { y.narrow(1, time - 1, t * time - (time - 1)) } else { y }
}
