//! Fused graphs, compared with the same graphs run node by node.

use super::operators::close;
use super::*;

/// Checks that outputs and gradient equal those of the unfused graph, and that `nodes` nodes remain.
#[track_caller]
fn check(file: File, shape: &[usize], nodes: usize) {
    let bytes = file.bytes();
    let count: usize = shape.iter().product();
    parity::compare(&bytes, &[roll_core::Tensor::new(noise(count, 9), shape).unwrap()]);
    let path = Path::new("faces/x.onnx");
    let fused = Model::parse(path, &bytes, &device()).unwrap();
    let plain = Model::unfused(path, &bytes, &device()).unwrap();
    assert_eq!(fused.nodes(), nodes, "of {} nodes", plain.nodes());
    let x = tensor(&noise(count, 9), shape);
    let (found, expected) = (fused.run(&x).unwrap(), plain.run(&x).unwrap());
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.shape(), expected.shape());
        close(&host(found), &host(expected), 1e-5);
    }
    let gradient = |model: &Model| {
        let (y, recorded) = model.vjp(&x).unwrap();
        let cotangent = tensor(&noise(y.shape().iter().product(), 5), y.shape());
        (host(&y), host(&recorded.pull(cotangent).unwrap()))
    };
    let ((y, found), (_, expected)) = (gradient(&fused), gradient(&plain));
    close(&found, &expected, 1e-5);
    assert_eq!(y, host(&fused.run(&x).unwrap()[0]), "with a gradient and without");
}

const SHAPE: [usize; 4] = [2, 3, 5, 6];

/// A convolution of x with 3 input and 4 output channels, called `c`.
fn conv<'a>() -> File<'a> {
    let file = File::new(13, &[2, 3, 5, 6]).floats("w", &[4, 3, 3, 3], &noise(108, 2)).floats("b", &[4], &noise(4, 3));
    file.node("Conv", &["x", "w", "b"], "c", vec![ints("pads", &[1, 1, 1, 1])])
}

fn norm<'a>(file: File<'a>, input: &'a str, output: &'a str) -> File<'a> {
    let positive = noise(4, 4).iter().map(|v| v.abs() + 0.2).collect::<Vec<_>>();
    let file = file.floats("scale", &[4], &noise(4, 5)).floats("shift", &[4], &noise(4, 6));
    let file = file.floats("mean", &[4], &noise(4, 7)).floats("variance", &[4], &positive);
    file.node("BatchNormalization", &[input, "scale", "shift", "mean", "variance"], output, vec![])
}

#[test]
fn batch_norm_and_function_fuse_into_conv() {
    check(norm(conv(), "c", "y"), &SHAPE, 1);
    check(norm(conv(), "c", "n").node("Relu", &["n"], "y", vec![]), &SHAPE, 1);
    check(conv().node("LeakyRelu", &["c"], "y", vec![float("alpha", 0.3)]), &SHAPE, 1);
    check(conv().floats("s", &[4, 1, 1], &noise(4, 8)).node("PRelu", &["c", "s"], "y", vec![]), &SHAPE, 1);
    let clip = conv().floats("low", &[], &[-0.5]).floats("high", &[], &[0.75]);
    check(clip.node("Clip", &["c", "low", "high"], "y", vec![]), &SHAPE, 1);
    check(conv().node("Sigmoid", &["c"], "y", vec![]), &SHAPE, 1);
    check(conv().node("Sigmoid", &["c"], "s", vec![]).node("Mul", &["s", "c"], "y", vec![]), &SHAPE, 1);
    check(conv().node("Sigmoid", &["c"], "s", vec![]).node("Mul", &["c", "s"], "y", vec![]), &SHAPE, 1);
}

#[test]
fn hard_swish_fuses_into_conv() {
    let file = File { opset: 14, ..conv() };
    check(file.node("HardSwish", &["c"], "y", vec![]), &SHAPE, 1);
}

#[test]
fn constant_arithmetic_folds_into_weights() {
    let channels = |file: File<'static>, name| file.floats(name, &[1, 4, 1, 1], &[0.5, -2.0, 1.5, 3.0]);
    for op in ["Add", "Sub", "Mul", "Div"] {
        check(channels(conv(), "k").node(op, &["c", "k"], "y", vec![]), &SHAPE, 1);
        let left = if op == "Div" { 2 } else { 1 };
        check(channels(conv(), "k").node(op, &["k", "c"], "y", vec![]), &SHAPE, left);
    }
    let file = conv().floats("k", &[], &[0.25]).node("Mul", &["c", "k"], "m", vec![]);
    let file = channels(file, "o").node("Add", &["o", "m"], "a", vec![]);
    check(norm(file, "a", "n").node("Relu", &["n"], "y", vec![]), &SHAPE, 1);
    // One number per column is not one per channel.
    check(conv().floats("k", &[6], &noise(6, 8)).node("Mul", &["c", "k"], "y", vec![]), &SHAPE, 2);
}

#[test]
fn residual_sum_and_function_fuse_into_conv() {
    let two = || {
        let file = conv().floats("v", &[4, 3, 1, 1], &noise(12, 11));
        file.node("Conv", &["x", "v"], "d", vec![])
    };
    check(two().node("Add", &["c", "d"], "s", vec![]).node("Relu", &["s"], "y", vec![]), &SHAPE, 2);
    check(two().node("Add", &["d", "c"], "y", vec![]), &SHAPE, 2);
    // After a function, a sum cannot be fused.
    let file = two().node("Relu", &["c"], "r", vec![]).node("Relu", &["d"], "e", vec![]);
    check(file.node("Add", &["r", "e"], "y", vec![]), &SHAPE, 3);
    // A value added to itself.
    check(conv().node("Add", &["c", "c"], "y", vec![]), &SHAPE, 2);
}

#[test]
fn broadcast_residual_sum_matches_unfused_graph() {
    let pooled = || {
        let file = conv().floats("v", &[4, 3, 1, 1], &noise(12, 11)).node("GlobalAveragePool", &["x"], "g", vec![]);
        file.node("Conv", &["g", "v"], "d", vec![])
    };
    check(pooled().node("Add", &["c", "d"], "s", vec![]).node("Relu", &["s"], "y", vec![]), &SHAPE, 3);
    check(pooled().node("Add", &["d", "c"], "s", vec![]).node("Sigmoid", &["s"], "y", vec![]), &SHAPE, 3);
    let file = pooled().floats("k", &[4, 1, 1], &noise(4, 12)).node("Add", &["d", "c"], "s", vec![]);
    check(file.node("PRelu", &["s", "k"], "y", vec![]), &SHAPE, 3);
}

#[test]
fn values_with_other_consumers_are_not_fused() {
    let mut file = conv().node("Relu", &["c"], "y", vec![]);
    file.outputs = vec![("y", DataType::Float), ("c", DataType::Float)];
    check(file, &SHAPE, 2);
    let file = conv().node("Relu", &["c"], "r", vec![]).node("Tanh", &["c"], "t", vec![]);
    check(file.node("Mul", &["r", "t"], "y", vec![]), &SHAPE, 4);
    let mut file = conv().node("Sigmoid", &["c"], "s", vec![]).node("Mul", &["c", "s"], "y", vec![]);
    file.outputs = vec![("y", DataType::Float), ("s", DataType::Float)];
    check(file, &SHAPE, 3);
}

#[test]
fn conv_1d_and_depthwise_conv_are_fused() {
    let file = File::new(13, &[2, 3, 7]).floats("w", &[4, 3, 3], &noise(36, 2));
    let file = file.node("Conv", &["x", "w"], "c", vec![ints("strides", &[2]), ints("pads", &[1, 0])]);
    check(norm(file, "c", "n").node("Relu", &["n"], "y", vec![]), &[2, 3, 7], 1);
    let file = File::new(13, &[2, 4, 7, 6]).floats("w", &[4, 1, 3, 3], &noise(36, 2));
    let attributes = vec![int("group", 4), ints("strides", &[2, 2]), text("auto_pad", "SAME_UPPER")];
    let file = file.node("Conv", &["x", "w"], "c", attributes);
    let file = norm(file, "c", "n").floats("s", &[4, 1, 1], &noise(4, 8));
    check(file.node("PRelu", &["n", "s"], "y", vec![]), &[2, 4, 7, 6], 1);
}

#[test]
fn unfusable_nodes_run_unchanged() {
    // A negative variance, which only a damaged file has.
    let file = conv().floats("scale", &[4], &[1.0; 4]).floats("shift", &[4], &[0.0; 4]).floats("mean", &[4], &[0.0; 4]);
    let file = file.floats("variance", &[4], &[-1.0; 4]);
    let file = file.node("BatchNormalization", &["c", "scale", "shift", "mean", "variance"], "y", vec![]);
    assert_eq!(file.open().unwrap().nodes(), 2);
    // Statistics for another number of channels are refused by their own node, where they are used.
    let file = conv().floats("s", &[3], &[1.0; 3]);
    let model = file.node("BatchNormalization", &["c", "s", "s", "s", "s"], "y", vec![]).open().unwrap();
    let message = model.run(&tensor(&noise(180, 1), &SHAPE)).unwrap_err().to_string();
    assert!(message.contains("BatchNormalization"), "{message}");
}

#[test]
fn results_are_bit_identical_for_any_thread_count() {
    let model = norm(conv(), "c", "n").node("Relu", &["n"], "y", vec![]).open().unwrap();
    let x = tensor(&noise(180, 1), &SHAPE);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let (y, recorded) = model.vjp(&x).unwrap();
            let cotangent = tensor(&noise(y.shape().iter().product(), 5), y.shape());
            (host(&y), host(&recorded.pull(cotangent).unwrap()))
        })
    };
    assert_eq!(run(1), run(2));
}

#[test]
fn gelu_is_fused_for_every_factor_order() {
    let start = || {
        let file = File::new(13, &[2, 5]).floats("root", &[], &[std::f32::consts::SQRT_2]);
        let file = file.floats("one", &[], &[1.0]).floats("half", &[], &[0.5]);
        let file = file.node("Div", &["x", "root"], "u", vec![]).node("Erf", &["u"], "e", vec![]);
        file.node("Add", &["e", "one"], "s", vec![])
    };
    check(start().node("Mul", &["x", "s"], "p", vec![]).node("Mul", &["p", "half"], "y", vec![]), &[2, 5], 1);
    check(start().node("Mul", &["s", "half"], "p", vec![]).node("Mul", &["p", "x"], "y", vec![]), &[2, 5], 1);
    check(start().node("Mul", &["half", "x"], "h", vec![]).node("Mul", &["h", "s"], "y", vec![]), &[2, 5], 1);
    // The product with another value than x is not a GELU.
    check(start().node("Mul", &["u", "s"], "p", vec![]).node("Mul", &["p", "half"], "y", vec![]), &[2, 5], 5);
    let mut file = start().node("Mul", &["x", "s"], "p", vec![]).node("Mul", &["p", "half"], "y", vec![]);
    file.outputs = vec![("y", DataType::Float), ("e", DataType::Float)];
    check(file, &[2, 5], 5);
}

#[test]
fn standalone_batch_norm_and_function_are_fused() {
    let file = || norm(File::new(13, &[2, 4, 5, 6]), "x", "n");
    check(file().node("Relu", &["n"], "y", vec![]), &[2, 4, 5, 6], 1);
    check(file().node("LeakyRelu", &["n"], "y", vec![float("alpha", 0.3)]), &[2, 4, 5, 6], 1);
    check(file().node("Tanh", &["n"], "y", vec![]), &[2, 4, 5, 6], 2);
    check(norm(File::new(13, &[-1, 4]), "x", "y"), &[3, 4], 1);
    let model = norm(File::new(13, &[-1, -1]), "x", "y").open().unwrap();
    let message = model.run(&tensor(&[1.0; 6], &[2, 3])).unwrap_err().to_string();
    assert!(message.contains("BatchNormalization"), "{message}");
    messages::check("onnx/run/channels_of_a_norm", message);
}

#[test]
fn decomposed_layer_norm_is_fused() {
    let start = |square: &'static str| {
        let file = File::new(13, &[3, 5]).floats("two", &[], &[2.0]).floats("epsilon", &[], &[1e-5]);
        let file = file.floats("gain", &[5], &noise(5, 2)).floats("shift", &[5], &noise(5, 3));
        let last = || vec![ints("axes", &[-1])];
        let file = file.node("ReduceMean", &["x"], "m", last()).node("Sub", &["x", "m"], "c", vec![]);
        let square = if square == "Pow" { ["c", "two"] } else { ["c", "c"] };
        let file = file.node(if square[1] == "c" { "Mul" } else { "Pow" }, &square, "p", vec![]);
        let file = file.node("ReduceMean", &["p"], "v", last()).node("Add", &["v", "epsilon"], "e", vec![]);
        let file = file.node("Sqrt", &["e"], "s", vec![]).node("Div", &["c", "s"], "d", vec![]);
        file.node("Mul", &["d", "gain"], "g", vec![]).node("Add", &["g", "shift"], "y", vec![])
    };
    check(start("Pow"), &[3, 5], 1);
    check(start("Mul"), &[3, 5], 1);
    let mut file = start("Pow");
    file.outputs = vec![("y", DataType::Float), ("c", DataType::Float)];
    check(file, &[3, 5], 9);
}

#[test]
fn matmul_and_bias_fuse_into_linear() {
    let file = File::new(13, &[2, 3, 4]).floats("w", &[4, 5], &noise(20, 2)).floats("b", &[5], &noise(5, 3));
    let file = file.node("MatMul", &["x", "w"], "p", vec![]);
    check(file.clone().node("Add", &["p", "b"], "y", vec![]), &[2, 3, 4], 1);
    check(file.clone().node("Add", &["b", "p"], "y", vec![]), &[2, 3, 4], 1);
    let vector = File::new(13, &[4]).floats("w", &[4, 5], &noise(20, 2)).floats("b", &[5], &noise(5, 3));
    let vector = vector.node("MatMul", &["x", "w"], "p", vec![]).node("Add", &["p", "b"], "y", vec![]);
    check(vector, &[4], 1);
    let square = file.floats("rows", &[3, 1], &noise(3, 4));
    check(square.node("Add", &["p", "rows"], "y", vec![]), &[2, 3, 4], 2);
    let model = File::new(13, &[2, -1]).floats("w", &[4, 5], &noise(20, 2)).floats("b", &[5], &noise(5, 3));
    let model = model.node("MatMul", &["x", "w"], "p", vec![]).node("Add", &["p", "b"], "y", vec![]).open().unwrap();
    let message = model.run(&tensor(&[1.0; 6], &[2, 3])).unwrap_err().to_string();
    messages::check("onnx/run/shapes_of_a_product", message);
}
