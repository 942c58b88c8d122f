//! A round: videos for every prompt of a step, their scores, and the advantage of each score over the others.

use std::collections::BTreeMap;

use roll_core::{
    Adapter, Error, Grad, Result, ResultExt, RewardScorer, Sample, StepContext, StepReport, Tensor, Video, communicator,
};
use serde::{Deserialize, Serialize};

use super::advantages::{GroupStatistics, Normalization, best_and_worst, normalized, normalized_apart};
use super::options::{SeveralRewards, Shared};
use super::tally::{SCORE, Tally};
use crate::ranks::{draw_key, repeats, rollout_key};
use crate::sampling::{Conditions, Sampling};
use crate::scoring::{Measured, Prepared, Prospect};
use crate::stopwatch::{DATA, DECODE, ENCODE, FORWARD, OPTIMIZER, PULL, REFERENCE, ROLLOUT, SCORING, Stopwatch};
use crate::update::diffusion;
use crate::{AlgorithmError, update};

const PHASES: [&str; 9] = [ENCODE, ROLLOUT, DECODE, SCORING, REFERENCE, FORWARD, PULL, DATA, OPTIMIZER];

/// How a round is made.
pub(crate) struct RoundOptions<'a> {
    pub(crate) algorithm: &'static str,
    pub(crate) sampling: &'a Sampling,
    pub(crate) shared: &'a Shared,
    /// Whether all videos of a prompt start from the same noise.
    pub(crate) same_start: bool,
}

/// A round on its way.
pub(crate) struct Running<'a> {
    pub(crate) watch: Stopwatch<'a>,
    pub(crate) tally: Tally,
    /// Number of the update, from 0.
    pub(crate) update: usize,
}

impl<'a> Running<'a> {
    /// Begins without a gradient of an earlier step.
    pub(crate) fn new(ctx: &mut StepContext<'a>, shared: &Shared) -> Self {
        ctx.strategy.discard();
        let tally = Tally::new(shared.data_weight);
        Self { watch: Stopwatch::new(ctx.progress, &PHASES), tally, update: 0 }
    }

    /// A phase of an update begins; the user can stop before the first one is done.
    pub(crate) fn begin(&mut self, metric: &'static str, words: &str) -> Result<()> {
        match self.update {
            0 => self.watch.begin(metric, Some(words)),
            _ => {
                self.watch.begin_after_update(metric, Some(words));
                Ok(())
            }
        }
    }

    /// The report of the round, over all ranks.
    pub(crate) fn report(self, ctx: &StepContext<'_>) -> Result<StepReport> {
        let ranks = ctx.strategy.ranks().data.as_ref();
        let seconds = update::slowest(ranks, self.watch.seconds())?;
        let alias = ctx.reward.as_deref().and_then(|reward| reward.measures().alias);
        Ok(self.tally.joined(ranks)?.report(ctx.learning_rate, alias, seconds))
    }
}

/// The videos of one prompt.
pub(crate) struct Group<T> {
    /// Position of the sample among those of the step.
    pub(crate) sample: usize,
    /// Row of the sample, which groups of all ranks are joined by.
    row: u64,
    /// Key of the sample's draws.
    key: u64,
    pub(crate) conditions: Conditions,
    pub(crate) videos: Vec<Rollout>,
    /// Records of the step of videos that were computed side by side, in their order.
    pub(crate) kept: Vec<T>,
}

impl<T> Group<T> {
    /// The videos that are trained on.
    pub(crate) fn trained(&self) -> impl Iterator<Item = &Rollout> {
        self.videos.iter().filter(|video| video.advantage != 0.0)
    }

    /// Key of the sample's draws in an update: the updates of a step have their own.
    pub(crate) fn key_in(&self, update: usize) -> u64 {
        key_in(self.key, update)
    }
}

fn key_in(key: u64, update: usize) -> u64 {
    key ^ ((update as u64) << 28)
}

/// One generated video.
pub(crate) struct Rollout {
    /// Key of its draws.
    key: u64,
    /// The decoded latents, `[C, T, H, W]`.
    pub(crate) latents: Tensor,
    /// Its score and those that it is the sum of; `None` where there was nothing to score.
    scores: Option<Scores>,
    /// Advantage of the score over the others; 0 trains nothing.
    pub(crate) advantage: f64,
}

impl Rollout {
    /// As [`Group::key_in`].
    pub(crate) fn key_in(&self, update: usize) -> u64 {
        key_in(self.key, update)
    }
}

#[derive(Clone)]
struct Scores {
    sum: f64,
    terms: Vec<f64>,
}

/// Takes the place of sampler steps, and keeps records of them for the training.
pub(crate) trait Explore {
    /// Record of videos side by side.
    type Kept;
    /// The next steps are those of the videos with these keys, of the sample in `row`.
    fn begin(&mut self, row: u64, keys: &[u64]);
    /// As [`crate::sampling::OwnStep`].
    fn step(&mut self, i: usize, xs: &[Tensor], vs: &[Tensor]) -> Result<Option<Vec<Tensor>>>;
    /// The record since [`Explore::begin`].
    fn end(&mut self) -> Self::Kept;
}

/// Leaves every step to the sampler.
pub(crate) struct Unexplored;

impl Explore for Unexplored {
    type Kept = ();
    fn begin(&mut self, _row: u64, _keys: &[u64]) {}
    fn step(&mut self, _i: usize, _xs: &[Tensor], _vs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        Ok(None)
    }
    fn end(&mut self) {}
}

/// Generates and scores, by the parameters that the model has.
pub(crate) fn generate<E: Explore>(
    options: &RoundOptions<'_>,
    prepared: &mut Prepared,
    ctx: &mut StepContext<'_>,
    explore: &mut E,
    run: &mut Running<'_>,
) -> Result<Vec<Group<E::Kept>>> {
    let repeats = repeats(ctx.strategy.ranks().data.as_ref(), ctx.samples)?;
    let mut groups = Vec::new();
    for (i, (sample, repeats)) in ctx.samples.iter().zip(repeats).enumerate() {
        let group = generate_group(options, prepared, ctx, (i, repeats), explore, run)
            .while_doing(|| format!("training on {}", sample.origin))?;
        groups.extend(group);
        if run.tally.nonfinite.is_some() {
            break;
        }
    }
    Ok(groups)
}

/// The videos of the sample at a position of the step, which had it `repeats` times before.
fn generate_group<E: Explore>(
    options: &RoundOptions<'_>,
    prepared: &mut Prepared,
    ctx: &mut StepContext<'_>,
    (position, repeats): (usize, u64),
    explore: &mut E,
    run: &mut Running<'_>,
) -> Result<Option<Group<E::Kept>>> {
    let RoundOptions { algorithm, sampling, shared, .. } = *options;
    let Running { watch, tally, .. } = run;
    let sample = &ctx.samples[position];
    watch.begin(ENCODE, Some("encoding prompt and reference"))?;
    let prospect = prepared.target(reward(ctx, algorithm)?, sample, shared.reference)?;
    // Nothing is generated for a sample that is left out whatever the model makes of it.
    if let Prospect::Nothing(reason) = &*prospect
        && let Measured::Skipped(reason) = Measured::missing(sample, reward(ctx, algorithm)?, reason.clone())?
    {
        tally.skip(sample, reason);
        return Ok(None);
    }
    let negative = sampling.guidance.is_on().then_some(shared.sampling.negative_prompt.as_str());
    let conditions = prepared.conditions(diffusion(ctx.model, algorithm)?, sample, negative)?;
    let key = draw_key(sample, repeats);
    let keys: Vec<u64> = (0..shared.group_size).map(|k| rollout_key(key, k)).collect();
    let (mut videos, mut kept, mut missing) = (Vec::new(), Vec::new(), None);
    for (part, keys) in keys.chunks(shared.at_once.max(1)).enumerate() {
        let start = |own: &u64| {
            let start = if options.same_start { key } else { *own };
            ctx.noise.latents(ctx.step, start, &conditions.prompt.latent_shape)
        };
        let noises = keys.iter().map(start).collect::<Result<Vec<_>>>()?;
        explore.begin(sample.index, keys);
        let mut step = |i: usize, xs: &[Tensor], vs: &[Tensor]| {
            let of = (part * shared.at_once + 1, shared.group_size, i + 1, sampling.schedule.steps());
            let words = format!("video {} of {}: denoising step {} of {}", of.0, of.1, of.2, of.3);
            watch.begin(ROLLOUT, Some(&words))?;
            explore.step(i, xs, vs)
        };
        let model = diffusion(ctx.model, algorithm)?;
        let latents = sampling.generate_together(model, &conditions, &noises, Adapter::On, &mut step)?;
        kept.push(explore.end());
        for (key, latents) in keys.iter().zip(latents) {
            watch.begin(DECODE, Some("decoding"))?;
            let model = diffusion(ctx.model, algorithm)?;
            let (frames, _) = model.decode(&latents, Grad::Skip)?;
            let video = Video::new(frames, shared.frame_rate.of(model, sample))?;
            if ctx.want_videos && videos.is_empty() {
                let again = if repeats > 0 { format!("-{}", repeats + 1) } else { String::new() };
                tally.videos.push((format!("sample-{:06}{again}", sample.index), video.clone()));
            }
            watch.begin(SCORING, Some("scoring"))?;
            let scores = match Measured::of(&video, sample, &prospect, reward(ctx, algorithm)?, Grad::Skip)? {
                Measured::Score { value, details, .. } => Some(scored(ctx, sample, value, details, tally)),
                Measured::Skipped(reason) => {
                    missing = Some(reason);
                    None
                }
            };
            videos.push(Rollout { key: *key, latents, scores, advantage: 0.0 });
            if tally.nonfinite.is_some() {
                return Ok(None);
            }
        }
    }
    let unscored = videos.iter().filter(|video| video.scores.is_none()).count();
    tally.mean("actor/unscored", unscored as f64 / videos.len() as f64);
    if let (Some(reason), true) = (missing, unscored == videos.len()) {
        tally.skip(sample, reason);
        return Ok(None);
    }
    Ok(Some(Group { sample: position, row: sample.index, key, conditions, videos, kept }))
}

/// Notes a score; one that is not a number ends the round.
fn scored(
    ctx: &StepContext<'_>,
    sample: &Sample,
    value: f64,
    details: BTreeMap<String, f64>,
    tally: &mut Tally,
) -> Scores {
    let terms = ctx.reward.as_deref().map(|reward| reward.terms()).unwrap_or_default();
    let terms: Vec<f64> = terms.iter().map(|(name, _)| details.get(name).copied().unwrap_or(f64::NAN)).collect();
    if let Some(value) = [value].iter().chain(&terms).copied().find(|value| !value.is_finite()) {
        tally.nonfinite = Some((format!("the score of {}", sample.origin), value));
        return Scores { sum: value, terms };
    }
    tally.mean(SCORE, value);
    for (name, value) in details {
        // Seconds are grouped with the other times, which differ from run to run.
        let metric = match name.strip_prefix("time/") {
            Some(reward) => format!("time/score/{reward}"),
            None => format!("reward/{name}"),
        };
        tally.mean(metric, value);
    }
    Scores { sum: value, terms }
}

/// Sets the advantages of all videos, by the scores of all ranks: groups of one row are one, wherever they were made.
/// Gives false when a rank met a score that is not finite: then nothing is to be trained.
pub(crate) fn judge<T>(
    shared: &Shared,
    ctx: &StepContext<'_>,
    groups: &mut [Group<T>],
    tally: &mut Tally,
) -> Result<bool> {
    let weights: Vec<f64> =
        ctx.reward.as_deref().map(|r| r.terms()).unwrap_or_default().iter().map(|(_, w)| *w).collect();
    let ranks = ctx.strategy.ranks().data.as_ref();
    let told = |video: &Rollout| {
        let values = video.scores.iter().flat_map(|s| [s.sum].into_iter().chain(s.terms.iter().copied()));
        values.map(f64::to_bits).collect::<Vec<u64>>()
    };
    let own = Told {
        scores: groups.iter().flat_map(|g| g.videos.iter().map(|video| (g.row, told(video)))).collect(),
        is_finite: tally.nonfinite.is_none(),
    };
    let all = communicator::join(ranks, &own)?;
    let is_finite = all.iter().all(|told| told.is_finite);
    let first: usize = all[..ranks.rank().0].iter().map(|told| told.scores.len()).sum();
    let (rows, scores): (Vec<u64>, Vec<Vec<u64>>) = all.into_iter().flat_map(|told| told.scores).unzip();
    let score = |values: &Vec<u64>, i: usize| values.get(i).map(|bits| f64::from_bits(*bits));
    let sums: Vec<Option<f64>> = scores.iter().map(|values| score(values, 0)).collect();
    tally.groups = GroupStatistics::of(&sums, &rows);
    let mut advantages = match (shared.several_rewards, weights.len()) {
        (SeveralRewards::Apart, 2..) => {
            let terms: Vec<Vec<Option<f64>>> =
                (0..weights.len()).map(|t| scores.iter().map(|values| score(values, t + 1)).collect()).collect();
            normalized_apart(&terms, &weights, &rows)
        }
        _ => normalized(&sums, &rows, Normalization::new(shared.advantage_spread)),
    };
    if let Some(best_of) = shared.best_of {
        leave_out_the_middle(&mut advantages, &sums, &rows, best_of);
    }
    let mut advantages = advantages.into_iter().skip(first);
    for video in groups.iter_mut().flat_map(|group| &mut group.videos) {
        video.advantage = advantages.next().unwrap_or(0.0);
        tally.mean("actor/advantage", video.advantage.abs());
        tally.trained += usize::from(video.advantage != 0.0);
    }
    Ok(is_finite)
}

/// Takes their advantage from all but the best and worst videos of each row.
fn leave_out_the_middle(advantages: &mut [f64], sums: &[Option<f64>], rows: &[u64], best_of: usize) {
    let mut positions: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    rows.iter().enumerate().for_each(|(i, row)| positions.entry(*row).or_default().push(i));
    for positions in positions.values() {
        let own: Vec<Option<f64>> = positions.iter().map(|i| sums[*i]).collect();
        let chosen = best_and_worst(&own, best_of);
        positions.iter().enumerate().filter(|(i, _)| !chosen.contains(i)).for_each(|(_, at)| advantages[*at] = 0.0);
    }
}

/// A rank's message to the others: rows, and scores as bits.
#[derive(Serialize, Deserialize)]
struct Told {
    scores: Vec<(u64, Vec<u64>)>,
    is_finite: bool,
}

/// Fails where all videos of a prompt would be one.
pub(crate) fn needs_different_videos(ctx: &StepContext<'_>, algorithm: &str) -> Result<()> {
    match ctx.noise.keys().1 {
        Some(_) => {
            let problem =
                format!("`{algorithm}` compares the videos of a prompt, and they would be all the same: unset it");
            Err(Error::config("noise_seed", problem))
        }
        None => Ok(()),
    }
}

/// The reward of the step.
pub(crate) fn reward<'a>(ctx: &'a mut StepContext<'_>, algorithm: &'static str) -> Result<&'a mut dyn RewardScorer> {
    match ctx.reward.as_deref_mut() {
        Some(reward) => Ok(reward),
        None => Err(AlgorithmError::NoReward { algorithm }.into()),
    }
}
