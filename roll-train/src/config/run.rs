//! What a run can be told.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use roll_core::{Component, Error, Noise, OptimizerConfig, Result, RewardComponent};
use roll_data::DataConfig;

/// Everything a run can be told. Names and defaults that the reference has are the reference's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Key of every random choice: noise, initial adapters, the order of the data.
    pub seed: u64,
    /// When set, every sample of every step starts from `torch.randn` of this seed, as in the reference (24 there).
    pub noise_seed: Option<u32>,
    /// Name of the experiment: the run directory is called after it. `null`: after the algorithm.
    pub exp_name: Option<String>,
    /// Directory that run directories are made in.
    pub output_dir: PathBuf,
    /// Tensor backend and device: `flex` (CPU), `libtorch` (CPU), `libtorch-cuda:N`, `cuda:N`; all but the first are
    /// cargo features.
    pub backend: String,
    /// Optimizer steps to take. `null`: what `training.num_train_epochs` passes over the data need.
    pub steps: Option<u64>,
    /// At most so many, when `steps` is not set. `null`: no limit.
    pub max_steps: Option<u64>,
    /// A checkpoint every so many steps, and one at the end. 0: only at the end.
    pub save_steps: u64,
    /// Sample videos every so many steps. 0: never.
    pub sample_steps: u64,
    /// Metrics every so many steps.
    pub logging_steps: u64,
    /// Older checkpoints beyond this number are deleted. `null`: none is.
    pub max_ckpt_to_keep: Option<usize>,
    /// Libraries with further components; see `roll plugins`.
    pub plugins: Vec<PathBuf>,
    /// Components of `plugins` take the place of linked-in ones of the same name, which is an error otherwise.
    pub plugins_replace: bool,
    /// The training algorithm and its options.
    pub algo: Component,
    /// The model and its options.
    pub model: Component,
    /// The rewards; the score is their weighted sum. A single map is taken for a list of one.
    pub reward: Vec<RewardComponent>,
    /// The environment that an agent acts in, and its options. `null`: none.
    pub env: Option<Component>,
    /// How gradients become updates.
    pub strategy: Component,
    /// Optimizer, schedule and batch sizes.
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

    /// Checks what types cannot: ranges and values that exclude one another.
    pub fn check(&self) -> Result<()> {
        let positive = |key: &str, value: u64| match value {
            0 => Err(Error::config(key, "expected at least 1, found 0")),
            _ => Ok(()),
        };
        let finite = |key: &str, value: f64| match value.is_finite() && value >= 0.0 {
            true => Ok(()),
            false => Err(Error::config(key, format!("expected a finite number of at least 0, found {value}"))),
        };
        positive("logging_steps", self.logging_steps)?;
        positive("max_ckpt_to_keep", self.max_ckpt_to_keep.unwrap_or(1) as u64)?;
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

        let t = &self.training;
        positive("training.per_device_train_batch_size", t.per_device_train_batch_size as u64)?;
        positive("training.gradient_accumulation_steps", t.gradient_accumulation_steps as u64)?;
        positive("training.num_train_epochs", t.num_train_epochs)?;
        finite("training.learning_rate", t.learning_rate)?;
        finite("training.weight_decay", t.weight_decay)?;
        finite("training.eps", t.eps)?;
        finite("training.max_grad_norm", t.max_grad_norm)?;
        if let Some(beta) = t.betas.iter().find(|b| !(0.0..1.0).contains(*b)) {
            return Err(Error::config("training.betas", format!("expected numbers in [0, 1), found {beta}")));
        }

        positive("evaluation.samples", self.evaluation.samples.unwrap_or(1) as u64)?;

        let d = &self.data;
        positive("data.max_pixels", d.max_pixels as u64)?;
        positive("data.num_frames", d.num_frames as u64)?;
        positive("data.repeat", d.repeat)?;
        match (d.height, d.width) {
            (None, None) => {}
            (Some(h), Some(w)) => {
                for (key, value) in [("data.height", h), ("data.width", w)] {
                    if value == 0 || value % 16 != 0 {
                        return Err(Error::config(key, format!("expected a multiple of 16, found {value}")));
                    }
                }
            }
            (Some(_), None) => return Err(Error::config("data.height", "needs data.width beside it")),
            (None, Some(_)) => return Err(Error::config("data.width", "needs data.height beside it")),
        }
        if let Some(ratio) = d.bucket_ratios.iter().find(|r| !(0.05..=20.0).contains(*r)) {
            let problem = format!("expected ratios of width to height, as 1.78 for 16:9, found {ratio}");
            return Err(Error::config("data.bucket_ratios", problem));
        }
        if !d.bucket_ratios.is_empty() && d.height.is_some() {
            return Err(Error::config("data.bucket_ratios", "`data.height` and `data.width` fix the ratio already"));
        }
        if let Some(frames) = d.bucket_frames.iter().find(|n| **n % 4 != 1 || **n > d.num_frames) {
            let problem = format!(
                "expected numbers one more than a multiple of 4, of at most `data.num_frames` ({}), found {frames}",
                d.num_frames
            );
            return Err(Error::config("data.bucket_frames", problem));
        }
        if d.fps.is_some_and(|fps| !(fps.is_finite() && fps > 0.0)) {
            return Err(Error::config("data.fps", "expected a positive number"));
        }
        Ok(())
    }
}

/// Optimizer, schedule and batch sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingConfig {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Name of the schedule, as in Hugging Face: `constant`, `constant_with_warmup`, `linear`, `cosine`, ...
    /// `constant` ignores `warmup_steps`, as there.
    pub lr_scheduler_type: String,
    /// Steps over which the learning rate rises from 0, for schedules that warm up.
    pub warmup_steps: u64,
    /// Samples of one micro-batch on one rank.
    pub per_device_train_batch_size: usize,
    /// Micro-batches of one optimizer step on one rank.
    pub gradient_accumulation_steps: usize,
    /// Passes over the data (each `data.repeat` times as long as the metadata), when `steps` is not set.
    pub num_train_epochs: u64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Decay rates of AdamW's moments.
    pub betas: [f64; 2],
    /// Added to the root of AdamW's second moment.
    pub eps: f64,
    /// Gradients are scaled down to this global norm; 0 turns clipping off.
    pub max_grad_norm: f64,
    /// The run stops after so many steps when not one sample of any of them could be trained on, and says why. 0: never.
    pub max_skipped_steps: u64,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        let optimizer = OptimizerConfig::default();
        Self {
            learning_rate: 2.5e-6,
            lr_scheduler_type: "constant".into(),
            warmup_steps: 0,
            per_device_train_batch_size: 1,
            gradient_accumulation_steps: 1,
            num_train_epochs: 1,
            weight_decay: optimizer.weight_decay,
            betas: optimizer.betas,
            eps: optimizer.eps,
            max_grad_norm: optimizer.max_grad_norm,
            max_skipped_steps: 5,
        }
    }
}

impl TrainingConfig {
    /// The part that a strategy takes.
    pub fn optimizer(&self) -> OptimizerConfig {
        OptimizerConfig {
            betas: self.betas,
            eps: self.eps,
            weight_decay: self.weight_decay,
            max_grad_norm: self.max_grad_norm,
        }
    }

    /// Samples of one optimizer step on one rank.
    pub fn samples_per_rank(&self) -> usize {
        self.per_device_train_batch_size * self.gradient_accumulation_steps
    }
}

/// Clips that a run generates with the model as it is before and after training, each time from the same noise. Sizes
/// and frame rate are those of [`DataConfig`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluationConfig {
    /// Metadata of clips that are not trained on. `null`: none.
    pub metadata: Option<PathBuf>,
    /// Directory that the file names in it start from. `null`: the directory of the CSV file.
    pub base_path: Option<PathBuf>,
    /// At most so many of them. `null`: all.
    pub samples: Option<usize>,
    /// So many clips of the training data too.
    pub train_samples: usize,
    /// Again every so many steps. 0: before and after only.
    pub every: u64,
    /// Rewards that are measured but never trained on: a gain that they do not see is suspect.
    pub check: Vec<RewardComponent>,
}
