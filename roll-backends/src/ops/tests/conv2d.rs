//! Tests of 2-d convolution with constant weights and its epilogues.

use burn_tensor::Tensor;

use super::{Exact, check, noise};
use crate::ops::{Conv2d, Conv2dOptions, Epilogue};

/// Sizes of one case.
#[derive(Clone, Copy)]
struct Case {
    x: [usize; 4],
    weight: [usize; 4],
    options: Conv2dOptions,
    padding: [(usize, usize); 2],
}

impl Case {
    fn output(&self) -> [usize; 4] {
        let [rows, columns] = std::array::from_fn(|i| {
            let (before, after) = self.padding[i];
            let reach = (self.weight[2 + i] - 1) * self.options.dilation[i] + 1;
            (self.x[2 + i] + before + after - reach) / self.options.stride[i] + 1
        });
        [self.x[0], self.weight[0], rows, columns]
    }

    /// The sums before the epilogue, by a direct loop. `added` is a tensor that is added to the result.
    fn sums(&self, x: &[f64], weight: &[f64], bias: &[f64], added: Option<&[f64]>) -> Vec<f64> {
        let ([_, inputs, h, w], [outputs, per_group, rows, columns]) = (self.x, self.weight);
        let [_, _, out_h, out_w] = self.output();
        let Conv2dOptions { stride, dilation, groups } = self.options;
        // `None` in the padding.
        let input_index = |place: usize, tap: usize, axis: usize, length: usize| {
            let at = (place * stride[axis] + tap * dilation[axis]).checked_sub(self.padding[axis].0);
            at.filter(|at| *at < length)
        };
        let one = |i: usize| {
            let (n, o, r, q) =
                (i / (outputs * out_h * out_w), i / (out_h * out_w) % outputs, i / out_w % out_h, i % out_w);
            let mut sum = bias[o] + added.map_or(0.0, |added| added[i]);
            for k in 0..per_group * rows * columns {
                let (c, tap_row, tap_column) = (k / (rows * columns), k / columns % rows, k % columns);
                let (Some(row), Some(column)) = (input_index(r, tap_row, 0, h), input_index(q, tap_column, 1, w))
                else {
                    continue;
                };
                let channel = o / (outputs / groups) * per_group + c;
                let at = ((n * inputs + channel) * h + row) * w + column;
                sum += x[at] * weight[o * per_group * rows * columns + k];
            }
            sum
        };
        (0..self.output().iter().product()).map(one).collect()
    }
}

const CASES: [Case; 5] = [
    // 1 x 1 kernel.
    Case {
        x: [2, 3, 3, 4],
        weight: [5, 3, 1, 1],
        options: Conv2dOptions { stride: [1; 2], dilation: [1; 2], groups: 1 },
        padding: [(0, 0); 2],
    },
    // Strided.
    Case {
        x: [1, 3, 5, 4],
        weight: [2, 3, 3, 3],
        options: Conv2dOptions { stride: [2; 2], dilation: [1; 2], groups: 1 },
        padding: [(1, 1); 2],
    },
    // Depthwise.
    Case {
        x: [2, 3, 5, 4],
        weight: [3, 1, 3, 3],
        options: Conv2dOptions { stride: [1; 2], dilation: [1; 2], groups: 3 },
        padding: [(1, 1); 2],
    },
    // Depthwise, strided, padded after the input.
    Case {
        x: [1, 2, 6, 5],
        weight: [2, 1, 3, 3],
        options: Conv2dOptions { stride: [2; 2], dilation: [1; 2], groups: 2 },
        padding: [(0, 1); 2],
    },
    // Two groups, dilated, with asymmetric padding.
    Case {
        x: [1, 4, 4, 6],
        weight: [4, 2, 2, 2],
        options: Conv2dOptions { stride: [1, 2], dilation: [2, 1], groups: 2 },
        padding: [(1, 0), (0, 2)],
    },
];

type Function = fn(f64, f64) -> f64;

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

/// Each epilogue as a function of a sum and the channel's slope.
const FUNCTIONS: [(Epilogue, Function); 7] = [
    (Epilogue::Nothing, |z, _| z),
    (Epilogue::Relu, |z, _| z.max(0.0)),
    (Epilogue::Slopes, |z, slope| if z < 0.0 { slope * z } else { z }),
    (Epilogue::Clip(-1.5, 2.5), |z, _| z.clamp(-1.5, 2.5)),
    (Epilogue::Sigmoid, |z, _| sigmoid(z)),
    (Epilogue::Silu, |z, _| z * sigmoid(z)),
    (Epilogue::HardSwish, |z, _| z * (z / 6.0 + 0.5).clamp(0.0, 1.0)),
];

fn to_4d(x: &Tensor<2>, shape: [usize; 4]) -> Tensor<4> {
    x.clone().reshape(shape)
}

#[test]
fn fused_convolutions_and_gradients_match_f64() {
    for (index, case) in CASES.into_iter().enumerate() {
        let ([outputs, per_group, rows, columns], shape) = (case.weight, case.output());
        let weight = noise(outputs, per_group * rows * columns, 20);
        let (bias, slopes) = (noise(1, outputs, 21), noise(1, outputs, 22));
        let plane = shape[2] * shape[3];
        for (epilogue, function) in FUNCTIONS {
            for adds in [false, true] {
                let mut inputs = vec![noise(case.x[0], case.x[1..].iter().product(), 23)];
                if adds {
                    inputs.push(noise(shape[0], shape[1..].iter().product(), 24));
                }
                let fused = |x: &[Tensor<2>]| {
                    let constant = |c: &Exact| c.upload_like(&x[0]).reshape([outputs]);
                    let slopes = (epilogue == Epilogue::Slopes).then(|| constant(&slopes));
                    let weight = to_4d(&weight.upload_like(&x[0]), case.weight);
                    let conv = Conv2d::new(weight, Some(constant(&bias)), case.options, epilogue, slopes);
                    let added = x.get(1).map(|added| to_4d(added, shape));
                    let y = conv.apply(to_4d(&x[0], case.x), added, case.padding);
                    assert_eq!(y.dims(), shape);
                    y.reshape([shape[0], shape[1] * plane])
                };
                let reference = |x: &[Exact]| {
                    let added = x.get(1).map(|added| added.values.as_slice());
                    let sums = case.sums(&x[0].values, &weight.values, &bias.values, added);
                    let one = |(i, z): (usize, f64)| function(z, slopes.values[i / plane % outputs]);
                    sums.into_iter().enumerate().map(one).collect()
                };
                check(&format!("convolution {index}, {epilogue:?}, added {adds}"), &inputs, 2e-5, fused, reference);
            }
        }
    }
}

#[test]
fn convolution_without_epilogue_returns_the_sums() {
    let case = CASES[1];
    let weight = noise(2, 27, 20);
    check(
        "sums",
        &[noise(1, 60, 23)],
        2e-5,
        |x| {
            let weight = to_4d(&weight.upload_like(&x[0]), case.weight);
            let conv = Conv2d::new(weight, None, case.options, Epilogue::Relu, None).without_epilogue();
            let y = conv.apply(to_4d(&x[0], case.x), None, case.padding);
            let [n, c, h, w] = y.dims();
            y.reshape([n, c * h * w])
        },
        |x| case.sums(&x[0].values, &weight.values, &[0.0; 2], None),
    );
}
