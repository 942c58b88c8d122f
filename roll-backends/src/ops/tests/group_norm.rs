//! Tests of the group norm with SiLU.

use burn_tensor::Tensor;

use super::activation::silu_in_f64;
use super::{Exact, assert_near, devices, download, noise};
use crate::ops::{Groups, group_norm_silu, group_norm_silu_pull};

const EPS: f64 = 1e-6;

fn in_f64(x: &[f64], gain: &Exact, bias: &Exact, groups: usize) -> Vec<f64> {
    let (size, positions) = (x.len() / groups, x.len() / gain.columns);
    let of_group = |(g, x): (usize, &[f64])| {
        let mean = x.iter().sum::<f64>() / size as f64;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / size as f64;
        let value = move |(i, x): (usize, &f64)| {
            let channel = (g * size + i) / positions;
            silu_in_f64((x - mean) / (variance + EPS).sqrt() * gain.at(0, channel) + bias.at(0, channel))
        };
        x.iter().enumerate().map(value).collect::<Vec<f64>>()
    };
    x.chunks(size).enumerate().flat_map(of_group).collect()
}

#[test]
fn group_norm_and_its_pullback_match_f64() {
    // Channels, groups and the shape of a channel; the last has two blocks of a channel and more than one task.
    for (c, groups, shape) in [(6, 3, [1, 4, 5]), (4, 4, [2, 3, 3]), (2, 1, [1, 1, 2]), (4, 2, [1, 50, 61])] {
        let positions = shape.iter().product();
        let [x, d_y] = [1, 2].map(|seed| noise(c, positions, seed));
        let [gain, bias] = [3, 4].map(|seed| noise(1, c, seed));
        let [t, h, w] = shape;
        let sizes = Groups { groups, eps: EPS };
        for device in devices() {
            let four = |x: &Exact| x.upload(&device).reshape([c, t, h, w]);
            let one = |x: &Exact| -> Tensor<1> { x.upload(&device).reshape([c]) };
            let y = download(group_norm_silu(four(&x), one(&gain), one(&bias), sizes));
            assert_near("group norm", &y, &in_f64(&x.values, &gain, &bias, groups), 2e-6);
            let d_x = download(group_norm_silu_pull(four(&x), one(&gain), one(&bias), sizes, four(&d_y)));
            // Central differences of the value along the cotangent, at some elements.
            let step = 1e-5;
            let value = |i: usize, by: f64| {
                let mut moved = x.values.clone();
                moved[i] += by;
                let y = in_f64(&moved, &gain, &bias, groups);
                y.iter().zip(&d_y.values).map(|(y, d)| y * d).sum::<f64>()
            };
            let tested = (0..d_x.len()).step_by(d_x.len() / 20 + 1);
            let (found, expected): (Vec<f32>, Vec<f64>) =
                tested.map(|i| (d_x[i], (value(i, step) - value(i, -step)) / (2.0 * step))).unzip();
            assert_near("the pullback of a group norm", &found, &expected, 5e-6);
        }
    }
}
