//! Memory order of a chunk's axes, and the operations on chunks that depend on it. The shape is `[C, T, H, W]` in both
//! orders, and the values are the same. An operator copies a tensor whose order it cannot use.

use burn_tensor::ops::AvgPoolOptions;
use burn_tensor::{Device, Tensor, module};
use roll_backends::{NdTensor, device, ops};
use roll_core::Result;
use roll_network::precision::as_dtype;

use super::rearrange::{interleave_frames, nearest_double};

/// The order of a chunk's axes in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkLayout {
    /// Channels outermost: `[C, T, H, W]`, row-major.
    ChannelsFirst,
    /// Channels innermost: `[T, H, W, C]`, which libtorch's convolutions on tensor cores expect. A frame is contiguous.
    ChannelsLast,
}

impl ChunkLayout {
    /// The order that a device's convolutions prefer.
    pub fn of(device: &Device) -> Self {
        if device::prefers_channels_innermost(device) { Self::ChannelsLast } else { Self::ChannelsFirst }
    }

    /// Concatenates chunks in time, in new memory.
    pub fn concat(self, chunks: Vec<Tensor<4>>) -> Tensor<4> {
        match self {
            Self::ChannelsFirst => Tensor::cat(chunks, 1),
            Self::ChannelsLast => from_thwc(Tensor::cat(chunks.into_iter().map(to_thwc).collect(), 0)),
        }
    }

    /// Copies frames into a tensor of their own. A view would keep all frames of the original chunk in memory.
    pub fn copy_frames(self, frames: Tensor<4>) -> NdTensor {
        let count = frames.dims()[1];
        match self {
            // Flattening copies a tensor that is not contiguous.
            Self::ChannelsFirst => frames.into(),
            // A concatenation copies.
            Self::ChannelsLast if count > 1 => {
                let parts = vec![frames.clone().narrow(1, 0, 1), frames.narrow(1, 1, count - 1)];
                to_thwc(self.concat(parts)).into()
            }
            // One frame is contiguous, so this is a view. Networks with this layout cache pairs of frames.
            Self::ChannelsLast => to_thwc(frames).into(),
        }
    }

    /// Restores frames from [`ChunkLayout::copy_frames`].
    pub fn restore_frames(self, frames: &NdTensor) -> Result<Tensor<4>> {
        match self {
            Self::ChannelsFirst => frames.rank(),
            Self::ChannelsLast => Ok(from_thwc(frames.rank()?)),
        }
    }

    /// Nearest-neighbour upsampling by 2 in height and width.
    pub fn double(self, x: Tensor<4>) -> Tensor<4> {
        match self {
            Self::ChannelsFirst => nearest_double(x),
            // Frames become a batch of pictures with their channels innermost.
            Self::ChannelsLast => nearest_double(x.swap_dims(0, 1)).swap_dims(0, 1),
        }
    }

    /// The pullback of [`ChunkLayout::double`]: sums of four pixels.
    pub fn double_pull(self, cotangent: Tensor<4>) -> Tensor<4> {
        let pictures = cotangent.swap_dims(0, 1);
        (module::avg_pool2d(pictures, AvgPoolOptions::new([2, 2])) * 4.0).swap_dims(0, 1)
    }

    /// Converts pairs of channels into frames; see [`interleave_frames`].
    pub fn interleave(self, x: Tensor<4>) -> Tensor<4> {
        let [c, t, h, w] = x.dims();
        match self {
            Self::ChannelsFirst => interleave_frames(x),
            Self::ChannelsLast => {
                let pairs: Tensor<5> = to_thwc(x).reshape([t, h, w, 2, c / 2]);
                from_thwc(pairs.permute([0, 3, 1, 2, 4]).reshape([2 * t, h, w, c / 2]))
            }
        }
    }

    /// The pullback of [`ChunkLayout::interleave`]: converts frames into pairs of channels.
    pub fn interleave_pull(self, cotangent: Tensor<4>) -> Tensor<4> {
        let [c, t, h, w] = cotangent.dims();
        let frames: Tensor<5> = to_thwc(cotangent).reshape([t / 2, 2, h, w, c]);
        from_thwc(frames.permute([0, 2, 3, 1, 4]).reshape([t / 2, h, w, 2 * c]))
    }

    /// Adds `end` to the last frames of `x`.
    pub fn add_to_end(self, x: Tensor<4>, end: Option<Tensor<4>>) -> Tensor<4> {
        let Some(end) = end else { return x };
        let ([c, frames, h, w], added) = (x.dims(), end.dims()[1]);
        let unchanged = frames - added;
        let sum = x.clone().narrow(1, unchanged, added) + end;
        if unchanged == 0 {
            return sum;
        }
        match self {
            Self::ChannelsFirst => Tensor::cat(vec![x.narrow(1, 0, unchanged), sum], 1),
            // This happens in place: `x` is not used elsewhere.
            Self::ChannelsLast => x.slice_assign([0..c, unchanged..frames, 0..h, 0..w], sum),
        }
    }

    /// Applies the same linear map `[O, C]` at every position. The result has the dtype of `x`; sums are f32.
    pub fn pointwise(self, x: Tensor<4>, matrix: Tensor<2>, bias: Tensor<1>) -> Tensor<4> {
        let ([c, t, h, w], dtype) = (x.dims(), x.dtype());
        let (out, positions) = (matrix.dims()[0], t * h * w);
        let y = match self {
            Self::ChannelsFirst => {
                let y = ops::product(matrix, x.reshape([c, positions])) + bias.reshape([out, 1]);
                y.reshape([out, t, h, w])
            }
            Self::ChannelsLast => {
                let y = ops::product(to_thwc(x).reshape([positions, c]), matrix.transpose()) + bias.reshape([1, out]);
                from_thwc(y.reshape([t, h, w, out]))
            }
        };
        as_dtype(y, dtype)
    }
}

/// Views `[C, T, H, W]` as `[T, H, W, C]`.
fn to_thwc(x: Tensor<4>) -> Tensor<4> {
    x.permute([1, 2, 3, 0])
}

/// Views `[T, H, W, C]` as `[C, T, H, W]`.
fn from_thwc(x: Tensor<4>) -> Tensor<4> {
    x.permute([3, 0, 1, 2])
}

#[cfg(test)]
mod tests {
    use roll_backends::to_host;
    use roll_core::{Noise, Purpose};

    use super::*;

    fn normal(shape: [usize; 4], index: u64) -> Tensor<4> {
        let device = roll_backends::device("flex").unwrap();
        let values = Noise::new(6).normal(Purpose::Synthetic, 0, index, &shape).unwrap();
        roll_backends::to_device(&values, &device).unwrap()
    }

    fn values(x: Tensor<4>) -> Vec<f32> {
        to_host(x).unwrap().to_f32_vec()
    }

    #[test]
    fn layouts_rearrange_alike() {
        let layouts = [ChunkLayout::ChannelsFirst, ChunkLayout::ChannelsLast];
        let (x, y) = (normal([4, 3, 2, 5], 0), normal([4, 2, 2, 5], 1));
        let [channels_first, channels_last] = layouts.map(|layout| {
            let copy = layout.copy_frames(x.clone().narrow(1, 1, 2));
            [
                layout.concat(vec![y.clone(), x.clone()]),
                layout.restore_frames(&copy).unwrap(),
                layout.restore_frames(&layout.copy_frames(y.clone().narrow(1, 0, 1))).unwrap(),
                layout.double(x.clone()),
                layout.interleave(x.clone()),
                layout.add_to_end(x.clone(), Some(y.clone())),
                layout.add_to_end(x.clone(), None),
            ]
        });
        for (a, b) in channels_first.into_iter().zip(channels_last) {
            assert_eq!(a.dims(), b.dims());
            assert_eq!(values(a), values(b));
        }
    }

    #[test]
    fn pullbacks_are_transposes() {
        let dot = |a: Tensor<4>, b: Tensor<4>| (a * b).sum().into_scalar::<f32>();
        for layout in [ChunkLayout::ChannelsFirst, ChunkLayout::ChannelsLast] {
            let (x, doubled) = (normal([4, 3, 2, 5], 2), normal([4, 3, 4, 10], 3));
            let (forward, back) = (layout.double(x.clone()), layout.double_pull(doubled.clone()));
            assert!((dot(forward, doubled) - dot(x.clone(), back)).abs() < 1e-4);
            let frames = normal([2, 6, 2, 5], 4);
            let (forward, back) = (layout.interleave(x.clone()), layout.interleave_pull(frames.clone()));
            assert!((dot(forward, frames) - dot(x, back)).abs() < 1e-4);
        }
    }
}
