//! `roll score`: scores a video or picture with the configured reward.

use roll_core::{Error, Grad, Result, Score, Tensor, Video};
use roll_data::{ReadOptions, read_video};
use roll_train::trainer::reward;

use crate::args;
use crate::configuration::{Configuration, build_context};

/// Scores `video` against the reference, or against itself.
pub fn score(args: args::Score) -> Result<()> {
    let named = args.reward.clone().map(|name| ("reward.name", name, "--reward"));
    let configuration = Configuration::read(&args.config, named.as_slice())?;
    let registry = configuration.registry()?;
    let loaded = configuration.load(&registry)?;
    let context = build_context(&loaded);
    let mut scorer = reward(&loaded, &registry, &context)?.ok_or_else(|| {
        Error::config(
            "reward",
            "no reward is configured: use --config FILE, or --reward insightface --set reward.reward_model_path=DIR",
        )
    })?;
    let options = ReadOptions::default();
    let video = every(read_video(&args.video, &options)?, args.every)?;
    let reference = match &args.reference {
        Some(path) => read_video(path, &options)?,
        None => video.clone(),
    };
    let target = scorer.prepare(&reference)?;
    let (score, _) = scorer.score(&video, &args.prompt, &target, Grad::Skip)?;
    match (score, args.json) {
        (Score::Value { value, details }, true) => {
            println!("{}", serde_json::json!({ "scorer": scorer.name(), "score": value, "details": details }));
        }
        (Score::Missing { reason }, true) => {
            println!("{}", serde_json::json!({ "scorer": scorer.name(), "score": null, "reason": reason }));
        }
        (Score::Value { value, details }, false) => {
            println!("{}: {value:.4}", scorer.name());
            for (name, value) in details {
                println!("  {name:<28} {value:.4}");
            }
        }
        (Score::Missing { reason }, false) => println!("{}: nothing to score: {reason}", scorer.name()),
    }
    Ok(())
}

/// Every `step`-th frame.
fn every(video: Video, step: usize) -> Result<Video> {
    if step <= 1 {
        return Ok(video);
    }
    let [frames, height, width] = video.dims();
    let kept: Vec<usize> = (0..frames).step_by(step).collect();
    let values = kept.iter().flat_map(|&t| video.frame(t).iter().copied()).collect::<Vec<f32>>();
    Video::new(Tensor::new(values, [kept.len(), 3, height, width])?, video.fps() / step as f64)
}
