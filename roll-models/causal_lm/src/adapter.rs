//! Converts trained parameters to adapter files with PEFT's tensor names, and back.
//!
//! PEFT reads rank and scale (alpha / rank) from a second file, `adapter_config.json`. A `StateDict` is one file, so
//! the contents of the second file are an entry of its header; saving writes them to a file of their own.

use roll_core::{ParameterSpec, Result, StateDict, header};
use roll_network::lora::{about, put_peft_config};

const PREFIX: &str = "base_model.model.";

/// Converts parameters (`model.layers.0.self_attn.q_proj.lora_A.weight`) to the contents of an adapter file. `base` is
/// the path or published name of the model that PEFT loads the adapter into.
pub fn to_file(parameters: StateDict, specs: &[ParameterSpec], scale: f64, base: Option<&str>) -> Result<StateDict> {
    let mut file: StateDict =
        parameters.into_iter().map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor)).collect();
    let ranks = || specs.iter().filter_map(|s| Some((s.name.strip_suffix(".lora_A.weight")?, s.shape[0])));
    let mut entries = about::adapter_entries(ranks(), scale);
    // Programs that read neither header nor `adapter_config.json` take the scale from alphas per layer, or 1 without.
    if scale != 1.0 {
        entries.extend(about::layer_alphas(ranks(), scale));
    }
    header::put(&mut file, entries)?;
    put_peft_config(&mut file, &[("task_type", Some("CAUSAL_LM")), ("base_model_name_or_path", base)])?;
    Ok(file)
}

/// Converts an adapter file to parameters. The adapter's name, which PEFT may insert (`lora_A.default.weight`), is
/// removed.
pub fn from_file(file: &StateDict) -> StateDict {
    let parameter_name = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).replace(".default.weight", ".weight");
    file.iter().map(|(name, tensor)| (parameter_name(name), tensor.clone())).collect()
}
