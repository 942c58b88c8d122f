//! Real face networks on a real portrait and a real clip, under `$ROLL_TEST_DATA` (default `../shared`).

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use roll_core::{Fault, Grad, Noise, Purpose, RewardScorer, Score, Target, Tensor, Video};
use roll_data::{ReadOptions, read_video};
use roll_rewards::insightface::align::{Alignment, Crop};
use roll_rewards::insightface::pooling::pooled_cosine;
use roll_rewards::insightface::{ChannelOrder, Config, FaceNetworks, IdentityReward, Undetected};

/// Measured with ONNX Runtime 1.31 and torchvision's resize.
const PORTRAIT_LANDMARKS: [[f32; 2]; 5] =
    [[204.42, 100.81], [247.31, 103.09], [223.53, 128.42], [201.16, 138.53], [246.45, 140.62]];

/// The test data, or `None` with a line that says what is skipped.
fn data(test: &str) -> Option<PathBuf> {
    let root = std::env::var_os("ROLL_TEST_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let there = root.join("models/scrfd_2.5g_bnkps.onnx").is_file() && root.join("media/astronaut.png").is_file();
    if !there {
        eprintln!("SKIPPED {test}: no models and media under {} (set ROLL_TEST_DATA)", root.display());
    }
    there.then_some(root)
}

fn config(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config { detector: Some("scrfd_2.5g_bnkps.onnx".into()), ..Config::default() };
    config.reward_model_path = "models".into();
    change(&mut config);
    config
}

fn networks(root: &std::path::Path, config: &Config) -> FaceNetworks {
    FaceNetworks::load(&root.join("models"), config, &roll_backends::device("flex").unwrap()).unwrap()
}

fn reward(root: &std::path::Path, change: impl FnOnce(&mut Config)) -> IdentityReward {
    let config = config(change);
    IdentityReward::new(networks(root, &config), config)
}

fn portrait(root: &std::path::Path) -> Video {
    read_video(root.join("media/astronaut.png"), &ReadOptions::default()).unwrap()
}

/// Frames 0, 12, 24, ... of the clip.
fn clip(root: &std::path::Path) -> Video {
    let all = read_video(root.join("media/carphone_pristine.mp4"), &ReadOptions::default()).unwrap();
    let [count, height, width] = all.dims();
    let kept: Vec<usize> = (0..count).step_by(12).collect();
    let values: Vec<f32> = kept.iter().flat_map(|&t| all.frame(t).to_vec()).collect();
    Video::new(Tensor::new(values, [kept.len(), 3, height, width]).unwrap(), 2.5).unwrap()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |m, (a, b)| m.max((a - b).abs()))
}

fn value(score: Score) -> (f64, std::collections::BTreeMap<String, f64>) {
    match score {
        Score::Value { value, details } => (value, details),
        Score::Missing { reason } => panic!("{reason}"),
    }
}

#[test]
fn scrfd_finds_the_face_of_the_portrait_where_onnx_runtime_does() {
    let Some(root) = data("scrfd on the portrait") else { return };
    let (video, networks) = (portrait(&root), networks(&root, &config(|_| ())));
    let faces = networks.detect(video.frame(0), [512, 512]).unwrap();
    let [face] = faces[..] else { panic!("{faces:?}") };
    assert!(largest_difference(&face.bounds, &[180.8, 55.7, 270.8, 178.4]) < 0.1, "{face:?}");
    assert!(largest_difference(face.landmarks.as_flattened(), PORTRAIT_LANDMARKS.as_flattened()) < 0.1, "{face:?}");
    assert!((face.score - 0.8215).abs() < 1e-3, "{face:?}");
}

#[test]
fn yunet_finds_the_same_face_within_eight_pixels() {
    let Some(root) = data("yunet on the portrait") else { return };
    let networks = networks(&root, &config(|c| c.detector = Some("yunet_s_dynamic.onnx".into())));
    let faces = networks.detect(portrait(&root).frame(0), [512, 512]).unwrap();
    let [face] = faces[..] else { panic!("{faces:?}") };
    assert!(largest_difference(face.landmarks.as_flattened(), PORTRAIT_LANDMARKS.as_flattened()) < 8.0, "{face:?}");
    assert!(face.score > 0.85, "{face:?}");
}

#[test]
fn embeddings_are_those_of_onnx_runtime_in_both_channel_orders() {
    let Some(root) = data("embeddings of the portrait") else { return };
    let video = portrait(&root);
    let crop = Crop::new(&PORTRAIT_LANDMARKS, [512, 512], Alignment::Exact).unwrap().forward(video.frame(0));
    // Every 64th value, from ONNX Runtime 1.31 on a crop computed by NumPy in f64; then the largest of all.
    let golden = [
        (
            ChannelOrder::Rgb,
            [0.138_617, 0.158_998_9, 0.062_812_2, -0.095_437_1, -0.138_385_4, -0.045_702_8, 0.072_040_1, 0.101_695_7],
            0.562_031_6,
        ),
        (
            ChannelOrder::Bgr,
            [0.125_416_7, 0.114_401_9, 0.025_964_6, -0.106_873_2, -0.122_485_6, -0.016_718_6, 0.033_919_8, 0.128_203],
            0.603_827_3,
        ),
    ];
    for (order, expected, largest) in golden {
        let networks = networks(&root, &config(|c| c.channel_order = order));
        let embedding = networks.embedder().embed(crop.clone()).unwrap();
        assert_eq!(embedding.width, 512);
        let found: Vec<f32> = embedding.values.iter().copied().step_by(64).collect();
        let off = largest_difference(&found, &expected) / largest;
        println!("{order:?}: largest difference from ONNX Runtime {off:.1e} of the largest value");
        assert!(off < 1e-4, "{order:?}: {off}");
    }
}

#[test]
fn the_clip_shows_one_man_and_the_portrait_somebody_else() {
    let Some(root) = data("clip against portrait") else { return };
    let mut reward = reward(&root, |_| ());
    let (clip, portrait) = (clip(&root), portrait(&root));
    let own = reward.prepare(&clip).unwrap();
    let (same, details) = value(reward.score(&clip, "", &own, Grad::Skip).unwrap().0);
    println!("clip against itself {same:.3}, {details:?}");
    assert_eq!(details["frames_with_face"], details["frames"], "a face in every sampled frame");
    assert!((0.7..0.95).contains(&same), "{same}");
    let other = reward.prepare(&portrait).unwrap();
    let (different, _) = value(reward.score(&clip, "", &other, Grad::Skip).unwrap().0);
    println!("clip against the portrait {different:.3}");
    assert!(different < 0.2, "{different}");
}

/// Where the face is is not differentiated, so the differences are taken at the face that was found.
#[test]
fn the_gradient_of_the_identity_score_agrees_with_central_differences() {
    let Some(root) = data("gradient of the identity score") else { return };
    let video = portrait(&root);
    let frame = video.frame(0);
    let mirrored: Vec<f32> = frame.chunks_exact(512).flat_map(|row| row.iter().rev().copied()).collect();
    let mirrored = Video::new(Tensor::new(mirrored, [1, 3, 512, 512]).unwrap(), 1.0).unwrap();
    let mut reward = reward(&root, |_| ());
    let target = reward.prepare(&mirrored).unwrap();
    let (score, pullback) = reward.score(&video, "", &target, Grad::Record).unwrap();
    let (score, _) = value(score);
    println!("score {score:.4} against the mirrored portrait");
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap().to_f32_vec();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let norm = dot(&gradient, &gradient).sqrt();

    let face = reward.networks().detect(frame, [512, 512]).unwrap()[0];
    let crop = Crop::new(&face.landmarks, [512, 512], Alignment::Exact).unwrap();
    let references = target.tensors["references"].f32s().unwrap();
    for seed in 1..4 {
        let noise = Noise::new(seed).normal(Purpose::Synthetic, 0, 0, &[frame.len()]).unwrap();
        // Noise with a share of the gradient, so that the difference stands above the rounding of the networks.
        let direction: Vec<f32> =
            noise.f32s().unwrap().iter().zip(&gradient).map(|(d, g)| 0.05 * d + 5.0 * (f64::from(*g) / norm) as f32).collect();
        let at = |step: f32| {
            let moved: Vec<f32> = frame.iter().zip(&direction).map(|(f, d)| f + step * d).collect();
            let embedding = reward.networks().embedder().embed(crop.forward(&moved)).unwrap();
            pooled_cosine(&embedding.values, &[true], references, &[true], 512).value
        };
        let (numeric, exact) = ((at(0.004) - at(-0.004)) / 0.008, dot(&direction, &gradient));
        let off = (numeric - exact).abs() / exact.abs();
        println!("direction {seed}: difference {numeric:.6}, gradient {exact:.6}, off by {off:.1e}");
        assert!(off < 1e-2, "{numeric} {exact}");
    }
}

#[test]
fn frames_without_a_face_are_left_out_or_take_the_reference_s_place() {
    let Some(root) = data("frames without a face") else { return };
    let video = portrait(&root);
    let grey = vec![0.0; video.frame(0).len()];
    let two = [video.frame(0), &grey].concat();
    let two = Video::new(Tensor::new(two, [2, 3, 512, 512]).unwrap(), 1.0).unwrap();
    let nothing = Video::new(Tensor::new(grey, [1, 3, 512, 512]).unwrap(), 1.0).unwrap();

    let mut plain = reward(&root, |_| ());
    let target = plain.prepare(&video).unwrap();
    let (_, details) = value(plain.score(&two, "", &target, Grad::Skip).unwrap().0);
    assert_eq!([details["frames"], details["frames_with_face"]], [2.0, 1.0]);
    let (score, pullback) = plain.score(&nothing, "", &target, Grad::Record).unwrap();
    assert!(matches!(score, Score::Missing { reason } if reason.contains("face")) && pullback.is_none());

    let mut supplied = reward(&root, |c| c.undetected = Undetected::ReferenceLandmarks);
    let target = supplied.prepare(&video).unwrap();
    let (score, pullback) = supplied.score(&nothing, "", &target, Grad::Record).unwrap();
    assert_eq!(value(score).1["frames_with_face"], 0.0);
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    assert!(gradient.f32s().unwrap().iter().any(|g| *g != 0.0), "there is a gradient before there is a face");
}

#[test]
fn a_reference_without_a_face_is_the_user_s_to_mend() {
    let Some(root) = data("reference without a face") else { return };
    let grey = Video::new(Tensor::zeros([3, 3, 64, 64]), 1.0).unwrap();
    let error = reward(&root, |_| ()).prepare(&grey).unwrap_err();
    assert!(error.fault() == Fault::User && error.to_string().contains("face"), "{error}");
    assert!(reward(&root, |_| ()).score(&portrait(&root), "", &Target::default(), Grad::Skip).is_err());
}
