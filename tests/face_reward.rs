//! The identity reward with real networks on real pictures, against ONNX Runtime
//! (`tests/scripts/onnxruntime_reference.py`) and against itself.
//!
//! Networks and media stand under `$ROLL_TEST_DATA`, by default `../shared` beside the repository; without them the
//! tests say that they were skipped.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use roll_core::{Grad, RewardScorer, Score, Tensor, Video};
use roll_data::{ReadOptions, read_video};
use roll_rewards::insightface::{ChannelOrder, Config, Face, FaceNetworks, IdentityReward, Undetected};

const SCRFD: &str = "scrfd_2.5g_bnkps.onnx";
const YUNET: &str = "yunet_s_dynamic.onnx";

/// The directory, or a visible line.
fn data() -> Option<PathBuf> {
    let root = std::env::var_os("ROLL_TEST_DATA")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"));
    let there = root.join("models").join(SCRFD).exists() && root.join("media/astronaut.png").exists();
    if !there {
        // Past the capture of the test runner: a skipped test must not look like a passed one.
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIPPED: no models and media under {}; set ROLL_TEST_DATA\n", root.display()),
        );
    }
    there.then_some(root)
}

fn config(detector: &str, channel_order: ChannelOrder) -> Config {
    Config { reward_model_path: "models".into(), detector: Some(detector.into()), channel_order, ..Config::default() }
}

fn networks(root: &std::path::Path, config: &Config) -> FaceNetworks {
    FaceNetworks::load(&root.join("models"), config, &roll_backends::device("flex").unwrap()).unwrap()
}

fn portrait(root: &std::path::Path) -> Video {
    read_video(root.join("media/astronaut.png"), &ReadOptions::default()).unwrap()
}

/// Every `step`-th frame of the first `count`.
fn clip(root: &std::path::Path, count: usize, step: usize) -> Video {
    let options = ReadOptions { max_frames: Some(count), ..ReadOptions::default() };
    let video = read_video(root.join("media/carphone_pristine.mp4"), &options).unwrap();
    let [frames, h, w] = video.dims();
    let values: Vec<f32> = (0..frames).step_by(step).flat_map(|t| video.frame(t).to_vec()).collect();
    let kept = frames.div_ceil(step);
    Video::new(Tensor::new(values, [kept, 3, h, w]).unwrap(), video.fps()).unwrap()
}

fn size(video: &Video) -> [usize; 2] {
    let [_, h, w] = video.dims();
    [h, w]
}

fn only(mut faces: Vec<Face>) -> Face {
    assert_eq!(faces.len(), 1, "{faces:?}");
    faces.remove(0)
}

fn numbers(json: &serde_json::Value) -> Vec<f64> {
    match json {
        serde_json::Value::Array(items) => items.iter().flat_map(numbers).collect(),
        number => vec![number.as_f64().unwrap()],
    }
}

fn furthest<'a>(found: impl IntoIterator<Item = &'a f32>, expected: &[f64]) -> f64 {
    found.into_iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn golden() -> serde_json::Value {
    serde_json::from_str(include_str!("face_reward/golden.json")).unwrap()
}

#[test]
fn both_detectors_find_the_portraits_face_where_onnx_runtime_does() {
    let Some(root) = data() else { return };
    let (picture, golden) = (portrait(&root), golden());
    for (file, key) in [(SCRFD, "scrfd"), (YUNET, "yunet")] {
        let networks = networks(&root, &config(file, ChannelOrder::Rgb));
        let face = only(networks.detect(picture.frame(0), size(&picture)).unwrap());
        let expected = &golden[key];
        let off = furthest(face.landmarks.as_flattened(), &numbers(&expected["landmarks"]))
            .max(furthest(&face.bounds, &numbers(&expected["box"])));
        let score = (f64::from(face.score) - expected["score"].as_f64().unwrap()).abs();
        println!("{file}: off by {off:.1e} pixels, score by {score:.1e}");
        assert!(off < 1e-2 && score < 1e-4, "{face:?}");
    }
}

#[test]
fn embeddings_agree_with_onnx_runtime_in_both_channel_orders() {
    let Some(root) = data() else { return };
    let (picture, golden) = (portrait(&root), golden());
    for (order, key) in [(ChannelOrder::Rgb, "embedding_rgb"), (ChannelOrder::Bgr, "embedding_bgr")] {
        let networks = networks(&root, &config(SCRFD, order));
        let mut face = only(networks.detect(picture.frame(0), size(&picture)).unwrap());
        // The same landmarks, so that only the crop and the embedder differ.
        let landmarks = numbers(&golden["scrfd"]["landmarks"]);
        face.landmarks = std::array::from_fn(|i| [landmarks[2 * i] as f32, landmarks[2 * i + 1] as f32]);
        let embedding = networks.embed(picture.frame(0), size(&picture), &face).unwrap().unwrap();
        assert_eq!(embedding.len(), 512);
        let expected = &golden[key];
        let head = numbers(&expected["head"]);
        let largest = head.iter().fold(0f64, |m, v| m.max(v.abs()));
        let off = furthest(&embedding, &head) / largest;
        let norm = embedding.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let norm_off = (norm / expected["norm"].as_f64().unwrap() - 1.0).abs();
        println!("{order:?}: values off by {off:.1e} of the largest, norm by {norm_off:.1e}");
        assert!(off < 1e-4 && norm_off < 1e-4, "{off} {norm_off}");
    }
}

#[test]
fn the_talking_head_has_one_face_in_every_frame_and_is_himself_but_not_the_portrait() {
    let Some(root) = data() else { return };
    let (video, picture) = (clip(&root, 120, 12), portrait(&root));
    let config = config(SCRFD, ChannelOrder::Rgb);
    let networks = networks(&root, &config);
    let mut embeddings = vec![];
    for t in 0..video.dims()[0] {
        let face = only(networks.detect(video.frame(t), size(&video)).unwrap());
        embeddings.push(networks.embed(video.frame(t), size(&video), &face).unwrap().unwrap());
    }
    let pairs: Vec<f64> = (0..embeddings.len())
        .flat_map(|i| (0..i).map(move |j| (i, j)))
        .map(|(i, j)| cosine(&embeddings[i], &embeddings[j]))
        .collect();
    let mean = pairs.iter().sum::<f64>() / pairs.len() as f64;
    println!("between frames: mean {mean:.3}, least {:.3}", pairs.iter().copied().fold(1.0, f64::min));
    assert!((0.75..0.9).contains(&mean), "{mean}");

    let mut reward = IdentityReward::new(networks, config);
    let score = |reward: &mut IdentityReward, reference: &Video| {
        let target = reward.prepare(reference).unwrap();
        match reward.score(&video, "", &target, Grad::Skip).unwrap().0 {
            Score::Value { value, details } => {
                assert_eq!(details["frames_with_face"], video.dims()[0] as f64);
                value
            }
            Score::Missing { reason } => panic!("{reason}"),
        }
    };
    let (himself, stranger) = (score(&mut reward, &video), score(&mut reward, &picture));
    println!("clip against itself {himself:.3}, against the portrait {stranger:.3}");
    assert!(himself > 0.75 && stranger < 0.2, "{himself} {stranger}");
}

#[test]
fn the_gradient_of_the_score_agrees_with_central_differences() {
    let Some(root) = data() else { return };
    let config = config(SCRFD, ChannelOrder::Rgb);
    let mut reward = IdentityReward::new(networks(&root, &config), config);
    let target = reward.prepare(&clip(&root, 60, 20)).unwrap();
    let video = clip(&root, 40, 39); // two frames
    let [frames, h, w] = video.dims();
    let (_, pullback) = reward.score(&video, "", &target, Grad::Record).unwrap();
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    let gradient = gradient.f32s().unwrap();

    // Detection is not differentiated: the differences are taken with the faces where they are in `video`.
    let at: Vec<Face> = (0..frames).map(|t| only(reward.networks().detect(video.frame(t), [h, w]).unwrap())).collect();
    let references: Vec<&[f32]> = target.tensors["references"].f32s().unwrap().chunks_exact(512).collect();
    let score = |values: &[f32]| {
        let of_frame = |(frame, face): (&[f32], &Face)| {
            let embedding = reward.networks().embed(frame, [h, w], face).unwrap().unwrap();
            references.iter().map(|r| cosine(&embedding, r)).sum::<f64>() / references.len() as f64
        };
        values.chunks_exact(3 * h * w).zip(&at).map(of_frame).sum::<f64>() / frames as f64
    };
    let values = video.frames().f32s().unwrap();
    let noise = roll_core::Noise::new(7);
    let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
    let (mut along_random, mut worst) = (0f64, 0f64);
    for seed in 0..6 {
        let mut draw = noise.uniform(roll_core::Purpose::Synthetic, 0, seed);
        // Random, with a share of the gradient: along a purely random direction the kinks of the embedder's PReLUs
        // bend the score by more than the slope, at any step that stands above rounding. Smooth over 4x4 pixels, since
        // white noise mostly cancels in the crop.
        let coarse: Vec<f32> = (0..frames * 3 * h.div_ceil(4) * w.div_ceil(4)).map(|_| draw()).collect();
        let direction: Vec<f32> = (0..values.len())
            .map(|i| {
                let (x, y, plane) = (i % w, i / w % h, i / (w * h));
                let random = coarse[(plane * h.div_ceil(4) + y / 4) * w.div_ceil(4) + x / 4];
                0.05 * random + 5.0 * gradient[i] / norm
            })
            .collect();
        let moved = |step: f32| score(&values.iter().zip(&direction).map(|(v, d)| v + step * d).collect::<Vec<f32>>());
        let step = 0.0005;
        let numeric = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
        let exact: f64 = direction.iter().zip(gradient).map(|(d, g)| f64::from(*d) * f64::from(*g)).sum();
        println!("direction {seed}: difference {numeric:+.5e}, gradient {exact:+.5e}");
        worst = worst.max((numeric - exact).abs());
        along_random = along_random.max(exact.abs());
    }
    println!("largest difference {:.1e} of the largest slope", worst / along_random);
    assert!(worst < 1e-2 * along_random, "{worst} {along_random}");
}

/// The central differences are taken in float64, by PyTorch: there a step fits between two kinks of the PReLUs.
#[test]
fn the_gradient_of_the_score_agrees_with_float64_differences_along_random_directions() {
    let Some(root) = data() else { return };
    let (picture, golden) = (portrait(&root), golden());
    let config = config(SCRFD, ChannelOrder::Rgb);
    let mut reward = IdentityReward::new(networks(&root, &config), config);
    let mut target = reward.prepare(&picture).unwrap();
    let reference = (0..512).map(|i| f64::from(i).sin() as f32).collect();
    target.tensors.insert("references".into(), Tensor::new(reference, [1, 512]).unwrap());
    let (score, pullback) = reward.score(&picture, "", &target, Grad::Record).unwrap();
    let Score::Value { value, .. } = score else { panic!("{score:?}") };
    let expected = golden["slopes"]["score"].as_f64().unwrap();
    assert!((value - expected).abs() < 1e-5, "{value} {expected}");
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    let gradient = gradient.f32s().unwrap();
    let expected = numbers(&golden["slopes"]["along"]);
    let largest = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
    let mut worst = 0f64;
    for (k, expected) in expected.iter().enumerate() {
        let random = |i: usize| {
            let x = (i as f64 * 12.9898 + k as f64 * 78.233).sin() * 43758.5453;
            x - x.floor() - 0.5
        };
        let slope: f64 = gradient.iter().enumerate().map(|(i, g)| f64::from(*g) * random(i)).sum();
        worst = worst.max((slope - expected).abs() / largest);
    }
    println!("slopes off by at most {worst:.1e} of the largest");
    assert!(worst < 1e-2, "{worst}");
}

#[test]
fn a_video_without_a_face_has_a_gradient_where_the_reference_shows_one() {
    let Some(root) = data() else { return };
    let reference = portrait(&root);
    let [h, w] = size(&reference);
    let nothing = Video::new(Tensor::zeros([1, 3, h, w]), 1.0).unwrap();
    let config = config(SCRFD, ChannelOrder::Rgb);

    let mut plain = IdentityReward::new(networks(&root, &config), config.clone());
    let target = plain.prepare(&reference).unwrap();
    let (score, pullback) = plain.score(&nothing, "", &target, Grad::Record).unwrap();
    assert!(matches!(score, Score::Missing { reason } if reason.contains("face")) && pullback.is_none());

    let config = Config { undetected: Undetected::ReferenceLandmarks, ..config };
    let mut supplied = IdentityReward::new(networks(&root, &config), config);
    let target = supplied.prepare(&reference).unwrap();
    let (score, pullback) = supplied.score(&nothing, "", &target, Grad::Record).unwrap();
    assert!(matches!(score, Score::Value { details, .. } if details["frames_with_face"] == 0.0));
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    assert!(gradient.f32s().unwrap().iter().any(|g| *g != 0.0));
}
