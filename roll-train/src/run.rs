//! A run from its configuration to its results, and the same described by a Rust program.

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
    adapt: Option<Adapt>,
    destination: Destination,
    /// The run directory that rank 0 made.
    made: OnceLock<RunDir>,
}

/// Changes the context of a rank.
pub type Adapt = fn(BuildContext) -> Result<BuildContext>;

enum Destination {
    /// A new directory; by default one below `output_dir` that does not exist yet.
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
        Self { loaded, registry, context, adapt: None, destination: Destination::New(None), made: OnceLock::new() }
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
            Destination::New(None) => unused(&config.output_dir, config.experiment()),
        };
        RunDir::would_create(&path).map(|()| path)
    }

    /// Trains, on every rank of this process, and returns the results. The run directory is made once data and networks
    /// are open; after an error of the user before the end of the first step it is removed.
    pub fn train(&self) -> Result<RunSummary> {
        self.train_in(|_| Ok(RunSession::default()))
    }

    /// As [`Run::train`]; `session`, called on every rank before the first step, shows the progress and may stop the
    /// run.
    pub fn train_in(&self, session: impl Fn(&dyn Communicator) -> Result<RunSession> + Sync) -> Result<RunSummary> {
        let ended =
            ranks::run(&self.loaded.config, self.context.ranks.clone(), |ranks| self.train_rank(ranks, &session));
        // If another rank found the error first, rank 0 did not know that it is the user's.
        if let (Err(error), Some(dir)) = (&ended, self.made.get())
            && error.fault() == Fault::User
        {
            dir.discard_beginning()?;
        }
        ended
    }

    /// Opens everything that the run needs before its first step, and goes on after a problem. Weights are not read.
    /// Without `has_model`, the model and the parts that need it are not opened. Returns the opened parts, and the
    /// findings with their sections.
    pub fn check(&self, has_model: bool) -> Result<(Checked, Vec<(&'static str, Finding)>)> {
        let (config, job) = (&self.loaded.config, &self.context.ranks);
        let open = |ranks| {
            let context = BuildContext { headers_only: true, ..self.context_of(ranks)? };
            open_check(&self.loaded, self.registry, &context, has_model)
        };
        let division = self.registry.division(&config.strategy.name, &config.strategy.options);
        match (ranks::of_process(config, job.as_ref()), division) {
            // One rank opens for all, because all would open the same: a rank of A14B's LoRA takes 3 GB.
            (ranks, Ok(division)) if ranks > 1 && division.token_ranks <= 1 => {
                ranks::warn_of_many(ranks);
                open(Arc::new(FirstRank(ranks)))
            }
            _ => ranks::run(config, job.clone(), open),
        }
    }

    fn train_rank(
        &self,
        ranks: Arc<dyn Communicator>,
        begin_session: &dyn Fn(&dyn Communicator) -> Result<RunSession>,
    ) -> Result<RunSummary> {
        let is_first = ranks.rank().0 == 0;
        let session = begin_session(ranks.as_ref())?;
        let resumed = match &self.destination {
            Destination::Resumed(dir) => Some(dir),
            Destination::New(_) => None,
        };
        // The lock is taken before the networks are opened, which takes minutes. Meanwhile another process could train
        // this run further.
        let locked = match resumed {
            Some(dir) if is_first => Some(dir.lock()?),
            _ => None,
        };
        if is_first {
            self.directory()?;
        }
        let context = self.context_of(ranks)?;
        let mut trainer = Trainer::new(self.loaded.clone(), self.registry, &context)?;
        if let Some(dir) = resumed {
            // The other ranks choose the checkpoint once the first one holds the lock.
            context.ranks.barrier()?;
            resume_newest(&mut trainer, dir, &self.loaded.config)?;
        }
        let dir = match &self.destination {
            Destination::Resumed(dir) => is_first.then(|| dir.clone()),
            Destination::New(_) if is_first => {
                let made = RunDir::create(self.directory()?)?;
                Some(self.made.get_or_init(|| made).clone())
            }
            Destination::New(_) => None,
        };
        let _lock = match locked {
            Some(lock) => Some(lock),
            None => dir.as_ref().map(RunDir::lock).transpose()?,
        };
        if let Some(dir) = &dir {
            dir.remove_leftovers()?;
        }
        trainer.run(dir.as_ref(), &session).inspect_err(|_| {
            // Removed only if it is empty: an error in the first step leaves no directory.
            dir.iter().for_each(|dir| drop(std::fs::remove_dir(dir.path())));
        })
    }
}

/// Resumes from the newest whole checkpoint of a run.
fn resume_newest(trainer: &mut Trainer, dir: &RunDir, config: &RunConfig) -> Result<()> {
    let newest = checkpoint::newest_whole(&dir.checkpoints())?;
    newest.iter().try_for_each(|newest| dir.check_own(newest, config))?;
    match newest {
        Some(newest) => trainer
            .resume(&newest)
            .while_doing(|| format!("going on from {}{}", newest.path().display(), changed_model_options(dir, config))),
        None if checkpoint::list(&dir.checkpoints())?.is_empty() => {
            tracing::warn!("{} has no checkpoint yet: the run begins again", dir.path().display());
            Ok(())
        }
        None => Err(Error::bad_file(dir.path(), "holds no whole checkpoint to go on from")),
    }
}

/// ", with `model.lora_rank` changed from 16 to 8", for a message; empty if no option of the model was changed.
fn changed_model_options(dir: &RunDir, config: &RunConfig) -> String {
    let before = ConfigLayers::new().file(dir.config_path()).and_then(|layers| layers.merge());
    let Ok(before) = before else { return String::new() };
    let changes = config.model.options.iter().filter_map(|(option, now)| {
        let key = format!("model.{option}");
        let before = before.peek(&key).unwrap_or(&serde_json::Value::Null);
        (before != now).then(|| format!("`{key}` changed from {before} to {now}"))
    });
    let changes: Vec<String> = changes.collect();
    if changes.is_empty() { String::new() } else { format!(", with {}", changes.join(" and ")) }
}

/// The first of `NAME`, `NAME-2`, `NAME-3`, ... that does not exist.
fn unused(parent: &Path, name: &str) -> PathBuf {
    let numbered = |n: u32| if n == 1 { name.to_string() } else { format!("{name}-{n}") };
    (1..).map(|n| parent.join(numbered(n))).find(|p| !p.exists()).unwrap_or_else(|| parent.join(name))
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
    /// Keys and values, in the order in which they were set.
    sections: Vec<(String, Json)>,
    rewards: Vec<Json>,
    dir: Option<PathBuf>,
    /// The first value that cannot be represented in a configuration.
    error: Option<Error>,
}

impl<'a> RunBuilder<'a> {
    /// The model.
    pub fn model<O: ComponentOptions>(self, options: O) -> Self {
        const { assert!(matches!(O::KIND, Kind::Model), "expected the options of a model") }
        self.component(O::KIND, O::NAME, options)
    }

    /// The algorithm.
    pub fn algorithm<O: ComponentOptions>(self, options: O) -> Self {
        const { assert!(matches!(O::KIND, Kind::Algorithm), "expected the options of an algorithm") }
        self.component(O::KIND, O::NAME, options)
    }

    /// The strategy.
    pub fn strategy<O: ComponentOptions>(self, options: O) -> Self {
        const { assert!(matches!(O::KIND, Kind::Strategy), "expected the options of a strategy") }
        self.component(O::KIND, O::NAME, options)
    }

    /// The environment.
    pub fn environment<O: ComponentOptions>(self, options: O) -> Self {
        const { assert!(matches!(O::KIND, Kind::Environment), "expected the options of an environment") }
        self.component(O::KIND, O::NAME, options)
    }

    /// A component by its name, such as one of a plugin. A further reward is added to the rewards so far. Any other
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

    /// One more reward, of weight 1. For a reward without options, `options` is `()`.
    pub fn reward(self, name: &str, options: impl Serialize) -> Self {
        self.weighted_reward(1.0, name, options)
    }

    /// One more reward; the score is the weighted sum.
    pub fn weighted_reward(mut self, weight: f64, name: &str, options: impl Serialize) -> Self {
        let mut component = self.json(Kind::Reward.section(), options);
        component["weight"] = weight.into();
        self.component(Kind::Reward, name, component)
    }

    /// Optimizer, schedule and batch sizes.
    pub fn training(self, training: TrainingConfig) -> Self {
        self.set("training", training)
    }

    /// A section that a task declares: `data` and `evaluation` of `roll-video`.
    pub fn section<S: DeclaredSection>(self, section: S) -> Self {
        self.set(S::NAME, section)
    }

    /// The number of optimizer steps.
    pub fn steps(self, steps: u64) -> Self {
        self.set("steps", steps)
    }

    /// Any other key by its dotted name: `save_steps`, `training.warmup_steps`.
    pub fn set(mut self, key: &str, value: impl Serialize) -> Self {
        let value = self.json(key, value);
        self.sections.push((key.into(), value));
        self
    }

    /// The run directory; must not hold a run yet. Without it the run gets one below `output_dir`.
    pub fn dir(self, dir: impl Into<PathBuf>) -> Self {
        Self { dir: Some(dir.into()), ..self }
    }

    /// Checks keys, values, names and options. Fails on the first mistake; the error names its key.
    pub fn build(self) -> Result<Run<'a>> {
        let Self { registry, mut sections, rewards, dir, error } = self;
        error.map_or(Ok(()), Err)?;
        sections.push((Kind::Reward.section().into(), rewards.into()));
        let layers =
            sections.into_iter().try_fold(ConfigLayers::new(), |layers, (key, value)| layers.json(&key, value));
        let loaded = layers?.load(Some(registry))?;
        let context = loaded.build_context();
        let run = Run::new(loaded, registry, context);
        Ok(match dir {
            Some(dir) => run.dir(dir),
            None => run,
        })
    }

    /// `value` as a configuration holds it; `()` is an empty map.
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
