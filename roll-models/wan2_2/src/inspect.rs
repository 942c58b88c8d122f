//! Describes any weight file for `roll inspect`: format, network, convention.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::Result;
use roll_network::known::{self, NetworkFacts};
use roll_network::lora::{self, LoraFile};
use roll_network::weights::gguf::GgufFile;
use roll_network::weights::{Checkpoint, WeightsError, is_auxiliary};

use crate::components::{Component, dit_config, recognise};
use crate::paths::networks;

/// [`FileDescription::format`] of a GGUF file.
pub const GGUF: &str = "GGUF";

/// Number of keys that are shown of an unknown network.
const SHOWN_KEYS: usize = 5;

/// Contents of a weight file or of a set of shards.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct FileDescription {
    /// The file, or the first of its shards.
    pub path: PathBuf,
    /// `safetensors`, `torch checkpoint` or [`GGUF`].
    pub format: String,
    /// Number of files.
    pub files: usize,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of elements of all tensors.
    pub elements: u64,
    /// Number of tensors of each dtype.
    pub dtypes: BTreeMap<String, usize>,
    /// Name of the network or kind of adapter.
    pub what: String,
    /// Further facts as (name, value), in the order of printing.
    pub details: Vec<(String, String)>,
    /// Metadata of the header: `__metadata__` of safetensors; empty for [`GGUF`].
    pub metadata: BTreeMap<String, String>,
}

/// Describes a weight file, a GGUF file, an index of shards, a directory or a glob. Only headers and the tensors of
/// adapters are read.
///
/// A directory with a whole model, or with the adapters of two experts, has one entry per network. A run directory is
/// described by its newest checkpoint.
pub fn inspect(path: &Path) -> Result<Vec<FileDescription>> {
    if path.is_dir()
        && let Some(newest) = lora::newest_checkpoint(path)?
    {
        return inspect(&newest);
    }
    if path.extension().is_some_and(|extension| extension == "gguf") {
        return Ok(vec![describe_gguf(&GgufFile::open(path)?)]);
    }
    let is_peft_adapter = path.is_dir() && path.join("adapter_config.json").is_file();
    if is_peft_adapter {
        return Ok(vec![describe(Checkpoint::open(path.join("adapter_model.safetensors"))?)?]);
    }
    let found = if path.is_dir() { networks(path).unwrap_or_default() } else { Vec::new() };
    if found.len() > 1 {
        return found.into_iter().map(describe).collect();
    }
    Ok(vec![describe(Checkpoint::open_any(path)?)?])
}

/// Describes one network or adapter.
fn describe(checkpoint: Checkpoint) -> Result<FileDescription> {
    let path = checkpoint.path().to_path_buf();
    let infos: Vec<_> = checkpoint.keys().filter_map(|key| checkpoint.info(key)).collect();
    let mut dtypes = BTreeMap::new();
    infos.iter().for_each(|info| *dtypes.entry(info.stored.clone()).or_default() += 1);
    let elements = infos.iter().map(|info| info.shape.iter().product::<usize>() as u64).sum();
    let format = checkpoint.shards().first().map_or("nothing", |(file, _)| file.format());
    let mut description = FileDescription {
        path: path.clone(),
        format: format.into(),
        files: checkpoint.paths().count(),
        tensors: checkpoint.len(),
        elements,
        dtypes,
        metadata: checkpoint.metadata(),
        ..FileDescription::default()
    };
    if checkpoint.keys().any(lora::is_lora_key) {
        match LoraFile::open(&path) {
            Ok(file) => description.add_lora(&file),
            // An adapter that cannot be used is described with the reason.
            Err(e) => {
                description.what = "adapter that cannot be used here".into();
                description.details.push(("reason".into(), e.to_string()));
            }
        }
        return Ok(description);
    }
    // The keys as they are in the file; recognising translates them.
    let with_file_names = checkpoint.clone();
    match recognise(checkpoint) {
        Ok((component, with_official_names)) => {
            description.what = component.to_string();
            description.add_network(component, &with_official_names, &with_file_names);
        }
        Err(WeightsError::Unrecognised { .. }) => {
            match known::describe(&with_file_names) {
                Some(NetworkFacts { what, details }) => (description.what, description.details) = (what, details),
                None => {
                    description.what = "unknown network".into();
                    let keys = with_file_names.keys().take(SHOWN_KEYS).collect::<Vec<_>>();
                    description.add_detail("keys", keys.join(", "));
                }
            }
            description.add_eight_bits(&with_file_names);
        }
        Err(e) => return Err(e.into()),
    }
    Ok(description)
}

/// Describes a GGUF file.
fn describe_gguf(file: &GgufFile) -> FileDescription {
    let mut dtypes = BTreeMap::new();
    for type_name in file.names().filter_map(|name| file.type_name(name)) {
        *dtypes.entry(type_name).or_default() += 1;
    }
    let shapes = || file.names().filter_map(|name| file.shape(name));
    let mut description = FileDescription {
        path: file.path().to_path_buf(),
        format: GGUF.into(),
        files: 1,
        tensors: file.names().count(),
        elements: shapes().map(|shape| shape.iter().product::<usize>() as u64).sum(),
        dtypes,
        what: "language model".into(),
        ..FileDescription::default()
    };
    let architecture = file.text("general.architecture").unwrap_or_default();
    for (name, key) in [("kind", "general.architecture"), ("model", "general.name")] {
        if let Some(text) = file.text(key) {
            description.add_detail(name, text);
        }
    }
    for (name, key) in [("blocks", "block_count"), ("width", "embedding_length"), ("context", "context_length")] {
        if let Some(number) = file.integer(&format!("{architecture}.{key}")) {
            description.add_detail(name, number.to_string());
        }
    }
    description
}

impl FileDescription {
    fn add_detail(&mut self, name: &str, value: impl Into<String>) {
        self.details.push((name.into(), value.into()));
    }

    /// Adds the facts about a LoRA file.
    fn add_lora(&mut self, file: &LoraFile) {
        self.what = "LoRA".into();
        let names = match file.names {
            lora::Names::Official => "official",
            lora::Names::Diffusers => "diffusers",
        };
        self.add_detail("convention", format!("{}, layers by their {names} names", file.convention));
        for adapter in &file.adapters {
            if let Some(expert) = adapter.target_expert() {
                self.add_detail("expert", expert.to_string());
            }
            let listed = |values: Vec<String>| if values.is_empty() { "none".into() } else { values.join(", ") };
            self.add_detail("layers", adapter.layers.len().to_string());
            self.add_detail("rank", listed(adapter.ranks().iter().map(usize::to_string).collect()));
            let mut scales: Vec<f64> = adapter.layers.values().map(lora::Layer::scale).collect();
            scales.sort_by(f64::total_cmp);
            scales.dedup();
            self.add_detail("alpha / rank", listed(scales.iter().map(f64::to_string).collect()));
            let mut targets: BTreeMap<String, usize> = BTreeMap::new();
            adapter.layers.keys().for_each(|name| *targets.entry(family(name)).or_default() += 1);
            self.add_detail("targets", listed(targets.iter().map(|(name, n)| format!("{name} ({n})")).collect()));
            if !adapter.differences.is_empty() {
                self.add_detail("whole differences", adapter.differences.len().to_string());
            }
            let unknown = adapter.unknown_layers();
            if !unknown.is_empty() {
                self.add_detail("layers that Wan does not have", unknown.join(", "));
            }
        }
    }

    /// Adds the number of weights in eight bits, by their type.
    fn add_eight_bits(&mut self, weights: &Checkpoint) {
        let mut eight_bits: BTreeMap<&str, usize> = BTreeMap::new();
        let scaled = weights.keys().filter(|key| weights.is_in_eight_bits(key)).filter_map(|key| weights.info(key));
        scaled.for_each(|info| *eight_bits.entry(&info.stored).or_default() += 1);
        if !eight_bits.is_empty() {
            let counts: Vec<String> = eight_bits.iter().map(|(name, n)| format!("{n} weights of {name}")).collect();
            self.add_detail("eight bits", format!("{}, with their scales", counts.join(", ")));
        }
    }

    /// Adds the facts about a network, whose checkpoint is given under official names and under those of the file.
    fn add_network(&mut self, component: Component, official: &Checkpoint, file: &Checkpoint) {
        let has_official_names = official.keys().eq(file.keys().filter(|key| !is_auxiliary(key)));
        self.add_detail("names", if has_official_names { "official" } else { "another library's, or wrapped" });
        self.add_eight_bits(official);
        if component != Component::Dit {
            return;
        }
        // `roll inspect` has no configuration, which could name the number of heads.
        let configured_heads = None;
        match dit_config(official, configured_heads) {
            Ok(c) => {
                self.add_detail("kind", c.kind());
                self.add_detail(
                    "blocks",
                    format!("{} of width {}, {} heads, feed-forward {}", c.layers, c.dim, c.heads, c.ffn_dim),
                );
                self.add_detail("channels", format!("{} in, {} out", c.in_channels, c.out_channels));
            }
            Err(e) => self.add_detail("not usable here", e.to_string()),
        }
    }
}

/// Returns the name of a layer with the number of its block replaced by `#`: `blocks.#.ffn.0`.
fn family(layer: &str) -> String {
    let mut parts: Vec<&str> = layer.split('.').collect();
    // Names of two parts, such as `ffn.0`, have no block.
    if let Some(number) = parts.iter_mut().skip(1).find(|p| p.bytes().all(|b| b.is_ascii_digit()))
        && layer.split('.').count() > 2
    {
        *number = "#";
    }
    parts.join(".")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_testing::GgufWriter;

    use super::*;

    #[test]
    fn gguf_files_are_described() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let text = [&5u64.to_le_bytes()[..], b"llama"].concat();
        let file = GgufWriter::default()
            .value("general.architecture", 8, &text)
            .value("llama.block_count", 4, &3u32.to_le_bytes())
            .tensor("x", &[2, 3], 0, &[0; 24])
            .tensor("odd", &[1, 32], 2, &[0; 18]);
        std::fs::write(&path, file.bytes()).unwrap();
        let about = inspect(&path).unwrap().remove(0);
        assert_eq!((about.format.as_str(), about.tensors, about.elements), (GGUF, 2, 38));
        assert_eq!(about.dtypes, [("F32".to_string(), 1), ("Q4_0".into(), 1)].into());
        assert_eq!(about.details, [("kind".to_string(), "llama".to_string()), ("blocks".into(), "3".into())]);
    }
}
