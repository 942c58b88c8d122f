//! Adapter files under the names of PEFT. The scale (alpha / rank) is in the header of the file and in its
//! `adapter_config.json`, which is an entry of the header until the file is saved.

use roll_core::{ParameterSpec, Result, StateDict, header};

use crate::lora::{about, put_peft_config};

const PREFIX: &str = "base_model.model.";

/// Converts parameters (`model.layers.0.self_attn.q_proj.lora_A.weight`) to the contents of an adapter file. `base` is
/// the path or published name of the model that PEFT loads the adapter into.
pub fn to_file(parameters: StateDict, specs: &[ParameterSpec], scale: f64, base: Option<&str>) -> Result<StateDict> {
    let mut file: StateDict =
        parameters.into_iter().map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor)).collect();
    let ranks = || specs.iter().filter_map(|s| Some((s.name.strip_suffix(".lora_A.weight")?, s.shape[0])));
    let mut entries = about::adapter_entries(ranks(), scale);
    // Readers assume the scale 1 in a file without an alpha per layer.
    if scale != 1.0 {
        entries.extend(about::layer_alphas(ranks(), scale));
    }
    header::put(&mut file, entries)?;
    put_peft_config(&mut file, &[("task_type", Some("CAUSAL_LM")), ("base_model_name_or_path", base)])?;
    Ok(file)
}

/// Converts an adapter file to parameters. PEFT may insert its name of the adapter
/// (`lora_A.default.weight`).
pub fn from_file(file: &StateDict) -> StateDict {
    let parameter_name = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).replace(".default.weight", ".weight");
    file.iter().map(|(name, tensor)| (parameter_name(name), tensor.clone())).collect()
}
