//! Arguments of the commands about runs: planned, made, shown.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::{ConfigArgs, ConfigFiles, KeyValue};

/// Arguments of `roll init`.
#[derive(Debug, ClapArgs)]
pub struct Init {
    /// The configuration to write.
    #[arg(default_value = "roll.yaml")]
    pub file: PathBuf,
    /// The answer to the question of this key, or a further key for the file.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// The GPUs that the run is for: number and GB of memory, such as 1x24 or 8x80.
    #[arg(long, value_name = "NxGB")]
    pub on: Option<String>,
    /// Ask nothing: take the defaults of all questions that `--set` does not answer.
    #[arg(long, short)]
    pub yes: bool,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll run`.
#[derive(Debug, Default, ClapArgs)]
pub struct Run {
    #[command(flatten)]
    pub config: ConfigArgs,
    // An empty struct. It declares the plain arguments, which `Layers` in the field `config` reads as files.
    #[command(flatten)]
    pub _files: ConfigFiles,
    /// The run directory itself; `output_dir`/`exp_name`-N unless given.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Number of optimizer steps, as `steps`.
    #[arg(long, value_name = "N", value_parser = super::whole, allow_negative_numbers = true)]
    pub steps: Option<u64>,
    /// Number of ranks of this process, as `ranks`: threads that divide the samples of a step among them.
    #[arg(long, value_name = "N", value_parser = super::positive)]
    pub ranks: Option<usize>,
    /// Continue the run in this directory from its newest whole checkpoint, on any number of ranks. Files and values
    /// given here override its configuration. The run of another person takes `--trust`.
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    pub resume: Option<PathBuf>,
    /// Check everything that the run needs, as `roll check` does, and do not train.
    #[arg(long)]
    pub dry_run: bool,
}

impl Run {
    /// Values of the keys for which `roll run` has arguments of its own.
    pub fn keys(&self) -> Vec<KeyValue> {
        let steps = self.steps.map(|n| KeyValue { key: "steps", value: n.to_string(), origin: "--steps" });
        let ranks = self.ranks.map(|n| KeyValue { key: "ranks", value: n.to_string(), origin: "--ranks" });
        steps.into_iter().chain(ranks).collect()
    }

    /// Number of ranks of the job, as far as the arguments and the launcher say.
    pub fn all_ranks(&self) -> usize {
        crate::ranks::process().world_size().max(self.ranks.unwrap_or(1))
    }
}

/// Default number of references that the reward is tried on.
const DEFAULT_REFERENCES: usize = 16;

/// Arguments of `roll check`.
#[derive(Debug, ClapArgs)]
pub struct Check {
    #[command(flatten)]
    pub run: Run,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Number of references that the reward is tried on.
    #[arg(long, default_value_t = DEFAULT_REFERENCES, value_name = "N")]
    pub samples: usize,
}

impl Check {
    /// The check that `roll check` makes of this run without arguments of its own: on this machine, with the default
    /// number of references.
    pub fn of(run: Run) -> Self {
        Self { run, machine: MachineArgs::default(), samples: DEFAULT_REFERENCES }
    }
}

/// The machine that a run is planned for.
#[derive(Debug, Default, ClapArgs)]
pub struct MachineArgs {
    /// Devices: number and GB of memory, such as 1x24, 4x48 or 8x80; this machine unless given.
    #[arg(long, value_name = "NxGB")]
    pub on: Option<String>,
    /// Number of devices, instead of that of `--on`.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub devices: Option<u32>,
    /// Memory of a device in GB, instead of that of `--on`.
    #[arg(long, value_name = "GB")]
    pub memory: Option<f64>,
    /// Host memory in GB that all ranks share, instead of that of this machine.
    #[arg(long, value_name = "GB")]
    pub host_memory: Option<f64>,
    /// TFLOP/s that a device sustains, instead of the figure for `--on` or of a measurement on this machine.
    #[arg(long, value_name = "N")]
    pub tflops: Option<f64>,
}

/// Arguments of `roll plan`.
#[derive(Debug, ClapArgs)]
pub struct PlanArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    // An empty struct. It declares the plain arguments, which `Layers` in the field `config` reads as files.
    #[command(flatten)]
    pub _files: ConfigFiles,
    /// A published model, without its files; otherwise `model.model_paths`, or `model.model_path` of a language
    /// model, whose headers alone are read.
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `roll devices`.
#[derive(Debug, ClapArgs)]
pub struct Devices {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `roll report`.
#[derive(Debug, ClapArgs)]
pub struct Report {
    /// Run directories, or directories of several runs.
    #[arg(required = true)]
    pub runs: Vec<PathBuf>,
    /// Page to write. Default: `report.html` in the run directory; for several runs, in the current directory.
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace an existing file of `--output`.
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `roll watch`.
#[derive(Debug, ClapArgs)]
pub struct Watch {
    /// Run directories, or directories of several runs; a run need not have begun.
    #[arg(required = true)]
    pub runs: Vec<PathBuf>,
    /// Port on 127.0.0.1; any free one unless given.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    pub port: u16,
    /// Let the page stop a run of yours, with a checkpoint, as Ctrl-C does.
    #[arg(long)]
    pub control: bool,
    /// Serve a page on which people vote on the clips of runs with the reward `vote`.
    #[arg(long)]
    pub vote: bool,
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
    /// Metric of the vertical axis. Default: the first headline metric of the run's algorithm.
    #[arg(long, value_name = "METRIC")]
    pub y: Option<String>,
    /// SVG to write.
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Replace an existing file.
    #[arg(long)]
    pub force: bool,
}
