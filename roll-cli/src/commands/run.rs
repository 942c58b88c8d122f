//! `roll run`: trains, and prints the results of the run.

use roll_core::{Error, Result, ResultExt};
use roll_train::config::ConfigLayers;
use roll_train::progress::counted;
use roll_train::run_dir::RunDir;
use roll_train::{Run, RunSession, RunSummary};

use super::{Ended, check};
use crate::args;
use crate::configuration::{Configuration, build_context};
use crate::demo::NotDemo;
use crate::ranks::process;
use crate::{interrupt, progress};

/// Width of the names in the printed results.
const NAME_WIDTH: usize = 15;

/// Trains, on every rank of this process.
pub fn run(mut args: args::Run) -> Result<Ended> {
    if let Some(out) = args.out.as_ref().filter(|out| out.to_str().is_none()) {
        return Err(Error::bad_file(out, "the name of a run's directory must be UTF-8"));
    }
    let resumed = args.resume.take().map(RunDir::open).transpose()?;
    args.config.run = resumed.clone();
    let configuration = Configuration::read_for(&args.config, &args.keys(), args.all_ranks())?;
    if let Some(dir) = &resumed {
        refuse_other_algorithm(dir, configuration.algorithm())?;
    }
    let registry = configuration.registry()?;
    let why_not_demo = configuration.why_not_demo();
    let loaded = configuration.or_demo()?.load(&registry)?;
    let estimate = if process().rank().0 == 0 { check::estimate_line(&loaded, &registry) } else { None };
    let context = crate::ranks::with_collectives(build_context(&loaded))?;
    let run = Run::new(loaded, &registry, context).each_rank(crate::ranks::adapt);
    let run = match (resumed, args.out) {
        (Some(dir), _) => run.resume(dir),
        (None, Some(out)) => run.dir(out),
        (None, None) => run,
    };
    let trained = run.train_in(|ranks| {
        if ranks.rank().0 == 0 {
            estimate.iter().for_each(|line| tracing::info!("{line}"));
        }
        Ok(RunSession { display: Box::new(progress::Terminal), stop: interrupt::catch()? })
    });
    let summary = match (trained, why_not_demo) {
        // The error itself would ask for files of the wrong model.
        (Err(error), Some(NotDemo::WrongModel(why))) if is_of_a_key(&error) => Err(Error::Unsupported(why)),
        // The person may have expected the demo's model or clips.
        (Err(error), Some(NotDemo::MissingPart(why))) if is_of_a_key(&error) => Err(error).while_doing(|| why),
        (trained, _) => trained,
    }?;
    // Only rank 0 has a directory and reports. The others exit with 0 even if the run was stopped, because `mpirun`
    // kills the whole job when any process exits with another code.
    let Some(dir) = &summary.dir else { return Ok(Ended::Done) };
    if let Some(why) = &summary.stopped {
        let (steps, path) = (counted(summary.steps, "step"), dir.path().display());
        tracing::warn!("ended after {steps} by `evaluation.stop_when`: {why}");
        tracing::warn!("go on all the same with: roll run --resume {path} --set evaluation.stop_when=null");
    }
    print(&summary, dir);
    Ok(if summary.stopped.is_some() { Ended::Stopped } else { Ended::Done })
}

/// Fails if the run in `dir` is to be resumed with another algorithm, which cannot use its state.
fn refuse_other_algorithm(dir: &RunDir, wanted: Option<&str>) -> Result<()> {
    let config_of_run = ConfigLayers::new().file(dir.config_path())?.merge()?;
    let begun_with = config_of_run.peek("algo.name").and_then(|name| name.as_str());
    match (begun_with, wanted) {
        (Some(begun_with), Some(wanted)) if begun_with != wanted => {
            let run = dir.path().display();
            let problem = format!(
                "the run was begun with `{begun_with}` and goes on with it; found `{wanted}`. To go on from its adapter, \
                 begin a new run: roll run --algo {wanted} --set model.lora_checkpoint={run}"
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
        Error::Several(errors) => errors.iter().any(is_of_a_key),
        Error::Context { source, .. } => is_of_a_key(source),
        _ => false,
    }
}

/// Prints the results of a run that is over, for people.
fn print(summary: &RunSummary, dir: &RunDir) {
    println!("{} in {:.0} s", counted(summary.steps, "step"), summary.seconds);
    for headline in summary.headlines.iter().filter(|headline| !headline.label.is_empty()) {
        let (first, last) = (summary.first.get(&headline.metric), summary.last.get(&headline.metric));
        if let (Some(first), Some(last)) = (first, last) {
            let [first, last] = headline.format.write_apart([*first, *last]);
            println!("  {:<9} {first:>10} at the first step, {last} at the last", headline.label);
        }
    }
    // Without evaluations, first and last step cannot be compared: the key of held-out data is named.
    if summary.lines.is_empty() && summary.steps > 1 {
        let mut keys =
            summary.headlines.iter().filter_map(|headline| headline.held_out.as_ref().map(|data| data.key.as_str()));
        let key = keys.find(|key| !key.is_empty()).unwrap_or("evaluation.metadata");
        println!("  (each step has other samples; `{key}` compares the same ones before and after)");
    }
    if summary.skipped_samples + summary.skipped_updates > 0 {
        let samples = counted(summary.skipped_samples, "sample");
        let updates = counted(summary.skipped_updates, "update");
        println!("  left out: {samples}, {updates}");
    }
    for (name, line) in &summary.lines {
        println!("  {name:<NAME_WIDTH$} {line}");
    }
    for file in &summary.adapter {
        let is_adapter = file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("adapter"));
        println!("  {:<NAME_WIDTH$} {}", if is_adapter { "adapter" } else { "weights" }, file.display());
    }
    if dir.metrics_path().exists() {
        println!("  {:<NAME_WIDTH$} {}", "metrics", dir.metrics_path().display());
    }
    for (name, path) in &summary.written {
        println!("  {name:<NAME_WIDTH$} {}", path.display());
    }
}
