//! The rewards of a configuration, opened as one.

use roll_backends::Backend;
use roll_core::{BuildContext, Error, Kind, Registry, Result, ResultExt, RewardComponent, RewardScorer};

use crate::config::LoadedConfig;
use crate::weighted_sum::WeightedSum;
pub use crate::weighted_sum::{WeightedScorer, numbered};

/// Opens the configured rewards as one scorer; `None` if no reward is configured.
pub fn reward(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
) -> Result<Option<Box<dyn RewardScorer>>> {
    Ok(TrainedReward::open(&loaded.config.reward, registry, context)?.map(|reward| reward.scorer))
}

/// The configured rewards as one scorer, and which of them reads its reference.
pub struct TrainedReward {
    /// The only reward if its weight is 1, otherwise the weighted sum.
    pub scorer: Box<dyn RewardScorer>,
    /// The name of the first reward that reads its reference, if one does.
    pub reference_reader: Option<String>,
}

impl TrainedReward {
    /// Opens the rewards of `components`; `None` if there are no components.
    pub fn open(components: &[RewardComponent], registry: &Registry, context: &BuildContext) -> Result<Option<Self>> {
        let mut parts = scorers(Kind::Reward.section(), components, registry, context)?;
        let reader = parts.iter().find(|(_, scorer)| scorer.reads_reference());
        let reference_reader = reader.map(|(_, scorer)| scorer.name().to_string());
        if parts.is_empty() {
            return Ok(None);
        }
        let needs_no_sum = matches!(parts.as_slice(), [(weight, _)] if *weight == 1.0);
        let scorer: Box<dyn RewardScorer> = if needs_no_sum {
            let (_, scorer) = parts.remove(0);
            scorer
        } else {
            Box::new(WeightedSum::new(parts)?)
        };
        Ok(Some(Self { scorer, reference_reader }))
    }
}

/// Makes the scorers of the list of rewards at the configuration key `key`.
pub fn scorers(
    key: &str,
    components: &[RewardComponent],
    registry: &Registry,
    context: &BuildContext,
) -> Result<Vec<WeightedScorer>> {
    let mut scorers = Vec::with_capacity(components.len());
    for (i, component) in components.iter().enumerate() {
        check_device(&format!("{key}.{i}.device"), component, context)?;
        let scorer = registry.reward(&component.name, &component.options, &component.context(context));
        let scorer = scorer.while_doing(|| format!("setting up {key}.{i} (`{}`)", component.name))?;
        if component.device.is_some() && !scorer.computes_on_device() {
            tracing::warn!(
                "`{key}.{i}.device` has no effect: the reward `{}` has no network in this process",
                component.name
            );
        }
        scorers.push((component.weight, scorer));
    }
    Ok(scorers)
}

/// Fails if this machine lacks the device of a reward, whether or not the reward has a network. Warns if the device is
/// that of the run in any case.
fn check_device(key: &str, component: &RewardComponent, context: &BuildContext) -> Result<()> {
    let Some(name) = &component.device else { return Ok(()) };
    roll_backends::device(name).map_err(|error| Error::config(key, error.chain()))?;
    let backend = Backend::of(name)?;
    if !backend.is_numbered() && Backend::of(&context.backend).is_ok_and(|of_run| of_run == backend) {
        tracing::warn!("`{key}` has no effect: `{backend}` has one device, on which the run computes too");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_of_a_reward_is_checked_also_if_no_network_needs_it() {
        let registry = Registry::linked().unwrap();
        let open = |device: &str| {
            let component = RewardComponent { device: Some(device.into()), ..RewardComponent::named("brightness") };
            scorers("reward", &[component], &registry, &BuildContext::new("flex"))
        };
        assert!(open("flex").is_ok());
        for (device, remedy) in [("flax", "the backends are"), ("flex:1", "has one device")] {
            let message = open(device).err().unwrap().chain();
            assert!(message.contains("`reward.0.device`") && message.contains(remedy), "{message}");
        }
    }

    #[test]
    fn rewards_are_made_from_a_configuration() {
        let component = |weight: f64| RewardComponent {
            weight,
            options: [("target".to_string(), serde_json::json!(0.3))].into_iter().collect(),
            ..RewardComponent::named("brightness")
        };
        let registry = Registry::linked().unwrap();
        let context = BuildContext::new("flex");
        let make = |components: &[RewardComponent]| TrainedReward::open(components, &registry, &context).unwrap();
        assert_eq!(make(&[component(1.0)]).unwrap().scorer.name(), "brightness");
        assert_eq!(make(&[component(1.0), component(0.5)]).unwrap().scorer.name(), "brightness + brightness_2");
        assert!(make(&[]).is_none());
    }
}
