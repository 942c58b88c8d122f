//! `roll check`: checks the needs of a run before it starts. Headers are read, no weights, and nothing is
//! written.

mod data;
mod findings;

use roll_core::plan::in_words;
use roll_core::{Error, FileCheck, FilesFound, Kind, Registry, Result};
use roll_train::config::LoadedConfig;
use roll_train::progress::{counted, duration, overview_line};
use roll_train::ranks;
use roll_train::run_dir::{Existing, RunDir};

use self::findings::Findings;
use super::plan::{PlannedMachine, cluster, estimate, gigabytes, machine, needed, totals};
use crate::args::Check;
use crate::configuration::{Configuration, build_context};
use crate::ranks::process;

/// Prints the findings; fails when the run would fail.
pub fn check(args: Check) -> Result<()> {
    // A mistake in the arguments is no problem of the run.
    cluster(&args.machine)?;
    let mut run = args.run;
    if let Some(dir) = &run.resume {
        run.config.run = Some(RunDir::open(dir)?);
    }
    let configuration = Configuration::read_for(&run.config, &run.keys(), run.all_ranks())?;
    let registry = configuration.registry()?;
    let why_not_demo = configuration.why_not_demo();
    let loaded = configuration.or_demo()?.load(&registry)?;
    let mut found = Findings::default();

    found.section("run");
    let config = &loaded.config;
    let names = [("", &config.algo.name), (" of ", &config.model.name), (" by ", &config.strategy.name)];
    found.good(names.map(|(word, name)| format!("{word}`{name}`")).concat());
    found.outcome(roll_backends::device(&config.backend).map(|_| format!("backend {}", config.backend)));
    if let Some(dir) = run.out.filter(|dir| dir.exists()) {
        found.outcome(RunDir::would_create(&dir, Existing::Refuse).map(|()| format!("writes to {}", dir.display())));
    }
    for note in why_not_demo.into_iter().chain(loaded.without_effect(&registry)?) {
        found.note(note);
    }

    found.section("model");
    let files = files(&loaded, &registry, &mut found);
    let complete = files.as_ref().is_some_and(|files| files.missing.is_none());
    let unit = files.map(|files| files.unit).unwrap_or_default();

    found.section("data");
    let data = data::look(&loaded, &registry, unit, args.samples, &mut found);

    found.section("memory");
    if complete {
        let size = data.largest.or(config.data.height.zip(config.data.width).map(|(h, w)| [h, w]));
        let planned = machine(&args.machine, &loaded).and_then(|machine| {
            let (_, needs) = estimate(&loaded, &registry, None, size, &machine)?;
            Ok((machine, needs))
        });
        match planned {
            Ok((machine, needs)) => {
                let known = args.machine.on.is_some() || args.machine.memory.is_some() || on_the_host(config);
                memory(&needs, &machine, known, &mut found);
                time(&needs, data.steps, &mut found);
            }
            Err(Error::Unsupported(why)) => found.note(format!("no estimate: {why}")),
            Err(error) => found.problem(error.chain()),
        }
    } else {
        found.note("no estimate without the model's files");
    }
    found.end()
}

/// Memory and time of a run in one line; `None` if they are unknown.
pub fn estimated(loaded: &LoadedConfig, registry: &Registry) -> Option<String> {
    let config = &loaded.config;
    let machine = machine(&crate::args::MachineArgs::default(), loaded).ok()?;
    let size = config.data.height.zip(config.data.width).map(|(height, width)| [height, width]);
    let (_, needs) = estimate(loaded, registry, None, size, &machine).ok()?;
    let [device, host] = totals(&needs);
    let seconds: f64 = needs.time.iter().map(|phase| phase.seconds).sum();
    let together =
        gigabytes(needs.peak(|item| item.device + item.host).0) * ranks::of_process(config, process().as_ref()) as f64;
    let each = if process().world_size() > 1 { " for each rank" } else { "" };
    let memory = match on_the_host(config) {
        true => format!("{together:.1} of {:.1} GB{each}", machine.memory / 1e9),
        false => format!("{device:.1} GB on the device, {host:.1} GB of host memory"),
    };
    // Clips of sizes of their own: the estimate is for the largest that a run would take.
    let bound = if size.is_some() { "" } else { "up to " };
    let reward = if config.reward.is_empty() { "" } else { " without the reward" };
    let time = if needs.time.is_empty() { String::new() } else { format!(", {bound}{} a step", duration(seconds)) };
    let text = format!("{bound}{memory}{time}{reward} (`roll plan` lists the items)");
    Some(overview_line("estimate", &text))
}

/// The device's memory is that of this machine.
fn on_the_host(config: &roll_train::config::RunConfig) -> bool {
    ["flex", "libtorch"].contains(&config.backend.as_str())
}

/// The model's files that are there; `None` when opening them would fail.
fn files(loaded: &LoadedConfig, registry: &Registry, found: &mut Findings) -> Option<FilesFound> {
    let model = &loaded.config.model;
    let linked = registry.find(Kind::Model, &model.name).is_ok_and(|registration| registration.is_linked);
    let Some(check) = FileCheck::of(Kind::Model, &model.name).filter(|_| linked) else {
        found.note(format!("`{}` cannot look at its files before it opens them", model.name));
        return Some(FilesFound::default());
    };
    match (check.check)(&model.options, &build_context(loaded)) {
        Ok(files) => {
            files.lines.iter().for_each(|line| found.good(line));
            if let Some(missing) = &files.missing {
                found.note(format!("a run would download files first: {missing}"));
            }
            Some(files)
        }
        Err(error) => {
            found.problem(error.chain());
            None
        }
    }
}

fn memory(needs: &roll_core::plan::Needs, machine: &PlannedMachine, known: bool, found: &mut Findings) {
    for item in needs.memory.iter().filter(|item| item.device + item.host > 0) {
        let host = if item.host > 0 { format!(", {} of host memory", in_words(item.host)) } else { String::new() };
        found.good(format!("{:<28} {:>11}{host}", item.label(), in_words(item.device)));
    }
    let (need, device) = (needed(needs, machine), totals(needs)[0]);
    let have = machine.memory / 1e9;
    let place = format!("on each device of {}, for {}", machine.name, needs.work);
    match (known, need <= have) {
        (false, _) => found.note(format!("{device:.1} GB {place}; `--memory GB` says whether that fits")),
        (true, true) => found.good(format!("{need:.1} of {have:.1} GB {place} (an estimate)")),
        (true, false) => {
            let mut problem = format!("{need:.1} GB are needed, {have:.1} are there, {place}");
            needs.hints.iter().for_each(|hint| problem.push_str(&format!("\n{hint}")));
            found.problem(problem);
        }
    }
}

fn time(needs: &roll_core::plan::Needs, steps: Option<u64>, found: &mut Findings) {
    if needs.time.is_empty() {
        return;
    }
    let seconds: f64 = needs.time.iter().map(|phase| phase.seconds).sum();
    found.section("time");
    let all = steps.map(|steps| format!(", {} for {}", duration(seconds * steps as f64), counted(steps, "step")));
    let ranks = process().world_size();
    let ranks = if ranks > 1 { format!(" on {ranks} ranks") } else { String::new() };
    found.good(format!(
        "{} a step{}{ranks}, by estimate, without rewards and evaluations",
        duration(seconds),
        all.unwrap_or_default()
    ));
}
