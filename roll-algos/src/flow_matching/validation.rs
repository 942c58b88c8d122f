//! The loss on clips that are not trained on.

use std::collections::BTreeMap;

use roll_core::{
    Adapter, Error, Grad, Model, Noise, Progress, Purpose, Result, ResultExt, Sample, Tensor, Validation, VelocityInput,
};

use super::report::Tally;
use super::{Distribution, FlowMatching, diffusion, mixed, velocity_loss};

/// Noise levels at which every clip is measured: the middles of equal parts of their distribution, one per level.
const LEVELS: usize = 8;

impl FlowMatching {
    /// The loss of training, on the clips that were held out: without prompt dropout, and from the same noise at the
    /// same levels each time, so that two values differ by the model alone. `val/loss`, and `val/loss/0.225-0.450` for
    /// the noise levels between. Of several ranks each measures its own clips, and all know the result.
    pub(super) fn validation(
        &mut self,
        model: &mut dyn Model,
        noise: &Noise,
        progress: &dyn Progress,
    ) -> Result<Option<Validation>> {
        let Some(clips) = self.held_out.clone() else { return Ok(None) };
        let facts = diffusion(model)?.schedule();
        let distribution =
            Distribution { levels: self.config.levels(facts)?, weighting: self.config.weighting(facts)? };
        let mut tally = Tally::new(distribution.levels.range());
        for (i, sample) in clips.iter().enumerate() {
            if progress.interrupted() {
                return Err(Error::Interrupted);
            }
            progress.phase(&format!("validating clip {} of {}", i + 1, clips.len()));
            self.measure(model, noise, progress, sample, &distribution, &mut tally)
                .while_doing(|| format!("validating on {}", sample.origin))?;
        }
        let report = tally.joined(self.ranks.as_ref())?.report(None, 0.0, BTreeMap::new());
        let metrics = report.metrics.into_iter().filter_map(|(name, value)| match name.strip_prefix("actor/") {
            Some("loss") => Some(("val/loss".to_string(), value)),
            None if name.starts_with("loss/") => Some((format!("val/{name}"), value)),
            _ => None,
        });
        Ok(Some(Validation { metrics: metrics.collect(), records: Vec::new() }))
    }

    fn measure(
        &mut self,
        model: &mut dyn Model,
        noise: &Noise,
        progress: &dyn Progress,
        sample: &Sample,
        distribution: &Distribution,
        tally: &mut Tally,
    ) -> Result<()> {
        let prepared = self.prepared_by(model, progress, sample)?;
        let (data, conditioning) = (&prepared.latents, &prepared.conditioning);
        if data.shape()[1] <= prepared.known_frames() {
            tally.skip(sample, "the clip is one latent frame, which the model is given: nothing is left to predict");
            return Ok(());
        }
        let n = data.len();
        let noise = noise.normal(Purpose::Evaluation, 0, sample.index, &[LEVELS, n])?;
        let mut draws: Vec<(_, Tensor, &[f32])> = Vec::new();
        for (i, noise) in noise.f32s()?.chunks_exact(n).enumerate() {
            let sigma = distribution.levels.at((i as f64 + 0.5) / LEVELS as f64);
            draws.push((sigma, conditioning.with_first_frame(&mixed(data, noise, sigma)?)?, noise));
        }
        for draws in draws.chunks(self.config.draws_at_once) {
            let input = |(sigma, x, _): &'_ (roll_core::Sigma, Tensor, &[f32])| (sigma.timestep(), x.clone());
            let inputs: Vec<_> = draws.iter().map(input).collect();
            let inputs: Vec<VelocityInput<'_>> = inputs
                .iter()
                .map(|(timestep, latents)| VelocityInput { latents, timestep: *timestep, conditioning })
                .collect();
            let (velocities, _) = diffusion(model)?.velocities(&inputs, Adapter::On, Grad::Skip)?;
            for ((sigma, _, noise), velocity) in draws.iter().zip(velocities.unstack()?) {
                let (loss, _) = velocity_loss(&velocity, data, noise, prepared.known_frames())?;
                tally.see(*sigma, loss, distribution.weighting.at(*sigma) / LEVELS as f64);
            }
        }
        tally.samples += 1;
        Ok(())
    }
}
