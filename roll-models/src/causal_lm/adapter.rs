//! Adapter files under the names that PEFT reads. The scale stands in `adapter_config.json` there, not in the file.

use roll_core::StateDict;

const PREFIX: &str = "base_model.model.";

/// Parameters (`model.layers.0.self_attn.q_proj.lora_A.weight`) named for a file.
pub fn to_file(parameters: StateDict) -> StateDict {
    parameters.into_iter().map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor)).collect()
}

/// The reverse; names of adapters called `default` are read too.
pub fn from_file(file: &StateDict) -> StateDict {
    let own = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).replace(".default.weight", ".weight");
    file.iter().map(|(name, tensor)| (own(name), tensor.clone())).collect()
}
