//! `roll run`: train.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use roll_core::{BuildContext, Communicator, Error, Fault, Registry, Result, ResultExt};
use roll_train::config::{ConfigLayers, LoadedConfig, RunConfig};
use roll_train::progress::counted;
use roll_train::run_dir::{Existing, RunDir};
use roll_train::{RunSession, RunSummary, Trainer, checkpoint, ranks};

use super::{Ended, check};
use crate::args::Run;
use crate::configuration::{Configuration, build_context};
use crate::ranks::process;
use crate::{interrupt, progress};

/// Trains, on every rank of this process.
pub fn run(args: Run) -> Result<Ended> {
    let mut args = args;
    if let Some(out) = args.out.as_ref().filter(|out| out.to_str().is_none()) {
        return Err(Error::bad_file(out, "the name of a run's directory must be UTF-8"));
    }
    let resumed = args.resume.take().map(RunDir::open).transpose()?;
    if let Some(dir) = &resumed {
        args.config.config.insert(0, dir.config_path());
    }
    let configuration = Configuration::read_for(&args.config, &args.keys(), args.all_ranks())?;
    resumed.as_ref().map(|dir| same_algorithm(dir, configuration.algorithm())).transpose()?;
    let registry = configuration.registry()?;
    let half_named = configuration.half_named();
    let loaded = configuration.or_demo()?.load(&registry)?;
    if resumed.is_some() {
        tell_programs(&loaded.config);
    }
    let estimated = if process().rank().0 == 0 { check::estimated(&loaded, &registry) } else { None };
    let begun = Begun { loaded, registry, half_named, resumed, out: args.out, estimated, made: OnceLock::new() };
    let ended = ranks::run(&begun.loaded.config, process(), |ranks| begun.train(ranks));
    // Where another rank came upon the mistake first, rank 0 did not know that it was one.
    if let (Err(error), Some(dir)) = (&ended, begun.made.get())
        && error.fault() == Fault::User
    {
        dir.discard_beginning()?;
    }
    ended
}

/// The things that a run begins with, the same on all ranks of this process.
struct Begun {
    loaded: LoadedConfig,
    registry: Registry,
    /// See [`Configuration::half_named`].
    half_named: Option<String>,
    resumed: Option<RunDir>,
    /// The value of `--out`.
    out: Option<PathBuf>,
    /// A line about memory and time.
    estimated: Option<String>,
    /// The run directory that rank 0 made.
    made: OnceLock<RunDir>,
}

impl Begun {
    /// Opens everything before the run directory is made. Of several ranks, rank 0 makes it and speaks.
    fn train(&self, ranks: Arc<dyn Communicator>) -> Result<Ended> {
        let (loaded, first) = (self.loaded.clone(), ranks.rank().0 == 0);
        let context = BuildContext { ranks, ..build_context(&self.loaded) };
        let config = &self.loaded.config;
        let mut trainer = match Trainer::new(loaded, &self.registry, &context) {
            // The missing part would be there in the demo.
            Err(error) if is_of_a_key(&error) => match &self.half_named {
                Some(why) => Err(error).while_doing(|| why.clone()),
                None => Err(error),
            },
            opened => opened,
        }?;
        if let Some(dir) = &self.resumed {
            go_on(&mut trainer, dir)?;
        }
        let dir = match (first, &self.resumed) {
            (true, Some(dir)) => Some(dir.clone()),
            (true, None) => {
                let out = self.out.clone().unwrap_or_else(|| unused(&config.output_dir, config.experiment()));
                let made = RunDir::create(out, Existing::Refuse)?;
                Some(self.made.get_or_init(|| made).clone())
            }
            (false, _) => None,
        };
        let _lock = dir.as_ref().map(RunDir::lock).transpose()?;
        dir.as_ref().map(RunDir::remove_leftovers).transpose()?;
        self.estimated.iter().filter(|_| first).for_each(|line| tracing::info!("{line}"));
        let session = RunSession { display: Box::new(progress::Terminal), stop: interrupt::catch()? };
        let summary = trainer.run(dir.as_ref(), &session).inspect_err(|_| {
            // Goes only when it is empty: a mistake found at the first step leaves nothing behind.
            dir.iter().for_each(|dir| drop(std::fs::remove_dir(dir.path())));
        })?;
        // Only one rank prints: `mpirun` ends the whole job with the first that leaves with another code than 0.
        let Some(dir) = dir else { return Ok(Ended::Done) };
        if let Some(why) = &summary.stopped {
            let (steps, path) = (counted(summary.steps, "step"), dir.path().display());
            tracing::warn!("ended after {steps} by `evaluation.stop_when`: {why}");
            tracing::warn!("go on all the same with: roll run --resume {path} --set evaluation.stop_when=null");
        }
        print(&summary, &dir);
        Ok(if summary.stopped.is_some() { Ended::Stopped } else { Ended::Done })
    }
}

/// Goes on from the newest whole checkpoint of a run.
fn go_on(trainer: &mut Trainer, dir: &RunDir) -> Result<()> {
    match checkpoint::newest_whole(&dir.checkpoints())? {
        Some(newest) => trainer.resume(&newest).while_doing(|| format!("going on from {}", newest.path().display())),
        None if checkpoint::list(&dir.checkpoints())?.is_empty() => {
            tracing::warn!("{} has no checkpoint yet: the run begins again", dir.path().display());
            Ok(())
        }
        None => Err(Error::bad_file(dir.path(), "holds no whole checkpoint to go on from")),
    }
}

/// Fails when a run is to go on with another algorithm: its state is of no use to that one.
fn same_algorithm(dir: &RunDir, now: Option<&str>) -> Result<()> {
    let before = ConfigLayers::new().file(dir.config_path())?.merge()?;
    let before = before.peek("algo.name").and_then(|name| name.as_str()).map(String::from);
    match (before, now) {
        (Some(before), Some(now)) if before != now => {
            let run = dir.path().display();
            let problem = format!(
                "the run was begun with `{before}` and goes on with it; found `{now}`. To go on from its adapter, begin a \
                 new run: roll run --algo {now} --set model.lora_checkpoint={run}"
            );
            Err(Error::config("algo.name", problem))
        }
        _ => Ok(()),
    }
}

/// Whether an error is about a key of the configuration.
fn is_of_a_key(error: &Error) -> bool {
    match error {
        Error::Config { .. } => true,
        Error::Context { source, .. } => is_of_a_key(source),
        _ => false,
    }
}

/// Says which programs and libraries a resumed run starts: its configuration may be another person's.
fn tell_programs(config: &RunConfig) {
    let components =
        config.reward.iter().map(|reward| &reward.options).chain(config.env.iter().map(|env| &env.options));
    let commands = components.filter_map(|options| options.get("command")?.as_array()?.first()?.as_str());
    let plugins = config.plugins.iter().map(|path| path.to_string_lossy());
    let programs: Vec<_> =
        commands.chain(config.on_finish.first().map(String::as_str)).map(Into::into).chain(plugins).collect();
    if !programs.is_empty() {
        tracing::info!("the configuration of the run starts {}", programs.join(", "));
    }
}

/// The results of a run that is over, for people.
fn print(summary: &RunSummary, dir: &RunDir) {
    println!("{} in {:.0} s", counted(summary.steps, "step"), summary.seconds);
    for headline in summary.headlines.iter().filter(|headline| !headline.label.is_empty()) {
        let (first, last) = (summary.first.get(&headline.metric), summary.last.get(&headline.metric));
        if let (Some(first), Some(last)) = (first, last) {
            let [first, last] = [first, last].map(|value| headline.format.write(*value));
            println!("  {:<9} {first:>10} at the first step, {last} at the last", headline.label);
        }
    }
    if summary.lines.is_empty() && summary.steps > 1 {
        println!("  (of different samples; `evaluation` measures the same ones before and after)");
    }
    if summary.skipped_samples + summary.skipped_updates > 0 {
        let [samples, updates] =
            [(summary.skipped_samples, "sample"), (summary.skipped_updates, "update")].map(|(n, one)| counted(n, one));
        println!("  left out: {samples}, {updates}");
    }
    for (name, line) in &summary.lines {
        println!("  {name:<15} {line}");
    }
    for file in &summary.adapter {
        let adapter = file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("adapter"));
        println!("  {:<15} {}", if adapter { "adapter" } else { "weights" }, file.display());
    }
    if dir.metrics_path().exists() {
        println!("  metrics         {}", dir.metrics_path().display());
    }
    for (name, path) in &summary.written {
        println!("  {name:<15} {}", path.display());
    }
}

/// The first of `NAME`, `NAME-2`, `NAME-3`, ... that is not there yet.
fn unused(parent: &Path, name: &str) -> PathBuf {
    let numbered = |n: u32| if n == 1 { name.to_string() } else { format!("{name}-{n}") };
    (1..).map(|n| parent.join(numbered(n))).find(|p| !p.exists()).unwrap_or_else(|| parent.join(name))
}
