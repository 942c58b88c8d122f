//! Each operator: values against numbers computed by hand, gradients against central differences.

use super::*;

/// Checks value, shape and gradient of a graph with one input.
#[track_caller]
fn check(file: File, x: &[f32], shape: &[usize], y: &[f32], y_shape: &[usize]) {
    parity::compare(&file.clone().bytes(), &[roll_core::Tensor::new(x.to_vec(), shape).unwrap()]);
    let model = file.open().unwrap();
    let input = tensor(x, shape);
    let outputs = model.run(&input).unwrap();
    assert_eq!(outputs[0].shape(), y_shape);
    close(&host(&outputs[0]), y, 1e-5);
    gradient_matches_differences(&model, x, shape);
}

#[track_caller]
pub(super) fn close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= tolerance * scale, "found {found:?}, expected {expected:?}");
    }
}

#[track_caller]
fn gradient_matches_differences(model: &Model, x: &[f32], shape: &[usize]) {
    let (y, recorded) = model.vjp(&tensor(x, shape)).unwrap();
    let cotangent = noise(y.shape().iter().product(), 5);
    let pulled = recorded.pull(tensor(&cotangent, y.shape())).unwrap();
    assert_eq!(pulled.shape(), shape);
    let objective = |x: &[f32]| -> f64 {
        let y = host(&model.run(&tensor(x, shape)).unwrap()[0]);
        y.iter().zip(&cotangent).map(|(y, g)| f64::from(*y) * f64::from(*g)).sum()
    };
    let step = 2e-3;
    let differences: Vec<f32> = (0..x.len())
        .map(|i| {
            let (mut above, mut below) = (x.to_vec(), x.to_vec());
            above[i] += step;
            below[i] -= step;
            ((objective(&above) - objective(&below)) / f64::from(above[i] - below[i])) as f32
        })
        .collect();
    close(&host(&pulled), &differences, 5e-3);
}

#[test]
fn conv_2d_with_groups_strides_and_asymmetric_padding() {
    let file = File::new(11, &[1, 1, 2, 3]).floats("w", &[1, 1, 2, 2], &[1., 2., 3., 4.]).floats("b", &[1], &[0.5]);
    let file = file.node("Conv", &["x", "w", "b"], "y", vec![ints("pads", &[0, 0, 1, 1])]);
    let y = [37.5, 47.5, 21.5, 14.5, 17.5, 6.5];
    check(file, &[1., 2., 3., 4., 5., 6.], &[1, 1, 2, 3], &y, &[1, 1, 2, 3]);

    let file = File::new(11, &[1, 2, 1, 4]).floats("w", &[2, 1, 1, 2], &[1., 1., 1., -1.]);
    let attributes = vec![int("group", 2), ints("strides", &[1, 2]), text("auto_pad", "SAME_UPPER")];
    let file = file.node("Conv", &["x", "w"], "y", attributes);
    check(file, &[1., 2., 3., 4., 5., 7., 9., 12.], &[1, 2, 1, 4], &[3., 7., -2., -3.], &[1, 2, 1, 2]);

    let file = File::new(11, &[1, 1, 4]).floats("w", &[1, 1, 2], &[1., 10.]);
    let file = file.node("Conv", &["x", "w"], "y", vec![ints("dilations", &[2])]);
    check(file, &[1., 2., 3., 4.], &[1, 1, 4], &[31., 42.], &[1, 1, 2]);

    let file = File::new(11, &[1, 1, 1, 2]).floats("w", &[1, 1, 1, 3], &[1., 2., 3.]);
    let file = file.node("ConvTranspose", &["x", "w"], "y", vec![ints("strides", &[1, 2])]);
    check(file, &[1., 10.], &[1, 1, 1, 2], &[1., 2., 13., 20., 30.], &[1, 1, 1, 5]);
}

#[test]
fn conv_3d_with_groups_strides_and_asymmetric_padding() {
    let file = File::new(11, &[1, 1, 2, 2, 2]).floats("w", &[1, 1, 2, 1, 2], &[1., 2., 3., 4.]);
    let attributes = vec![ints("pads", &[0, 0, 0, 1, 0, 0]), ints("strides", &[1, 2, 1])];
    let file = file.node("Conv", &["x", "w"], "y", attributes);
    check(file, &[1., 2., 3., 4., 5., 6., 7., 8.], &[1, 1, 2, 2, 2], &[44., 17.], &[1, 1, 2, 1, 1]);

    let file = File::new(11, &[1, 2, 1, 1, 2]).floats("w", &[2, 1, 1, 1, 3], &[1., 2., 3., 1., 0., -1.]);
    let file = file.floats("b", &[2], &[0.5, 0.]);
    let attributes = vec![int("group", 2), ints("pads", &[0, 0, 1, 0, 0, 1])];
    let file = file.node("Conv", &["x", "w", "b"], "y", attributes);
    check(file, &[1., 2., 3., 5.], &[1, 2, 1, 1, 2], &[8.5, 5.5, -5., 3.], &[1, 2, 1, 1, 2]);

    let file = File::new(11, &[1, 1, 5, 1, 1]).floats("w", &[1, 1, 2, 1, 1], &[1., 10.]);
    let attributes = vec![ints("dilations", &[2, 1, 1]), ints("strides", &[2, 1, 1])];
    let file = file.node("Conv", &["x", "w"], "y", attributes);
    check(file, &[1., 2., 3., 4., 5.], &[1, 1, 5, 1, 1], &[31., 53.], &[1, 1, 2, 1, 1]);
}

#[test]
fn pool_3d_matches_pool_2d() {
    let x = [1., 2., 3., 4., 5., 6., 7., 8.];
    let pool = |op, extra: Vec<_>| {
        let attributes =
            [ints("kernel_shape", &[2, 2, 2]), ints("strides", &[2, 2, 2]), ints("pads", &[1, 0, 0, 0, 0, 0])];
        let attributes = attributes.into_iter().chain([int("ceil_mode", 1)]).chain(extra).collect();
        File::new(11, &[1, 1, 2, 2, 2]).node(op, &["x"], "y", attributes)
    };
    let y_shape = [1, 1, 2, 1, 1];
    check(pool("MaxPool", vec![]), &x, &[1, 1, 2, 2, 2], &[4., 8.], &y_shape);
    check(pool("AveragePool", vec![]), &x, &[1, 1, 2, 2, 2], &[2.5, 6.5], &y_shape);
    check(pool("AveragePool", vec![int("count_include_pad", 1)]), &x, &[1, 1, 2, 2, 2], &[1.25, 6.5], &y_shape);
    let attributes = vec![ints("kernel_shape", &[1, 2, 1]), ints("strides", &[1, 1, 2])];
    let file = File::new(11, &[1, 1, 2, 2, 2]).node("AveragePool", &["x"], "y", attributes);
    check(file, &x, &[1, 1, 2, 2, 2], &[2., 6.], &[1, 1, 2, 1, 1]);
}

#[test]
fn average_pool_counts_padding_as_specified() {
    let x = [1., 2., 3., 4., 5., 6., 7., 8., 10.];
    let (kernel, strides) = (ints("kernel_shape", &[2, 2]), ints("strides", &[2, 2]));
    let pool = |op, extra: Vec<_>| {
        let attributes = [kernel.clone(), strides.clone()].into_iter().chain(extra).collect();
        File::new(11, &[1, 1, 3, 3]).node(op, &["x"], "y", attributes)
    };
    check(pool("MaxPool", vec![]), &x, &[1, 1, 3, 3], &[5.], &[1, 1, 1, 1]);
    check(pool("MaxPool", vec![int("ceil_mode", 1)]), &x, &[1, 1, 3, 3], &[5., 6., 8., 10.], &[1, 1, 2, 2]);
    let pads = ints("pads", &[1, 1, 0, 0]);
    check(pool("MaxPool", vec![pads.clone()]), &x, &[1, 1, 3, 3], &[1., 3., 7., 10.], &[1, 1, 2, 2]);
    let y = [3., 4.5, 7.5, 10.];
    check(pool("AveragePool", vec![int("ceil_mode", 1)]), &x, &[1, 1, 3, 3], &y, &[1, 1, 2, 2]);
    let y = [1., 2.5, 5.5, 7.25];
    check(pool("AveragePool", vec![pads.clone()]), &x, &[1, 1, 3, 3], &y, &[1, 1, 2, 2]);
    let y = [0.25, 1.25, 2.75, 7.25];
    check(pool("AveragePool", vec![pads, int("count_include_pad", 1)]), &x, &[1, 1, 3, 3], &y, &[1, 1, 2, 2]);
    let file = File::new(11, &[1, 1, 3, 3]).node("GlobalAveragePool", &["x"], "y", vec![]);
    check(file, &x, &[1, 1, 3, 3], &[46. / 9.], &[1, 1, 1, 1]);
}

#[test]
fn unary_functions() {
    let x = [-2.0, -0.5, 0.25, 1.5];
    let cases: Vec<(&str, Vec<Attribute>, fn(f32) -> f32)> = vec![
        ("Relu", vec![], |x| x.max(0.)),
        ("LeakyRelu", vec![float("alpha", 0.1)], |x| if x < 0. { 0.1 * x } else { x }),
        ("Sigmoid", vec![], |x| 1. / (1. + (-x).exp())),
        ("Tanh", vec![], f32::tanh),
        ("Exp", vec![], f32::exp),
        ("Neg", vec![], |x| -x),
        ("Abs", vec![], f32::abs),
        ("Reciprocal", vec![], |x| 1. / x),
        ("HardSigmoid", vec![], |x| (0.2 * x + 0.5).clamp(0., 1.)),
        ("HardSwish", vec![], |x| x * (x / 6. + 0.5).clamp(0., 1.)),
        ("Elu", vec![], |x| if x < 0. { x.exp() - 1. } else { x }),
        ("Softplus", vec![], |x| (1. + x.exp()).ln()),
        ("Clip", vec![float("min", -1.), float("max", 1.)], |x| x.clamp(-1., 1.)),
        ("Identity", vec![], |x| x),
    ];
    for (op, attributes, f) in cases {
        let opset = if op == "Clip" { 9 } else { 14 };
        let file = File::new(opset, &[1, 4]).node(op, &["x"], "y", attributes);
        check(file, &x, &[1, 4], &x.map(f), &[1, 4]);
    }
    let file = File::new(13, &[1, 2]).node("Sqrt", &["x"], "y", vec![]);
    check(file, &[4., 9.], &[1, 2], &[2., 3.], &[1, 2]);
    let file = File::new(13, &[1, 2]).node("Erf", &["x"], "y", vec![]);
    check(file, &[0.5, -1.], &[1, 2], &[0.520_499_9, -0.842_700_8], &[1, 2]);
    let file = File::new(13, &[1, 2]).floats("l", &[], &[0.]).node("Clip", &["x", "l", ""], "y", vec![]);
    check(file, &[0.5, -1.], &[1, 2], &[0.5, 0.], &[1, 2]);
}

#[test]
fn binary_functions_broadcast() {
    let x = [1., 2., 3., 4.];
    let cases: Vec<(&str, [f32; 4])> = vec![
        ("Add", [3., 4., 7., 8.]),
        ("Sub", [-1., 0., -1., 0.]),
        ("Mul", [2., 4., 12., 16.]),
        ("Div", [0.5, 1., 0.75, 1.]),
        ("Pow", [1., 4., 81., 256.]),
    ];
    for (op, y) in cases {
        let file = File::new(13, &[1, 2, 1, 2]).floats("c", &[2, 1, 1], &[2., 4.]);
        check(file.node(op, &["x", "c"], "y", vec![]), &x, &[1, 2, 1, 2], &y, &[1, 2, 1, 2]);
    }
    let file = File::new(13, &[1, 2, 1, 2]).floats("c", &[1], &[2.5]).node("Max", &["x", "c"], "y", vec![]);
    check(file, &x, &[1, 2, 1, 2], &[2.5, 2.5, 3., 4.], &[1, 2, 1, 2]);
    let file = File::new(13, &[1, 4]).floats("c", &[], &[3.]).node("Pow", &["x", "c"], "y", vec![]);
    check(file, &x, &[1, 4], &[1., 8., 27., 64.], &[1, 4]);
    // One slope per channel uses the fused operator, one slope per column the general expression.
    for (slope, y) in [([2, 1, 1], [-0.1, -0.2, 3., -0.8]), ([1, 1, 2], [-0.1, -0.4, 3., -0.8])] {
        let file = File::new(9, &[1, 2, 1, 2]).floats("s", &slope, &[0.1, 0.2]);
        check(file.node("PRelu", &["x", "s"], "y", vec![]), &[-1., -2., 3., -4.], &[1, 2, 1, 2], &y, &[1, 2, 1, 2]);
    }
}

#[test]
fn numbers_move() {
    let x = [1., 2., 3., 4., 5., 6.];
    let file = || File::new(13, &[1, 2, 3]);
    let transposed = file().node("Transpose", &["x"], "y", vec![ints("perm", &[0, 2, 1])]);
    check(transposed, &x, &[1, 2, 3], &[1., 4., 2., 5., 3., 6.], &[1, 3, 2]);
    check(file().node("Flatten", &["x"], "y", vec![]), &x, &[1, 2, 3], &x, &[1, 6]);
    let file_ = file().ints("s", &[0, -1, 1]).node("Reshape", &["x", "s"], "y", vec![]);
    check(file_, &x, &[1, 2, 3], &x, &[1, 6, 1]);
    let file_ = file().ints("a", &[0]).node("Squeeze", &["x", "a"], "y", vec![]);
    check(file_, &x, &[1, 2, 3], &x, &[2, 3]);
    let file_ = file().ints("a", &[-1]).node("Unsqueeze", &["x", "a"], "y", vec![]);
    check(file_, &x, &[1, 2, 3], &x, &[1, 2, 3, 1]);
    let file_ = file().node("Concat", &["x", "x"], "y", vec![int("axis", 2)]);
    check(file_, &x, &[1, 2, 3], &[1., 2., 3., 1., 2., 3., 4., 5., 6., 4., 5., 6.], &[1, 2, 6]);
    let file_ = file().ints("i", &[2, -3, 2]).node("Gather", &["x", "i"], "y", vec![int("axis", 2)]);
    check(file_, &x, &[1, 2, 3], &[3., 1., 3., 6., 4., 6.], &[1, 2, 3]);
    let sliced = |starts, ends, steps| {
        let file = file().ints("s", &[starts]).ints("e", &[ends]).ints("a", &[-1]).ints("t", &[steps]);
        file.node("Slice", &["x", "s", "e", "a", "t"], "y", vec![])
    };
    check(sliced(1, i64::MAX, 1), &x, &[1, 2, 3], &[2., 3., 5., 6.], &[1, 2, 2]);
    check(sliced(-1, i64::MIN, -2), &x, &[1, 2, 3], &[3., 1., 6., 4.], &[1, 2, 2]);
    let file_ = file().ints("p", &[0, 0, 1, 0, 1, 0]).floats("v", &[], &[9.]);
    let padded = [9., 1., 2., 3., 9., 4., 5., 6., 9., 9., 9., 9.];
    check(file_.node("Pad", &["x", "p", "v"], "y", vec![]), &x, &[1, 2, 3], &padded, &[1, 3, 4]);
}

#[test]
fn shapes_may_be_computed_in_the_graph() {
    let file = File::new(11, &[-1, 2, 3]).ints("zero", &[0]).ints("minus", &[-1]).node("Shape", &["x"], "s", vec![]);
    let file =
        file.node("Gather", &["s", "zero"], "n", vec![]).node("Concat", &["n", "minus"], "t", vec![int("axis", 0)]);
    let file = file.node("Reshape", &["x", "t"], "y", vec![]);
    let x = noise(12, 3);
    check(file, &x, &[2, 2, 3], &x, &[2, 6]);
}

#[test]
fn resize_accepts_sizes_computed_in_floats() {
    let file = File::new(11, &[1, 1, 1, -1])
        .floats("none", &[0], &[])
        .ints("three", &[3])
        .ints("ones", &[1, 1, 1])
        .floats("two", &[1], &[2.]);
    let file = file.node("Shape", &["x"], "s", vec![]).node("Gather", &["s", "three"], "w", vec![]);
    let file = file.node("Cast", &["w"], "f", vec![int("to", 1)]).node("Mul", &["f", "two"], "d", vec![]);
    let file = file.node("Floor", &["d"], "g", vec![]).node("Cast", &["g"], "i", vec![int("to", 7)]);
    let file = file.node("Concat", &["ones", "i"], "n", vec![int("axis", 0)]);
    let nearest = vec![text("coordinate_transformation_mode", "asymmetric"), text("nearest_mode", "floor")];
    let file = file.node("Resize", &["x", "none", "none", "n"], "y", nearest);
    check(file, &[1., 5., 7.], &[1, 1, 1, 3], &[1., 1., 5., 5., 7., 7.], &[1, 1, 1, 6]);
}

#[test]
fn constants_are_folded() {
    let file = File::new(13, &[1, 2]).ints("s", &[2]).node("ConstantOfShape", &["s"], "zeros", vec![]);
    let file = file.node("Constant", &[], "three", vec![float("value_float", 3.)]);
    let file = file.node("Add", &["zeros", "three"], "c", vec![]).node("Mul", &["x", "c"], "y", vec![]);
    let bytes = file.bytes();
    let model = Model::parse(Path::new("x.onnx"), &bytes, &device()).unwrap();
    assert_eq!(host(&model.run(&tensor(&[1., 2.], &[1, 2])).unwrap()[0]), [3., 6.]);
}

#[test]
fn reductions_and_softmax() {
    let x = [1., 2., 3., 4., 5., 7.];
    let file = |opset| File::new(opset, &[1, 2, 3]);
    let mean = file(13).node("ReduceMean", &["x"], "y", vec![ints("axes", &[1, 2]), int("keepdims", 0)]);
    check(mean, &x, &[1, 2, 3], &[22. / 6.], &[1]);
    let sum = file(13).ints("a", &[-1]).node("ReduceSum", &["x", "a"], "y", vec![]);
    check(sum, &x, &[1, 2, 3], &[6., 16.], &[1, 2, 1]);
    let norm = file(13).node("ReduceL2", &["x"], "y", vec![ints("axes", &[1])]);
    check(norm, &x, &[1, 2, 3], &[17f32.sqrt(), 29f32.sqrt(), 58f32.sqrt()], &[1, 1, 3]);
    let exps = x.map(f32::exp);
    let rows: Vec<f32> = exps.chunks(3).flat_map(|r| r.iter().map(|v| v / r.iter().sum::<f32>())).collect();
    check(file(13).node("Softmax", &["x"], "y", vec![]), &x, &[1, 2, 3], &rows, &[1, 2, 3]);
    // Before operator set 13, all axes from 1 on form one distribution.
    let whole = exps.map(|v| v / exps.iter().sum::<f32>());
    check(file(11).node("Softmax", &["x"], "y", vec![]), &x, &[1, 2, 3], &whole, &[1, 2, 3]);
}

#[test]
fn resizes_in_every_coordinate_mode() {
    let resize = |scales: &[f32], mode, coordinates, nearest| {
        let file = File::new(11, &[1, 1, 1, 2]).floats("r", &[0], &[]).floats("s", &[4], scales);
        let attributes = vec![
            text("mode", mode),
            text("coordinate_transformation_mode", coordinates),
            text("nearest_mode", nearest),
            float("cubic_coeff_a", -0.75),
        ];
        file.node("Resize", &["x", "r", "s"], "y", attributes)
    };
    let x = [1., 5.];
    let shape = [1, 1, 1, 2];
    let double = [1., 1., 1., 2.];
    check(resize(&double, "nearest", "asymmetric", "floor"), &x, &shape, &[1., 1., 5., 5.], &[1, 1, 1, 4]);
    let ceil = resize(&double, "nearest", "asymmetric", "ceil");
    check(ceil, &x, &shape, &[1., 5., 5., 5.], &[1, 1, 1, 4]);
    check(resize(&double, "linear", "half_pixel", "floor"), &x, &shape, &[1., 2., 4., 5.], &[1, 1, 1, 4]);
    check(resize(&double, "linear", "asymmetric", "floor"), &x, &shape, &[1., 3., 5., 5.], &[1, 1, 1, 4]);
    let aligned = resize(&double, "linear", "align_corners", "floor");
    check(aligned, &x, &shape, &[1., 7. / 3., 11. / 3., 5.], &[1, 1, 1, 4]);
    let file = File::new(11, &[1, 1, 1, 2]).floats("r", &[0], &[]).ints("n", &[1, 1, 2, 3]);
    let file =
        file.node("Resize", &["x", "r", "r", "n"], "y", vec![text("coordinate_transformation_mode", "half_pixel")]);
    check(file, &x, &shape, &[1., 1., 5., 1., 1., 5.], &[1, 1, 2, 3]);
}

#[test]
fn cubic_resize_matches_the_specification() {
    let x: Vec<f32> = (1..=16).map(|i| i as f32).collect();
    // The first row and the first column of `resize_upsample_scales_cubic` and its siblings in ONNX's specification.
    // The input grows evenly along both axes, so these determine all numbers.
    let resize = |scale: f32, attributes: Vec<Attribute<'static>>, row: &[f32], column: &[f32]| {
        let file = File::new(13, &[1, 1, 4, 4]).floats("s", &[4], &[1., 1., scale, scale]);
        let attributes = attributes.into_iter().chain([text("mode", "cubic")]).collect();
        let y: Vec<f32> = column.iter().flat_map(|c| row.iter().map(move |r| c + r - row[0])).collect();
        let shape = [1, 1, column.len(), row.len()];
        check(file.node("Resize", &["x", "", "s"], "y", attributes), &x, &[1, 1, 4, 4], &y, &shape);
    };
    let row = [0.472_656_25, 0.769_531_25, 1.246_093_8, 1.875, 2.281_25, 2.910_156_3, 3.386_718_8, 3.683_593_8];
    let column = [0.472_656_25, 1.660_156_3, 3.566_406_3, 6.082_031_3, 7.707_031_3, 10.222_656, 12.128_906, 13.316_406];
    resize(2.0, vec![], &row, &column);
    resize(0.8, vec![], &[1.471_191_4, 2.781_25, 4.082_52], &[1.471_191_4, 6.711_426, 11.916_504]);
    let outside = || vec![float("cubic_coeff_a", -0.5), int("exclude_outside", 1)];
    let row = [0.558_823_5, 0.814_942, 1.356_982_5, 1.897_058_8, 2.397_058_8, 2.937_135_2, 3.479_175_6, 3.735_294];
    let column = [0.558_823_5, 1.583_297_6, 3.751_459_4, 5.911_764_7, 7.911_764_7, 10.072_07, 12.240_232, 13.264_706];
    resize(2.0, outside(), &row, &column);
    resize(0.8, outside(), &[1.368_126_8, 2.669_501_4, 4.013_336_7], &[1.368_126_8, 6.573_625_4, 11.948_967]);
    let coordinates = |mode| vec![text("coordinate_transformation_mode", mode)];
    let row = [1., 1.341_107_9, 1.800_291_5, 2.329_446, 2.670_554, 3.199_708_5, 3.658_892, 4.];
    let column = [1., 2.364_431_5, 4.201_166, 6.317_784_3, 7.682_215_7, 9.798_834, 11.635_569, 13.];
    resize(2.0, coordinates("align_corners"), &row, &column);
    let row = [1., 1.406_25, 2., 2.5, 3., 3.593_75, 4., 4.093_75];
    resize(2.0, coordinates("asymmetric"), &row, &[1., 2.625, 5., 7., 9., 11.375, 13., 13.375]);
}

#[test]
fn cubic_resize_takes_sizes_and_folds_constants() {
    // As DINOv2 fits its position embeddings to the size of the image.
    let embeddings = noise(2 * 3 * 3, 4);
    let mode = || {
        let a = float("cubic_coeff_a", -0.75);
        vec![text("mode", "cubic"), text("coordinate_transformation_mode", "pytorch_half_pixel"), a]
    };
    let sizes = |file: File<'static>| file.ints("n", &[1, 2, 4, 2]);
    let resized = sizes(File::new(17, &[1, 2, 3, 3])).node("Resize", &["x", "", "", "n"], "y", mode()).open().unwrap();
    let expected = host(&resized.run(&tensor(&embeddings, &[1, 2, 3, 3])).unwrap()[0]);
    let file = sizes(File::new(17, &[1, 2, 4, 2])).floats("e", &[1, 2, 3, 3], &embeddings);
    let file = file.node("Resize", &["e", "", "", "n"], "p", mode()).node("Add", &["x", "p"], "y", vec![]);
    let x = noise(16, 5);
    let y: Vec<f32> = x.iter().zip(&expected).map(|(x, p)| x + p).collect();
    check(file, &x, &[1, 2, 4, 2], &y, &[1, 2, 4, 2]);
}

#[test]
fn scatter_replaces_slices_and_has_gradients_to_data_and_updates() {
    let x = [1., 2., 3., 4., 5., 6.];
    let file = || File::new(17, &[1, 2, 3]);
    let row = file().shaped("i", &[1, 2], &[0, -1]).floats("u", &[1, 3], &[7., 8., 9.]);
    let row = row.node("ScatterND", &["x", "i", "u"], "y", vec![text("reduction", "none")]);
    check(row, &x, &[1, 2, 3], &[1., 2., 3., 7., 8., 9.], &[1, 2, 3]);
    let numbers = file().shaped("i", &[1, 2, 3], &[0, 0, 2, 0, 1, 0]).floats("u", &[1, 2], &[7., 8.]);
    let numbers = numbers.node("ScatterND", &["x", "i", "u"], "y", vec![]);
    check(numbers, &x, &[1, 2, 3], &[1., 2., 7., 8., 5., 6.], &[1, 2, 3]);
    let updates = file().shaped("i", &[1, 1], &[1]).floats("d", &[2, 2, 3], &[9.; 12]);
    let updates = updates.node("ScatterND", &["d", "i", "x"], "y", vec![]);
    check(updates, &x, &[1, 2, 3], &[[9.; 6], x].concat(), &[2, 2, 3]);
    // Row 1 becomes ten times row 0.
    let both = file().shaped("i", &[1, 1, 2], &[0, 1]).ints("s", &[0]).ints("e", &[1]).ints("a", &[1]);
    let both = both.node("Slice", &["x", "s", "e", "a"], "r", vec![]).floats("ten", &[], &[10.]);
    let both = both.node("Mul", &["r", "ten"], "u", vec![]).node("ScatterND", &["x", "i", "u"], "y", vec![]);
    check(both, &x, &[1, 2, 3], &[1., 2., 3., 10., 20., 30.], &[1, 2, 3]);
}

#[test]
fn normalisations_and_products() {
    let file = File::new(9, &[1, 2, 1, 2]).floats("s", &[2], &[2., 1.]).floats("b", &[2], &[0., 1.]);
    let file = file.floats("m", &[2], &[1., 2.]).floats("v", &[2], &[4., 1.]);
    let file = file.node("BatchNormalization", &["x", "s", "b", "m", "v"], "y", vec![float("epsilon", 0.)]);
    check(file, &[1., 2., 3., 4.], &[1, 2, 1, 2], &[0., 1., 2., 3.], &[1, 2, 1, 2]);
    let file = File::new(9, &[1, 2]).floats("w", &[3, 2], &[1., 2., 3., 4., 5., 6.]).floats("b", &[3], &[1., 1., 1.]);
    let file = file.node("Gemm", &["x", "w", "b"], "y", vec![int("transB", 1), float("alpha", 2.), float("beta", 0.5)]);
    check(file, &[1., 10.], &[1, 2], &[42.5, 86.5, 130.5], &[1, 3]);
    let file = File::new(9, &[1, 2, 2]).floats("w", &[2, 1], &[1., 10.]).node("MatMul", &["x", "w"], "y", vec![]);
    check(file, &[1., 2., 3., 4.], &[1, 2, 2], &[21., 43.], &[1, 2, 1]);
    let file = File::new(9, &[1, 2, 2]).node("MatMul", &["x", "x"], "y", vec![]);
    check(file, &[1., 2., 3., 4.], &[1, 2, 2], &[7., 10., 15., 22.], &[1, 2, 2]);
}

#[test]
fn stacked_items_match_single_items() {
    let flat = || {
        let file = File::new(9, &[1, 2, 1, 2]).ints("s", &[1, -1]).floats("w", &[4, 2], &noise(8, 2));
        file.node("Relu", &["x"], "r", vec![]).node("Reshape", &["r", "s"], "f", vec![])
    };
    // The product treats items independently; a mean over axis 0 and a reshape that mixes axis 0 do not.
    let stacked = flat().node("MatMul", &["f", "w"], "y", vec![]);
    let mixing =
        File::new(9, &[1, 2, 1, 2]).ints("s", &[1, -1]).ints("t", &[2, 2]).node("Reshape", &["x", "t"], "r", vec![]);
    let mixing = mixing.node("Softmax", &["r"], "q", vec![int("axis", 0)]).node("Reshape", &["q", "s"], "y", vec![]);
    for file in [stacked, mixing] {
        let model = file.open().unwrap();
        let x = noise(12, 9);
        let together = &model.run(&tensor(&x, &[3, 2, 1, 2])).unwrap()[0];
        let alone: Vec<f32> =
            x.chunks(4).flat_map(|x| host(&model.run(&tensor(x, &[1, 2, 1, 2])).unwrap()[0])).collect();
        assert_eq!(together.shape()[0], 3);
        close(&host(together), &alone, 1e-6);
        gradient_matches_differences(&model, &x, &[3, 2, 1, 2]);
    }
}

#[test]
fn where_expand_and_gather_have_gradients() {
    let x = [1., 2., 3., 4., 5., 6.];
    let file = || File::new(17, &[1, 2, 3]);
    let chosen =
        file().ints("three", &[3]).node("Shape", &["x"], "s", vec![]).node("Less", &["s", "three"], "c", vec![]);
    let chosen = chosen.floats("least", &[], &[f32::MIN]).node("Where", &["c", "x", "least"], "w", vec![]);
    let chosen = chosen.node("Max", &["w", "least"], "m", vec![]).floats("zero", &[], &[0.]);
    let y = [1., 2., 0., 4., 5., 0.];
    check(chosen.node("Where", &["c", "m", "zero"], "y", vec![]), &x, &[1, 2, 3], &y, &[1, 2, 3]);
    let expanded = file().ints("s", &[2, 1, 1, 3]).node("Expand", &["x", "s"], "y", vec![]);
    check(expanded, &x, &[1, 2, 3], &[x, x].concat(), &[2, 1, 2, 3]);
    let tiled = file().ints("r", &[2, 1, 2]).node("Tile", &["x", "r"], "y", vec![]);
    let y = [1., 2., 3., 1., 2., 3., 4., 5., 6., 4., 5., 6.];
    check(tiled, &x, &[1, 2, 3], &[y, y].concat(), &[2, 2, 6]);
    let triangle = file().node("Trilu", &["x"], "y", vec![int("upper", 0)]);
    check(triangle, &x, &[1, 2, 3], &[1., 0., 0., 4., 5., 0.], &[1, 2, 3]);
    let triangle = file().shaped("k", &[], &[1]).node("Trilu", &["x", "k"], "y", vec![]);
    check(triangle, &x, &[1, 2, 3], &[0., 2., 3., 0., 0., 6.], &[1, 2, 3]);
    let picked =
        file().shaped("i", &[1, 2, 2], &[2, 0, -1, 1]).node("GatherElements", &["x", "i"], "y", vec![int("axis", 2)]);
    check(picked, &x, &[1, 2, 3], &[3., 1., 6., 5.], &[1, 2, 2]);
    let picked = file().shaped("i", &[2, 2], &[0, 1, 0, -2]).node("GatherND", &["x", "i"], "y", vec![]);
    check(picked, &x, &[1, 2, 3], &[4., 5., 6., 1., 2., 3.], &[2, 3]);
    let picked = file().shaped("i", &[1, 2, 1], &[1, 1]).node("GatherND", &["x", "i"], "y", vec![int("batch_dims", 1)]);
    check(picked, &x, &[1, 2, 3], &[4., 5., 6., 4., 5., 6.], &[1, 2, 3]);
    let cut = file().ints("n", &[1, 2]).nodes("Split", &["x", "n"], &["a", "b"], vec![int("axis", 2)]);
    check(cut.node("Mul", &["b", "a"], "y", vec![]), &x, &[1, 2, 3], &[2., 3., 20., 24.], &[1, 2, 2]);
    let cut = file().nodes("Split", &["x"], &["a", "b"], vec![int("axis", 1)]);
    check(cut.node("Sub", &["a", "b"], "y", vec![]), &x, &[1, 2, 3], &[-3.; 3], &[1, 1, 3]);
    let most = file().node("ReduceMax", &["x"], "y", vec![ints("axes", &[1])]);
    check(most, &x, &[1, 2, 3], &[4., 5., 6.], &[1, 1, 3]);
    let least = file().node("ReduceMin", &["x"], "y", vec![ints("axes", &[-1]), int("keepdims", 0)]);
    check(least, &x, &[1, 2, 3], &[1., 4.], &[1, 2]);
    for (op, f) in [("Sin", f32::sin as fn(f32) -> f32), ("Cos", f32::cos)] {
        check(file().node(op, &["x"], "y", vec![]), &x, &[1, 2, 3], &x.map(f), &[1, 2, 3]);
    }
    check(
        file().node("Sign", &["x"], "y", vec![]),
        &[-2., 3., 1., 4., -5., 6.],
        &[1, 2, 3],
        &[-1., 1., 1., 1., -1., 1.],
        &[1, 2, 3],
    );
}

#[test]
fn layer_norm_over_last_axes() {
    let x = [1., 2., 4., 5., 5., 9.];
    let normal = |values: &[f32]| -> Vec<f32> {
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32;
        values.iter().map(|v| (v - mean) / (variance + 1e-3).sqrt()).collect()
    };
    let file = || File::new(17, &[1, 2, 3]).floats("g", &[3], &[1., 2., 3.]).floats("b", &[3], &[0.5, 0., -1.]);
    let rows: Vec<f32> = x.chunks(3).flat_map(normal).zip([1., 2., 3.].iter().cycle()).map(|(v, g)| v * g).collect();
    let scaled = file().node("LayerNormalization", &["x", "g"], "y", vec![float("epsilon", 1e-3)]);
    check(scaled, &x, &[1, 2, 3], &rows, &[1, 2, 3]);
    let shifted: Vec<f32> = rows.iter().zip([0.5, 0., -1.].iter().cycle()).map(|(v, b)| v + b).collect();
    let whole = file().node("LayerNormalization", &["x", "g", "b"], "y", vec![int("axis", 2), float("epsilon", 1e-3)]);
    check(whole, &x, &[1, 2, 3], &shifted, &[1, 2, 3]);
    let both = File::new(17, &[1, 2, 3]).floats("g", &[2, 3], &[1.; 6]);
    let both = both.node("LayerNormalization", &["x", "g"], "y", vec![int("axis", 1), float("epsilon", 1e-3)]);
    check(both, &x, &[1, 2, 3], &normal(&x), &[1, 2, 3]);
}

#[test]
fn outputs_that_nothing_reads_do_not_matter() {
    let file = File::new(10, &[1, 4]).nodes("Dropout", &["x"], &["y", "mask"], vec![]);
    check(file, &[1., 2., 3., 4.], &[1, 4], &[1., 2., 3., 4.], &[1, 4]);
    let file = File::new(12, &[1, 1, 1, 4]);
    let window = vec![ints("kernel_shape", &[1, 2]), ints("strides", &[1, 2])];
    let file = file.nodes("MaxPool", &["x"], &["y", "indices"], window);
    check(file, &[1., 2., 4., 3.], &[1, 1, 1, 4], &[2., 4.], &[1, 1, 1, 2]);
    let file = File::new(17, &[1, 2]).floats("s", &[2], &[2., 2.]);
    let file = file.nodes("LayerNormalization", &["x", "s"], &["y", "mean", "deviation"], vec![float("epsilon", 0.)]);
    let value = file.open().unwrap().run(&tensor(&[1., 3.], &[1, 2])).unwrap();
    close(&host(&value[0]), &[-2., 2.], 1e-5);
    let one = |file: File<'static>, name| file.floats(name, &[1], &[1.]);
    let file = ["s", "b", "m", "v"].into_iter().fold(File::new(9, &[1, 1, 2]), one);
    let names = ["y", "m2", "v2", "m3", "v3"];
    let file = file.nodes("BatchNormalization", &["x", "s", "b", "m", "v"], &names, vec![float("epsilon", 0.)]);
    // Not beside ONNX Runtime, which before operator set 14 takes five outputs for training and ignores the stored
    // statistics.
    let value = file.open().unwrap().run(&tensor(&[1., 3.], &[1, 1, 2])).unwrap();
    close(&host(&value[0]), &[1., 3.], 1e-6);
    // An output that is read is refused, and named by its place.
    let file = File::new(10, &[1, 4]).nodes("Dropout", &["x"], &["a", "y"], vec![]);
    assert!(file.open().unwrap_err().to_string().contains("its output 2 is read"));
}

#[test]
fn norms_of_zero_have_the_value_and_the_gradient_zero() {
    for p in [1, 2] {
        let file = File::new(11, &[2, 2]).node("LpNormalization", &["x"], "y", vec![int("axis", 1), int("p", p)]);
        let model = file.open().unwrap();
        let (y, recorded) = model.vjp(&tensor(&[0., 0., 3., 4.], &[2, 2])).unwrap();
        let expected = if p == 1 { [0., 0., 3. / 7., 4. / 7.] } else { [0., 0., 0.6, 0.8] };
        close(&host(&y), &expected, 1e-6);
        let pulled = host(&recorded.pull(tensor(&[1., 1., 1., 1.], &[2, 2])).unwrap());
        assert!(pulled[..2] == [0., 0.] && pulled.iter().all(|v| v.is_finite()), "{pulled:?}");
    }
    let file = File::new(11, &[1, 2]).node("ReduceL2", &["x"], "y", vec![ints("axes", &[1])]);
    let (y, recorded) = file.open().unwrap().vjp(&tensor(&[0., 0.], &[1, 2])).unwrap();
    assert_eq!((host(&y), host(&recorded.pull(tensor(&[1.], &[1, 1])).unwrap())), (vec![0.], vec![0., 0.]));
}

#[test]
fn powers_products_and_cumulative_sums_of_floats() {
    let file = File::new(13, &[1, 3]).ints("e", &[1, 2, 3]).node("Pow", &["x", "e"], "y", vec![]);
    check(file, &[2., -3., 2.], &[1, 3], &[2., 9., 8.], &[1, 3]);
    let file = File::new(13, &[1, 5]).node("ReduceProd", &["x"], "y", vec![ints("axes", &[1])]);
    check(file, &[2., -3., 2., 0.5, 3.], &[1, 5], &[-18.], &[1, 1]);
    for (attributes, expected) in [
        (vec![], [1., 3., 6.]),
        (vec![int("exclusive", 1)], [0., 1., 3.]),
        (vec![int("reverse", 1)], [6., 5., 3.]),
        (vec![int("exclusive", 1), int("reverse", 1)], [5., 3., 0.]),
    ] {
        let file = File::new(14, &[1, 3]).shaped("a", &[], &[1]).node("CumSum", &["x", "a"], "y", attributes);
        check(file, &[1., 2., 3.], &[1, 3], &expected, &[1, 3]);
    }
    let file = File::new(13, &[1, 3]).floats("d", &[3], &[2., 2., -3.]);
    let file = file.node("Mod", &["x", "d"], "y", vec![int("fmod", 1)]);
    check(file, &[5.5, -5.5, 7.25], &[1, 3], &[1.5, -1.5, 1.25], &[1, 3]);
}

#[test]
fn batch_axes_of_both_factors_broadcast() {
    let file = File::new(13, &[2, 1, 1, 2]).floats("b", &[2, 2, 1], &[1., 1., 1., -1.]);
    let file = file.node("MatMul", &["x", "b"], "y", vec![]);
    check(file, &[1., 2., 3., 4.], &[2, 1, 1, 2], &[3., -1., 7., -1.], &[2, 2, 1, 1]);
}

#[test]
fn long_axes_lose_no_digits() {
    let count = 1 << 21;
    let x: Vec<f32> = (0..count).map(|i| 0.1 + (i % 7) as f32 * 0.01).collect();
    let exact = x.iter().map(|v| f64::from(*v)).sum::<f64>() / count as f64;
    for (operator, factor) in [("ReduceMean", 1.0), ("ReduceSum", count as f64)] {
        let file = File::new(11, &[1, count]).node(operator, &["x"], "y", vec![ints("axes", &[1])]);
        let found = host(&file.open().unwrap().run(&tensor(&x, &[1, count as usize])).unwrap()[0])[0];
        assert!((f64::from(found) / (exact * factor) - 1.0).abs() < 1e-6, "{operator}: {found}, {exact}");
    }
    let logits: Vec<f32> = (0..6625).map(|i| if i == 3 { 14.4 } else { (i % 5) as f32 * 0.01 }).collect();
    let total: f64 = logits.iter().map(|v| f64::from(*v).exp()).sum();
    let exact = f64::from(logits[3]).exp() / total;
    for (operator, expected) in [("Softmax", exact), ("LogSoftmax", exact.ln())] {
        let file = File::new(13, &[1, 6625]).node(operator, &["x"], "y", vec![]);
        let found = f64::from(host(&file.open().unwrap().run(&tensor(&logits, &[1, 6625])).unwrap()[0])[3]);
        assert!((found - expected).abs() < 2e-6, "{operator}: {found}, {expected}");
    }
}
