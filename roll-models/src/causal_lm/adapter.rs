//! Adapter files under the names that PEFT reads. The scale is in `adapter_config.json` there, and in the header of
//! the file, for readers that look there.

use roll_core::{ParameterSpec, Result, StateDict, header};

use crate::lora::about;

const PREFIX: &str = "base_model.model.";

/// Parameters (`model.layers.0.self_attn.q_proj.lora_A.weight`) named for a file.
pub fn to_file(parameters: StateDict, specs: &[ParameterSpec], scale: f64) -> Result<StateDict> {
    let mut file: StateDict =
        parameters.into_iter().map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor)).collect();
    let ranks = || specs.iter().filter_map(|s| Some((s.name.strip_suffix(".lora_A.weight")?, s.shape[0])));
    let mut words = about::layers(ranks(), scale);
    if scale != 1.0 {
        words.extend(about::alphas(ranks(), scale));
    }
    header::put(&mut file, words)?;
    Ok(file)
}

/// The reverse; names of adapters called `default` are read too.
pub fn from_file(file: &StateDict) -> StateDict {
    let own = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).replace(".default.weight", ".weight");
    file.iter().map(|(name, tensor)| (own(name), tensor.clone())).collect()
}
