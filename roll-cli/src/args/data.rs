//! Arguments of `roll data`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};

use super::ConfigArgs;

/// Arguments of `roll data`.
#[derive(Debug, ClapArgs)]
pub struct Data {
    #[command(subcommand)]
    pub action: DataAction,
}

/// What to do with training data.
#[derive(Debug, Subcommand)]
pub enum DataAction {
    /// Read every clip as a run would; list the formats of the clips, and those that would be left out. With a reward,
    /// also the clips in which it finds nothing to compare with, such as a face.
    #[command(after_help = super::examples::DATA_INSPECT)]
    Inspect(InspectData),
    /// Write the clips as a run would see them: cut, scaled, sampled at `data.fps`, as H.264 MP4 with a metadata.jsonl.
    #[command(after_help = super::examples::DATA_PREPARE)]
    Prepare(PrepareData),
    /// Write a copy of metadata with prompts by a model that sees pictures, behind an OpenAI-compatible API.
    #[command(after_help = super::examples::DATA_CAPTION)]
    Caption(CaptionData),
    /// Write the votes of a run with the reward `vote` as JSON lines.
    #[command(after_help = super::examples::DATA_VOTES)]
    Votes(Votes),
}

/// The data, and the number that heights and widths are multiples of.
#[derive(Debug, ClapArgs)]
pub struct DataSet {
    /// Metadata (CSV, TSV, JSON lines, a JSON list), a directory of videos with captions, or a `.txt` of prompts.
    pub path: PathBuf,
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Height and width are multiples of this number of pixels: 32 for TI2V-5B.
    #[arg(long, default_value_t = 16, value_name = "PIXELS", value_parser = clap::value_parser!(u16).range(1..))]
    pub unit: u16,
}

/// Arguments of `roll data inspect`.
#[derive(Debug, ClapArgs)]
pub struct InspectData {
    #[command(flatten)]
    pub data: DataSet,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// What the crop of a clip is around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Crop {
    /// The largest face of each frame.
    Face,
}

/// Arguments of `roll data prepare`.
#[derive(Debug, ClapArgs)]
pub struct PrepareData {
    #[command(flatten)]
    pub data: DataSet,
    /// Directory to write; it must be empty or new.
    pub out: PathBuf,
    /// Crop each clip to one box around its face, instead of the middle of its frames. The detector is that of the reward
    /// `insightface` of the configuration; clips without a face are left out.
    #[arg(long, value_enum)]
    pub crop: Option<Crop>,
}

/// Arguments of `roll data votes`.
#[derive(Debug, ClapArgs)]
pub struct Votes {
    /// Directory of the run.
    pub run: PathBuf,
    /// JSON lines to write.
    pub output: PathBuf,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll data caption`.
#[derive(Debug, ClapArgs)]
pub struct CaptionData {
    /// Metadata (CSV, TSV, JSON lines, a JSON list), with or without prompts, or a directory of videos.
    pub path: PathBuf,
    /// Base address of the service, as `reward.url` of the reward `judge`.
    #[arg(long, value_name = "URL")]
    pub url: String,
    /// Name of the model, as the service knows it.
    #[arg(long, value_name = "NAME")]
    pub model: String,
    /// Request for a description; `{prompt}` is replaced by the row's prompt. Default: one that asks for a paragraph
    /// about subject, movement, place, light and camera.
    #[arg(long, value_name = "TEXT")]
    pub question: Option<String>,
    /// Number of frames that are shown, evenly spaced. Default: 4.
    #[arg(long, value_name = "N", value_parser = super::positive)]
    pub frames: Option<usize>,
    /// JSON lines to write. If the file is there, rows in it are not asked for again.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Ask for rows that have a prompt, too.
    #[arg(long)]
    pub overwrite: bool,
    /// Number of requests at the same time.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub requests: u8,
    /// Another option of the service, as of the reward `judge`, or `data.max_pixels`, `data.base_path` or
    /// `data.decoder`: `reward.timeout=300`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}
