//! Clips that a run generates before and after training, each time from the same noise: what did training change?

use std::ops::Range;

use roll_core::{
    BuildContext, ClipAlgorithm, Communicator, Error, Evaluated, EvaluationContext, Model, Noise, Registry, Result,
    RewardComponent, RewardScorer, Sample, VideoUnit, communicator,
};
use roll_train::progress::StoppableBar;
use roll_train::results::scores::{Clip, Results, SetName};

use crate::rows::{DataConfig, Dataset, Metadata, Windows};
use crate::task::config::{CheckRewards, ClipConfig, EvaluationConfig};
use checks::Checks;

mod checks;
mod gather;
mod partial;

pub(crate) use partial::PartialClips;

/// Number of clips that the algorithm knows in advance ([`EvaluationContext::upcoming`]), so that it can work on them
/// together. A killed run repeats at most these.
const BATCH: usize = 16;

/// The clips of an evaluation, and the rewards that are measured only. The ranks share the clips.
pub struct Evaluator {
    sets: Vec<Set>,
    checks: Checks,
    /// Clips that cannot be read, and why.
    skipped: Vec<(String, String)>,
}

/// Clips with results of their own in the summary.
struct Set {
    name: SetName,
    /// All clips on rank 0, which shows them to people; this rank's part on other ranks.
    samples: Vec<Sample>,
    /// This rank's part of `samples`.
    own_range: Range<usize>,
    /// Number of clips over all ranks.
    clip_count: usize,
}

/// Inputs of an evaluation besides its clips and checks.
pub(crate) struct EvaluationInputs<'a> {
    pub algorithm: &'a mut dyn ClipAlgorithm,
    pub model: &'a mut dyn Model,
    /// The reward that is trained on.
    pub reward: Option<&'a mut (dyn RewardScorer + 'static)>,
    pub noise: &'a Noise,
    /// The ranks that share the clips.
    pub ranks: &'a dyn Communicator,
    pub progress: &'a StoppableBar,
}

/// The parts of an evaluation that are opened before the model.
pub(crate) struct EvaluationSources {
    /// The rows of `evaluation.metadata`, if that is set, and the options by which they are read.
    unseen: Option<(Metadata, DataConfig)>,
    checks: Checks,
    /// Whether the checks are chosen by `evaluation.check: auto`.
    has_default_checks: bool,
}

impl EvaluationSources {
    /// Opens the rows of `evaluation.metadata`, and the rewards of `evaluation.check`, which check the rewards
    /// `trained`.
    pub(crate) fn open(
        clips: &ClipConfig,
        trained: &[RewardComponent],
        registry: &Registry,
        context: &BuildContext,
    ) -> Result<Self> {
        let config = &clips.evaluation;
        let open_unseen = |metadata| -> Result<_> {
            let (base_path, metadata) = (config.base_path.clone(), Some(metadata));
            let windows = Windows::Head;
            let data = DataConfig { metadata, base_path, windows, ..clips.data.clone() };
            let data = data.resolved(|path| context.resolve(path));
            Ok((Metadata::open(&data)?, data))
        };
        let unseen = config.metadata.clone().map(open_unseen).transpose()?;
        let checks = Checks::open(&config.checks(trained, registry), registry, context)?;
        Ok(Self { unseen, checks, has_default_checks: config.check == CheckRewards::Auto })
    }

    pub(crate) fn unseen(&self) -> Option<&Metadata> {
        self.unseen.as_ref().map(|(metadata, _)| metadata)
    }

    /// The names of the checks that read the reference, if the configuration lists the checks.
    pub(crate) fn configured_reference_readers(&self) -> impl Iterator<Item = &str> {
        self.checks.reference_readers().filter(move |_| !self.has_default_checks)
    }

    /// The names of the checks that read the reference, if the checks are the default ones.
    pub(crate) fn default_reference_readers(&self) -> impl Iterator<Item = &str> {
        self.checks.reference_readers().filter(move |_| self.has_default_checks)
    }

    /// Leaves out the checks that read the reference.
    pub(crate) fn leave_out_reference_readers(&mut self) {
        self.checks.leave_out_reference_readers();
    }

    /// Whether no check is left.
    pub(crate) fn is_unchecked(&self) -> bool {
        self.checks.components().is_empty()
    }
}

impl Evaluator {
    /// Reads the clips that the configuration names; `None` if it names none. `unit` says which lengths and sizes the
    /// model's videos may have. `train` is the training data, if it could be opened.
    ///
    /// A clip that cannot be read is an error or is left out (`data.on_bad_sample`). If the number of clips is limited,
    /// the next clip takes the place of one that is left out.
    pub(crate) fn open(
        config: &EvaluationConfig,
        sources: EvaluationSources,
        train: Option<&Dataset>,
        unit: VideoUnit,
        ranks: &dyn Communicator,
    ) -> Result<Option<Self>> {
        let (mut sets, mut skipped) = (Vec::new(), Vec::new());
        if config.train_samples > 0
            && let Some(train) = train
        {
            let (set, unreadable) = Set::read(SetName::Train, train, Some(config.train_samples), ranks)?;
            sets.push(set);
            skipped.extend(unreadable);
        }
        if let Some((metadata, data)) = sources.unseen {
            let unseen = Dataset::new(metadata, &data, unit)?;
            let (set, unreadable) = Set::read(SetName::Unseen, &unseen, config.samples, ranks)?;
            sets.push(set);
            skipped.extend(unreadable);
        }
        Ok((!sets.is_empty()).then_some(Self { sets, checks: sources.checks, skipped }))
    }

    /// Number of clips of all sets.
    pub fn clips(&self) -> usize {
        self.sets.iter().map(|set| set.clip_count).sum()
    }

    /// The rewards that check the trained one.
    pub(crate) fn checks(&self) -> Vec<&RewardComponent> {
        self.checks.components()
    }

    /// The scorers of the checks.
    pub fn check_scorers(&mut self) -> impl Iterator<Item = &mut dyn RewardScorer> {
        self.checks.scorers()
    }

    /// Names of the checks in metrics and figures.
    pub(crate) fn check_labels(&self) -> Vec<String> {
        self.checks.labels()
    }

    /// Clips that were left out because they cannot be read, and why.
    pub fn skipped(&self) -> &[(String, String)] {
        &self.skipped
    }

    /// This rank's part of the clips that are not trained on, if there are any.
    pub(crate) fn unseen(&self) -> Option<&[Sample]> {
        self.sets.iter().find(|set| set.name == SetName::Unseen).map(|set| &set.samples[set.own_range.clone()])
    }

    /// The samples of a set: all of them on rank 0, and this rank's part elsewhere.
    pub fn samples(&self, name: SetName) -> &[Sample] {
        self.sets.iter().find(|set| set.name == name).map(|set| set.samples.as_slice()).unwrap_or_default()
    }

    /// Generates and scores all clips. Each rank evaluates its part, one clip after the other; every rank then has the
    /// numbers of all clips, in the order of the clips. Rank 0 receives each video as soon as it is generated, and
    /// writes it; no rank holds more than one video. Clips that an earlier process has written to `partial` are not
    /// generated again. Returns `None` if the algorithm has no evaluation.
    pub(crate) fn run(
        &mut self,
        inputs: &mut EvaluationInputs<'_>,
        partial: Option<&PartialClips<'_>>,
    ) -> Result<Option<Results>> {
        let (mut results, mut done) = (Results::new(), 0);
        for set in &self.sets {
            let Some(clips) = set.evaluate(inputs, &mut self.checks, partial, &mut done)? else {
                return Ok(None);
            };
            results.push((set.name, clips));
        }
        Ok(Some(results))
    }
}

impl Set {
    /// The first `at_most` clips of a data set that can be read. Also returns the clips before them that cannot be
    /// read, each with the reason.
    fn read(
        name: SetName,
        dataset: &Dataset,
        at_most: Option<usize>,
        ranks: &dyn Communicator,
    ) -> Result<(Self, Vec<(String, String)>)> {
        let (mut samples, mut skipped) = (Vec::new(), Vec::new());
        for i in 0..dataset.len() {
            if at_most.is_some_and(|most| samples.len() == most) {
                break;
            }
            match dataset.sample_or_skip(i)? {
                Ok(sample) => samples.push(sample),
                Err(bad) => skipped.push(bad),
            }
        }
        if ranks.rank().0 == 0 {
            skipped.iter().for_each(|(place, reason)| tracing::warn!("{place} is not evaluated: {reason}"));
        }
        let clip_count = samples.len();
        if clip_count == 0 {
            let why = skipped.first().map(|(place, reason)| format!("{place}: {reason}")).unwrap_or_default();
            let problem = format!("not one of the {} clips to evaluate can be read; the first is {why}", skipped.len());
            let key = if name == SetName::Train { "evaluation.train_samples" } else { "evaluation.metadata" };
            return Err(Error::config(key, problem));
        }
        check_clip_counts(ranks, clip_count)?;
        let mut own_range = part(clip_count, ranks.rank().0, ranks.world_size());
        if ranks.rank().0 > 0 {
            samples = samples.drain(own_range.clone()).collect();
            own_range = 0..samples.len();
        }
        Ok((Self { name, samples, own_range, clip_count }, skipped))
    }

    /// See [`Evaluator::run`]; `done` counts the clips of all sets, for the progress bar.
    fn evaluate(
        &self,
        inputs: &mut EvaluationInputs<'_>,
        checks: &mut Checks,
        partial: Option<&PartialClips<'_>>,
        done: &mut u64,
    ) -> Result<Option<Vec<Clip>>> {
        let (ranks, world) = (inputs.ranks, inputs.ranks.world_size());
        let read_finished = |(i, sample)| partial.and_then(|partial| partial.read_clip(self.name, i, sample));
        let finished_before: Vec<Option<Clip>> = self.samples.iter().enumerate().map(read_finished).collect();
        // Rank 0 decides which clips are finished, because it alone has the files and all samples.
        let mut clips = communicator::join(ranks, &finished_before)?.swap_remove(0);
        let unfinished_of =
            |rank| part(self.clip_count, rank, world).filter(|i| clips[*i].is_none()).collect::<Vec<_>>();
        let unfinished: Vec<Vec<usize>> = (0..world).map(unfinished_of).collect();
        let my_unfinished = &unfinished[ranks.rank().0];
        // The position in the set of this rank's first sample.
        let my_first = part(self.clip_count, ranks.rank().0, world).start;
        let my_sample = |i: &usize| self.samples[self.own_range.start + i - my_first].clone();
        *done += clips.iter().flatten().count() as u64;
        inputs.progress.set(*done);
        // All ranks take part in the collectives of a round. Each contributes one clip, or none if it has no more.
        for round in 0..unfinished.iter().map(Vec::len).max().unwrap_or(0) {
            if inputs.progress.is_asked_to_stop(ranks)? {
                return Err(Error::Interrupted);
            }
            let my_clip = match my_unfinished.get(round) {
                Some(&i) => {
                    // The end of the batch that this round belongs to.
                    let batch_end = my_unfinished.len().min((round / BATCH + 1) * BATCH);
                    let upcoming: Vec<Sample> = my_unfinished[round + 1..batch_end].iter().map(my_sample).collect();
                    Some((i, evaluate(inputs, checks, &my_sample(&i), &upcoming)?))
                }
                None => None,
            };
            let Some(evaluated) = gather::gather_clips(ranks, my_clip)? else { return Ok(None) };
            for (i, evaluated) in evaluated {
                if let (Some(partial), Some(sample)) = (partial, self.samples.get(i)) {
                    partial.write_clip(self.name, i, sample, &evaluated)?;
                }
                clips[i] = Some(Clip::of(&evaluated));
                *done += 1;
            }
            inputs.progress.set(*done);
        }
        Ok(Some(clips.into_iter().flatten().collect()))
    }
}

/// The positions of the clips that a rank evaluates, if all ranks together evaluate `count` clips.
fn part(count: usize, rank: usize, world: usize) -> Range<usize> {
    rank * count / world..(rank + 1) * count / world
}

/// The evaluated clip of `sample`; `None` if the algorithm has no evaluation. `upcoming` are the samples that follow.
fn evaluate(
    inputs: &mut EvaluationInputs<'_>,
    checks: &mut Checks,
    sample: &Sample,
    upcoming: &[Sample],
) -> Result<Option<Evaluated>> {
    let mut rewards: Vec<&mut dyn RewardScorer> = Vec::new();
    rewards.extend(inputs.reward.as_deref_mut().map(|r| r as &mut dyn RewardScorer));
    rewards.extend(checks.scorers());
    let mut context = EvaluationContext {
        samples: std::slice::from_ref(sample),
        upcoming,
        model: inputs.model,
        rewards,
        noise: inputs.noise,
        progress: inputs.progress,
    };
    let Some(evaluated) = inputs.algorithm.evaluate(&mut context)? else { return Ok(None) };
    let found = evaluated.len();
    let [mut clip] = <[Evaluated; 1]>::try_from(evaluated)
        .map_err(|_| Error::Misuse(format!("the algorithm evaluated {found} clips of 1")))?;
    checks.add_sum(&mut clip.scores);
    Ok(Some(clip))
}

/// Fails unless all ranks read the same number of clips. Otherwise their parts would not fit together.
fn check_clip_counts(ranks: &dyn Communicator, clips: usize) -> Result<()> {
    let counts = communicator::join(ranks, &clips)?;
    match counts.iter().all(|other| *other == clips) {
        true => Ok(()),
        false => Err(Error::Misuse(format!(
            "the ranks can read different numbers of the clips to evaluate, {counts:?}: all must see the same files"
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;
    use std::time::Duration;

    use crate::rows::OnBadSample;
    use roll_core::{SingleRank, Tensor, ThreadRanks, Video};
    use roll_media::write_mp4;

    use super::*;

    /// Rows of which those in `broken` are no videos.
    fn dataset(directory: &Path, rows: usize, broken: &[usize], on_bad_sample: OnBadSample) -> Dataset {
        let mut metadata = String::from("video,prompt\n");
        for i in 0..rows {
            let path = directory.join(format!("{i}.mp4"));
            match broken.contains(&i) {
                true => std::fs::write(path, "no video").unwrap(),
                false => write_mp4(path, &Video::new(Tensor::zeros([5, 3, 32, 32]), 8.0).unwrap()).unwrap(),
            }
            metadata += &format!("{i}.mp4,a person\n");
        }
        let path = directory.join("metadata.csv");
        std::fs::write(&path, metadata).unwrap();
        let config = DataConfig {
            metadata: Some(path),
            on_bad_sample,
            num_frames: 5,
            max_pixels: 1024,
            ..DataConfig::default()
        };
        Dataset::open(&config, VideoUnit::default()).unwrap()
    }

    #[test]
    fn the_next_clip_replaces_an_unreadable_one() {
        let dir = tempfile::tempdir().unwrap();
        let data = dataset(dir.path(), 3, &[0], OnBadSample::Skip);
        let (set, skipped) = Set::read(SetName::Train, &data, Some(1), &SingleRank).unwrap();
        assert_eq!((set.samples[0].index, set.clip_count, skipped.len()), (1, 1, 1));
        assert!(skipped[0].0.contains("metadata.csv") && skipped[0].1.contains("0.mp4"), "{skipped:?}");
        let strict = dataset(dir.path(), 3, &[0], OnBadSample::Error);
        assert!(Set::read(SetName::Train, &strict, Some(1), &SingleRank).is_err());
    }

    #[test]
    fn a_clip_that_one_rank_cannot_read_fails_all_ranks() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        for policy in [OnBadSample::Error, OnBadSample::Skip] {
            let read = ThreadRanks::run(3, Duration::from_secs(60), |ranks| {
                let rank = ranks.rank().0;
                let broken: &[usize] = if rank == 1 { &[2] } else { &[] };
                let data = dataset(dirs[rank].path(), 4, broken, policy);
                Set::read(SetName::Unseen, &data, None, ranks.as_ref()).map(drop)
            });
            for (rank, read) in read.into_iter().enumerate() {
                let message = read.unwrap_err().chain();
                match policy {
                    OnBadSample::Error => assert!(message.contains("2.mp4"), "rank {rank}: {message}"),
                    OnBadSample::Skip => assert!(message.contains("[4, 3, 4]"), "rank {rank}: {message}"),
                }
            }
        }
    }

    #[test]
    fn fails_if_no_clip_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let data = dataset(dir.path(), 2, &[0, 1], OnBadSample::Skip);
        let message = Set::read(SetName::Unseen, &data, None, &SingleRank).err().unwrap().to_string();
        assert!(
            message.contains("`evaluation.metadata`")
                && message.contains("not one of the 2")
                && message.contains("0.mp4")
        );
    }

    #[test]
    fn rank_0_holds_all_clips_and_other_ranks_their_part() {
        let dir = tempfile::tempdir().unwrap();
        let data = dataset(dir.path(), 6, &[2], OnBadSample::Skip);
        let read = ThreadRanks::run(2, Duration::from_secs(60), |ranks| {
            let (set, _) = Set::read(SetName::Unseen, &data, None, ranks.as_ref())?;
            let rows = |samples: &[Sample]| samples.iter().map(|s| s.index).collect::<Vec<_>>();
            Ok((rows(&set.samples), rows(&set.samples[set.own_range.clone()]), set.clip_count))
        });
        let [first, second] = &read[..] else { unreachable!() };
        assert_eq!(first.as_ref().unwrap(), &(vec![0, 1, 3, 4, 5], vec![0, 1], 5));
        assert_eq!(second.as_ref().unwrap(), &(vec![3, 4, 5], vec![3, 4, 5], 5));
    }
}
