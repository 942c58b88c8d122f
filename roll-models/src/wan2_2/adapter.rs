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

/// The reverse. Fails when the file asks for another scale than `scale`; a layer without `alpha` asks for 1.
pub fn from_file(file: &StateDict, scale: f64) -> Result<StateDict> {
    let mut parameters = StateDict::new();
    let mut alphas = StateDict::new();
    for (name, tensor) in file {
        let own = own_name(name);
        match own.strip_suffix(".alpha") {
            Some(layer) => alphas.insert(layer.to_string(), tensor.clone()),
            None => parameters.insert(own, tensor.clone()),
        };
    }
    for (name, down) in &parameters {
        let Some(layer) = name.strip_suffix(".lora_A.weight") else { continue };
        let rank = down.shape().first().copied().unwrap_or(1) as f64;
        let found = match alphas.get(layer) {
            Some(alpha) => f64::from(alpha.item()?) / rank,
            None => 1.0,
        };
        if (found - scale).abs() > 1e-6 * scale.abs() {
            return Err(Error::Unsupported(format!(
                "the layer `{layer}` of the LoRA file has alpha / rank = {found}, this configuration has {scale}: set \
                 `lora_alpha` to match"
            )));
        }
    }
    Ok(parameters)
}

/// This project's name of a tensor, whoever wrote it.
fn own_name(name: &str) -> String {
    let stripped = FOREIGN_PREFIXES.iter().fold(name, |name, prefix| name.strip_prefix(prefix).unwrap_or(name));
    stripped.replace(".default.weight", ".weight")
}
