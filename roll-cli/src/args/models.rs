//! Arguments of the commands that use a model or a reward once.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use roll_video::Sampler;
use roll_video::sampling::GuidanceScale;

use super::{ConfigArgs, ConfigFiles};

/// Arguments of `roll generate`.
#[derive(Debug, ClapArgs)]
pub struct Generate {
    #[command(flatten)]
    pub config: ConfigArgs,
    // An empty struct. It declares the plain arguments, which `Layers` in the field `config` reads as files.
    #[command(flatten)]
    pub _files: ConfigFiles,
    /// Prompt: a description of the video.
    #[arg(long, required_unless_present = "prompts")]
    pub prompt: Option<String>,
    /// Text file of prompts, one on each line: a video of each, from the same noise. The outputs are numbered:
    /// `--output out.mp4` makes `out-001.mp4`, `--output out/` makes `out/001.mp4`.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompts: Option<PathBuf>,
    /// First frame; resized and cropped to the video's size.
    #[arg(long, value_name = "FILE")]
    pub image: Option<PathBuf>,
    /// Last frame, likewise.
    #[arg(long, value_name = "FILE", requires = "image")]
    pub end_image: Option<PathBuf>,
    /// Adapter to load, of any convention: a file, a checkpoint or run directory, or `HIGH,LOW` for both experts.
    /// FILE=0.8 sets its strength; several adapters are added up. Default: the base model alone.
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: Vec<String>,
    /// Number of frames. Default: `data.num_frames`, or 81.
    #[arg(long, value_name = "N")]
    pub frames: Option<usize>,
    /// Height in pixels. Default: `data.height`, or 480.
    #[arg(long, value_name = "N")]
    pub height: Option<usize>,
    /// Width in pixels. Default: `data.width`, or 832.
    #[arg(long, value_name = "N")]
    pub width: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Frames per second of the file. Default: the model's own rate (16; 24 for TI2V-5B).
    #[arg(long, value_name = "N")]
    pub fps: Option<f64>,
    /// Key of the starting noise.
    #[arg(long, alias = "noise", default_value_t = 0)]
    pub seed: u64,
    /// File to write: .mp4 or .gif, .png for one frame, or a directory for PNG frames.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Replace an existing video.
    #[arg(long)]
    pub force: bool,
}

/// How a video is sampled. Defaults are those of the configuration's `algo`, as in its evaluations.
#[derive(Debug, ClapArgs)]
pub struct SamplingArgs {
    /// Number of denoising steps. Default: `algo.num_inference_steps`, or 8.
    #[arg(
        long,
        value_name = "N",
        conflicts_with = "timesteps",
        value_parser = super::positive,
        allow_negative_numbers = true
    )]
    pub steps: Option<usize>,
    /// The timesteps themselves, before the shift, as distilled models list theirs: 1000,750,500,250.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub timesteps: Option<Vec<u32>>,
    /// Shift of the noise levels. Default: `algo.shift`, or that of the model's official configuration.
    #[arg(long, value_name = "X")]
    pub shift: Option<f64>,
    /// euler or unipc, the sampler of the official inference.
    #[arg(long, value_name = "NAME")]
    pub sampler: Option<Sampler>,
    /// Scale of classifier-free guidance, or two scales for the high-noise and low-noise experts (4,3). 1, for
    /// distilled models, turns guidance off and halves the work.
    #[arg(long, value_name = "X[,X]")]
    pub guidance_scale: Option<GuidanceScale>,
    /// Negative prompt, which guidance leads away from.
    #[arg(long, value_name = "TEXT")]
    pub negative_prompt: Option<String>,
}

/// Arguments of `roll ask`.
#[derive(Debug, ClapArgs)]
pub struct Ask {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// The prompt.
    pub prompt: String,
    /// Directory or GGUF file of the model, as `model.model_path`.
    #[arg(long, value_name = "PATH")]
    pub model_path: Option<String>,
    /// Picture that is shown before the prompt; several are shown in their order. The model is then a vision-language
    /// network (`qwen_vl`), which `--model-path` names.
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
    /// Pictures with more pixels are reduced, as `model.max_pixels`.
    #[arg(long, value_name = "N", value_parser = super::positive, requires = "image")]
    pub max_pixels: Option<usize>,
    /// System message.
    #[arg(long)]
    pub system: Option<String>,
    /// Use the prompt as it is, without the chat template.
    #[arg(long)]
    pub raw: bool,
    /// Adapter to load, of any convention, or the weights of a full training: a file, a checkpoint or run directory.
    /// FILE=0.8 sets its strength; several adapters are added up.
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: Vec<String>,
    /// 0 takes the likeliest token each time.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f64,
    /// Probability mass of nucleus sampling.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub top_p: f64,
    /// Draw from this many of the likeliest tokens; 0 is all.
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Upper limit on the number of new tokens.
    #[arg(long, default_value_t = 256, value_parser = super::positive)]
    pub max_new_tokens: usize,
    /// Key of the random draws.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Arguments of `roll eval`.
#[derive(Debug, ClapArgs)]
pub struct Eval {
    /// Run directory: its configuration is the first layer, and its newest checkpoint the adapter.
    pub run: Option<PathBuf>,
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Directory, GGUF file or published name of the model, as `model.model_path`.
    #[arg(long, value_name = "PATH")]
    pub model_path: Option<String>,
    /// Adapter to compare with the base, of any convention, or the weights of a full training: a file, a checkpoint or
    /// run directory. FILE=0.8 sets its strength; several adapters are added up.
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: Vec<String>,
    /// Questions with answers, all of them held out: the environment `questions` with this file.
    #[arg(long, value_name = "FILE.jsonl", conflicts_with = "env")]
    pub questions: Option<PathBuf>,
    /// Number of starts or questions, as `algo.val_batch_size`.
    #[arg(long, value_name = "N", value_parser = super::positive)]
    pub episodes: Option<usize>,
    /// Number of episodes of each start, for pass@k, as `algo.val_group_size`.
    #[arg(long, value_name = "K", value_parser = super::positive)]
    pub samples: Option<usize>,
    /// Temperature of the answers, as `algo.val_temperature`. Default: 1 with several samples of a start.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// File to write: every episode of every model, one JSON object a line.
    #[arg(long, short, value_name = "FILE.jsonl")]
    pub output: Option<PathBuf>,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `roll score`.
#[derive(Debug, ClapArgs)]
pub struct Score {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Video, picture, or directory of pictures.
    pub video: PathBuf,
    /// Reward, as `reward.name`.
    #[arg(long, value_name = "NAME")]
    pub reward: Option<String>,
    /// Reference video or picture. Default: the video itself.
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Prompt, for rewards that read it.
    #[arg(long, default_value = "")]
    pub prompt: String,
    /// Score every N-th frame.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = super::positive)]
    pub every: usize,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}
