//! The arguments of the command line.
//!
//! One file per group of commands, each with clap's structs, whose doc comments are the help texts. The code that runs
//! them is in [`crate::commands`].

mod bench;
mod config;
mod data;
mod examples;
mod layers;
mod models;
mod plugins;
mod rewards;
mod runs;
mod weights;

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

pub use bench::Bench;
pub use config::{Config, ReferenceFormat};
pub use data::{CaptionData, Crop, Data, DataAction, DataSet, InspectData, PrepareData, Votes};
pub use layers::{ConfigFiles, GivenValue, KeyValue, Layers};
pub use models::{Ask, Eval, Generate, SamplingArgs, Score};
pub use plugins::{CheckPlugin, Plugins, PluginsAction};
pub use rewards::{Rewards, RewardsAction, TryReward};
use roll_train::run_dir::RunDir;
pub use runs::{Check, Devices, Init, MachineArgs, PlanArgs, Plot, Report, Run, Watch};
pub use weights::{
    ConventionName, ConvertLora, ExpertName, Export, ExportExpert, InitExperts, InitTiny, Inspect, LayerNames,
    MergeLora, MergeShards, SplitShards, WanKind,
};

/// Heading of the options that every command has, below its own.
const GLOBAL: &str = "Options of every command";

/// Parses a number of at least 0.
fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "expected a whole number of at least 0".into())
}

/// Parses a number of at least 1.
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
    after_help = examples::ROLL
)]
pub struct Args {
    /// Warnings and errors only, and no progress bars.
    #[arg(long, short, global = true, conflicts_with = "verbose", help_heading = GLOBAL)]
    pub quiet: bool,
    /// More log messages; twice for all of them. `ROLL_LOG` or `RUST_LOG` choose by crate: `roll_wan=debug`.
    #[arg(long, short, global = true, action = clap::ArgAction::Count, help_heading = GLOBAL)]
    pub verbose: u8,
    /// Transport between the processes of a job in `run` and `check`: `nccl`, which needs a GPU for each process and
    /// leaves small messages to `host`; `host`, in host memory, over TCP; or `auto`, NCCL if it starts on all of them,
    /// else TCP.
    #[arg(
        long,
        global = true,
        value_enum,
        value_name = "NAME",
        default_value = "auto",
        hide_short_help = true,
        hide_possible_values = true,
        help_heading = GLOBAL
    )]
    pub collectives: Collectives,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The version and the features that are built in.
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
    ];
    let features: Vec<&str> =
        features.into_iter().filter_map(|(is_built_in, name)| is_built_in.then_some(name)).collect();
    format!("{} ({})", env!("CARGO_PKG_VERSION"), features.join(", "))
}

/// Transport of large collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Collectives {
    /// NCCL between processes that have a GPU each, if it starts on all of them; else TCP, with the reason.
    Auto,
    /// TCP, in host memory.
    Host,
    /// NCCL; small messages still go over the host.
    Nccl,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train.
    #[command(after_help = examples::RUN, visible_alias = "train")]
    Run(Run),
    /// Check everything that a run needs before it starts: files, data, faces, memory, time.
    #[command(after_help = examples::CHECK)]
    Check(Check),
    /// Generate a video or a picture from a prompt and an image, with or without an adapter.
    #[command(after_help = examples::GENERATE)]
    Generate(Generate),
    /// Ask a language model.
    #[command(after_help = examples::ASK)]
    Ask(Ask),
    /// Evaluate a language model on held-out questions or in an environment: the base and an adapter side by side.
    #[command(after_help = examples::EVAL)]
    Eval(Eval),
    /// Score a video or picture with the configured reward.
    #[command(after_help = examples::SCORE)]
    Score(Score),
    /// Look at training data as a run would see it, or write it in that form.
    #[command(after_help = examples::DATA)]
    Data(Data),
    /// Show the score and the gradient of a reward on a video.
    #[command(after_help = examples::REWARDS)]
    Rewards(Rewards),
    /// Ask what to train on what, write a configuration to begin with, and check it.
    #[command(after_help = examples::INIT)]
    Init(Init),
    /// Write a small model with random weights in the official file layout, for trials.
    #[command(after_help = examples::INIT_TINY)]
    InitTiny(InitTiny),
    /// Show a run, or compare several, in one HTML page: curves, videos before and after, times, warnings.
    #[command(after_help = examples::REPORT)]
    Report(Report),
    /// Show the report of runs in a browser while they go on.
    #[command(after_help = examples::WATCH)]
    Watch(Watch),
    /// Draw a metric of one or several runs, against the step or another metric.
    #[command(after_help = examples::PLOT)]
    Plot(Plot),
    /// Write untrained Wan transformers of a chosen size, to train from scratch with `flow_matching`.
    #[command(after_help = examples::INIT_EXPERTS)]
    InitExperts(InitExperts),
    /// Write a fully trained language model for transformers, vLLM and others: shards with an index, tokenizer beside.
    #[command(after_help = examples::EXPORT)]
    Export(Export),
    /// Turn the checkpoint of a full training into a weight file that can be used as the base.
    #[command(after_help = examples::EXPORT_EXPERT)]
    ExportExpert(ExportExpert),
    /// Add a LoRA of any convention to its base.
    #[command(after_help = examples::MERGE_LORA)]
    MergeLora(MergeLora),
    /// Rewrite a LoRA file for another program.
    #[command(after_help = examples::CONVERT_LORA)]
    ConvertLora(ConvertLora),
    /// Join the shards of a network into one file.
    #[command(after_help = examples::MERGE_SHARDS)]
    MergeShards(MergeShards),
    /// Split a weight file into shards with an index.
    #[command(after_help = examples::SPLIT_SHARDS)]
    SplitShards(SplitShards),
    /// Describe a weight file: network, convention, sizes.
    #[command(after_help = examples::INSPECT)]
    Inspect(Inspect),
    /// List the components that a configuration can name; inspect or check a plugin.
    #[command(after_help = examples::PLUGINS)]
    Plugins(Plugins),
    /// List the backends and GPUs that this machine can use, and what the others need.
    #[command(after_help = examples::DEVICES)]
    Devices(Devices),
    /// Estimate a run before it starts: memory by item and time by phase.
    #[command(after_help = examples::PLAN)]
    Plan(PlanArgs),
    /// Time a Reward-FL step of random networks of a given size, phase by phase.
    #[command(after_help = examples::BENCH)]
    Bench(Bench),
    /// Print the resolved configuration and where each value came from, the reference of all keys, or a configuration
    /// to begin with.
    #[command(after_help = examples::CONFIG)]
    Config(Config),
    /// Print completions for a shell.
    #[command(after_help = examples::COMPLETIONS)]
    Completions {
        /// Shell to print completions for.
        shell: clap_complete::Shell,
    },
}

/// Where the configuration comes from.
#[derive(Clone, Debug, Default, ClapArgs)]
pub struct ConfigArgs {
    #[command(flatten)]
    pub layers: Layers,
    /// Library with further components, beside those of `plugins`.
    #[arg(long = "plugin", value_name = "FILE")]
    pub plugins: Vec<PathBuf>,
    /// Use the configuration of a run directory that another person wrote, or that was changed by hand. It may name
    /// programs, libraries, addresses, environment variables and files; without this argument they are listed, and
    /// nothing is done.
    #[arg(long)]
    pub trust: bool,
    /// The run that `--resume` of a command continues. Its configuration is the first layer, below the files.
    #[arg(skip)]
    pub run: Option<RunDir>,
    /// Let components of plugins replace built-in ones of the same name, as `plugins_replace`.
    #[arg(long)]
    pub plugins_replace: bool,
}
