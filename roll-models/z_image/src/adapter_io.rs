//! Converts the trained parameters to files and back: a LoRA by diffusers' names, or all weights of the transformer.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{Error, ParameterSpec, Result, StateDict, flat, header};
use roll_network::lora::{
    BaseNetwork, Convention, EncodedLora, Layer, Lora, LoraFile, Names, WriteOptions, about, trained_parameters,
};

use crate::dit::Dit;
use crate::lora::split_fused;

/// Name, without extension, of the file of an adapter.
const ADAPTER: &str = "adapter";
/// Name, without extension, of a transformer's weight file.
const WEIGHTS: &str = "diffusion_pytorch_model";

/// Returns the file of the trained part by name; no file if nothing is trained.
pub fn export(dit: &Dit, base: Option<&BaseNetwork>) -> Result<BTreeMap<String, StateDict>> {
    let Some(parameters) = dit.parameters() else { return Ok(BTreeMap::new()) };
    let mut values = vec![0.0; parameters.specs().iter().map(ParameterSpec::len).sum()];
    parameters.read(&mut values)?;
    let mut state = flat::to_state(parameters.specs(), &values)?;
    let name = if dit.trains_adapters() { ADAPTER } else { WEIGHTS };
    let (format_key, format_version) = about::FORMAT;
    let mut entries = BTreeMap::from([(format_key.to_string(), format_version.to_string())]);
    if dit.trains_adapters() {
        let ranks =
            parameters.specs().iter().filter_map(|s| Some((s.name.strip_suffix(".lora_A.weight")?, s.shape[0])));
        entries = about::adapter_entries(ranks, dit.lora_scale());
        let options = WriteOptions { convention: Convention::Diffusers, names: Names::default() };
        let encoded = EncodedLora::new(&to_lora(state, dit.lora_scale()), options, &entries)?;
        (state, entries) = (encoded.state, encoded.metadata);
    }
    entries.extend(base.iter().flat_map(|base| base.metadata()));
    header::put(&mut state, entries)?;
    Ok(BTreeMap::from([(name.to_string(), state)]))
}

/// Loads files that [`export`] returned, or a LoRA of any convention. If a file does not fit, nothing is loaded.
pub fn import(dit: &Dit, files: &BTreeMap<String, StateDict>) -> Result<()> {
    let Some(parameters) = dit.parameters() else { return Ok(()) };
    let name = if dit.trains_adapters() { ADAPTER } else { WEIGHTS };
    // A single file is accepted under any name.
    let only = if files.len() == 1 { files.values().next() } else { None };
    let file = files.get(name).or(only).ok_or_else(|| {
        let found = files.keys().cloned().collect::<Vec<_>>().join(", ");
        Error::Unsupported(format!("the adapter has no file `{name}`; it has: {found}"))
    })?;
    let state = if dit.trains_adapters() {
        let mut lora = LoraFile::from_state(name, file)?.one(None)?;
        split_fused(&mut lora, Path::new(name), dit.config())?;
        trained_parameters(lora, dit.lora_scale())?
    } else {
        file.clone()
    };
    parameters.write(&flat::from_state(parameters.specs(), &state)?)
}

/// Pairs the matrices of each layer. A layer has an alpha unless the alpha equals the rank.
fn to_lora(mut parameters: StateDict, scale: f64) -> Lora {
    let mut lora = Lora::default();
    while let Some((name, down)) = parameters.pop_first() {
        let Some(layer) = name.strip_suffix(".lora_A.weight") else { continue };
        let Some(up) = parameters.remove(&format!("{layer}.lora_B.weight")) else { continue };
        let alpha = (scale != 1.0).then(|| scale * down.shape()[0] as f64);
        lora.layers.insert(layer.to_string(), Layer { down, up, alpha, bias: None });
    }
    lora
}
