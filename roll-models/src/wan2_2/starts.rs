//! Assigns adapter files to the experts that start from them.

use std::collections::BTreeMap;

use roll_core::{DType, Error, Result};
use roll_external::Fingerprint;

use crate::lora::{Expert, OpenedAdapter, about};
use crate::weights::Checkpoint;

use super::dit::DitConfig;
use super::options::WanOptions;

/// Returns the adapters of each expert by its name. A file is for the expert that it names, or else for the trained
/// expert. Fails if the checkpoint does not have the file's expert or the configuration does not train it.
pub(super) fn assign(
    opened: Vec<OpenedAdapter>,
    options: &WanOptions,
    present: &[&str],
) -> Result<BTreeMap<&'static str, Vec<OpenedAdapter>>> {
    let named = options.named_experts()?;
    let mut starts: BTreeMap<&'static str, Vec<OpenedAdapter>> = BTreeMap::new();
    for adapter in opened {
        let expert = match (adapter.expert, present.contains(&"dit2")) {
            (Some(Expert::Low), false) if !adapter.by_name_alone => {
                let problem = "is an adapter for `dit2`, low_noise; this checkpoint has one expert, `dit`";
                return Err(Error::bad_file(adapter.path, problem));
            }
            (_, false) => "dit",
            (Some(expert), true) => name(expert),
            (None, true) => unlabelled(&adapter, named.as_ref().map(|(_, names)| names.as_slice()))?,
        };
        if let Some((key, names)) = &named
            && present.contains(&"dit2")
            && !names.iter().any(|name| name == expert)
        {
            let said = if expert == "dit" { "`dit`, high_noise" } else { "`dit2`, low_noise" };
            let problem = format!("is an adapter for {said}; `{key}` trains `{}`", names.join(","));
            return Err(Error::bad_file(adapter.path, problem));
        }
        starts.entry(expert).or_default().push(adapter);
    }
    if let Some((_, names)) = named.filter(|_| !starts.is_empty() && present.contains(&"dit2")) {
        for expert in names.iter().filter(|name| !starts.contains_key(name.as_str())) {
            tracing::info!("`{expert}` starts with a new adapter: `model.lora_checkpoint` has none for it");
        }
    }
    Ok(starts)
}

/// The configuration's name of an expert.
pub(super) fn name(expert: Expert) -> &'static str {
    match expert {
        Expert::High => "dit",
        Expert::Low => "dit2",
    }
}

/// The expert of a file that names none.
fn unlabelled(adapter: &OpenedAdapter, named: Option<&[String]>) -> Result<&'static str> {
    let expert = match named.unwrap_or(&["dit2".to_string()]) {
        [one] if one == "dit" => "dit",
        [_] => "dit2",
        _ => {
            let problem = "does not say which expert it is for, and both are trained: name two, `HIGH,LOW`, or a map, \
                           `{dit: HIGH, dit2: LOW}`";
            return Err(Error::bad_file(&adapter.path, problem));
        }
    };
    tracing::info!("{} does not say which expert it is for: it is used for `{expert}`", adapter.path.display());
    Ok(expert)
}

/// The network that adapters are trained on, as named in their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// Kind, directory and file.
    pub name: String,
    /// Fingerprint of the last layer.
    pub fingerprint: String,
}

impl Base {
    /// Describes a transformer's weight file.
    pub(super) fn of(file: &Checkpoint, config: &DitConfig) -> Result<Self> {
        // Rounded to bf16, because copies of the official f32 files are stored in bf16.
        let last = file.tensor("head.head.weight")?.to_float(DType::Bf16)?;
        let parts: Vec<_> = file.path().components().rev().take(2).collect();
        let place: Vec<_> = parts.iter().rev().map(|part| part.as_os_str().to_string_lossy()).collect();
        let mut fingerprint = Fingerprint::new("base of an adapter").tensor("head.head.weight", &last).finish();
        fingerprint.truncate(16);
        Ok(Self { name: format!("{} ({})", config.kind(), place.join("/")), fingerprint })
    }

    /// The header's entries for an adapter that is trained on this network.
    pub(super) fn words(&self) -> [(String, String); 2] {
        [(about::BASE.into(), self.name.clone()), (about::BASE_FINGERPRINT.into(), self.fingerprint.clone())]
    }

    /// Warns if the adapter was trained on another network.
    pub(super) fn compare(&self, adapter: &OpenedAdapter) {
        let said = |word: &str| adapter.header.get(word);
        if said(about::BASE_FINGERPRINT).is_some_and(|found| *found != self.fingerprint) {
            tracing::warn!(
                "{} was trained on another base, {}: on {} it does something else",
                adapter.path.display(),
                said(about::BASE).map_or("which it does not name", String::as_str),
                self.name
            );
        }
    }
}
