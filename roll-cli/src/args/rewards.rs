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
    /// Score a video as a whole and frame by frame, and draw its gradient.
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
    /// Reference video or picture. Default: the video itself.
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Prompt, for rewards that read it.
    #[arg(long, default_value = "")]
    pub prompt: String,
    /// Take every N-th frame.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = super::positive)]
    pub every: usize,
    /// PNG to write: frames, and below each the magnitude of its gradient.
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long, requires = "output")]
    pub force: bool,
    /// Skip the scores of single frames, which cost as much as the whole video again.
    #[arg(long)]
    pub no_frames: bool,
}
