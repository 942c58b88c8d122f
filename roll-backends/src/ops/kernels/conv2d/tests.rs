//! The 2-d convolution kernels, compared with a direct loop in f64.

use super::passes::inside;
use super::*;
use crate::ops::Epilogue;

/// Deterministic values in [-1, 1).
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Padding before and after each axis.
type Padding = [[usize; 2]; 2];

fn padded(shape: Conv2dShape, [before, after]: Padding) -> Option<Conv2dShape> {
    let room =
        |i: usize| (shape.size[i] + before[i] + after[i]).checked_sub((shape.kernel[i] - 1) * shape.dilation[i] + 1);
    let (rows, columns) = (room(0)?, room(1)?);
    Some(Conv2dShape { before, output: [rows / shape.stride[0] + 1, columns / shape.stride[1] + 1], ..shape })
}

/// Calls `f` with the indices of input, weight and output for each multiplication of the convolution.
fn products(s: Conv2dShape, mut f: impl FnMut(usize, usize, usize)) {
    let (inputs, outputs) = (s.inputs / s.groups, s.outputs / s.groups);
    let tap = |place: usize, tap: usize, axis: usize| {
        let at = (place * s.stride[axis] + tap * s.dilation[axis]).checked_sub(s.before[axis]);
        at.filter(|at| *at < s.size[axis])
    };
    for y in 0..s.items * s.outputs * s.output[0] * s.output[1] {
        let (plane, place) = (y / (s.output[0] * s.output[1]), y % (s.output[0] * s.output[1]));
        let (item, output) = (plane / s.outputs, plane % s.outputs);
        for w in 0..inputs * s.taps() {
            let (input, index) = (w / s.taps(), w % s.taps());
            let row = tap(place / s.output[1], index / s.kernel[1], 0);
            let column = tap(place % s.output[1], index % s.kernel[1], 1);
            let (Some(row), Some(column)) = (row, column) else { continue };
            let channel = item * s.inputs + output / outputs * inputs + input;
            f((channel * s.size[0] + row) * s.size[1] + column, output * inputs * s.taps() + w, y);
        }
    }
}

fn assert_near(what: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-9f64, |m, v| m.max(v.abs()));
    let worst = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - e).abs()).fold(0.0, f64::max);
    assert!(worst <= 2e-6 * largest, "{what}: {:e} of the largest value", worst / largest);
}

struct Case {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    added: Vec<f32>,
    d_y: Vec<f32>,
}

impl Case {
    fn new(s: Conv2dShape) -> Self {
        let count = s.items * s.outputs * s.output[0] * s.output[1];
        Self {
            x: noise(s.items * s.inputs * s.size[0] * s.size[1], 1),
            weight: noise(s.outputs * (s.inputs / s.groups) * s.taps(), 2),
            bias: noise(s.outputs, 3),
            added: noise(count, 4),
            d_y: noise(count, 5),
        }
    }
}

/// An epilogue without slopes.
fn plain(kind: Epilogue) -> KernelEpilogue<'static> {
    KernelEpilogue { kind, slopes: &[] }
}

/// Checks the result, sums and input gradient of one shape.
fn check(s: Conv2dShape) {
    let what = format!("{s:?}");
    let case = Case::new(s);
    let plane = s.output[0] * s.output[1];
    let sum = |(i, added): (usize, &f32)| f64::from(case.bias[i / plane % s.outputs]) + f64::from(*added);
    let mut sums: Vec<f64> = case.added.iter().enumerate().map(sum).collect();
    products(s, |x, w, y| sums[y] += f64::from(case.x[x]) * f64::from(case.weight[w]));
    let slopes = noise(s.outputs, 6);
    let slope = |i: usize| f64::from(slopes[i / plane % s.outputs]);
    let y: Vec<f64> = sums.iter().enumerate().map(|(i, z)| if *z < 0.0 { z * slope(i) } else { *z }).collect();
    let epilogue = KernelEpilogue { kind: Epilogue::Slopes, slopes: &slopes };

    let weights = Weights::new(s, &case.weight);
    let found = forward(s, &case.x, &weights, &case.bias, Some(&case.added), epilogue, true);
    let found_sums = found.sums.unwrap_or_default();
    assert_near(&what, &found.y, &y);
    assert_near(&format!("sums of {what}"), &found_sums, &sums);
    let without_sums = forward(s, &case.x, &weights, &case.bias, Some(&case.added), epilogue, false);
    assert!(without_sums.y == found.y, "{what}: the result depends on whether the sums are stored");

    let mut d_x = vec![0.0; case.x.len()];
    products(s, |x, w, y| {
        let factor = if found_sums[y] > 0.0 { 1.0 } else { slope(y) };
        d_x[x] += f64::from(case.d_y[y]) * factor * f64::from(case.weight[w]);
    });
    let weights = BackwardWeights::new(s, &case.weight);
    assert_near(&format!("gradient of {what}"), &pull_both(s, &weights, epilogue, &found_sums, &case.d_y), &d_x);
    let d_sums = pull_epilogue(s.outputs, plane, epilogue, &found_sums, &case.d_y);
    assert_near(&format!("gradient in two steps of {what}"), &pull_convolution(s, &weights, &d_sums), &d_x);
}

const BASE: Conv2dShape = Conv2dShape {
    items: 1,
    inputs: 1,
    outputs: 1,
    groups: 1,
    size: [1; 2],
    kernel: [1; 2],
    stride: [1; 2],
    dilation: [1; 2],
    before: [0; 2],
    output: [1; 2],
};

#[test]
fn convolutions_match_f64() {
    // Depthwise; groups; more inputs than a panel is deep; fewer outputs than a tile.
    for [inputs, outputs, groups] in [[1, 1, 1], [3, 8, 1], [8, 13, 1], [5, 5, 5], [8, 4, 4], [4, 8, 4]] {
        for size in [[1, 1], [1, 7], [5, 6], [9, 17]] {
            for kernel in [[1, 1], [3, 3], [1, 3], [5, 2]] {
                for stride in [[1, 1], [2, 2], [3, 1]] {
                    for (dilation, padding) in
                        [([1, 1], [[1, 1]; 2]), ([1, 2], [[2, 0], [0, 3]]), ([1, 1], [[0; 2]; 2])]
                    {
                        let shape =
                            Conv2dShape { items: 2, inputs, outputs, groups, size, kernel, stride, dilation, ..BASE };
                        padded(shape, padding).into_iter().for_each(check);
                    }
                }
            }
        }
    }
}

#[test]
fn convolutions_of_several_blocks_match_f64() {
    let wide = Conv2dShape { inputs: 70, outputs: 20, size: [14, 15], kernel: [3, 3], ..BASE };
    let flat = Conv2dShape { items: 3, inputs: 600, outputs: 7, size: [7, 7], ..BASE };
    let picture = Conv2dShape { inputs: 3, outputs: 6, size: [60, 70], kernel: [3, 3], stride: [2, 2], ..BASE };
    let each = Conv2dShape { items: 2, inputs: 9, outputs: 9, groups: 9, size: [40, 50], kernel: [3, 3], ..BASE };
    // Some rows and columns are outside of all windows.
    let patches =
        Conv2dShape { items: 2, inputs: 3, outputs: 8, size: [35, 33], kernel: [16, 16], stride: [16, 16], ..BASE };
    for (shape, padding) in [(wide, [[1, 1]; 2]), (flat, [[0; 2]; 2]), (picture, [[1, 1]; 2]), (each, [[1, 1]; 2])] {
        padded(shape, padding).into_iter().for_each(check);
    }
    padded(Conv2dShape { stride: [2, 2], ..each }, [[1, 1], [0, 0]]).into_iter().for_each(check);
    for padding in [[[0; 2]; 2], [[0; 2], [5, 5]], [[3, 4], [1, 0]], [[0; 2], [20, 16]]] {
        padded(patches, padding).into_iter().for_each(check);
    }
}

#[test]
fn winograd_convolutions_match_f64() {
    // Channels that do not fill a block and channels that exceed the depth block; rows of tiles that fill no panel,
    // several panels and exactly one; more padding than the kernel reaches.
    let base = Conv2dShape { items: 2, inputs: 17, outputs: 19, kernel: [3, 3], ..BASE };
    let sizes = [[1, 1], [2, 3], [7, 7], [14, 15], [9, 70]];
    for shape in sizes.map(|size| Conv2dShape { size, ..base }) {
        for padding in [[[0; 2]; 2], [[1, 1]; 2], [[2, 0], [0, 2]], [[4, 1], [3, 5]]] {
            padded(shape, padding).into_iter().for_each(check);
        }
    }
    let deep = Conv2dShape { items: 1, inputs: 300, outputs: 16, size: [4, 4], ..base };
    let flat = Conv2dShape { items: 5, inputs: 16, outputs: 310, size: [2, 2], ..base };
    for shape in [deep, flat] {
        padded(shape, [[1, 1]; 2]).into_iter().for_each(check);
    }
}

#[test]
fn tiles_across_rows_and_items_match_f64() {
    // Short rows with strides of one, two and three, so that a line is assembled from many rows.
    for (size, stride) in [([9, 3], [1, 1]), ([5, 5], [2, 2]), ([12, 7], [1, 2]), ([10, 10], [3, 3]), ([4, 18], [2, 1])]
    {
        for kernel in [[1, 1], [2, 3], [5, 1]] {
            let shape = Conv2dShape { items: 3, inputs: 5, outputs: 7, size, stride, kernel, ..BASE };
            padded(shape, [[1, 2], [2, 1]]).into_iter().for_each(check);
        }
    }
    // More taps than a panel is deep.
    let taps = Conv2dShape { inputs: 2, outputs: 3, size: [20, 21], kernel: [18, 17], ..BASE };
    padded(taps, [[2, 2], [3, 3]]).into_iter().for_each(check);
}

#[test]
fn large_strides_and_dilations_match_f64() {
    let each = Conv2dShape { inputs: 3, outputs: 3, groups: 3, ..BASE };
    let apart = Conv2dShape { size: [5, 300], stride: [300, 250], ..each };
    let spread = Conv2dShape { size: [2, 3], kernel: [2, 2], dilation: [300, 400], ..each };
    let patches = Conv2dShape { size: [3, 2], kernel: [9, 300], stride: [9, 300], ..each };
    for (shape, padding) in [(apart, [[0; 2]; 2]), (spread, [[300, 400]; 2]), (patches, [[8, 299]; 2])] {
        padded(shape, padding).into_iter().for_each(check);
    }
}

#[test]
#[allow(clippy::unwrap_used)]
fn packed_weights_do_not_depend_on_padding() {
    let shape = Conv2dShape { inputs: 3, outputs: 4, size: [7, 8], kernel: [3, 3], stride: [2, 2], ..BASE };
    let [first, second] = [[[0, 1]; 2], [[1, 0]; 2]].map(|padding| padded(shape, padding).unwrap());
    let case = Case::new(second);
    let [own, other] = [second, first].map(|shape| BackwardWeights::new(shape, &case.weight));
    assert!(pull_convolution(second, &own, &case.d_y) == pull_convolution(second, &other, &case.d_y));
}

#[test]
fn positions_outside_of_all_windows_have_zero_gradient() {
    // Rows 1 and 3 are outside of all windows.
    let shape = Conv2dShape { size: [5, 5], stride: [2, 2], output: [3, 3], ..BASE };
    let weights = BackwardWeights::new(shape, &[2.0]);
    let d_x = pull_convolution(shape, &weights, &[1.0; 9]);
    let expected: Vec<f32> = (0..25).map(|i| if i / 5 % 2 == 0 && i % 5 % 2 == 0 { 2.0 } else { 0.0 }).collect();
    assert_eq!(d_x, expected);
    let tiles = Conv2dShape { inputs: 2, ..shape };
    let d_x = pull_convolution(tiles, &BackwardWeights::new(tiles, &[2.0, 3.0]), &[1.0; 9]);
    assert_eq!(d_x[..25], expected);
}

#[test]
#[allow(clippy::unwrap_used)]
fn bits_do_not_depend_on_threads() {
    let shapes = [
        Conv2dShape { items: 2, inputs: 40, outputs: 50, size: [20, 21], kernel: [3, 3], ..BASE },
        Conv2dShape { inputs: 40, outputs: 50, size: [40, 50], kernel: [2, 3], ..BASE },
        Conv2dShape { inputs: 300, outputs: 100, size: [7, 7], ..BASE },
        Conv2dShape { inputs: 40, outputs: 40, groups: 40, size: [30, 31], kernel: [3, 3], stride: [2, 2], ..BASE },
    ];
    for shape in shapes.into_iter().filter_map(|s| padded(s, [[1, 1]; 2])) {
        let case = Case::new(shape);
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let weights = Weights::new(shape, &case.weight);
                let y = forward(shape, &case.x, &weights, &case.bias, Some(&case.added), plain(Epilogue::Silu), true);
                let weights = BackwardWeights::new(shape, &case.weight);
                let sums = y.sums.unwrap();
                let d_x = pull_both(shape, &weights, plain(Epilogue::Silu), &sums, &case.d_y);
                (y.y, sums, d_x)
            })
        };
        let one = run(1);
        for threads in [2, 3, 7] {
            assert!(run(threads) == one, "{threads} threads, {shape:?}");
        }
    }
}

#[test]
fn epilogues_and_their_derivatives_match_f64() {
    let z: Vec<f32> = (-40..=40).map(|i| i as f32 / 8.0 + 0.01).collect();
    let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
    let slopes = [-0.25];
    let cases: [(KernelEpilogue, &dyn Fn(f64) -> f64); 7] = [
        (plain(Epilogue::Nothing), &|z| z),
        (plain(Epilogue::Relu), &|z| z.max(0.0)),
        (KernelEpilogue { kind: Epilogue::Slopes, slopes: &slopes }, &|z| if z < 0.0 { -0.25 * z } else { z }),
        (plain(Epilogue::Clip(-1.0, 2.0)), &|z| z.clamp(-1.0, 2.0)),
        (plain(Epilogue::Sigmoid), &sigmoid),
        (plain(Epilogue::Silu), &|z| z * sigmoid(z)),
        (plain(Epilogue::HardSwish), &|z| z * (z / 6.0 + 0.5).clamp(0.0, 1.0)),
    ];
    let shape = Conv2dShape { size: [1, z.len()], output: [1, z.len()], ..BASE };
    for (epilogue, f) in cases {
        let found = forward(shape, &z, &Weights::new(shape, &[1.0]), &[0.0], None, epilogue, true);
        let sums = found.sums.unwrap_or_default();
        let expected: Vec<f64> = z.iter().map(|z| f(f64::from(*z))).collect();
        assert_near(&format!("{epilogue:?}"), &found.y, &expected);
        let kept = if epilogue.needs_sums() { &sums } else { &found.y };
        let h = 1e-6;
        let expected: Vec<f64> = z.iter().map(|z| (f(f64::from(*z) + h) - f(f64::from(*z) - h)) / (2.0 * h)).collect();
        assert_near(
            &format!("slope of {epilogue:?}"),
            &pull_epilogue(1, z.len(), epilogue, kept, &vec![1.0; z.len()]),
            &expected,
        );
    }
}

#[test]
fn epilogues_propagate_nan() {
    let shape = Conv2dShape { size: [1, 2], output: [1, 2], ..BASE };
    for epilogue in [
        plain(Epilogue::Relu),
        KernelEpilogue { kind: Epilogue::Slopes, slopes: &[0.5] },
        plain(Epilogue::Clip(0.0, 6.0)),
        plain(Epilogue::Sigmoid),
        plain(Epilogue::Silu),
        plain(Epilogue::HardSwish),
    ] {
        let y = forward(shape, &[f32::NAN, 1.0], &Weights::new(shape, &[1.0]), &[0.0], None, epilogue, false).y;
        assert!(y[0].is_nan() && y[1].is_finite(), "{epilogue:?}: {y:?}");
    }
    let y = forward(
        shape,
        &[f32::NEG_INFINITY, 1.0],
        &Weights::new(shape, &[1.0]),
        &[0.0],
        None,
        plain(Epilogue::Relu),
        false,
    );
    assert_eq!(y.y, [0.0, 1.0]);
}

#[test]
fn inside_matches_a_direct_count() {
    for at in -7..7isize {
        for step in 1..4usize {
            for length in 1..8usize {
                for count in 0..9usize {
                    let is_in = |i: &usize| (0..length as isize).contains(&((i * step) as isize + at));
                    let counted: Vec<usize> = (0..count).filter(is_in).collect();
                    assert_eq!(inside(at, step, length, 0..count).collect::<Vec<_>>(), counted);
                }
            }
        }
    }
}
