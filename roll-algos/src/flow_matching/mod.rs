//! Flow matching: the training that makes a video diffusion model, from scratch or on one's own clips.
//!
//! Per sample: x_0 = encode(clip), a noise level sigma from a distribution ([`levels`]), x = (1 - sigma) x_0 + sigma
//! eps, and loss = mean((velocity(x) - (eps - x_0))^2) ([`loss`]). It trains whatever parameters the model has,
//! adapters or all weights, at the noise levels of the experts that have them.

pub mod config;
pub mod levels;
pub mod loss;

mod data_term;
mod prepared;
mod report;
#[cfg(test)]
mod tests;
mod validation;

use std::sync::Arc;

use roll_core::{
    Adapter, Algorithm, Communicator, Conditioning, DiffusionModel, Factory, Grad, Headline, HeadlineFormat, Model,
    Noise, Progress, Purpose, Registration, Result, ResultExt, RewardScorer, Sample, Sigma, SingleRank, StepContext,
    StepReport, Tensor, Validation, VelocityInput, Video, default_options, parse_options,
};

pub use config::{FlowMatchingConfig, LossWeighting};
pub(crate) use data_term::DataTerm;
pub use levels::{Levels, TimestepSampling};
pub use loss::{Weighting, mixed, velocity_loss};

use crate::arithmetic::scaled;
use crate::ranks::{draw_key, repeats};
use crate::remembered::Remembered;
use crate::sampling::{Conditions, negative_context};
use crate::stopwatch::{ENCODE, FORWARD, OPTIMIZER, PULL, Stopwatch};
use crate::{AlgorithmError, update};
use prepared::Prepared;
use report::Tally;

const NAME: &str = "flow_matching";

const SAMPLE: &str = "time/sample";

/// The algorithm `flow_matching`.
pub struct FlowMatching {
    config: FlowMatchingConfig,
    prepared: Remembered<Prepared>,
    /// The embedding of the empty prompt.
    no_prompt: Option<Tensor>,
    /// The embedding of the negative prompt.
    negative: Option<Tensor>,
    /// Clips that are not trained on, if there are any; this rank's part.
    held_out: Option<Vec<Sample>>,
    ranks: Arc<dyn Communicator>,
}

impl FlowMatching {
    /// Makes the algorithm from its options.
    pub fn new(config: FlowMatchingConfig) -> Self {
        let prepared = Remembered::new(config.cache_bytes);
        let ranks = Arc::new(SingleRank);
        Self { config, prepared, no_prompt: None, negative: None, held_out: None, ranks }
    }

    /// Makes this one of several `ranks`, which share a validation.
    pub fn on(self, ranks: Arc<dyn Communicator>) -> Self {
        Self { ranks, ..self }
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

    fn headlines(&self) -> Vec<Headline> {
        vec![
            Headline::new("actor/loss", "loss", "Loss").validated_by(
                "val/loss",
                "loss",
                "clips that were not trained on",
            ),
            Headline::new("actor/grad_norm", "grad norm", "Gradient norm").written(HeadlineFormat::Scientific),
        ]
    }

    fn hold_out(&mut self, clips: &[Sample]) -> bool {
        self.held_out = Some(clips.to_vec());
        true
    }

    fn validate(
        &mut self,
        _step: u64,
        model: &mut dyn Model,
        noise: &Noise,
        progress: &dyn Progress,
    ) -> Result<Option<Validation>> {
        self.validation(model, noise, progress)
    }

    fn step(&mut self, context: &mut StepContext<'_>) -> Result<StepReport> {
        let report = self.update(context);
        if report.is_err() {
            // No half-summed gradient is left for the next step.
            update::forget(context)?;
        }
        report
    }
}

/// The noise levels of a step and their weights.
struct Distribution {
    levels: Levels,
    weighting: Weighting,
}

/// A noised clip whose velocity is still to be computed.
struct Draw {
    prepared: Arc<Prepared>,
    /// The sample's own, or that of the empty prompt.
    conditioning: Conditioning,
    sigma: Sigma,
    noise: Vec<f32>,
    x: Tensor,
    /// Weight of its loss.
    weight: f64,
}

impl FlowMatching {
    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let facts = diffusion(ctx.model)?.schedule();
        let distribution =
            Distribution { levels: self.config.levels(facts)?, weighting: self.config.weighting(facts)? };
        let mut watch = Stopwatch::new(ctx.progress, &[ENCODE, FORWARD, PULL, OPTIMIZER, SAMPLE]);
        let mut tally = Tally::new(distribution.levels.range());
        ctx.strategy.discard();

        let mut waiting: Vec<Draw> = Vec::new();
        let repeats = repeats(ctx.strategy.ranks().data.as_ref(), ctx.samples)?;
        for (sample, repeats) in ctx.samples.iter().zip(repeats) {
            watch.begin(ENCODE, None)?;
            let drawn = self.draw(ctx, sample, draw_key(sample, repeats), &distribution);
            let Some(drawn) = drawn.while_doing(|| format!("training on {}", sample.origin))? else {
                tally
                    .skip(sample, "the clip is one latent frame, which the model is given: nothing is left to predict");
                continue;
            };
            tally.samples += 1;
            for draw in drawn {
                let fits = waiting.first().is_none_or(|first| first.x.shape() == draw.x.shape());
                if !fits || waiting.len() == self.config.draws_at_once {
                    train(ctx, &mut waiting, &mut watch, &mut tally)?;
                }
                waiting.push(draw);
            }
        }
        train(ctx, &mut waiting, &mut watch, &mut tally)?;

        watch.begin(OPTIMIZER, Some("updating parameters"))?;
        let (samples, mut nonfinite) = (tally.samples, tally.nonfinite.take());
        let update = update::finish(ctx, samples, &mut nonfinite, self.config.on_nonfinite, |_, _| Ok(()))?;
        tally.nonfinite = nonfinite;
        if let (true, Some(sample)) = (ctx.want_videos, ctx.samples.first()) {
            watch.begin_after_update(SAMPLE, None);
            tally.videos.push((format!("sample-{:06}", sample.index), self.generate(ctx, sample)?));
        }
        let ranks = ctx.strategy.ranks().data.as_ref();
        let seconds = update::slowest(ranks, watch.seconds())?;
        Ok(tally.joined(ranks)?.report(update, ctx.learning_rate, seconds))
    }

    /// The noised copies of one sample; `None` when the model is given all of it.
    fn draw(
        &mut self,
        ctx: &mut StepContext<'_>,
        sample: &Sample,
        key: u64,
        distribution: &Distribution,
    ) -> Result<Option<Vec<Draw>>> {
        let prepared = self.prepare(ctx, sample)?;
        let data = &prepared.latents;
        if data.shape()[1] <= prepared.known_frames() {
            return Ok(None);
        }
        let unprompted = self.unprompted(ctx, sample, &prepared.conditioning)?;
        let (count, n) = (self.config.draws_per_sample, data.len());
        let mut uniform = unit_draws(ctx.noise, ctx.step, key);
        let noise = ctx.noise.normal(Purpose::Latents, ctx.step, key, &[count, n])?;
        let one = |(draw, noise): (usize, &[f32])| {
            let sigma = distribution.levels.at((draw as f64 + uniform()) / count as f64);
            let conditioning = match (&unprompted, uniform() < self.config.prompt_dropout) {
                (Some(unprompted), true) => unprompted.clone(),
                _ => prepared.conditioning.clone(),
            };
            let x = conditioning.with_first_frame(&mixed(data, noise, sigma)?)?;
            let weight = distribution.weighting.at(sigma) / count as f64;
            Ok(Draw { prepared: prepared.clone(), conditioning, sigma, noise: noise.to_vec(), x, weight })
        };
        noise.f32s()?.chunks_exact(n).enumerate().map(one).collect::<Result<_>>().map(Some)
    }

    /// The parts that depend on the sample alone, computed once while the cache has room.
    fn prepare(&mut self, ctx: &mut StepContext<'_>, sample: &Sample) -> Result<Arc<Prepared>> {
        self.prepared_by(ctx.model, ctx.progress, sample)
    }

    fn prepared_by(
        &mut self,
        model: &mut dyn Model,
        progress: &dyn Progress,
        sample: &Sample,
    ) -> Result<Arc<Prepared>> {
        if let Some(prepared) = self.prepared.get(sample) {
            return Ok(prepared);
        }
        progress.phase("encoding prompt and clip");
        let prepared = Prepared::new(diffusion(model)?, sample)?;
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
        let sampling = self.config.sampling(model.schedule())?;
        if sampling.guidance.is_on() && self.negative.is_none() {
            let input = prepared::input(sample, "")?;
            self.negative = Some(negative_context(model, input, &self.config.negative_prompt)?);
        }
        let conditions = Conditions::new(&prepared.conditioning, self.negative.clone());
        let latents = sampling.generate(model, &conditions, &noise, Adapter::On, ctx.progress)?;
        Video::new(model.decode(&latents, Grad::Skip)?.0, sample.video.fps())
    }
}

/// Adds the gradient of the waiting draws' losses to the strategy. Once a loss was not finite there is no update, and
/// nothing more to do.
fn train(
    ctx: &mut StepContext<'_>,
    waiting: &mut Vec<Draw>,
    watch: &mut Stopwatch<'_>,
    tally: &mut Tally,
) -> Result<()> {
    let draws = std::mem::take(waiting);
    if draws.is_empty() || tally.nonfinite.is_some() {
        return Ok(());
    }
    watch.begin(FORWARD, Some("predicting velocities"))?;
    let inputs: Vec<VelocityInput<'_>> = draws
        .iter()
        .map(|d| VelocityInput { latents: &d.x, timestep: d.sigma.timestep(), conditioning: &d.conditioning })
        .collect();
    let (velocities, pullback) = diffusion(ctx.model)?.velocities(&inputs, Adapter::On, Grad::Record)?;
    let mut cotangents = Vec::new();
    for (draw, velocity) in draws.iter().zip(velocities.unstack()?) {
        let Draw { prepared, sigma, noise, weight, .. } = draw;
        let (loss, gradient) = velocity_loss(&velocity, &prepared.latents, noise, prepared.known_frames())?;
        if !loss.is_finite() {
            tally.nonfinite = Some((format!("the loss at noise level {:.3}", sigma.0), loss));
            return Ok(());
        }
        tally.see(*sigma, loss, *weight);
        cotangents.push(scaled(&gradient, *weight as f32)?);
    }

    watch.begin(PULL, Some("pulling back"))?;
    let pullback = pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
    ctx.strategy.before_last_pull(ctx.model)?;
    pullback.pull(&Tensor::stack(&cotangents)?)?;
    ctx.strategy.accumulate(ctx.model)
}

/// A source of values uniform in [0, 1).
fn unit_draws(noise: &Noise, step: u64, key: u64) -> impl FnMut() -> f64 {
    let mut draw = noise.uniform(Purpose::Timesteps, step, key);
    move || 0.5 * (f64::from(draw()) + 1.0)
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
        defaults: default_options::<FlowMatchingConfig>,
        keys: roll_core::keys::of::<FlowMatchingConfig>,
        factory: Factory::Algorithm(|options, context| {
            Ok(Box::new(FlowMatching::new(parse_options("algo", options)?).on(context.ranks.clone())))
        }),
        planner: None,
    }
}
