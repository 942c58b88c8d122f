//! Adapters that a command line names: they replace those of the configuration.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{BuildContext, Error, Model, Registry, Result, ResultExt};
use roll_train::config::LoadedConfig;
use serde_json::Value as Json;

/// Options that speak of an adapter; its file knows better than the configuration of another run.
const OF_ADAPTERS: [&str; 5] =
    ["trainable_models", "lora_base_model", "lora_target_modules", "lora_rank", "lora_alpha"];

/// The configured model with `adapters` on it, each as `model.lora_checkpoint` takes it; they are added up. Words of
/// `--set` on the adapter are kept.
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
        for key in OF_ADAPTERS {
            if options.contains_key(key) && loaded.provenance.of(&format!("model.{key}")) != "--set" {
                options.insert(key.into(), Json::Null);
            }
        }
        return registry
            .model(name, &options, context)
            .while_doing(|| format!("loading --adapter {}", adapters.join(", ")));
    }
    // Another model, which knows nothing but the files that it wrote.
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
