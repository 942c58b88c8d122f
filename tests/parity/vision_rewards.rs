//! Rewards that see and read: ratings of VideoAlign and HPSv3 and their gradients at the frames.

use std::path::Path;

use roll_core::{BuildContext, Component, Grad, RewardScorer, Score, StateDict, Target, Tensor, Video};
use roll_rewards::picture::Frames;
use roll_rewards::vision_language::Dimension;
use roll_rewards::vision_language::hpsv3::{Hpsv3, Hpsv3Config};
use roll_rewards::vision_language::videoalign::{VideoAlign, VideoAlignConfig};
use serde::Deserialize;
use serde_json::json;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    min_pixels: usize,
    max_pixels: usize,
    /// Frames per second of each clip; absent for pictures.
    #[serde(default)]
    source_fps: Vec<f64>,
}

#[derive(Deserialize)]
struct Texts {
    system: String,
    prompts: Vec<String>,
}

/// Length of the shorter step of the differences: short, because a ReLU of HPSv3's head has a corner.
const STEP: f64 = 5e-3;

/// VideoAlign, from frames to normalised ratings.
pub fn video_align(case: &Case) -> Outcome<Report> {
    let (config, texts, inputs) = read(case)?;
    let mut report = case.expected("outputs.safetensors")?;
    report.widen_few(case);
    let load = |dimensions: &[Dimension]| {
        let config = VideoAlignConfig {
            model: component(case, "checkpoint_full.safetensors")?,
            prompt_file: path(&case.dir, "template.txt"),
            model_config: Some(path(&case.dir, "model_config.json")),
            dimensions: dimensions.iter().map(|dimension| (*dimension, 1.0)).collect(),
            min_pixels: config.min_pixels,
            system: texts.system.clone(),
            ..Default::default()
        };
        Ok::<_, crate::case::Failure>(VideoAlign::load(config, &BuildContext::new(case.setting.backend))?)
    };
    let (mut whole, mut quality) = (load(&Dimension::ALL)?, load(&[Dimension::VQ, Dimension::MQ])?);
    let (mut ratings, mut overall) = (Vec::new(), Vec::new());
    for (i, (fps, prompt)) in config.source_fps.iter().zip(&texts.prompts).enumerate() {
        let clip = Video::new(inputs[&format!("clip{i}.frames")].clone(), *fps)?;
        let (score, _) = whole.score(&clip, prompt, &Target::default(), Grad::Skip)?;
        let Score::Value { value, details } = score else { return Err(format!("clip {i} has no score").into()) };
        ratings.extend(Dimension::ALL.map(|dimension| details[dimension.name()] as f32));
        overall.push(value as f32);

        let gradient = gradient(case, &mut report, &mut quality, &clip, prompt)?;
        let index = report.get(&format!("clip{i}.frame_index"))?.as_slice::<i64>()?.to_vec();
        let (gradient, frame) = (gradient.f32s()?, gradient.len() / clip.dims()[0]);
        let sampled: Vec<f32> = index.iter().flat_map(|t| &gradient[*t as usize * frame..][..frame]).copied().collect();
        let name = format!("clip{i}.grad_frames_at_index");
        let shape = report.get(&name)?.shape().to_vec();
        report.compare(&name, &Tensor::new(sampled, shape)?);
        let mut others = gradient.chunks(frame).enumerate().filter(|(t, _)| !index.contains(&(*t as i64)));
        report.check(others.all(|(_, d)| d.iter().all(|g| *g == 0.0)), || {
            "frames without influence have a gradient".into()
        });
    }
    let clips = texts.prompts.len();
    report.compare("rewards.float", &Tensor::new(ratings, [clips, Dimension::ALL.len()])?);
    report.compare("overall.float", &Tensor::new(overall, [clips])?);
    leave_out_others(&mut report);
    Ok(report)
}

/// HPSv3, from pictures to mu and log sigma.
pub fn hpsv3(case: &Case) -> Outcome<Report> {
    let (config, texts, inputs) = read(case)?;
    let mut report = case.expected("outputs.safetensors")?;
    report.widen_few(case);
    let config = Hpsv3Config {
        model: component(case, "model.safetensors")?,
        prompt_file: path(&case.dir, "template.txt"),
        frames: Some(Frames::First),
        min_pixels: config.min_pixels,
        max_pixels: config.max_pixels,
        system: texts.system.clone(),
        ..Default::default()
    };
    let mut reward = Hpsv3::load(config, &BuildContext::new(case.setting.backend))?;
    let mut outputs = Vec::new();
    for (i, prompt) in texts.prompts.iter().enumerate() {
        let picture = Video::new(inputs[&format!("image{i}")].clone(), 1.0)?;
        let (score, _) = reward.score(&picture, prompt, &Target::default(), Grad::Skip)?;
        let Score::Value { value, details } = score else { return Err(format!("picture {i} has no score").into()) };
        outputs.extend([value as f32, details["log_sigma"] as f32]);
        let gradient = gradient(case, &mut report, &mut reward, &picture, prompt)?;
        report.compare(&format!("image{i}.grad_mu"), &gradient);
    }
    report.compare("mu_logsigma.float.right", &Tensor::new(outputs, [texts.prompts.len(), 2])?);
    leave_out_others(&mut report);
    Ok(report)
}

/// The gradient of a score, compared with differences where products are in f32.
fn gradient(
    case: &Case,
    report: &mut Report,
    reward: &mut dyn RewardScorer,
    video: &Video,
    prompt: &str,
) -> Outcome<Tensor> {
    let (_, pullback) = reward.score(video, prompt, &Target::default(), Grad::Record)?;
    let gradient = pullback.ok_or("no pullback")?.pull(&Tensor::scalar(1.0))?;
    if !case.setting.is_narrow() {
        crate::slope::check(report, prompt, video.frames().f32s()?, gradient.f32s()?, STEP, |moved| {
            let moved = Video::new(Tensor::new(moved.to_vec(), video.frames().shape())?, video.fps())?;
            let (score, _) = reward.score(&moved, prompt, &Target::default(), Grad::Skip)?;
            Ok(score.value().ok_or("no score")?)
        })?;
    }
    Ok(gradient)
}

fn leave_out_others(report: &mut Report) {
    for name in report.unseen() {
        let reason = if name.contains("uint8") { "the way without a gradient" } else { "a step on the way" };
        report.leave_out(&name, reason);
    }
}

fn read(case: &Case) -> Outcome<(Config, Texts, StateDict)> {
    let texts = serde_json::from_slice(&std::fs::read(case.dir.join("prompts.json"))?)?;
    Ok((case.config()?, texts, case.tensors("inputs.safetensors")?))
}

/// The network in the case's dtype.
fn component(case: &Case, weights: &str) -> Outcome<Component> {
    let dtype = if case.setting.is_narrow() { "bf16" } else { "f32" };
    let options = json!({
        "model_path": path(&case.dir, weights),
        "config_path": path(&case.dir, "hf_config.json"),
        "tokenizer_path": path(&case.dir, "tokenizer.json"),
        "weights_dtype": dtype,
        "compute_dtype": dtype,
    });
    Ok(Component { name: "qwen_vl".into(), options: serde_json::from_value(options)? })
}

fn path(directory: &Path, file: &str) -> String {
    directory.join(file).display().to_string()
}
