//! Opens the parts of a run on clips, which its configuration names.

use std::sync::Arc;

use roll_core::{
    Algorithm, BuildContext, ClipAlgorithm, ClipUse, Communicator, ConditionInput, Error, Grad, Headline, Kind, Result,
    RewardScorer, Tensor, VideoUnit, inventory,
};
use roll_train::config::RunConfig;
use roll_train::findings::{Findings, Listing};
use roll_train::progress::counted;
use roll_train::results::SetLabels;
use roll_train::rewards::TrainedReward;
use roll_train::task::{Network, OpenTask, OpenedAlgorithm, OpenedTask, Opening, Task, TaskFacts, TaskType};

use super::cache::{self, CacheStore, CachedModel, CachedReward};
use super::config::ClipConfig;
use super::evaluation::{EvaluationSources, Evaluator};
use super::notes::{nothing_evaluated, unused_end_images, unused_evaluation, unused_masks};
use super::rows::{Rows, clip_notes, unused_fps};
use super::sample_prompts::SamplePrompts;
use super::{ClipTask, HeldOut, look};
use crate::rows::{Batches, DataConfig, Dataset, Metadata};

/// Number of prompts whose length is checked before the first step.
const CHECKED_PROMPTS: usize = 2000;

inventory::submit!(TaskType::Clips(OpenTask {
    open: |opening, algorithm, reward, found| {
        let Some(clips) = found.open("evaluation", || ClipConfig::of(opening.loaded)) else { return (None, None) };
        let (parts, network) = ClipParts::open(opening, clips, algorithm, reward, found);
        (Some(Box::new(parts)), network)
    },
    check_sections,
}));

/// Checks that a reward that compares the videos of a prompt is used in training alone, by an algorithm that supports
/// it.
fn check_comparing(opening: &Opening<'_>, clips: &ClipConfig, reward: &dyn RewardScorer, found: &mut Findings) {
    if !reward.compares() {
        return;
    }
    let (algorithm, name) = (&opening.loaded.config.algo.name, reward.name());
    if opening.registry.find(Kind::Algorithm, algorithm).is_ok_and(|algorithm| !algorithm.is_linked) {
        let problem = format!("the algorithm `{algorithm}` of a plugin cannot use `{name}`, which compares videos");
        found.problem("reward", Error::config("reward", problem));
    }
    if clips.evaluation.stop_when.is_some() {
        let problem = format!("`{name}` is not evaluated, so it never rises: unset it");
        found.problem("evaluation", Error::config("evaluation.stop_when", problem));
    }
    let note = format!("`{name}` compares videos of one prompt: evaluations measure `evaluation.check` alone");
    found.note("evaluation", || clips.evaluation.names_clips().then_some(note));
}

/// The parts of a run on clips. `roll check` looks at the parts that could be opened; a run starts only if all could.
struct ClipParts {
    /// The reward that is trained on, if there is one.
    reward: Option<Box<dyn RewardScorer>>,
    /// The batches of this rank; `None` after a problem.
    data: Option<Batches>,
    /// The clips that are evaluated, if there are any.
    evaluator: Option<Evaluator>,
    /// The number of optimizer steps; `None` after a problem.
    steps: Option<u64>,
    /// Multiples that the model's frames, heights and widths must have.
    unit: VideoUnit,
    algorithm: Box<dyn ClipAlgorithm>,
    clip_use: ClipUse,
    prompts: Option<SamplePrompts>,
    store: Option<CacheStore>,
    config: ClipConfig,
    /// Whether the algorithm validates itself on the clips that are not trained on.
    validates: bool,
    /// The number of rows of `evaluation.metadata` that are trained on, too.
    seen: usize,
}

impl ClipParts {
    /// Opens the parts and the network. Parts whose mistakes are found quickly are opened before the network.
    fn open(
        opening: &Opening<'_>,
        clips: ClipConfig,
        opened: OpenedAlgorithm<dyn ClipAlgorithm>,
        trained_reward: Option<TrainedReward>,
        found: &mut Findings,
    ) -> (Self, Option<Network>) {
        let config = &opening.loaded.config;
        let OpenedAlgorithm { mut algorithm, can_check } = opened;
        let clip_use = algorithm.clip_use();
        if let Some(reward) = &trained_reward {
            check_comparing(opening, &clips, reward.scorer.as_ref(), found);
        }
        let (scorer, reference_reader) = match trained_reward {
            Some(reward) => (Some(reward.scorer), reward.reference_reader),
            None => (None, None),
        };
        let Sources { data_config, store, train, mut evaluation } = Sources::open(opening, &clips, found);
        let sets = checked_sets(&clips, reference_reader.as_deref(), evaluation.as_ref(), train.as_ref());
        check_rows(&sets, config, &clip_use, found);
        let unseen = evaluation.as_ref().and_then(EvaluationSources::unseen);
        let seen = train.as_ref().zip(unseen).map_or(0, |(train, unseen)| count_seen(&clips, train, unseen, found));

        let mut uncached_network = opening.network(found);
        let model = uncached_network.as_mut().map(VideoModel::of).unwrap_or_default();
        if let Some(network) = &mut uncached_network {
            check_model(network, &sets, config, &clips, &clip_use, found);
        }
        let has_references = evaluation
            .as_ref()
            .is_none_or(|sources| has_references(config, &sets, sources, &clip_use, model.takes_image));
        let trains_on_clips = clip_use.why_needed.is_some();
        let dataset = train.and_then(|rows| open_dataset(rows, &data_config, &model, trains_on_clips, opening, found));

        let (reward, mut network) = cached(scorer, uncached_network, store.as_ref(), found);
        if let Some(network) = &mut network {
            network.connect(algorithm.as_mut(), can_check, reward.as_deref(), config, found);
        }
        let [all_ranks, data_ranks] = match &network {
            Some(network) => [&network.strategy.ranks().all, &network.strategy.ranks().data].map(Arc::clone),
            None => [&opening.context.ranks; 2].map(Arc::clone),
        };
        if !has_references && let Some(sources) = &mut evaluation {
            sources.leave_out_reference_readers();
        }
        let evaluator = evaluation.and_then(|sources| {
            open_evaluator(sources, config, &clips, dataset.as_deref(), model.unit, all_ranks.as_ref(), found)
        });
        let prompts = network
            .as_mut()
            .and_then(|network| open_prompts(network, config, &clips, model.unit, opening.context, found));
        let held_out = evaluator.as_ref().and_then(Evaluator::unseen);
        let validates = held_out.is_some_and(|clips| algorithm.hold_out(clips));
        found.note("evaluation", || match validates {
            true => unused_evaluation(&clips.evaluation, &config.algo.name),
            false => nothing_evaluated(&clips.evaluation),
        });

        let mut data = dataset.map(|dataset| batches(dataset, config, data_ranks.as_ref()));
        if let (Some(data), Some(network)) = (&mut data, &mut network) {
            announce_prompts(network, data);
        }
        let epochs = config.training.num_train_epochs;
        let steps = data.as_ref().and_then(|data| opening.steps(Some(data.steps(epochs)), found));
        let parts = Self {
            reward,
            data,
            evaluator,
            steps,
            unit: model.unit,
            algorithm,
            clip_use,
            prompts,
            store,
            config: clips,
            validates,
            seen,
        };
        (parts, network)
    }
}

impl OpenedTask for ClipParts {
    fn steps(&self) -> Option<u64> {
        self.steps
    }

    fn into_task(self: Box<Self>) -> Option<Box<dyn Task>> {
        let Self { reward, data, evaluator, steps, algorithm, prompts, store, config, validates, seen, .. } = *self;
        let (data, steps) = (data?, steps?);
        let measure = reward.as_ref().map(|reward| reward.measures()).unwrap_or_default();
        let checks = evaluator.as_ref().map(Evaluator::check_labels).unwrap_or_default();
        let held_out = match evaluator {
            _ if validates => HeldOut::Validated,
            Some(evaluator) => HeldOut::Evaluated(evaluator),
            None => HeldOut::Nothing,
        };
        let facts = TaskFacts {
            steps,
            samples_per_step: data.global_batch() as u64,
            headlines: headlines(algorithm.as_ref(), seen),
            labels: SetLabels::new(&measure, checks),
            measures: prompts.is_some() || !matches!(held_out, HeldOut::Nothing),
            measured_every: config.evaluation.every,
            idle_hint: "",
        };
        let data = data.up_to(steps);
        Some(Box::new(ClipTask { facts, config, algorithm, data, reward, store, held_out, prompts, seen }))
    }

    fn look(&mut self, _: &RunConfig, references: usize, grad: Grad, found: &mut Listing) -> Option<[usize; 2]> {
        found.section("evaluation");
        if let Some(evaluator) = &self.evaluator {
            found.good(format!("{} to evaluate can be read", counted(evaluator.clips() as u64, "clip")));
        }
        let data = self.data.as_ref()?;
        let dataset = data.dataset();
        found.section("data");
        let largest = look::rows(data, self.steps, self.unit, found);
        found.section("reward");
        if let Some(reward) = &mut self.reward
            && look::references(self.clip_use.reference, dataset, reward.as_mut(), references, found)
        {
            look::score(self.clip_use.reference, dataset, reward.as_mut(), grad, found);
        }
        found.section("evaluation");
        if let Some(evaluator) = &mut self.evaluator {
            evaluator
                .check_scorers()
                .for_each(|check| look::score(self.clip_use.reference, dataset, check, Grad::Skip, found));
        }
        largest
    }
}

/// Checks the section `evaluation` of a run whose algorithm cannot be made. Opens the prompts, and notes keys without
/// effect.
fn check_sections(opening: &Opening<'_>, network: Option<&mut Network>, found: &mut Findings) {
    let Opening { loaded, context, .. } = *opening;
    let Some(clips) = found.open("evaluation", || ClipConfig::of(loaded)) else { return };
    if let Some(network) = network {
        let unit = network.model.as_diffusion().map(|model| model.video_unit()).unwrap_or_default();
        open_prompts(network, &loaded.config, &clips, unit, context, found);
    }
    found.note("evaluation", || nothing_evaluated(&clips.evaluation));
}

/// Rows and checks of a run, opened before the model, which takes minutes to open.
struct Sources {
    /// The section `data` with paths from the working directory.
    data_config: DataConfig,
    store: Option<CacheStore>,
    /// The rows that are trained on; `None` after a problem.
    train: Option<Metadata>,
    /// The rows and rewards of evaluations; `None` after a problem.
    evaluation: Option<EvaluationSources>,
}

impl Sources {
    fn open(opening: &Opening<'_>, clips: &ClipConfig, found: &mut Findings) -> Self {
        let Opening { loaded, registry, context, has_device, .. } = *opening;
        let config = &loaded.config;
        let data_config = clips.data.resolved(|path| context.resolve(path));
        let store = found.open("data", || open_store(&data_config, context)).flatten();
        let train = found.open("data", || Metadata::open(&data_config));
        found.note("data", || unused_end_images(config, train.as_ref()));
        found.note("data", || unused_fps(train.as_ref(), &data_config));
        let mut evaluation = None;
        if has_device {
            evaluation = found.open("evaluation", || EvaluationSources::open(clips, &config.reward, registry, context));
        }
        Self { data_config, store, train, evaluation }
    }
}

/// Facts of the model that data and evaluations depend on.
struct VideoModel {
    unit: VideoUnit,
    /// Frames per second of the videos that the model was trained on, if that matters.
    rate: Option<f64>,
    takes_image: bool,
}

impl Default for VideoModel {
    /// The facts of a run without a model.
    fn default() -> Self {
        Self { unit: VideoUnit::default(), rate: None, takes_image: true }
    }
}

impl VideoModel {
    fn of(network: &mut Network) -> Self {
        match network.model.as_diffusion() {
            Some(model) => {
                Self { unit: model.video_unit(), rate: model.frame_rate(), takes_image: model.takes_image() }
            }
            None => Self::default(),
        }
    }
}

/// Opens the data set, with notes on its rows.
fn open_dataset(
    rows: Metadata,
    config: &DataConfig,
    model: &VideoModel,
    trains_on_clips: bool,
    opening: &Opening<'_>,
    found: &mut Findings,
) -> Option<Arc<Dataset>> {
    let dataset = found.open("data", || Dataset::new(rows, config, model.unit))?;
    found.note("data", || config.unit_note(model.unit));
    found.note("data", || dataset.unused_windows());
    if !trains_on_clips {
        found.note("data", || unused_masks(dataset.metadata()));
    }
    // One rank is enough, because all read the same files.
    if opening.context.ranks.rank().0 == 0 {
        let rate = if trains_on_clips { model.rate } else { None };
        found.note("data", || clip_notes(dataset.metadata(), config, rate).into_iter().flatten());
    }
    Some(Arc::new(dataset))
}

/// Opens the clips that are evaluated; `None` without clips or after a problem. `train` is the data set of training.
fn open_evaluator(
    sources: EvaluationSources,
    config: &RunConfig,
    clips: &ClipConfig,
    train: Option<&Dataset>,
    unit: VideoUnit,
    ranks: &dyn Communicator,
    found: &mut Findings,
) -> Option<Evaluator> {
    found.open("evaluation", || check_stop_condition(&sources, config, clips));
    found.open("evaluation", || Evaluator::open(&clips.evaluation, sources, train, unit, ranks)).flatten()
}

/// Opens the prompts of `evaluation.prompts`; `None` without prompts or after a problem.
fn open_prompts(
    network: &mut Network,
    config: &RunConfig,
    clips: &ClipConfig,
    unit: VideoUnit,
    context: &BuildContext,
    found: &mut Findings,
) -> Option<SamplePrompts> {
    found.open("evaluation", || SamplePrompts::open(config, clips, network.model.as_mut(), unit, context)).flatten()
}

/// Announces the first prompts to the model, which warns of prompts that are too long.
fn announce_prompts(network: &mut Network, data: &mut Batches) {
    if let Some(diffusion) = network.model.as_diffusion() {
        diffusion.expect_prompts(&data.prompts(0, CHECKED_PROMPTS));
    }
}

/// Makes reward and network keep their encodings in the store, if there is a store and the model is open.
fn cached(
    reward: Option<Box<dyn RewardScorer>>,
    network: Option<Network>,
    store: Option<&CacheStore>,
    found: &mut Findings,
) -> (Option<Box<dyn RewardScorer>>, Option<Network>) {
    let (store, network) = match (store, network) {
        (Some(store), Some(network)) => (store, network),
        (_, network) => return (reward, network),
    };
    tracing::info!("encodings are cached in {} (`data.cache_dir`)", store.directory().display());
    let reward = reward.and_then(|reward| found.open("reward", || CachedReward::wrap(reward, store)));
    let Network { model, strategy } = network;
    let model = found.open("model", || CachedModel::wrap(model, store));
    (reward, model.map(|model| Network { model, strategy }))
}

/// Opens the cache of encodings that `data.cache_dir` names. A run that reads only headers checks the directory and
/// opens no store.
fn open_store(config: &DataConfig, context: &BuildContext) -> Result<Option<CacheStore>> {
    match (context.headers_only, context.ranks.rank().0) {
        (false, _) => cache::open(config),
        (true, 0) => cache::check(config).map(|()| None),
        // Only one rank checks, because the check makes the directory and removes it, which would disturb other ranks.
        (true, _) => Ok(None),
    }
}

/// The rows that are trained on, and the rows that are evaluated. `reader` names the trained reward that reads the
/// reference, if there is one.
fn checked_sets<'a>(
    clips: &ClipConfig,
    reader: Option<&'a str>,
    sources: Option<&'a EvaluationSources>,
    train: Option<&'a Metadata>,
) -> Vec<Rows<'a>> {
    let config = &clips.evaluation;
    let trained_readers: Vec<&str> = reader.into_iter().collect();
    let unseen = sources.and_then(EvaluationSources::unseen);
    let check_readers = sources.into_iter().flat_map(|sources| sources.configured_reference_readers());
    let all_readers: Vec<&str> = trained_readers.iter().copied().chain(check_readers).collect();
    let rows = |key, metadata, count: Option<usize>, readers: &Vec<&'a str>| {
        let reference_readers = readers.clone();
        Some(Rows { key, metadata: metadata?, count: count.unwrap_or(usize::MAX), reference_readers })
    };
    let evaluated_train = train.filter(|_| config.train_samples > 0);
    let sets = [
        rows("data.metadata", train, None, &trained_readers),
        rows("evaluation.train_samples", evaluated_train, Some(config.train_samples), &all_readers),
        rows("evaluation.metadata", unseen, config.samples, &all_readers),
    ];
    sets.into_iter().flatten().collect()
}

/// Checks that algorithm and rewards can use the rows.
fn check_rows(sets: &[Rows<'_>], config: &RunConfig, clip_use: &ClipUse, found: &mut Findings) {
    for rows in sets {
        let section = if rows.key == "data.metadata" { "data" } else { "evaluation" };
        if found.open(section, || rows.check_clips(config, clip_use)).is_none() {
            break;
        }
        if rows.key == "evaluation.metadata" {
            found.note(section, || rows.unused_weights());
        }
    }
}

/// Counts the evaluated rows that are trained on, too.
fn count_seen(clips: &ClipConfig, train: &Metadata, unseen: &Metadata, found: &mut Findings) -> usize {
    let count = clips.evaluation.samples.unwrap_or(usize::MAX).min(unseen.rows.len());
    let rows_in_both = unseen.rows_in(train, count);
    found.note("evaluation", || {
        rows_in_both.first().map(|first| {
            format!(
                "{} of {count} of `evaluation.metadata` are trained on, too, first {}: they say nothing of others",
                counted(rows_in_both.len() as u64, "row"),
                unseen.location(first)
            )
        })
    });
    rows_in_both.len()
}

/// Fails if clips are evaluated.
fn check_no_clips(clips: &ClipConfig) -> Result<()> {
    if !clips.evaluation.names_clips() {
        return Ok(());
    }
    let problem = "clips are not evaluated where several ranks work on one sample \
                   (`strategy.sequence_parallel_size`): leave out `evaluation.metadata` and \
                   `evaluation.train_samples`; `roll generate` and `roll score` take the adapter";
    Err(Error::config("evaluation", problem))
}

/// Checks that the model can use clips and rows.
fn check_model(
    network: &mut Network,
    sets: &[Rows<'_>],
    config: &RunConfig,
    clips: &ClipConfig,
    clip_use: &ClipUse,
    found: &mut Findings,
) {
    if network.strategy.ranks().tokens.is_some() {
        found.open("evaluation", || check_no_clips(clips));
    }
    let Some(model) = network.model.as_diffusion() else { return };
    let unit = model.video_unit();
    found.open("data", || sets.iter().try_for_each(|rows| rows.check_length(config, clips, clip_use, unit)));
    let clip = smallest_clip(unit);
    found.open("model", || {
        model.check_input(&clip)?;
        sets.iter().try_for_each(|rows| rows.check_pictures(model, &clip))
    });
    if !model.takes_image() {
        found.note("data", || sets.iter().find_map(|rows| rows.unused_images(config, clips, clip_use)));
    }
}

/// The conditions of the smallest clip, to ask a model whether it can take one.
fn smallest_clip(unit: VideoUnit) -> ConditionInput {
    let size = [unit.height, unit.width];
    let image = Some(Tensor::zeros([3, unit.height, unit.width]));
    ConditionInput { image, frames: 1, size, ..ConditionInput::default() }
}

/// Whether the model takes a picture and each evaluated row has the reference that default checks read. A model that
/// takes no picture generates videos that have no first frame in common with the reference.
fn has_references(
    config: &RunConfig,
    sets: &[Rows<'_>],
    sources: &EvaluationSources,
    clip_use: &ClipUse,
    takes_image: bool,
) -> bool {
    let mut default_readers = sources.default_reference_readers();
    default_readers.all(|reader| {
        let mut evaluated_sets = sets.iter().filter(|rows| rows.key != "data.metadata");
        takes_image && evaluated_sets.all(|rows| rows.without_clip(config, clip_use, Some(reader)).is_none())
    })
}

/// Fails if the run is to stop once a check falls, and has no check.
fn check_stop_condition(sources: &EvaluationSources, config: &RunConfig, clips: &ClipConfig) -> Result<()> {
    if clips.evaluation.stop_when.is_none() || config.reward.is_empty() || !sources.is_unchecked() {
        return Ok(());
    }
    let problem = "no check could fall: `evaluation.check: auto` finds no reward that is not trained; list some";
    Err(Error::config("evaluation.stop_when", problem))
}

/// The batches of this rank, in the micro-batches of the configuration.
fn batches(dataset: Arc<Dataset>, config: &RunConfig, ranks: &dyn Communicator) -> Batches {
    let training = &config.training;
    Batches::new(dataset, config.noise(), training.samples_per_rank(), ranks.rank(), ranks.world_size())
        .in_micro_batches(training.per_device_train_batch_size)
}

/// The headlines of the algorithm. If `seen` of the clips that validate it are trained on, too, its headlines say so.
fn headlines(algorithm: &dyn Algorithm, seen: usize) -> Vec<Headline> {
    let mut headlines = algorithm.headlines();
    if seen > 0 {
        let held_out = headlines.iter_mut().filter_map(|headline| headline.held_out.as_mut());
        held_out.for_each(|data| data.data = format!("clips, of which {seen} are trained on, too"));
    }
    headlines
}
