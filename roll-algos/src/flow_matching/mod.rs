//! Flow matching: the training that makes a video diffusion model, from scratch or on one's own clips.
//!
//! Per sample: x_0 = encode(clip), a noise level sigma from a distribution ([`levels`]), x = (1 - sigma) x_0 + sigma
//! eps, and loss = mean((velocity(x) - (eps - x_0))^2) ([`loss`]). It trains whatever parameters the model has, adapters
//! or all weights, at the noise levels of the experts that have them.

pub mod config;
pub mod levels;
pub mod loss;

mod prepared;
mod report;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use roll_core::registry::{default_options, parse_options};
use roll_core::{
    Adapter, Algorithm, Conditioning, DiffusionModel, Factory, Grad, Model, Noise, Purpose, Registration, Result,
    ResultExt, RewardScorer, Sample, StepContext, StepReport, Tensor, Video,
};

pub use config::{Config, LossWeighting, TimestepSampling};
pub use levels::Levels;
pub use loss::{Weighting, mixed, velocity_loss};

use crate::remembered::Remembered;
use crate::stopwatch::Stopwatch;
use crate::{AlgorithmError, sampling, update};
use prepared::Prepared;
use report::{Outcome, Tally};

const NAME: &str = "flow_matching";

const ENCODE: &str = "time/encode";
const FORWARD: &str = "time/forward";
const PULL: &str = "time/pull";
const OPTIMIZER: &str = "time/optimizer";
const SAMPLE: &str = "time/sample";

/// The algorithm `flow_matching`.
pub struct FlowMatching {
    config: Config,
    prepared: Remembered<Prepared>,
    /// The embedding of the empty prompt.
    no_prompt: Option<Tensor>,
}

impl FlowMatching {
    /// With these options.
    pub fn new(config: Config) -> Self {
        let prepared = Remembered::new(config.cache_bytes);
        Self { config, prepared, no_prompt: None }
    }
}

impl Algorithm for FlowMatching {
    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let facts = diffusion(model)?.schedule();
        if model.parameter_count() == 0 {
            return Err(AlgorithmError::NothingToTrain.into());
        }
        if let Some(reward) = reward {
            tracing::warn!(
                "the algorithm `{NAME}` trains on the clips alone: the reward `{}` has no effect",
                reward.name()
            );
        }
        self.config.levels(facts).map(drop)
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let report = self.update(context);
        if report.is_err() {
            // Whoever catches the error finds no half-summed gradient.
            update::forget(context)?;
        }
        report
    }
}

/// What the draws of a step have in common.
struct Draws {
    levels: Levels,
    weighting: Weighting,
}

impl FlowMatching {
    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let facts = diffusion(ctx.model)?.schedule();
        let draws = Draws { levels: self.config.levels(facts)?, weighting: self.config.weighting(facts)? };
        let mut watch = Stopwatch::new(ctx.progress, &[ENCODE, FORWARD, PULL, OPTIMIZER, SAMPLE]);
        let mut tally = Tally::new(draws.levels.range());
        ctx.strategy.discard();

        for (place, sample) in ctx.samples.iter().enumerate() {
            let key = draw_key(ctx.samples, place);
            let outcome = self
                .sample(ctx, sample, key, &draws, &mut watch, &mut tally)
                .while_doing(|| format!("training on {}", sample.origin))?;
            tally.add(sample, outcome);
            if tally.nonfinite.is_some() {
                break;
            }
        }

        watch.begin(OPTIMIZER, Some("updating parameters"))?;
        let (trained, mut nonfinite) = (tally.trained(), tally.nonfinite.take());
        let update = update::finish(ctx, trained, &mut nonfinite, self.config.on_nonfinite, |_, _| Ok(()))?;
        tally.nonfinite = nonfinite;
        if let (true, Some(sample)) = (ctx.want_videos, ctx.samples.first()) {
            watch.begin(SAMPLE, None)?;
            tally.videos.push((format!("sample-{:06}", sample.index), self.generate(ctx, sample)?));
        }
        Ok(tally.report(update, ctx.learning_rate, watch.seconds()))
    }

    /// Adds the gradient of one sample's loss to the strategy.
    fn sample(
        &mut self,
        ctx: &mut StepContext<'_>,
        sample: &Sample,
        key: u64,
        draws: &Draws,
        watch: &mut Stopwatch<'_>,
        tally: &mut Tally,
    ) -> Result<Outcome> {
        watch.begin(ENCODE, None)?;
        let prepared = self.prepare(ctx, sample)?;
        let Prepared { latents: data, conditioning } = &*prepared;
        let known = prepared.known_frames();
        if data.shape()[1] <= known {
            return Ok(Outcome::Skipped(
                "the clip is one latent frame, which the model is given: nothing is left".into(),
            ));
        }
        let unprompted = self.unprompted(ctx, sample, conditioning)?;

        let (count, n) = (self.config.draws_per_sample, data.len());
        let mut uniform = unit_draws(ctx.noise, ctx.step, key);
        let noise = ctx.noise.normal(Purpose::Latents, ctx.step, key, &[count, n])?;
        let mut total = 0.0;
        for (draw, noise) in noise.f32s()?.chunks_exact(n).enumerate() {
            watch.begin(FORWARD, (draw == 0).then_some("predicting velocities"))?;
            let sigma = draws.levels.at((draw as f64 + uniform()) / count as f64);
            let conditioning = match (&unprompted, uniform() < self.config.prompt_dropout) {
                (Some(unprompted), true) => unprompted,
                _ => conditioning,
            };
            let x = conditioning.with_first_frame(&mixed(data, noise, sigma)?)?;
            let timestep = sigma.timestep();
            let (v, pullback) =
                diffusion(ctx.model)?.velocity(&x, timestep, conditioning, Adapter::On, Grad::Record)?;
            let (loss, gradient) = velocity_loss(&v, data, noise, known)?;
            if !loss.is_finite() {
                return Ok(Outcome::NonFinite(
                    format!("the loss of {} at noise level {:.3}", sample.origin, sigma.0),
                    loss,
                ));
            }
            tally.see(sigma, loss);
            let weight = draws.weighting.at(sigma) / count as f64;
            total += weight * loss;

            watch.begin(PULL, None)?;
            let pullback = pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
            pullback.pull(&scaled(&gradient, weight as f32)?)?;
        }
        ctx.strategy.accumulate(ctx.model)?;
        Ok(Outcome::Trained(total))
    }

    /// What depends on the sample alone; computed once while the cache has room.
    fn prepare(&mut self, ctx: &mut StepContext<'_>, sample: &Sample) -> Result<Arc<Prepared>> {
        if let Some(prepared) = self.prepared.get(sample) {
            return Ok(prepared);
        }
        ctx.progress.phase("encoding prompt and clip");
        let prepared = Prepared::new(diffusion(ctx.model)?, sample)?;
        Ok(self.prepared.insert(sample, prepared))
    }

    /// The conditioning with an empty prompt, if prompts are ever dropped.
    fn unprompted(
        &mut self,
        ctx: &mut StepContext<'_>,
        sample: &Sample,
        conditioning: &Conditioning,
    ) -> Result<Option<Conditioning>> {
        if self.config.prompt_dropout == 0.0 {
            return Ok(None);
        }
        let context = match &self.no_prompt {
            Some(context) => context.clone(),
            None => {
                let empty = diffusion(ctx.model)?.encode(&prepared::input(sample, "")?)?;
                self.no_prompt.insert(empty.context).clone()
            }
        };
        Ok(Some(Conditioning { context, ..conditioning.clone() }))
    }

    /// A video for the sample's prompt and first frame, by the model as it is now. Its noise is the same at every step.
    fn generate(&mut self, ctx: &mut StepContext<'_>, sample: &Sample) -> Result<Video> {
        let prepared = self.prepare(ctx, sample)?;
        let noise = ctx.noise.evaluation_latents(sample.index, &prepared.conditioning.latent_shape)?;
        let model = diffusion(ctx.model)?;
        let schedule = self.config.schedule(model.schedule())?;
        let latents = sampling::euler(model, &prepared.conditioning, &noise, &schedule, Adapter::On, ctx.progress)?;
        Video::new(model.decode(&latents, Grad::Skip)?.0, sample.video.fps())
    }
}

/// The key of a sample's draws. One that stands in a step twice (small data, large batches) gets others each time.
fn draw_key(samples: &[Sample], place: usize) -> u64 {
    let index = samples[place].index;
    let before = samples[..place].iter().filter(|s| s.index == index).count() as u64;
    index ^ (before << 40)
}

/// A source of values uniform in [0, 1).
fn unit_draws(noise: &Noise, step: u64, key: u64) -> impl FnMut() -> f64 {
    let mut draw = noise.uniform(Purpose::Timesteps, step, key);
    move || 0.5 * (f64::from(draw()) + 1.0)
}

fn scaled(x: &Tensor, factor: f32) -> Result<Tensor> {
    Tensor::new(x.f32s()?.iter().map(|x| x * factor).collect::<Vec<f32>>(), x.shape())
}

fn diffusion(model: &mut dyn Model) -> Result<&mut dyn DiffusionModel> {
    update::diffusion(model, NAME)
}

roll_core::inventory::submit! {
    Registration {
        name: NAME,
        summary: "Supervised training on clips: from scratch, or fine-tuning",
        origin: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
        defaults: default_options::<Config>,
        factory: Factory::Algorithm(|options, _| Ok(Box::new(FlowMatching::new(parse_options("algo", options)?)))),
    }
}
