//! This project's executor, compared with ONNX Runtime on every graph of the tests and every ONNX file available.

use std::path::PathBuf;

use roll_core::{DType, Tensor};

use super::*;
use crate::runtime::{Session, runtime_version};
use crate::{Executor, Network, Port};

/// Whether ONNX Runtime is available. Reports once if it is not.
fn is_there() -> bool {
    static SAID: std::sync::Once = std::sync::Once::new();
    let Err(error) = runtime_version() else { return true };
    SAID.call_once(|| roll_testing::skipped(&format!("comparison with ONNX Runtime: {error}"), Some("onnxruntime")));
    false
}

/// The largest difference between two outputs, relative to the largest value. Integers must be equal.
pub(super) fn difference(ours: &Tensor, theirs: &Tensor) -> f32 {
    assert_eq!((ours.shape(), ours.dtype()), (theirs.shape(), theirs.dtype()));
    if ours.dtype() != DType::F32 {
        assert_eq!(ours.as_slice::<i64>().unwrap(), theirs.as_slice::<i64>().unwrap());
        return 0.0;
    }
    let (ours, theirs) = (ours.to_f32_vec(), theirs.to_f32_vec());
    // ONNX Runtime's sigmoid is a rational approximation with an absolute error of up to about 1e-7. So if all
    // probabilities are near zero, differences are relative to two hundredths.
    let largest = theirs.iter().filter(|v| v.is_finite()).fold(2e-2f32, |m, v| m.max(v.abs()));
    // Infinities and NaN must agree.
    let one = |(a, b): (&f32, &f32)| if a == b || a.is_nan() && b.is_nan() { 0.0 } else { (a - b).abs() / largest };
    ours.iter().zip(&theirs).map(one).fold(0.0, f32::max)
}

/// Fails if the outputs of the two executors for `inputs` differ by more than 1e-5 of the largest value.
#[track_caller]
pub(super) fn compare(bytes: &[u8], inputs: &[Tensor]) {
    if !is_there() {
        return;
    }
    let path = Path::new("made/by/a/test.onnx");
    let ours = Model::parse(path, bytes, &device()).unwrap().run_all(inputs).unwrap();
    let theirs = Session::parse(path, bytes).unwrap().run(inputs).unwrap();
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(&theirs) {
        let worst = difference(ours, theirs);
        assert!(worst <= 1e-5, "they differ by {worst} of the largest value: {ours:?} and {theirs:?}");
    }
}

/// The ONNX files in the repository and in the folder `models` of ROLL_TEST_DATA.
fn files() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let data = std::env::var_os("ROLL_TEST_DATA").map_or_else(|| root.join("../shared"), PathBuf::from);
    let folders = ["demo/assets/face", "demo/assets/face_check"].map(|f| root.join(f));
    let entries = folders.into_iter().chain([data.join("models")]).filter_map(|f| std::fs::read_dir(f).ok()).flatten();
    let mut files: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "onnx"));
    files.sort();
    files
}

/// Random values for an input, with `items` along a free or single axis 0 and 64 pixels along other free axes.
fn sample(port: &Port, items: usize) -> Tensor {
    let length = |(axis, d): (usize, &Option<usize>)| match (axis, d) {
        (0, None | Some(1)) => items,
        (_, d) => d.unwrap_or(64),
    };
    let shape: Vec<usize> = port.shape.iter().enumerate().map(length).collect();
    Tensor::new(noise(shape.iter().product(), 1), shape).unwrap()
}

#[test]
fn every_file_matches_onnx_runtime() {
    if !is_there() {
        return;
    }
    let files = files();
    assert!(files.len() >= 4, "the networks of the demo are missing: {files:?}");
    for path in files {
        let network = Network::open(&path, &device(), Executor::OnnxRuntime).unwrap();
        for items in [1, 3] {
            let input = sample(&network.model().inputs()[0], items);
            let input = roll_backends::host::to_device_nd(&input, &device()).unwrap();
            let ours = network.model().run(&input).unwrap();
            let theirs = network.run(&input, true).unwrap();
            assert_eq!(ours.len(), theirs.len());
            let pairs =
                ours.iter().zip(&theirs).map(|(a, b)| difference(&to_host_nd(a).unwrap(), &to_host_nd(b).unwrap()));
            let worst = pairs.fold(0.0, f32::max);
            eprintln!("{}, {items} items: {worst:.1e} of the largest value", path.display());
            assert!(worst <= 1e-5, "{}: {worst}", path.display());
        }
    }
}

#[test]
fn fuzzer_seeds_match_onnx_runtime() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/onnx");
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let mut parsed = onnx_rs::parse(&bytes).unwrap();
        // Written with a newer version of the format than ONNX Runtime supports.
        parsed.ir_version = 8;
        let model = Model::parse(Path::new("seed.onnx"), &bytes, &device()).unwrap();
        compare(&onnx_rs::encode(&parsed), &[sample(&model.inputs()[0], 1)]);
    }
}

#[test]
fn auto_executor_uses_onnx_runtime_only_without_gradients() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.onnx");
    let file = File::new(13, &[1, 64]).floats("w", &[64, 64], &noise(64 * 64, 3));
    std::fs::write(&path, file.node("MatMul", &["x", "w"], "m", vec![]).node("Tanh", &["m"], "y", vec![]).bytes())
        .unwrap();
    let x = tensor(&noise(64, 4), &[1, 64]);
    let ours = host(&Model::open(&path, &device()).unwrap().run(&x).unwrap()[0]);
    for executor in [Executor::Auto, Executor::Own] {
        let network = Network::open(&path, &device(), executor).unwrap();
        assert_eq!(host(&network.run(&x, true).unwrap()[0]), ours);
        assert_eq!(host(&network.vjp(&x).unwrap().0), ours);
        assert_eq!(network.external_runtime(), None);
    }
    if !is_there() {
        let error = Network::open(&path, &device(), Executor::OnnxRuntime).unwrap_err().to_string();
        assert!(error.contains("`onnx: own`"), "{error}");
        return;
    }
    let network = Network::open(&path, &device(), Executor::OnnxRuntime).unwrap();
    assert_eq!(host(&network.vjp(&x).unwrap().0), ours);
    let key = network.external_runtime().unwrap();
    assert!(key.starts_with("onnxruntime: ORT Build Info: "), "{key}");
}

#[test]
fn onnx_runtime_errors_name_the_file() {
    if !is_there() {
        return;
    }
    let bytes = File::new(13, &[1, 2]).node("FlyToTheMoon", &["x"], "y", vec![]).bytes();
    let error = Session::parse(Path::new("faces/x.onnx"), &bytes).unwrap_err().to_string();
    assert!(error.contains("faces/x.onnx") && error.contains("FlyToTheMoon"), "{error}");
    let error = Session::parse(Path::new("faces/x.onnx"), b"no model").unwrap_err().to_string();
    assert!(error.contains("faces/x.onnx: ONNX Runtime"), "{error}");
    let session =
        Session::parse(Path::new("x.onnx"), &File::new(13, &[1, 2]).node("Relu", &["x"], "y", vec![]).bytes());
    let session = session.unwrap();
    let error = session.run(&[]).unwrap_err().to_string();
    assert!(error.contains("1 inputs, found 0"), "{error}");
    let error = session.run(&[Tensor::new(vec![1i64, 2], [1, 2]).unwrap()]).unwrap_err().to_string();
    assert!(error.contains("x.onnx: ONNX Runtime"), "{error}");
}
