//! Which expert starts from which adapter files.

use std::collections::BTreeMap;

use roll_core::{DType, Error, Result};
use roll_external::Fingerprint;

use crate::lora::{Expert, OpenedAdapter, about};
use crate::weights::Checkpoint;

use super::dit::DitConfig;
use super::options::WanOptions;

/// The adapters of each expert, by its name. A file is for the expert that it says, else for the one that is trained.
/// Fails when a file is for an expert that the checkpoint does not have or the configuration does not train.
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

/// The name of an expert in a configuration.
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

/// The network that adapters are trained on, as their files name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// Its kind, its directory and its file.
    pub name: String,
    /// Of its last layer.
    pub fingerprint: String,
}

impl Base {
    /// Of a transformer's weight file.
    pub(super) fn of(file: &Checkpoint, config: &DitConfig) -> Result<Self> {
        // Rounded to bf16, in which copies of the official f32 files are stored.
        let last = file.tensor("head.head.weight")?.to_float(DType::Bf16)?;
        let parts: Vec<_> = file.path().components().rev().take(2).collect();
        let place: Vec<_> = parts.iter().rev().map(|part| part.as_os_str().to_string_lossy()).collect();
        let mut fingerprint = Fingerprint::new("base of an adapter").tensor("head.head.weight", &last).finish();
        fingerprint.truncate(16);
        Ok(Self { name: format!("{} ({})", config.kind(), place.join("/")), fingerprint })
    }

    /// The words for the header of an adapter that is trained on it.
    pub(super) fn words(&self) -> [(String, String); 2] {
        [(about::BASE.into(), self.name.clone()), (about::BASE_FINGERPRINT.into(), self.fingerprint.clone())]
    }

    /// Warns when an adapter was trained on another network.
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
