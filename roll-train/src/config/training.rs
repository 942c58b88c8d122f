//! The section `training`: optimizer, learning-rate schedule and batch sizes.

use serde::{Deserialize, Serialize};

use roll_core::{Error, OptimizerConfig, Result};

/// Optimizer (AdamW), learning-rate schedule and batch sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingConfig {
    /// Highest learning rate of the schedule. At least 0. Default: 2.5e-6.
    pub learning_rate: f64,
    /// Shape of the learning-rate schedule, by its name in Hugging Face transformers: `constant`,
    /// `constant_with_warmup`, `linear` (falls to 0 at the last step) or `cosine` (likewise). Default: `constant`,
    /// which ignores `warmup_steps`, as in transformers.
    pub lr_scheduler_type: String,
    /// Optimizer steps over which the learning rate rises from 0 to `learning_rate`. Default: 0.
    pub warmup_steps: u64,
    /// Samples in one micro-batch on one rank. At least 1. Default: 1.
    pub per_device_train_batch_size: usize,
    /// Micro-batches in one optimizer step on one rank. At least 1. Default: 1.
    pub gradient_accumulation_steps: usize,
    /// Number of epochs, used only when `steps` is unset. An epoch passes `data.repeat` times over the metadata. At
    /// least 1. Default: 1.
    pub num_train_epochs: u64,
    /// Decoupled weight decay of AdamW. At least 0. Default: 0.
    pub weight_decay: f64,
    /// Decay rates of AdamW's first and second moment. In [0, 1). Default: [0.9, 0.999].
    pub betas: [f64; 2],
    /// Added to the square root of AdamW's second moment, so that nothing is divided by 0. At least 0. Default: 1e-8.
    pub eps: f64,
    /// A gradient with a larger global L2 norm is scaled down to this norm. At least 0; 0 turns clipping off.
    /// Default: 1.
    pub max_grad_norm: f64,
    /// The run stops after this many steps if none of them trained anything, and says why: every sample was left out, or
    /// every update, or no parameter changed. Later it stops after ten times as many such steps in a row, and so does an
    /// agent from its beginning; a run that never changed a parameter fails at its end. 0: never. Default: 5.
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

    /// Checks the ranges of the values; errors name the key in the section `training`.
    pub fn check(&self) -> Result<()> {
        for (key, count) in [
            ("training.per_device_train_batch_size", self.per_device_train_batch_size as u64),
            ("training.gradient_accumulation_steps", self.gradient_accumulation_steps as u64),
            ("training.num_train_epochs", self.num_train_epochs),
        ] {
            if count == 0 {
                return Err(Error::config(key, "expected at least 1, found 0"));
            }
        }
        for (key, value) in [
            ("training.learning_rate", self.learning_rate),
            ("training.weight_decay", self.weight_decay),
            ("training.eps", self.eps),
            ("training.max_grad_norm", self.max_grad_norm),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::config(key, format!("expected a finite number of at least 0, found {value}")));
            }
        }
        match self.betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
            Some(beta) => Err(Error::config("training.betas", format!("expected numbers in [0, 1), found {beta}"))),
            None => Ok(()),
        }
    }
}
