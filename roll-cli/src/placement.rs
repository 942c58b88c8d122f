//! Where a model keeps its frozen weights, when the strategy says it.

use roll_backends::strategy::{OffloadDevice, ZeroOptions};
use roll_core::config::RunConfig;
use roll_core::registry::parse_options;
use roll_core::{Options, Registry, Result};

/// The option by which models are told.
const KEY: &str = "weight_store";
/// Its value when the user leaves it to the strategy.
const AUTO: &str = "auto";

/// The model's options, with what the strategy wants for the frozen weights where the user did not say it.
pub fn model_options(config: &RunConfig, registry: &Registry) -> Result<Options> {
    let mut options = config.model.options.clone();
    let Some(wanted) = wanted(config)? else { return Ok(options) };
    if !registry.find("model", &config.model.name)?.options().contains_key(KEY) {
        tracing::warn!(
            "the model `{}` has no `{KEY}`: its frozen weights stay where they are, whatever `strategy.stage` and \
             `strategy.offload_param` say",
            config.model.name
        );
    } else if options.get(KEY).is_none_or(|value| value == AUTO) {
        options.insert(KEY.into(), wanted.into());
    }
    Ok(options)
}

/// Streamed weights need no memory at all and so come before sharded ones.
fn wanted(config: &RunConfig) -> Result<Option<&'static str>> {
    if config.strategy.name != "zero" {
        return Ok(None);
    }
    let zero: ZeroOptions = parse_options("strategy", &config.strategy.options)?;
    Ok(match (zero.offload_param.device, zero.stage) {
        (OffloadDevice::Cpu | OffloadDevice::Nvme, _) => Some("streamed"),
        (OffloadDevice::None, 3) => Some("sharded"),
        (OffloadDevice::None, _) => None,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::config::Component;

    use super::*;

    fn store(strategy: &str, model: &str) -> Option<String> {
        let options = |json: &str| match serde_json::from_str(json).unwrap() {
            serde_json::Value::Object(map) => map,
            _ => Options::new(),
        };
        let config = RunConfig {
            strategy: Component { name: "zero".into(), options: options(strategy) },
            model: Component { name: "wan2_2".into(), options: options(model) },
            ..RunConfig::default()
        };
        let options = model_options(&config, &Registry::linked().unwrap()).unwrap();
        Some(options.get(KEY)?.as_str()?.to_string())
    }

    #[test]
    fn the_strategy_places_frozen_weights_unless_the_user_does() {
        assert_eq!(store(r#"{"stage": 2}"#, "{}"), None);
        assert_eq!(store(r#"{"stage": 3}"#, "{}").as_deref(), Some("sharded"));
        assert_eq!(store(r#"{"offload_param": {"device": "cpu"}}"#, "{}").as_deref(), Some("streamed"));
        assert_eq!(store(r#"{"stage": 3}"#, r#"{"weight_store": "resident"}"#).as_deref(), Some("resident"));
        assert_eq!(store(r#"{"stage": 3}"#, r#"{"weight_store": "auto"}"#).as_deref(), Some("sharded"));
    }
}
