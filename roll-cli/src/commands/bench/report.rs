//! The result of `roll bench` as a table and as JSON.

use burn_tensor::DType;
use roll_core::{Error, Result};
use serde_json::{Value, json};

use super::measure::{Measurement, Phase, flops};
use super::preset::Preset;
use crate::commands::plan::passes_in_words;

impl Preset<'_> {
    /// Writes the JSON to its file, if one is named. `ceiling` is the rate of the fastest matrix product, in operations
    /// a second. It is measured last, so `None` marks the measurement as incomplete.
    pub fn save(&self, measured: &Measurement, ceiling: Option<f64>) -> Result<()> {
        let Some(path) = self.args.json.as_ref().filter(|path| path.as_os_str() != "-") else { return Ok(()) };
        // Renaming replaces the file as a whole: a reader never finds half of it, even if this process is killed.
        let unfinished = path.with_extension("part");
        let text = format!("{:#}\n", self.to_json(measured, ceiling));
        std::fs::write(&unfinished, text).map_err(Error::file("write", &unfinished))?;
        std::fs::rename(&unfinished, path).map_err(Error::file("write", path))
    }

    /// Prints the table, or the JSON with `--json -`.
    pub fn report(&self, measured: &Measurement, ceiling: f64) -> Result<()> {
        self.save(measured, Some(ceiling))?;
        match &self.args.json {
            Some(path) if path.as_os_str() == "-" => {
                println!("{:#}", self.to_json(measured, Some(ceiling)));
            }
            _ => self.print(measured, ceiling),
        }
        Ok(())
    }

    fn print(&self, measured: &Measurement, ceiling: f64) {
        let (args, facts) = (self.args, self.facts());
        let [height, width] = facts.size;
        println!(
            "{} on {}: {} of {} blocks of width {}, {} frames of {height}x{width}, {} tokens, weights {:?}{}",
            self.name,
            args.backend,
            facts.layers,
            facts.all_layers,
            facts.dim,
            facts.frames,
            facts.tokens,
            facts.dtype,
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
        if let Some(seconds) = measured.step_seconds(&self.passes) {
            println!("a step of `{}`, {}: {seconds:.2} s", args.algo, passes_in_words(&self.passes));
        }
        if let Some(peak) = measured.whole.and_then(|whole| whole.peak) {
            println!("memory of a step: {:.2} GB ({memory})", peak as f64 / 1e9);
        }
        if let Some(rate) = measured.transformer_rate() {
            println!("transformer: {:.3} TFLOP/s, {:.0} % of the fastest product", rate / 1e12, 100.0 * rate / ceiling);
        }
    }

    fn to_json(&self, measured: &Measurement, ceiling: Option<f64>) -> Value {
        let (args, facts) = (self.args, self.facts());
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
        let dtype_name = |dtype: DType| format!("{dtype:?}").to_lowercase();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "preset": self.name,
            "backend": args.backend,
            "dtype": dtype_name(facts.dtype),
            "eight_bits": args.weights_dtype.map(|format| format!("{format:?}").to_lowercase()),
            "fp8_products": args.fp8_products,
            "vae": (!args.without_vae).then(|| dtype_name(self.vae_dtype)),
            "parameters": facts.parameters,
            "layers": facts.layers,
            "all_layers": facts.all_layers,
            "frames": facts.frames,
            "size": facts.size,
            "tokens": facts.tokens,
            "rounds": args.rounds,
            "rounds_done": measured.rounds,
            "complete": ceiling.is_some(),
            "algorithm": args.algo,
            "guided": args.guided,
            "offload": args.offload,
            "keep_attention": args.keep_attention,
            "weight_store": args.weight_store,
            "whole_step": args.whole_step,
            "matmul_flops_per_second": ceiling,
            "transformer_flops_per_second": measured.transformer_rate(),
            "phases": measured.phases.iter().map(phase).collect::<Vec<_>>(),
            "flops": flops(self),
            "step_seconds": measured.step_seconds(&self.passes),
            "peak_bytes": measured.peak(),
        })
    }
}
