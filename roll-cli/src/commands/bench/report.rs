//! The result as a table and as JSON.

use burn::tensor::DType;
use roll_core::{Error, Result};
use serde_json::{Value, json};

use super::measure::{Measurement, Phase, flops};
use super::preset::Preset;
use crate::commands::plan::passes_in_words;

/// The result of a measurement, of which more becomes known while it runs.
pub struct Report<'a> {
    /// The measured networks and video.
    pub preset: &'a Preset<'a>,
}

impl Report<'_> {
    /// Writes the JSON to its file, if one is named. `ceiling` is the rate of the fastest product of matrices, in
    /// operations a second; without it the measurement is not complete.
    pub fn save(&self, measured: &Measurement, ceiling: Option<f64>) -> Result<()> {
        let Some(path) = self.preset.args.json.as_ref().filter(|path| path.as_os_str() != "-") else { return Ok(()) };
        // A reader, or the end of this process, finds a whole file.
        let part = path.with_extension("part");
        let text = format!("{:#}\n", self.to_json(measured, ceiling));
        std::fs::write(&part, text).map_err(Error::file("write", &part))?;
        std::fs::rename(&part, path).map_err(Error::file("write", path))
    }

    /// Prints the table, or the JSON to the output.
    pub fn write(&self, measured: &Measurement, ceiling: f64) -> Result<()> {
        self.save(measured, Some(ceiling))?;
        match &self.preset.args.json {
            Some(path) if path.as_os_str() == "-" => {
                println!("{:#}", self.to_json(measured, Some(ceiling)));
            }
            _ => self.print(measured, ceiling),
        }
        Ok(())
    }

    fn print(&self, measured: &Measurement, ceiling: f64) {
        let preset = self.preset;
        let args = preset.args;
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
            if args.whole_step { ", whole steps" } else { "" },
        );
        println!("fastest product of matrices, of random numbers: {:.3} TFLOP/s", ceiling / 1e12);
        let memory = measured.phases.first().map_or("", |p| p.memory);
        println!(
            "{:<20} {:>6} {:>9} {:>10} {:>8} {:>9} {:>10}",
            "phase",
            "passes",
            "seconds",
            "tokens/s",
            "TFLOP/s",
            "of fastest",
            format!("{memory} GB")
        );
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let gigabytes = |bytes: Option<u64>| or_dash(bytes.map(|b| format!("{:.2}", b as f64 / 1e9)));
        for phase in &measured.phases {
            let rate = phase.flops.map(|f| f / phase.seconds);
            println!(
                "{:<20} {:>6} {:>9.3} {:>10} {:>8} {:>9} {:>10}",
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
    }

    fn to_json(&self, measured: &Measurement, ceiling: Option<f64>) -> Value {
        let preset = self.preset;
        let args = preset.args;
        let phase = |p: &Phase| {
            json!({
                "name": p.name,
                "passes": p.passes,
                "seconds": p.seconds,
                "flops": p.flops,
                "flops_per_second": p.flops.map(|f| f / p.seconds),
                "tokens_per_second": p.tokens.map(|t| t as f64 / p.seconds),
                "peak_bytes": p.peak,
                "peak_of": p.memory,
            })
        };
        let name = |dtype: DType| format!("{dtype:?}").to_lowercase();
        let parameters: usize =
            preset.networks.dit.weights().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "preset": preset.name,
            "backend": args.backend,
            "dtype": name(preset.dtype),
            "eight_bits": args.weights_dtype.map(|format| format!("{format:?}").to_lowercase()),
            "vae": (!args.without_vae).then(|| name(args.vae_dtype.0)),
            "parameters": parameters,
            "layers": preset.networks.dit.layers,
            "all_layers": preset.all_layers,
            "frames": preset.frames,
            "size": preset.size,
            "tokens": preset.plan().tokens(),
            "rounds": args.rounds,
            "rounds_done": measured.rounds,
            "complete": ceiling.is_some(),
            "algorithm": args.algo,
            "guided": args.guided,
            "offload": args.offload,
            "weights_on_host": args.weights_on_host,
            "whole_step": args.whole_step,
            "matmul_flops_per_second": ceiling,
            "transformer_flops_per_second": measured.transformer_rate(),
            "phases": measured.phases.iter().map(phase).collect::<Vec<_>>(),
            "flops": flops(preset),
            "step_seconds": measured.step_seconds(&preset.passes),
            "peak_bytes": measured.peak(),
        })
    }
}
