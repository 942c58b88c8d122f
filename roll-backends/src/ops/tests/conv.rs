//! Tests of 3-d convolution.

use burn_tensor::{DType, Tensor, module};

use super::{BF16, assert_near, bf16_devices, check, devices, download, noise};
use crate::ops::{conv, conv3d, seed};

#[test]
fn convolution_and_its_gradients_match_f64() {
    for (size, kernel, padding) in [
        ([3, 5, 4], [3, 3, 3], [0, 1, 1]),
        ([2, 4, 5], [1, 3, 3], [0, 1, 1]),
        ([4, 2, 3], [3, 1, 1], [0, 0, 0]),
        ([2, 3, 3], [1, 1, 1], [0, 0, 0]),
        ([2, 4, 4], [2, 3, 2], [1, 0, 1]),
    ] {
        let (inputs, outputs) = (2, 3);
        let positions: usize = size.iter().product();
        let taps: usize = kernel.iter().product();
        let out: [usize; 3] = std::array::from_fn(|i| size[i] + 2 * padding[i] + 1 - kernel[i]);
        let operands = [noise(inputs, positions, 1), noise(outputs, inputs * taps, 2), noise(1, outputs, 3)];
        check(
            &format!("conv {size:?} {kernel:?} {padding:?}"),
            &operands,
            1e-6,
            |x| {
                let volume = x[0].clone().reshape([inputs, size[0], size[1], size[2]]);
                let weight = x[1].clone().reshape([outputs, inputs, kernel[0], kernel[1], kernel[2]]);
                let bias: Tensor<1> = x[2].clone().reshape([outputs]);
                let by_size = conv3d(volume.clone(), weight.clone(), Some(bias.clone()), padding);
                let y = conv::fused_conv3d(volume, weight, bias, padding);
                let by_size: Vec<f64> = download(by_size).iter().map(|&v| f64::from(v)).collect();
                assert_near("the kernel against Burn's", &download(y.clone()), &by_size, 2e-6);
                y.reshape([outputs, out.iter().product::<usize>()])
            },
            |x| {
                let mut y = Vec::new();
                for o in 0..outputs {
                    for p in 0..out.iter().product::<usize>() {
                        let at = [p / (out[1] * out[2]), p / out[2] % out[1], p % out[2]];
                        let mut sum = x[2].at(0, o);
                        for i in 0..inputs {
                            for k in 0..taps {
                                let tap = [k / (kernel[1] * kernel[2]), k / kernel[2] % kernel[1], k % kernel[2]];
                                let [t, r, c] = std::array::from_fn(|a| (at[a] + tap[a]).wrapping_sub(padding[a]));
                                if t < size[0] && r < size[1] && c < size[2] {
                                    sum += x[0].at(i, (t * size[1] + r) * size[2] + c) * x[1].at(o, i * taps + k);
                                }
                            }
                        }
                        y.push(sum);
                    }
                }
                y
            },
        );
    }
}

#[test]
fn convolution_vjp_matches_autodiff() {
    // Flex uses Winograd for the first two only.
    for (channels, kernel, padding) in [
        ([32, 35], [3, 3, 3], [0, 1, 1]),
        ([33, 32], [1, 3, 3], [0, 0, 2]),
        ([2, 3], [3, 3, 3], [1, 1, 0]),
        ([18, 16], [3, 1, 1], [0, 0, 0]),
    ] {
        let ([inputs, outputs], size) = (channels, [3, 5, 4]);
        let taps: usize = kernel.iter().product();
        let out: [usize; 3] = std::array::from_fn(|i| size[i] + 2 * padding[i] + 1 - kernel[i]);
        let operands = [noise(inputs, 60, 1), noise(outputs, inputs * taps, 2), noise(1, outputs, 3)];
        let cotangent = noise(outputs, out.iter().product(), 4);
        for device in devices() {
            let x: Tensor<4> = operands[0].upload(&device).reshape([inputs, size[0], size[1], size[2]]);
            let weight: Tensor<5> =
                operands[1].upload(&device).reshape([outputs, inputs, kernel[0], kernel[1], kernel[2]]);
            let bias: Tensor<1> = operands[2].upload(&device).reshape([outputs]);
            let cotangent: Tensor<4> = cotangent.upload(&device).reshape([outputs, out[0], out[1], out[2]]);
            let wide = |x: Tensor<4>| download(x).iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let what = format!("{kernel:?} on {device:?}");

            let leaf = x.clone().autodiff().require_grad();
            let y = conv3d(leaf.clone(), weight.clone(), Some(bias.clone()), padding);
            let plain = module::conv3d(x.unsqueeze(), weight.clone(), Some(bias), conv::options(padding));
            assert_near(&what, &download(y.clone().inner()), &wide(plain.squeeze_dim(0)), 2e-6);

            let mut g = seed(y, cotangent.clone()).backward();
            let expected = wide(leaf.grad_remove(&mut g).unwrap());
            let pulled = conv::conv3d_pull(cotangent, weight, padding);
            assert_near(&format!("pull, {what}"), &download(pulled), &expected, 2e-6);
        }
    }
}

#[test]
fn convolution_of_bf16_is_bf16() {
    let (x, weight) = (noise(3, 60, 1), noise(2, 81, 2));
    for device in bf16_devices() {
        let volume = x.upload(&device).reshape([3, 3, 4, 5]);
        let weight: Tensor<5> = weight.upload(&device).reshape([2, 3, 3, 3, 3]);
        let wide: Vec<f64> =
            download(conv3d(volume.clone(), weight.clone(), None, [0, 1, 1])).iter().map(|&v| f64::from(v)).collect();
        let (volume, weight) = (volume.cast(DType::BF16), weight.cast(DType::BF16));
        let narrow = conv3d(volume.clone(), weight.clone(), None, [0, 1, 1]);
        let bias = Tensor::zeros([2], (&device, DType::BF16));
        let fused = conv::fused_conv3d(volume, weight, bias, [0, 1, 1]).cast(DType::F32);
        assert_eq!(narrow.dtype(), DType::BF16);
        assert_near("in bf16", &download(narrow.cast(DType::F32)), &wide, BF16);
        assert_near("in bf16, by the kernel", &download(fused), &wide, BF16);
    }
}
