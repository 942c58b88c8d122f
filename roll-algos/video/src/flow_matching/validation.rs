//! The loss on clips that are not trained on.

use roll_core::{
    Adapter, Error, Grad, Model, Noise, Progress, Purpose, Result, ResultExt, Sample, Sigma, Tensor, Validation,
    VelocityInput,
};
use roll_step::ranks::join_f64;

use super::report::Tally;
use super::{Distribution, FlowMatching, diffusion, mixed};

/// Number of noise levels at which every clip is measured. The distribution of levels is divided into this number of
/// equally probable parts, and each clip is measured at the median of each part.
const LEVELS: usize = 8;

impl FlowMatching {
    /// Measures the training loss on the held-out clips, without prompt dropout. Noise and noise levels are the same
    /// each time, so that two values differ by the model alone. Returns the metrics `val/loss` and, per part of the
    /// range of noise levels, `val/loss/0.225-0.450`. Each rank measures its own clips, and all ranks return the same
    /// result.
    pub(super) fn validation(
        &mut self,
        model: &mut dyn Model,
        noise: &Noise,
        progress: &dyn Progress,
    ) -> Result<Option<Validation>> {
        let Some(clips) = self.held_out.clone() else { return Ok(None) };
        let distribution = self.distribution(model)?;
        let (mut tally, mut own_losses) = (Tally::default(), Vec::new());
        for (i, sample) in clips.iter().enumerate() {
            if progress.interrupted() {
                return Err(Error::Interrupted);
            }
            progress.phase(&format!("validating clip {} of {}", i + 1, clips.len()));
            let loss = self.measure(model, noise, progress, sample, &distribution, &mut tally);
            own_losses.extend(loss.while_doing(|| format!("validating on {}", sample.origin))?);
        }
        let losses = join_f64(self.ranks.as_ref(), own_losses)?;
        let tally = tally.joined(self.ranks.as_ref())?;
        let parts = tally.losses_by_part(distribution.levels.range());
        let mean_loss = tally.loss().map(|loss| ("val/loss".to_string(), loss));
        let metrics = parts.into_iter().map(|(name, loss)| (format!("val/{name}"), loss)).chain(mean_loss);
        Ok(Some(Validation { metrics: metrics.collect(), records: Vec::new(), losses }))
    }

    /// Counts the draws of one clip in `tally`. Returns the clip's loss; `None` if nothing of the clip is left to
    /// predict.
    fn measure(
        &mut self,
        model: &mut dyn Model,
        noise: &Noise,
        progress: &dyn Progress,
        sample: &Sample,
        distribution: &Distribution,
        tally: &mut Tally,
    ) -> Result<Option<f64>> {
        let clip = self.encoded(model, progress, sample)?;
        if let Some(reason) = clip.nothing_to_predict() {
            tracing::debug!(sample = %sample.origin, reason, "the sample is skipped");
            return Ok(None);
        }
        let (data, conditioning) = (&clip.latents, &clip.conditioning);
        let n = data.len();
        let noises = noise.normal(Purpose::Evaluation, 0, sample.index, &[LEVELS, n])?;
        // Noise level, noised latents, and noise.
        let mut draws: Vec<(Sigma, Tensor, &[f32])> = Vec::new();
        for (i, noise) in noises.f32s()?.chunks_exact(n).enumerate() {
            let sigma = distribution.levels.at((i as f64 + 0.5) / LEVELS as f64);
            draws.push((sigma, conditioning.with_first_frame(&mixed(data, noise, sigma)?)?, noise));
        }
        let mut sum = 0.0;
        for batch in draws.chunks(self.config.draws_at_once) {
            let inputs: Vec<VelocityInput<'_>> = batch
                .iter()
                .map(|(sigma, latents, _)| VelocityInput { latents, timestep: sigma.timestep(), conditioning })
                .collect();
            let (velocities, _) = diffusion(model)?.velocities(&inputs, Adapter::On, Grad::Skip)?;
            for ((sigma, _, noise), velocity) in batch.iter().zip(velocities.unstack()?) {
                let (loss, _) = clip.velocity_loss(&velocity, noise)?;
                let weight = distribution.weighting.at(*sigma) / LEVELS as f64;
                sum += weight * loss;
                tally.count_draw(distribution.levels.range(), *sigma, loss, weight);
            }
        }
        tally.samples += 1;
        Ok(Some(sum))
    }
}
