//! What the command line takes.

mod bench;
mod config;
mod data;
mod models;
mod plugins;
mod rewards;
mod runs;
mod weights;

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

pub use bench::{Bench, TorchAttention};
pub use config::{Config, ReferenceFormat};
pub use data::{Data, DataAction, DataSet, InspectData, PrepareData};
pub use models::{Ask, Generate, SamplingArgs, Score};
pub use plugins::{CheckPlugin, Plugins, PluginsAction};
pub use rewards::{Rewards, RewardsAction, TryReward};
pub use runs::{Check, Machine, Plan, Plot, Report, Run};
pub use weights::{
    ConventionName, ConvertLora, ExpertName, ExportExpert, InitExperts, InitTiny, Inspect, LayerNames, MergeLora,
    MergeShards, SplitShards, TinyKind, TinyModel,
};

/// A number of at least 1.
fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("expected a whole number".into()),
    }
}

/// Post-trains generative models against rewards.
#[derive(Debug, Parser)]
#[command(
    name = "roll",
    version = version(),
    arg_required_else_help = true,
    after_help = "Examples:\n  roll run                                   the demo\n  roll run --config my.yaml --set training.learning_rate=1e-5\n  roll run --resume runs/my\n  roll report runs/my runs/other\n\nExit codes: 0 done, 2 your input is wrong, 1 something failed, 3 ended by `evaluation.stop_when`, 130 interrupted\n(after a checkpoint).\n`roll COMMAND --help` has examples of each command."
)]
pub struct Args {
    /// Warnings and errors only, and no progress bars.
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// More log messages; twice for all of them. `ROLL_LOG` or `RUST_LOG` choose by crate: `roll_models=debug`.
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Transport of collectives between processes; `nccl` needs a build with that feature, and a GPU for each process.
    #[arg(long, global = true, value_enum, default_value = "mpi", hide_short_help = true)]
    pub collectives: Collectives,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The version, and what is built in beside it.
fn version() -> &'static str {
    static VERSION: std::sync::LazyLock<String> = std::sync::LazyLock::new(version_and_features);
    &VERSION
}

fn version_and_features() -> String {
    let features = [
        (cfg!(feature = "flex"), "flex"),
        (cfg!(feature = "libtorch"), "libtorch"),
        (cfg!(feature = "cuda"), "cuda"),
        (cfg!(feature = "wgpu"), "wgpu"),
        (cfg!(feature = "hub"), "hub"),
        (cfg!(feature = "onnxruntime"), "onnxruntime"),
        (cfg!(feature = "mpi"), "mpi"),
        (cfg!(feature = "nccl"), "nccl"),
    ];
    let features: Vec<&str> = features.into_iter().filter_map(|(is, name)| is.then_some(name)).collect();
    format!("{} ({})", env!("CARGO_PKG_VERSION"), features.join(", "))
}

/// Transport of large collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Collectives {
    /// The launcher's MPI, in host memory.
    Mpi,
    /// NCCL; small messages still go over MPI.
    Nccl,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train.
    #[command(
        after_help = "Examples:\n  roll run                                                      the demo\n  roll run --algo agentic_ppo --model causal_lm                 the demo of an agent\n  roll init-tiny tiny && roll run --config examples/reward_fl_clip.yaml --steps 5\n  roll run --config my.yaml --set strategy.name=zero --set save_steps=10 --set max_ckpt_to_keep=3\n  roll run --resume runs/my                                     continue where it stopped\n  roll run --resume runs/my --steps 200                         continue, and train longer\n\nSIGINT (Ctrl-C), SIGTERM, SIGHUP (a closed terminal) and SIGUSR1 write a checkpoint and exit with 130; a second signal stops at once."
    )]
    Run(Run),
    /// Check everything that a run needs before it starts: files, data, faces, memory, time.
    #[command(
        after_help = "Examples:\n  roll check --config my.yaml\n  roll check --config my.yaml --on 1x80 --samples 100\n\nIt takes the arguments of `roll run`, reads headers of weights, writes nothing, and exits with 1 if the run would fail."
    )]
    Check(Check),
    /// Generate a video from a prompt and an image, with or without an adapter.
    #[command(
        after_help = "Example:\n  roll generate --config examples/reward_fl_clip.yaml --prompt 'a person talks' \\\n    --image face.png --adapter runs/clip/checkpoints/step-000005/adapter.safetensors --output out.mp4"
    )]
    Generate(Generate),
    /// Ask a language model.
    #[command(
        after_help = "Examples:\n  roll ask --model-path Qwen2.5-0.5B-Instruct 'What is the capital of France?'\n  roll ask --model-path SmolLM2-135M-Instruct.Q4_1.gguf --temperature 0.7 'Tell me a story.'"
    )]
    Ask(Ask),
    /// Score a video or picture with the configured reward.
    #[command(
        after_help = "Example:\n  roll score clip.mp4 --reference portrait.png --reward insightface --set reward.reward_model_path=models"
    )]
    Score(Score),
    /// Look at training data as a run would see it, or write it in that form.
    #[command(
        after_help = "Examples:\n  roll data inspect my/clips\n  roll data prepare my/clips prepared --set data.fps=16"
    )]
    Data(Data),
    /// Show the score and the gradient of a reward on a video.
    #[command(
        after_help = "Example:\n  roll rewards try sharpness clip.mp4 --set reward.wanted=reference --reference other.mp4 --output gradient.png"
    )]
    Rewards(Rewards),
    /// Write a small Wan checkpoint with random weights in the official file layout, for trials.
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
        after_help = "Example:\n  roll merge-lora wan/low_noise_model high_noise_lora.safetensors merged --alpha 0.8 --dtype bf16\n\nOUT is a file if it ends in .safetensors, otherwise a new directory with the shards of the base."
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
    /// Describe a weight file: network, convention, sizes.
    #[command(after_help = "Example:\n  roll inspect lora.safetensors")]
    Inspect(Inspect),
    /// List the components that a configuration can name; inspect or check a plugin.
    #[command(after_help = "Example:\n  roll plugins\n  roll plugins check target/release/libsharpness_reward.so")]
    Plugins(Plugins),
    /// Estimate a run before it starts: memory by item and time by phase.
    #[command(
        after_help = "Example:\n  roll plan --network wan2_2-i2v-a14b --on 8x80 --set strategy.name=zero --set strategy.stage=3"
    )]
    Plan(Plan),
    /// Time a Reward-FL step of random networks of a given size, phase by phase.
    #[command(
        after_help = "Examples:\n  roll bench\n  roll bench --preset a14b --backend libtorch-cuda --json a14b.json\n  roll bench --preset a14b --backend libtorch-cuda --whole-step --offload --compare\n  PYTHON=venv/bin/python roll bench --preset 1.3b --layers 2 --frames 17 --size 240x416 --compare"
    )]
    Bench(Bench),
    /// Print the resolved configuration and where each value came from, the reference of all keys, or a configuration to
    /// begin with.
    #[command(
        after_help = "Examples:\n  roll config --config my.yaml --set training.learning_rate=1e-5\n  roll config --reference training\n  roll config --reference lora_rank\n  roll config --template --algo flow_matching > my.yaml"
    )]
    Config(Config),
    /// Print completions for a shell.
    #[command(
        after_help = "Examples:\n  roll completions bash > ~/.local/share/bash-completion/completions/roll\n  roll completions zsh > \"${fpath[1]}/_roll\"\n  roll completions fish > ~/.config/fish/completions/roll.fish"
    )]
    Completions {
        /// Shell to print completions for.
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
    /// Reset a value to its default, or remove an optional section; same as `--set KEY=null`.
    #[arg(long, value_name = "KEY")]
    pub unset: Vec<String>,
    /// Algorithm, as `algo.name`.
    #[arg(long, value_name = "NAME")]
    pub algo: Option<String>,
    /// Model, as `model.name`.
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Environment that an agent acts in, as `env.name`.
    #[arg(long, value_name = "NAME")]
    pub env: Option<String>,
    /// Tensor backend and device, as `backend`: flex, libtorch, libtorch-cuda[:N], cuda[:N], wgpu[:N].
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Library with further components, beside those of `plugins`.
    #[arg(long = "plugin", value_name = "FILE")]
    pub plugins: Vec<PathBuf>,
    /// Let components of plugins replace built-in ones of the same name, as `plugins_replace`.
    #[arg(long)]
    pub plugins_replace: bool,
}
