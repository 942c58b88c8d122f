//! `roll score`: scores a video or picture with the configured reward.

use roll_core::{Error, Grad, Result, Score};
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
    let video = read_video(&args.video, &ReadOptions { every: args.every, ..ReadOptions::default() })?;
    let reference = match &args.reference {
        Some(path) => read_video(path, &ReadOptions::default())?,
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
