//! The result as a table and as JSON.

use roll_core::{Error, Result};
use serde_json::{Value, json};

use super::measure::{Measured, phases_of};
use super::preset::Preset;
use super::torch::Theirs;
use crate::args::Bench;
use crate::commands::plan::passes_in_words;

/// Prints the table, or JSON to the file or to the output.
pub fn write(args: &Bench, preset: &Preset, measured: &Measured, theirs: Option<&Theirs>) -> Result<()> {
    let json = to_json(args, preset, measured, theirs);
    match &args.json {
        Some(path) if path.as_os_str() == "-" => {
            println!("{json:#}");
            return Ok(());
        }
        Some(path) => std::fs::write(path, format!("{json:#}\n")).map_err(Error::file("write", path))?,
        None => {}
    }
    print(args, preset, measured, theirs);
    Ok(())
}

/// Seconds of a whole step, where all its phases were measured.
fn step_seconds(preset: &Preset, measured: &Measured) -> Option<f64> {
    let phases = &measured.phases;
    let is_whole = phases.len() == phases_of(&preset.passes).count();
    is_whole.then(|| phases.iter().map(|p| p.seconds * p.passes as f64).sum())
}

fn print(args: &Bench, preset: &Preset, measured: &Measured, theirs: Option<&Theirs>) {
    let [height, width] = preset.size;
    let dit = &preset.networks.dit;
    println!(
        "{} on {}: {} of {} blocks of width {}, {} frames of {height}x{width}, {} tokens, weights {:?}",
        preset.name,
        args.backend,
        dit.layers,
        preset.all_layers,
        dit.dim,
        preset.frames,
        preset.plan().tokens(),
        preset.dtype,
    );
    println!("fastest product of matrices: {:.3} TFLOP/s", measured.ceiling / 1e12);
    let memory = measured.phases.first().map_or("", |p| p.memory);
    let compared = if theirs.is_some() { format!(" {:>9} {:>6}", "PyTorch s", "ratio") } else { String::new() };
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
    for phase in &measured.phases {
        let rate = phase.flops.map(|f| f / phase.seconds);
        let compared = match theirs {
            None => String::new(),
            Some(theirs) => match theirs.seconds.get(phase.name) {
                Some(seconds) => format!(" {seconds:>9.3} {:>6.2}", phase.seconds / seconds),
                None => format!(" {:>9} {:>6}", "-", "-"),
            },
        };
        println!(
            "{:<20} {:>6} {:>9.3} {:>10} {:>8} {:>9} {:>10}{compared}",
            phase.name,
            phase.passes,
            phase.seconds,
            or_dash(phase.tokens.map(|t| format!("{:.0}", t as f64 / phase.seconds))),
            or_dash(rate.map(|r| format!("{:.3}", r / 1e12))),
            or_dash(rate.map(|r| format!("{:.0} %", 100.0 * r / measured.ceiling))),
            or_dash(phase.peak.map(|p| format!("{:.2}", p as f64 / 1e9))),
        );
    }
    if let Some(seconds) = step_seconds(preset, measured) {
        println!("a step of `{}`, {}: {seconds:.2} s", args.algo, passes_in_words(&preset.passes));
    }
    if let Some(theirs) = theirs {
        println!("{}", theirs.about);
    }
}

fn to_json(args: &Bench, preset: &Preset, measured: &Measured, theirs: Option<&Theirs>) -> Value {
    let phase = |p: &super::measure::Phase| {
        json!({
            "name": p.name,
            "passes": p.passes,
            "seconds": p.seconds,
            "flops": p.flops,
            "flops_per_second": p.flops.map(|f| f / p.seconds),
            "tokens_per_second": p.tokens.map(|t| t as f64 / p.seconds),
            "peak_bytes": p.peak,
            "peak_of": p.memory,
            "pytorch_seconds": theirs.and_then(|t| t.seconds.get(p.name)),
        })
    };
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
        "matmul_flops_per_second": measured.ceiling,
        "phases": measured.phases.iter().map(phase).collect::<Vec<_>>(),
        "step_seconds": step_seconds(preset, measured),
        "pytorch": theirs.map(|t| t.about.clone()),
    })
}
