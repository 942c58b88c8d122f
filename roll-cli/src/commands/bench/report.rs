//! The result as a table and as JSON.

use roll_core::{Error, Result};
use serde_json::{Value, json};

use super::measure::{Measured, Phase, flops};
use super::preset::Preset;
use super::torch::Theirs;
use crate::args::Bench;
use crate::commands::plan::passes_in_words;

/// All that was found.
pub struct Found {
    /// Time and memory of a step.
    pub measured: Measured,
    /// Operations a second of the fastest product of matrices.
    pub ceiling: f64,
    /// PyTorch's time and memory.
    pub theirs: Option<Theirs>,
}

/// Prints the table, or JSON to the file or to the output.
pub fn write(args: &Bench, preset: &Preset, found: &Found) -> Result<()> {
    let json = to_json(args, preset, found);
    match &args.json {
        Some(path) if path.as_os_str() == "-" => {
            println!("{json:#}");
            return Ok(());
        }
        Some(path) => std::fs::write(path, format!("{json:#}\n")).map_err(Error::file("write", path))?,
        None => {}
    }
    print(args, preset, found);
    Ok(())
}

/// Seconds of a step, ours and PyTorch's: of whole steps, or of the phases that both sides have.
fn steps(found: &Found) -> Option<[f64; 2]> {
    let theirs = found.theirs.as_ref()?;
    if let (Some(ours), Some(theirs)) = (found.measured.whole, theirs.step_seconds) {
        return Some([ours.seconds, theirs]);
    }
    let in_both = found.measured.phases.iter().filter_map(|p| Some((p, theirs.phases.get(p.name)?)));
    let [ours, theirs] = in_both.fold([0.0, 0.0], |[ours, theirs], (p, their)| {
        let passes = p.passes as f64;
        [ours + passes * p.seconds, theirs + passes * their.seconds]
    });
    (ours > 0.0).then_some([ours, theirs])
}

/// Bytes at the highest, ours and PyTorch's.
fn peaks(found: &Found) -> Option<[u64; 2]> {
    Some([found.measured.peak()?, found.theirs.as_ref()?.memory.peak()?])
}

fn print(args: &Bench, preset: &Preset, found: &Found) {
    let Found { measured, ceiling, theirs } = found;
    let [height, width] = preset.size;
    let dit = &preset.networks.dit;
    println!(
        "{} on {}: {} of {} blocks of width {}, {} frames of {height}x{width}, {} tokens, weights {:?}{}",
        preset.name,
        args.backend,
        dit.layers,
        preset.all_layers,
        dit.dim,
        preset.frames,
        preset.plan().tokens(),
        preset.dtype,
        if preset.whole_step { ", whole steps" } else { "" },
    );
    println!("fastest product of matrices, of random numbers: {:.3} TFLOP/s", ceiling / 1e12);
    let memory = measured.phases.first().map_or("", |p| p.memory);
    let compared = match theirs {
        Some(_) => format!(" {:>9} {:>10} {:>6}", "PyTorch s", "PyTorch GB", "ratio"),
        None => String::new(),
    };
    println!(
        "{:<20} {:>6} {:>9} {:>10} {:>8} {:>9} {:>10}{compared}",
        "phase",
        "passes",
        "seconds",
        "tokens/s",
        "TFLOP/s",
        "of those",
        format!("{memory} GB")
    );
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let gigabytes = |bytes: Option<u64>| or_dash(bytes.map(|b| format!("{:.2}", b as f64 / 1e9)));
    for phase in &measured.phases {
        let rate = phase.flops.map(|f| f / phase.seconds);
        let their = |theirs: &Theirs| theirs.phases.get(phase.name).copied();
        let compared = match theirs.as_ref().map(their) {
            None => String::new(),
            Some(None) => format!(" {:>9} {:>10} {:>6}", "-", "-", "-"),
            Some(Some(their)) => {
                let ratio = phase.seconds / their.seconds;
                format!(" {:>9.3} {:>10} {ratio:>6.2}", their.seconds, gigabytes(their.memory.peak()))
            }
        };
        println!(
            "{:<20} {:>6} {:>9.3} {:>10} {:>8} {:>9} {:>10}{compared}",
            phase.name,
            phase.passes,
            phase.seconds,
            or_dash(phase.tokens.map(|t| format!("{:.0}", t as f64 / phase.seconds))),
            or_dash(rate.map(|r| format!("{:.3}", r / 1e12))),
            or_dash(rate.map(|r| format!("{:.0} %", 100.0 * r / ceiling))),
            gigabytes(phase.peak),
        );
    }
    if let Some(seconds) = measured.step_seconds(&preset.passes) {
        println!("a step of `{}`, {}: {seconds:.2} s", args.algo, passes_in_words(&preset.passes));
    }
    if let Some(peak) = measured.whole.and_then(|whole| whole.peak) {
        println!("memory of a step: {:.2} GB ({memory})", peak as f64 / 1e9);
    }
    if let Some(rate) = measured.transformer_rate() {
        println!("transformer: {:.3} TFLOP/s, {:.0} % of the fastest product", rate / 1e12, 100.0 * rate / ceiling);
    }
    if let Some([ours, their]) = steps(found) {
        println!("speed: {:.2} of PyTorch ({ours:.2} s, there {their:.2} s)", their / ours);
    }
    if let Some([ours, their]) = peaks(found) {
        let [ours, their] = [ours, their].map(|bytes| bytes as f64 / 1e9);
        println!("memory: {:.2} of PyTorch ({ours:.2} GB, there {their:.2} GB)", ours / their);
    }
    if let Some(theirs) = theirs {
        println!("{}", theirs.about());
    }
}

fn to_json(args: &Bench, preset: &Preset, found: &Found) -> Value {
    let Found { measured, ceiling, theirs } = found;
    let phase = |p: &Phase| {
        let their = theirs.as_ref().and_then(|t| t.phases.get(p.name));
        json!({
            "name": p.name,
            "passes": p.passes,
            "seconds": p.seconds,
            "flops": p.flops,
            "flops_per_second": p.flops.map(|f| f / p.seconds),
            "tokens_per_second": p.tokens.map(|t| t as f64 / p.seconds),
            "peak_bytes": p.peak,
            "peak_of": p.memory,
            "pytorch_seconds": their.map(|t| t.seconds),
            "pytorch_flops_per_second": their.and_then(|t| p.flops.map(|f| f / t.seconds)),
            "pytorch_peak_bytes": their.and_then(|t| t.memory.peak()),
            "pytorch_allocated_bytes": their.and_then(|t| t.memory.allocated_bytes),
        })
    };
    let steps = steps(found);
    let peaks = peaks(found);
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "preset": preset.name,
        "backend": args.backend,
        "dtype": format!("{:?}", preset.dtype).to_lowercase(),
        "layers": preset.networks.dit.layers,
        "all_layers": preset.all_layers,
        "frames": preset.frames,
        "size": preset.size,
        "tokens": preset.plan().tokens(),
        "rounds": args.rounds,
        "algorithm": args.algo,
        "guided": args.guided,
        "offload": preset.offload,
        "weights_on_host": preset.weights_on_host,
        "whole_step": preset.whole_step,
        "matmul_flops_per_second": ceiling,
        "transformer_flops_per_second": measured.transformer_rate(),
        "phases": measured.phases.iter().map(phase).collect::<Vec<_>>(),
        "flops": flops(preset),
        "step_seconds": measured.step_seconds(&preset.passes),
        "peak_bytes": measured.peak(),
        "compared_seconds": steps,
        "pytorch_peak_bytes": peaks.map(|[_, theirs]| theirs),
        "speed_of_pytorch": steps.map(|[ours, theirs]| theirs / ours),
        "memory_of_pytorch": peaks.map(|[ours, theirs]| ours as f64 / theirs as f64),
        "pytorch": theirs.as_ref().map(Theirs::about),
    })
}
