//! Tests of max pooling.

use super::{check, noise};
use crate::ops::{MaxPoolWindow, max_pool};

const WINDOW: MaxPoolWindow = MaxPoolWindow { kernel: [2; 2], stride: [2; 2], dilation: [1; 2], padding: [(0, 0); 2] };

#[test]
fn max_pool_and_its_gradient_match_a_direct_search() {
    let cases = [
        ([1, 2, 4, 6], WINDOW),
        ([2, 3, 7, 9], MaxPoolWindow { kernel: [3; 2], padding: [(1, 1); 2], ..WINDOW }),
        ([1, 2, 6, 5], MaxPoolWindow { kernel: [3, 2], stride: [1, 3], padding: [(0, 2), (1, 0)], ..WINDOW }),
        ([1, 1, 8, 7], MaxPoolWindow { stride: [1; 2], dilation: [2, 3], ..WINDOW }),
    ];
    for (shape, window) in cases {
        let [items, channels, rows, columns] = shape;
        let [high, wide] = window.output([rows, columns]).unwrap();
        let x = noise(items, channels * rows * columns, 31);
        let largest = |x: &[f64], i: usize| {
            let (plane, row, column) = (i / (high * wide), i / wide % high, i % wide);
            let at = |tap: usize, place: usize, axis: usize| {
                let at = place * window.stride[axis] + tap * window.dilation[axis];
                at.checked_sub(window.padding[axis].0).filter(|at| *at < [rows, columns][axis])
            };
            let seen = (0..window.kernel[0] * window.kernel[1]).filter_map(|tap| {
                let (row, column) = (at(tap / window.kernel[1], row, 0)?, at(tap % window.kernel[1], column, 1)?);
                Some(x[(plane * rows + row) * columns + column])
            });
            seen.fold(f64::NEG_INFINITY, f64::max)
        };
        check(
            &format!("{window:?} over {shape:?}"),
            &[x],
            1e-6,
            |x| {
                let y = max_pool(x[0].clone().reshape(shape), window);
                assert_eq!(y.dims(), [items, channels, high, wide]);
                y.reshape([items, channels * high * wide])
            },
            |x| (0..items * channels * high * wide).map(|i| largest(&x[0].values, i)).collect(),
        );
    }
}
