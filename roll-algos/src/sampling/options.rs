//! The options of sampling that algorithms share, by the names that they have in each.

use crate::{FlowSchedule, Sampler};
use roll_core::{Error, Options, Result, ScheduleFacts};
use serde::Deserialize;

use super::{Guidance, GuidanceGradient, GuidanceScale, Sampling};

/// How the videos of a configuration are sampled. Read from the options of an algorithm, whose others are left alone.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct SamplingOptions {
    /// Denoising steps from noise to data.
    pub num_inference_steps: usize,
    /// The timesteps themselves, before the shift, as distilled models list theirs.
    pub timesteps: Option<Vec<u32>>,
    /// Shift of the noise levels; the model's own when absent.
    pub shift: Option<f64>,
    /// The step from one noise level to the next.
    pub sampler: Sampler,
    /// Scale of the guidance.
    pub guidance_scale: GuidanceScale,
    /// Negative prompt, which guidance leads away from.
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
    /// Those of an algorithm that has options of these names, as it samples in evaluations; defaults for those that it
    /// has not.
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

    /// All of it for a model with these facts. Errors name keys without their section.
    pub fn sampling(&self, facts: ScheduleFacts) -> Result<Sampling> {
        let guidance = Guidance::new(self.guidance_scale, GuidanceGradient::Conditional, facts)?;
        Ok(Sampling { schedule: self.schedule(facts)?, sampler: self.sampler, guidance })
    }
}

/// Fails when `steps` was set, to something else than its default, beside a list of timesteps of another length.
pub(crate) fn agreeing_steps(timesteps: Option<&[u32]>, steps: usize, default: usize) -> Result<()> {
    match timesteps {
        Some(list) if steps != list.len() && steps != default => Err(Error::config(
            "num_inference_steps",
            format!("{steps} steps, and `timesteps` lists {}: leave one of the two out", list.len()),
        )),
        _ => Ok(()),
    }
}
