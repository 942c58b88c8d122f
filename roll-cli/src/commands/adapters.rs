//! Opens the model with the adapters of `--adapter`, which replace those of the configuration.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{BuildContext, Error, Model, Registry, Result, ResultExt};
use roll_train::config::LoadedConfig;
use serde_json::Value as Json;

/// Options that describe an adapter. The file of the adapter holds the same facts, and takes precedence, because the
/// configuration may be that of another run.
const ADAPTER_OPTIONS: [&str; 5] =
    ["trainable_models", "lora_base_model", "lora_target_modules", "lora_rank", "lora_alpha"];

/// Opens the configured model with the sum of `adapters`, each written as `model.lora_checkpoint` takes it. Without
/// `adapters`, the model is opened as it is configured. [`ADAPTER_OPTIONS`] are reset, unless `--set` gave them.
pub fn open_model(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
    adapters: &[String],
) -> Result<Box<dyn Model>> {
    let model_name = &loaded.config.model.name;
    let mut options = loaded.config.model.options.clone();
    if adapters.is_empty() {
        return registry.model(model_name, &options, context);
    }
    if options.contains_key("lora_checkpoint") {
        options.insert("lora_checkpoint".into(), Json::from(adapters));
        for key in ADAPTER_OPTIONS {
            if options.contains_key(key) && loaded.provenance.of(&format!("model.{key}")) != "--set" {
                options.insert(key.into(), Json::Null);
            }
        }
        return registry
            .model(model_name, &options, context)
            .while_doing(|| format!("loading --adapter {}", adapters.join(", ")));
    }
    // A model without the option `lora_checkpoint`: it reads one adapter, in the format that it writes.
    let [path] = adapters else {
        return Err(Error::Unsupported(format!("--adapter: the model `{model_name}` takes one adapter")));
    };
    let mut model = registry.model(model_name, &options, context)?;
    let path = Path::new(path);
    let adapter = roll_network::lora::open_adapter(path)?;
    let adapter_name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    model.import_adapter(&BTreeMap::from([(adapter_name, adapter)]))?;
    Ok(model)
}
