//! Tests of the `onnx` reward: exported networks against PyTorch, and errors in options.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use roll_core::{Options, Registry};
use roll_core::{Verdict, check_reward};
use serde_json::{Value as Json, json};

use super::*;
use crate::picture::{Input, Layout, RowNetwork};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/exported").join(name)
}

fn device() -> burn_tensor::Device {
    roll_backends::device(std::env::var("ROLL_TEST_BACKEND").as_deref().unwrap_or("flex")).unwrap()
}

/// The generator of the Python script: values in [-1, 1).
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn make(options: Json) -> Result<Box<dyn RewardScorer>> {
    let context = BuildContext {
        base_dir: Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/exported"),
        ..BuildContext::new(std::env::var("ROLL_TEST_BACKEND").unwrap_or("flex".into()))
    };
    let Json::Object(options) = options else { panic!("options are a map") };
    let options: Options = options;
    Registry::linked()?.reward("onnx", &options, &context)
}

fn numbers(json: &Json) -> Vec<f32> {
    json.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

#[test]
fn exported_networks_match_pytorch_values_and_gradients() {
    let golden: Json = serde_json::from_slice(&std::fs::read(data("golden.json")).unwrap()).unwrap();
    for name in ["mixer", "vit", "convnext", "clip3d"] {
        let case = &golden[name];
        let shape: Vec<usize> = serde_json::from_value(case["input"].clone()).unwrap();
        let (values, gradients) = (numbers(&case["output"]), numbers(&case["gradient"]));
        for exporter in ["script", "dynamo"] {
            let model = Model::open(&data(&format!("{name}_{exporter}.onnx")), &device()).unwrap();
            let layout = if shape.len() == 5 { Layout::Ncthw } else { Layout::Nchw };
            let graph = PictureModel::new(model, &mut Input { layout, ..Input::default() }).unwrap();
            let x = Tensor::new(noise(shape.iter().product(), 1), shape.clone()).unwrap();
            let (y, pull) = graph.rows_vjp(x.clone()).unwrap();
            let gradient = pull(Tensor::new(noise(y.len(), 2), y.shape()).unwrap()).unwrap();
            let worst = |found: Vec<f32>, expected: &[f32]| {
                assert_eq!(found.len(), expected.len(), "{name} {exporter}");
                let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
                found.iter().zip(expected).fold(0f32, |w, (f, e)| w.max((f - e).abs() / largest))
            };
            let value = worst(y.to_f32_vec(), &values);
            let slope = worst(gradient.to_f32_vec().into_iter().step_by(7).collect(), &gradients);
            eprintln!("{name} ({exporter}): value {value:.1e}, gradient {slope:.1e} of the largest");
            assert!(value < 1e-5 && slope < 2e-5, "{name} {exporter}: {value} {slope}");
            assert_eq!(graph.rows(x).unwrap().shape(), y.shape());
        }
    }
}

#[test]
fn gradients_of_every_measurement_match_finite_differences() {
    let normal = json!({ "mean": [0.4, 0.5, 0.6], "std": [0.3, 0.2, 0.3], "filter": "bicubic", "fit": "crop" });
    let cases = [
        json!({ "score": "softmax", "index": 2, "file": "mixer_script.onnx" }),
        json!({ "score": "value", "index": 1, "over_frames": "last", "file": "convnext_dynamo.onnx" }),
        json!({ "score": "sigmoid", "index": 0, "over_frames": "min", "file": "convnext_script.onnx" }),
        json!({ "score": "cosine", "frames": { "every": 2 }, "file": "vit_script.onnx" }),
        json!({ "score": "cosine", "vector": [1, 0, -1, 0.5, 0, 0], "file": "vit_script.onnx" }),
        json!({ "score": "distance", "frames": "first_and_last", "file": "mixer_dynamo.onnx" }),
    ];
    for mut case in cases {
        case["input"] = normal.clone();
        case["input"]["size"] = 16.into();
        let findings = check_reward(make(case.clone()).unwrap().as_mut(), 5);
        assert!(findings.iter().all(|f| f.verdict == Verdict::Kept), "{case}: {findings:#?}");
    }
}

#[test]
fn video_network_gradient_matches_finite_differences() {
    for exporter in ["script", "dynamo"] {
        let options = json!({
            "file": format!("clip3d_{exporter}.onnx"), "index": 1, "frames": { "uniform": 5 },
            "input": { "layout": "ncthw", "fit": "crop" },
        });
        let findings = check_reward(make(options).unwrap().as_mut(), 5);
        assert!(findings.iter().all(|f| f.verdict == Verdict::Kept), "{exporter}: {findings:#?}");
    }
}

/// A network in the folder `models` of ROLL_TEST_DATA, which is not part of the repository. `None` skips the test.
fn published(file: &str) -> Option<PathBuf> {
    let root = std::env::var_os("ROLL_TEST_DATA").map(PathBuf::from);
    let root = root.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"));
    let path = root.join("models").join(file);
    if !path.exists() {
        roll_testing::skip!(format!("{} is not there; set ROLL_TEST_DATA", path.display()), needs = "media");
    }
    Some(path)
}

#[test]
fn published_networks_by_configuration_have_the_scores_and_gradients_of_pytorch() {
    let golden: Json = serde_json::from_str(include_str!("../../tests/data/networks.json")).unwrap();
    for case in golden.as_array().unwrap() {
        let mut options = case["options"].clone();
        let file = options["file"].as_str().unwrap().to_string();
        let Some(path) = published(&file) else { return };
        options["file"] = path.display().to_string().into();
        let shape: Vec<usize> = serde_json::from_value(case["frames"].clone()).unwrap();
        let video = |seed| {
            let values = noise(shape.iter().product(), seed).iter().map(|v| v / 2.0).collect();
            Video::new(Tensor::new(values, shape.clone()).unwrap(), 8.0).unwrap()
        };
        let mut reward = make(options).unwrap();
        let target = reward.prepare(&video(2)).unwrap();
        let (score, pullback) = reward.score(&video(1), "", &target, Grad::Record).unwrap();
        let Score::Value { value, .. } = score else { panic!("{score:?}") };
        let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap().to_f32_vec();
        let stride = case["stride"].as_u64().unwrap() as usize;
        let (expected, slopes) = (case["score"].as_f64().unwrap(), numbers(&case["gradient"]));
        let apart = (value - expected).abs() / expected.abs();
        let found: Vec<f32> = gradient.into_iter().step_by(stride).collect();
        assert_eq!(found.len(), slopes.len());
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let difference = norm(&mut found.iter().zip(&slopes).map(|(f, e)| f - e)) / norm(&mut slopes.iter().copied());
        eprintln!("{file}: score {value:.6}, {apart:.1e} apart; gradient {difference:.1e} apart in norm");
        // If rounding moves a sum across the corner of a PReLU or ReLU, its slope changes: PyTorch's own gradients in
        // f32 and f64 differ by 5.7e-3 in norm for ArcFace and 4.0e-3 for SCRFD, and by up to 2e-2 of the largest value
        // at one pixel.
        assert!(apart < 1e-4 && difference < 2e-2, "{file}: {apart} {difference}");
    }
}

#[test]
fn published_networks_by_configuration_have_the_gradients_of_their_differences() {
    let cases = [
        json!({ "file": "arcface_mobile_512.onnx", "score": "cosine", "frames": "first_and_last" }),
        json!({ "file": "yunet_s_dynamic.onnx", "output": "kps_16", "index": 5, "frames": "last",
                "input": { "size": [64, 96], "range": [0, 255], "order": "bgr" } }),
        json!({ "file": "scrfd_2.5g_bnkps.onnx", "output": "kps_32", "score": "distance", "frames": "first" }),
    ];
    for mut options in cases {
        let Some(path) = published(options["file"].as_str().unwrap()) else { return };
        options["file"] = path.display().to_string().into();
        let mut reward = make(options.clone()).unwrap();
        // One of the videos that `check_reward` uses: the detector processes 640x640 pixels, which takes seconds per
        // video.
        let shape = [2, 3, 24, 40];
        let values = (0..shape.iter().product::<usize>()).map(|i| 0.6 * (0.21 * i as f32).sin()).collect::<Vec<f32>>();
        let video = |values: Vec<f32>| Video::new(Tensor::new(values, shape).unwrap(), 8.0).unwrap();
        let target = reward.prepare(&video(values.iter().map(|v| -v).collect())).unwrap();
        let pullback = reward.score(&video(values.clone()), "", &target, Grad::Record).unwrap().1.unwrap();
        let gradient = pullback.pull(&Tensor::scalar(1.0)).unwrap().to_f32_vec();
        let length = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
        let slope = [1e-2f32, 3e-3].map(|step| {
            let mut moved = |step: f32| {
                let along = values.iter().zip(&gradient).map(|(v, g)| v + step * g / length).collect();
                match reward.score(&video(along), "", &target, Grad::Skip).unwrap().0 {
                    Score::Value { value, .. } => value,
                    missing => panic!("{missing:?}"),
                }
            };
            (moved(step) - moved(-step)) / f64::from(2.0 * step)
        });
        let apart = slope.map(|s| (s / f64::from(length) - 1.0).abs());
        eprintln!("{}: gradient {length:.3e}, differences {slope:?}", options["file"]);
        assert!(apart[0].min(apart[1]) < 2e-2, "{options}: {length} {slope:?}");
    }
}

#[test]
fn perceptual_first_frame_uses_the_network() {
    let config = crate::pixels::first_frame::FirstFrameConfig {
        measure: crate::pixels::first_frame::Likeness::Perceptual,
        file: data("vit_script.onnx").display().to_string(),
        input: serde_json::from_value(json!({ "size": 16 })).unwrap(),
        ..Default::default()
    };
    let context = BuildContext::new("flex");
    let mut reward = crate::pixels::FirstFrame::new(config, &context).unwrap();
    crate::pixels::check(&mut reward);
    let video = Video::new(Tensor::new(noise(2 * 3 * 16 * 16, 3), [2, 3, 16, 16]).unwrap(), 8.0).unwrap();
    let target = reward.prepare(&video).unwrap();
    assert_eq!(reward.score(&video, "", &target, Grad::Skip).unwrap().0, {
        let details = [("frames".to_string(), 1.0)].into();
        Score::Value { value: 0.0, details }
    });
}

#[test]
fn misfit_errors_name_file_and_key() {
    let told = |options: Json| match make(options) {
        Err(error) => roll_core::one_line(&error),
        Ok(mut reward) => {
            let video = Video::new(Tensor::zeros([1, 3, 16, 16]), 8.0).unwrap();
            let target = reward.prepare(&video).unwrap();
            let scored = reward.score(&video, "", &target, Grad::Skip);
            roll_core::one_line(&scored.map(drop).unwrap_err())
        }
    };
    let file = "mixer_script.onnx";
    let cases = [
        (json!({}), "reward.file"),
        (json!({ "file": "absent.onnx" }), "absent.onnx"),
        (json!({ "file": file }), "`reward.index`: missing: which of the 5 numbers"),
        (json!({ "file": file, "index": 9 }), "below 5"),
        (json!({ "file": file, "score": "softmax" }), "reward.index"),
        (json!({ "file": file, "output": "z" }), "its outputs are `y`"),
        (json!({ "file": file, "input": { "layout": "ncthw" } }), "reward.input.layout"),
        (json!({ "file": file, "input": { "size": 20 } }), "reward.input.size"),
        (json!({ "file": file, "score": "cosine", "vector": [1, 2] }), "5 numbers"),
        (json!({ "file": file, "frames": { "every": 0 } }), "reward.frames"),
        (json!({ "file": file, "frames_per_batch": 0 }), "reward.frames_per_batch"),
        (json!({ "file": file, "input": { "colour": "rgb" } }), "unknown field `colour`"),
    ];
    for (options, part) in cases {
        let told = told(options.clone());
        assert!(told.contains(part), "no {part} in: {told}");
    }
}
