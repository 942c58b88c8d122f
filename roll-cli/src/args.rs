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
    /// What collectives of several processes go over; `nccl` needs a build with that feature, and a GPU for each process.
    #[arg(long, global = true, value_enum, default_value = "mpi")]
    pub collectives: Collectives,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What large collectives go over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Collectives {
    /// The launcher's MPI, in host memory.
    Mpi,
    /// NCCL; what is small still goes over MPI.
    Nccl,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train.
    #[command(
        after_help = "Examples:\n  roll run                                                      the demo\n  roll run --algo agentic_ppo --model causal_lm                 the demo of an agent\n  roll init-tiny tiny && roll run --config examples/reward_fl_clip.yaml --steps 5\n  roll run --config my.yaml --set strategy.name=zero --set save_steps=10 --set max_ckpt_to_keep=3\n  roll run --resume runs/my                                     go on where it stopped\n  roll run --resume runs/my --steps 200                         and further than it was to go\n\nSIGINT (Ctrl-C) and SIGTERM write a checkpoint and exit with 130; a second signal stops at once."
    )]
    Run(Run),
    /// Generate a video from a prompt and an image, with or without an adapter.
    #[command(
        after_help = "Example:\n  roll generate --config examples/reward_fl_clip.yaml --prompt 'a person talks' \\\n    --image face.png --adapter runs/clip/checkpoints/step-000005/adapter.safetensors --output out.mp4"
    )]
    Generate(Generate),
    /// Let a language model answer.
    #[command(
        after_help = "Examples:\n  roll ask --model-path Qwen2.5-0.5B-Instruct 'What is the capital of France?'\n  roll ask --model-path SmolLM2-135M-Instruct.Q4_1.gguf --temperature 0.7 'Tell me a story.'"
    )]
    Ask(Ask),
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
    /// Add a LoRA of any convention to its base.
    #[command(
        after_help = "Example:\n  roll merge-lora wan/low_noise_model high_noise_lora.safetensors merged --alpha 0.8 --dtype bf16\n\nOUT is a file when it ends in .safetensors, otherwise a new directory with the shards of the base."
    )]
    MergeLora(MergeLora),
    /// Rewrite a LoRA file for another program.
    #[command(
        after_help = "Example:\n  roll convert-lora runs/x/checkpoints/step-000100/adapter.safetensors kohya.safetensors --to kohya\n  roll convert-lora lora.safetensors peft_adapter --to peft --names diffusers\n\nA file with adapters for both transformers becomes two, OUT_high_noise and OUT_low_noise."
    )]
    ConvertLora(ConvertLora),
    /// Join the shards of a network into one file.
    #[command(after_help = "Example:\n  roll merge-shards wan/high_noise_model high_noise.safetensors --dtype bf16")]
    MergeShards(MergeShards),
    /// Split a weight file into shards with an index.
    #[command(after_help = "Example:\n  roll split-shards high_noise.safetensors wan/high_noise_model --max-size 5GB")]
    SplitShards(SplitShards),
    /// Say what is in a weight file: network, convention, sizes.
    #[command(after_help = "Example:\n  roll inspect lora.safetensors")]
    Inspect(Inspect),
    /// List what can be named in the configuration; look at a plugin, and try it.
    #[command(after_help = "Example:\n  roll plugins\n  roll plugins check target/release/libsharpness_reward.so")]
    Plugins(Plugins),
    /// Say what a Reward-FL run will need: memory by item and time by phase.
    #[command(
        after_help = "Example:\n  roll plan --network wan2_2-i2v-a14b --on 8x80 --set strategy.name=zero --set strategy.stage=3"
    )]
    Plan(Plan),
    /// Time a Reward-FL step of random networks of a given size, phase by phase.
    #[command(
        after_help = "Examples:\n  roll bench\n  roll bench --preset a14b --backend libtorch-cuda --json a14b.json\n  PYTHON=venv/bin/python roll bench --preset 1.3b --layers 2 --frames 17 --size 240x416 --compare"
    )]
    Bench(crate::commands::bench::Bench),
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
    /// Environment that an agent acts in, as `env.name`.
    #[arg(long, value_name = "NAME")]
    pub env: Option<String>,
    /// Tensor backend and device, as `backend`: flex, libtorch, libtorch-cuda[:N], cuda[:N].
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

/// Arguments of `roll ask`.
#[derive(Debug, ClapArgs)]
pub struct Ask {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// What is asked.
    pub prompt: String,
    /// Directory or GGUF file of the model, as `model.model_path`.
    #[arg(long, value_name = "PATH")]
    pub model_path: Option<String>,
    /// System message.
    #[arg(long)]
    pub system: Option<String>,
    /// The prompt as it is, without the chat template.
    #[arg(long)]
    pub raw: bool,
    /// Adapter file, or weights of a full training, to load.
    #[arg(long, value_name = "FILE")]
    pub adapter: Option<PathBuf>,
    /// 0 takes the likeliest token each time.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Nucleus mass.
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Likeliest tokens that are drawn from; 0 is all.
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Most new tokens.
    #[arg(long, default_value_t = 256)]
    pub max_new_tokens: usize,
    /// Key of the random draws.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
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

/// Arguments of `roll merge-lora`.
#[derive(Debug, ClapArgs)]
pub struct MergeLora {
    /// Weight file, index of shards, directory or glob of the transformer.
    pub base: PathBuf,
    /// LoRA file, or the directory of a PEFT adapter.
    pub lora: PathBuf,
    /// File (.safetensors) or new directory to write.
    pub out: PathBuf,
    /// Factor of what the LoRA adds, beside its own alpha / rank.
    #[arg(long, default_value_t = 1.0, value_name = "N", allow_negative_numbers = true)]
    pub alpha: f64,
    /// How the weights are stored; each as in the base unless given.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredDType>,
    /// Merge what matches when some layers of the LoRA are not in the base.
    #[arg(long)]
    pub allow_missing: bool,
    /// Of a LoRA file with adapters for both transformers, which.
    #[arg(long, value_enum)]
    pub expert: Option<ExpertName>,
}

/// Arguments of `roll convert-lora`.
#[derive(Debug, ClapArgs)]
pub struct ConvertLora {
    /// LoRA file, or the directory of a PEFT adapter.
    pub lora: PathBuf,
    /// File (.safetensors) to write; for PEFT also a directory, which gets its adapter_config.json.
    pub out: PathBuf,
    /// For which program.
    #[arg(long, value_enum, value_name = "CONVENTION")]
    pub to: ConventionName,
    /// Layer names of a PEFT file: those of the model it is for.
    #[arg(long, value_enum, default_value_t = LayerNames::Official)]
    pub names: LayerNames,
    /// Of a file with adapters for both transformers, which; `low` makes a diffusers file for `transformer_2`.
    #[arg(long, value_enum)]
    pub expert: Option<ExpertName>,
    /// The model it is for, when it is none of Wan and kohya's names must be told apart.
    #[arg(long, value_name = "FILE")]
    pub base: Option<PathBuf>,
}

/// Arguments of `roll merge-shards`.
#[derive(Debug, ClapArgs)]
pub struct MergeShards {
    /// Directory of the shards, their index, or a glob.
    pub dir: PathBuf,
    /// File to write.
    pub out: PathBuf,
    /// How the weights are stored; as they are unless given.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredDType>,
}

/// Arguments of `roll split-shards`.
#[derive(Debug, ClapArgs)]
pub struct SplitShards {
    /// Weight file.
    pub file: PathBuf,
    /// Directory to make.
    pub out: PathBuf,
    /// Most bytes of a shard: 5GB, 500MB.
    #[arg(long, default_value = "5GB", value_name = "SIZE", value_parser = bytes)]
    pub max_size: u64,
    /// How the weights are stored; as they are unless given.
    #[arg(long, value_enum)]
    pub dtype: Option<StoredDType>,
}

/// Arguments of `roll inspect`.
#[derive(Debug, ClapArgs)]
pub struct Inspect {
    /// Weight file, index of shards, directory or glob.
    pub file: PathBuf,
    /// List every tensor.
    #[arg(long)]
    pub keys: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `5GB` as a number.
fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit: u64 = match text[at..].trim().to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KIB" => 1 << 10,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        other => return Err(format!("expected a size such as 5GB or 500MiB, found the unit `{other}`")),
    };
    let number: u64 = text[..at].parse().map_err(|_| "expected a size such as 5GB or 500MiB".to_string())?;
    number.checked_mul(unit).filter(|n| *n > 0).ok_or_else(|| "expected a size above 0 and below 2^64".to_string())
}

/// Programs whose LoRA files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConventionName {
    /// `base_model.model.X.lora_A.weight`, with an adapter_config.json.
    Peft,
    /// `X.lora_A.default.weight`: DiffSynth-Studio and ROLL.
    Diffsynth,
    /// `transformer.X.lora_A.weight`.
    Diffusers,
    /// `diffusion_model.X.lora_A.weight`.
    #[value(alias = "comfy")]
    Comfyui,
    /// `lora_unet_X.lora_down.weight`.
    Kohya,
}

/// Whose layer names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayerNames {
    /// `blocks.0.self_attn.q`.
    Official,
    /// `blocks.0.attn1.to_q`.
    Diffusers,
}

/// The two transformers of Wan2.2-A14B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExpertName {
    /// The high-noise one, `dit` and `transformer`.
    #[value(alias = "dit", alias = "high_noise")]
    High,
    /// The low-noise one, `dit2` and `transformer_2`.
    #[value(alias = "dit2", alias = "low_noise")]
    Low,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoredDType {
    /// Four bytes, as trained.
    F32,
    /// Two bytes, rounded.
    Bf16,
    /// Two bytes, rounded, of less range.
    F16,
}

impl StoredDType {
    /// As the dtype of a tensor.
    pub fn dtype(self) -> roll_core::DType {
        match self {
            Self::F32 => roll_core::DType::F32,
            Self::Bf16 => roll_core::DType::Bf16,
            Self::F16 => roll_core::DType::F16,
        }
    }
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
