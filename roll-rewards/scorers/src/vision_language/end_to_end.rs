//! Parity of scores and gradients with the published code, on tiny networks, in f32 on the CPU; `tests/parity` has every backend.

use std::collections::BTreeMap;

// The network registers itself under `qwen_vl`.
use roll_qwen_vl as _;

use roll_core::{BuildContext, Component, Grad, Result, RewardScorer, Score, Target, Tensor, Video};
use roll_weights::{WeightFile, save_safetensors};
use serde_json::json;

use super::checkpoint::Dimension;
use super::hpsv3::{Hpsv3, Hpsv3Config};
use super::mock::check_gradient;
use super::parity::{Fixture, floats};
use super::videoalign::{VideoAlign, VideoAlignConfig};
use crate::judge::{AnswerScore, JudgeConfig, LocalJudge, Texts};
use crate::picture::Frames;

/// Fails unless `found` is within the tolerance of the output `name`.
#[track_caller]
fn check_output(fixture: &Fixture, name: &str, found: &[f64]) {
    fixture.check(name, found, &fixture.output(name));
}

fn component(fixture: &Fixture, weights: &str) -> Component {
    let options = json!({
        "model_path": weights,
        "config_path": fixture.path("hf_config.json"),
        "tokenizer_path": fixture.path("tokenizer.json"),
        "weights_dtype": "f32",
        "compute_dtype": "f32",
    });
    Component { name: "qwen_vl".into(), options: serde_json::from_value(options).unwrap() }
}

/// The prompts of a fixture, and its system turn.
fn texts(fixture: &Fixture) -> (Vec<String>, String) {
    let texts = fixture.json("prompts.json");
    (serde_json::from_value(texts["prompts"].clone()).unwrap(), texts["system"].as_str().unwrap().into())
}

fn video_align(fixture: &Fixture, weights: &str, dimensions: &[Dimension]) -> Result<VideoAlign> {
    let config = VideoAlignConfig {
        model: component(fixture, weights),
        prompt_file: fixture.path("template.txt"),
        model_config: Some(fixture.path("model_config.json")),
        dimensions: dimensions.iter().map(|dimension| (*dimension, 1.0)).collect(),
        min_pixels: fixture.size("min_pixels"),
        system: texts(fixture).1,
        ..Default::default()
    };
    VideoAlign::load(config, &BuildContext::new("flex"))
}

fn clips(fixture: &Fixture) -> Vec<Video> {
    let rates: Vec<f64> = serde_json::from_value(fixture.config["source_fps"].clone()).unwrap();
    rates.into_iter().enumerate().map(|(i, fps)| fixture.video(&format!("clip{i}.frames"), fps)).collect()
}

fn scored(reward: &mut dyn RewardScorer, video: &Video, prompt: &str) -> (f64, BTreeMap<String, f64>, Vec<f64>) {
    let (score, pullback) = reward.score(video, prompt, &Target::default(), Grad::Record).unwrap();
    let Score::Value { value, details } = score else { panic!("{score:?}") };
    let without = reward.score(video, prompt, &Target::default(), Grad::Skip).unwrap().0;
    assert!((without.value().unwrap() - value).abs() < 1e-5, "the score does not depend on the recording");
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    assert_eq!(gradient.shape(), video.frames().shape());
    (value, details, floats(&gradient))
}

/// The values of `details` in the order of the dimensions.
fn in_order(details: &BTreeMap<String, f64>) -> Vec<f64> {
    Dimension::ALL.iter().map(|dimension| details[dimension.name()]).collect()
}

#[test]
fn videoalign_scores_as_the_original() {
    let fixture = Fixture::open("videoalign_tiny");
    let mut reward = video_align(&fixture, &fixture.path("checkpoint_full.safetensors"), &Dimension::ALL).unwrap();
    let (mut overall, mut ratings) = (Vec::new(), Vec::new());
    for (clip, prompt) in clips(&fixture).iter().zip(texts(&fixture).0) {
        let (value, details, _) = scored(&mut reward, clip, &prompt);
        overall.push(value);
        ratings.extend(in_order(&details));
    }
    check_output(&fixture, "rewards.float", &ratings);
    check_output(&fixture, "overall.float", &overall);
}

#[test]
fn texts_have_the_tokens_of_the_original() {
    let fixture = Fixture::open("videoalign_tiny");
    let reward = video_align(&fixture, &fixture.path("checkpoint_full.safetensors"), &Dimension::ALL).unwrap();
    let (ids, places) = (
        fixture.tensor("inputs.safetensors", "input_ids"),
        fixture.tensor("outputs.safetensors", "reward_token_index"),
    );
    let rows = ids.as_slice::<i64>().unwrap().chunks(ids.shape()[1]);
    for (i, ((row, expected), prompt)) in
        rows.zip(places.as_slice::<i64>().unwrap().chunks(3)).zip(texts(&fixture).0).enumerate()
    {
        let grid = fixture.tensor("outputs.safetensors", &format!("clip{i}.grid_thw"));
        let patches: i64 = grid.as_slice::<i64>().unwrap().iter().product();
        let (tokens, found) = reward.text(patches as usize / fixture.size("merge_size").pow(2), &prompt).unwrap();
        assert_eq!(tokens.iter().map(|id| i64::from(*id)).collect::<Vec<_>>(), row[..tokens.len()]);
        assert_eq!(found.iter().map(|place| *place as i64).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn gradients_of_videoalign_reach_the_sampled_frames_as_in_the_original() {
    let fixture = Fixture::open("videoalign_tiny");
    let quality = [Dimension::VQ, Dimension::MQ];
    let mut reward = video_align(&fixture, &fixture.path("checkpoint_full.safetensors"), &quality).unwrap();
    for (i, (clip, prompt)) in clips(&fixture).iter().zip(texts(&fixture).0).enumerate() {
        let (value, details, gradient) = scored(&mut reward, clip, &prompt);
        let ratings = fixture.output("rewards.float");
        fixture.check("VQ, MQ", &[details["VQ"], details["MQ"]], &ratings[3 * i..][..2]);
        assert!((value - details["VQ"] - details["MQ"]).abs() < 1e-12);
        let frame = gradient.len() / clip.dims()[0];
        let indices = fixture.tensor("outputs.safetensors", &format!("clip{i}.frame_index"));
        let indices: Vec<usize> = indices.as_slice::<i64>().unwrap().iter().map(|index| *index as usize).collect();
        let sampled: Vec<f64> = indices.iter().flat_map(|t| gradient[t * frame..][..frame].to_vec()).collect();
        check_output(&fixture, &format!("clip{i}.grad_frames_at_index"), &sampled);
        let mut others = gradient.chunks(frame).enumerate().filter(|(t, _)| !indices.contains(t));
        assert!(others.all(|(_, frame)| frame.iter().all(|g| *g == 0.0)), "the other frames have no gradient");
    }
}

#[test]
fn a_head_of_three_outputs_rates_each_dimension_by_its_own() {
    let fixture = Fixture::open("videoalign_tiny");
    let file = WeightFile::open(fixture.path("checkpoint_full.safetensors")).unwrap();
    let mut tensors: BTreeMap<String, Tensor> =
        file.keys().map(|key| (key.to_string(), file.tensor(key).unwrap())).collect();
    let head = fixture.tensor("head3.safetensors", "rm_head.weight");
    tensors.insert("base_model.model.rm_head.weight".into(), head);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    save_safetensors(&path, &tensors, &BTreeMap::new()).unwrap();
    std::fs::write(directory.path().join("model_config.json"), fixture.text("model_config.json")).unwrap();
    let mut reward = video_align(&fixture, path.to_str().unwrap(), &Dimension::ALL).unwrap();
    let statistic = |dimension: &Dimension, part: &str| {
        fixture.config["normalisation"][format!("{}_{part}", dimension.name())].as_f64().unwrap()
    };
    let mut raw = Vec::new();
    for (clip, prompt) in clips(&fixture).iter().zip(texts(&fixture).0) {
        let ratings = in_order(&scored(&mut reward, clip, &prompt).1);
        let original = |(d, rating): (&Dimension, f64)| rating * statistic(d, "std") + statistic(d, "mean");
        raw.extend(Dimension::ALL.iter().zip(ratings).map(original));
    }
    check_output(&fixture, "rewards_raw.three_outputs_diagonal", &raw);
}

#[test]
fn hpsv3_scores_and_differentiates_as_the_original() {
    let fixture = Fixture::open("hpsv3_tiny");
    let (prompts, system) = texts(&fixture);
    let config = Hpsv3Config {
        model: component(&fixture, &fixture.path("model.safetensors")),
        prompt_file: fixture.path("template.txt"),
        frames: Some(Frames::First),
        min_pixels: fixture.size("min_pixels"),
        max_pixels: fixture.size("max_pixels"),
        system,
        ..Default::default()
    };
    let mut reward = Hpsv3::load(config, &BuildContext::new("flex")).unwrap();
    let mut outputs = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let (value, details, gradient) = scored(&mut reward, &fixture.video(&format!("image{i}"), 1.0), prompt);
        outputs.extend([value, details["log_sigma"]]);
        check_output(&fixture, &format!("image{i}.grad_mu"), &gradient);
    }
    check_output(&fixture, "mu_logsigma.float.right", &outputs);
}

/// The network of a fixture for a judge, and the directory of its tokenizer. The tiny vocabulary has no words: two tokens
/// that no question needs become yes and no.
pub(crate) fn judging(fixture: &Fixture) -> (Component, tempfile::TempDir) {
    let tokenizer = fixture.text("tokenizer.json").replace("<|vision_pad|>", "yes").replace("<|Reward|>", "no");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer).unwrap();
    let mut network = component(fixture, &fixture.path("model.safetensors"));
    network.options.insert("tokenizer_path".into(), path.to_str().unwrap().into());
    (network, directory)
}

#[test]
fn gradients_of_a_judge_inside_match_finite_differences() {
    let fixture = Fixture::open("hpsv3_tiny");
    let (local, _directory) = judging(&fixture);
    for score in [AnswerScore::Probability, AnswerScore::LogProbability] {
        let config = JudgeConfig {
            local: Some(local.clone()),
            questions: Texts::Several(vec!["Is it {prompt}?".into(), "Is it sharp?".into()]),
            frames: 2,
            max_pixels: fixture.size("max_pixels"),
            score,
            ..Default::default()
        };
        check_gradient(&mut LocalJudge::load(config, &BuildContext::new("flex")).unwrap(), 3);
    }
}
