//! Reads the adapter files of the option `lora_checkpoint` and assigns them to the experts; compares the base networks
//! that adapter files name ([`BaseNetwork`]).

use std::collections::BTreeMap;

use roll_core::{BuildContext, DType, Error, Result, ResultExt};
use roll_external::Fingerprint;
use roll_network::lora::{AdapterWeights, Expert, OpenedAdapter, about};
use roll_network::weights::Checkpoint;

use super::components::{Component, recognise};
use super::dit::DitConfig;
use super::options::WanOptions;
use super::paths::ComponentFiles;

/// Length of a base network's fingerprint in adapter files, in hexadecimal digits.
const FINGERPRINT_DIGITS: usize = 16;

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

/// The network that adapters are trained on, as their files describe it.
pub(super) struct BaseNetwork {
    /// Kind of network, and the last two parts of the file's path.
    name: String,
    /// Fingerprint of the last layer.
    fingerprint: String,
    /// The LoRAs of `base_lora` in it.
    loras: Option<String>,
}

impl BaseNetwork {
    /// Describes a transformer's weight file.
    pub(super) fn of(file: &Checkpoint, config: &DitConfig, loras: Option<String>) -> Result<Self> {
        // Rounded to bf16, because the official files are f32 and many copies of them bf16.
        let last_layer = file.tensor("head.head.weight")?.to_float(DType::Bf16)?;
        let last_parts: Vec<_> = file.path().components().rev().take(2).collect();
        let short_path: Vec<_> = last_parts.iter().rev().map(|part| part.as_os_str().to_string_lossy()).collect();
        let mut fingerprint = Fingerprint::new("base of an adapter").tensor("head.head.weight", &last_layer).finish();
        fingerprint.truncate(FINGERPRINT_DIGITS);
        Ok(Self { name: format!("{} ({})", config.kind(), short_path.join("/")), fingerprint, loras })
    }

    /// The header's entries for an adapter that is trained on this network.
    pub(super) fn metadata(&self) -> impl Iterator<Item = (String, String)> {
        let entries = [
            (about::BASE, Some(&self.name)),
            (about::BASE_FINGERPRINT, Some(&self.fingerprint)),
            (about::BASE_LORA, self.loras.as_ref()),
        ];
        entries.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?.clone())))
    }

    /// Warns if the adapter was trained on another network.
    pub(super) fn warn_if_other(&self, adapter: &OpenedAdapter) {
        let (trained_with, configured) = (adapter.header.get(about::BASE_LORA), self.loras.as_ref());
        if adapter.header.contains_key(about::BASE_FINGERPRINT) && trained_with != configured {
            let name_or_none = |loras: Option<&String>| loras.map_or("none", String::as_str).to_string();
            tracing::warn!(
                "{} was trained with the base LoRA {}; `model.base_lora` has {}: set the key to match, unless the weights \
                 have that LoRA merged in",
                adapter.path.display(),
                name_or_none(trained_with),
                name_or_none(configured)
            );
        }
        let Some(found) = adapter.header.get(about::BASE_FINGERPRINT) else { return };
        if *found == self.fingerprint {
            return;
        }
        let base = adapter.header.get(about::BASE).map_or("which it does not name", String::as_str);
        tracing::warn!(
            "{} was trained on another base, {base} with the fingerprint {found}: on {} with the fingerprint {} it does \
             something else",
            adapter.path.display(),
            self.name,
            self.fingerprint
        );
    }
}
