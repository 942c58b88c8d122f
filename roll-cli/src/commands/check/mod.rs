//! `roll check`: opens the parts that a run opens before its first step, by the same code. Headers of files are read,
//! but no weights, and nothing is written.

mod findings;

use std::path::{Path, PathBuf};

use roll_backends::Backend;
use roll_core::plan::{Needs, in_words};
use roll_core::{BuildContext, Error, FileCheck, FilesFound, Grad, Kind, Registry, Result};
use roll_external::files;
use roll_train::config::{LoadedConfig, RunConfig};
use roll_train::progress::{counted, duration, overview_line};
use roll_train::ranks;
use roll_train::run_dir::RunDir;
use roll_train::{Checked, Run};
use roll_video::rows::DataConfig;

use self::findings::Findings;
use super::plan::{PlannedMachine, cluster, estimate, gigabytes, machine, needed_gigabytes, peak_gigabytes};
use crate::args::{Check, MachineArgs};
use crate::configuration::{Configuration, build_context};
use crate::demo::NotDemo;
use crate::ranks::{process, unusable_device};

/// Number of parameters above which a step on a CPU takes hours.
const LARGE_MODEL: f64 = 3e9;
/// The network of an [`estimate`] for the configuration as it is.
const CONFIGURED_NETWORK: Option<String> = None;

/// Prints the findings; fails when the run would fail.
pub fn check(args: Check) -> Result<()> {
    // Fails on wrong arguments of this command, because they are no finding about the run.
    cluster(&args.machine)?;
    let mut run = args.run;
    let resumed = run.resume.take().map(RunDir::open).transpose()?;
    run.config.run = resumed.clone();
    let configuration = Configuration::read_for(&run.config, &run.keys(), run.all_ranks())?;
    let registry = configuration.registry()?;
    let why_not_demo = configuration.why_not_demo();
    let loaded = configuration.or_demo()?.load(&registry)?;
    let config = &loaded.config;
    // The error of opening the devices of the run on this machine, if there is one.
    let device_error = unusable_device(&config.backend, ranks::of_process(config, process().as_ref()));
    // The configuration by which the run is opened here.
    let config_here = if device_error.is_some() { on_the_cpu(&loaded) } else { loaded.clone() };
    let context = BuildContext { headers_only: true, ..crate::ranks::with_collectives(build_context(&config_here))? };
    let files = model_files(&config_here, &registry, &context);
    // The reason why the model is not opened, if there is one.
    let why_unopened = match &files {
        Ok(Some(FilesFound { missing, .. })) => {
            missing.as_ref().map(|files| format!("a run would download files first: {files}"))
        }
        Ok(None) => Some(format!("`{}` is not opened: a plugin's model reads its weights", config.model.name)),
        Err(_) => None,
    };
    let run_here = Run::new(config_here, &registry, context).each_rank(crate::ranks::adapt);
    let run_here = match (resumed, run.out) {
        (Some(dir), _) => run_here.resume(dir),
        (None, Some(out)) => run_here.dir(out),
        (None, None) => run_here,
    };
    let (mut checked, findings) = run_here.check(why_unopened.is_none())?;
    let mut found = Findings::new(findings);

    list_run(config, &args.machine, device_error, run_here.directory(), &checked, &mut found)?;
    if let Some(NotDemo::WrongModel(note) | NotDemo::MissingPart(note)) = why_not_demo {
        found.note(note);
    }
    found.print_queued("run");
    found.section("algo");
    found.print_queued("algo");

    found.section("model");
    let files_are_complete = match &files {
        Ok(Some(files)) => files.missing.is_none(),
        // Only the plugin knows the files of its model.
        Ok(None) => true,
        Err(_) => false,
    };
    if let Ok(Some(files)) = files {
        files.lines.into_iter().for_each(|line| found.good(line));
    }
    if let Some(note) = why_unopened {
        found.note(note);
    }
    found.print_queued("model");

    let (findings_of_look, size) = checked.look(config, args.samples, grad_of_score(&registry, config));
    found.prepend(findings_of_look);
    list_data(config, &mut found);
    let size = match size {
        Some(size) => Some(size),
        None => fixed_size(&loaded)?,
    };
    found.section("memory");
    match files_are_complete {
        true => list_needs(&loaded, &registry, &args.machine, size, checked.steps, &mut found),
        false => found.note("no estimate without the model's files"),
    }
    found.end()
}

/// Whether the reward is tried with its gradient: if the algorithm back-propagates its score.
fn grad_of_score(registry: &Registry, config: &RunConfig) -> Grad {
    let passes = registry.passes(&config.algo.name, &config.algo.options);
    let pulls_score = passes.is_ok_and(|passes| {
        let [_, videos_with_gradient] = passes.decoded();
        videos_with_gradient > 0
    });
    if pulls_score { Grad::Record } else { Grad::Skip }
}

/// Lists the components, the devices, the ranks and the directory of the run. `device_error` is the error of opening
/// the run's devices on this machine, if there is one.
fn list_run(
    config: &RunConfig,
    machine: &MachineArgs,
    device_error: Option<Error>,
    directory: Result<PathBuf>,
    checked: &Checked,
    found: &mut Findings,
) -> Result<()> {
    found.section("run");
    let names = [("", &config.algo.name), (" of ", &config.model.name), (" by ", &config.strategy.name)];
    found.good(names.map(|(word, name)| format!("{word}`{name}`")).concat());
    found.good(format!("backend `{}`", config.backend));
    if let Some(error) = device_error {
        // No problem for a run on another machine (`--on`), which may have the devices.
        let is_for_other_machine = machine.on.is_some() && Backend::of(&config.backend).is_ok();
        let why = format!("{}\neverything else is checked on the CPU", error.chain());
        if is_for_other_machine { found.note(why) } else { found.problem(why) }
    }
    found.good(config.training.rate_in_words());
    if let Some(note) = ranks_note(config, machine)? {
        found.note(note);
    }
    match directory {
        Ok(dir) => {
            found.good(format!("writes to {}", dir.display()));
            if let Some(shortage) = disk_shortage(config, checked, &dir) {
                if machine.on.is_some() { found.note(shortage) } else { found.problem(shortage) }
            }
        }
        Err(error) => found.problem(error.chain()),
    }
    Ok(())
}

/// The same configuration for the CPU of this machine, on which files, data and rewards of a run for another machine
/// can be checked.
fn on_the_cpu(loaded: &LoadedConfig) -> LoadedConfig {
    let mut loaded = loaded.clone();
    loaded.config.backend = Backend::on_the_cpu().name().into();
    loaded.config.reward.iter_mut().for_each(|reward| reward.device = None);
    loaded
}

/// The number of ranks of the run.
fn rank_count(config: &RunConfig) -> usize {
    ranks::of_process(config, process().as_ref()) * process().world_size()
}

/// A note if the arguments name a machine whose number of devices is not the run's number of ranks.
fn ranks_note(config: &RunConfig, args: &MachineArgs) -> Result<Option<String>> {
    let (cluster, devices) = cluster(args)?;
    let ranks = rank_count(config);
    let counts =
        format!("the run has {}, the machine {}", counted(ranks as u64, "rank"), counted(devices as u64, "device"));
    Ok(match cluster {
        Some(_) if devices > ranks => Some(format!(
            "{counts}: the others stay idle; to train on all, `--ranks {devices} --set strategy.name=zero`, or a \
             launcher that starts {devices} processes"
        )),
        Some(_) if devices < ranks => Some(format!("{counts}: ranks share a device and its memory")),
        _ => None,
    })
}

/// The problem if the checkpoints of the run do not fit on the disk of its directory.
fn disk_shortage(config: &RunConfig, checked: &Checked, dir: &Path) -> Option<String> {
    let (checkpoint_bytes, steps, free) = (checked.checkpoint_bytes?, checked.steps?, files::free_bytes(dir)?);
    let written = if config.save_steps == 0 { 1 } else { steps.div_ceil(config.save_steps) };
    // One more than is kept: the oldest is deleted once the newest is written.
    let kept = config.max_ckpt_to_keep.map_or(written, |keep| written.min(keep as u64 + 1));
    let all_bytes = checkpoint_bytes.saturating_mul(kept);
    (all_bytes > free).then(|| {
        format!(
            "{} of {} take {}, and the disk of {} has {} left: another `output_dir`, `save_steps` above {}, or \
             `max_ckpt_to_keep`",
            counted(kept, "checkpoint"),
            in_words(checkpoint_bytes as usize),
            in_words(all_bytes as usize),
            dir.display(),
            in_words(free as usize),
            config.save_steps
        )
    })
}

/// Lists data, environment, references and evaluated clips.
fn list_data(config: &RunConfig, found: &mut Findings) {
    found.section("data");
    found.print_queued("data");
    found.section("env");
    config.env.iter().for_each(|env| found.good(format!("environment `{}`", env.name)));
    found.print_queued("env");
    for section in ["reward", "evaluation"] {
        found.section(section);
        found.print_queued(section);
    }
}

/// Height and width of clips, if the configuration sets them.
fn fixed_size(loaded: &LoadedConfig) -> Result<Option<[usize; 2]>> {
    let DataConfig { height, width, .. } = loaded.section()?;
    Ok(height.zip(width).map(|(height, width)| [height, width]))
}

/// Lists memory and time.
fn list_needs(
    loaded: &LoadedConfig,
    registry: &Registry,
    args: &MachineArgs,
    size: Option<[usize; 2]>,
    steps: Option<u64>,
    found: &mut Findings,
) {
    let config = &loaded.config;
    let planned = machine(args, loaded).and_then(|mut machine| {
        machine.devices = rank_count(config);
        let (_, needs) = estimate(loaded, registry, CONFIGURED_NETWORK, size, &machine)?;
        Ok((machine, needs))
    });
    match planned {
        Ok((machine, needs)) => {
            let memory_is_known = args.on.is_some() || args.memory.is_some() || computes_in_host_memory(config);
            list_memory(&needs, &machine, memory_is_known, found);
            list_time(&needs, steps, found);
            if let Some(note) = cpu_note(config, args.on.as_deref(), &needs) {
                found.note(note);
            }
        }
        Err(Error::Unsupported(why)) => found.note(format!("no estimate: {why}")),
        // The same error was found when the model was opened.
        Err(_) if found.has_problems() => found.note("no estimate after these problems"),
        Err(error) => found.problem(error.chain()),
    }
}

/// A note if a run computes on the CPU although it should not: `on` names a machine with GPUs, or the model is large.
fn cpu_note(config: &RunConfig, on: Option<&str>, needs: &Needs) -> Option<String> {
    if !computes_in_host_memory(config) {
        return None;
    }
    let parameters = needs.facts.get("parameters").copied().unwrap_or_default();
    let why = match on {
        Some(on) => format!("`--on {on}` names GPUs"),
        None if parameters > LARGE_MODEL => format!("the model has {:.1} billion parameters", parameters / 1e9),
        None => return None,
    };
    Some(format!(
        "{why}, and `backend: {}` computes on the CPU; `backend: libtorch-cuda` computes on an NVIDIA GPU",
        config.backend
    ))
}

/// Memory and time of a run in one line; `None` if they are unknown.
pub fn estimate_line(loaded: &LoadedConfig, registry: &Registry) -> Option<String> {
    let config = &loaded.config;
    let machine = machine(&MachineArgs::default(), loaded).ok()?;
    let size = fixed_size(loaded).ok()?;
    let (_, needs) = estimate(loaded, registry, CONFIGURED_NETWORK, size, &machine).ok()?;
    if let Some(note) = cpu_note(config, None, &needs) {
        tracing::warn!("{note}");
    }
    let [device, host] = peak_gigabytes(&needs);
    let seconds: f64 = needs.time.iter().map(|phase| phase.seconds).sum();
    // Ranks that are threads share the memory of their process.
    let (bytes_of_rank, _) = needs.peak(|item| item.device + item.host);
    let gigabytes_of_process = gigabytes(bytes_of_rank) * ranks::of_process(config, process().as_ref()) as f64;
    let each = if process().world_size() > 1 { " for each rank" } else { "" };
    let memory = match computes_in_host_memory(config) {
        true => format!("{gigabytes_of_process:.1} of {:.1} GB{each}", machine.memory / 1e9),
        false => format!("{device:.1} GB on the device, {host:.1} GB of host memory"),
    };
    // If each clip keeps a size of its own, the estimate is for the largest that a run would take.
    let bound = if size.is_some() { "" } else { "up to " };
    let reward = if config.reward.is_empty() { "" } else { " without the reward" };
    let time = if needs.time.is_empty() { String::new() } else { format!(", {bound}{} a step", duration(seconds)) };
    let text = format!("{bound}{memory}{time}{reward} (`roll plan` lists the items)");
    Some(overview_line("estimate", &text))
}

/// Whether the device computes in the memory of this machine, as a CPU does.
fn computes_in_host_memory(config: &RunConfig) -> bool {
    Backend::of(&config.backend).is_ok_and(|backend| !backend.is_numbered())
}

/// The model's files, as far as they exist; `None` for the model of a plugin, whose files only the plugin knows.
pub(super) fn model_files(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
) -> Result<Option<FilesFound>> {
    let model = &loaded.config.model;
    let is_linked = registry.find(Kind::Model, &model.name).is_ok_and(|registration| registration.is_linked);
    match FileCheck::of(Kind::Model, &model.name) {
        Some(file_check) if is_linked => (file_check.check)(&model.options, context).map(Some),
        _ => Ok(None),
    }
}

/// Lists the items of memory, and whether they fit. With `is_known` false, the memory of the devices that the run is
/// for is not known.
fn list_memory(needs: &Needs, machine: &PlannedMachine, is_known: bool, found: &mut Findings) {
    for item in needs.memory.iter().filter(|item| item.device + item.host > 0) {
        let host = if item.host > 0 { format!(", {} of host memory", in_words(item.host)) } else { String::new() };
        found.good(format!("{:<28} {:>11}{host}", item.label(), in_words(item.device)));
    }
    for (name, items) in &needs.other_devices {
        let bytes = items.iter().map(|item| item.device).sum();
        found.note(format!("{} on `{name}`, for each rank that names it", in_words(bytes)));
    }
    let need = needed_gigabytes(needs, machine);
    let [device, _] = peak_gigabytes(needs);
    let have = machine.memory / 1e9;
    let place = format!("on each device of {}, for {}", machine.name, needs.work);
    match (is_known, need <= have) {
        (false, _) => found.note(format!("{device:.1} GB {place}; `--memory GB` says whether that fits")),
        (true, true) => found.good(format!("{need:.1} of {have:.1} GB {place} (an estimate)")),
        (true, false) => {
            let mut problem = format!("needs {need:.1} GB, available are {have:.1}, {place}");
            needs.hints.iter().for_each(|hint| problem.push_str(&format!("\n{hint}")));
            found.problem(problem);
        }
    }
}

/// Lists the time of a step, and of all `steps` if their number is known.
fn list_time(needs: &Needs, steps: Option<u64>, found: &mut Findings) {
    if needs.time.is_empty() {
        return;
    }
    let seconds: f64 = needs.time.iter().map(|phase| phase.seconds).sum();
    found.section("time");
    let of_all_steps =
        steps.map(|steps| format!(", {} for {}", duration(seconds * steps as f64), counted(steps, "step")));
    let ranks = process().world_size();
    let on_ranks = if ranks > 1 { format!(" on {ranks} ranks") } else { String::new() };
    found.good(format!(
        "{} a step{}{on_ranks}, by estimate, without rewards and evaluations",
        duration(seconds),
        of_all_steps.unwrap_or_default()
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_model_on_the_cpu_is_noted() {
        let needs =
            |parameters: f64| Needs { facts: [("parameters".to_string(), parameters)].into(), ..Needs::default() };
        let on = |backend: &str| RunConfig { backend: backend.into(), ..RunConfig::default() };
        let note = cpu_note(&on("flex"), None, &needs(28.6e9)).unwrap_or_default();
        assert!(note.contains("28.6 billion") && note.contains("libtorch-cuda"), "{note}");
        assert_eq!(cpu_note(&on("flex"), None, &needs(0.5e9)), None);
        assert_eq!(cpu_note(&on("libtorch-cuda:1"), Some("1x80"), &needs(28.6e9)), None);
    }
}
