//! Tests of the rewards on a mock of the network: gradients, bad input, the places of tokens.

use std::collections::BTreeMap;

use roll_core::{BuildContext, Grad, Result, RewardScorer, Score, Target, Tensor, VisionLanguageModel};

use super::checkpoint::Dimension;
use super::hpsv3::{Hpsv3, Hpsv3Config};
use super::mock::{Mock, WIDTH, check_gradient, clip};
use super::prompt_file::{PromptText, Published};
use super::videoalign::{VideoAlign, VideoAlignConfig};
use crate::gradient_check::noise;

const QUESTION: &str = "\nSharp? <|VQ_reward|>\nSteady? <|MQ_reward|>\n{text_prompt}? <|TA_reward|>\n";

fn question(text: &str) -> PromptText {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("question.txt");
    std::fs::write(&path, text).unwrap();
    let own = Published { file: "own", constants: &[], sha256: "" };
    PromptText::read(path.to_str().unwrap(), &own, &BuildContext::new("flex")).unwrap()
}

fn tensor(seed: u64, shape: &[usize]) -> Tensor {
    Tensor::new(noise(seed, shape.iter().product()), shape).unwrap()
}

fn opened(config: VideoAlignConfig, network: Box<Mock>) -> Result<VideoAlign> {
    let checked = config.checked_with(question(QUESTION), &BuildContext::new("flex"))?;
    VideoAlign::new(config, checked, network)
}

fn video_align(config: VideoAlignConfig, outputs: usize) -> Result<VideoAlign> {
    let others = [("rm_head.weight".to_string(), tensor(7, &[outputs, WIDTH]))].into();
    let config = VideoAlignConfig { min_pixels: 256, max_pixels: Some(1024), ..config };
    opened(config, Box::new(Mock::new(others)))
}

fn hpsv3(widths: [usize; 3]) -> Result<Hpsv3> {
    let mut width = WIDTH;
    let mut others = BTreeMap::new();
    for (i, (name, out)) in [("0", widths[0]), ("3", widths[1]), ("5", widths[2])].into_iter().enumerate() {
        others.insert(format!("rm_head.{name}.weight"), tensor(i as u64, &[out, width]));
        others.insert(format!("rm_head.{name}.bias"), tensor(10 + i as u64, &[out]));
        width = out;
    }
    let config = Hpsv3Config { min_pixels: 256, max_pixels: 1024, ..Default::default() };
    let text = question("\nGood? {prompt} <|Reward|>\n");
    Hpsv3::new(config, text, Box::new(Mock::new(others)))
}

fn value(reward: &mut dyn RewardScorer, frames: usize, prompt: &str) -> Result<Score> {
    Ok(reward.score(&clip(3, frames, 20, 26), prompt, &Target::default(), Grad::Skip)?.0)
}

#[test]
fn gradients_match_finite_differences() {
    for outputs in [1, 3] {
        check_gradient(&mut video_align(VideoAlignConfig::default(), outputs).unwrap(), 9);
    }
    // An odd number of frames, of which the last is repeated.
    let odd = VideoAlignConfig { frames: Some(6), ..Default::default() };
    check_gradient(&mut video_align(odd, 1).unwrap(), 5);
    check_gradient(&mut hpsv3([6, 5, 2]).unwrap(), 3);
}

#[test]
fn the_score_is_the_weighted_sum_of_the_dimensions() {
    let config =
        VideoAlignConfig { dimensions: [(Dimension::VQ, 2.0), (Dimension::TA, -0.5)].into(), ..Default::default() };
    let Score::Value { value, details } = value(&mut video_align(config, 3).unwrap(), 9, "a boat").unwrap() else {
        panic!("a clip of 9 frames is scored")
    };
    assert_eq!(details.keys().collect::<Vec<_>>(), ["TA", "VQ"]);
    assert!((value - 2.0 * details["VQ"] + 0.5 * details["TA"]).abs() < 1e-12);
}

#[test]
fn quality_alone_neither_reads_the_prompt_nor_computes_the_text_behind_it() {
    let config =
        VideoAlignConfig { dimensions: [(Dimension::VQ, 1.0), (Dimension::MQ, 1.0)].into(), ..Default::default() };
    let mut reward = video_align(config, 1).unwrap();
    let (tokens, places) = reward.text(3, "<|VQ_reward|>").unwrap();
    assert_eq!(Some(&tokens.len()), places.last().map(|last| last + 1).as_ref());
    assert_eq!(tokens.last().copied(), Mock::new(BTreeMap::new()).token_id("<|MQ_reward|>"));
    let both = [value(&mut reward, 9, "a boat").unwrap(), value(&mut reward, 9, "a cat, far away").unwrap()];
    assert_eq!(both[0], both[1]);
    // The first two of three dimensions have the same ratings.
    let Score::Value { details, .. } =
        value(&mut video_align(VideoAlignConfig::default(), 1).unwrap(), 9, "x").unwrap()
    else {
        panic!("a clip of 9 frames is scored")
    };
    let Score::Value { details: quality, .. } = &both[0] else { panic!("a clip of 9 frames is scored") };
    assert_eq!((details["VQ"], details["MQ"]), (quality["VQ"], quality["MQ"]));
}

#[test]
fn a_prompt_with_a_token_of_the_network_is_refused_by_its_name() {
    let mut video_align = video_align(VideoAlignConfig::default(), 1).unwrap();
    for token in ["<|VQ_reward|>", "<|video_pad|>", "<|im_end|>"] {
        let message = value(&mut video_align, 9, &format!("a {token} boat")).unwrap_err().to_string();
        assert!(message.contains(token), "{message}");
    }
    assert!(value(&mut hpsv3([6, 5, 2]).unwrap(), 2, "<|Reward|>").is_err());
}

#[test]
fn a_clip_of_one_frame_has_no_motion_to_rate() {
    let mut video_align = video_align(VideoAlignConfig::default(), 1).unwrap();
    let score = value(&mut video_align, 1, "a boat").unwrap();
    assert!(matches!(&score, Score::Missing { reason } if reason.contains("at least 2 frames")), "{score:?}");
    for frames in [2, 3] {
        assert!(value(&mut video_align, frames, "a boat").unwrap().value().is_some(), "{frames} frames");
    }
    assert!(value(&mut hpsv3([6, 5, 2]).unwrap(), 1, "a boat").unwrap().value().is_some());
}

#[test]
fn a_checkpoint_that_does_not_fit_is_named_by_its_tensor() {
    let message = video_align(VideoAlignConfig::default(), 2).err().unwrap().to_string();
    assert!(message.contains("rm_head.weight") && message.contains("[1, 4] or [3, 4]"), "{message}");
    assert!(hpsv3([6, 5, 3]).err().unwrap().to_string().contains("rm_head.5.bias"));
    let none = Box::new(Mock::new(BTreeMap::new()));
    let config = VideoAlignConfig::default();
    let message = opened(config, none).err().unwrap();
    assert!(message.to_string().contains("`rm_head.weight`"), "{message}");
}

#[test]
fn bad_options_are_named_by_their_keys() {
    for (config, key) in [
        (
            VideoAlignConfig { dimensions: [(Dimension::VQ, f64::NAN)].into(), ..Default::default() },
            "reward.dimensions",
        ),
        (VideoAlignConfig { frames: Some(4), fps: Some(2.0), ..Default::default() }, "reward.frames"),
        (
            VideoAlignConfig { normalisation: [(Dimension::MQ, [0.0, 0.0])].into(), ..Default::default() },
            "reward.normalisation.MQ",
        ),
    ] {
        assert!(video_align(config, 1).err().unwrap().to_string().contains(key), "{key}");
    }
    let missing = VideoAlign::load(VideoAlignConfig::default(), &BuildContext::new("flex")).err().unwrap();
    assert!(missing.to_string().contains("reward.prompt_file"), "{missing}");
}

#[test]
fn a_checkpoint_may_have_fewer_pixels_than_small_frames_are_enlarged_to() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model_config.json");
    // The default of the original's training code.
    std::fs::write(&path, r#"{"data_config": {"max_frame_pixels": 76800}}"#).unwrap();
    let of_file = VideoAlignConfig { model_config: Some(path.to_str().unwrap().into()), ..Default::default() };
    let checked = |config: &VideoAlignConfig| {
        config.checked_with(question(QUESTION), &BuildContext::new("flex")).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(checked(&of_file), Ok(()));
    let message = checked(&VideoAlignConfig { max_pixels: Some(76800), ..of_file }).unwrap_err();
    assert!(message.contains("`reward.min_pixels`") && message.contains("76800"), "{message}");
}
