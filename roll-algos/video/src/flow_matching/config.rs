//! Options of flow matching.

use crate::Sampler;
use roll_core::keys::check_ranges;
use roll_core::{Error, Result, ResultExt, ScheduleFacts, Sigma, SigmaRange};
use roll_step::update::OnNonfinite;

use super::levels::{Levels, LogitDistribution, TimestepSampling};
use super::loss::Weighting;
use crate::sampling::{GuidanceScale, Sampling, SamplingOptions, check_steps_agree};

/// Options of the algorithm `flow_matching`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FlowMatchingConfig {
    /// Distribution that noise levels are drawn from: `uniform`, `logit_normal` or `shifted`.
    pub timestep_sampling: TimestepSampling,
    /// Shift of the noise levels, in training and in sample videos. If absent, the shift of the model's official
    /// configuration.
    pub shift: Option<f64>,
    /// Mean of the logit, for `logit_normal`.
    pub logit_mean: f64,
    /// Standard deviation of the logit, for `logit_normal`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub logit_std: f64,
    /// Only noise levels (timestep / 1000) of at most this are drawn. If absent, the upper end of the range of the
    /// experts under training.
    #[schemars(range(min = 0, max = 1))]
    pub max_timestep_boundary: Option<f64>,
    /// Only noise levels (timestep / 1000) of at least this are drawn. If absent, the lower end of the range of the
    /// experts under training.
    #[schemars(range(min = 0, max = 1))]
    pub min_timestep_boundary: Option<f64>,
    /// Weight of a noise level in the loss: `uniform` or `bell`.
    pub loss_weighting: LossWeighting,
    /// Number of noise levels at which each training step trains every sample. They are stratified: one in each of as
    /// many equally probable parts of the distribution.
    #[schemars(range(min = 1))]
    pub draws_per_sample: usize,
    /// Batch size of the model: draws that it computes together. A larger batch is much faster on small models and
    /// takes proportionally more memory.
    #[schemars(range(min = 1))]
    pub draws_at_once: usize,
    /// Probability that the prompt is left empty, so that the model learns to work without one.
    #[schemars(range(min = 0, max = 1))]
    pub prompt_dropout: f64,
    /// Denoising steps of sample videos.
    pub num_inference_steps: usize,
    /// The timesteps of these denoising steps before the shift, in place of `num_inference_steps` evenly spaced ones.
    pub timesteps: Option<Vec<u32>>,
    /// Sampler of sample videos: `euler` or `unipc`.
    pub sampler: Sampler,
    /// Scale of classifier-free guidance in sample videos: one number, or `[high, low]` for the two experts; 1 turns
    /// guidance off.
    pub guidance_scale: GuidanceScale,
    /// Negative prompt, which guidance leads away from.
    pub negative_prompt: String,
    /// Bytes of encoded clips kept in memory. Clips for which there is no room are encoded again in each step.
    pub cache_bytes: usize,
    /// The reaction to a loss or gradient that is not finite.
    pub on_nonfinite: OnNonfinite,
}

impl Default for FlowMatchingConfig {
    fn default() -> Self {
        Self {
            timestep_sampling: TimestepSampling::Shifted,
            shift: None,
            logit_mean: 0.0,
            logit_std: 1.0,
            max_timestep_boundary: None,
            min_timestep_boundary: None,
            loss_weighting: LossWeighting::Uniform,
            draws_per_sample: 1,
            draws_at_once: 1,
            prompt_dropout: 0.0,
            num_inference_steps: 20,
            timesteps: None,
            sampler: Sampler::Euler,
            guidance_scale: GuidanceScale::OFF,
            negative_prompt: String::new(),
            cache_bytes: 1 << 30,
            on_nonfinite: OnNonfinite::Skip,
        }
    }
}

/// Weight of a noise level in the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossWeighting {
    /// The same weight for all noise levels.
    Uniform,
    /// A bell around the middle, as in DiffSynth-Studio.
    Bell,
}

impl FlowMatchingConfig {
    /// The noise levels to draw for a model with these facts. Fails on values that are out of range or contradict one
    /// another.
    pub fn levels(&self, facts: ScheduleFacts) -> Result<Levels> {
        check_ranges("algo", self)?;
        self.sampling(facts)?;
        let logit = LogitDistribution { mean: self.logit_mean, deviation: self.logit_std };
        Ok(Levels::new(self.timestep_sampling, self.shift(facts), logit, self.range(facts)?))
    }

    /// How sample videos are generated.
    pub fn sampling(&self, facts: ScheduleFacts) -> Result<Sampling> {
        let default = Self::default().num_inference_steps;
        check_steps_agree(self.timesteps.as_deref(), self.num_inference_steps, default).in_section("algo")?;
        let options = SamplingOptions {
            num_inference_steps: self.num_inference_steps,
            timesteps: self.timesteps.clone(),
            shift: self.shift,
            sampler: self.sampler,
            guidance_scale: self.guidance_scale,
            negative_prompt: self.negative_prompt.clone(),
        };
        options.sampling(facts).in_section("algo")
    }

    /// The weight of the loss at each noise level.
    pub fn weighting(&self, facts: ScheduleFacts) -> Result<Weighting> {
        match self.loss_weighting {
            LossWeighting::Uniform => Ok(Weighting::Uniform),
            LossWeighting::Bell => Weighting::bell(self.shift(facts)).in_section("algo"),
        }
    }

    fn shift(&self, facts: ScheduleFacts) -> f64 {
        self.shift.unwrap_or(facts.shift)
    }

    /// The noise levels that the options allow and the experts under training have.
    fn range(&self, facts: ScheduleFacts) -> Result<SigmaRange> {
        let requested = SigmaRange {
            low: Sigma(self.min_timestep_boundary.unwrap_or(0.0)),
            high: Sigma(self.max_timestep_boundary.unwrap_or(1.0)),
        };
        requested.within(facts.trained).ok_or_else(|| {
            Error::config(
                "algo.min_timestep_boundary",
                format!(
                    "no noise level is left: min_timestep_boundary to max_timestep_boundary is {} to {}, and the \
                     experts under training (`model.trainable_models`) work from {} to {}",
                    requested.low.0, requested.high.0, facts.trained.low.0, facts.trained.high.0
                ),
            )
        })
    }
}
