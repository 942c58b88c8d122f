//! The top level of a configuration.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{EvaluationConfig, Tracker, TrainingConfig};
use roll_core::{Component, Error, Noise, Result, RewardComponent};
use roll_data::DataConfig;

/// The complete configuration of a run. Where ROLL has the same setting, the name and the default are ROLL's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Key of every random choice: noise, initial adapters, order of the data. Two runs of one configuration and seed
    /// make the same choices. Default: 42.
    pub seed: u64,
    /// When set, every sample of every step starts from the noise that `torch.randn` draws with this seed; ROLL uses
    /// 24. Default: `null`, each sample has noise of its own, drawn from `seed`.
    pub noise_seed: Option<u32>,
    /// Name of the experiment, which names the run directory. A directory name: no separators, no leading dot.
    /// Default: `null`, the name of the algorithm.
    pub exp_name: Option<String>,
    /// Directory in which run directories are made. Default: `runs`.
    pub output_dir: PathBuf,
    /// Tensor backend and device: `flex` (CPU), `libtorch` (CPU), `libtorch-cuda:N`, `cuda:N` or `wgpu:N`; all but
    /// `flex` are cargo features. Default: `flex`.
    pub backend: String,
    /// Number of optimizer steps. Default: `null`, the number that `training.num_train_epochs` epochs take.
    pub steps: Option<u64>,
    /// Upper limit on the number of optimizer steps; used only when `steps` is unset. Default: `null`, no limit.
    pub max_steps: Option<u64>,
    /// Write a checkpoint every this many optimizer steps, and one at the end. Default: 25; 0 writes only the one at
    /// the end.
    pub save_steps: u64,
    /// Write the videos of a step's samples every this many optimizer steps. Default: 25; 0 writes no videos.
    pub sample_steps: u64,
    /// Write metrics every this many optimizer steps, and at the end. At least 1. Default: 1.
    pub logging_steps: u64,
    /// Number of checkpoints to keep; older ones are deleted. At least 1. Default: `null`, all are kept.
    pub max_ckpt_to_keep: Option<usize>,
    /// Where metrics go: `tensorboard` (event files) and `jsonl` (`metrics.jsonl`, which curves and reports are drawn
    /// from). Default: both. ROLL's other values have no effect.
    pub track_with: Vec<Tracker>,
    /// A command, with its arguments, that is run when the run ends: done, stopped, failed or interrupted. It finds how
    /// in its environment (`ROLL_RUN_STATUS`, `ROLL_RUN_DIR`, `ROLL_RUN_STEPS`, `ROLL_RUN_ERROR`) and as JSON on its
    /// standard input, and is killed after 60 seconds. Default: an empty list, none.
    pub on_finish: Vec<String>,
    /// Libraries (dylibs) with further components; `roll plugins` lists what they offer. Default: an empty list.
    pub plugins: Vec<PathBuf>,
    /// Let components of `plugins` replace built-in ones of the same name. Default: false, such a name is an error.
    pub plugins_replace: bool,
    /// The training algorithm: its `name` and its options.
    pub algo: Component,
    /// The model: its `name` and its options.
    pub model: Component,
    /// The rewards: of each its `name`, its `weight` (default: 1) and its options. The score is the weighted sum. A
    /// single map stands for a list of one. Default: an empty list.
    pub reward: Vec<RewardComponent>,
    /// The environment in which an agent acts: its `name` and its options. Default: `null`, no environment.
    pub env: Option<Component>,
    /// The training strategy, which turns gradients into updates: its `name` and its options.
    pub strategy: Component,
    /// Optimizer, learning-rate schedule and batch sizes.
    pub training: TrainingConfig,
    /// Training data.
    pub data: DataConfig,
    /// What is generated and scored before and after training.
    pub evaluation: EvaluationConfig,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            seed: 42,
            noise_seed: None,
            exp_name: None,
            output_dir: "runs".into(),
            backend: "flex".into(),
            steps: None,
            max_steps: None,
            save_steps: 25,
            sample_steps: 25,
            logging_steps: 1,
            max_ckpt_to_keep: None,
            track_with: vec![Tracker::Tensorboard, Tracker::Jsonl],
            on_finish: Vec::new(),
            plugins: Vec::new(),
            plugins_replace: false,
            algo: Component::named("reward_fl"),
            model: Component::named("wan2_2"),
            reward: Vec::new(),
            env: None,
            strategy: Component::named("single"),
            training: TrainingConfig::default(),
            data: DataConfig::default(),
            evaluation: EvaluationConfig::default(),
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

    /// Name of the experiment, or of the algorithm when it has none.
    pub fn experiment(&self) -> &str {
        self.exp_name.as_deref().unwrap_or(&self.algo.name)
    }

    /// Checks ranges and values that exclude one another, which types cannot; errors name the key.
    pub fn check(&self) -> Result<()> {
        self.check_top_level()?;
        self.training.check()?;
        self.evaluation.check()?;
        self.data.check()
    }

    fn check_top_level(&self) -> Result<()> {
        for (key, count) in
            [("logging_steps", self.logging_steps), ("max_ckpt_to_keep", self.max_ckpt_to_keep.unwrap_or(1) as u64)]
        {
            if count == 0 {
                return Err(Error::config(key, "expected at least 1, found 0"));
            }
        }
        if self.exp_name.as_deref().is_some_and(|n| n.is_empty() || n.contains(['/', '\\']) || n.starts_with('.')) {
            return Err(Error::config(
                "exp_name",
                "expected the name of a directory, without separators or a leading dot",
            ));
        }
        for (i, reward) in self.reward.iter().enumerate() {
            if !reward.weight.is_finite() {
                return Err(Error::config(
                    format!("reward.{i}.weight"),
                    format!("expected a finite number, found {}", reward.weight),
                ));
            }
        }
        Ok(())
    }
}
