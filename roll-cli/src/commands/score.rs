//! `roll score`: scores a video or picture with the configured reward.

use std::path::Path;

use roll_core::{Error, Grad, Result, ResultExt, RewardScorer, Score, Target, Video};
use roll_media::{ReadOptions, read_video};
use roll_train::reward;

use crate::args::{self, KeyValue};
use crate::configuration::{Configuration, build_context};

/// A reward, a video, and the target that the reward compares it with.
pub(super) struct ScoringInput {
    pub(super) scorer: Box<dyn RewardScorer>,
    pub(super) video: Video,
    pub(super) target: Target,
}

/// Makes the configured reward, or the one called `name`, and reads every `every`-th frame of `video`. The target is
/// prepared from the file `reference`; without one, from the video itself.
pub(super) fn prepare(
    config: &args::ConfigArgs,
    name: Option<&str>,
    video: &Path,
    reference: Option<&Path>,
    every: usize,
) -> Result<ScoringInput> {
    let reward_name =
        name.map(|name| KeyValue { key: "reward.name", value: name.to_string(), origin: "the reward's name" });
    let configuration = Configuration::read(config, reward_name.as_slice())?;
    let registry = configuration.registry()?;
    let loaded = configuration.load(&registry)?;
    let context = build_context(&loaded);
    let mut scorer = reward(&loaded, &registry, &context)?.ok_or_else(|| {
        Error::config(
            "reward",
            "no reward is configured: use --config FILE, or --reward insightface --set reward.reward_model_path=DIR",
        )
    })?;
    if scorer.compares() {
        let problem = format!("`{}` compares videos of one prompt, and scores none by itself", scorer.name());
        return Err(Error::config("reward", problem));
    }
    let video = read_video(video, &ReadOptions { every, ..ReadOptions::default() })?;
    let compared_with = match reference {
        Some(path) => read_video(path, &ReadOptions::default())?,
        None => video.clone(),
    };
    let target = scorer.prepare(&compared_with).while_doing(|| match reference {
        Some(path) => format!("preparing the reference {}", path.display()),
        None => "preparing the reference, which is the video itself (no `--reference` is given)".into(),
    })?;
    Ok(ScoringInput { scorer, video, target })
}

/// Fails if the score is not finite, as a reward with damaged weights returns it.
pub(super) fn check_finite(scorer: &dyn RewardScorer, value: f64) -> Result<f64> {
    match value.is_finite() {
        true => Ok(value),
        false => Err(Error::NonFinite { what: format!("the score of `{}`", scorer.name()), value }),
    }
}

/// Scores `video` against the reference, or against itself.
pub fn score(args: args::Score) -> Result<()> {
    let ScoringInput { mut scorer, video, target } =
        prepare(&args.config, args.reward.as_deref(), &args.video, args.reference.as_deref(), args.every)?;
    let (score, _) = scorer.score(&video, &args.prompt, &target, Grad::Skip)?;
    score.value().map(|value| check_finite(scorer.as_ref(), value)).transpose()?;
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
