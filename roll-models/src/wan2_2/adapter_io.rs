//! Saving and loading of trained experts: their adapters, or all of their weights.

use std::collections::BTreeMap;

use roll_core::{Error, ParameterSpec, Result, StateDict, flat, header};

use crate::lora::{self, about};

use super::adapter;
use super::expert::Expert;
use super::initial_adapters::BaseNetwork;

/// Name, without extension, of a transformer's weight file in the official repositories.
pub(super) const EXPERT_FILE: &str = "diffusion_pytorch_model";

/// Names of the files that [`export`] returns.
pub(super) fn files(experts: &[Expert]) -> Vec<String> {
    experts.iter().filter(|e| e.dit.parameters().is_some()).map(|e| file_name(experts, e)).collect()
}

/// Name of the file of an expert's adapter or weights.
fn file_name(experts: &[Expert], expert: &Expert) -> String {
    let trained = experts.iter().filter(|e| e.dit.parameters().is_some()).count();
    let stem = if expert.lora { "adapter" } else { EXPERT_FILE };
    match (trained, expert.name) {
        (1, _) => stem.into(),
        (_, "dit") => format!("{stem}_high_noise"),
        _ => format!("{stem}_low_noise"),
    }
}

fn which(expert: &Expert) -> lora::Expert {
    if expert.name == "dit" { lora::Expert::High } else { lora::Expert::Low }
}

/// Returns the files of all trained experts by name.
pub(super) fn export(experts: &[Expert]) -> Result<BTreeMap<String, StateDict>> {
    let mut files = BTreeMap::new();
    for expert in experts {
        let Some(parameters) = expert.dit.parameters() else { continue };
        let mut values = vec![0.0; parameters.specs().iter().map(ParameterSpec::len).sum()];
        parameters.read(&mut values)?;
        let state = flat::to_state(parameters.specs(), &values)?;
        let state = match expert.lora {
            true => adapter::to_file(state, expert.dit.lora_scale())?,
            false => state,
        };
        let mut state = state;
        header::put(&mut state, about_expert(expert, experts.len() > 1))?;
        files.insert(file_name(experts, expert), state);
    }
    Ok(files)
}

/// Returns the header's entries for the expert's file.
fn about_expert(expert: &Expert, of_two: bool) -> BTreeMap<String, String> {
    let mut words = match expert.lora {
        true => {
            let specs = expert.dit.parameters().map(|parameters| parameters.specs()).unwrap_or_default();
            let ranks = specs.iter().filter_map(|s| Some((s.name.strip_suffix(".lora_A.weight")?, s.shape[0])));
            about::layers(ranks, expert.dit.lora_scale())
        }
        false => BTreeMap::from([(about::FORMAT.0.to_string(), about::FORMAT.1.to_string())]),
    };
    if of_two {
        words.insert(about::EXPERT.into(), which(expert).to_string());
    }
    words.extend(expert.base.iter().flat_map(BaseNetwork::metadata));
    words
}

/// Loads files that [`export`] returned. If one of them does not fit, nothing is loaded.
pub(super) fn import(experts: &[Expert], files: &BTreeMap<String, StateDict>) -> Result<()> {
    // All files are read and checked before any parameter is written.
    let (names, mut parts) = (self::files(experts), Vec::new());
    for expert in experts {
        let Some(parameters) = expert.dit.parameters() else { continue };
        let name = file_name(experts, expert);
        // A single adapter is accepted under any file name.
        let only = files.values().next().filter(|_| files.len() == 1 && names.len() == 1);
        let file = files.get(&name).or(only).ok_or_else(|| {
            let found = files.keys().cloned().collect::<Vec<_>>().join(", ");
            Error::Unsupported(format!(
                "the adapter has no file `{name}` for expert `{}`; it has: {found}",
                expert.name
            ))
        })?;
        let state = match expert.lora {
            true => adapter::from_file(&name, file, which(expert), expert.dit.lora_scale())?,
            false => file.clone(),
        };
        parts.push((parameters.clone(), flat::from_state(parameters.specs(), &state)?));
    }
    for (parameters, values) in parts {
        parameters.write(&values)?;
    }
    Ok(())
}
