//! Values of a configuration without effect, as told by its components and the sections around them.

use roll_core::{ConfiguredOptions, Kind, OptionNotes, Options, Registry, Result};
use serde_json::Value as Json;

use super::RunConfig;
use super::loaded::LoadedConfig;

impl LoadedConfig {
    /// A sentence for each key that has no effect beside the others; a run prints them once at its start. Fails on a
    /// value that can only be a mistake.
    pub fn without_effect(&self, registry: &Registry) -> Result<Vec<String>> {
        let config = object(serde_json::to_value(&self.config).unwrap_or_default());
        let mut defaults = object(serde_json::to_value(RunConfig::default()).unwrap_or_default());
        let components = components(&config);
        for (section, kind, name) in &components {
            let mut options = registry.find(*kind, name)?.options();
            options.insert("name".into(), name.as_str().into());
            // Of a list, as the rewards are, there is no default.
            if !section.contains('.') {
                defaults.insert(section.clone(), options.into());
            }
        }
        let said = ConfiguredOptions::new(&config, &defaults);
        let mut notes: Vec<String> =
            said.idle(&["training.num_train_epochs"], "`steps` says how long the run is").into_iter().collect();
        if said.value("steps").is_none() {
            notes.clear();
        }
        let schedule = self.config.training.lr_scheduler_type;
        let unread = |option: &&str| !schedule.options().contains(option);
        let options = ["num_cycles", "power", "lr_end", "timescale"].into_iter().filter(unread);
        let options: Vec<String> = options.map(|option| format!("training.lr_scheduler_kwargs.{option}")).collect();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        notes.extend(said.idle(&options, "`training.lr_scheduler_type` is of another shape"));
        let mut asked: Vec<(Kind, &str)> = components.iter().map(|(_, kind, name)| (*kind, name.as_str())).collect();
        asked.sort();
        asked.dedup();
        for (kind, name) in asked {
            // A plugin in the place of a component that is linked in has options of its own.
            if registry.find(kind, name)?.is_linked() {
                for component in OptionNotes::of(kind, name) {
                    notes.extend((component.notes)(&said)?);
                }
            }
        }
        Ok(notes)
    }
}

/// The components that are named: their section, kind and name.
fn components(config: &Options) -> Vec<(String, Kind, String)> {
    let mut found = Vec::new();
    for kind in Kind::ALL {
        let mut add = |section: String, component: &Json| {
            if let Some(name) = component.get("name").and_then(Json::as_str) {
                found.push((section, kind, name.to_string()));
            }
        };
        match config.get(kind.section()) {
            Some(Json::Array(items)) => {
                items.iter().enumerate().for_each(|(i, item)| add(format!("{}.{i}", kind.section()), item));
            }
            Some(component) => add(kind.section().into(), component),
            None => {}
        }
    }
    found
}

fn object(value: Json) -> Options {
    match value {
        Json::Object(map) => map,
        _ => Options::new(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::ConfigLayers;
    use super::*;

    roll_core::inventory::submit! {
        OptionNotes {
            kind: Kind::Strategy,
            name: "single",
            notes: |said| match said.is("exp_name", "a mistake") {
                true => Err(roll_core::Error::config("exp_name", "that is one")),
                false => Ok(said.idle(&["noise_seed"], "a test says so").into_iter().collect()),
            },
        }
    }

    fn notes(set: &[&str]) -> Result<Vec<String>> {
        let registry = Registry::linked()?;
        let layers = set.iter().try_fold(ConfigLayers::new(), |layers, one| layers.set(one))?;
        layers.set("reward=[]")?.load(Some(&registry))?.without_effect(&registry)
    }

    #[test]
    fn the_defaults_say_nothing_in_vain() {
        assert_eq!(notes(&[]).unwrap(), Vec::<String>::new());
        assert_eq!(notes(&["training.num_train_epochs=1", "steps=3"]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_key_without_effect_is_named_once_and_a_mistake_is_an_error() {
        let told = notes(&["noise_seed=3", "steps=3", "training.num_train_epochs=2"]).unwrap();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("`training.num_train_epochs: 2` has no effect"), "{told:?}");
        assert_eq!(told[1], "`noise_seed: 3` has no effect: a test says so");
        assert!(notes(&["training.num_train_epochs=2"]).unwrap().is_empty());
        let told = notes(&["training.lr_scheduler_kwargs.power=2", "training.lr_scheduler_type=cosine"]).unwrap();
        assert!(told.len() == 1 && told[0].contains("`training.lr_scheduler_kwargs.power: 2"), "{told:?}");
        let polynomial = "training.lr_scheduler_type=polynomial";
        assert!(notes(&["training.lr_scheduler_kwargs.power=2", polynomial]).unwrap().is_empty());
        let end = notes(&["training.lr_scheduler_kwargs.lr_end=1", polynomial]).unwrap_err().to_string();
        assert!(end.contains("must be below `training.learning_rate`"), "{end}");
        assert!(notes(&["exp_name=a mistake"]).unwrap_err().to_string().contains("`exp_name`"));
    }
}
