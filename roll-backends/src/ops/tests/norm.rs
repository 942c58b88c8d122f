//! Tests of layer norm and RMS norm.

use burn_tensor::{DType, Tensor};

use super::{Exact, assert_near, check, devices, download, noise};
use crate::ops::{gated_add, gated_add_groups, layer_norm, layer_norm_groups, rms_norm, seed};

fn layer_norm_in_f64(x: &[Exact], eps: f64) -> Vec<f64> {
    let (x, gain, shift) = (&x[0], &x[1], &x[2]);
    let n = x.columns as f64;
    let broadcast_at = |o: &Exact, i: usize, j: usize| o.at(if o.rows == 1 { 0 } else { i }, j);
    (0..x.rows)
        .flat_map(|i| {
            let row: Vec<f64> = (0..x.columns).map(|j| x.at(i, j)).collect();
            let mean = row.iter().sum::<f64>() / n;
            let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
            (0..x.columns)
                .map(|j| {
                    (row[j] - mean) / (variance + eps).sqrt() * broadcast_at(gain, i, j) + broadcast_at(shift, i, j)
                })
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn layer_norm_and_its_gradients_match_f64() {
    // Rows and columns of x, rows of the gain and of the shift.
    for (l, d, gains, shifts) in [(3, 5, 1, 1), (4, 37, 4, 1), (2, 64, 1, 2), (3, 16, 3, 3), (1, 20, 1, 1)] {
        let inputs = [noise(l, d, 1), noise(gains, d, 2), noise(shifts, d, 3)];
        check(
            &format!("layer norm {l} {d} {gains} {shifts}"),
            &inputs,
            1e-6,
            |x| layer_norm(x[0].clone(), x[1].clone(), x[2].clone(), 1e-6),
            |x| layer_norm_in_f64(x, 1e-6),
        );
    }
}

#[test]
fn layer_norms_of_constant_rows_are_finite() {
    let x = Exact { rows: 2, columns: 40, values: vec![3.0; 80] };
    let (gain, shift) = (noise(1, 40, 1), noise(1, 40, 2));
    let twice = [shift.values.clone(), shift.values.clone()].concat();
    for device in devices() {
        let leaf = x.upload(&device).autodiff().require_grad();
        let y = layer_norm(leaf.clone(), gain.upload(&device), shift.upload(&device), 1e-6);
        assert_near("equal", &download(y.clone()), &twice, 1e-6);
        let mut g = y.sum().backward();
        assert!(download(leaf.grad_remove(&mut g).unwrap()).iter().all(|v| v.is_finite()));
    }
}

pub fn rms_norm_in_f64(x: &[Exact]) -> Vec<f64> {
    let (l, d) = (x[0].rows, x[0].columns);
    let row = |i: usize| (0..d).map(move |j| x[0].at(i, j));
    let scale = |i: usize| 1.0 / (row(i).map(|v| v * v).sum::<f64>() / d as f64 + 1e-6).sqrt();
    (0..l).flat_map(|i| (0..d).map(move |j| x[0].at(i, j) * scale(i) * x[1].at(0, j))).collect()
}

#[test]
fn rms_norm_and_its_gradients_match_f64() {
    for (l, d) in [(3, 7), (2, 48), (70, 4)] {
        check(
            &format!("rms norm {l} {d}"),
            &[noise(l, d, 1), noise(1, d, 2)],
            1e-6,
            |x| rms_norm(x[0].clone(), x[1].clone().reshape([d]), 1e-6),
            rms_norm_in_f64,
        );
    }
}

#[test]
#[cfg(feature = "flex")]
fn rows_of_groups_have_the_bits_of_a_row_for_each_token() {
    const GROUPS: [usize; 3] = [70, 0, 130];
    let (x, y, g) = (noise(200, 96, 1), noise(200, 96, 2), noise(200, 96, 3));
    let rows = [4, 5, 6].map(|seed| noise(3, 96, seed));
    let device = crate::device("flex").unwrap();
    let bits = |grouped: bool| {
        let spread = |rows: &Tensor<2>| {
            let group = |(i, n): (usize, &usize)| rows.clone().narrow(0, i, 1).expand([*n, 96]);
            Tensor::cat(GROUPS.iter().enumerate().filter(|(_, n)| **n > 0).map(group).collect(), 0)
        };
        let [gain, shift, gate] = rows.each_ref().map(|rows| rows.upload(&device));
        let [x, y] = [&x, &y].map(|values| values.upload(&device).autodiff().require_grad());
        let z = match grouped {
            true => {
                let h = layer_norm_groups(x.clone(), gain, shift, &GROUPS, 1e-6, DType::F32);
                gated_add_groups(h, y.clone(), gate, &GROUPS)
            }
            false => {
                let h = layer_norm(x.clone(), spread(&gain), spread(&shift), 1e-6);
                gated_add(h, y.clone(), Some(spread(&gate)))
            }
        };
        let mut found = seed(z.clone(), g.upload(&device)).backward();
        let [d_x, d_y] = [x, y].map(|leaf| download(leaf.grad_remove(&mut found).unwrap()));
        [download(z), d_x, d_y].map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    assert!(bits(true) == bits(false));
}

#[test]
fn layer_norms_of_groups_and_their_gradients_match_f64() {
    let inputs = [noise(5, 19, 1), noise(3, 19, 2), noise(3, 19, 3)];
    check(
        "layer norm of groups",
        &inputs,
        1e-6,
        |x| layer_norm_groups(x[0].clone(), x[1].clone(), x[2].clone(), &[2, 0, 3], 1e-6, DType::F32),
        |x| {
            let spread = |rows: &Exact| {
                let values = (0..5).flat_map(|i| (0..19).map(move |j| rows.at(if i < 2 { 0 } else { 2 }, j)));
                Exact { rows: 5, columns: 19, values: values.collect() }
            };
            layer_norm_in_f64(&[x[0].clone(), spread(&x[1]), spread(&x[2])], 1e-6)
        },
    );
}
