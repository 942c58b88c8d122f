//! Reads the adapter files of the option `lora_checkpoint` and assigns them to the experts.

use std::collections::BTreeMap;

use roll_core::{BuildContext, Error, Result, ResultExt};
use roll_network::lora::{AdapterWeights, Expert, OpenedAdapter};
use roll_network::weights::Checkpoint;

use super::components::{Component, recognise};
use super::options::WanOptions;
use super::paths::ComponentFiles;

/// Initial adapters by the name of the expert.
pub(super) type AdaptersByExpert = BTreeMap<&'static str, Vec<OpenedAdapter>>;

/// Reads the adapters of `lora_checkpoint`. Returns them by expert, and the names of the experts to train.
pub(super) fn open(
    options: &WanOptions,
    context: &BuildContext,
    files: &ComponentFiles,
) -> Result<(AdaptersByExpert, Vec<String>)> {
    let opened = match &options.lora_checkpoint {
        Some(sources) => sources.open(|path| context.resolve(path)).while_doing(|| "`model.lora_checkpoint`".into())?,
        None => Vec::new(),
    };
    let has_dit2 = files.dit2.is_some();
    opened.iter().try_for_each(check_component)?;
    let adapters = assign(opened, options, has_dit2)?;
    let trained = options.trained_experts(has_dit2, &adapters.keys().copied().collect::<Vec<_>>())?;
    Ok((adapters, trained))
}

/// Fails if the file has all weights of a network other than a transformer.
fn check_component(adapter: &OpenedAdapter) -> Result<()> {
    let AdapterWeights::Full(_) = adapter.weights else { return Ok(()) };
    match recognise(Checkpoint::open(&adapter.path)?) {
        Ok((Component::Dit | Component::Lora, _)) => Ok(()),
        Ok((other, _)) => {
            let problem = format!("expected a LoRA, or the weights of a transformer; found the {other}");
            Err(Error::bad_file(&adapter.path, problem))
        }
        Err(error) => Err(error.into()),
    }
}

/// Assigns adapters to experts. A file is for the expert that it names; if it names none, for the trained expert. Fails
/// if the checkpoint does not have the file's expert or the configuration does not train it.
fn assign(opened: Vec<OpenedAdapter>, options: &WanOptions, has_dit2: bool) -> Result<AdaptersByExpert> {
    // The experts that the configuration trains, with the key that says so.
    let configured = options.named_experts()?;
    let mut adapters = AdaptersByExpert::new();
    for adapter in opened {
        let expert = match expert_in_file(&adapter, has_dit2)? {
            Some(expert) => expert,
            None => default_expert(&adapter, configured.as_ref().map(|(_, trained)| trained.as_slice()))?,
        };
        if let Some((key, trained)) = &configured
            && has_dit2
            && !trained.iter().any(|name| name == expert)
        {
            let described = if expert == "dit" { "`dit`, high_noise" } else { "`dit2`, low_noise" };
            let problem = format!("is an adapter for {described}; `{key}` trains `{}`", trained.join(","));
            return Err(Error::bad_file(adapter.path, problem));
        }
        adapters.entry(expert).or_default().push(adapter);
    }
    if let Some((_, trained)) = configured
        && has_dit2
        && !adapters.is_empty()
    {
        for expert in trained.iter().filter(|name| !adapters.contains_key(name.as_str())) {
            tracing::info!("`{expert}` starts with a new adapter: `model.lora_checkpoint` has none for it");
        }
    }
    Ok(adapters)
}

/// The expert that a file is for: the checkpoint's only expert, or the expert that the file names. `None` if the
/// checkpoint has two experts and the file names neither. Fails if the checkpoint does not have the named expert.
pub(super) fn expert_in_file(adapter: &OpenedAdapter, has_dit2: bool) -> Result<Option<&'static str>> {
    match (adapter.expert, has_dit2) {
        // A file name is only a guess, so it does not make a file fail.
        (Some(Expert::Low), false) if !adapter.expert_from_file_name => {
            let problem = "is an adapter for `dit2`, low_noise; this checkpoint has one expert, `dit`";
            Err(Error::bad_file(&adapter.path, problem))
        }
        (_, false) | (Some(Expert::High), true) => Ok(Some("dit")),
        (Some(Expert::Low), true) => Ok(Some("dit2")),
        (None, true) => Ok(None),
    }
}

/// The expert of a file that names none: the only expert of `trained`, or `dit2` if the configuration names no experts.
/// Fails if several experts are trained.
fn default_expert(adapter: &OpenedAdapter, trained: Option<&[String]>) -> Result<&'static str> {
    let expert = match trained.unwrap_or(&["dit2".to_string()]) {
        [one] if one == "dit" => "dit",
        [_] => "dit2",
        _ => {
            let problem = "names no expert, and both are trained: name two, `HIGH,LOW`, or a map, \
                           `{dit: HIGH, dit2: LOW}`";
            return Err(Error::bad_file(&adapter.path, problem));
        }
    };
    tracing::info!("{} names no expert: it is used for `{expert}`", adapter.path.display());
    Ok(expert)
}
