//! The network that an adapter is trained on, as the header of the adapter's file describes it ([`BaseNetwork`]).

use std::path::Path;

use roll_core::{DType, Result, Tensor};
use roll_external::Fingerprint;

use super::{OpenedAdapter, about};
use crate::weights::Checkpoint;

/// Length of a base network's fingerprint in adapter files, in hexadecimal digits.
const FINGERPRINT_DIGITS: usize = 16;

/// The network that adapters are trained on, as their files describe it.
pub struct BaseNetwork {
    /// Kind of network, and the last two parts of the file's path.
    name: String,
    /// Fingerprint of the last layer.
    fingerprint: String,
    /// The LoRAs of `base_lora` in it.
    loras: Option<String>,
}

impl BaseNetwork {
    /// Describes the weight file of a network. `kind` is its name for people, `key` a weight of its last layer, and
    /// `loras` are the names of the LoRAs that are merged into it. Fails if the file does not have the weight.
    pub fn of(file: &Checkpoint, kind: &str, key: &str, loras: Option<String>) -> Result<Self> {
        Self::of_tensor(file.path(), kind, key, file.tensor(key)?, loras)
    }

    /// Like [`BaseNetwork::of`], with the path of the file and the value of the weight.
    pub fn of_tensor(path: &Path, kind: &str, key: &str, value: Tensor, loras: Option<String>) -> Result<Self> {
        // Rounded to bf16, because the official files are f32 and many copies of them bf16.
        let last_layer = value.to_float(DType::Bf16)?;
        let last_parts: Vec<_> = path.components().rev().take(2).collect();
        let short_path: Vec<_> = last_parts.iter().rev().map(|part| part.as_os_str().to_string_lossy()).collect();
        let mut fingerprint = Fingerprint::new("base of an adapter").tensor(key, &last_layer).finish();
        fingerprint.truncate(FINGERPRINT_DIGITS);
        Ok(Self { name: format!("{kind} ({})", short_path.join("/")), fingerprint, loras })
    }

    /// The header's entries for an adapter that is trained on this network.
    pub fn metadata(&self) -> impl Iterator<Item = (String, String)> {
        let entries = [
            (about::BASE, Some(&self.name)),
            (about::BASE_FINGERPRINT, Some(&self.fingerprint)),
            (about::BASE_LORA, self.loras.as_ref()),
        ];
        entries.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?.clone())))
    }

    /// Warns if the adapter was trained on another network.
    pub fn warn_if_other(&self, adapter: &OpenedAdapter) {
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
