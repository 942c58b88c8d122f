//! The data term: the flow-matching loss on the samples' own clips, which another algorithm adds to its loss so that
//! the model does not forget abilities that the other loss does not ask for.
//!
//! The term is computed at one noise level per sample. The level is drawn by the defaults of [`FlowMatchingConfig`]:
//! from the distribution of the sampler's steps, within the range of the experts under training.

use roll_core::{Adapter, Error, Grad, Purpose, Result, ResultExt, Sample, ScheduleFacts, StepContext};
use roll_step::AlgorithmError;

use super::config::FlowMatchingConfig;
use super::encoded::EncodedClip;
use super::loss::mixed;
use super::{diffusion, uniform_draws};
use crate::arithmetic::scaled;
use crate::sample_cache::SampleCache;

/// The data term of an algorithm, with the clips that it has encoded.
pub(crate) struct DataTerm {
    weight: f64,
    /// The options by which noise levels are drawn.
    config: FlowMatchingConfig,
    encoded_clips: SampleCache<EncodedClip>,
}

impl DataTerm {
    /// Creates the term. `weight` is `algo.data_weight`; 0 turns the term off. `shift` is `algo.shift`; `None` means
    /// the model's shift.
    pub(crate) fn new(weight: f64, shift: Option<f64>) -> Self {
        let config = FlowMatchingConfig { shift, ..FlowMatchingConfig::default() };
        Self { weight, encoded_clips: SampleCache::new(config.cache_bytes), config }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.weight > 0.0
    }

    /// The reason why a row without a clip cannot be trained on, for [`roll_core::ClipUse::why_needed`]. `None` if the
    /// term is off.
    pub(crate) fn reason_for_clips(&self) -> Option<String> {
        self.is_on().then(|| format!("`algo.data_weight: {}` trains on it, and 0 does not", self.weight))
    }

    pub(crate) fn weight(&self) -> f64 {
        self.weight
    }

    /// Fails on a negative or non-finite weight, and if no noise level can be drawn for a model with these facts.
    pub(crate) fn check(&self, facts: ScheduleFacts) -> Result<()> {
        if !(self.weight.is_finite() && self.weight >= 0.0) {
            let problem =
                format!("must be at least 0, found {}: it would drive the model away from the clips", self.weight);
            return Err(Error::config("algo.data_weight", problem));
        }
        self.config.levels(facts).map(drop)
    }

    /// Adds the gradient of `share * weight * loss` to the strategy and returns the loss of a sample's clip,
    /// `mean((v - (noise - data))^2)` at one noise level. `key` is the key of the sample's draws in the step. Returns
    /// `None` and adds nothing if nothing of the clip is left to predict. Adds nothing for a loss that is not finite.
    pub(crate) fn accumulate(
        &mut self,
        ctx: &mut StepContext<'_>,
        sample: &Sample,
        key: u64,
        share: f64,
    ) -> Result<Option<f64>> {
        let clip = self.encoded_clips.get_or_insert(sample, || {
            EncodedClip::new(diffusion(ctx.model)?, sample).while_doing(|| "encoding the clip".into())
        })?;
        if clip.nothing_to_predict().is_some() {
            return Ok(None);
        }
        let (data, conditioning) = (&clip.latents, &clip.conditioning);
        let levels = self.config.levels(diffusion(ctx.model)?.schedule())?;
        let sigma = levels.at(uniform_draws(ctx.noise, ctx.step, key)());
        let noise = ctx.noise.normal(Purpose::Clips, ctx.step, key, &[data.len()])?;
        let x = conditioning.with_first_frame(&mixed(data, noise.f32s()?, sigma)?)?;
        let (velocity, pullback) =
            diffusion(ctx.model)?.velocity(&x, sigma.timestep(), conditioning, Adapter::On, Grad::Record)?;
        let (loss, gradient) = clip.velocity_loss(&velocity, noise.f32s()?)?;
        if loss.is_finite() {
            let pullback = pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
            ctx.strategy.before_last_pull(ctx.model)?;
            pullback.pull(&scaled(&gradient, (share * self.weight) as f32)?)?;
            ctx.strategy.accumulate(ctx.model)?;
        }
        Ok(Some(loss))
    }
}
