//! The section `training`: optimizer, learning-rate schedule and batch sizes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use roll_backends::optimizer::{LrSchedule, LrSchedulerOptions, LrSchedulerType};
use roll_core::OptimizerConfig;

use crate::progress::counted;

/// Optimizer (AdamW), learning-rate schedule and batch sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingConfig {
    /// Highest learning rate of the schedule. Without it, 1e-4 for an adapter that learns from examples
    /// (`flow_matching`, `sft`), 1e-5 for one that learns from rewards or preferences; a tenth of these for all weights
    /// (`model.lora_rank: 0`).
    #[schemars(range(min = 0))]
    pub learning_rate: f64,
    /// Shape of the learning-rate schedule, by its name in Hugging Face transformers.
    pub lr_scheduler_type: LrSchedulerType,
    /// Options of the schedule, by their names in Hugging Face transformers.
    pub lr_scheduler_kwargs: LrSchedulerOptions,
    /// Optimizer steps over which the learning rate rises from 0 to `learning_rate`.
    pub warmup_steps: u64,
    /// Samples in one micro-batch on one rank.
    #[schemars(range(min = 1))]
    pub per_device_train_batch_size: usize,
    /// Micro-batches in one optimizer step on one rank.
    #[schemars(range(min = 1))]
    pub gradient_accumulation_steps: usize,
    /// Number of epochs, used only when `steps` is unset. An epoch passes `data.repeat` times over the metadata.
    #[schemars(range(min = 1))]
    pub num_train_epochs: u64,
    /// Decoupled weight decay of AdamW.
    #[schemars(range(min = 0))]
    pub weight_decay: f64,
    /// Decay rates of AdamW's first and second moment.
    #[schemars(extend("items" = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}))]
    pub betas: [f64; 2],
    /// Added to the square root of AdamW's second moment, so that nothing is divided by 0.
    #[schemars(range(min = 0))]
    pub eps: f64,
    /// A gradient with a larger global L2 norm is scaled down to this norm. 0 turns clipping off.
    #[schemars(range(min = 0))]
    pub max_grad_norm: f64,
    /// Decay of an exponential moving average of the trained parameters. 0 keeps no average. Evaluations, validations
    /// and videos of `evaluation.prompts` use the average, and it is saved in `averaged/` of the checkpoints. After
    /// step n, average <- d average + (1 - d) parameters, with d = min((1 + n) / (10 + n), this number). The two
    /// matrices of an adapter's layer are averaged separately. Each rank keeps the average of all trained parameters,
    /// in f32.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub average: f64,
    /// A run fails if nothing is trained in this many steps from its start: every sample or every update was left out,
    /// or no parameter changed. Once something was trained, ten times as many such steps in a row make it fail. For an
    /// agent it is ten times as many from the start, too, unless every update was left out. A run that never changed a
    /// parameter fails at its end. 0 turns all of this off.
    pub max_skipped_steps: u64,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        let optimizer = OptimizerConfig::default();
        Self {
            learning_rate: 1e-5,
            lr_scheduler_type: LrSchedulerType::Constant,
            lr_scheduler_kwargs: LrSchedulerOptions::default(),
            warmup_steps: 0,
            per_device_train_batch_size: 1,
            gradient_accumulation_steps: 1,
            num_train_epochs: 1,
            weight_decay: optimizer.weight_decay,
            betas: optimizer.betas,
            eps: optimizer.eps,
            max_grad_norm: optimizer.max_grad_norm,
            average: 0.0,
            max_skipped_steps: 5,
        }
    }
}

impl TrainingConfig {
    /// The options of the optimizer, for the strategy.
    pub fn optimizer(&self) -> OptimizerConfig {
        OptimizerConfig {
            betas: self.betas,
            eps: self.eps,
            weight_decay: self.weight_decay,
            max_grad_norm: self.max_grad_norm,
        }
    }

    /// The learning-rate schedule of a run of `steps` optimizer steps.
    pub fn schedule(&self, steps: u64) -> LrSchedule {
        LrSchedule::new(self.lr_scheduler_type, self.learning_rate, self.warmup_steps, steps)
            .with_options(self.lr_scheduler_kwargs.clone())
    }

    /// The learning rate in words: "learning rate 1e-4, cosine, after 10 steps of warm-up".
    pub fn rate_in_words(&self) -> String {
        let name = serde_json::to_value(self.lr_scheduler_type).unwrap_or_default();
        let shape = name.as_str().unwrap_or_default().trim_end_matches("_with_warmup").replace('_', " ");
        let warmup = if self.has_warmup() && self.warmup_steps > 0 {
            format!(", after {} of warm-up", counted(self.warmup_steps, "step"))
        } else {
            String::new()
        };
        format!("learning rate {:e}, {shape}{warmup}", self.learning_rate)
    }

    /// Whether the shape of the schedule allows a warm-up.
    fn has_warmup(&self) -> bool {
        self.lr_scheduler_type != LrSchedulerType::Constant
    }

    /// A note if the warm-up is not over within a run of `steps` steps.
    pub fn warmup_note(&self, steps: u64) -> Option<String> {
        (self.has_warmup() && self.warmup_steps >= steps).then(|| {
            format!(
                "`training.warmup_steps: {}` is as long as the run of {} or longer: the learning rate never \
                 reaches {:e}",
                self.warmup_steps,
                counted(steps, "step"),
                self.learning_rate
            )
        })
    }

    /// Samples of one optimizer step on one rank.
    pub fn samples_per_rank(&self) -> usize {
        self.per_device_train_batch_size * self.gradient_accumulation_steps
    }
}
