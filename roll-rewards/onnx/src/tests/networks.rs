//! Real face networks, compared with ONNX Runtime (golden.json, created by golden.py).

use std::path::PathBuf;

use super::*;

/// Opens the network. `None` skips the test if the file is missing.
fn open(name: &str) -> Option<Model> {
    let root = std::env::var_os("ROLL_TEST_DATA").map(PathBuf::from);
    let root = root.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"));
    let path = root.join("models").join(name).with_added_extension("onnx");
    if !path.exists() {
        roll_testing::skip!(format!("{} is not there; set ROLL_TEST_DATA", path.display()), needs = "media");
    }
    Some(Model::open(&path, &device()).unwrap())
}

/// Noise in [-1, 1], for YuNet in [0, 255].
fn sample(name: &str, shape: &[usize]) -> NdTensor {
    let mut x = noise(shape.iter().product(), 1);
    if name.starts_with("yunet") {
        x.iter_mut().for_each(|v| *v = (*v + 1.0) * 127.5);
    }
    tensor(&x, shape)
}

#[test]
fn real_networks_match_onnx_runtime() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("golden.json")).unwrap();
    for (name, case) in golden.as_object().unwrap() {
        let Some(model) = open(name) else { continue };
        let shape: Vec<usize> = serde_json::from_value(case["input"].clone()).unwrap();
        let start = std::time::Instant::now();
        let outputs = model.run(&sample(name, &shape)).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let expected = case["outputs"].as_array().unwrap();
        assert_eq!(outputs.len(), expected.len());
        let mut worst = 0f32;
        for (output, expected) in outputs.iter().zip(expected) {
            let shape: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
            assert_eq!(output.shape(), shape, "{name} {}", expected["name"]);
            let indices: Vec<usize> = serde_json::from_value(expected["at"].clone()).unwrap();
            let values: Vec<f32> = serde_json::from_value(expected["values"].clone()).unwrap();
            // ONNX Runtime's sigmoid is a rational approximation with an absolute error of up to about 1e-7. So a
            // largest value below 0.01, as of probabilities near zero, counts as 0.01.
            let largest = (expected["largest"].as_f64().unwrap() as f32).max(1e-2);
            let found = host(output);
            worst = indices.iter().zip(&values).map(|(i, v)| (found[*i] - v).abs() / largest).fold(worst, f32::max);
        }
        eprintln!("{name}: {worst:.1e} of the largest value, {seconds:.2} s");
        assert!(worst < 2e-5, "{name} differs by {worst}");
    }
}

#[test]
fn items_have_the_same_outputs_in_a_batch_and_alone() {
    for (name, shape) in [("arcface_mobile_512", [2, 3, 112, 112]), ("yunet_s_dynamic", [2, 3, 64, 96])] {
        let Some(model) = open(name) else { continue };
        let x = sample(name, &shape);
        let together = model.run(&x).unwrap();
        let second = host(&x)[x.shape().iter().product::<usize>() / 2..].to_vec();
        let alone = model.run(&tensor(&second, &[1, 3, shape[2], shape[3]])).unwrap();
        for (together, alone) in together.iter().zip(&alone) {
            let (together, alone) = (host(together), host(alone));
            let largest = alone.iter().fold(0f32, |m, v| m.max(v.abs()));
            for (t, a) in together[alone.len()..].iter().zip(&alone) {
                assert!((t - a).abs() <= 1e-5 * largest, "{name}: {t} {a}");
            }
        }
    }
}

#[test]
fn real_embedder_gradient_predicts_a_small_step() {
    let Some(model) = open("arcface_mobile_512") else { return };
    let shape = [2, 3, 112, 112];
    let x = sample("arcface", &shape);
    let start = std::time::Instant::now();
    let (y, recorded) = model.vjp(&x).unwrap();
    let cotangent = noise(1024, 4);
    let gradient = host(&recorded.pull(tensor(&cotangent, y.shape())).unwrap());
    eprintln!("arcface, two items, value and pullback: {:.2} s", start.elapsed().as_secs_f64());
    let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
    let x = host(&x);
    let objective = |step: f32| -> f64 {
        let moved: Vec<f32> = x.iter().zip(&gradient).map(|(x, g)| x + step * g / norm).collect();
        let y = host(&model.run(&tensor(&moved, &shape)).unwrap()[0]);
        y.iter().zip(&cotangent).map(|(y, g)| f64::from(*y) * f64::from(*g)).sum()
    };
    let step = 0.02;
    let slope = (objective(step) - objective(-step)) / f64::from(2.0 * step);
    assert!((slope / f64::from(norm) - 1.0).abs() < 1e-2, "slope {slope}, gradient norm {norm}");
}

#[test]
fn damaged_real_file_does_not_panic() {
    let Some(model) = open("yunet_s_dynamic") else { return };
    let bytes = std::fs::read(model.path()).unwrap();
    for seed in 0..200u32 {
        let mut damaged = bytes.clone();
        for position in noise(8, seed) {
            let at = ((position + 1.0) / 2.0 * damaged.len() as f32) as usize % damaged.len();
            damaged[at] ^= 1 << (seed % 8);
        }
        if seed % 4 == 0 {
            damaged.truncate(damaged.len() / 200 * (seed as usize));
        }
        hostile::assert_plain_error(Model::parse(Path::new("damaged.onnx"), &damaged, &device()), "damaged.onnx: ");
    }
}
