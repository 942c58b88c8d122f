//! The identity reward with trained networks on pictures and clips, against ONNX Runtime
//! (`tests/scripts/onnxruntime_reference.py`) and against itself.
//!
//! The demo's networks and people are always there. Networks of real faces and a real clip stand under
//! `$ROLL_TEST_DATA`, by default `../shared` beside the repository; without them each test says that it left them out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{Grad, RewardScorer, Score, Tensor, Video};
use roll_media::{ReadOptions, read_video};
use roll_rewards::insightface::align::Alignment;
use roll_rewards::insightface::{
    ChannelOrder, Face, FaceNetworks, IdentityConfig, IdentityReward, Padding, Undetected,
};

/// Networks, and the pictures they are tested on.
struct Fixture {
    /// Where the networks are.
    networks: PathBuf,
    /// Detectors by their files, and their keys in `golden`; the first one is an SCRFD.
    detectors: &'static [(&'static str, &'static str)],
    /// Side of the detectors' pictures.
    side: usize,
    /// ONNX Runtime's results for the portrait: printed by `onnxruntime_reference.py` (ONNX Runtime 1.31).
    golden: serde_json::Value,
    /// One person.
    portrait: Video,
    /// A clip of another.
    clip: PathBuf,
    /// Frames of the clip in which the face is looked for.
    sampled: Vec<usize>,
    /// Frames of the clip that are the reference in tests of gradients.
    references: [usize; 3],
    /// Frames of the clip that are scored in tests of gradients.
    scored: [usize; 2],
    /// The range of the mean cosine between two frames of `sampled`.
    alike: std::ops::Range<f64>,
}

/// The demo's fixture, and the one with real networks if they are present.
fn fixtures() -> Vec<Fixture> {
    let mut fixtures = vec![demo()];
    let root = std::env::var_os("ROLL_TEST_DATA").map_or_else(|| Path::new(ROOT).join("../shared"), PathBuf::from);
    match root.join("models").exists() && root.join("media").exists() {
        true => fixtures.push(real(&root)),
        false => {
            let why = format!("no real networks and media under {}; set ROLL_TEST_DATA", root.display());
            roll_testing::skipped(&why, Some("media"));
        }
    }
    fixtures
}

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn demo() -> Fixture {
    let root = Path::new(ROOT).join("demo/assets");
    let people = read_video(root.join("faces.png"), &ReadOptions::default()).unwrap();
    Fixture {
        networks: root.join("face"),
        detectors: &[("scrfd_demo.onnx", "scrfd")],
        side: 64,
        golden: serde_json::from_str(include_str!("face_reward/demo.json")).unwrap(),
        portrait: cut(&people, [128, 128], [112, 128]),
        clip: root.join("clips/unseen/person-12003.mp4"),
        sampled: (0..9).collect(),
        references: [0, 4, 8],
        scored: [0, 5],
        alike: 0.88..0.92,
    }
}

fn real(root: &Path) -> Fixture {
    Fixture {
        networks: root.join("models"),
        detectors: &[("scrfd_2.5g_bnkps.onnx", "scrfd"), ("yunet_s_dynamic.onnx", "yunet")],
        side: 640,
        golden: serde_json::from_str(include_str!("face_reward/golden.json")).unwrap(),
        portrait: read_video(root.join("media/astronaut.png"), &ReadOptions::default()).unwrap(),
        clip: root.join("media/carphone_pristine.mp4"),
        sampled: (0..120).step_by(12).collect(),
        references: [0, 20, 40],
        scored: [0, 39],
        alike: 0.75..0.9,
    }
}

impl Fixture {
    fn is_demo(&self) -> bool {
        self.side == 64
    }

    fn config(&self) -> IdentityConfig {
        let detector = Some(self.detectors[0].0.into());
        IdentityConfig {
            // Must not be empty; `load` reads `self.networks`.
            reward_model_path: "models".into(),
            det_size: self.side,
            detector,
            ..IdentityConfig::default()
        }
    }

    fn load(&self, config: &IdentityConfig) -> FaceNetworks {
        FaceNetworks::load(&self.networks, config, &roll_backends::device("flex").unwrap()).unwrap()
    }

    fn reward(&self, config: IdentityConfig) -> IdentityReward {
        IdentityReward::new(self.load(&config), config)
    }

    /// The frames `at` of the clip.
    fn frames(&self, at: &[usize]) -> Video {
        let options = ReadOptions { max_frames: at.iter().max().map(|last| last + 1), ..ReadOptions::default() };
        let video = read_video(&self.clip, &options).unwrap();
        let [_, h, w] = video.dims();
        let values: Vec<f32> = at.iter().flat_map(|t| video.frame(*t).to_vec()).collect();
        Video::new(Tensor::new(values, [at.len(), 3, h, w]).unwrap(), video.fps()).unwrap()
    }
}

/// `[height, width]` pixels of a picture, from the corner `[y, x]` on.
fn cut(picture: &Video, [top, left]: [usize; 2], [height, width]: [usize; 2]) -> Video {
    let [h, w] = size(picture);
    let rows = (0..3).flat_map(|plane| (top..top + height).map(move |y| (plane * h + y) * w + left));
    let values: Vec<f32> = rows.flat_map(|at| picture.frame(0)[at..at + width].to_vec()).collect();
    Video::new(Tensor::new(values, [1, 3, height, width]).unwrap(), 1.0).unwrap()
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

/// The score and its details.
fn valued(score: Score) -> (f64, BTreeMap<String, f64>) {
    match score {
        Score::Value { value, details } => (value, details),
        Score::Missing { reason } => panic!("{reason}"),
    }
}

/// The largest difference, over as many numbers as are expected.
fn largest_difference<'a>(found: impl IntoIterator<Item = &'a f32>, expected: &[f64]) -> f64 {
    found.into_iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn detectors_agree_with_onnx_runtime() {
    for fixture in fixtures() {
        for (file, key) in fixture.detectors {
            let networks = fixture.load(&IdentityConfig { detector: Some((*file).into()), ..fixture.config() });
            let face = only(networks.detect(fixture.portrait.frame(0), size(&fixture.portrait)).unwrap());
            let expected = &fixture.golden[key];
            let off = largest_difference(face.landmarks.as_flattened(), &numbers(&expected["landmarks"]))
                .max(largest_difference(&face.bounds, &numbers(&expected["box"])));
            let score = (f64::from(face.score) - expected["score"].as_f64().unwrap()).abs();
            println!("{file}: off by {off:.1e} pixels, score by {score:.1e}");
            assert!(off < 1e-2 && score < 1e-4, "{face:?}");
        }
    }
}

#[test]
fn embeddings_agree_with_onnx_runtime_in_both_channel_orders() {
    for (fixture, (order, key)) in fixtures().iter().flat_map(|fixture| ORDERS.map(|order| (fixture, order))) {
        let (picture, golden) = (&fixture.portrait, &fixture.golden);
        let networks = fixture.load(&IdentityConfig { channel_order: order, ..fixture.config() });
        let mut face = only(networks.detect(picture.frame(0), size(picture)).unwrap());
        // The same landmarks, so that only the crop and the embedder differ.
        let landmarks = numbers(&golden["scrfd"]["landmarks"]);
        face.landmarks = std::array::from_fn(|i| [landmarks[2 * i] as f32, landmarks[2 * i + 1] as f32]);
        let embedding = networks.embed(picture.frame(0), size(picture), &face).unwrap().unwrap();
        assert_eq!(embedding.len(), 512);
        let expected = &golden[key];
        // The golden file has the first 16 of the 512 numbers.
        let first_numbers = numbers(&expected["head"]);
        let largest = first_numbers.iter().fold(0f64, |m, v| m.max(v.abs()));
        let off = largest_difference(&embedding, &first_numbers) / largest;
        let norm = embedding.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let norm_off = (norm / expected["norm"].as_f64().unwrap() - 1.0).abs();
        println!("{order:?}: values off by {off:.1e} of the largest, norm by {norm_off:.1e}");
        assert!(off < 1e-4 && norm_off < 1e-4, "{off} {norm_off}");
    }
}

/// Orders of channels, and their keys in the golden numbers.
const ORDERS: [(ChannelOrder, &str); 2] = [(ChannelOrder::Rgb, "embedding_rgb"), (ChannelOrder::Bgr, "embedding_bgr")];

#[test]
fn frames_of_a_clip_match_its_person_and_not_the_portrait() {
    for fixture in fixtures() {
        let video = fixture.frames(&fixture.sampled);
        let mut reward = fixture.reward(fixture.config());
        let mut embeddings = vec![];
        for t in 0..video.dims()[0] {
            let face = only(reward.networks().detect(video.frame(t), size(&video)).unwrap());
            embeddings.push(reward.networks().embed(video.frame(t), size(&video), &face).unwrap().unwrap());
        }
        let pairs: Vec<f64> = (0..embeddings.len())
            .flat_map(|i| (0..i).map(move |j| (i, j)))
            .map(|(i, j)| cosine(&embeddings[i], &embeddings[j]))
            .collect();
        let mean = pairs.iter().sum::<f64>() / pairs.len() as f64;
        println!("between frames: mean {mean:.3}, least {:.3}", pairs.iter().copied().fold(1.0, f64::min));
        assert!(fixture.alike.contains(&mean), "{mean}");

        let mut score = |reference: &Video| {
            let target = reward.prepare(reference).unwrap();
            let (value, details) = valued(reward.score(&video, "", &target, Grad::Skip).unwrap().0);
            assert_eq!(details["frames_with_face"], video.dims()[0] as f64);
            value
        };
        let (himself, stranger) = (score(&video), score(&fixture.portrait));
        println!("clip against itself {himself:.3}, against the portrait {stranger:.3}");
        assert!(himself > 0.75 && stranger < 0.2, "{himself} {stranger}");
    }
}

/// Configurations with one changed option each, of those that change the computation once the faces are found.
fn options() -> Vec<IdentityConfig> {
    let plain = IdentityConfig::default();
    let bgr = IdentityConfig { channel_order: ChannelOrder::Bgr, ..plain.clone() };
    let aligned = IdentityConfig { align: Alignment::Reference, ..plain.clone() };
    let one_by_one = IdentityConfig { frames_per_batch: 1, ..plain.clone() };
    let sparse = IdentityConfig { sample_every: 2, ..plain };
    vec![bgr, aligned, one_by_one, sparse]
}

#[test]
fn score_gradients_match_central_differences_with_every_option() {
    for fixture in fixtures() {
        let usual = fixture.config();
        agrees_with_differences(&fixture, usual.clone());
        // The demo's networks are quick.
        if fixture.is_demo() {
            for options in options() {
                let (det_size, detector) = (usual.det_size, usual.detector.clone());
                let reward_model_path = usual.reward_model_path.clone();
                agrees_with_differences(&fixture, IdentityConfig { reward_model_path, det_size, detector, ..options });
            }
        }
    }
}

fn agrees_with_differences(fixture: &Fixture, config: IdentityConfig) {
    let every = config.sample_every;
    let named =
        format!("{:?}, {:?}, {} at once, every {every}", config.channel_order, config.align, config.frames_per_batch);
    let mut reward = fixture.reward(config);
    let target = reward.prepare(&fixture.frames(&fixture.references)).unwrap();
    let video = fixture.frames(&fixture.scored);
    let [frames, h, w] = video.dims();
    let (_, pullback) = reward.score(&video, "", &target, Grad::Record).unwrap();
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    let gradient = gradient.f32s().unwrap();

    // Detection is not differentiated: the differences are taken with the faces where they are in `video`.
    let searched: Vec<usize> = (0..frames).step_by(every).collect();
    let at: Vec<Face> =
        searched.iter().map(|t| only(reward.networks().detect(video.frame(*t), [h, w]).unwrap())).collect();
    let references: Vec<&[f32]> = target.tensors["references"].f32s().unwrap().chunks_exact(512).collect();
    let score = |values: &[f32]| {
        let of_frame = |(t, face): (&usize, &Face)| {
            let frame = &values[t * 3 * h * w..][..3 * h * w];
            let embedding = reward.networks().embed(frame, [h, w], face).unwrap().unwrap();
            references.iter().map(|r| cosine(&embedding, r)).sum::<f64>() / references.len() as f64
        };
        searched.iter().zip(&at).map(of_frame).sum::<f64>() / searched.len() as f64
    };
    let values = video.frames().f32s().unwrap();
    let noise = roll_core::Noise::new(7);
    let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
    let (mut largest_slope, mut worst) = (0f64, 0f64);
    for seed in 0..6 {
        let mut draw = noise.uniform(roll_core::Purpose::Synthetic, 0, seed);
        // The gradient with some noise. Along pure noise the slope is too small: a step that f32 can resolve crosses
        // kinks of the embedder's PReLUs, which change the score more than the slope does. The noise is constant over
        // 4x4 pixels, since white noise mostly cancels in the crop.
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
        worst = worst.max((numeric - exact).abs());
        largest_slope = largest_slope.max(exact.abs());
    }
    println!("{named}: largest difference {:.1e} of the largest slope", worst / largest_slope);
    assert!(worst < 1e-2 * largest_slope, "{named}: {worst} {largest_slope}");
}

/// The central differences are taken in float64, by the script: there a step fits between two kinks of the PReLUs.
#[test]
fn score_gradients_match_float64_differences() {
    for fixture in fixtures() {
        let slopes = &fixture.golden["slopes"];
        let mut reward = fixture.reward(fixture.config());
        let mut target = reward.prepare(&fixture.portrait).unwrap();
        let reference = (0..512).map(|i| f64::from(i).sin() as f32).collect();
        target.tensors.insert("references".into(), Tensor::new(reference, [1, 512]).unwrap());
        let (score, pullback) = reward.score(&fixture.portrait, "", &target, Grad::Record).unwrap();
        let (value, expected) = (valued(score).0, slopes["score"].as_f64().unwrap());
        assert!((value - expected).abs() < 1e-5, "{value} {expected}");
        let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
        let gradient = gradient.f32s().unwrap();
        let expected = numbers(&slopes["along"]);
        let largest = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
        let mut worst = 0f64;
        for (k, expected) in expected.iter().enumerate() {
            // The directions of `onnxruntime_reference.py`.
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
}

#[test]
fn a_video_without_a_face_has_a_gradient_only_with_landmarks_of_the_reference() {
    for fixture in fixtures() {
        let [h, w] = size(&fixture.portrait);
        let nothing = Video::new(Tensor::zeros([1, 3, h, w]), 1.0).unwrap();

        let mut plain = fixture.reward(fixture.config());
        let target = plain.prepare(&fixture.portrait).unwrap();
        let (score, pullback) = plain.score(&nothing, "", &target, Grad::Record).unwrap();
        assert!(matches!(score, Score::Missing { reason } if reason.contains("face")) && pullback.is_none());

        let mut supplied =
            fixture.reward(IdentityConfig { undetected: Undetected::ReferenceLandmarks, ..fixture.config() });
        let target = supplied.prepare(&fixture.portrait).unwrap();
        let (score, pullback) = supplied.score(&nothing, "", &target, Grad::Record).unwrap();
        assert_eq!(valued(score).1["frames_with_face"], 0.0);
        let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
        assert!(gradient.f32s().unwrap().iter().any(|g| *g != 0.0));
    }
}

#[test]
fn the_score_depends_on_sampled_frames_and_not_on_batches() {
    for fixture in fixtures() {
        let some = [0, 2, 4, 6].map(|i| fixture.sampled[i]);
        let (video, every_other) = (fixture.frames(&some), fixture.frames(&[some[0], some[2]]));
        let score = |video: &Video, config: IdentityConfig| {
            let mut reward = fixture.reward(config);
            let target = reward.prepare(&fixture.portrait).unwrap();
            valued(reward.score(video, "", &target, Grad::Skip).unwrap().0).0
        };
        let plain = score(&video, fixture.config());
        let alone = score(&video, IdentityConfig { frames_per_batch: 1, ..fixture.config() });
        assert!((plain - alone).abs() < 1e-5, "{plain} {alone}");
        let sparse = score(&video, IdentityConfig { sample_every: 2, ..fixture.config() });
        let expected = score(&every_other, fixture.config());
        assert!((sparse - expected).abs() < 1e-5 && (sparse - plain).abs() > 1e-4, "{sparse} {expected} {plain}");
    }
}

#[test]
fn detections_hardly_depend_on_normalisation_padding_and_thresholds() {
    for fixture in fixtures() {
        let found = |config: IdentityConfig| {
            only(fixture.load(&config).detect(fixture.portrait.frame(0), size(&fixture.portrait)).unwrap())
        };
        let plain = found(fixture.config());
        let side = size(&fixture.portrait).into_iter().max().unwrap() as f32;
        for config in [
            IdentityConfig { det_divisor: 128.0, ..fixture.config() },
            IdentityConfig { det_padding: Padding::Black, ..fixture.config() },
            IdentityConfig { det_threshold: 0.75, nms_iou: 0.1, ..fixture.config() },
        ] {
            let face = found(config);
            let pairs = face.landmarks.as_flattened().iter().zip(plain.landmarks.as_flattened());
            let off = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("moved by {off:.3} pixels of {side}");
            assert!(off < side / 20.0, "{off}");
        }
        let strict = fixture.load(&IdentityConfig { det_threshold: 1.0, ..fixture.config() });
        assert_eq!(strict.detect(fixture.portrait.frame(0), size(&fixture.portrait)).unwrap().len(), 0);
    }
}
