//! Tests of the gated residual, with and without a gate.

use super::{check, noise};
use crate::ops::{gated_add, gated_add_groups};

#[test]
fn gated_add_and_its_gradients_match_f64() {
    for gates in [1, 5] {
        check(
            "gated add",
            &[noise(5, 19, 1), noise(5, 19, 2), noise(gates, 19, 3)],
            1e-6,
            |x| gated_add(x[0].clone(), x[1].clone(), Some(x[2].clone())),
            |x| {
                let gate = |i: usize, j: usize| x[2].at(if gates == 1 { 0 } else { i }, j);
                (0..5).flat_map(|i| (0..19).map(move |j| x[0].at(i, j) + x[1].at(i, j) * gate(i, j))).collect()
            },
        );
    }
}

#[test]
fn gates_of_groups_and_their_gradients_match_f64() {
    check(
        "gated add of groups",
        &[noise(5, 19, 1), noise(5, 19, 2), noise(3, 19, 3)],
        1e-6,
        |x| gated_add_groups(x[0].clone(), x[1].clone(), x[2].clone(), &[2, 0, 3]),
        |x| {
            let gate = |i: usize, j: usize| x[2].at(if i < 2 { 0 } else { 2 }, j);
            (0..5).flat_map(|i| (0..19).map(move |j| x[0].at(i, j) + x[1].at(i, j) * gate(i, j))).collect()
        },
    );
}

#[test]
fn ungated_add_and_its_gradients_match_f64() {
    check(
        "plain sum",
        &[noise(5, 19, 1), noise(5, 19, 2)],
        1e-6,
        |x| gated_add(x[0].clone(), x[1].clone(), None),
        |x| x[0].values.iter().zip(&x[1].values).map(|(x, y)| x + y).collect(),
    );
}
