//! A round: the generation of videos for every prompt of a training step, their scores, and their advantages.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{Scope, ScopedJoinHandle};

use roll_core::{
    Adapter, DiffusionModel, Error, Grad, Result, ResultExt, RewardScorer, Sample, StepContext, StepReport, Tensor,
    Video, communicator, threads,
};
use roll_step::AlgorithmError;
use roll_step::stopwatch::{DATA, DECODE, ENCODE, FORWARD, OPTIMIZER, PULL, REFERENCE, ROLLOUT, SCORING, Stopwatch};
use roll_step::update::{diffusion, reward};
use serde::{Deserialize, Serialize};

use super::advantages::{GroupStatistics, Normalization, best_and_worst, normalized, normalized_apart};
use super::options::{SeveralRewards, SharedOptions};
use super::tally::Tally;
use crate::draw_keys::{UPDATE_OR_STEP_BIT, draw_key, repeats, rollout_key};
use crate::report::{SCORE, StepOutcome, detail_metric};
use crate::sampling::{Batch, Conditions, Sampling};
use crate::scoring::{Measured, Prepared, PreparedTarget};

/// The phases whose times a round reports.
const PHASES: [&str; 9] = [ENCODE, ROLLOUT, DECODE, SCORING, REFERENCE, FORWARD, PULL, DATA, OPTIMIZER];

/// How the videos of a round are generated.
pub(crate) struct RoundOptions<'a> {
    pub(crate) algorithm: &'static str,
    pub(crate) sampling: &'a Sampling,
    pub(crate) shared: &'a SharedOptions,
    /// Whether all videos of a prompt start from the same noise.
    pub(crate) has_same_start: bool,
    /// Whether the steps before the first explored step are computed once for all videos of a prompt.
    pub(crate) share_prefix: bool,
}

/// The state of a round, which its prompts share.
pub(crate) struct RoundState<'a> {
    pub(crate) watch: Stopwatch<'a>,
    pub(crate) tally: Tally,
    pub(crate) outcome: StepOutcome,
    /// Number of the update, from 0.
    pub(crate) update: usize,
}

impl<'a> RoundState<'a> {
    /// Begins a round. Clears the accumulated gradient.
    pub(crate) fn new(ctx: &mut StepContext<'a>) -> Self {
        ctx.strategy.discard();
        let watch = Stopwatch::new(ctx.progress, &PHASES);
        Self { watch, tally: Tally::default(), outcome: StepOutcome::default(), update: 0 }
    }

    /// Begins a phase of an update; the user can stop the step before the first update is done.
    pub(crate) fn begin(&mut self, metric: &'static str, description: &str) -> Result<()> {
        match self.update {
            0 => self.watch.begin(metric, Some(description)),
            _ => {
                self.watch.begin_after_update(metric, Some(description));
                Ok(())
            }
        }
    }

    /// The report of the round, over all ranks.
    pub(crate) fn report(self, ctx: &StepContext<'_>, shared: &SharedOptions) -> Result<StepReport> {
        let tally = self.tally.joined(ctx.strategy.ranks().data.as_ref())?;
        self.outcome.report(ctx, self.watch, &tally.updates, tally.metrics(shared.data_weight))
    }
}

/// The generated videos of one prompt.
pub(crate) struct Group<T> {
    /// Position of the sample among this rank's samples of the step.
    pub(crate) position: usize,
    /// Factor of the loss of its videos: the weight of the sample.
    pub(crate) weight: f64,
    /// Row of the sample in the data. For advantages, groups of several ranks with the same row count as one group.
    row: u64,
    /// Key of the sample's draws.
    pub(crate) key: u64,
    pub(crate) conditions: Conditions,
    pub(crate) videos: Vec<Rollout>,
    /// The records of [`Explore`], one for each batch of `at_once` videos.
    pub(crate) records: Vec<T>,
}

impl<T> Group<T> {
    /// The videos that are trained on.
    pub(crate) fn trained(&self) -> impl Iterator<Item = &Rollout> {
        self.videos.iter().filter(|video| video.advantage != 0.0)
    }
}

/// The key of a sample's or video's draws in an update, from the sample's or video's own `key`. Each update of a step
/// has its own draws. [`draw_keys`](crate::draw_keys) lists the fields of a key.
pub(crate) fn key_of_update(key: u64, update: usize) -> u64 {
    key ^ ((update as u64) << UPDATE_OR_STEP_BIT)
}

/// One generated video.
pub(crate) struct Rollout {
    /// Key of the video's draws.
    pub(crate) key: u64,
    /// The denoised latents, `[C, T, H, W]`.
    pub(crate) latents: Tensor,
    /// The video's scores; `None` if there was nothing to score.
    scores: Option<Scores>,
    /// Advantage over the other videos of the prompt. A video with the advantage 0 is not trained on.
    pub(crate) advantage: f64,
}

/// The scores of a video. All are finite.
#[derive(Clone, Serialize, Deserialize)]
struct Scores {
    /// The score: the weighted sum of the rewards, if there are several.
    sum: f64,
    /// The score of each reward, before weighting.
    terms: Vec<f64>,
}

/// Exploration: replaces sampler steps of a rollout, and records them for training.
pub(crate) trait Explore {
    /// The record of a batch of videos.
    type Record: Default;
    /// The number of steps before the first explored step, for the sample in `row` of the data.
    fn steps_before(&self, row: u64) -> usize;
    /// Begins or continues the rollout of a batch of videos of the sample in `row`. `keys` are the keys of their draws,
    /// `record` is their record so far.
    fn begin(&mut self, row: u64, keys: &[u64], record: Self::Record);
    /// Computes sampler step `i`, or returns `None` to leave it to the sampler. Arguments and result are those of a
    /// [`crate::sampling::OwnStep`].
    fn step(&mut self, i: usize, xs: &[Tensor], vs: &[Tensor]) -> Result<Option<Vec<Tensor>>>;
    /// Returns the record, which the steps since [`Explore::begin`] have extended.
    fn end(&mut self) -> Self::Record;
}

/// Leaves every step to the sampler.
pub(crate) struct NoExploration;

impl Explore for NoExploration {
    type Record = ();
    fn steps_before(&self, _row: u64) -> usize {
        0
    }
    fn begin(&mut self, _row: u64, _keys: &[u64], _record: ()) {}
    fn step(&mut self, _i: usize, _xs: &[Tensor], _vs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        Ok(None)
    }
    fn end(&mut self) {}
}

/// A prompt whose videos are being generated.
struct PendingPrompt<T> {
    /// Position of the sample among this rank's samples of the step.
    position: usize,
    /// Row of the sample in the data.
    row: u64,
    /// How often the sample already occurred in the same step.
    repeats: u64,
    target: Arc<PreparedTarget>,
    conditions: Conditions,
    /// Key of the sample's draws.
    key: u64,
    /// Number of steps at the beginning of the rollout that are computed once for all videos.
    shared_steps: usize,
    /// The trajectory of the shared steps, until they are done.
    prefix: Option<Batch>,
    batches: Vec<PendingBatch<T>>,
}

/// Videos of a prompt that are generated together.
struct PendingBatch<T> {
    /// Keys of the videos' draws.
    keys: Vec<u64>,
    trajectories: Batch,
    record: T,
}

/// Generates and scores the videos of all prompts, with the current parameters of the model. All videos pass through
/// the high-noise expert before the first one enters the low-noise expert, so that experts that take turns on the
/// device are changed once.
pub(crate) fn generate<E: Explore>(
    options: &RoundOptions<'_>,
    prepared: &mut Prepared,
    ctx: &mut StepContext<'_>,
    explore: &mut E,
    round: &mut RoundState<'_>,
) -> Result<Vec<Group<E::Record>>> {
    let samples = ctx.samples;
    // The context of errors.
    let training_on = |position: usize| format!("training on {}", samples[position].origin);
    let mut prompts = Vec::new();
    for (position, repeats) in repeats(ctx.strategy.ranks().data.as_ref(), samples)?.into_iter().enumerate() {
        let pending = begin_prompt(options, prepared, ctx, (position, repeats), explore, round);
        prompts.extend(pending.while_doing(|| training_on(position))?);
    }
    let model = diffusion(ctx.model, options.algorithm)?;
    let [high_noise, low_noise] = options.sampling.steps_of_experts(model.schedule().boundary);
    for prompt in &mut prompts {
        let position = prompt.position;
        let denoised = prompt.denoise(options, high_noise.clone(), model, explore, &mut round.watch);
        denoised.while_doing(|| training_on(position))?;
    }
    let mut groups = Vec::new();
    for prompt in prompts {
        let position = prompt.position;
        let group = finish_prompt(options, prompt, low_noise.clone(), ctx, explore, round);
        groups.extend(group.while_doing(|| training_on(position))?);
        if round.outcome.nonfinite.is_some() {
            break;
        }
    }
    Ok(groups)
}

/// Encodes the sample at `position` in the step, and draws the noise of its videos. The sample already
/// occurred `repeats` times in the step. Returns `None` if the sample is skipped.
fn begin_prompt<E: Explore>(
    options: &RoundOptions<'_>,
    prepared: &mut Prepared,
    ctx: &mut StepContext<'_>,
    (position, repeats): (usize, u64),
    explore: &E,
    round: &mut RoundState<'_>,
) -> Result<Option<PendingPrompt<E::Record>>> {
    let RoundOptions { algorithm, sampling, shared, .. } = *options;
    let sample = &ctx.samples[position];
    round.watch.begin(ENCODE, Some("encoding prompt and reference"))?;
    let target = prepared.target(reward(ctx, algorithm)?, sample, shared.reference)?;
    // A sample that is skipped in any case costs no rollout.
    if let PreparedTarget::Missing(reason) = &*target
        && let Measured::Skipped(reason) = Measured::missing(sample, reward(ctx, algorithm)?, reason.clone())?
    {
        round.outcome.skip(sample, reason);
        return Ok(None);
    }
    let negative = sampling.guidance.is_on().then_some(shared.sampling.negative_prompt.as_str());
    let conditions = prepared.conditions(diffusion(ctx.model, algorithm)?, sample, negative)?;
    let key = draw_key(sample, repeats);
    let noise = |key: u64| ctx.noise.latents(ctx.step, key, &conditions.prompt.latent_shape);
    // The noise that all videos of the prompt start from, if it is the same.
    let common_start = if options.has_same_start { Some(noise(key)?) } else { None };
    let shared_steps = if options.share_prefix { explore.steps_before(sample.index) } else { 0 };
    let prefix = match &common_start {
        Some(start) if shared_steps > 0 => Some(sampling.begin(&conditions, std::slice::from_ref(start))?),
        _ => None,
    };
    let keys: Vec<u64> = (0..shared.group_size).map(|k| rollout_key(key, k)).collect();
    let mut batches = Vec::new();
    for batch_keys in keys.chunks(shared.at_once.max(1)) {
        let mut starts = Vec::new();
        for video_key in batch_keys {
            starts.push(match &common_start {
                Some(start) => start.clone(),
                None => noise(*video_key)?,
            });
        }
        let trajectories = sampling.begin(&conditions, &starts)?;
        batches.push(PendingBatch { keys: batch_keys.to_vec(), trajectories, record: E::Record::default() });
    }
    let row = sample.index;
    Ok(Some(PendingPrompt { position, row, repeats, target, conditions, key, shared_steps, prefix, batches }))
}

impl<T: Default> PendingPrompt<T> {
    /// Does the steps in `range` that all videos share. Returns whether all shared steps are done at the end of
    /// `range`, so that the videos can go on by themselves.
    fn share_steps(
        &mut self,
        sampling: &Sampling,
        range: Range<usize>,
        model: &mut dyn DiffusionModel,
        watch: &mut Stopwatch<'_>,
    ) -> Result<bool> {
        let steps = sampling.schedule.steps();
        if let Some(prefix) = &mut self.prefix {
            let mut step = |i: usize, _: &[Tensor], _: &[Tensor]| {
                watch.begin(ROLLOUT, Some(&format!("all videos: denoising step {} of {steps}", i + 1)))?;
                Ok(None)
            };
            let shared_range = range.start..range.end.min(self.shared_steps);
            sampling.advance(model, &self.conditions, prefix, shared_range, Adapter::On, &mut step)?;
        }
        if range.end < self.shared_steps {
            return Ok(false);
        }
        if let Some(prefix) = self.prefix.take() {
            for batch in &mut self.batches {
                let starts = vec![prefix.latents[0].clone(); batch.keys.len()];
                batch.trajectories = sampling.begin(&self.conditions, &starts)?;
            }
        }
        Ok(true)
    }

    /// Does the steps in `range` for all videos of the prompt.
    fn denoise<E: Explore<Record = T>>(
        &mut self,
        options: &RoundOptions<'_>,
        range: Range<usize>,
        model: &mut dyn DiffusionModel,
        explore: &mut E,
        watch: &mut Stopwatch<'_>,
    ) -> Result<()> {
        if self.share_steps(options.sampling, range.clone(), model, watch)? {
            for number in 0..self.batches.len() {
                self.advance(options, number, range.clone(), model, explore, watch)?;
            }
        }
        Ok(())
    }

    /// Does the steps in `range` that are not shared, for batch `number`.
    fn advance<E: Explore<Record = T>>(
        &mut self,
        options: &RoundOptions<'_>,
        number: usize,
        range: Range<usize>,
        model: &mut dyn DiffusionModel,
        explore: &mut E,
        watch: &mut Stopwatch<'_>,
    ) -> Result<()> {
        let RoundOptions { sampling, shared, .. } = *options;
        let (steps, batch) = (sampling.schedule.steps(), &mut self.batches[number]);
        explore.begin(self.row, &batch.keys, std::mem::take(&mut batch.record));
        let mut step = |i: usize, xs: &[Tensor], vs: &[Tensor]| {
            let (video, videos, step) = (number * shared.at_once + 1, shared.group_size, i + 1);
            let description = format!("video {video} of {videos}: denoising step {step} of {steps}");
            watch.begin(ROLLOUT, Some(&description))?;
            explore.step(i, xs, vs)
        };
        let own_range = range.start.max(self.shared_steps)..range.end;
        sampling.advance(model, &self.conditions, &mut batch.trajectories, own_range, Adapter::On, &mut step)?;
        batch.record = explore.end();
        Ok(())
    }
}

/// Does the last denoising steps, `range`, for the videos of a prompt, decodes the videos and scores them. Returns
/// `None` if the prompt is skipped or a score is not finite.
fn finish_prompt<E: Explore>(
    options: &RoundOptions<'_>,
    mut prompt: PendingPrompt<E::Record>,
    range: Range<usize>,
    ctx: &mut StepContext<'_>,
    explore: &mut E,
    round: &mut RoundState<'_>,
) -> Result<Option<Group<E::Record>>> {
    let (mut videos, measured) = generate_and_score(options, &mut prompt, range, ctx, explore, round)?;
    let sample = &ctx.samples[prompt.position];
    let missing_reason = set_scores(ctx, sample, &mut videos, measured, round);
    if round.outcome.nonfinite.is_some() {
        return Ok(None);
    }
    let has_no_score = videos.iter().all(|video| video.scores.is_none());
    if let Some(reason) = missing_reason
        && has_no_score
    {
        round.outcome.skip(sample, reason);
        return Ok(None);
    }
    let PendingPrompt { position, conditions, key, batches, .. } = prompt;
    let records = batches.into_iter().map(|batch| batch.record).collect();
    let weight = sample.weight;
    Ok(Some(Group { position, weight, row: sample.index, key, conditions, videos, records }))
}

/// Does the last denoising steps, `range`, for the videos of a prompt, and decodes the videos. Returns the videos,
/// without their scores, and the results of scoring them, in the same order.
fn generate_and_score<E: Explore>(
    options: &RoundOptions<'_>,
    prompt: &mut PendingPrompt<E::Record>,
    range: Range<usize>,
    ctx: &mut StepContext<'_>,
    explore: &mut E,
    round: &mut RoundState<'_>,
) -> Result<(Vec<Rollout>, Vec<Measured>)> {
    let RoundOptions { algorithm, sampling, shared, .. } = *options;
    let RoundState { watch, outcome, .. } = round;
    let sample = &ctx.samples[prompt.position];
    let StepContext { model, reward: scorer, want_videos, progress, .. } = ctx;
    let (model, want_videos, progress) = (diffusion(&mut **model, algorithm)?, *want_videos, *progress);
    let scorer = scorer.as_deref_mut().ok_or(AlgorithmError::NoReward { algorithm })?;
    let compares = scorer.compares();
    let target = Arc::clone(&prompt.target);
    let measure =
        |video: &Video, scorer: &mut dyn RewardScorer| Measured::of(video, sample, &target, scorer, Grad::Skip);
    let (mut videos, mut measured) = (Vec::new(), Vec::new());
    // The decoded videos, if the reward compares videos with one another. It scores all of them at the end.
    let mut compared = Vec::new();
    std::thread::scope(|threads| -> Result<()> {
        let mut scoring = Scoring { threads, measure: &measure, idle: Some(scorer), busy: None };
        // The shared steps end before the last step, so that all of them are done after this.
        prompt.share_steps(sampling, range.clone(), model, watch)?;
        for number in 0..prompt.batches.len() {
            prompt.advance(options, number, range.clone(), model, explore, watch)?;
            let PendingBatch { keys, trajectories, .. } = &mut prompt.batches[number];
            for (key, latents) in keys.iter().zip(trajectories.latents.drain(..)) {
                watch.begin(DECODE, Some("decoding"))?;
                let (frames, _) = model.decode(&latents, Grad::Skip)?;
                let video = Video::new(frames, shared.frame_rate.of(model, sample))?;
                if want_videos && videos.is_empty() {
                    outcome.show(sample, prompt.repeats, video.clone());
                }
                watch.begin(SCORING, Some("scoring"))?;
                if compares {
                    compared.push(video);
                } else {
                    measured.extend(scoring.begin(video)?);
                }
                videos.push(Rollout { key: *key, latents, scores: None, advantage: 0.0 });
            }
        }
        // No thread has the reward after this.
        measured.extend(scoring.end()?);
        if compares && let Some(reward) = scoring.idle.take() {
            measured = Measured::of_group(&compared, sample, &target, reward, progress)?;
        }
        Ok(())
    })?;
    Ok((videos, measured))
}

/// Sets the scores of a sample's videos. Stops at a score that is not finite and notes it in `round`. If some videos
/// have no score, returns the reason of the last such video.
fn set_scores(
    ctx: &StepContext<'_>,
    sample: &Sample,
    videos: &mut [Rollout],
    measured: Vec<Measured>,
    round: &mut RoundState<'_>,
) -> Option<String> {
    let RoundState { tally, outcome, .. } = round;
    let mut missing_reason = None;
    for (video, measured) in videos.iter_mut().zip(measured) {
        match measured {
            Measured::Score { value, details, .. } => {
                let scores = scores_of_video(ctx, value, &details);
                if let Some(value) = scores.nonfinite() {
                    outcome.nonfinite = Some((format!("the score of {}", sample.origin), value));
                    return missing_reason;
                }
                tally.add_to_mean(SCORE, value);
                details.iter().for_each(|(name, value)| tally.add_to_mean(detail_metric(name), *value));
                video.scores = Some(scores);
            }
            Measured::Skipped(reason) => missing_reason = Some(reason),
        }
    }
    let unscored = videos.iter().filter(|video| video.scores.is_none()).count();
    tally.add_to_mean("actor/unscored", unscored as f64 / videos.len() as f64);
    missing_reason
}

/// A function that scores a video by a reward.
type Measure<'a> = dyn Fn(&Video, &mut dyn RewardScorer) -> Result<Measured> + Sync + 'a;

/// Scores videos one after the other. A reward that computes elsewhere (on other hardware, in another process) scores a
/// video on a thread of its own while the next one is generated.
struct Scoring<'scope, 'env> {
    threads: &'scope Scope<'scope, 'env>,
    measure: &'scope Measure<'scope>,
    /// The reward, unless a thread has it.
    idle: Option<&'scope mut dyn RewardScorer>,
    /// The thread that scores a video, if there is one. It returns the reward.
    busy: Option<ScopedJoinHandle<'scope, (&'scope mut dyn RewardScorer, Result<Measured>)>>,
}

impl Scoring<'_, '_> {
    /// Scores `video`, or starts a thread that scores it. Returns the result of `video` if it was scored at once,
    /// otherwise the result of the previous video, if there is one. So the results come in the order of the videos.
    fn begin(&mut self, video: Video) -> Result<Option<Measured>> {
        let previous = self.end()?;
        // The reward is there, because no thread has it after `end`.
        let Some(reward) = self.idle.take() else { return Ok(previous) };
        let measure = self.measure;
        if reward.is_elsewhere() {
            let score = move || {
                let measured = measure(&video, reward);
                (reward, measured)
            };
            let thread = threads::spawn_scoped(self.threads, "a reward", score);
            self.busy = Some(thread.map_err(Error::failed("a video could not be scored beside the generation"))?);
            return Ok(previous);
        }
        let measured = measure(&video, reward);
        self.idle = Some(reward);
        measured.map(Some)
    }

    /// Waits for the video that is being scored, if there is one, and returns its result.
    fn end(&mut self) -> Result<Option<Measured>> {
        let Some(thread) = self.busy.take() else { return Ok(None) };
        let (reward, measured) = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        self.idle = Some(reward);
        measured.map(Some)
    }
}

/// The score of a video, with its terms from the `details` of the same names. A term without a detail is NaN.
fn scores_of_video(ctx: &StepContext<'_>, sum: f64, details: &BTreeMap<String, f64>) -> Scores {
    let terms = ctx.reward.as_deref().map(|reward| reward.terms()).unwrap_or_default();
    let terms = terms.iter().map(|(name, _)| details.get(name).copied().unwrap_or(f64::NAN)).collect();
    Scores { sum, terms }
}

impl Scores {
    /// The first value that is not finite.
    fn nonfinite(&self) -> Option<f64> {
        [self.sum].iter().chain(&self.terms).copied().find(|value| !value.is_finite())
    }
}

/// Sets the advantages of this rank's videos from the scores of all ranks. Videos of the same data row form one group,
/// also if several ranks generated them. Returns false if a score of any rank is not finite. In that
/// case nothing must be trained.
pub(crate) fn set_advantages<T>(
    shared: &SharedOptions,
    ctx: &StepContext<'_>,
    groups: &mut [Group<T>],
    round: &mut RoundState<'_>,
) -> Result<bool> {
    let terms = ctx.reward.as_deref().map(|reward| reward.terms()).unwrap_or_default();
    let weights: Vec<f64> = terms.iter().map(|(_, weight)| *weight).collect();
    let RoundState { tally, outcome, .. } = round;
    let ranks = ctx.strategy.ranks().data.as_ref();
    let own_scores = RankScores {
        videos: groups.iter().flat_map(|g| g.videos.iter().map(|video| (g.row, video.scores.clone()))).collect(),
        is_finite: outcome.nonfinite.is_none(),
    };
    let all_scores = communicator::join(ranks, &own_scores)?;
    let is_finite = all_scores.iter().all(|rank| rank.is_finite);
    // Number of the videos of lower ranks, which come before the videos of this rank.
    let first_own: usize = all_scores[..ranks.rank().0].iter().map(|rank| rank.videos.len()).sum();
    let (rows, scores): (Vec<u64>, Vec<Option<Scores>>) = all_scores.into_iter().flat_map(|rank| rank.videos).unzip();
    tally.groups = GroupStatistics::of(&sums(&scores), &rows);
    let mut own_advantages = advantages(shared, &weights, &scores, &rows).into_iter().skip(first_own);
    for video in groups.iter_mut().flat_map(|group| &mut group.videos) {
        video.advantage = own_advantages.next().unwrap_or(0.0);
        tally.add_to_mean("actor/advantage", video.advantage.abs());
        tally.trained += usize::from(video.advantage != 0.0);
    }
    Ok(is_finite)
}

/// The score of each video; `None` for a video without one.
fn sums(scores: &[Option<Scores>]) -> Vec<Option<f64>> {
    scores.iter().map(|scores| Some(scores.as_ref()?.sum)).collect()
}

/// The advantages of videos with these `scores`. `weights` are the weights of the rewards. Videos with equal `rows`
/// form a group.
fn advantages(shared: &SharedOptions, weights: &[f64], scores: &[Option<Scores>], rows: &[u64]) -> Vec<f64> {
    let mut advantages = match (shared.several_rewards, weights.len()) {
        (SeveralRewards::Apart, 2..) => {
            let term = |t: usize| scores.iter().map(|scores| Some(scores.as_ref()?.terms[t])).collect();
            let terms: Vec<Vec<Option<f64>>> = (0..weights.len()).map(term).collect();
            normalized_apart(&terms, weights, rows, shared.advantage_spread)
        }
        _ => normalized(&sums(scores), rows, Normalization::new(shared.advantage_spread)),
    };
    if let Some(best_of) = shared.best_of {
        let has_score: Vec<bool> = scores.iter().map(Option::is_some).collect();
        clear_all_but_best_and_worst(&mut advantages, &has_score, rows, best_of);
    }
    advantages
}

/// Sets the advantages of each row's videos to 0, except those of `best_of` videos: one half are the best videos, the
/// other half the worst. Videos are compared by their advantages and not by their sums of scores, whose order the
/// reward with the largest scale decides even if the rewards are normalised apart.
fn clear_all_but_best_and_worst(advantages: &mut [f64], has_score: &[bool], rows: &[u64], best_of: usize) {
    let mut positions_by_row: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    rows.iter().enumerate().for_each(|(i, row)| positions_by_row.entry(*row).or_default().push(i));
    for positions in positions_by_row.values() {
        let row_advantages: Vec<Option<f64>> =
            positions.iter().map(|i| has_score[*i].then_some(advantages[*i])).collect();
        let chosen_indices = best_and_worst(&row_advantages, best_of);
        for (i, position) in positions.iter().enumerate() {
            if !chosen_indices.contains(&i) {
                advantages[*position] = 0.0;
            }
        }
    }
}

/// The scores of one rank, as sent to all ranks.
#[derive(Serialize, Deserialize)]
struct RankScores {
    /// Data row and scores of each video.
    videos: Vec<(u64, Option<Scores>)>,
    /// Whether no score of the rank was NaN or infinite.
    is_finite: bool,
}

/// Fails if all videos of a prompt would be the same, because `noise_seed` fixes their noise.
pub(crate) fn require_different_videos(ctx: &StepContext<'_>, algorithm: &str) -> Result<()> {
    let (_, noise_seed) = ctx.noise.keys();
    match noise_seed {
        Some(_) => Err(same_videos(algorithm)),
        None => Ok(()),
    }
}

/// The error on a configured `noise_seed`, with which all videos of a prompt are the same.
pub(crate) fn same_videos(algorithm: &str) -> Error {
    let problem = format!("`{algorithm}` compares the videos of a prompt, and they would be all the same: unset it");
    Error::config("noise_seed", problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow_grpo::FlowGrpoConfig;
    use crate::policy_gradient::Method;
    use crate::policy_gradient::advantages::Spread;

    /// The positions of the videos that `best_of: 2` trains on, of one group with the scores of two rewards.
    fn kept(several_rewards: SeveralRewards, advantage_spread: Spread, rewards: [[f64; 4]; 2]) -> Vec<usize> {
        let config =
            FlowGrpoConfig { several_rewards, advantage_spread, best_of: Some(2), ..FlowGrpoConfig::default() };
        let scores: Vec<Option<Scores>> = (0..4)
            .map(|i| Some(Scores { sum: rewards[0][i] + rewards[1][i], terms: vec![rewards[0][i], rewards[1][i]] }))
            .collect();
        let advantages = advantages(&config.shared(), &[1.0, 1.0], &scores, &[7; 4]);
        (0..4).filter(|i| advantages[*i] != 0.0).collect()
    }

    /// Over their deviations 0.370 and 0.740 the scores are -1.28, -0.47, 0.34, 1.42 and 1.52, -1.18, 0.17, -0.51:
    /// their sums are 0.24, -1.66, 0.51, 0.91. The sums of the scores themselves are 52, 50.3, 51.6, 51.5.
    #[test]
    fn the_best_and_worst_of_rewards_normalised_apart_are_chosen_by_the_normalised_sum() {
        let rewards = [[0.0, 0.3, 0.6, 1.0], [52.0, 50.0, 51.0, 50.5]];
        for spread in [Spread::Group, Spread::Step, Spread::LargestGroup] {
            assert_eq!(kept(SeveralRewards::Apart, spread, rewards), [1, 3], "{spread:?}");
            assert_eq!(kept(SeveralRewards::Sum, spread, rewards), [0, 1], "{spread:?}");
        }
        // Without a spread, both choose by the sum.
        assert_eq!(kept(SeveralRewards::Apart, Spread::None, rewards), [0, 1]);
    }

    #[test]
    fn a_video_without_a_score_is_neither_best_nor_worst() {
        let config = FlowGrpoConfig { best_of: Some(2), ..FlowGrpoConfig::default() };
        let of = |sum: f64| Some(Scores { sum, terms: Vec::new() });
        // The missing score would have the advantage 0, between the others.
        let found = advantages(&config.shared(), &[], &[of(5.0), None, of(6.0), of(1.0)], &[7; 4]);
        assert!(found[0] == 0.0 && found[1] == 0.0 && found[2] > 0.0 && found[3] < 0.0, "{found:?}");
        let found = advantages(&config.shared(), &[], &[None, None, of(6.0), of(1.0)], &[7; 4]);
        assert!(found[..2] == [0.0; 2] && found[2] > 0.0 && found[3] < 0.0, "{found:?}");
    }
}
