//! Adapter files: the names under which other programs read a LoRA.

use roll_core::{Error, Result, StateDict, Tensor};

/// Prefix that ComfyUI and diffusers expect in LoRA files of Wan.
const PREFIX: &str = "diffusion_model.";

/// Prefixes and infixes of other writers, which are accepted too.
const FOREIGN_PREFIXES: [&str; 4] = ["base_model.model.", "diffusion_model.", "pipe.dit.", "transformer."];

/// Names parameters (`blocks.0.self_attn.q.lora_A.weight`) for a file. An `alpha` that is not the rank is written out,
/// since readers assume it to be the rank.
pub fn to_file(parameters: StateDict, scale: f64) -> Result<StateDict> {
    let mut file = StateDict::new();
    for (name, tensor) in parameters {
        if let (Some(layer), true) = (name.strip_suffix(".lora_A.weight"), scale != 1.0) {
            let rank = tensor.shape()[0] as f64;
            file.insert(format!("{PREFIX}{layer}.alpha"), Tensor::scalar((scale * rank) as f32));
        }
        file.insert(format!("{PREFIX}{name}"), tensor);
    }
    Ok(file)
}

/// The reverse. Fails when a stored `alpha` asks for another scale than `scale`.
pub fn from_file(file: &StateDict, scale: f64) -> Result<StateDict> {
    let mut parameters = StateDict::new();
    for (name, tensor) in file {
        let mut own = name.as_str();
        for prefix in FOREIGN_PREFIXES {
            own = own.strip_prefix(prefix).unwrap_or(own);
        }
        let own = own.replace(".default.weight", ".weight");
        if let Some(layer) = own.strip_suffix(".alpha") {
            let down = file.iter().find(|(k, _)| k.contains(&format!("{layer}.lora_A.")));
            let rank = down.map_or(1.0, |(_, t)| t.shape().first().copied().unwrap_or(1) as f64);
            let found = f64::from(tensor.item()?) / rank;
            if (found - scale).abs() > 1e-6 * scale.abs() {
                return Err(Error::Unsupported(format!(
                    "the LoRA file was written with alpha / rank = {found}, this configuration has {scale}: \
                     set `lora_alpha` to match"
                )));
            }
            continue;
        }
        parameters.insert(own, tensor.clone());
    }
    Ok(parameters)
}
