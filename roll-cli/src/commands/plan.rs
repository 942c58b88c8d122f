//! `roll plan`: memory and time of a run, before it is started.

use roll_core::plan::{Needs, PlanInput, Speed};
use roll_core::{Error, Registry, Result, error};
use roll_train::config::Loaded;

use crate::args;
use crate::configuration::{Configuration, build_context};

/// Prints what each rank needs, and whether it fits.
pub fn plan(args: args::Plan) -> Result<()> {
    let configuration = Configuration::read(&args.config, &[])?;
    let registry = configuration.registry()?;
    let loaded = configuration.load(&registry)?;
    let config = &loaded.config;
    let size = config.data.height.zip(config.data.width).map(|(height, width)| [height, width]);
    let machine = machine(&args.machine, &loaded)?;
    let (input, needs) = estimate(&loaded, &registry, args.network.clone(), size, &machine)?;
    match args.json {
        true => print_json(&needs, &input, &machine),
        false => print(&needs, &input, &machine),
    }
    Ok(())
}

/// What each rank needs for clips of this size; the model's usual one where it is `None`.
pub fn estimate(
    loaded: &Loaded,
    registry: &Registry,
    network: Option<String>,
    size: Option<[usize; 2]>,
    machine: &Machine,
) -> Result<(PlanInput, Needs)> {
    let config = &loaded.config;
    let passes = registry.passes(&config.algo.name, &config.algo.options)?;
    let division = registry.division(&config.strategy.name, &config.strategy.options)?;
    let input = PlanInput {
        network,
        frames: config.data.num_frames,
        size,
        samples: config.training.samples_per_rank(),
        ranks: if division.all_ranks { machine.devices } else { 1 },
        passes,
        division,
        speed: machine.speed,
    };
    let needs = registry.needs(&config.model.name, &config.model.options, &input, &build_context(loaded))?;
    Ok((input, needs))
}

/// Where the run would be.
pub struct Machine {
    pub name: String,
    pub devices: usize,
    /// Bytes of one device.
    pub memory: f64,
    pub speed: Speed,
    /// Device memory is host memory.
    pub shared: bool,
}

/// The machine that the arguments name, or this one.
pub fn machine(args: &args::Machine, loaded: &Loaded) -> Result<Machine> {
    let mut machine = match &args.on {
        Some(name) => {
            let known = Cluster::ALL.iter().map(|c| c.name);
            let cluster = Cluster::ALL.iter().find(|c| c.name == name).ok_or_else(|| Error::UnknownName {
                kind: "cluster",
                name: name.clone(),
                nearest: error::nearest(name, known.clone()).map(Into::into),
                known: known.collect::<Vec<_>>().join(", "),
            })?;
            let Cluster { devices, memory, speed, .. } = *cluster;
            Machine { name: cluster.name.into(), devices, memory, speed, shared: false }
        }
        None => {
            let speed = match args.tflops {
                // Replaced below.
                Some(_) => Speed { flops: 1.0, link: 5e9, read: 2e9 },
                None => {
                    let flops = roll_backends::sustained_flops(&roll_backends::device(&loaded.config.backend)?);
                    Speed { flops, link: 5e9, read: 2e9 }
                }
            };
            Machine { name: "this machine".into(), devices: 1, memory: host_memory(), speed, shared: true }
        }
    };
    let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(Error::Unsupported(format!("--{name} must be above 0, found {value}"))),
    };
    if let Some(memory) = args.memory {
        machine.memory = positive("memory", memory)? * 1e9;
    }
    if let Some(tflops) = args.tflops {
        machine.speed.flops = positive("tflops", tflops)? * 1e12;
    }
    machine.devices = args.devices.unwrap_or(machine.devices).max(1);
    Ok(machine)
}

/// Bytes of memory that this machine has; 0 where that is not known.
fn host_memory() -> f64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0) * 1024.0
}

pub fn gigabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e9
}

fn print(needs: &Needs, input: &PlanInput, machine: &Machine) {
    let [steps, trained] = input.passes.steps();
    let guided = if input.passes.forward > steps { ", guided: two velocities a step" } else { "" };
    println!(
        "{}: {} rank(s), ZeRO stage {}, {}, {trained} of {steps} steps trained{guided}",
        machine.name, input.ranks, input.division.stage, needs.work,
    );
    println!("{:<24} {:>10} {:>10}", "GB of each rank", "device", "host");
    for item in &needs.memory {
        println!("{:<24} {:>10.2} {:>10.2}  {}", item.name, gigabytes(item.device), gigabytes(item.host), item.formula);
    }
    let [device, host] = totals(needs);
    println!("{:<24} {device:>10.2} {host:>10.2}", "together");
    let (need, have) = (if machine.shared { device + host } else { device }, machine.memory / 1e9);
    match need <= have {
        true => println!("fits: {need:.1} of {have:.1} GB"),
        false => {
            println!("does not fit: {need:.1} GB are needed, {have:.1} are there");
            for hint in &needs.hints {
                println!("  {hint}");
            }
        }
    }
    println!("{:<24} {:>10} {:>10} {:>10}", "of a step", "TFLOP", "GB moved", "seconds");
    for phase in &needs.time {
        println!("{:<24} {:>10.1} {:>10.1} {:>10.1}", phase.name, phase.flops / 1e12, phase.moved / 1e9, phase.seconds);
    }
    let seconds: f64 = needs.time.iter().map(|p| p.seconds).sum();
    println!("{:<24} {:>10} {:>10} {seconds:>10.1}", "together", "", "");
    println!("at {:.2} TFLOP/s sustained by each rank", machine.speed.flops / 1e12);
}

/// GB on the device and on the host.
pub fn totals(needs: &Needs) -> [f64; 2] {
    let items = &needs.memory;
    [items.iter().map(|i| gigabytes(i.device)).sum(), items.iter().map(|i| gigabytes(i.host)).sum()]
}

fn print_json(needs: &Needs, input: &PlanInput, machine: &Machine) {
    let [device, host] = totals(needs);
    let need = if machine.shared { device + host } else { device };
    let mut json = serde_json::json!({
        "machine": machine.name,
        "ranks": input.ranks,
        "memory_bytes": machine.memory,
        "flops_per_second": machine.speed.flops,
        "memory": needs.memory,
        "time": needs.time,
        "fits": need <= machine.memory / 1e9,
    });
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
struct Cluster {
    /// Name on the command line.
    name: &'static str,
    /// Devices.
    devices: usize,
    /// Memory of each, bytes.
    memory: f64,
    /// What they are taken to sustain.
    speed: Speed,
}

impl Cluster {
    /// All of them. Sustained speed is taken as 40 % of the published dense bf16 peak of a typical device of that
    /// memory (165, 990 and 990 TFLOP/s); links are PCIe 4 and NVLink.
    const ALL: [Self; 4] = [
        Self::new("1x24", 1, 24e9, 66e12, 25e9),
        Self::new("1x80", 1, 80e9, 396e12, 50e9),
        Self::new("1x141", 1, 141e9, 396e12, 50e9),
        Self::new("8x80", 8, 80e9, 396e12, 300e9),
    ];

    const fn new(name: &'static str, devices: usize, memory: f64, flops: f64, link: f64) -> Self {
        Self { name, devices, memory, speed: Speed { flops, link, read: 3e9 } }
    }
}
