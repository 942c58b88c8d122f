//! `roll plan`: memory and time of a run, before it is started.
//!
//! The machine comes from the arguments or is measured; the model counts bytes and operations
//! ([`Registry::needs`](roll_core::Registry::needs)). `roll check` and `roll run` print parts of the same estimate.

use roll_core::plan::{MemoryItem, Needs, Passes, PlanInput, Speed};
use roll_core::{Error, Registry, Result, ResultExt, VideoUnit};
use roll_train::config::{ConfigLayers, LoadedConfig};
use roll_train::progress::counted;
use roll_train::ranks;
use roll_video::rows::DataConfig;

use super::bench::preset::{named, network_name};
use super::plan_rewards::add_rewards;
use crate::args;
use crate::configuration::{Configuration, build_context};
use crate::ranks::process;

/// Minimum width of the first column of the tables. The memory table has a wider one if a label needs it.
const MIN_LABEL_WIDTH: usize = 24;

/// Prints the needs of each rank, and whether they fit.
pub fn plan(args: args::PlanArgs) -> Result<()> {
    let (_, devices) = cluster(&args.machine)?;
    // The batch of a configuration of ROLL is divided among the planned devices.
    let configuration = Configuration::read_for(&args.config, &[], devices)?;
    let registry = configuration.registry()?;
    let configuration = match &args.network {
        Some(network) => with_model_of(configuration, network)?,
        None => configuration.or_demo()?,
    };
    let loaded = configuration.load(&registry)?;
    let machine = machine(&args.machine, &loaded)?;
    // Only rank 0 prints, since all ranks of a launcher plan the same. All of them measure the machine at the same
    // time, so that each measures its share.
    if process().rank().0 > 0 {
        return Ok(());
    }
    let (network, size_of_full_hd) = (args.network.as_deref().map(|name| network_name(name).into()), None);
    let (input, needs) = estimate(&loaded, &registry, network, size_of_full_hd, &machine)?;
    match args.json {
        true => print_json(&needs, &input, &machine),
        false => print(&needs, &input, &machine, &loaded.config.strategy.name),
    }
    Ok(())
}

/// The configuration, with the model of the published networks `network` unless it names one.
fn with_model_of(configuration: Configuration, network: &str) -> Result<Configuration> {
    match named(network) {
        Some(preset) => configuration.over(ConfigLayers::new().set_text("model.name", preset.model, "--network")?),
        None => Ok(configuration),
    }
}

/// The work that is planned, and the memory and time that each rank needs for it. `network` names a published model, in
/// place of the configured one. `size` is height and width of the clips. `None` is the size of a full-HD clip after the
/// data set's resizing.
pub fn estimate(
    loaded: &LoadedConfig,
    registry: &Registry,
    network: Option<String>,
    size: Option<[usize; 2]>,
    machine: &PlannedMachine,
) -> Result<(PlanInput, Needs)> {
    let config = &loaded.config;
    let data: DataConfig = loaded.section()?;
    let passes = registry.passes(&config.algo.name, &config.algo.options)?;
    let division = registry.division(&config.strategy.name, &config.strategy.options)?;
    let makes_videos = passes.texts.is_empty();
    let size = match size {
        None if makes_videos => Some(full_hd(&data)?),
        // The given size, or none for texts.
        size => size,
    };
    let input = PlanInput {
        network,
        frames: data.num_frames,
        size,
        memory: (!machine.uses_host_memory).then_some(machine.memory as u64),
        samples: config.training.samples_per_rank(),
        ranks: if division.all_ranks { machine.devices } else { 1 },
        passes,
        division,
        speed: machine.speed,
    };
    let mut needs = registry.needs(&config.model.name, &config.model.options, &input, &build_context(loaded))?;
    if makes_videos {
        add_rewards(loaded, registry, &input, &mut needs)?;
    }
    Ok((input, needs))
}

/// Height and width to which the data set resizes a clip of 1920x1080.
fn full_hd(data: &DataConfig) -> Result<[usize; 2]> {
    match data.height.zip(data.width) {
        Some((height, width)) => Ok([height, width]),
        None => {
            let VideoUnit { height, width, .. } = VideoUnit::default();
            roll_media::target_size([1080, 1920], data.max_pixels, [height, width])
                .map_err(|problem| Error::config("data.max_pixels", problem))
        }
    }
}

/// The machine that a run is planned for.
pub struct PlannedMachine {
    pub name: String,
    pub devices: usize,
    /// Bytes of one device.
    pub memory: f64,
    pub speed: Speed,
    /// Whether the device computes in host memory, as a CPU does.
    pub uses_host_memory: bool,
    /// Bytes of host memory; 0 if they are not known.
    pub host_memory: f64,
    /// Whether `host_memory` is the value of `--host-memory`. Otherwise it is the memory of this machine.
    pub is_host_memory_given: bool,
}

/// The cluster that `--on` names, and the number of devices: that of `--devices`, or of the cluster, or 1.
pub fn cluster(args: &args::MachineArgs) -> Result<(Option<Cluster>, usize)> {
    let cluster = args.on.as_deref().map(Cluster::parse).transpose()?;
    let devices = match (args.devices, cluster) {
        (Some(devices), _) => devices as usize,
        (None, Some(cluster)) => cluster.devices,
        (None, None) => 1,
    };
    Ok((cluster, devices.max(1)))
}

/// The machine that the arguments name, or this one.
pub fn machine(args: &args::MachineArgs, loaded: &LoadedConfig) -> Result<PlannedMachine> {
    let (cluster, devices) = cluster(args)?;
    let mut machine = match cluster {
        Some(cluster) => machine_of_cluster(cluster, devices, args.memory),
        None => this_machine(args, devices, loaded)?,
    };
    let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(Error::Unsupported(format!("--{name} must be above 0, found {value}"))),
    };
    if let Some(memory) = args.memory {
        machine.memory = positive("memory", memory)? * 1e9;
    }
    if let Some(memory) = args.host_memory {
        machine.host_memory = positive("host-memory", memory)? * 1e9;
        machine.is_host_memory_given = true;
    }
    if let Some(tflops) = args.tflops {
        machine.speed.flops = positive("tflops", tflops)? * 1e12;
    }
    Ok(machine)
}

/// A machine with this number of the cluster's devices. `memory_argument` is the value of `--memory`.
fn machine_of_cluster(cluster: Cluster, devices: usize, memory_argument: Option<f64>) -> PlannedMachine {
    let gigabytes = memory_argument.unwrap_or(cluster.memory / 1e9);
    PlannedMachine {
        name: format!("{devices}x{gigabytes}"),
        devices,
        memory: cluster.memory,
        speed: cluster.speed,
        uses_host_memory: false,
        host_memory: host_memory(),
        is_host_memory_given: false,
    }
}

/// This machine, whose speed is measured unless `--tflops` names it. `devices` is the number of `--devices`.
fn this_machine(args: &args::MachineArgs, devices: usize, loaded: &LoadedConfig) -> Result<PlannedMachine> {
    let device = roll_backends::device(&loaded.config.backend)
        .while_doing(|| "to plan for another machine, name it: `--on 1x80` is one GPU of 80 GB".into())?;
    // With `--devices`, each rank has a device like the one here. Otherwise the ranks are those of the run, and those
    // that are threads of this process have equal shares of its device.
    let (ranks_on_device, devices) = match args.devices {
        Some(_) => (1, devices),
        None => {
            let threads = ranks::of_process(&loaded.config, process().as_ref());
            (threads, threads * process().world_size())
        }
    };
    let flops = match args.tflops {
        // `machine` replaces this value by that of `--tflops`.
        Some(_) => 1.0,
        None => roll_backends::sustained_flops(&device) / ranks_on_device as f64,
    };
    let memory = match roll_backends::device::memory::total(&loaded.config.backend) {
        Some(bytes) => bytes as f64,
        None => host_memory(),
    };
    Ok(PlannedMachine {
        name: "this machine".into(),
        devices,
        memory,
        // The rates of links and of reading, in bytes a second, are assumed.
        speed: Speed { flops, link: 5e9, read: 2e9 },
        uses_host_memory: !roll_backends::device::is_gpu(&device),
        host_memory: host_memory(),
        is_host_memory_given: false,
    })
}

/// Bytes of memory of this machine; 0 if they are not known.
pub fn host_memory() -> f64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kibibytes.unwrap_or(0.0) * 1024.0
}

pub fn gigabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e9
}

fn print(needs: &Needs, input: &PlanInput, machine: &PlannedMachine, strategy: &str) {
    println_wrapped!(
        "{}: {}, ZeRO stage {}, {}, {}",
        machine.name,
        counted(input.ranks as u64, "rank"),
        input.division.stage,
        needs.work,
        passes_in_words(&input.passes),
    );
    if input.ranks < machine.devices {
        println_wrapped!(
            "uses {} of the {} devices: the strategy `{strategy}` trains on one; strategy.name=zero on all",
            input.ranks,
            machine.devices
        );
    }
    print_memory(needs, input, machine);
    if !needs.time.is_empty() {
        print_time(needs, machine);
    }
}

/// Prints a table of the items of memory, their sums in each phase, and whether they fit.
fn print_memory(needs: &Needs, input: &PlanInput, machine: &PlannedMachine) {
    let labels: Vec<String> = needs.memory.iter().map(MemoryItem::label).collect();
    let width = labels.iter().map(String::len).max().unwrap_or(0).max(MIN_LABEL_WIDTH);
    println_wrapped!("{:<width$} {:>10} {:>10}", "GB of each rank", "device", "host");
    for (item, label) in needs.memory.iter().zip(&labels) {
        println_wrapped!(
            "{label:<width$} {:>10.2} {:>10.2}  {}",
            gigabytes(item.device),
            gigabytes(item.host),
            item.formula
        );
    }
    for phase in needs.phases() {
        let [device, host] = held_in(needs, phase).map(gigabytes);
        println_wrapped!("{:<width$} {device:>10.2} {host:>10.2}", format!("together, {phase}"));
    }
    let [device, host] = peak_gigabytes(needs);
    let together = if needs.phases().is_empty() { "together" } else { "together, at most" };
    println_wrapped!("{together:<width$} {device:>10.2} {host:>10.2}");
    print_fit(needs, input, machine, host);
    for (name, items) in &needs.other_devices {
        println_wrapped!("on `{name}`, for each rank that names it");
        for item in items {
            println_wrapped!(
                "{:<width$} {:>10.2} {:>10.2}  {}",
                item.name,
                gigabytes(item.device),
                gigabytes(item.host),
                item.formula
            );
        }
    }
}

/// Prints whether the memory suffices; `host` is the GB of host memory of each rank.
fn print_fit(needs: &Needs, input: &PlanInput, machine: &PlannedMachine, host: f64) {
    let (need, have) = (needed_gigabytes(needs, machine), machine.memory / 1e9);
    match need <= have {
        true => println_wrapped!("fits: {need:.1} of {have:.1} GB"),
        false => {
            println_wrapped!("does not fit: needs {need:.1} GB, available are {have:.1}");
            for hint in &needs.hints {
                println_wrapped!("  {hint}");
            }
        }
    }
    if machine.uses_host_memory && input.ranks > 1 {
        let together = need * input.ranks as f64;
        println_wrapped!("{together:.1} GB if all {} ranks are on this machine", input.ranks);
        if need <= have && together > have {
            println_wrapped!("  that is more than the {have:.1} GB that it has");
        }
    }
    if !machine.uses_host_memory {
        let together = host * input.ranks as f64;
        match input.ranks {
            1 => println_wrapped!("host memory: {host:.1} GB"),
            ranks => {
                println_wrapped!(
                    "host memory: {host:.1} GB for each rank, {together:.1} GB if all {ranks} share a machine"
                )
            }
        }
        if let Some(note) = host_memory_note(together, machine.host_memory / 1e9, machine.is_host_memory_given) {
            println_wrapped!("  {note}");
        }
    }
}

/// A note if all ranks together need more than the `have` GB of host memory; a `have` of 0 is not known. With
/// `is_given`, `have` is the value of `--host-memory`, otherwise the memory of this machine.
fn host_memory_note(need: f64, have: f64, is_given: bool) -> Option<String> {
    let is_known = have > 0.0;
    (is_known && need > have).then(|| match is_given {
        true => format!("that is more than the {have:.0} GB of `--host-memory`"),
        false => format!("that is more than the {have:.0} GB of this machine; `--host-memory` names those of another"),
    })
}

fn print_time(needs: &Needs, machine: &PlannedMachine) {
    println_wrapped!("{:<MIN_LABEL_WIDTH$} {:>10} {:>10} {:>10}", "of a step", "TFLOP", "GB moved", "seconds");
    for phase in &needs.time {
        println_wrapped!(
            "{:<MIN_LABEL_WIDTH$} {:>10.1} {:>10.1} {:>10.1}",
            phase.name,
            phase.flops / 1e12,
            phase.moved / 1e9,
            phase.seconds
        );
    }
    let seconds: f64 = needs.time.iter().map(|p| p.seconds).sum();
    println_wrapped!("{:<MIN_LABEL_WIDTH$} {:>10} {:>10} {seconds:>10.1}", "together", "", "");
    println_wrapped!("at {:.2} TFLOP/s sustained by each rank", machine.speed.flops / 1e12);
}

/// The passes through the model that a step makes for each sample, in words.
pub fn passes_in_words(passes: &Passes) -> String {
    // A language model.
    if let [first, ..] = &passes.texts[..] {
        let recorded = passes.texts.iter().find(|pass| pass.grad).map_or(0, |pass| pass.at_once);
        return format!("{} texts a step, recorded {recorded} at a time", first.rows);
    }
    let [steps, trained] = passes.steps();
    match passes.videos {
        // Policy gradients: several videos for each prompt.
        Some(videos) => {
            format!("{} videos of {steps} steps for each sample, trained at {trained} noise levels each", videos.count)
        }
        // Flow matching: no video is generated.
        None if steps == 0 => format!("{} noise levels of each clip", passes.forward),
        // Reward-FL with guidance, and without.
        None if passes.forward > steps => format!("{trained} of {steps} steps trained, guided: two velocities a step"),
        None => format!("{trained} of {steps} steps trained"),
    }
}

/// Peak memory in GB over the phases of a step: `[device, host]`.
pub fn peak_gigabytes(needs: &Needs) -> [f64; 2] {
    [needs.peak(|item| item.device).0, needs.peak(|item| item.host).0].map(gigabytes)
}

/// Peak memory in GB that has to fit into [`PlannedMachine::memory`]: that of the device, or that of device and host
/// together where both are the same memory.
pub fn needed_gigabytes(needs: &Needs, machine: &PlannedMachine) -> f64 {
    gigabytes(match machine.uses_host_memory {
        true => needs.peak(|item| item.device + item.host).0,
        false => needs.peak(|item| item.device).0,
    })
}

/// Bytes that are held in `phase`: `[device, host]`.
fn held_in(needs: &Needs, phase: &str) -> [usize; 2] {
    [needs.held_in(Some(phase), |item| item.device), needs.held_in(Some(phase), |item| item.host)]
}

fn print_json(needs: &Needs, input: &PlanInput, machine: &PlannedMachine) {
    let need = needed_gigabytes(needs, machine);
    let mut json = serde_json::json!({
        "machine": machine.name,
        "ranks": input.ranks,
        "memory_bytes": machine.memory,
        "flops_per_second": machine.speed.flops,
        "memory": needs.memory,
        "time": needs.time,
        "needed_bytes": (need * 1e9).round() as u64,
        "fits": need <= machine.memory / 1e9,
    });
    if !needs.other_devices.is_empty() {
        json["other_devices"] = serde_json::json!(needs.other_devices);
    }
    let phases = needs.phases().into_iter().map(|phase| {
        let [device, host] = held_in(needs, phase);
        (phase.to_string(), serde_json::json!({"device": device, "host": host}))
    });
    let phases: serde_json::Map<String, serde_json::Value> = phases.collect();
    if !phases.is_empty() {
        json["phases"] = phases.into();
    }
    for (name, value) in &needs.facts {
        json[name] = match value.fract() == 0.0 {
            true => serde_json::json!(*value as u64),
            false => serde_json::json!(value),
        };
    }
    println!("{json:#}");
}

/// Devices of a machine or cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    pub devices: usize,
    /// Bytes of memory of each device.
    pub memory: f64,
    /// Assumed rates of each device.
    speed: Speed,
}

impl Cluster {
    /// Share of a device's peak speed that it sustains, as measured on an H200
    /// (bench/results/gpu/2026-11-28-h200.md).
    const SUSTAINED_SHARE: f64 = 0.55;
    /// Bytes a second that are read from a disk.
    const READ_RATE: f64 = 3e9;

    /// Parses number and memory of the devices, such as `8x80`. A device is assumed to be a typical one of that memory,
    /// with its published dense bf16 peak: 165 TFLOP/s up to 32 GB, 312 up to 48 GB, 990 above. Links are assumed to be
    /// PCIe up to 48 GB and for a single device, NVLink otherwise.
    fn parse(name: &str) -> Result<Self> {
        let wrong = || {
            Error::config(
                "--on",
                format!("expected number and GB of devices, such as 1x24, 4x48, 8x80 or 8x141; found `{name}`"),
            )
        };
        let (devices, gigabytes) = name.split_once('x').ok_or_else(wrong)?;
        let devices: usize = devices.parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?;
        let gigabytes: f64 = gigabytes.parse().ok().filter(|g: &f64| g.is_finite() && *g > 0.0).ok_or_else(wrong)?;
        // Operations a second, and bytes a second over a link.
        let (peak, link) = match gigabytes {
            ..=32.0 => (165e12, 25e9),
            ..=48.0 => (312e12, 25e9),
            _ => (990e12, if devices > 1 { 300e9 } else { 50e9 }),
        };
        let speed = Speed { flops: Self::SUSTAINED_SHARE * peak, link, read: Self::READ_RATE };
        Ok(Self { devices, memory: gigabytes * 1e9, speed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_clusters() {
        let of = |name: &str| Cluster::parse(name).map(|c| (c.devices, c.memory / 1e9));
        assert_eq!(
            [of("8x141").unwrap(), of("2x80").unwrap(), of("4x48").unwrap()],
            [(8, 141.0), (2, 80.0), (4, 48.0)]
        );
        for name in ["8", "x80", "0x80", "8xinf", "8x-1", "8x", ""] {
            assert!(of(name).unwrap_err().to_string().contains("8x80"), "{name}");
        }
    }

    #[test]
    fn host_memory_is_compared_with_that_of_a_machine() {
        assert_eq!(host_memory_note(66.9, 128.0, true), None);
        assert_eq!(host_memory_note(66.9, 0.0, false), None);
        assert!(host_memory_note(66.9, 64.0, true).unwrap().contains("64 GB of `--host-memory`"));
        assert!(host_memory_note(66.9, 64.0, false).unwrap().contains("of this machine"));
    }

    #[test]
    fn plans_frames_of_the_size_that_the_data_set_reads() {
        let data = |max_pixels| DataConfig { max_pixels, ..DataConfig::default() };
        assert_eq!(full_hd(&data(230_400)).unwrap(), [352, 640]);
        assert_eq!(full_hd(&DataConfig { height: Some(480), width: Some(832), ..data(1) }).unwrap(), [480, 832]);
        assert!(full_hd(&data(1)).is_err());
    }
}
