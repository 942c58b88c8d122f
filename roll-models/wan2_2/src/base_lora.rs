//! Merges the LoRAs of the option `base_lora` into the frozen weights of the transformers, whenever the weights are
//! read.

use std::collections::BTreeMap;

use roll_core::{BuildContext, Error, Result, ResultExt};
use roll_network::lora::{AdapterWeights, LoraOfFile, OpenedAdapter, merged_on_read, names_of};

use super::initial_adapters::expert_in_file;
use super::options::WanOptions;
use super::paths::ComponentFiles;

/// Merges the LoRAs of `base_lora` into the transformers of `files`. Returns the names of the LoRAs by expert.
pub(super) fn merge(
    options: &WanOptions,
    context: &BuildContext,
    files: &mut ComponentFiles,
) -> Result<BTreeMap<&'static str, String>> {
    let Some(sources) = &options.base_lora else { return Ok(BTreeMap::new()) };
    let opened = sources.open(|path| context.resolve(path));
    opened.and_then(|adapters| merge_all(adapters, files)).while_doing(|| "`model.base_lora`".into())
}

/// Merges the opened `adapters` into the transformers of `files`. Returns the names of the LoRAs by expert.
fn merge_all(adapters: Vec<OpenedAdapter>, files: &mut ComponentFiles) -> Result<BTreeMap<&'static str, String>> {
    let mut by_expert: BTreeMap<&'static str, Vec<LoraOfFile>> = BTreeMap::new();
    for adapter in adapters {
        let expert = expert_in_file(&adapter, files.dit2.is_some())?;
        let AdapterWeights::Lora(lora) = adapter.weights else {
            let problem = "holds all weights of a network and no LoRA: name it in `model.model_paths`";
            return Err(Error::bad_file(adapter.path, problem));
        };
        let Some(expert) = expert else {
            let problem = "names no expert: name a LoRA for each, `HIGH,LOW` or `{dit: HIGH, dit2: LOW}`; for the same \
                           one on both, name it twice";
            return Err(Error::bad_file(adapter.path, problem));
        };
        by_expert.entry(expert).or_default().push((lora, adapter.strength, adapter.path));
    }
    for (expert, file) in [("dit", Some(&mut files.dit)), ("dit2", files.dit2.as_mut())] {
        let (Some(file), Some(loras)) = (file, by_expert.get_mut(expert)) else { continue };
        // Some LoRA files write the names of layers without dots.
        loras.iter_mut().for_each(|(lora, ..)| lora.resolve(file.keys()));
        *file = merged_on_read(file.clone(), loras)?;
    }
    Ok(by_expert.into_iter().map(|(expert, loras)| (expert, names_of(&loras))).collect())
}
