//! `roll plan`: memory and time of a run, before it is started.

use roll_algos::reward_fl;
use roll_backends::strategy::{OffloadDevice, SingleOptions, ZeroOptions};
use roll_core::config::Loaded;
use roll_core::registry::parse_options;
use roll_core::{DType, Error, Result, ResultExt, error};
use roll_models::hub::Hub;
use roll_models::wan2_2::dit::{DitConfig, Trainable};
use roll_models::wan2_2::paths::ComponentFiles;
use roll_models::wan2_2::plan::{Cluster, Division, Network, Networks, Plan, Speed, Work};
use roll_models::wan2_2::vae::VaeConfig;
use roll_models::wan2_2::{Placement, WanOptions};

use crate::args;

/// The frames of the reference, where the configuration does not say their size.
const SIZE: [usize; 2] = [480, 832];

/// Prints what each rank needs, and whether it fits.
pub fn plan(args: args::Plan) -> Result<()> {
    let registry = super::registry(&args.config)?;
    let loaded = super::load(&args.config, &registry, &[])?;
    if loaded.config.model.name != "wan2_2" || loaded.config.algo.name != "reward_fl" {
        return Err(Error::Unsupported("`roll plan` knows the model `wan2_2` and the algorithm `reward_fl`".into()));
    }
    let options: WanOptions = parse_options("model", &loaded.config.model.options)?;
    let networks = networks(&args, &options)?;
    let machine = machine(&args, &loaded)?;
    let plan =
        Plan { work: work(&loaded, &options)?, division: division(&loaded, &options, &networks, &machine)?, networks };
    match args.json {
        true => print_json(&plan, &machine),
        false => print(&plan, &machine),
    }
}

/// Where the run would be.
struct Machine {
    name: String,
    devices: usize,
    /// Bytes of one device.
    memory: f64,
    speed: Speed,
    /// Device memory is host memory.
    shared: bool,
}

fn machine(args: &args::Plan, loaded: &Loaded) -> Result<Machine> {
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
                None => Speed::measured(&roll_backends::device(&loaded.config.backend)?),
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

fn networks(args: &args::Plan, options: &WanOptions) -> Result<Networks> {
    if let Some(name) = &args.network {
        let known = Network::ALL.iter().map(|n| n.name);
        let network = Network::ALL.iter().find(|n| n.name == name).ok_or_else(|| Error::UnknownName {
            kind: "network",
            name: name.clone(),
            nearest: error::nearest(name, known.clone()).map(Into::into),
            known: known.collect::<Vec<_>>().join(", "),
        })?;
        return Ok(network.networks());
    }
    let ids = options.model_id_with_origin_paths.as_deref();
    if options.model_paths.is_none() && ids.is_none() {
        let known = Network::ALL.map(|n| n.name).join(", ");
        return Err(Error::config("model.model_paths", format!("name files, or a published model: --network {known}")));
    }
    let files = ComponentFiles::resolve(options.model_paths.as_deref(), ids, &Hub::from_env()).in_section("model")?;
    let dtype = files.dit.info("head.head.weight").and_then(|info| info.dtype).unwrap_or(DType::F32);
    let heads = options.num_heads.or_else(|| roll_models::wan2_2::components::heads(&files.dit));
    Ok(Networks {
        dit: DitConfig::from_shapes(&files.dit.shapes(), heads)?,
        experts: 1 + usize::from(files.dit2.is_some()),
        weight_bytes: dtype.size(),
        vae: VaeConfig::from_shapes(&files.vae.shapes())?,
    })
}

fn work(loaded: &Loaded, options: &WanOptions) -> Result<Work> {
    let algorithm: reward_fl::RewardFlConfig = parse_options("algo", &loaded.config.algo.options)?;
    let data = &loaded.config.data;
    Ok(Work {
        frames: data.num_frames,
        size: match (data.height, data.width) {
            (Some(height), Some(width)) => [height, width],
            _ => SIZE,
        },
        steps: algorithm.final_timestep + 1,
        trained_steps: (algorithm.final_timestep + 1).saturating_sub(algorithm.mid_timestep),
        tile: options.vae_tile_size,
        offload_inputs: options.use_gradient_checkpointing_offload,
        text_len: 512,
        samples: loaded.config.training.samples_per_rank(),
    })
}

fn division(loaded: &Loaded, options: &WanOptions, networks: &Networks, machine: &Machine) -> Result<Division> {
    let strategy = &loaded.config.strategy;
    let zero: Option<ZeroOptions> = match strategy.name.as_str() {
        "zero" => Some(parse_options("strategy", &strategy.options)?),
        _ => None,
    };
    let bf16_optimizer_states = match (&zero, strategy.name.as_str()) {
        (Some(zero), _) => zero.bf16_optimizer_states,
        (None, "single") => parse_options::<SingleOptions>("strategy", &strategy.options)?.bf16_optimizer_states,
        (None, _) => false,
    };
    let streamed = zero.as_ref().is_some_and(|zero| zero.offload_param.device != OffloadDevice::None);
    let placement = match options.weight_store {
        Placement::Auto if streamed => Placement::Streamed,
        given => given,
    };
    let present: &[&str] = if networks.experts > 1 { &["dit", "dit2"] } else { &["dit"] };
    let trained = options.trained_experts(present)?;
    Ok(Division {
        stage: zero.as_ref().map_or(0, |zero| zero.stage),
        placement,
        ranks: if zero.is_some() { machine.devices } else { 1 },
        trainable: options.trainable(&trained, trained.first().map_or("", String::as_str)),
        trained_experts: trained.len(),
        bf16_optimizer_states,
        overlap_comm: zero.as_ref().is_some_and(|zero| zero.overlap_comm),
    })
}

fn gigabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e9
}

fn print(plan: &Plan, machine: &Machine) -> Result<()> {
    let [height, width] = plan.work.size;
    println!(
        "{}: {} rank(s), ZeRO stage {}, {} frames of {width}x{height}, {} tokens, {} of {} steps trained",
        machine.name,
        plan.division.ranks,
        plan.division.stage,
        plan.work.frames,
        plan.tokens(),
        plan.work.trained_steps,
        plan.work.steps,
    );
    println!("{:<24} {:>10} {:>10}", "GB of each rank", "device", "host");
    let items = plan.memory()?;
    for item in &items {
        println!("{:<24} {:>10.2} {:>10.2}  {}", item.name, gigabytes(item.device), gigabytes(item.host), item.formula);
    }
    let [device, host] = totals(plan)?;
    println!("{:<24} {device:>10.2} {host:>10.2}", "together");
    let (need, have) = (if machine.shared { device + host } else { device }, machine.memory / 1e9);
    match need <= have {
        true => println!("fits: {need:.1} of {have:.1} GB"),
        false => {
            println!("does not fit: {need:.1} GB are needed, {have:.1} are there");
            for hint in hints(plan) {
                println!("  {hint}");
            }
        }
    }
    println!("{:<24} {:>10} {:>10} {:>10}", "of a step", "TFLOP", "GB moved", "seconds");
    let phases = plan.time(machine.speed);
    for phase in &phases {
        println!("{:<24} {:>10.1} {:>10.1} {:>10.1}", phase.name, phase.flops / 1e12, phase.moved / 1e9, phase.seconds);
    }
    let seconds: f64 = phases.iter().map(|p| p.seconds).sum();
    println!("{:<24} {:>10} {:>10} {seconds:>10.1}", "together", "", "");
    println!("at {:.2} TFLOP/s sustained by each rank", machine.speed.flops / 1e12);
    Ok(())
}

/// GB on the device and on the host.
fn totals(plan: &Plan) -> Result<[f64; 2]> {
    let items = plan.memory()?;
    Ok([items.iter().map(|i| gigabytes(i.device)).sum(), items.iter().map(|i| gigabytes(i.host)).sum()])
}

/// What would make the run smaller, of what is not done yet.
fn hints(plan: &Plan) -> Vec<String> {
    let mut hints = Vec::new();
    let mut hint = |does_not: bool, text: &str| hints.extend(does_not.then(|| text.to_string()));
    let resident = plan.placement() == Placement::Resident;
    hint(resident && plan.division.ranks > 1, "strategy.stage=3 divides the frozen weights among the ranks");
    hint(
        resident,
        "strategy.name=zero and strategy.offload_param.device=cpu stream the frozen weights from their files",
    );
    hint(
        plan.division.trainable == Trainable::Full && !plan.division.bf16_optimizer_states,
        "strategy.bf16_optimizer_states=true halves the optimizer's state",
    );
    hint(plan.work.tile.is_none(), "model.vae_tile_size=[34,34] and model.vae_tile_stride=[18,16] decode in tiles");
    hint(!plan.work.offload_inputs, "model.use_gradient_checkpointing_offload=true keeps block inputs in host memory");
    hint(true, "fewer frames or pixels: data.num_frames, data.height and data.width");
    hints
}

fn print_json(plan: &Plan, machine: &Machine) -> Result<()> {
    let items: Vec<_> = plan
        .memory()?
        .into_iter()
        .map(|i| serde_json::json!({"name": i.name, "device": i.device, "host": i.host, "formula": i.formula}))
        .collect();
    let phases: Vec<_> = plan
        .time(machine.speed)
        .into_iter()
        .map(|p| serde_json::json!({"name": p.name, "flops": p.flops, "moved": p.moved, "seconds": p.seconds}))
        .collect();
    let [device, host] = totals(plan)?;
    let need = if machine.shared { device + host } else { device };
    let json = serde_json::json!({
        "machine": machine.name,
        "ranks": plan.division.ranks,
        "memory_bytes": machine.memory,
        "flops_per_second": machine.speed.flops,
        "tokens": plan.tokens(),
        "memory": items,
        "time": phases,
        "fits": need <= machine.memory / 1e9,
    });
    println!("{json:#}");
    Ok(())
}
