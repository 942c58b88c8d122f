//! Converts trained parameters to adapter files with PEFT's tensor names, and back.
//!
//! PEFT reads rank and scale (alpha / rank) from a second file, `adapter_config.json`. A `StateDict` is one file, so
//! the contents of the second file are an entry of its header; saving writes them to a file of their own.

use roll_core::{ParameterSpec, Result, StateDict, header};
use roll_network::lora::{LANGUAGE_MODEL, NESTED_LANGUAGE_MODELS, about, put_peft_config};

/// The module of transformers that holds the blocks of a language model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Module {
    /// `model`: the model of a language model.
    #[default]
    Model,
    /// `model.language_model`: the part of a vision-language model.
    LanguageModel,
}

const PREFIX: &str = "base_model.model.";

/// Converts parameters (`model.layers.0.self_attn.q_proj.lora_A.weight`) to the contents of an adapter file. `base` is
/// the path or published name of the model that PEFT loads the adapter into, `module` the part of it that is adapted.
pub fn to_file(
    parameters: StateDict,
    specs: &[ParameterSpec],
    scale: f64,
    base: Option<&str>,
    module: Module,
) -> Result<StateDict> {
    let in_file = |name: &str| name_in(module, name);
    let mut file: StateDict =
        parameters.into_iter().map(|(name, tensor)| (format!("{PREFIX}{}", in_file(&name)), tensor)).collect();
    let layers: Vec<(String, usize)> = specs
        .iter()
        .filter_map(|spec| Some((in_file(spec.name.strip_suffix(".lora_A.weight")?), spec.shape[0])))
        .collect();
    let ranks = || layers.iter().map(|(layer, rank)| (layer.as_str(), *rank));
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
    let parameter_name =
        |name: &str| language_name(name.strip_prefix(PREFIX).unwrap_or(name)).replace(".default.weight", ".weight");
    file.iter().map(|(name, tensor)| (parameter_name(name), tensor.clone())).collect()
}

/// Returns the name of a layer of the language model in `module` of other programs.
fn name_in(module: Module, name: &str) -> String {
    match (module, name.strip_prefix(LANGUAGE_MODEL)) {
        (Module::LanguageModel, Some(rest)) => format!("{}{rest}", NESTED_LANGUAGE_MODELS[0]),
        _ => name.into(),
    }
}

/// Returns the name of a layer without the modules that hold a language model in a vision-language model.
fn language_name(name: &str) -> String {
    match NESTED_LANGUAGE_MODELS.iter().find_map(|module| name.strip_prefix(module)) {
        Some(rest) => format!("{LANGUAGE_MODEL}{rest}"),
        None => name.into(),
    }
}
