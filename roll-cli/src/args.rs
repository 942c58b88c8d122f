//! What the command line takes.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

/// Post-trains generative models against rewards.
#[derive(Debug, Parser)]
#[command(
    name = "roll",
    version,
    arg_required_else_help = true,
    after_help = "Examples:\n  roll run                                   the demo\n  roll run --config my.yaml --set training.learning_rate=1e-5\n  roll run --resume runs/my\n  roll report runs/my runs/other\n\nExit codes: 0 done, 2 your input is wrong, 1 something failed, 130 interrupted (after a checkpoint).\n`roll COMMAND --help` has examples of each command."
)]
pub struct Args {
    /// Warnings and errors only.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train.
    #[command(
        after_help = "Examples:\n  roll run                                                      the demo\n  roll init-tiny tiny && roll run --config examples/reward_fl_clip.yaml --steps 5\n  roll run --config my.yaml --set strategy.name=zero --set save_steps=10 --set max_ckpt_to_keep=3\n  roll run --resume runs/my                                     go on where it stopped\n  roll run --resume runs/my --steps 200                         and further than it was to go\n\nSIGINT (Ctrl-C) and SIGTERM write a checkpoint and exit with 130; a second signal stops at once."
    )]
    Run(Run),
    /// Generate a video from a prompt and an image, with or without an adapter.
    #[command(
        after_help = "Example:\n  roll generate --config examples/reward_fl_clip.yaml --prompt 'a person talks' \\\n    --image face.png --adapter runs/clip/checkpoints/step-000005/adapter.safetensors --output out.mp4"
    )]
    Generate(Generate),
    /// Score a video or picture with the configured reward.
    #[command(
        after_help = "Example:\n  roll score clip.mp4 --reference portrait.png --reward insightface --set reward.reward_model_path=models"
    )]
    Score(Score),
    /// Write a small Wan checkpoint of random weights in official file layout, to try things with.
    #[command(after_help = "Example:\n  roll init-tiny tiny --kind ti2v")]
    InitTiny(InitTiny),
    /// Show a run, or compare several, in one HTML page: curves, videos before and after, times, warnings.
    #[command(after_help = "Examples:\n  roll report runs/a\n  roll report runs/a runs/b --output compare.html")]
    Report(Report),
    /// Draw a metric of one or several runs, against the step or another metric.
    #[command(after_help = "Example:\n  roll plot runs/a runs/b --x eval/unseen_kl --y eval/unseen --output plot.png")]
    Plot(Plot),
    /// Write untrained Wan transformers of a chosen size, to train from scratch with `flow_matching`.
    #[command(after_help = "Example:\n  roll init-experts small --dim 256 --heads 8 --layers 12")]
    InitExperts(InitExperts),
    /// Turn the checkpoint of a full training into a weight file that can be used as the base.
    #[command(
        after_help = "Example:\n  roll export-expert runs/x/checkpoints/step-000100 --base wan/low_noise_model --out wan-trained/low_noise_model"
    )]
    ExportExpert(ExportExpert),
    /// List what can be named in the configuration; look at a plugin, and try it.
    #[command(after_help = "Example:\n  roll plugins\n  roll plugins check target/release/libsharpness_reward.so")]
    Plugins(Plugins),
    /// Say what a Reward-FL run will need: memory by item and time by phase.
    #[command(
        after_help = "Example:\n  roll plan --network wan2_2-i2v-a14b --on 8x80 --set strategy.name=zero --set strategy.stage=3"
    )]
    Plan(Plan),
    /// Print the resolved configuration, and where each value came from.
    #[command(after_help = "Example:\n  roll config --config my.yaml --set training.learning_rate=1e-5")]
    Config(ConfigArgs),
    /// Print completions for a shell.
    #[command(
        after_help = "Examples:\n  roll completions bash > ~/.local/share/bash-completion/completions/roll\n  roll completions zsh > \"${fpath[1]}/_roll\"\n  roll completions fish > ~/.config/fish/completions/roll.fish"
    )]
    Completions {
        /// Which one.
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one for every command.
    #[command(after_help = "Examples:\n  roll man | man -l -\n  roll man --out ~/.local/share/man/man1")]
    Man {
        /// Directory to write roll.1, roll-run.1, ... to.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

/// Where the configuration comes from.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct ConfigArgs {
    /// YAML file; later files override earlier ones.
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    /// One value, `training.learning_rate=1e-5`; overrides files and environment.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Algorithm, as `algo.name`.
    #[arg(long, value_name = "NAME")]
    pub algo: Option<String>,
    /// Model, as `model.name`.
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Tensor backend and device, as `backend`.
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Library with further components, beside those of `plugins`.
    #[arg(long = "plugin", value_name = "FILE")]
    pub plugins: Vec<PathBuf>,
    /// Components of plugins take the place of linked-in ones of the same name, as `plugins_replace`.
    #[arg(long)]
    pub plugins_replace: bool,
}

/// Arguments of `roll plan`.
#[derive(Debug, ClapArgs)]
pub struct Plan {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// A published model, whose files need not be there; else `model.model_paths`, of which only headers are read.
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Devices: 1x24, 1x80, 1x141, 8x80 (number and GB of memory); this machine unless given.
    #[arg(long, value_name = "CLUSTER")]
    pub on: Option<String>,
    /// Devices, instead of those of `--on`.
    #[arg(long, value_name = "N")]
    pub devices: Option<usize>,
    /// Memory of a device in GB, instead of that of `--on`.
    #[arg(long, value_name = "GB")]
    pub memory: Option<f64>,
    /// TFLOP/s that a device sustains, instead of those of `--on`, or of a product measured here.
    #[arg(long, value_name = "N")]
    pub tflops: Option<f64>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `roll plugins`.
#[derive(Debug, ClapArgs)]
pub struct Plugins {
    #[command(subcommand)]
    pub action: Option<PluginsAction>,
}

/// What to do with plugins.
#[derive(Debug, Subcommand)]
pub enum PluginsAction {
    /// List every component, linked in or from a plugin.
    List(ConfigArgs),
    /// Show what a plugin says of itself: components, options, defaults.
    Info {
        /// The library.
        path: PathBuf,
    },
    /// Load a plugin, run its rewards on random videos, and compare their pullbacks with differences.
    Check(CheckPlugin),
}

/// Arguments of `roll plugins check`.
#[derive(Debug, ClapArgs)]
pub struct CheckPlugin {
    /// The library.
    pub path: PathBuf,
    /// An option of the components, `scale=0.1`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Only the component of this name.
    #[arg(long, value_name = "NAME")]
    pub component: Option<String>,
    /// Key of the random videos.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Arguments of `roll run`.
#[derive(Debug, ClapArgs)]
pub struct Run {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// The run directory itself; `output_dir`/`exp_name`-N unless given.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Optimizer steps, as `steps`.
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Go on with the run in this directory from its newest whole checkpoint, with its configuration under the files
    /// and values given here; on any number of ranks.
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    pub resume: Option<PathBuf>,
}

/// Arguments of `roll generate`.
#[derive(Debug, ClapArgs)]
pub struct Generate {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// What the video shows.
    #[arg(long)]
    pub prompt: String,
    /// First frame; resized and cropped to the video's size.
    #[arg(long, value_name = "FILE")]
    pub image: Option<PathBuf>,
    /// Adapter file (safetensors) to load; the base model alone unless given.
    #[arg(long, value_name = "FILE")]
    pub adapter: Option<PathBuf>,
    /// Frames.
    #[arg(long, default_value_t = 81)]
    pub frames: usize,
    /// Height in pixels.
    #[arg(long, default_value_t = 480)]
    pub height: usize,
    /// Width in pixels.
    #[arg(long, default_value_t = 832)]
    pub width: usize,
    /// Denoising steps.
    #[arg(long, default_value_t = 8)]
    pub steps: usize,
    /// Frames per second of the file.
    #[arg(long, default_value_t = 16.0)]
    pub fps: f64,
    /// Key of the starting noise.
    #[arg(long, default_value_t = 0)]
    pub noise: u64,
    /// File to write: .mp4 or .gif, or a directory for PNG frames.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
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
    /// What to compare with; the video itself unless given.
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Prompt, for rewards that read it.
    #[arg(long, default_value = "")]
    pub prompt: String,
    /// Score every N-th frame.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub every: usize,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `roll report`.
#[derive(Debug, ClapArgs)]
pub struct Report {
    /// Run directories.
    #[arg(required = true)]
    pub runs: Vec<PathBuf>,
    /// Page to write; `report.html` in the run directory, of several runs here, unless given.
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `roll plot`.
#[derive(Debug, ClapArgs)]
pub struct Plot {
    /// Run directories; each is a line.
    #[arg(required = true)]
    pub runs: Vec<PathBuf>,
    /// Metric of the horizontal axis.
    #[arg(long, default_value = "step", value_name = "METRIC")]
    pub x: String,
    /// Metric of the vertical axis.
    #[arg(long, default_value = "actor/face_score", value_name = "METRIC")]
    pub y: String,
    /// PNG to write.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

/// Arguments of `roll init-tiny`.
#[derive(Debug, ClapArgs)]
pub struct InitTiny {
    /// Directory to make.
    pub dir: PathBuf,
    /// Which kind of model.
    #[arg(long, value_enum, default_value_t = TinyKind::I2v)]
    pub kind: TinyKind,
    /// Key of the random weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Arguments of `roll init-experts`.
#[derive(Debug, ClapArgs)]
pub struct InitExperts {
    /// Directory to make; text encoder (`models_t5_*`), tokenizer and VAE are to be put beside what is written.
    pub dir: PathBuf,
    /// Which kind of model.
    #[arg(long, value_enum, default_value_t = TinyKind::I2v)]
    pub kind: TinyKind,
    /// Width.
    #[arg(long, default_value_t = 128)]
    pub dim: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 4)]
    pub heads: usize,
    /// Width of the feed-forward layers.
    #[arg(long, default_value_t = 512)]
    pub ffn_dim: usize,
    /// Blocks.
    #[arg(long, default_value_t = 6)]
    pub layers: usize,
    /// Width of the text embedding.
    #[arg(long, default_value_t = 64)]
    pub text_dim: usize,
    /// Tokens that prompts are padded or cut to.
    #[arg(long, default_value_t = 32)]
    pub text_len: usize,
    /// Key of the random weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Arguments of `roll export-expert`.
#[derive(Debug, ClapArgs)]
pub struct ExportExpert {
    /// Checkpoint directory of a run with `model.lora_rank=0`, or the weight file in it.
    pub checkpoint: PathBuf,
    /// Directory of the expert that the training started from, with its config.json.
    #[arg(long, value_name = "DIR")]
    pub base: PathBuf,
    /// Directory to write to; may be the base itself.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// How the weights are stored.
    #[arg(long, value_enum, default_value_t = StoredDType::F32)]
    pub dtype: StoredDType,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoredDType {
    /// Four bytes, as trained.
    F32,
    /// Two bytes, rounded.
    Bf16,
}

/// Kinds of Wan model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TinyKind {
    /// Image to video, two experts, 16 latent channels.
    I2v,
    /// Text to video, two experts, 16 latent channels.
    T2v,
    /// Text and image to video, one expert, 48 latent channels.
    Ti2v,
}
