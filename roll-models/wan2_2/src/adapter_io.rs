//! Converts the trained parameters of the experts to files and back: adapters, or all weights of a transformer.

use std::collections::BTreeMap;

use roll_core::{Error, ParameterSpec, Result, StateDict, Tensor, flat, header};
use roll_network::lora::{self, BaseNetwork, LoraFile, about};

use super::expert::Expert;

/// Name, without extension, of a transformer's weight file in the official repositories.
pub(super) const EXPERT_FILE: &str = "diffusion_pytorch_model";

/// Prefix of tensor names that ComfyUI and diffusers expect in LoRA files of Wan.
const PREFIX: &str = "diffusion_model.";

/// Number of trained experts.
fn trained_count(experts: &[Expert]) -> usize {
    experts.iter().filter(|e| e.dit.parameters().is_some()).count()
}

/// Name of the file of an expert's adapter or weights.
fn file_name(experts: &[Expert], expert: &Expert) -> String {
    let stem = if expert.trains_adapters { "adapter" } else { EXPERT_FILE };
    match (trained_count(experts), expert.name) {
        (1, _) => stem.into(),
        (_, "dit") => format!("{stem}_high_noise"),
        _ => format!("{stem}_low_noise"),
    }
}

/// Returns the files of all trained experts by name.
pub(super) fn export(experts: &[Expert]) -> Result<BTreeMap<String, StateDict>> {
    let mut files = BTreeMap::new();
    for expert in experts {
        let Some(parameters) = expert.dit.parameters() else { continue };
        let mut values = vec![0.0; parameters.specs().iter().map(ParameterSpec::len).sum()];
        parameters.read(&mut values)?;
        let mut state = flat::to_state(parameters.specs(), &values)?;
        if expert.trains_adapters {
            state = to_file(state, expert.dit.lora_scale());
        }
        let is_one_of_two = experts.len() > 1;
        header::put(&mut state, metadata(expert, is_one_of_two))?;
        files.insert(file_name(experts, expert), state);
    }
    Ok(files)
}

/// Returns the header's entries for the expert's file.
fn metadata(expert: &Expert, is_one_of_two: bool) -> BTreeMap<String, String> {
    let mut entries = if expert.trains_adapters {
        let specs = expert.dit.parameters().map(|parameters| parameters.specs()).unwrap_or_default();
        let ranks = specs.iter().filter_map(|s| Some((s.name.strip_suffix(".lora_A.weight")?, s.shape[0])));
        about::adapter_entries(ranks, expert.dit.lora_scale())
    } else {
        let (format_key, format_version) = about::FORMAT;
        BTreeMap::from([(format_key.to_string(), format_version.to_string())])
    };
    if is_one_of_two {
        entries.insert(about::EXPERT.into(), expert.lora_expert().to_string());
    }
    entries.extend(expert.base.iter().flat_map(BaseNetwork::metadata));
    entries
}

/// Loads files that [`export`] returned. If a file does not fit, nothing is loaded.
pub(super) fn import(experts: &[Expert], files: &BTreeMap<String, StateDict>) -> Result<()> {
    // Pairs of parameters and their new values. All files are read and checked before any parameter is written.
    let mut loaded = Vec::new();
    for expert in experts {
        let Some(parameters) = expert.dit.parameters() else { continue };
        let name = file_name(experts, expert);
        // A single adapter is accepted under any file name.
        let is_single = files.len() == 1 && trained_count(experts) == 1;
        let only_file = if is_single { files.values().next() } else { None };
        let file = files.get(&name).or(only_file).ok_or_else(|| {
            let found = files.keys().cloned().collect::<Vec<_>>().join(", ");
            Error::Unsupported(format!(
                "the adapter has no file `{name}` for expert `{}`; it has: {found}",
                expert.name
            ))
        })?;
        let state = if expert.trains_adapters {
            from_file(&name, file, expert.lora_expert(), expert.dit.lora_scale())?
        } else {
            file.clone()
        };
        loaded.push((parameters.clone(), flat::from_state(parameters.specs(), &state)?));
    }
    for (parameters, values) in loaded {
        parameters.write(&values)?;
    }
    Ok(())
}

/// Renames parameters (`blocks.0.self_attn.q.lora_A.weight`) for a file. Adds an `alpha` per layer, unless the alpha
/// equals the rank: readers of a file without `alpha` use the rank.
fn to_file(parameters: StateDict, scale: f64) -> StateDict {
    let mut file = StateDict::new();
    for (name, tensor) in parameters {
        if scale != 1.0
            && let Some(layer) = name.strip_suffix(".lora_A.weight")
        {
            let rank = tensor.shape()[0] as f64;
            file.insert(format!("{PREFIX}{layer}.alpha"), Tensor::scalar((scale * rank) as f32));
        }
        file.insert(format!("{PREFIX}{name}"), tensor);
    }
    file
}

/// Reads the parameters of an adapter file in any convention; the inverse of [`to_file`]. If the file has adapters for
/// both transformers, reads the adapter for `expert`. `name` is the file's name, for error messages. Fails if the
/// file's scale is not `scale`, or if the file contains more than low-rank layers.
fn from_file(name: &str, file: &StateDict, expert: lora::Expert, scale: f64) -> Result<StateDict> {
    let lora = LoraFile::from_state(name, file)?.one(Some(expert))?;
    lora::trained_parameters(lora, scale)
}
