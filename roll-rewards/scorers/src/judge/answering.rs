//! The reward that a configuration names `judge`: answers of a service or of a network in this process.

use roll_core::{BuildContext, Result};

use super::{Judge, JudgeConfig, LocalJudge};
use crate::vision_language::Opened;

/// Opens the network of `reward.local`, or the client of the service.
fn open(config: JudgeConfig, context: &BuildContext) -> Result<Opened> {
    match config.local {
        Some(_) => LocalJudge::open(config, context),
        None => Ok(Opened::new(Judge::new(config, context)?)),
    }
}

roll_core::register! {
    Reward, "judge", JudgeConfig,
    "Answers of a model that sees pictures to questions about the video, over an OpenAI-compatible API or inside",
    open,
    plan: LocalJudge::needs,
}
