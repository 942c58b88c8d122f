//! The top level of a configuration.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use roll_backends::optimizer::LrSchedulerType;

use super::{Tracker, TrainingConfig};
use roll_core::{Component, Error, Noise, Result, RewardComponent};

/// Maximum number of ranks that are threads: each has threads, a stack and a copy of the networks.
const MAX_RANKS: usize = 256;

/// The configuration of a run. Where ROLL has the same setting, the name and the default are ROLL's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Key of every random choice: noise, initial adapters, order of the data. Two runs of one configuration and seed
    /// make the same choices.
    pub seed: u64,
    /// When set, every sample of every step starts from the noise that `torch.randn` draws with this seed; ROLL uses
    /// 24. `null`: each sample has noise of its own, drawn from `seed`.
    pub noise_seed: Option<u32>,
    /// Name of the experiment, which names the run directory. A directory name: no separators, no leading dot. `null`:
    /// the name of the algorithm.
    pub exp_name: Option<String>,
    /// Directory in which run directories are made.
    pub output_dir: PathBuf,
    /// Tensor backend and device: `flex` (CPU), `libtorch` (CPU), `libtorch-cuda:N`, `cuda:N` or `wgpu:N`; all but
    /// `flex` are cargo features.
    pub backend: String,
    /// Number of ranks of this process: threads, each with a copy of the networks and an equal share of the cores,
    /// which divide the samples of a step and the clips of evaluations among them, with the strategy `zero`. For
    /// networks too small to keep all cores busy. On a backend with numbered devices, each rank has its own, unless
    /// `backend` names one. Processes that a launcher starts are ranks already: there it has no effect.
    #[schemars(range(min = 1, max = MAX_RANKS))]
    pub ranks: usize,
    /// Number of optimizer steps. `null`: the number that `training.num_train_epochs` epochs take.
    pub steps: Option<u64>,
    /// Upper limit on the number of optimizer steps; used only when `steps` is unset. `null`: no limit.
    pub max_steps: Option<u64>,
    /// Write a checkpoint every this many optimizer steps, and one at the end. 0 writes only the one at the end.
    pub save_steps: u64,
    /// Write the videos of a step's samples every this many optimizer steps. 0 writes no videos.
    pub sample_steps: u64,
    /// Write metrics every this many optimizer steps, and at the end.
    #[schemars(range(min = 1))]
    pub logging_steps: u64,
    /// Number of checkpoints to keep; older ones are deleted. `null`: all are kept.
    #[schemars(range(min = 1))]
    pub max_ckpt_to_keep: Option<usize>,
    /// Destinations of the metrics: `tensorboard` (event files) and `jsonl` (`metrics.jsonl`, which curves and reports
    /// are drawn from). ROLL's other values have no effect.
    pub track_with: Vec<Tracker>,
    /// A command, with its arguments, that receives the metrics while the run goes on: each line of `metrics.jsonl` on its
    /// standard input, and the directory of the run in `ROLL_RUN_DIR`. It is started with the first step, and has 60 seconds
    /// to end after the last line. A resumed run starts it anew, and passes the steps on that it repeats. An empty list:
    /// none.
    pub on_metrics: Vec<String>,
    /// A command, with its arguments, that is run when the run ends: done, stopped, failed or interrupted. It finds how
    /// in its environment (`ROLL_RUN_STATUS`, `ROLL_RUN_DIR`, `ROLL_RUN_STEPS`, `ROLL_RUN_ERROR`) and as JSON on its
    /// standard input, and is killed after 60 seconds. An empty list: none.
    pub on_finish: Vec<String>,
    /// Libraries (dylibs) with further components; `roll plugins` lists these.
    pub plugins: Vec<PathBuf>,
    /// Let components of `plugins` replace built-in ones of the same name. Without it such a name is
    /// an error.
    pub plugins_replace: bool,
    /// The training algorithm: its `name` and its options.
    pub algo: Component,
    /// The model: its `name` and its options.
    pub model: Component,
    /// The rewards, each with `name`, `weight` and options. The score is the weighted sum. A single map is a list of
    /// one.
    pub reward: Vec<RewardComponent>,
    /// The environment in which an agent acts: its `name` and its options. `null`: no environment.
    pub env: Option<Component>,
    /// The training strategy, which turns gradients into updates: its `name` and its options.
    pub strategy: Component,
    /// Optimizer, learning-rate schedule and batch sizes.
    pub training: TrainingConfig,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            seed: 42,
            noise_seed: None,
            exp_name: None,
            output_dir: "runs".into(),
            backend: "flex".into(),
            ranks: 1,
            steps: None,
            max_steps: None,
            save_steps: 25,
            sample_steps: 25,
            logging_steps: 1,
            max_ckpt_to_keep: None,
            track_with: vec![Tracker::Tensorboard, Tracker::Jsonl],
            on_metrics: Vec::new(),
            on_finish: Vec::new(),
            plugins: Vec::new(),
            plugins_replace: false,
            algo: Component::named("reward_fl"),
            model: Component::named("wan2_2"),
            reward: Vec::new(),
            env: None,
            strategy: Component::named("single"),
            training: TrainingConfig::default(),
        }
    }
}

impl RunConfig {
    /// The source of randomness of the run.
    pub fn noise(&self) -> Noise {
        match self.noise_seed {
            Some(seed) => Noise::new(self.seed).with_fixed_latents(seed),
            None => Noise::new(self.seed),
        }
    }

    /// The name of the experiment. Without `exp_name`, this is the name of the algorithm.
    pub fn experiment(&self) -> &str {
        self.exp_name.as_deref().unwrap_or(&self.algo.name)
    }

    /// Fails if the name of the experiment is not that of a directory, or if values exclude one another, which types
    /// cannot express. The error names the key.
    pub fn check(&self) -> Result<()> {
        let is_directory_name = |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && !name.starts_with('.');
        if self.exp_name.as_deref().is_some_and(|name| !is_directory_name(name)) {
            let problem = "expected the name of a directory, without separators or a leading dot";
            return Err(Error::config("exp_name", problem));
        }
        let (training, last_rate) = (&self.training, self.training.lr_scheduler_kwargs.lr_end);
        if training.lr_scheduler_type == LrSchedulerType::Polynomial && last_rate >= training.learning_rate {
            let first_rate = training.learning_rate;
            let problem = format!("must be below `training.learning_rate` ({first_rate}), found {last_rate}");
            return Err(Error::config("training.lr_scheduler_kwargs.lr_end", problem));
        }
        Ok(())
    }
}
