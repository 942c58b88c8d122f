//! The sampling options that algorithms share, under the same names in each.

use crate::{FlowSchedule, Sampler};
use roll_core::{Error, Options, Result, ScheduleFacts};
use serde::Deserialize;

use super::{Guidance, GuidanceGradient, GuidanceScale, Sampling};

/// How the videos of a configuration are sampled. Deserialised from an algorithm's options; other options are ignored.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct SamplingOptions {
    /// Denoising steps from noise to data.
    pub num_inference_steps: usize,
    /// The timesteps of the steps before the shift, in place of `num_inference_steps` evenly spaced ones.
    pub timesteps: Option<Vec<u32>>,
    /// Shift of the noise levels. Default: the model's own.
    pub shift: Option<f64>,
    /// Sampler of the steps between noise levels.
    pub sampler: Sampler,
    /// Scale of classifier-free guidance.
    pub guidance_scale: GuidanceScale,
    /// Negative prompt of classifier-free guidance.
    pub negative_prompt: String,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self {
            num_inference_steps: 8,
            timesteps: None,
            shift: None,
            sampler: Sampler::Euler,
            guidance_scale: GuidanceScale::OFF,
            negative_prompt: String::new(),
        }
    }
}

impl SamplingOptions {
    /// Reads the sampling options of evaluations from the options of an algorithm. Options that the algorithm does not
    /// have get their defaults.
    pub fn of(algorithm: &Options) -> Result<Self> {
        let mut options = algorithm.clone();
        options.retain(|_, value| !value.is_null());
        if let Some(sampler) = options.get("evaluation_sampler").cloned() {
            options.insert("sampler".into(), sampler);
        }
        serde_json::from_value(options.into()).map_err(|error| Error::config("algo", error.to_string()))
    }

    /// The noise levels for a model with these facts.
    pub fn schedule(&self, facts: ScheduleFacts) -> Result<FlowSchedule> {
        let shift = self.shift.unwrap_or(facts.shift);
        match &self.timesteps {
            Some(timesteps) => FlowSchedule::from_timesteps(timesteps, shift),
            None => self.sampler.schedule(self.num_inference_steps, shift),
        }
    }

    /// The sampling for a model with these facts. Errors name keys without their section.
    pub fn sampling(&self, facts: ScheduleFacts) -> Result<Sampling> {
        let guidance = Guidance::new(self.guidance_scale, GuidanceGradient::Conditional, facts)?;
        Ok(Sampling { schedule: self.schedule(facts)?, sampler: self.sampler, guidance })
    }
}

/// Fails if a list of timesteps is given and `steps` is neither its length nor `default`, the value of an option that
/// is not set.
pub(crate) fn check_steps_agree(timesteps: Option<&[u32]>, steps: usize, default: usize) -> Result<()> {
    match timesteps {
        Some(list) if steps != list.len() && steps != default => Err(Error::config(
            "num_inference_steps",
            format!("{steps} steps, and `timesteps` lists {}: leave one of the two out", list.len()),
        )),
        _ => Ok(()),
    }
}
