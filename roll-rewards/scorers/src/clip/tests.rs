//! Model directories with random weights, compared with `transformers` (`tests/data/make_clip.py`).
#![allow(clippy::unwrap_used)]

use roll_core::one_line;
use roll_core::{Verdict, check_reward};
use serde_json::Value as Json;

use super::*;
use crate::picture::Preprocess;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn context() -> BuildContext {
    let backend = std::env::var("ROLL_TEST_BACKEND").unwrap_or("flex".into());
    BuildContext::new(backend)
}

fn load(directory: &Path, change: impl FnOnce(&mut ClipRewardConfig)) -> Result<ClipReward> {
    let mut config =
        ClipRewardConfig { path: directory.display().to_string(), frames: Frames::All, ..ClipRewardConfig::default() };
    change(&mut config);
    ClipReward::load(config, &context())
}

fn numbers(json: &Json) -> Vec<f32> {
    json.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

/// The picture of the Python script, as a video of one frame.
fn picture(height: usize, width: usize) -> Video {
    let value = |c: usize, y: usize, x: usize| {
        let (c, y, x) = (c as f64, y as f64, x as f64);
        let waves = (0.11 * x + 0.7 * c).sin() + (0.07 * y - 0.03 * x + c).sin();
        (127.5 + 48.0 * (waves + 0.5 * (0.9 * x * 0.31 + 1.3 * y * 0.17).sin())).floor() as f32 / 127.5 - 1.0
    };
    let pixels = (0..3).flat_map(|c| (0..height).flat_map(move |y| (0..width).map(move |x| value(c, y, x))));
    Video::new(Tensor::new(pixels.collect(), [1, 3, height, width]).unwrap(), 8.0).unwrap()
}

/// The largest difference, relative to the largest expected value.
fn apart(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1e-12f32, |m, v| m.max(v.abs()));
    found.iter().zip(expected).fold(0f32, |w, (f, e)| w.max((f - e).abs() / largest))
}

fn scored(reward: &mut ClipReward, video: &Video, prompt: &str, target: &Target) -> (f64, Vec<f32>) {
    let (score, pullback) = reward.score(video, prompt, target, Grad::Record).unwrap();
    let Score::Value { value, .. } = score else { panic!("{score:?}") };
    (value, pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap().to_f32_vec())
}

/// Prints one row of the parity table.
fn compare(directory: &Path) {
    let golden: Json = serde_json::from_slice(&std::fs::read(directory.join("golden.json")).unwrap()).unwrap();
    let [height, width]: [usize; 2] = serde_json::from_value(golden["size"].clone()).unwrap();
    let stride = golden["stride"].as_u64().unwrap() as usize;
    let sparse = |values: Vec<f32>| values.into_iter().step_by(stride).collect::<Vec<f32>>();
    let video = picture(height, width);
    let texts: Vec<String> = serde_json::from_value(golden["texts"].clone()).unwrap();

    let mut reward = load(directory, |_| ()).unwrap();
    let prepared = Preprocess::new(&reward.input, [height, width]).unwrap();
    let pixels = sparse(prepared.forward(video.frame(0)));
    let (floats, eight_bits) = (numbers(&golden["pixels"]), numbers(&golden["processor"]));
    let steps = pixels.iter().zip(&floats).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
    // The processor rounds to 8 bits after each of two passes; a value here is a pixel divided by about 0.27.
    let rounding = pixels.iter().zip(&eight_bits).map(|(a, b)| (a - b).abs()).sum::<f32>() / pixels.len() as f32 * 0.27;

    let mut text = 0f32;
    for (i, prompt) in texts.iter().enumerate() {
        let tower = reward.text.as_ref().unwrap();
        let ids: Vec<u32> = serde_json::from_value(golden["ids"][i].clone()).unwrap();
        assert_eq!(tower.tokens(prompt).unwrap(), ids, "{prompt}");
        text = text.max(apart(&tower.embed(prompt).unwrap(), &numbers(&golden["text"][i])));
    }
    let image = apart(&reward.scorer().rows(&video).unwrap()[0], &numbers(&golden["image"]));
    let cosines: Vec<f64> = serde_json::from_value(golden["cosine"].clone()).unwrap();
    let mut cosine = 0f64;
    for (prompt, expected) in texts.iter().zip(&cosines).skip(1) {
        let (score, _) = reward.score(&video, prompt, &Target::default(), Grad::Skip).unwrap();
        let Score::Value { value, .. } = score else { panic!("{score:?}") };
        cosine = cosine.max((value - expected).abs());
    }
    let (value, slope) = scored(&mut reward, &video, &texts[0], &Target::default());
    cosine = cosine.max((value - cosines[0]).abs());
    let gradient = apart(&sparse(slope), &numbers(&golden["gradient"]));
    drop(reward);

    let mut logit =
        load(directory, |c| (c.score, c.against) = (Scale::Logit, Against::Text(texts[0].clone()))).unwrap();
    let factor = golden["factor"].as_f64().unwrap();
    let (score, _) = logit.score(&video, "not read", &Target::default(), Grad::Skip).unwrap();
    let Score::Value { value: pick, .. } = score else { panic!("{score:?}") };
    let bias = golden["bias"].as_f64().unwrap_or(0.0);
    let pick = (pick - (factor * cosines[0] + bias)).abs() / factor;
    drop(logit);

    let head = directory.join("head.safetensors").display().to_string();
    let mut rated = load(directory, |c| c.head = Some(head)).unwrap();
    let (rate, slope) = scored(&mut rated, &video, "", &Target::default());
    let aesthetic = (rate - golden["aesthetic"].as_f64().unwrap()).abs();
    let aesthetic_gradient = apart(&sparse(slope), &numbers(&golden["aesthetic_gradient"]));
    eprintln!(
        "| {} | {steps:.1e} | {rounding:.1e} | {text:.1e} | {image:.1e} | {cosine:.1e} | {gradient:.1e} | {pick:.1e} | \
         {aesthetic:.1e} | {aesthetic_gradient:.1e} |",
        directory.file_name().unwrap().to_string_lossy()
    );
    // The mean error of one rounding is 1/1020.
    assert!(steps < 1e-4 && rounding < 1.5e-3, "pixels: {steps} {rounding}");
    assert!(text < 1e-5 && image < 1e-5 && cosine < 1e-5, "{text} {image} {cosine}");
    assert!(pick < 1e-5 && aesthetic < 1e-5, "{pick} {aesthetic}");
    assert!(gradient < 1e-4 && aesthetic_gradient < 1e-4, "{gradient} {aesthetic_gradient}");
}

const HEADER: &str = "| directory | pixels (floats) | pixels (8 bits, mean) | text | image | cosine | its gradient | \
                      factor * cosine | aesthetic | its gradient |";

#[test]
fn small_towers_match_transformers() {
    eprintln!("{HEADER}");
    compare(&data("clip_tiny"));
    compare(&data("clip_tiny_gelu"));
    compare(&data("siglip_tiny"));
}

#[test]
fn towers_of_the_published_sizes_are_those_of_transformers() {
    let Some(root) = std::env::var_os("ROLL_TEST_CLIP").map(PathBuf::from) else {
        roll_testing::skip!("ROLL_TEST_CLIP names no directory of tests/data/make_clip.py", needs = "clip");
    };
    eprintln!("{HEADER}");
    for name in ["vit-b-32", "vit-l-14", "vit-h-14", "siglip-b-16"] {
        compare(&root.join(name));
    }
}

#[test]
fn weights_of_open_clip_score_as_hpsv2_and_a_pth_head_as_the_aesthetic_predictor() {
    let own = data("open_clip_tiny");
    let golden: Json = serde_json::from_slice(&std::fs::read(own.join("golden.json")).unwrap()).unwrap();
    let file = |name: &str| Some(own.join(name).display().to_string());
    let open = |change: &dyn Fn(&mut ClipRewardConfig)| {
        load(&data("clip_tiny_gelu"), |c| {
            (c.weights, c.fit) = (file("weights.pt"), Some(Fit::Letterbox));
            change(c);
        })
    };
    let texts: Vec<String> = serde_json::from_value(golden["texts"].clone()).unwrap();
    let cosines: Vec<f64> = serde_json::from_value(golden["cosine"].clone()).unwrap();
    let [height, width]: [usize; 2] = serde_json::from_value(golden["size"].clone()).unwrap();
    let (video, number) = (picture(height, width), |name: &str| golden[name].as_f64().unwrap());

    let mut reward = open(&|_| ()).unwrap();
    let prepared = Preprocess::new(&reward.input, [height, width]).unwrap();
    let pixels = apart(&prepared.forward(video.frame(0)), &numbers(&golden["pixels"]));
    let image = apart(&reward.scorer().rows(&video).unwrap()[0], &numbers(&golden["image"]));
    assert!(pixels < 1e-5 && image < 1e-5, "{pixels} {image}");
    for (i, (text, expected)) in texts.iter().zip(&cosines).enumerate() {
        let found = reward.text.as_ref().unwrap().embed(text).unwrap();
        assert!(apart(&found, &numbers(&golden["text"][i])) < 1e-5, "{text}");
        let found = scored(&mut reward, &video, text, &Target::default()).0;
        assert!((found - expected).abs() < 1e-6, "{text}: {found}, expected {expected}");
    }
    let along = |gradient: Vec<f32>| -> f64 {
        gradient.iter().enumerate().map(|(i, slope)| f64::from(*slope) * (i as f64).sin()).sum()
    };
    let found = along(scored(&mut reward, &video, &texts[0], &Target::default()).1);
    assert!((found - number("cosine_slope")).abs() < 1e-4 * number("cosine_slope").abs(), "{found}");
    let found = scored(&mut open(&|c| c.score = Scale::Logit).unwrap(), &video, &texts[0], &Target::default()).0;
    assert!((found - number("factor") * cosines[0]).abs() < 1e-4, "{found}");

    let mut rated = open(&|c| c.head = file("head.pth")).unwrap();
    let (found, slope) = scored(&mut rated, &video, "", &Target::default());
    assert!((found - number("aesthetic")).abs() < 1e-5, "{found}");
    assert!((along(slope) - number("aesthetic_slope")).abs() < 1e-4 * number("aesthetic_slope").abs());

    // The directory's own preprocessing is not that of HPSv2, which loses no part of the frame.
    let cropped = scored(&mut open(&|c| c.fit = None).unwrap(), &video, &texts[0], &Target::default()).0;
    assert!((cropped - cosines[0]).abs() > 1e-3, "{cropped}");
}

#[test]
fn weights_may_lie_outside_the_directory_and_are_those_of_its_model() {
    let outside = tempfile::tempdir().unwrap();
    let file = outside.path().join("weights.safetensors");
    std::fs::copy(data("clip_tiny/model.safetensors"), &file).unwrap();
    let with = |weights: &Path| Some(weights.display().to_string());
    let of = |weights: Option<String>| {
        let mut reward = load(&data("clip_tiny"), |c| c.weights = weights).unwrap();
        scored(&mut reward, &picture(30, 40), "a dog", &Target::default())
    };
    assert_eq!(of(with(&file)), of(None));
    let own = data("open_clip_tiny/weights.pt");
    let refused =
        |directory: &str| one_line(&load(&data(directory), |c| c.weights = with(&own)).map(drop).unwrap_err());
    let problem = refused("siglip_tiny");
    assert!(problem.contains("weights.pt: expected `token_embedding.weight` of [35, 32]"), "{problem}");
}

#[test]
fn gradients_of_every_score_match_finite_differences() {
    let head = data("clip_tiny/head.safetensors").display().to_string();
    let cases: [Box<dyn FnOnce(&mut ClipRewardConfig)>; 4] = [
        Box::new(|_| ()),
        Box::new(|c| (c.score, c.over_frames) = (Scale::Logit, OverFrames::Min)),
        Box::new(|c| (c.against, c.frames) = (Against::Reference, Frames::Uniform(3))),
        Box::new(|c| (c.head, c.over_frames) = (Some(head), OverFrames::Last)),
    ];
    for change in cases {
        let mut reward = load(&data("clip_tiny"), change).unwrap();
        let findings = check_reward(&mut reward, 4);
        assert!(findings.iter().all(|f| f.verdict == Verdict::Kept), "{:?}: {findings:#?}", reward.config);
    }
    for score in [Scale::Cosine, Scale::Logit, Scale::Probability] {
        let mut reward = load(&data("siglip_tiny"), |c| c.score = score).unwrap();
        let findings = check_reward(&mut reward, 4);
        assert!(findings.iter().all(|f| f.verdict == Verdict::Kept), "SigLIP, {score:?}: {findings:#?}");
    }
}

#[test]
fn probability_is_sigmoid_of_logit_and_siglip_only() {
    let text = "a photo of a cat";
    let of = |score| {
        let mut reward = load(&data("siglip_tiny"), |c| c.score = score).unwrap();
        scored(&mut reward, &picture(30, 40), text, &Target::default())
    };
    let ((logit, slope), (probability, own)) = (of(Scale::Logit), of(Scale::Probability));
    let expected = 1.0 / (1.0 + (-logit).exp());
    assert!((probability - expected).abs() < 1e-9 && (1e-4..1.0 - 1e-4).contains(&expected), "{logit} {probability}");
    let part = (expected * (1.0 - expected)) as f32;
    assert!(apart(&own, &slope.iter().map(|g| part * g).collect::<Vec<_>>()) < 1e-5);
    let refused = load(&data("clip_tiny"), |c| c.score = Scale::Probability).map(drop).unwrap_err();
    assert!(one_line(&refused).contains("reward.score"), "{}", one_line(&refused));
}

#[test]
fn video_equal_to_its_reference_scores_one() {
    let mut reward = load(&data("clip_tiny"), |c| c.against = Against::Reference).unwrap();
    let target = reward.prepare(&picture(30, 40)).unwrap();
    assert!((scored(&mut reward, &picture(30, 40), "", &target).0 - 1.0).abs() < 1e-6);
    assert!(reward.score(&picture(30, 40), "", &Target::default(), Grad::Skip).is_err());
}

#[test]
fn an_empty_prompt_is_warned_of_once() {
    let mut reward = load(&data("clip_tiny"), |_| ()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let writer = std::sync::Mutex::new(file.reopen().unwrap());
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
    tracing::subscriber::with_default(subscriber, || {
        for prompt in ["a dog", " ", ""] {
            reward.score(&picture(30, 40), prompt, &Target::default(), Grad::Skip).unwrap();
        }
    });
    let log = std::fs::read_to_string(file.path()).unwrap();
    assert_eq!(log.matches("empty prompt").count(), 1, "{log}");
}

#[test]
fn directory_errors_name_file_and_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let told = |damage: &dyn Fn(&Path)| {
        for entry in std::fs::read_dir(data("clip_tiny")).unwrap() {
            let from = entry.unwrap().path();
            std::fs::copy(&from, dir.path().join(from.file_name().unwrap())).unwrap();
        }
        damage(dir.path());
        one_line(&load(dir.path(), |_| ()).map(drop).unwrap_err())
    };
    let edit = |file: &'static str, from: &'static str, to: &'static str| {
        move |dir: &Path| {
            let text = std::fs::read_to_string(dir.join(file)).unwrap();
            assert!(text.contains(from), "{file} has no {from}");
            std::fs::write(dir.join(file), text.replace(from, to)).unwrap();
        }
    };
    let remove = |file: &'static str| move |dir: &Path| std::fs::remove_file(dir.join(file)).unwrap();
    let cut = |dir: &Path| {
        let path = dir.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    };
    let cases: [(&dyn Fn(&Path), &str); 8] = [
        (&edit("config.json", "\"projection_dim\": 20", "\"projection_dim\": 21"), "text_projection.weight"),
        (&edit("config.json", "\"model_type\": \"clip\"", "\"model_type\": \"blip\""), "found `blip`"),
        (&edit("config.json", "\"patch_size\": 8", "\"patch_size\": 0"), "no whole number of patches"),
        (&edit("config.json", "\"patch_size\": 8", "\"patch_size\": 8, \"layer_norm_eps\": -1"), "found -1"),
        (&edit("preprocessor_config.json", "\"resample\": 3", "\"resample\": 9"), "`resample` 9"),
        (&remove("tokenizer.json"), "tokenizer.json"),
        (&remove("model.safetensors"), "no model.safetensors"),
        (&cut, "truncated: expected a file of"),
    ];
    for (damage, part) in cases {
        let told = told(damage);
        assert!(told.contains(part), "no {part} in: {told}");
    }
    assert!(one_line(&load(Path::new(""), |_| ()).map(drop).unwrap_err()).contains("reward.path"));
    // transformers 5 saves the preprocessing as a part of processor_config.json.
    let as_processor = |dir: &Path| {
        let text = std::fs::read_to_string(dir.join("preprocessor_config.json")).unwrap();
        let text = format!("{{\"image_processor\": {}}}", text.replace("\"resample\": 3", "\"resample\": 9"));
        std::fs::write(dir.join("processor_config.json"), text).unwrap();
        std::fs::remove_file(dir.join("preprocessor_config.json")).unwrap();
    };
    let told_of_processor = told(&as_processor);
    assert!(told_of_processor.contains("`resample` 9") && told_of_processor.contains("/processor_config.json"));
    let both = |c: &mut ClipRewardConfig| (c.head, c.score) = (Some("x".into()), Scale::Logit);
    assert!(one_line(&load(&data("clip_tiny"), both).map(drop).unwrap_err()).contains("reward.head"));
}
