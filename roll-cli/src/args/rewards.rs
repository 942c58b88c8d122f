//! Arguments of `roll rewards`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand};

use super::ConfigArgs;

/// Arguments of `roll rewards`.
#[derive(Debug, ClapArgs)]
pub struct Rewards {
    #[command(subcommand)]
    pub action: RewardsAction,
}

/// What to do with rewards.
#[derive(Debug, Subcommand)]
pub enum RewardsAction {
    /// Score a video, frame by frame too, and draw where the gradient is.
    Try(TryReward),
}

/// Arguments of `roll rewards try`.
#[derive(Debug, ClapArgs)]
pub struct TryReward {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Reward, as `reward.name`; its options come from `--set reward.KEY=VALUE` and `--config`.
    pub name: String,
    /// Video, picture, or directory of pictures.
    pub video: PathBuf,
    /// What to compare with; the video itself unless given.
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Prompt, for rewards that read it.
    #[arg(long, default_value = "")]
    pub prompt: String,
    /// Take every N-th frame.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub every: usize,
    /// PNG to write: frames, and below each where its gradient is.
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Leave out the score of each frame by itself, which costs as much as the video again.
    #[arg(long)]
    pub no_frames: bool,
}
