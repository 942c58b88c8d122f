//! ATen's convolutions, channels-last on GPUs.
//!
//! cuDNN's tensor-core kernels read volumes with channels innermost in memory, `[T, H, W, C]`. For any other layout
//! ATen and cuDNN copy the input to it and the result back; in bf16, ATen falls back from cuDNN to an im2col kernel.
//! Here the result keeps the layout it was computed in, so that the next convolution copies nothing.
//!
//! cuDNN computes f32 in TF32 (ATen's default) unless `NVIDIA_TF32_OVERRIDE=0` is set. Its heuristics select
//! algorithms. Benchmark mode (`cudnn_set_benchmark`) may be faster, but may select other algorithms, with other bits,
//! in the next run.

use tch::Tensor;

use super::fresh;
use crate::backend::{LibTorch, libtorch::TchTensor};
use crate::ops::ConvKernel;

impl ConvKernel for LibTorch {
    fn conv_forward([x, weight, bias]: [TchTensor; 3], padding: [usize; 3]) -> TchTensor {
        let (x, weight) = (&x.tensor, &weight.tensor);
        let bias = (bias.tensor.numel() > 0).then_some(&bias.tensor);
        let padding = padding.map(|n| n as i64);
        let convolve = if x.device().is_cuda() { channels_last } else { channels_first };
        fresh(convolve(x, weight, bias, padding))
    }
}

/// ATen's arguments for a convolution with stride 1, without dilation and groups.
const STRIDE: [i64; 3] = [1; 3];
const DILATION: [i64; 3] = [1; 3];
const GROUPS: i64 = 1;
/// [`STRIDE`] and [`DILATION`] of rows and columns.
const SPATIAL_STRIDE: [i64; 2] = [1; 2];
const SPATIAL_DILATION: [i64; 2] = [1; 2];

fn channels_first(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, padding: [i64; 3]) -> Tensor {
    x.unsqueeze(0).conv3d(weight, bias, STRIDE, padding, DILATION, GROUPS).squeeze_dim(0)
}

/// Multiple of channels that tensor cores need.
const CHANNEL_MULTIPLE: i64 = 8;

/// Convolution with a channels-last result. Copies x unless it is channels-last already. Channel counts that are not
/// multiples of 8, e.g. the three of frames, are padded with zeros: cuDNN might otherwise select a kernel without
/// tensor cores.
fn channels_last(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, padding: [i64; 3]) -> Tensor {
    let (outputs, inputs) = (weight.size()[0], weight.size()[1]);
    let missing = |channels: i64| (CHANNEL_MULTIPLE - channels % CHANNEL_MULTIPLE) % CHANNEL_MULTIPLE;
    let x_thwc = x.permute([1, 2, 3, 0]);
    match [missing(inputs), missing(outputs)] {
        [0, 0] => conv_thwc(&x_thwc.contiguous(), weight, bias, padding),
        [more_in, more_out] => {
            // Paddings are listed from the last axis on, each before and after.
            let x_thwc = if more_in > 0 { x_thwc.constant_pad_nd([0, more_in]) } else { x_thwc };
            let weight = weight.constant_pad_nd([0, 0, 0, 0, 0, 0, 0, more_in, 0, more_out]);
            let bias = bias.map(|bias| bias.constant_pad_nd([0, more_out]));
            conv_thwc(&x_thwc.contiguous(), &weight, bias.as_ref(), padding).narrow(0, 0, outputs)
        }
    }
}

/// Convolution of a contiguous x `[T, H, W, C]` whose channel counts are multiples of 8.
fn conv_thwc(x_thwc: &Tensor, weight: &Tensor, bias: Option<&Tensor>, [t, h, w]: [i64; 3]) -> Tensor {
    if weight.size()[2] == 1 && t == 0 {
        // A purely spatial convolution treats frames as a batch of images, for which cuDNN has more kernels.
        let y = x_thwc.permute([0, 3, 1, 2]).conv2d(
            &weight.squeeze_dim(2),
            bias,
            SPATIAL_STRIDE,
            [h, w],
            SPATIAL_DILATION,
            GROUPS,
        );
        return y.permute([1, 0, 2, 3]);
    }
    let x = x_thwc.unsqueeze(0).permute([0, 4, 1, 2, 3]);
    x.conv3d(weight, bias, STRIDE, [t, h, w], DILATION, GROUPS).squeeze_dim(0)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// Runs the code path of GPUs on the CPU.
    #[test]
    fn channels_last_matches_channels_first() {
        let kernels = [([3, 3, 3], [0, 1, 1]), ([1, 3, 3], [0, 1, 1]), ([3, 1, 1], [2, 0, 0])];
        let channels = [[6, 3], [16, 3], [6, 8], [16, 8]];
        for ((kernel, padding), [inputs, outputs]) in kernels.into_iter().flat_map(|k| channels.map(|c| (k, c))) {
            let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
            let (x, bias) = (normal(&[inputs, 4, 5, 7]), normal(&[outputs]));
            let weight = normal(&[outputs, inputs, kernel[0], kernel[1], kernel[2]]);
            let expected = channels_first(&x, &weight, Some(&bias), padding);
            let as_thwc = x.permute([1, 2, 3, 0]).contiguous().permute([3, 0, 1, 2]);
            for x in [x, as_thwc] {
                let found = channels_last(&x, &weight, Some(&bias), padding);
                assert_eq!(found.size(), expected.size());
                assert!(f64::try_from((&found - &expected).abs().max() / expected.abs().max()).unwrap() < 1e-5);
            }
        }
    }

    #[test]
    fn channels_last_volumes_are_not_copied() {
        let x = Tensor::randn([4, 3, 5, 6], (Kind::Float, Device::Cpu));
        let thwc = x.permute([3, 0, 1, 2]);
        assert_eq!(thwc.permute([1, 2, 3, 0]).contiguous().data_ptr(), x.data_ptr());
    }
}
