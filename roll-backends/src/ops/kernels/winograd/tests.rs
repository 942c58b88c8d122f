//! Winograd convolution, compared with the plain sums in f64.

use super::transforms::{patches_portable, results_portable, whole_patches};
use super::*;
use crate::ops::test_noise::noise;

/// Odd and even sizes, all kinds of padding, one to three frames of kernel and input, partial blocks of channels, and
/// more channels than a block.
const SHAPES: [ConvShape; 8] = [
    shape([16, 16], [1, 5, 7], 1, [0, 1, 1]),
    shape([17, 19], [3, 6, 33], 3, [0, 1, 1]),
    shape([1, 1], [1, 1, 1], 1, [0, 1, 1]),
    shape([20, 25], [1, 9, 36], 3, [2, 0, 2]),
    shape([7, 6], [2, 4, 70], 2, [1, 2, 0]),
    shape([100, 5], [3, 3, 3], 3, [1, 0, 0]),
    shape([300, 3], [1, 4, 3], 1, [0, 0, 1]),
    shape([3, 50], [3, 16, 16], 3, [0, 1, 1]),
];

const fn shape([inputs, outputs]: [usize; 2], size: [usize; 3], frames: usize, padding: [usize; 3]) -> ConvShape {
    ConvShape { inputs, outputs, size, kernel: [frames, 3, 3], padding }
}

fn positions(size: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    let [t, h, w] = size;
    (0..t * h * w).map(move |i| [i / (h * w), i / w % h, i % w])
}

/// Calls `f` with the indices of output, input and weight for each multiplication of the convolution.
fn each_product(shape: ConvShape, mut f: impl FnMut(usize, usize, usize)) {
    let (output, taps) = (shape.output().unwrap_or_default(), shape.kernel.iter().product::<usize>());
    let (results, points) = (output.iter().product::<usize>(), shape.size.iter().product::<usize>());
    for (p, at) in positions(output).enumerate() {
        for (k, tap) in positions(shape.kernel).enumerate() {
            let from: [usize; 3] = std::array::from_fn(|i| (at[i] + tap[i]).wrapping_sub(shape.padding[i]));
            if from.iter().zip(shape.size).any(|(from, size)| *from >= size) {
                continue;
            }
            let from = (from[0] * shape.size[1] + from[1]) * shape.size[2] + from[2];
            for o in 0..shape.outputs {
                for c in 0..shape.inputs {
                    f(o * results + p, c * points + from, (o * shape.inputs + c) * taps + k);
                }
            }
        }
    }
}

fn assert_close(what: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let worst = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - e).abs()).fold(0.0, f64::max);
    let largest = expected.iter().fold(0.0, |largest, e| e.abs().max(largest));
    assert!(worst <= 2e-6 * largest, "{what}: {worst:e} of {largest}");
}

#[test]
fn convolutions_and_gradients_match_f64() {
    for shape in SHAPES {
        let output = shape.output().unwrap_or_default();
        let taps: usize = shape.kernel.iter().product();
        let x = noise(shape.inputs * shape.size.iter().product::<usize>(), 1);
        let weight = noise(shape.inputs * shape.outputs * taps, 2);
        let bias = noise(shape.outputs, 3);
        let results: usize = output.iter().product();
        let mut y: Vec<f64> = (0..shape.outputs * results).map(|i| f64::from(bias[i / results])).collect();
        each_product(shape, |to, from, by| y[to] += f64::from(x[from]) * f64::from(weight[by]));
        assert_close(&format!("{shape:?}"), &convolve(shape, &x, &weight, ConvKind::Forward, Some(&bias)), &y);

        let d_y = noise(y.len(), 4);
        let mut d_x = vec![0.0; x.len()];
        each_product(shape, |to, from, by| d_x[from] += f64::from(d_y[to]) * f64::from(weight[by]));
        let pulled = convolve(shape.transposed(output), &d_y, &weight, ConvKind::Transposed, None);
        assert_close(&format!("pull of {shape:?}"), &pulled, &d_x);
    }
}

#[test]
#[allow(clippy::unwrap_used)]
fn bits_do_not_depend_on_threads_or_cache_size() {
    for shape in SHAPES {
        let x = noise(shape.inputs * shape.size.iter().product::<usize>(), 5);
        let weight = noise(shape.inputs * shape.outputs * shape.kernel.iter().product::<usize>(), 6);
        let expected = convolve(shape, &x, &weight, ConvKind::Forward, None);
        for (threads, bytes) in [(1, CACHED_BYTES), (3, 0), (2, 1 << 20)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| convolve_within(bytes, shape, &x, &weight, ConvKind::Forward, None));
            assert_eq!(found, expected, "{shape:?} with {threads} threads and {bytes} bytes");
        }
    }
}

#[test]
fn portable_transforms_have_the_bits_of_avx2() {
    let rows = noise(4 * 34, 7);
    let rows: [&[f32; 34]; 4] = std::array::from_fn(|r| rows[r * 34..].first_chunk().unwrap_or(&[0.0; 34]));
    let (mut wide, mut plain) = ([0.0; ELEMENTS * NR], [0.0; ELEMENTS * NR]);
    whole_patches(rows, &mut wide, NR);
    patches_portable(rows, &mut plain, NR);
    assert_eq!(wide, plain);
    assert_eq!(result_transform(&wide, NR, 0.5), results_portable(&wide, NR, 0.5));
}
