//! The reward with small fake networks. `tests/face_reward.rs` at the root uses real ones.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use roll_core::{
    BuildContext, Fault, Grad, OnMissing, Options, Registry, Result, RewardScorer, Score, Target, Tensor, Video,
};
use roll_onnx::Executor;
use roll_testing::faces::{self, SIDE};

use super::align::Alignment;
use super::{ChannelOrder, FaceNetworks, IdentityConfig, IdentityReward, Undetected};
use crate::gradient_check::{dot, noise};

const SIZE: [usize; 2] = [64, 64];
const FRAME: usize = 3 * 64 * 64;

/// A frame in which the fake detector finds a face.
fn bright(seed: u64) -> Vec<f32> {
    let hill = |i: usize| ((i % 64) as f32 * (0.05 + seed as f32 * 0.02)).sin() * 0.2;
    noise(seed, FRAME).into_iter().enumerate().map(|(i, v)| 0.5 + 0.3 * v + hill(i)).collect()
}

/// A frame in which the fake detector finds none.
fn dark() -> Vec<f32> {
    vec![-0.5; FRAME]
}

fn video(frames: &[Vec<f32>]) -> Video {
    Video::new(Tensor::new(frames.concat(), [frames.len(), 3, SIZE[0], SIZE[1]]).unwrap(), 8.0).unwrap()
}

fn config(change: impl FnOnce(&mut IdentityConfig)) -> IdentityConfig {
    let mut config = IdentityConfig { reward_model_path: "faces".into(), det_size: SIDE, ..IdentityConfig::default() };
    change(&mut config);
    config
}

fn reward(change: impl FnOnce(&mut IdentityConfig)) -> IdentityReward {
    let directory = tempfile::tempdir().unwrap();
    faces::write(directory.path());
    let config = config(change);
    let device = roll_backends::device("flex").unwrap();
    IdentityReward::new(FaceNetworks::load(directory.path(), &config, &device).unwrap(), config)
}

fn value_of(score: &Score) -> f64 {
    match score {
        Score::Value { value, .. } => *value,
        Score::Missing { reason } => panic!("missing: {reason}"),
    }
}

fn embedding(reward: &IdentityReward, frame: &[f32]) -> Vec<f32> {
    let face = reward.networks().detect(frame, SIZE).unwrap()[0];
    reward.networks().embed(frame, SIZE, &face).unwrap().unwrap()
}

#[test]
fn score_is_mean_cosine_without_the_first_reference_frame() {
    let mut reward = reward(|_| ());
    let reference = [bright(1), bright(2), dark(), bright(3)];
    let scored = [bright(4), dark(), bright(5)];
    let target = reward.prepare(&video(&reference)).unwrap();
    let (score, pullback) = reward.score(&video(&scored), "", &target, Grad::Skip).unwrap();
    assert!(pullback.is_none());
    let mut expected = 0.0;
    for (a, b) in [(0, 1), (0, 3), (2, 1), (2, 3)] {
        let (a, b) = (embedding(&reward, &scored[a]), embedding(&reward, &reference[b]));
        expected += dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt() / 4.0;
    }
    assert!((value_of(&score) - expected).abs() < 1e-6, "{score:?} {expected}");
    let Score::Value { details, .. } = score else { unreachable!() };
    let counts = ["frames", "frames_with_face", "references"].map(|key| details[key]);
    assert_eq!(counts, [3.0, 2.0, 2.0]);
    assert!(details["detector_score"] > 0.99);
}

#[test]
fn gradient_matches_finite_differences_for_every_alignment_order_and_batch() {
    let scored = [bright(4), dark(), bright(5), bright(6)];
    for (align, order, batch) in [
        (Alignment::Exact, ChannelOrder::Rgb, 8),
        (Alignment::Exact, ChannelOrder::Bgr, 2),
        (Alignment::Reference, ChannelOrder::Bgr, 1),
    ] {
        let mut reward = reward(|c| (c.align, c.channel_order, c.frames_per_batch) = (align, order, batch));
        let target = reward.prepare(&video(&[bright(1), bright(2), bright(3)])).unwrap();
        let (_, pullback) = reward.score(&video(&scored), "", &target, Grad::Record).unwrap();
        let gradient = pullback.unwrap().pull(&Tensor::scalar(2.0)).unwrap();
        let gradient = gradient.f32s().unwrap();
        assert!(gradient[FRAME..2 * FRAME].iter().all(|g| *g == 0.0), "a frame without a face has no gradient");
        for seed in 10..13 {
            let direction = noise(seed, 4 * FRAME);
            let mut moved = |step: f32| {
                let step_by = |(t, frame): (usize, &Vec<f32>)| {
                    frame.iter().zip(&direction[t * FRAME..]).map(|(v, d)| v + step * d).collect::<Vec<f32>>()
                };
                let frames: Vec<_> = scored.iter().enumerate().map(step_by).collect();
                value_of(&reward.score(&video(&frames), "", &target, Grad::Skip).unwrap().0)
            };
            let numeric = 2.0 * (moved(0.02) - moved(-0.02)) / 0.04;
            let exact = dot(&direction, gradient);
            let scale = exact.abs().max(dot(gradient, gradient).sqrt());
            assert!((numeric - exact).abs() < 1e-2 * scale, "{align:?} {order:?} {batch}: {numeric} {exact}");
        }
    }
}

#[test]
fn only_sampled_frames_are_searched() {
    let mut reward = reward(|c| c.sample_every = 2);
    let target = reward.prepare(&video(&[dark(), bright(1), dark(), dark()])).unwrap();
    let clip = video(&[dark(), bright(2), bright(3), bright(4)]);
    let (score, pullback) = reward.score(&clip, "", &target, Grad::Record).unwrap();
    let Score::Value { details, .. } = &score else { panic!("{score:?}") };
    assert_eq!([details["frames"], details["frames_with_face"]], [2.0, 1.0]);
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    let moved: Vec<bool> = gradient.f32s().unwrap().chunks_exact(FRAME).map(|f| f.iter().any(|g| *g != 0.0)).collect();
    assert_eq!(moved, [false, false, true, false]);
    // A clip shorter than the step has a reference frame, too.
    assert!(self::reward(|c| c.sample_every = 9).prepare(&video(&[dark(), bright(1)])).is_ok());
}

#[test]
fn missing_faces_in_video_and_reference() {
    let mut reward = reward(|c| c.on_missing = OnMissing::Value(0.25));
    assert_eq!(reward.on_missing(), OnMissing::Value(0.25));
    let target = reward.prepare(&video(&[bright(1)])).unwrap();
    let (score, pullback) = reward.score(&video(&[dark(), dark()]), "", &target, Grad::Record).unwrap();
    assert!(matches!(score, Score::Missing { reason } if reason.contains("no face in any of 2 frames")));
    assert!(pullback.is_none());
    let error = reward.prepare(&video(&[bright(1), dark()])).unwrap_err();
    assert_eq!(error.fault(), Fault::User);
    assert!(error.missing_reason().is_some_and(|reason| reason.contains("the first does not count")), "{error}");
    assert!(error.to_string().contains("det_threshold") && error.to_string().contains("the first does not count"));
}

#[test]
fn undetected_faces_use_reference_landmarks() {
    let mut reward = reward(|c| c.undetected = Undetected::ReferenceLandmarks);
    let target = reward.prepare(&video(&[bright(1), bright(2)])).unwrap();
    let faint: Vec<f32> = noise(8, FRAME).into_iter().map(|v| 0.1 * v).collect();
    let (score, pullback) = reward.score(&video(&[faint]), "", &target, Grad::Record).unwrap();
    let Score::Value { details, .. } = score else { panic!("{score:?}") };
    assert_eq!(details["frames_with_face"], 0.0);
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    assert!(gradient.f32s().unwrap().iter().any(|g| *g != 0.0));
}

#[test]
fn non_finite_pixel_makes_the_score_nan() {
    let mut reward = reward(|_| ());
    let target = reward.prepare(&video(&[bright(1)])).unwrap();
    let mut broken = bright(2);
    broken[7] = f32::NAN;
    let (score, pullback) = reward.score(&video(&[bright(3), broken]), "", &target, Grad::Record).unwrap();
    assert!(value_of(&score).is_nan());
    assert!(pullback.unwrap().pull(&Tensor::scalar(1.0)).is_err());
}

#[test]
fn rejects_target_of_another_reward() {
    let mut reward = reward(|_| ());
    assert!(reward.score(&video(&[bright(1)]), "", &Target::default(), Grad::Skip).is_err());
    let mut target = reward.prepare(&video(&[bright(1)])).unwrap();
    target.tensors.insert("references".into(), Tensor::full([2, 5], 1.0));
    let error = reward.score(&video(&[bright(1)]), "", &target, Grad::Skip).unwrap_err().to_string();
    assert!(error.contains("[N, 8]"), "{error}");
}

#[test]
fn reward_is_registered_and_checks_options() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("faces")).unwrap();
    faces::write(&directory.path().join("faces"));
    let registry = Registry::linked().unwrap();
    let make = |options: serde_json::Value| -> Result<Box<dyn RewardScorer>> {
        let context = BuildContext { base_dir: directory.path().into(), ..BuildContext::new("flex") };
        registry.reward("insightface", &serde_json::from_value::<Options>(options).unwrap(), &context)
    };
    let scorer = make(serde_json::json!({
        "reward_model_path": "faces", "det_size": 32, "channel_order": "bgr", "align": "reference",
        "on_missing": {"value": 0.1}, "det_padding": "black", "det_divisor": 128, "onnx": "own",
    }));
    assert!(scorer.unwrap().differentiable());
    for (options, needle) in [
        (serde_json::json!({}), "reward_model_path"),
        (serde_json::json!({"reward_model_path": "faces", "det_treshold": 0.3}), "did you mean `det_threshold`"),
        (serde_json::json!({"reward_model_path": "faces", "det_size": 100}), "multiple of 32"),
        (serde_json::json!({"reward_model_path": "faces", "det_size": 64}), "pictures of 32x32 only"),
        (serde_json::json!({"reward_model_path": "faces", "nms_iou": 1.5}), "0 to 1"),
        (serde_json::json!({"reward_model_path": "faces", "sample_every": 0}), "sample_every"),
        (serde_json::json!({"reward_model_path": "faces", "channel_order": "gbr"}), "channel_order"),
        (
            serde_json::json!({"reward_model_path": "faces", "onnx": "ort"}),
            "expected one of `auto`, `own`, `onnxruntime`",
        ),
        (serde_json::json!({"reward_model_path": "nowhere"}), "nowhere"),
    ] {
        let error = make(options).err().unwrap();
        assert_eq!(error.fault(), Fault::User, "{error}");
        assert!(error.to_string().contains(needle), "{error}");
    }
}

fn with_executor(directory: &Path, onnx: Executor) -> Result<IdentityReward> {
    let config = config(|c| c.onnx = onnx);
    let device = roll_backends::device("flex").unwrap();
    Ok(IdentityReward::new(FaceNetworks::load(directory, &config, &device)?, config))
}

#[test]
fn onnx_runtime_keeps_training_bit_identical() {
    let directory = tempfile::tempdir().unwrap();
    faces::write(directory.path());
    let (reference, scored) = (video(&[bright(1), bright(2)]), video(&[bright(4), dark(), bright(5)]));
    let [own, auto] = [Executor::Own, Executor::Auto].map(|executor| {
        let mut reward = with_executor(directory.path(), executor).unwrap();
        let target = reward.prepare(&reference).unwrap();
        let (score, pullback) = reward.score(&scored, "", &target, Grad::Record).unwrap();
        let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
        let evaluated = value_of(&reward.score(&scored, "", &target, Grad::Skip).unwrap().0);
        let references = target.tensors["references"].f32s().unwrap().to_vec();
        let key = reward.target_key().unwrap();
        ((references, score, gradient.f32s().unwrap().to_vec(), key), evaluated)
    });
    assert_eq!(own.0, auto.0);
    // The executors differ by rounding only.
    assert!((own.1 - auto.1).abs() < 1e-5, "{} {}", own.1, auto.1);
}

#[test]
fn target_keys_differ_by_executor() {
    let directory = tempfile::tempdir().unwrap();
    faces::write(directory.path());
    match (with_executor(directory.path(), Executor::OnnxRuntime), roll_onnx::runtime::runtime_version()) {
        (Ok(theirs), Ok(_)) => {
            let ours = with_executor(directory.path(), Executor::Own).unwrap();
            assert_ne!(theirs.target_key().unwrap(), ours.target_key().unwrap());
        }
        // The build or the machine has no ONNX Runtime.
        (Err(error), Err(_)) => assert!(error.to_string().contains("`onnx: own`"), "{error}"),
        (theirs, build) => panic!("{theirs:?} with {build:?}"),
    }
}

fn refusal(directory: &Path, change: impl FnOnce(&mut IdentityConfig)) -> String {
    let device = roll_backends::device("flex").unwrap();
    FaceNetworks::load(directory, &config(change), &device).unwrap_err().to_string()
}

#[test]
fn missing_or_ambiguous_networks_are_listed() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let said = refusal(directory.path(), |_| ());
    assert!(said.contains("no face detector") && said.contains("no .onnx file"), "{said}");

    faces::write(directory.path());
    std::fs::rename(at("arcface_fake.onnx"), at("mine.onnx")).unwrap();
    std::fs::write(at("broken.onnx"), b"no model").unwrap();
    let said = refusal(directory.path(), |_| ());
    assert!(said.contains("no face embedder") && said.contains("mine.onnx") && said.contains("broken.onnx"), "{said}");
    assert!(said.contains("not usable"), "{said}");
    let device = roll_backends::device("flex").unwrap();
    let named = config(|c| c.embedder = Some("mine.onnx".into()));
    assert!(FaceNetworks::load(directory.path(), &named, &device).is_ok());

    std::fs::copy(at("det_fake.onnx"), at("scrfd_10g_bnkps.onnx")).unwrap();
    let said = refusal(directory.path(), |c| c.embedder = Some("mine.onnx".into()));
    assert!(said.contains("det_fake.onnx, scrfd_10g_bnkps.onnx") && said.contains("`detector`"), "{said}");
    let swapped = |c: &mut IdentityConfig| {
        (c.detector, c.embedder) = (Some("mine.onnx".into()), Some("det_fake.onnx".into()));
    };
    let said = refusal(directory.path(), swapped);
    assert!(said.contains("mine.onnx cannot be the face detector") && said.contains("SCRFD"), "{said}");
}

#[test]
fn embedder_is_recognised_by_shape() {
    // The fake embedder has 8 outputs instead of 512; only its declared shape matters.
    let directory = tempfile::tempdir().unwrap();
    faces::write(directory.path());
    let path = directory.path().join("arcface_fake.onnx");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let mut model = onnx_rs::parse(&bytes).unwrap();
    let output = &mut model.graph.as_mut().unwrap().output[0];
    let Some(onnx_rs::ast::TypeValue::Tensor(tensor)) = &mut output.r#type.as_mut().unwrap().value else { panic!() };
    tensor.shape.as_mut().unwrap().dim[1].value = onnx_rs::ast::Dimension::Value(512);
    std::fs::write(directory.path().join("face-v2.onnx"), onnx_rs::encode(&model)).unwrap();
    let device = roll_backends::device("flex").unwrap();
    let networks = FaceNetworks::load(directory.path(), &config(|_| ()), &device).unwrap();
    assert!(networks.embedder().path().ends_with("face-v2.onnx"));
}
