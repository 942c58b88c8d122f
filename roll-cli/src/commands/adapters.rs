//! Adapters that a command line names: they replace those of the configuration.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{BuildContext, Error, Model, Registry, Result, ResultExt};
use roll_train::config::LoadedConfig;
use serde_json::Value as Json;

/// Options that describe an adapter. The adapter's file has them too, and takes precedence over the configuration,
/// which may be that of another run.
const ADAPTER_OPTIONS: [&str; 5] =
    ["trainable_models", "lora_base_model", "lora_target_modules", "lora_rank", "lora_alpha"];

/// Opens the configured model with the sum of `adapters`, each written as `model.lora_checkpoint` takes it. Options of
/// an adapter that `--set` gives are kept.
pub fn open_model(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
    adapters: &[String],
) -> Result<Box<dyn Model>> {
    let name = &loaded.config.model.name;
    let mut options = loaded.config.model.options.clone();
    if adapters.is_empty() {
        return registry.model(name, &options, context);
    }
    if options.contains_key("lora_checkpoint") {
        options.insert("lora_checkpoint".into(), Json::from(adapters));
        for key in ADAPTER_OPTIONS {
            if options.contains_key(key) && loaded.provenance.of(&format!("model.{key}")) != "--set" {
                options.insert(key.into(), Json::Null);
            }
        }
        return registry
            .model(name, &options, context)
            .while_doing(|| format!("loading --adapter {}", adapters.join(", ")));
    }
    // A model without the option `lora_checkpoint`: it reads one adapter, in the format that it writes.
    let [path] = adapters else {
        return Err(Error::Unsupported(format!("--adapter: the model `{name}` takes one adapter")));
    };
    let mut model = registry.model(name, &options, context)?;
    let path = Path::new(path);
    let file = roll_network::lora::open_adapter(path)?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    model.import_adapter(&BTreeMap::from([(name, file)]))?;
    Ok(model)
}
