//! From a configuration to everything that a run consists of.

use std::sync::Arc;

use roll_backends::overlap::OverlappedRanks;
use roll_core::{
    Algorithm, BuildContext, Communicator, ConditionInput, DataSource, Error, Headline, Kind, Model, Registry, Result,
    RewardScorer, Strategy, Tensor, VideoUnit,
};
use roll_data::{Batches, DataConfig, Dataset, Metadata};

use super::Trainer;
use super::rows::{Rows, clip_notes, unused_fps};
use crate::cache::{self, CacheStore, CachedModel, CachedReward};
use crate::config::{LoadedConfig, RunConfig};
use crate::evaluation::{EvaluationSources, Evaluator};
use crate::progress::counted;
use crate::results::SetLabels;
use crate::results::record::Record;
use crate::sample_prompts::SamplePrompts;
use crate::weighted_sum::reward_and_reader;

/// What is found while the parts of a run are opened.
#[derive(Debug)]
pub enum Finding {
    /// Does not stop the run.
    Note(String),
    /// Stops the run.
    Problem(Error),
}

/// Called with each finding and the section that it is about. An error that it returns ends the opening.
pub(crate) type OnFinding<'a> = dyn FnMut(&'static str, Finding) -> Result<()> + 'a;

/// Number of prompts whose length is checked before the first step.
const CHECKED_PROMPTS: usize = 2000;

/// The parts of a run before its first step. A part is `None` if the run has none, or after a problem.
#[derive(Default)]
pub struct Parts {
    /// The reward that is trained on.
    pub reward: Option<Box<dyn RewardScorer>>,
    /// The batches of this rank.
    pub data: Option<Batches>,
    /// The clips that are evaluated.
    pub evaluator: Option<Evaluator>,
    /// The number of optimizer steps.
    pub steps: Option<u64>,
    /// Steps in which the model's videos go.
    pub unit: VideoUnit,
    model: Option<Box<dyn Model>>,
    algorithm: Option<Box<dyn Algorithm>>,
    strategy: Option<Box<dyn Strategy>>,
    prompts: Option<SamplePrompts>,
    store: Option<CacheStore>,
    validates: bool,
    /// The name of the reward that reads its reference, if one does.
    reference_reader: Option<String>,
    evaluation: Option<EvaluationSources>,
    /// The number of rows of `evaluation.metadata` that are trained on, too.
    seen: usize,
}

impl Parts {
    /// Bytes of a checkpoint: trained parameters and the optimizer's two moments, in f32, and the averaged parameters.
    /// `None` without a model.
    pub fn checkpoint_bytes(&self, config: &RunConfig) -> Option<u64> {
        let copies = if config.training.average > 0.0 { 4 } else { 3 };
        Some(self.model.as_ref()?.parameter_count() as u64 * 4 * copies)
    }
}

impl Trainer {
    /// Opens data and networks, on the ranks of `context`. With [`crate::config::RunConfig::ranks`] above 1 it belongs
    /// inside [`crate::ranks::run`].
    pub fn new(loaded: LoadedConfig, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let first = context.ranks.rank().0 == 0;
        let mut on_finding = |_, finding| match finding {
            Finding::Problem(error) => Err(error),
            Finding::Note(note) if first => {
                tracing::warn!("{note}");
                Ok(())
            }
            Finding::Note(_) => Ok(()),
        };
        let parts = Opening { loaded: &loaded, registry, context, has_model: true, on_finding: &mut on_finding };
        let parts = parts.open()?;
        let Parts { reward, data, evaluator, prompts, store, validates, .. } = parts;
        let (Some(model), Some(algorithm), Some(strategy), Some(steps)) =
            (parts.model, parts.algorithm, parts.strategy, parts.steps)
        else {
            return Err(Error::Misuse("a run was opened without one of its parts".into()));
        };
        let config = &loaded.config;
        let measure = reward.as_ref().map(|reward| reward.measures()).unwrap_or_default();
        Ok(Self {
            average: (config.training.average > 0.0).then(|| roll_core::flat::read(model.as_ref())).transpose()?,
            noise: config.noise(),
            labels: SetLabels::new(&measure, evaluator.as_ref().map(Evaluator::check_labels).unwrap_or_default()),
            headlines: headlines(algorithm.as_ref(), parts.seen),
            schedule: config.training.schedule(steps),
            data: data.map(|data| data.up_to(steps)),
            evaluator: evaluator.filter(|_| !validates),
            loaded,
            model,
            reward,
            algorithm,
            strategy,
            sample_prompts: prompts,
            validates,
            store,
            steps,
            steps_done: 0,
            record: Record { seen: parts.seen, ..Record::default() },
            seconds_before: 0.0,
            saved: None,
            saved_step: None,
            run_dir: context.run_dir.clone(),
            stopped: None,
            pace: Default::default(),
        })
    }
}

/// Opens the parts of a run, each as far as it does not need one that cannot be opened.
pub(crate) struct Opening<'a> {
    pub(crate) loaded: &'a LoadedConfig,
    pub(crate) registry: &'a Registry,
    pub(crate) context: &'a BuildContext,
    /// Without it, the model's files would have to be downloaded first.
    pub(crate) has_model: bool,
    pub(crate) on_finding: &'a mut OnFinding<'a>,
}

impl Opening<'_> {
    /// The value, or `None` after its problem was reported.
    fn part<T>(&mut self, section: &'static str, opened: Result<T>) -> Result<Option<T>> {
        match opened {
            Ok(part) => Ok(Some(part)),
            Err(error) => (self.on_finding)(section, Finding::Problem(error)).map(|()| None),
        }
    }

    fn note(&mut self, section: &'static str, notes: impl IntoIterator<Item = String>) -> Result<()> {
        notes.into_iter().try_for_each(|note| (self.on_finding)(section, Finding::Note(note)))
    }

    /// Opens everything, in the order in which mistakes are cheap to find.
    pub(crate) fn open(mut self) -> Result<Parts> {
        let Self { loaded, registry, context, .. } = self;
        let config = &loaded.config;
        let mut parts = Parts::default();
        let notes = self.part("run", loaded.without_effect(registry))?;
        self.note("run", notes.into_iter().flatten())?;
        self.part("run", check_ranks(config, context.ranks.as_ref()))?;
        self.note("run", crate::on_finish::missing_programs(config))?;
        // Before the components, which open it too: an error is not theirs.
        let device = self.part("run", roll_backends::device(&context.backend))?;
        if device.is_some() {
            let opened = self.part("reward", reward_and_reader(&config.reward, registry, context))?.flatten();
            (parts.reward, parts.reference_reader) = opened.map_or((None, None), |(reward, name)| (Some(reward), name));
        }
        self.check_comparing(parts.reward.as_deref())?;
        let can_check = self.open_algorithm(&mut parts)?;
        let source = parts.algorithm.as_ref().map(|algorithm| algorithm.data_source());
        let clips = source == Some(DataSource::Clips);
        let data_config = config.data.resolved(|path| context.resolve(path));
        // Before the model, which takes minutes to open.
        let metadata = if clips { self.open_metadata(&data_config, &mut parts)? } else { None };
        if clips && device.is_some() {
            parts.evaluation = self.part("evaluation", EvaluationSources::open(loaded, registry, context))?;
        }
        self.check_rows(&parts, metadata.as_ref())?;
        self.check_unseen(&mut parts, metadata.as_ref())?;
        if device.is_some()
            && self.has_model
            && let Some((strategy, model)) = self.part("model", strategy_and_model(config, registry, context))?
        {
            (parts.strategy, parts.model) = (Some(strategy), Some(model));
        }
        let diffusion = parts.model.as_mut().and_then(|model| model.as_diffusion());
        let (unit, rate) = diffusion.map(|model| (model.video_unit(), model.frame_rate())).unwrap_or_default();
        parts.unit = unit;
        if clips {
            self.check_model_input(&mut parts, metadata.as_ref())?;
        }
        let dataset = metadata.map(|metadata| Dataset::new(metadata, &data_config, unit));
        let dataset = dataset.and_then(|dataset| self.part("data", dataset).transpose()).transpose()?.map(Arc::new);
        if let Some(dataset) = &dataset {
            self.note("data", data_config.unit_note(unit))?;
            self.note("data", dataset.unused_windows())?;
            // Ranks read the same files.
            let trains_on_clips = |algorithm: &dyn Algorithm| algorithm.needs_clip(true, None).is_some();
            let trains_on_clips = parts.algorithm.as_deref().map(trains_on_clips);
            if trains_on_clips == Some(false) {
                self.note("data", unused_masks(dataset.metadata()))?;
            }
            if context.ranks.rank().0 == 0 {
                let rate = rate.filter(|_| trains_on_clips == Some(true));
                for note in clip_notes(dataset.metadata(), &data_config, rate) {
                    self.note("data", note)?;
                }
            }
        }
        self.connect(&mut parts, can_check)?;
        self.open_evaluation(&mut parts, dataset.as_deref(), clips)?;
        let ranks = parts.strategy.as_ref().map_or_else(|| context.ranks.clone(), |s| s.ranks().data.clone());
        parts.data = dataset.map(|dataset| batches(dataset, config, ranks.as_ref()));
        if let (Some(data), Some(model)) =
            (&mut parts.data, parts.model.as_mut().and_then(|model| model.as_diffusion()))
        {
            // A model warns of prompts that are too long before the first step.
            model.expect_prompts(&data.prompts(0, CHECKED_PROMPTS));
        }
        if let Some(source) = source.filter(|source| parts.data.is_some() || *source != DataSource::Clips) {
            parts.steps = self.part("run", steps(config, parts.data.as_ref(), source))?;
            self.note("run", parts.steps.and_then(|steps| config.training.warmup_note(steps)))?;
        }
        Ok(parts)
    }

    /// Checks that a reward that compares the videos of a prompt is used in training alone, by an algorithm that can.
    fn check_comparing(&mut self, reward: Option<&dyn RewardScorer>) -> Result<()> {
        let Some(reward) = reward.filter(|reward| reward.compares()) else { return Ok(()) };
        let (RunConfig { algo, evaluation, .. }, name) = (&self.loaded.config, reward.name());
        if self.registry.find(Kind::Algorithm, &algo.name).is_ok_and(|algorithm| !algorithm.is_linked) {
            let problem =
                format!("the algorithm `{}` of a plugin cannot use `{name}`, which compares videos", algo.name);
            self.part::<()>("reward", Err(Error::config("reward", problem)))?;
        }
        if evaluation.stop_when.is_some() {
            let problem = format!("`{name}` is not evaluated, so it never rises: unset it");
            self.part::<()>("evaluation", Err(Error::config("evaluation.stop_when", problem)))?;
        }
        let note = format!("`{name}` compares videos of one prompt: evaluations measure `evaluation.check` alone");
        self.note("evaluation", evaluation.names_clips().then_some(note))
    }

    fn open_metadata(&mut self, config: &DataConfig, parts: &mut Parts) -> Result<Option<Metadata>> {
        let store = match (self.context.headers_only, self.context.ranks.rank().0) {
            (false, _) => cache::open(config),
            (true, 0) => cache::check(config).map(|()| None),
            // Ranks would remove the directory that another one makes.
            (true, _) => Ok(None),
        };
        parts.store = self.part("data", store)?.flatten();
        let metadata = self.part("data", Metadata::open(config))?;
        self.note("data", unused_end_images(self.loaded, metadata.as_ref()))?;
        self.note("data", unused_fps(metadata.as_ref(), config))?;
        Ok(metadata)
    }

    /// The rows that are trained on, and those that are evaluated.
    fn rows<'a>(&self, parts: &'a Parts, train: Option<&'a Metadata>) -> Vec<Rows<'a>> {
        let config = &self.loaded.config.evaluation;
        let trained: Vec<&str> = parts.reference_reader.as_deref().into_iter().collect();
        let unseen = parts.evaluation.as_ref().and_then(EvaluationSources::unseen);
        let checks = parts.evaluation.iter().flat_map(|sources| sources.reference_readers(false));
        let all: Vec<&str> = trained.iter().copied().chain(checks).collect();
        let rows = |key, metadata, count: Option<usize>, readers: &Vec<&'a str>| {
            let reference_readers = readers.clone();
            Some(Rows { key, metadata: metadata?, count: count.unwrap_or(usize::MAX), reference_readers })
        };
        let evaluated = (config.train_samples > 0).then_some(train).flatten();
        let sets = [
            rows("data.metadata", train, None, &trained),
            rows("evaluation.train_samples", evaluated, Some(config.train_samples), &all),
            rows("evaluation.metadata", unseen, config.samples, &all),
        ];
        sets.into_iter().flatten().collect()
    }

    /// Checks that algorithm and rewards can use the rows.
    fn check_rows(&mut self, parts: &Parts, train: Option<&Metadata>) -> Result<()> {
        let Some(algorithm) = &parts.algorithm else { return Ok(()) };
        for rows in self.rows(parts, train) {
            let section = if rows.key == "data.metadata" { "data" } else { "evaluation" };
            if self.part(section, rows.check(&self.loaded.config, algorithm.as_ref()))?.is_none() {
                break;
            }
            if rows.key == "evaluation.metadata" {
                self.note(section, rows.unused_weights())?;
            }
        }
        Ok(())
    }

    /// Counts the evaluated rows that are trained on, too.
    fn check_unseen(&mut self, parts: &mut Parts, train: Option<&Metadata>) -> Result<()> {
        let unseen = parts.evaluation.as_ref().and_then(EvaluationSources::unseen);
        let (Some(train), Some(unseen)) = (train, unseen) else { return Ok(()) };
        let count = self.loaded.config.evaluation.samples.unwrap_or(usize::MAX).min(unseen.rows.len());
        let both = unseen.rows_in(train, count);
        let note = both.first().map(|first| {
            format!(
                "{} of {count} of `evaluation.metadata` are trained on, too, first {}: they say nothing of others",
                counted(both.len() as u64, "row"),
                unseen.location(first)
            )
        });
        parts.seen = both.len();
        self.note("evaluation", note)
    }

    /// Checks that the model can use clips and rows.
    fn check_model_input(&mut self, parts: &mut Parts, train: Option<&Metadata>) -> Result<()> {
        let Some(mut model) = parts.model.take() else { return Ok(()) };
        if let Some(diffusion) = model.as_diffusion() {
            let clip = any_clip(diffusion.video_unit());
            let mut checked = diffusion.check_input(&clip);
            for rows in self.rows(parts, train) {
                checked = checked.and_then(|()| rows.check_pictures(diffusion, &clip));
            }
            self.part("model", checked)?;
            if let Some(algorithm) = parts.algorithm.as_deref().filter(|_| !diffusion.takes_image()) {
                let notes =
                    self.rows(parts, train).iter().find_map(|rows| rows.unused_images(&self.loaded.config, algorithm));
                self.note("data", notes)?;
            }
        }
        parts.model = Some(model);
        Ok(())
    }

    /// Leaves out the default checks that read the reference if an evaluated row has none, or the model takes no
    /// picture: its videos then have no first frame in common with the reference.
    fn leave_out_checks(&mut self, parts: &mut Parts, train: Option<&Metadata>) -> Result<()> {
        let takes_image = parts.model.as_mut().and_then(|model| model.as_diffusion()).is_none_or(|m| m.takes_image());
        let (Some(sources), Some(algorithm)) = (&parts.evaluation, &parts.algorithm) else { return Ok(()) };
        let lacks = |reader| {
            let rows = self.rows(parts, train);
            let mut evaluated = rows.iter().filter(|rows| rows.key != "data.metadata");
            !takes_image || evaluated.any(|rows| rows.without_clip(algorithm.as_ref(), Some(reader)).is_some())
        };
        let are_left_out = sources.reference_readers(true).any(lacks);
        if let Some(sources) = parts.evaluation.as_mut().filter(|_| are_left_out) {
            sources.leave_out_reference_readers();
        }
        let evaluation = &self.loaded.config.evaluation;
        if evaluation.stop_when.is_some()
            && !self.loaded.config.reward.is_empty()
            && parts.evaluation.as_ref().is_some_and(EvaluationSources::is_unchecked)
        {
            let problem =
                "no check could fall: `evaluation.check: auto` finds no reward that is not trained; list some";
            self.part::<()>("evaluation", Err(Error::config("evaluation.stop_when", problem)))?;
        }
        Ok(())
    }

    fn open_evaluation(&mut self, parts: &mut Parts, train: Option<&Dataset>, clips: bool) -> Result<()> {
        self.leave_out_checks(parts, train.map(Dataset::metadata))?;
        let Self { loaded, context, .. } = *self;
        if let Some(sources) = parts.evaluation.take() {
            let ranks = parts.strategy.as_ref().map_or_else(|| context.ranks.clone(), |s| s.ranks().all.clone());
            let evaluator = Evaluator::open(loaded, sources, train, parts.unit, ranks.as_ref());
            parts.evaluator = self.part("evaluation", evaluator)?.flatten();
        }
        if let Some(model) = &mut parts.model {
            let prompts = SamplePrompts::open(loaded, model.as_mut(), parts.unit, context);
            parts.prompts = self.part("evaluation", prompts)?.flatten();
        }
        let held_out = parts.evaluator.as_ref().and_then(Evaluator::unseen);
        if let Some(algorithm) = &mut parts.algorithm {
            parts.validates = held_out.is_some_and(|clips| algorithm.hold_out(clips)) || !clips;
        }
        let note = if parts.validates { unused_evaluation } else { nothing_evaluated };
        self.note("evaluation", note(&loaded.config))
    }

    /// Returns whether the algorithm can be checked: whether it has the environments that it needs.
    fn open_algorithm(&mut self, parts: &mut Parts) -> Result<bool> {
        let Self { loaded, registry, context, .. } = *self;
        let config = &loaded.config;
        // In a validation, ranks play different numbers of turns: a rank that is done must send its part of sharded
        // weights to the others until all are done.
        let serving = BuildContext { ranks: OverlappedRanks::of(context.ranks.clone()), ..context.clone() };
        let made = registry.algorithm(&config.algo.name, &config.algo.options, &serving);
        parts.algorithm = self.part("algo", made)?;
        if let (Some(algorithm), Some(env)) = (&mut parts.algorithm, &config.env) {
            let opened = algorithm.open_environments(&mut || registry.environment(&env.name, &env.options, context));
            return Ok(self.part("env", opened)?.is_some());
        }
        Ok(true)
    }

    /// Checks that the parts work together.
    fn connect(&mut self, parts: &mut Parts, can_check: bool) -> Result<()> {
        let config = &self.loaded.config;
        let (Some(mut model), Some(strategy)) = (parts.model.take(), &mut parts.strategy) else { return Ok(()) };
        if let Some(store) = &parts.store {
            tracing::info!("encodings are cached in {} (`data.cache_dir`)", store.directory().display());
            parts.reward = parts.reward.take().map(|reward| CachedReward::wrap(reward, store)).transpose()?;
            model = CachedModel::wrap(model, store)?;
        }
        let can_check = can_check && (parts.reward.is_some() || config.reward.is_empty());
        if let Some(algorithm) = parts.algorithm.as_mut().filter(|_| can_check) {
            let checked = algorithm.check(model.as_mut(), parts.reward.as_deref());
            self.part("algo", checked)?;
        }
        let attached = strategy.attach(model.as_mut(), &config.training.optimizer());
        self.part("run", attached)?;
        parts.model = Some(model);
        Ok(())
    }
}

/// The headlines of the algorithm. The data that validate it are named as clips of which `seen` are trained on, too.
fn headlines(algorithm: &dyn Algorithm, seen: usize) -> Vec<Headline> {
    let mut headlines = algorithm.headlines();
    if seen > 0 {
        let held_out = headlines.iter_mut().filter_map(|headline| headline.held_out.as_mut());
        held_out.for_each(|data| data.data = format!("clips, of which {seen} are trained on, too"));
    }
    headlines
}

/// The conditions of the smallest clip, to ask a model whether it can take one.
fn any_clip(unit: VideoUnit) -> ConditionInput {
    let size = [unit.height, unit.width];
    let image = Some(Tensor::zeros([3, unit.height, unit.width]));
    ConditionInput { image, frames: 1, size, ..ConditionInput::default() }
}

/// Fails if the configuration asks for threads as ranks and this is not one of them.
fn check_ranks(config: &RunConfig, ranks: &dyn Communicator) -> Result<()> {
    if config.ranks > 1 && ranks.world_size() == 1 {
        let problem = format!("`ranks: {}`: a trainer of several ranks is opened by `ranks::run`", config.ranks);
        return Err(Error::Misuse(problem));
    }
    Ok(())
}

fn batches(dataset: Arc<Dataset>, config: &RunConfig, ranks: &dyn Communicator) -> Batches {
    let training = &config.training;
    Batches::new(dataset, config.noise(), training.samples_per_rank(), ranks.rank(), ranks.world_size())
        .in_micro_batches(training.per_device_train_batch_size)
}

/// The strategy, and the model placed as the strategy wants it. Fails if they do not work together.
fn strategy_and_model(
    config: &RunConfig,
    registry: &Registry,
    context: &BuildContext,
) -> Result<(Box<dyn Strategy>, Box<dyn Model>)> {
    let strategy = registry.strategy(&config.strategy.name, &config.strategy.options, context)?;
    check_all_ranks_train(&config.strategy.name, strategy.as_ref(), context.ranks.as_ref(), registry)?;
    let (placement, token_ranks) = (strategy.weight_placement(), strategy.ranks().tokens.clone());
    let recorded_passes = registry.passes(&config.algo.name, &config.algo.options).ok().map(|passes| passes.held());
    let placed = BuildContext { placement, token_ranks, recorded_passes, ..context.clone() };
    let model = registry.model(&config.model.name, &config.model.options, &placed)?;
    if let Some(tokens) = &placed.token_ranks {
        check_token_ranks(&config.model.name, model.as_ref(), tokens.world_size())?;
        if config.evaluation.names_clips() {
            let problem = "clips are not evaluated where several ranks work on one sample \
                           (`strategy.sequence_parallel_size`): leave out `evaluation.metadata` and \
                           `evaluation.train_samples`; `roll generate` and `roll score` take the adapter";
            return Err(Error::config("evaluation", problem));
        }
    }
    if strategy.weight_placement().is_some() && model.distribution().weights.is_none() {
        tracing::warn!(
            "the model `{}` cannot stream or divide its frozen weights: they stay where they are, whatever the section \
             `strategy` says",
            config.model.name
        );
    }
    Ok((strategy, model))
}

/// The number of optimizer steps. Fails if it is 0, or if the data have no end and the configuration sets none.
fn steps(config: &RunConfig, data: Option<&Batches>, source: DataSource) -> Result<u64> {
    let epochs = config.training.num_train_epochs;
    let of_data = match (data, source) {
        (Some(data), _) => Some(data.steps(epochs)),
        (None, DataSource::Own { steps_per_epoch }) => steps_per_epoch.map(|steps| steps.saturating_mul(epochs)),
        (None, DataSource::Clips) => None,
    };
    let of_data = of_data.map(|steps| steps.min(config.max_steps.unwrap_or(u64::MAX)));
    match config.steps.or(of_data) {
        Some(0) => Err(Error::config("steps", "there is nothing to do: 0 steps")),
        Some(steps) => Ok(steps),
        None => {
            let problem = format!("`{}` makes its data as it goes: say how many steps it takes", config.algo.name);
            Err(Error::config("steps", problem))
        }
    }
}

/// The note on keys of `evaluation` that an algorithm with a validation of its own does not read.
fn unused_evaluation(config: &RunConfig) -> Option<String> {
    let evaluation = &config.evaluation;
    (evaluation.train_samples > 0 || evaluation.check.are_listed() || evaluation.stop_when.is_some()).then(|| {
        format!(
            "`evaluation.train_samples`, `evaluation.check` and `evaluation.stop_when` have no effect: `{}` measures its \
             loss on the clips of `evaluation.metadata`, and generates none",
            config.algo.name
        )
    })
}

/// The note on keys of `evaluation` without effect where no clip is named.
fn nothing_evaluated(config: &RunConfig) -> Option<String> {
    let evaluation = &config.evaluation;
    if evaluation.names_clips() {
        return None;
    }
    let set = [
        ("check", evaluation.check.are_listed()),
        ("samples", evaluation.samples.is_some()),
        ("every", evaluation.every > 0 && evaluation.prompts.is_empty()),
    ];
    let set: Vec<_> = set.iter().filter(|(_, set)| *set).map(|(key, _)| format!("`evaluation.{key}`")).collect();
    (!set.is_empty()).then(|| {
        let verb = if set.len() == 1 { "has" } else { "have" };
        format!(
            "{} {verb} no effect: no clip is evaluated; `evaluation.metadata` or `evaluation.train_samples` names some",
            set.join(", ")
        )
    })
}

/// A note when the metadata name masks, for an algorithm that does not train on clips.
fn unused_masks(metadata: &Metadata) -> Option<String> {
    let masked = metadata.rows.iter().filter(|row| row.mask.is_some() && row.is_first_window()).count();
    let rows = if masked == 1 { "row of `data.metadata` has" } else { "rows of `data.metadata` have" };
    (masked > 0).then(|| {
        format!(
            "{masked} {rows} a `mask`, which has no effect: the algorithm does not train on the \
             clips themselves (`flow_matching` does, and `algo.data_weight` above 0)"
        )
    })
}

/// A note when the metadata name last frames that the model is not asked to take, or name none that it is asked to
/// take.
fn unused_end_images(loaded: &LoadedConfig, metadata: Option<&Metadata>) -> Option<String> {
    // The option of models that take pictures besides the prompt.
    let inputs = loaded.config.model.options.get("extra_inputs")?.as_str()?;
    let given = metadata?.rows.iter().filter(|row| row.end_image.is_some()).count();
    match (given, inputs.split(',').any(|input| input.trim() == "end_image")) {
        (1.., false) => Some(format!(
            "{given} rows of `data.metadata` have an `end_image`, which has no effect: `model.extra_inputs: \
             input_image,end_image` lets the model take it"
        )),
        (0, true) => Some(
            "`end_image` in `model.extra_inputs` has no effect on training: no row of `data.metadata` has an `end_image`"
                .into(),
        ),
        _ => None,
    }
}

/// Fails when the strategy knows fewer processes than there are: each would train a model of its own.
fn check_all_ranks_train(
    name: &str,
    strategy: &dyn Strategy,
    ranks: &dyn Communicator,
    registry: &Registry,
) -> Result<()> {
    let (all, known) = (ranks.world_size(), strategy.ranks().all.world_size());
    if all == known {
        return Ok(());
    }
    let on_all = |name: &str| registry.division(name, &Default::default()).is_ok_and(|division| division.all_ranks);
    let strategies = registry.entries().iter().filter(|r| r.factory.kind() == Kind::Strategy).map(|r| r.name);
    let others: Vec<String> = strategies.filter(|name| on_all(name)).map(|name| format!("`{name}`")).collect();
    let problem = format!(
        "the job has {all} processes, and the strategy `{name}` trains on {known}; these train on all: {}",
        others.join(", ")
    );
    Err(Error::config("strategy.name", problem))
}

/// Fails when the model does not shard the tokens of a pass over `ranks`: each would compute all of them, and the sum
/// of their gradients would be several times the gradient.
fn check_token_ranks(name: &str, model: &dyn Model, ranks: usize) -> Result<()> {
    if model.distribution().token_ranks == ranks {
        return Ok(());
    }
    let problem = format!("the model `{name}` cannot divide the tokens of a pass among {ranks} ranks: expected 1");
    Err(Error::config("strategy.sequence_parallel_size", problem))
}
