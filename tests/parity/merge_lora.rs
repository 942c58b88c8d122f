//! LoRA files of five conventions merged into one base.

use roll_core::{DType, StateDict, Tensor};
use roll_network::lora::{LoraFile, MergeOptions, merge_lora};
use roll_network::weights::Checkpoint;
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    rank: usize,
    alpha_scale: f64,
    network_alpha: f64,
}

/// File of each convention, and whether it says `alpha`.
const FILES: [(&str, bool); 5] = [
    ("lora_peft_default", false),
    ("lora_diffsynth", false),
    ("lora_comfy_diffusion_model", false),
    ("lora_comfy_down_up_alpha", true),
    ("lora_kohya", true),
];

/// Steps of bf16 (8 bits) between values of the reference, which rounds factors, product and sum, and ours, rounded
/// once: one of the sum's own, and those of product and base, which are no larger than a few times the sum.
const BF16_STEPS: f64 = 8.0;

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    let base = Checkpoint::open(case.dir.join("base.safetensors"))?;
    let out = tempfile::tempdir()?;
    let merge = |name: &str, strength: f64, dtype: Option<DType>| -> Outcome<StateDict> {
        let lora = LoraFile::open(case.dir.join(format!("{name}.safetensors")))?.one(None)?;
        let to = out.path().join(format!("{name}.safetensors"));
        let options = MergeOptions { strength, dtype, allow_missing: false };
        merge_lora(&base, &lora, &to, &options, &mut |_| {})?;
        Ok(Checkpoint::open(&to)?.all()?)
    };
    let names = report.names();
    for (file, says_alpha) in FILES {
        let own = if says_alpha { config.network_alpha / config.rank as f64 } else { 1.0 };
        for (group, scale) in [
            ("merged.scale1.", 1.0),
            ("merged.scale_alpha.", config.alpha_scale),
            ("merged.network_alpha.", config.network_alpha / config.rank as f64),
        ] {
            let merged = merge(file, scale / own, None)?;
            for name in names.iter().filter(|n| n.starts_with(group)) {
                let tensor = merged.get(&name[group.len()..]).ok_or_else(|| format!("no tensor for `{name}`"))?;
                report.compare(name, tensor);
            }
            changed(&mut report, file, &base.all()?, &merged);
        }
    }
    half(&mut report, &names, &merge(FILES[0].0, 1.0, Some(DType::Bf16))?)?;
    let kept = merge(FILES[0].0, 1.0, None)?;
    let untouched = kept["patch_embedding.weight"].dtype() == DType::F32;
    report.compare_value("merged.bf16.patch_embedding.weight_dtype_is_untouched_f32", f64::from(u8::from(untouched)));
    Ok(report)
}

/// Every layer of the LoRA is changed, and nothing else.
fn changed(report: &mut Report, file: &str, base: &StateDict, merged: &StateDict) {
    report.check(base.keys().eq(merged.keys()), || format!("{file}: other tensors than the base"));
    for (key, before) in base {
        let is_target = key.starts_with("blocks.") && key.ends_with(".weight") && !key.contains("norm");
        let differs = merged.get(key).is_none_or(|after| after.as_bytes() != before.as_bytes());
        report.check(differs == is_target, || format!("{file}: `{key}` changed: {differs}"));
    }
}

/// The reference rounds the product to bf16 before it adds; here the sum is rounded once, so that only closeness can be
/// asked for.
fn half(report: &mut Report, names: &[String], merged: &StateDict) -> Outcome {
    for name in names.iter().filter(|n| n.starts_with("merged.bf16.blocks.")) {
        let (expected, found) = (report.get(name)?.clone(), &merged[&name["merged.bf16.".len()..]]);
        let largest = |t: &Tensor| t.to_f32_vec().iter().fold(0f32, |m, v| m.max(v.abs()));
        let step = f64::from(largest(&expected)) / 256.0;
        let error = expected.to_f32_vec().iter().zip(found.to_f32_vec()).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        report.check(f64::from(error) <= BF16_STEPS * step && found.dtype() == DType::Bf16, || {
            format!("{name}: differs by {error} from the reference, where a step of bf16 is {step}")
        });
        report.leave_out(name, "the reference rounds three times, this once");
    }
    Ok(())
}
