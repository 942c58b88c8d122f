//! `roll devices`: the backends and GPUs that this machine can use.

use roll_backends::Backend;
use roll_backends::device::memory;
use roll_core::{Error, Result};
use serde::Serialize;

use crate::args::Devices;

/// What the command prints.
#[derive(Serialize)]
struct Machine {
    backends: Vec<BackendStatus>,
    nvidia_gpus: Vec<Gpu>,
}

/// The state of a backend on this machine.
#[derive(Serialize)]
struct BackendStatus {
    name: &'static str,
    built: bool,
    /// The number of devices that can be used.
    devices: usize,
    /// The missing part and its remedy, if no device can be used.
    missing: Option<String>,
}

/// An NVIDIA GPU that the driver or `nvidia-smi` reports, whether or not a backend for it is built.
#[derive(Serialize)]
struct Gpu {
    number: usize,
    memory_bytes: u64,
}

/// Prints the state of every backend.
pub fn devices(args: Devices) -> Result<()> {
    let machine = Machine { backends: Backend::ALL.map(status).into(), nvidia_gpus: nvidia_gpus() };
    if args.json {
        let text = serde_json::to_string_pretty(&machine);
        println!("{}", text.map_err(Error::failed("the devices cannot be written as JSON"))?);
        return Ok(());
    }
    println_wrapped!("{:<14} {:<6} {:<7}  to use it", "backend", "built", "devices");
    for BackendStatus { name, built, devices, missing } in machine.backends {
        let built = if built { "yes" } else { "no" };
        let advice = missing.unwrap_or_else(|| format!("`--backend {name}`"));
        println_wrapped!("{name:<14} {built:<6} {devices:<7}  {advice}");
    }
    println!();
    for Gpu { number, memory_bytes } in &machine.nvidia_gpus {
        println!("NVIDIA GPU {number}: {:.0} GB", *memory_bytes as f64 / 1e9);
    }
    if machine.nvidia_gpus.is_empty() {
        println_wrapped!(
            "No NVIDIA GPU is found: neither the driver's library ({}) nor `nvidia-smi` reports one.",
            memory::DRIVER[0]
        );
    }
    Ok(())
}

/// The number of usable devices of a backend, or what is missing.
fn status(backend: Backend) -> BackendStatus {
    let max_devices = if backend.is_numbered() { usize::MAX } else { 1 };
    let devices = (0..max_devices).take_while(|number| backend.check_usable(*number).is_ok()).count();
    let missing = match backend.is_compiled() {
        true => backend.check_usable(0).err(),
        // The names of the other backends, which the error has, are in the table.
        false => Some(format!("build it: {}", backend.build_command())),
    };
    BackendStatus { name: backend.name(), built: backend.is_compiled(), devices, missing }
}

fn nvidia_gpus() -> Vec<Gpu> {
    let memory = |number| memory::total(&format!("{}:{number}", Backend::Cuda));
    (0..).map_while(|number| Some(Gpu { number, memory_bytes: memory(number)? })).collect()
}
