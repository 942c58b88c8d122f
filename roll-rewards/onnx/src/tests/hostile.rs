//! Wrong files, by accident or on purpose, are errors that describe the mistake.

use super::*;

#[track_caller]
fn refused(result: Result<Model, OnnxError>, parts: &[&str]) {
    let message = result.map(|_| ()).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` should contain `{part}`");
    }
}

fn parse(bytes: &[u8]) -> Result<Model, OnnxError> {
    Model::parse(Path::new("faces/x.onnx"), bytes, &device())
}

#[test]
fn unknown_operator_error_names_node_and_file() {
    let file = File::new(11, &[1, 2]).node("FlyToTheMoon", &["x"], "y", vec![]);
    let expected = "faces/x.onnx: node `the_node` uses the operator `FlyToTheMoon`, which this build cannot run; \
                    the rewards `command` and `http` score with a program of yours";
    assert_eq!(file.open().unwrap_err().to_string(), expected);
}

#[test]
fn rejects_unknown_attributes_values_and_opsets() {
    let relu = |attributes| File::new(11, &[1, 2]).node("Relu", &["x"], "y", attributes);
    refused(relu(vec![int("warp", 9)]).open(), &["faces/x.onnx", "the_node", "Relu", "warp"]);
    let resize = |opset, attributes| {
        let file = File::new(opset, &[1, 1, 2, 2]).floats("r", &[0], &[]).floats("s", &[4], &[1., 1., 2., 2.]);
        file.node("Resize", if opset < 11 { &["x", "s"] } else { &["x", "r", "s"] }, "y", attributes).open()
    };
    let cubic = || text("mode", "cubic");
    refused(resize(11, vec![text("mode", "lanczos")]), &["the_node", "lanczos"]);
    refused(resize(10, vec![cubic()]), &["the_node", "cubic", "operator set 11"]);
    refused(resize(11, vec![cubic(), float("cubic_coeff_a", f32::NAN)]), &["the_node", "`cubic_coeff_a`", "NaN"]);
    refused(resize(11, vec![text("mode", "linear"), int("exclude_outside", 1)]), &["`exclude_outside`", "linear"]);
    refused(resize(18, vec![cubic(), int("antialias", 1)]), &["the_node", "`antialias`"]);
    let scatter = File::new(18, &[1, 2]).shaped("i", &[1, 2], &[0, 0]).floats("u", &[1], &[1.]);
    let scatter = scatter.node("ScatterND", &["x", "i", "u"], "y", vec![text("reduction", "mul")]);
    refused(scatter.open(), &["the_node", "`reduction` mul"]);
    refused(File::new(99, &[1, 2]).node("Relu", &["x"], "y", vec![]).open(), &["operator set 99"]);
    let file = File::new(11, &[1, 1, 2, 2]).node("MaxPool", &["x"], "y", vec![ints("kernel_shape", &[0, 2])]);
    refused(file.open(), &["kernel_shape"]);
    let file = File::new(11, &[1, 1, 2, 2]).node("MaxPool", &["x"], "y", vec![ints("kernel_shape", &[1; 4])]);
    refused(file.open(), &["one to three axes"]);
}

#[test]
fn rejects_cycles_undefined_and_duplicate_values() {
    let file = File::new(11, &[1, 2]).node("Add", &["x", "b"], "y", vec![]).node("Relu", &["y"], "b", vec![]);
    refused(file.open(), &["cycle"]);
    refused(File::new(11, &[1, 2]).node("Relu", &["nobody"], "y", vec![]).open(), &["`nobody`", "nothing computes"]);
    let file = File::new(11, &[1, 2]).node("Relu", &["x"], "y", vec![]).node("Relu", &["x"], "y", vec![]);
    refused(file.open(), &["`y` is defined twice"]);
    refused(File::new(11, &[1, 2]).node("Relu", &["x"], "z", vec![]).open(), &["nothing computes the output `y`"]);
}

#[test]
fn rejects_inconsistent_sizes() {
    let file =
        |shape: &[i64]| File::new(11, &[1, 2]).floats("c", shape, &[1., 2.]).node("Add", &["x", "c"], "y", vec![]);
    refused(file(&[3]).open(), &["`c`", "3 numbers", "2"]);
    refused(file(&[-2]).open(), &["`c`"]);
    refused(file(&[i64::MAX, i64::MAX, 4]).open(), &["`c`", "larger"]);
    let file = File::new(11, &[1, 2]).ints("s", &[1 << 30, 1 << 30]).node("ConstantOfShape", &["s"], "y", vec![]);
    refused(file.open(), &["larger"]);
}

#[test]
fn rejects_folding_beyond_the_budget() {
    let names = ["a", "b", "c", "d"];
    let file = |count: usize| {
        let file = File::new(11, &[1, 2]).ints("s", &[1 << 11, 1 << 11]);
        let made = names[..count].iter().fold(file, |f, name| f.node("ConstantOfShape", &["s"], name, vec![]));
        let summed = made.node("Concat", &names[..count], "all", vec![int("axis", 0)]);
        summed.node("ReduceMean", &["all"], "m", vec![]).node("Add", &["x", "m"], "y", vec![])
    };
    assert!(file(1).open().is_ok());
    refused(file(4).open(), &["constants computed from others", "16777216"]);
}

#[test]
fn rejects_huge_results_before_allocation() {
    let model = |file: File| file.open().unwrap().run(&tensor(&[1., 2.], &[1, 1, 1, 2])).unwrap_err().to_string();
    let file = || File::new(11, &[1, 1, 1, 2]);
    let scaled = file().floats("r", &[0], &[]).floats("s", &[4], &[1., 1., 1e5, 1e9]);
    assert!(model(scaled.node("Resize", &["x", "r", "s"], "y", vec![])).contains("larger"));
    let padded = file().ints("p", &[0, 0, 0, 0, 1 << 20, 0, 0, 1 << 20]);
    assert!(model(padded.node("Pad", &["x", "p"], "y", vec![])).contains("larger"));
    let pads = ints("pads", &[1 << 30, 1 << 30, 1 << 30, 1 << 30]);
    let conv = file().floats("w", &[1, 1, 1, 1], &[1.]).node("Conv", &["x", "w"], "y", vec![pads]);
    assert!(model(conv).contains("larger"));
}

#[test]
fn small_file_and_input_cannot_request_gigabytes() {
    let model = |file: File| file.open().unwrap().run(&tensor(&[0.5; 1 << 12], &[1, 1 << 12])).unwrap_err().to_string();
    let file = || File::new(11, &[1, 1 << 12]);
    // A constant that repeats one item twenty thousand times: 80 million elements from 24 thousand.
    let many = file().floats("c", &[20_000, 1], &[1.; 20_000]).node("Add", &["x", "c"], "y", vec![]);
    assert!(model(many).contains("larger than 17"), "2^24, 256 for each of 2^12, and the constant");
    // A value that is doubled twenty times.
    let names: Vec<String> = (0..20).map(|i| format!("d{i}")).collect();
    let doubled = (1..20).fold(file().node("Concat", &["x", "x"], "d0", vec![int("axis", 1)]), |file, i| {
        file.node("Concat", &[&names[i - 1], &names[i - 1]], &names[i], vec![int("axis", 1)])
    });
    assert!(model(doubled.node("Relu", &["d19"], "y", vec![])).contains("larger than 17"));
    // Values that are allowed individually but not in total.
    let wide = file().floats("c", &[4000, 1], &[1.; 4000]).node("Add", &["x", "c"], "d0", vec![]);
    let wide = (1..20).fold(wide, |file, i| file.node("Relu", &[&names[i - 1]], &names[i], vec![]));
    assert!(model(wide.node("Relu", &["d19"], "y", vec![])).contains("16 times 17"));
}

#[test]
fn rejects_inputs_of_wrong_shape() {
    let model =
        File::new(11, &[1, 2]).floats("c", &[3], &[1.; 3]).node("Add", &["x", "c"], "y", vec![]).open().unwrap();
    let message = model.run(&tensor(&[1., 2.], &[1, 2])).unwrap_err().to_string();
    assert!(message.contains("the_node"), "{message}");
    messages::check("onnx/run/shapes_of_a_sum", message);
    let message = model.run(&tensor(&[1., 2., 3.], &[1, 3])).unwrap_err().to_string();
    assert!(message.contains("`x`"), "{message}");
    messages::check("onnx/run/axis", message);
    let message = model.vjp(&tensor(&[1.], &[1])).unwrap_err().to_string();
    messages::check("onnx/run/rank", message);
}

#[test]
fn rejects_scattered_slices_that_do_not_fit() {
    let run = |shape: &[i64], indices: &[i64], updates: &[i64]| {
        let count = updates.iter().product::<i64>() as usize;
        let file = File::new(18, &[1, 2, 3]).shaped("i", shape, indices).floats("u", updates, &vec![1.; count]);
        let model = file.node("ScatterND", &["x", "i", "u"], "y", vec![]).open().unwrap();
        model.run(&tensor(&[0.; 6], &[1, 2, 3])).map(|_| ()).unwrap_err().to_string()
    };
    for (case, shape, indices, updates) in [
        ("length_of_a_slice", &[1, 2][..], &[0, 0][..], &[1, 2][..]),
        ("number_of_updates", &[2, 2], &[0, 0, 0, 1], &[1, 3]),
        ("more_positions_than_axes", &[1, 4], &[0, 0, 0, 0], &[1]),
        ("no_positions", &[1, 0], &[], &[1, 1, 2, 3]),
        ("scalar", &[], &[0], &[1, 2, 3]),
    ] {
        let message = run(shape, indices, updates);
        assert!(message.contains("the_node"), "{message}");
        messages::check(&format!("onnx/scatter/{case}"), message);
    }
    for index in [2, -3, i64::MIN, i64::MAX] {
        messages::check("onnx/scatter/index", run(&[1, 2], &[0, index], &[1, 3]));
    }
    let mixed = File::new(18, &[1, 2]).shaped("i", &[1, 2], &[0, 0]).ints("u", &[1]);
    let mixed = mixed.node("ScatterND", &["x", "i", "u"], "y", vec![]).open().unwrap();
    messages::check("onnx/scatter/integers_into_floats", mixed.run(&tensor(&[0.; 2], &[1, 2])).unwrap_err());
}

/// Fails if the result is an error that does not name the file, or that reports a panic, which the executor catches.
#[track_caller]
pub(super) fn assert_plain_error<T>(result: Result<T, impl std::fmt::Display>, file: &str) {
    let Err(error) = result else { return };
    let message = error.to_string();
    assert!(message.starts_with(file) && !message.contains("panicked"), "{message}");
}

#[test]
fn truncated_files_and_flipped_bits_do_not_panic() {
    let file = File::new(11, &[1, 1, 2, 2]).floats("w", &[1, 1, 2, 2], &[1.; 4]).ints("s", &[1, -1]);
    let file = file.node("Conv", &["x", "w"], "c", vec![ints("pads", &[1, 1, 1, 1])]);
    let bytes = file.node("Reshape", &["c", "s"], "y", vec![]).bytes();
    // Parses and runs the file. Returns whether it is a model.
    let run = |bytes: &[u8]| {
        let model = parse(bytes);
        let is_model = model.is_ok();
        let outputs = model.map_err(roll_core::Error::from).and_then(|m| m.run(&tensor(&[1.; 4], &[1, 1, 2, 2])));
        assert_plain_error(outputs, "faces/x.onnx: ");
        is_model
    };
    assert!(run(&bytes));
    // A cut between two fields of the model leaves a whole one.
    let whole = (0..bytes.len()).filter(|end| run(&bytes[..*end])).count();
    assert!(whole <= 3, "{whole} of {} truncations are models", bytes.len());
    for i in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[i] ^= 1 << bit;
            run(&flipped);
        }
    }
    refused(parse(&[]), &["no graph"]);
}

#[test]
fn rejects_deep_nesting_without_recursion() {
    // graph { node { attribute { g: graph ... } } }, nested two hundred thousand times.
    let mut bytes: Vec<u8> = vec![];
    let mut parts: Vec<Vec<u8>> = vec![];
    let mut length = 0usize;
    for level in 0..200_000 {
        let tag = match level % 3 {
            0 => 0x32, // Attribute.g
            1 => 0x2a, // Node.attribute
            _ => 0x0a, // Graph.node
        };
        let mut part = vec![tag];
        let mut rest = length;
        while rest >= 0x80 {
            part.push((rest & 0x7f) as u8 | 0x80);
            rest >>= 7;
        }
        part.push(rest as u8);
        length += part.len();
        parts.push(part);
    }
    parts.iter().rev().for_each(|p| bytes.extend(p));
    let mut whole = vec![0x3a];
    let mut rest = bytes.len();
    while rest >= 0x80 {
        whole.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    whole.push(rest as u8);
    whole.extend(bytes);
    refused(parse(&whole), &[]);
}

#[test]
fn missing_file_and_directory_errors_name_the_path() {
    let missing = Model::open(Path::new("nowhere/x.onnx"), &device());
    refused(missing, &["cannot read nowhere/x.onnx"]);
    refused(Model::open(&std::env::temp_dir(), &device()), &["should be a file"]);
}
