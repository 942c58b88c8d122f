//! [`Run`] trains from a checked configuration to the results. [`RunBuilder`] makes such a configuration in a Rust
//! program.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use roll_core::{
    BuildContext, Communicator, ComponentOptions, Error, Fault, FirstRank, Kind, Registry, Result, ResultExt,
};
use serde::Serialize;
use serde_json::{Value as Json, json};

use crate::config::{ConfigLayers, DeclaredSection, LoadedConfig, RunConfig, TrainingConfig};
use crate::open::open_check;
use crate::run_dir::RunDir;
use crate::{Checked, Finding, RunSession, RunSummary, Trainer, checkpoint, ranks};

/// A run: a checked configuration, and the directory of its files.
pub struct Run<'a> {
    loaded: LoadedConfig,
    registry: &'a Registry,
    context: BuildContext,
    /// See [`Run::each_rank`].
    adapt: Option<Adapt>,
    destination: Destination,
    /// The run directory, once rank 0 has created it.
    created_dir: OnceLock<RunDir>,
}

/// A function that changes the context of a rank.
pub type Adapt = fn(BuildContext) -> Result<BuildContext>;

/// Where the run writes.
enum Destination {
    /// This new directory, or else one below `output_dir` that does not exist yet.
    New(Option<PathBuf>),
    /// The directory of a run to resume.
    Resumed(RunDir),
}

impl<'a> Run<'a> {
    /// Describes a run by typed options.
    pub fn builder(registry: &'a Registry) -> RunBuilder<'a> {
        RunBuilder { registry, sections: Vec::new(), rewards: Vec::new(), dir: None, error: None }
    }

    /// A run of this configuration, whose components are made in `context`.
    pub fn new(loaded: LoadedConfig, registry: &'a Registry, context: BuildContext) -> Self {
        let (destination, created_dir) = (Destination::New(None), OnceLock::new());
        Self { loaded, registry, context, adapt: None, destination, created_dir }
    }

    /// Writes to the new directory `dir` instead of one below `output_dir`.
    pub fn dir(self, dir: impl Into<PathBuf>) -> Self {
        Self { destination: Destination::New(Some(dir.into())), ..self }
    }

    /// Changes the context of each rank of this process on the thread of the rank, before its components are made. The
    /// communicator may be replaced.
    pub fn each_rank(self, adapt: Adapt) -> Self {
        Self { adapt: Some(adapt), ..self }
    }

    /// The context of the rank whose communicator is `ranks`.
    fn context_of(&self, ranks: Arc<dyn Communicator>) -> Result<BuildContext> {
        let context = BuildContext { ranks, ..self.context.clone() };
        match self.adapt {
            Some(adapt) => adapt(context),
            None => Ok(context),
        }
    }

    /// Goes on in the directory of a run, from its newest whole checkpoint.
    pub fn resume(self, dir: RunDir) -> Self {
        Self { destination: Destination::Resumed(dir), ..self }
    }

    /// The checked configuration.
    pub fn loaded(&self) -> &LoadedConfig {
        &self.loaded
    }

    /// The directory that the run would write to now. Fails if it cannot be made, or holds another run.
    pub fn directory(&self) -> Result<PathBuf> {
        let config = &self.loaded.config;
        let path = match &self.destination {
            Destination::Resumed(dir) => {
                roll_external::files::check_directory(dir.path())?;
                return Ok(dir.path().into());
            }
            Destination::New(Some(path)) => path.clone(),
            Destination::New(None) => unused_path(&config.output_dir, config.experiment()),
        };
        RunDir::check_creation(&path)?;
        Ok(path)
    }

    /// Trains, on every rank of this process, and returns the results. The run directory is created once data and
    /// networks are open. It is removed again if the run fails before the end of the first step by a mistake of the
    /// user.
    pub fn train(&self) -> Result<RunSummary> {
        self.train_in(|_| Ok(RunSession::default()))
    }

    /// As [`Run::train`], with sessions that show the progress and may stop the run. Every rank calls `begin_session`
    /// before its first step.
    pub fn train_in(
        &self,
        begin_session: impl Fn(&dyn Communicator) -> Result<RunSession> + Sync,
    ) -> Result<RunSummary> {
        let result =
            ranks::run(&self.loaded.config, self.context.ranks.clone(), |ranks| self.train_rank(ranks, &begin_session));
        // If another rank found the error first, rank 0 did not know that it is the user's.
        if let (Err(error), Some(dir)) = (&result, self.created_dir.get())
            && error.fault() == Fault::User
        {
            dir.discard_beginning()?;
        }
        result
    }

    /// Opens everything that the run needs before its first step, and continues after a problem. Weights are not read.
    /// Without `has_model`, the model and the parts that need it are not opened. Returns the opened parts, and the
    /// findings with their sections.
    pub fn check(&self, has_model: bool) -> Result<(Checked, Vec<(&'static str, Finding)>)> {
        let (config, job) = (&self.loaded.config, &self.context.ranks);
        let open = |ranks| {
            let context = BuildContext { headers_only: true, ..self.context_of(ranks)? };
            open_check(&self.loaded, self.registry, &context, has_model)
        };
        let division = self.registry.division(&config.strategy.name, &config.strategy.options);
        let rank_count = ranks::of_process(config, job.as_ref());
        let all_ranks_open_the_same = division.is_ok_and(|division| division.token_ranks <= 1);
        if rank_count > 1 && all_ranks_open_the_same {
            // One rank opens for all: a rank of A14B's LoRA takes 3 GB.
            ranks::warn_of_many(rank_count);
            open(Arc::new(FirstRank(rank_count)))
        } else {
            ranks::run(config, job.clone(), open)
        }
    }

    /// Trains on the rank whose communicator is `ranks`.
    fn train_rank(
        &self,
        ranks: Arc<dyn Communicator>,
        begin_session: &dyn Fn(&dyn Communicator) -> Result<RunSession>,
    ) -> Result<RunSummary> {
        let is_first = ranks.rank().0 == 0;
        let session = begin_session(ranks.as_ref())?;
        let resumed_dir = match &self.destination {
            Destination::Resumed(dir) => Some(dir),
            Destination::New(_) => None,
        };
        // Opening the networks takes minutes. Without a lock, another process could train this run further meanwhile.
        let lock_of_resumed = match resumed_dir {
            Some(dir) if is_first => Some(dir.lock()?),
            _ => None,
        };
        if is_first {
            self.directory()?;
        }
        let context = self.context_of(ranks)?;
        let mut trainer = Trainer::new(self.loaded.clone(), self.registry, &context)?;
        if let Some(dir) = resumed_dir {
            // The other ranks choose the checkpoint once the first one holds the lock.
            context.ranks.barrier()?;
            resume_newest(&mut trainer, dir, &self.loaded.config)?;
        }
        let dir = match &self.destination {
            Destination::Resumed(dir) => is_first.then(|| dir.clone()),
            Destination::New(_) if is_first => {
                let created = RunDir::create(self.directory()?)?;
                Some(self.created_dir.get_or_init(|| created).clone())
            }
            Destination::New(_) => None,
        };
        // Held until the end of this function.
        let _lock = match lock_of_resumed {
            Some(lock) => Some(lock),
            None => dir.as_ref().map(RunDir::lock).transpose()?,
        };
        if let Some(dir) = &dir {
            dir.remove_leftovers()?;
        }
        let result = trainer.run(dir.as_ref(), &session);
        if let (Err(_), Some(dir)) = (&result, &dir) {
            // Fails if the directory is not empty. An empty one would be left by an error in the first step.
            let _ = std::fs::remove_dir(dir.path());
        }
        result
    }
}

/// Resumes from the newest whole checkpoint of a run.
fn resume_newest(trainer: &mut Trainer, dir: &RunDir, config: &RunConfig) -> Result<()> {
    match checkpoint::newest_whole(&dir.checkpoints())? {
        Some(newest) => {
            dir.check_own(&newest, config)?;
            trainer.resume(&newest).while_doing(|| {
                format!("going on from {}{}", newest.path().display(), changed_model_options(dir, config))
            })
        }
        None if checkpoint::list(&dir.checkpoints())?.is_empty() => {
            tracing::warn!("{} has no checkpoint yet: the run begins again", dir.path().display());
            Ok(())
        }
        None => Err(Error::bad_file(dir.path(), "holds no whole checkpoint to go on from")),
    }
}

/// ", with `model.lora_rank` changed from 16 to 8", for a message; empty if no option of the model was changed.
fn changed_model_options(dir: &RunDir, config: &RunConfig) -> String {
    let old_config = ConfigLayers::new().file(dir.config_path()).and_then(|layers| layers.merge());
    let Ok(old_config) = old_config else { return String::new() };
    let mut changes = Vec::new();
    for (option, new) in &config.model.options {
        let key = format!("model.{option}");
        let old = old_config.peek(&key).unwrap_or(&Json::Null);
        if old != new {
            changes.push(format!("`{key}` changed from {old} to {new}"));
        }
    }
    if changes.is_empty() { String::new() } else { format!(", with {}", changes.join(" and ")) }
}

/// The first of the paths `NAME`, `NAME-2`, `NAME-3`, ... below `parent` that does not exist.
fn unused_path(parent: &Path, name: &str) -> PathBuf {
    let mut path = parent.join(name);
    let mut number = 1;
    while path.exists() {
        number += 1;
        path = parent.join(format!("{name}-{number}"));
    }
    path
}

/// Describes a run; [`RunBuilder::build`] checks it as a configuration file is checked.
///
/// A component is set by the struct of its options, or by its kind, its name and anything that serialises to its
/// options. Relative paths start from the working directory.
///
/// ```
/// use roll_video::reward_fl::RewardFlConfig;
/// use roll_core::Registry;
/// use roll_wan::WanOptions;
/// use roll_wan::init_tiny::{WanKind, init_tiny};
/// use roll_rewards::brightness::BrightnessConfig;
/// use roll_train::Run;
/// use roll_video::rows::DataConfig;
///
/// # fn main() -> roll_core::Result<()> {
/// # let dir = std::env::temp_dir().join(format!("roll-doc-run-{}", std::process::id()));
/// // A tiny model with random weights, and one clip.
/// let tiny = init_tiny(dir.join("tiny"), WanKind::I2v, 1)?;
/// let grey = roll_core::Video::new(roll_core::Tensor::full([5, 3, 64, 64], 0.25), 8.0)?;
/// roll_media::write_mp4(dir.join("clip.mp4"), &grey)?;
/// std::fs::write(dir.join("metadata.csv"), "video,prompt\nclip.mp4,a grey square\n").expect("a file");
///
/// let registry = Registry::linked()?;
/// let run = Run::builder(&registry)
///     .model(WanOptions {
///         model_paths: Some(tiny.model_paths.into()),
///         tokenizer_path: Some(tiny.tokenizer),
///         lora_rank: Some(2),
///         ..Default::default()
///     })
///     .algorithm(RewardFlConfig { num_inference_steps: 2, mid_timestep: 1, final_timestep: 1, ..Default::default() })
///     .reward("brightness", BrightnessConfig { target: 0.75 })
///     .section(DataConfig {
///         metadata: Some(dir.join("metadata.csv")),
///         height: Some(64),
///         width: Some(64),
///         num_frames: 5,
///         ..Default::default()
///     })
///     .set("training.learning_rate", 1e-3)
///     .steps(2)
///     .dir(dir.join("run"))
///     .build()?;
/// let summary = run.train()?;
/// assert_eq!(summary.steps, 2);
/// assert!(summary.adapter[0].exists() && dir.join("run/report.html").exists());
///
/// // A mistake is an error before anything is opened.
/// let wrong = Run::builder(&registry).reward("brightness", BrightnessConfig { target: 7.0 }).build();
/// assert!(wrong.is_err_and(|error| error.to_string().contains("`reward.0.target`")));
/// # std::fs::remove_dir_all(dir).expect("the directory can be deleted");
/// # Ok(())
/// # }
/// ```
pub struct RunBuilder<'a> {
    registry: &'a Registry,
    /// Keys and values, in the order in which they were set, without `reward`.
    sections: Vec<(String, Json)>,
    /// The entries of `reward`.
    rewards: Vec<Json>,
    /// The run directory; `None` for one below `output_dir`.
    dir: Option<PathBuf>,
    /// The first value that cannot be represented in a configuration.
    error: Option<Error>,
}

impl<'a> RunBuilder<'a> {
    /// Sets the model.
    pub fn model<O: ComponentOptions>(self, options: O) -> Self {
        const { assert!(matches!(O::KIND, Kind::Model), "expected the options of a model") }
        self.component(O::KIND, O::NAME, options)
    }

    /// Sets the algorithm.
    pub fn algorithm<O: ComponentOptions>(self, options: O) -> Self {
        const { assert!(matches!(O::KIND, Kind::Algorithm), "expected the options of an algorithm") }
        self.component(O::KIND, O::NAME, options)
    }

    /// Sets the strategy.
    pub fn strategy<O: ComponentOptions>(self, options: O) -> Self {
        const { assert!(matches!(O::KIND, Kind::Strategy), "expected the options of a strategy") }
        self.component(O::KIND, O::NAME, options)
    }

    /// Sets the environment.
    pub fn environment<O: ComponentOptions>(self, options: O) -> Self {
        const { assert!(matches!(O::KIND, Kind::Environment), "expected the options of an environment") }
        self.component(O::KIND, O::NAME, options)
    }

    /// Sets a component by its name, such as one of a plugin. A reward is added to the rewards so far. Any other
    /// component replaces the component of its kind.
    pub fn component(mut self, kind: Kind, name: &str, options: impl Serialize) -> Self {
        let mut component = self.json(kind.section(), options);
        component["name"] = name.into();
        match kind {
            Kind::Reward => self.rewards.push(component),
            _ => {
                self.sections.retain(|(key, _)| key != kind.section());
                self.sections.push((kind.section().into(), component));
            }
        }
        self
    }

    /// Adds a reward of weight 1. For a reward without options, `options` is `()`.
    pub fn reward(self, name: &str, options: impl Serialize) -> Self {
        self.weighted_reward(1.0, name, options)
    }

    /// Adds a reward. The score of a video is the weighted sum over all rewards.
    pub fn weighted_reward(mut self, weight: f64, name: &str, options: impl Serialize) -> Self {
        let mut component = self.json(Kind::Reward.section(), options);
        component["weight"] = weight.into();
        self.component(Kind::Reward, name, component)
    }

    /// Sets optimizer, schedule and batch sizes.
    pub fn training(self, training: TrainingConfig) -> Self {
        self.set("training", training)
    }

    /// Sets a section that a task declares: `data` and `evaluation` of `roll-video`.
    pub fn section<S: DeclaredSection>(self, section: S) -> Self {
        self.set(S::NAME, section)
    }

    /// Sets the number of optimizer steps.
    pub fn steps(self, steps: u64) -> Self {
        self.set("steps", steps)
    }

    /// Sets any other key by its dotted name: `save_steps`, `training.warmup_steps`.
    pub fn set(mut self, key: &str, value: impl Serialize) -> Self {
        let value = self.json(key, value);
        self.sections.push((key.into(), value));
        self
    }

    /// Sets the run directory, which must not hold a run yet. The default is a new directory below `output_dir`.
    pub fn dir(self, dir: impl Into<PathBuf>) -> Self {
        Self { dir: Some(dir.into()), ..self }
    }

    /// Checks keys, values, names and options. Fails on the first mistake; the error names its key.
    pub fn build(self) -> Result<Run<'a>> {
        let Self { registry, mut sections, rewards, dir, error } = self;
        if let Some(error) = error {
            return Err(error);
        }
        sections.push((Kind::Reward.section().into(), rewards.into()));
        let mut layers = ConfigLayers::new();
        for (key, value) in sections {
            layers = layers.json(&key, value)?;
        }
        let loaded = layers.load(Some(registry))?;
        let context = loaded.build_context();
        let run = Run::new(loaded, registry, context);
        Ok(match dir {
            Some(dir) => run.dir(dir),
            None => run,
        })
    }

    /// The value of the key `key` as JSON. For a component, `()` is an empty map. An error is kept for
    /// [`RunBuilder::build`].
    fn json(&mut self, key: &str, value: impl Serialize) -> Json {
        match serde_json::to_value(value) {
            Ok(Json::Null) if Kind::ALL.iter().any(|kind| kind.section() == key) => json!({}),
            Ok(value) => value,
            Err(error) => {
                self.error.get_or_insert_with(|| Error::config(key, error.to_string()));
                json!({})
            }
        }
    }
}
