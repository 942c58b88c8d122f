//! Flow matching: the training that makes a video diffusion model, from scratch or on one's own clips.
//!
//! Per sample: x_0 = encode(clip), a noise level sigma from a distribution ([`levels`]), x = (1 - sigma) x_0 + sigma
//! eps, and loss = mean((velocity(x) - (eps - x_0))^2) ([`loss`]). It trains all trainable parameters of the model,
//! adapters or all weights, at the noise levels of the experts that have trainable parameters.

pub mod config;
pub mod levels;
pub mod loss;

mod data_term;
mod encoded;
mod report;
#[cfg(test)]
mod tests;
mod validation;

use std::sync::Arc;

use roll_core::{
    Adapter, Algorithm, ClipAlgorithm, Communicator, Conditioning, DiffusionModel, Grad, Headline, HeadlineFormat,
    Kind, Model, Noise, Options, Progress, Purpose, Result, ResultExt, RewardScorer, Sample, Samples, Sigma,
    SigmaRange, SingleRank, StepContext, StepReport, Tensor, Validation, VelocityInput, Video, parse_options,
    plan::Passes,
};
use roll_step::stopwatch::{ENCODE, FORWARD, OPTIMIZER, PULL, Stopwatch};
use roll_step::{AlgorithmError, update};

pub use config::{FlowMatchingConfig, LossWeighting};
pub(crate) use data_term::DataTerm;
pub use levels::{Levels, TimestepSampling};
pub use loss::{Weighting, mixed, velocity_loss};

use crate::arithmetic::scaled;
use crate::draw_keys::{draw_key, in_unit_interval, repeats};
use crate::report::StepOutcome;
use crate::sample_cache::SampleCache;
use crate::sampling::{Conditions, negative_context};
use encoded::EncodedClip;
use report::Tally;

const NAME: &str = "flow_matching";

/// Metric of the seconds that the sample video takes.
const SAMPLE: &str = "time/sample";

/// The algorithm `flow_matching`.
pub struct FlowMatching {
    config: FlowMatchingConfig,
    encoded_clips: SampleCache<EncodedClip>,
    /// The embedding of the empty prompt; `None` until a prompt may be dropped.
    empty_prompt: Option<Tensor>,
    /// The embedding of the negative prompt; `None` until guidance needs it.
    negative_prompt: Option<Tensor>,
    /// This rank's part of the validation clips, which are not trained on; `None` without validation.
    held_out: Option<Vec<Sample>>,
    /// The ranks that share a validation.
    ranks: Arc<dyn Communicator>,
}

impl FlowMatching {
    /// Makes the algorithm from its options.
    pub fn new(config: FlowMatchingConfig) -> Self {
        let encoded_clips = SampleCache::new(config.cache_bytes);
        let ranks = Arc::new(SingleRank);
        Self { config, encoded_clips, empty_prompt: None, negative_prompt: None, held_out: None, ranks }
    }

    /// Sets the `ranks` that share a validation.
    pub fn on(self, ranks: Arc<dyn Communicator>) -> Self {
        Self { ranks, ..self }
    }
}

impl Algorithm for FlowMatching {
    fn samples(self: Box<Self>) -> Samples {
        Samples::Clips(self)
    }

    fn check(&mut self, model: &mut dyn Model, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let facts = diffusion(model)?.schedule();
        update::check_trainable(model)?;
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
        update::discard_on_error(context, |context| self.update(context))
    }
}

impl ClipAlgorithm for FlowMatching {
    fn hold_out(&mut self, clips: &[Sample]) -> bool {
        self.held_out = Some(clips.to_vec());
        true
    }
}

/// The noise levels of a step and their weights.
struct Distribution {
    levels: Levels,
    weighting: Weighting,
}

/// A clip noised to one level.
struct NoisedClip {
    clip: Arc<EncodedClip>,
    /// The clip's conditioning, with its own prompt or with the empty one.
    conditioning: Conditioning,
    sigma: Sigma,
    noise: Vec<f32>,
    /// The noised latents.
    x: Tensor,
    /// Weight of the noise level (`algo.loss_weighting`), divided by the number of draws of the sample.
    weight: f64,
    /// The sample's own weight, from its data row.
    sample_weight: f64,
}

/// The noised copies of one sample, one per noise level.
enum NoisedSample {
    Clips(Vec<NoisedClip>),
    /// Nothing of the sample is left to predict, with the reason.
    NothingToPredict(&'static str),
}

/// The state of a training step, which its samples share.
struct StepState<'a> {
    range: SigmaRange,
    watch: Stopwatch<'a>,
    tally: Tally,
    outcome: StepOutcome,
}

impl FlowMatching {
    /// The noise levels that the configuration selects for the model, and their weights.
    fn distribution(&self, model: &mut dyn Model) -> Result<Distribution> {
        let facts = diffusion(model)?.schedule();
        Ok(Distribution { levels: self.config.levels(facts)?, weighting: self.config.weighting(facts)? })
    }

    fn update(&mut self, ctx: &mut StepContext<'_>) -> Result<StepReport> {
        let distribution = self.distribution(ctx.model)?;
        let watch = Stopwatch::new(ctx.progress, &[ENCODE, FORWARD, PULL, OPTIMIZER, SAMPLE]);
        let range = distribution.levels.range();
        let mut state = StepState { range, watch, tally: Tally::default(), outcome: StepOutcome::default() };
        ctx.strategy.discard();

        let mut batch: Vec<NoisedClip> = Vec::new();
        // A clip that occurs several times in the step gets other draws each time.
        let occurrences = repeats(ctx.strategy.ranks().data.as_ref(), ctx.samples)?;
        for (sample, earlier_occurrences) in ctx.samples.iter().zip(occurrences) {
            state.watch.begin(ENCODE, None)?;
            let noised = self.noise_sample(ctx, sample, draw_key(sample, earlier_occurrences), &distribution);
            let noised = match noised.while_doing(|| format!("training on {}", sample.origin))? {
                NoisedSample::Clips(noised) => noised,
                NoisedSample::NothingToPredict(reason) => {
                    tracing::debug!(sample = %sample.origin, reason, "the sample is skipped");
                    state.outcome.skip(sample, reason);
                    continue;
                }
            };
            state.tally.samples += 1;
            for clip in noised {
                let fits = batch.first().is_none_or(|first| first.x.shape() == clip.x.shape());
                if !fits || batch.len() == self.config.draws_at_once {
                    train(ctx, &std::mem::take(&mut batch), &mut state)?;
                }
                batch.push(clip);
            }
        }
        train(ctx, &batch, &mut state)?;

        let StepState { mut watch, tally, mut outcome, .. } = state;
        watch.begin(OPTIMIZER, Some("updating parameters"))?;
        let on_nonfinite = self.config.on_nonfinite;
        let (counted, nonfinite) = (tally.samples as f64, &mut outcome.nonfinite);
        let update = update::finish(ctx, counted, nonfinite, on_nonfinite, update::nothing_before_update)?;
        if ctx.want_videos
            && let Some(sample) = ctx.samples.first()
        {
            watch.begin_after_update(SAMPLE, None);
            outcome.show(sample, 0, self.generate(ctx, sample)?);
        }
        let tally = tally.joined(ctx.strategy.ranks().data.as_ref())?;
        let mut metrics = tally.losses_by_part(range);
        metrics.insert("actor/samples".into(), tally.samples as f64);
        if outcome.nonfinite.is_none()
            && let Some(loss) = tally.loss()
        {
            metrics.insert("actor/loss".into(), loss);
        }
        outcome.report(ctx, watch, update.as_slice(), metrics)
    }

    /// Noises a sample `draws_per_sample` times. The draws are stratified: the distribution of noise levels is divided
    /// into parts of equal probability, and each draw falls into a part of its own.
    fn noise_sample(
        &mut self,
        ctx: &mut StepContext<'_>,
        sample: &Sample,
        key: u64,
        distribution: &Distribution,
    ) -> Result<NoisedSample> {
        let clip = self.encoded(ctx.model, ctx.progress, sample)?;
        if let Some(reason) = clip.nothing_to_predict() {
            return Ok(NoisedSample::NothingToPredict(reason));
        }
        let data = &clip.latents;
        let unprompted = self.unprompted(ctx, sample, &clip.conditioning)?;
        let (count, n) = (self.config.draws_per_sample, data.len());
        let mut uniform = uniform_draws(ctx.noise, ctx.step, key);
        let noise = ctx.noise.normal(Purpose::Latents, ctx.step, key, &[count, n])?;
        let mut noised = Vec::new();
        for (draw, noise) in noise.f32s()?.chunks_exact(n).enumerate() {
            let sigma = distribution.levels.at((draw as f64 + uniform()) / count as f64);
            let conditioning = match (&unprompted, uniform() < self.config.prompt_dropout) {
                (Some(unprompted), true) => unprompted.clone(),
                _ => clip.conditioning.clone(),
            };
            noised.push(NoisedClip {
                x: conditioning.with_first_frame(&mixed(data, noise, sigma)?)?,
                weight: distribution.weighting.at(sigma) / count as f64,
                clip: clip.clone(),
                conditioning,
                sigma,
                noise: noise.to_vec(),
                sample_weight: sample.weight,
            });
        }
        Ok(NoisedSample::Clips(noised))
    }

    /// The encoded clip of a sample, computed once while the cache has room.
    fn encoded(&mut self, model: &mut dyn Model, progress: &dyn Progress, sample: &Sample) -> Result<Arc<EncodedClip>> {
        self.encoded_clips.get_or_insert(sample, || {
            progress.phase("encoding prompt and clip");
            EncodedClip::new(diffusion(model)?, sample)
        })
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
        let context = match &self.empty_prompt {
            Some(context) => context.clone(),
            None => {
                let empty = diffusion(ctx.model)?.encode(&encoded::conditioning_input(sample, "")?)?;
                self.empty_prompt.insert(empty.context).clone()
            }
        };
        Ok(Some(Conditioning { context, ..conditioning.clone() }))
    }

    /// Generates a video for the sample's prompt and first frame with the current model. The noise of the video is the
    /// same at every step.
    fn generate(&mut self, ctx: &mut StepContext<'_>, sample: &Sample) -> Result<Video> {
        let clip = self.encoded(ctx.model, ctx.progress, sample)?;
        let noise = ctx.noise.evaluation_latents(sample.index, &clip.conditioning.latent_shape)?;
        let model = diffusion(ctx.model)?;
        let sampling = self.config.sampling(model.schedule())?;
        if sampling.guidance.is_on() && self.negative_prompt.is_none() {
            let input = encoded::conditioning_input(sample, "")?;
            self.negative_prompt = Some(negative_context(model, input, &self.config.negative_prompt)?);
        }
        let conditions = Conditions::new(&clip.conditioning, self.negative_prompt.clone());
        let latents = sampling.generate(model, &conditions, &noise, Adapter::On, ctx.progress)?;
        Video::new(model.decode(&latents, Grad::Skip)?.0, sample.clip()?.fps())
    }
}

/// Adds the gradient of a batch to the strategy. Does nothing after a loss of the step was not finite, because there
/// will be no update.
fn train(ctx: &mut StepContext<'_>, batch: &[NoisedClip], state: &mut StepState<'_>) -> Result<()> {
    let StepState { range, watch, tally, outcome } = state;
    if batch.is_empty() || outcome.nonfinite.is_some() {
        return Ok(());
    }
    watch.begin(FORWARD, Some("predicting velocities"))?;
    let inputs: Vec<VelocityInput<'_>> = batch
        .iter()
        .map(|clip| VelocityInput {
            latents: &clip.x,
            timestep: clip.sigma.timestep(),
            conditioning: &clip.conditioning,
        })
        .collect();
    let (velocities, pullback) = diffusion(ctx.model)?.velocities(&inputs, Adapter::On, Grad::Record)?;
    let mut cotangents = Vec::new();
    for (noised, velocity) in batch.iter().zip(velocities.unstack()?) {
        let NoisedClip { clip, sigma, noise, weight, sample_weight, .. } = noised;
        let (loss, gradient) = clip.velocity_loss(&velocity, noise)?;
        if !loss.is_finite() {
            outcome.nonfinite = Some((format!("the loss at noise level {:.3}", sigma.0), loss));
            return Ok(());
        }
        tally.count_draw(*range, *sigma, loss, *weight);
        cotangents.push(scaled(&gradient, (weight * sample_weight) as f32)?);
    }

    watch.begin(PULL, Some("pulling back"))?;
    let pullback = pullback.ok_or_else(|| AlgorithmError::NoPullback { what: "the velocity".into() })?;
    ctx.strategy.before_last_pull(ctx.model)?;
    pullback.pull(&Tensor::stack(&cotangents)?)?;
    ctx.strategy.accumulate(ctx.model)
}

/// The draws of a sample for noise levels and dropped prompts, uniform in [0, 1).
fn uniform_draws(noise: &Noise, step: u64, key: u64) -> impl FnMut() -> f64 {
    let mut draw = noise.uniform(Purpose::Timesteps, step, key);
    move || in_unit_interval(draw())
}

fn diffusion(model: &mut dyn Model) -> Result<&mut dyn DiffusionModel> {
    update::diffusion(model, NAME)
}

roll_core::register! {
    Algorithm, NAME, FlowMatchingConfig,
    "Supervised training on clips: from scratch, or fine-tuning",
    |options, context| Ok(FlowMatching::new(options).on(context.ranks.clone())),
    plan: passes,
    learning_rate: 1e-4,
}

/// The passes for one clip: one for each noise level, all of them recorded.
fn passes(options: &Options) -> Result<Passes> {
    let config: FlowMatchingConfig = parse_options(Kind::Algorithm.section(), options)?;
    let draws = config.draws_per_sample;
    Ok(Passes {
        forward: draws,
        pulled: draws,
        // Nothing is denoised.
        steps: Some([0, 0]),
        held: Some(config.draws_at_once),
        // The clip is encoded once, which takes about as much memory and time as a decoding without gradient.
        decoded: Some([1, 0]),
        ..Passes::default()
    })
}
