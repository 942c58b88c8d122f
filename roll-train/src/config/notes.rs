//! Notes about keys that have no effect because of other keys. The tables of such keys are declared by each component
//! for its options, and here for the sections that every configuration has.

use std::collections::BTreeSet;

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Options, Registry, Result, When};
use serde_json::Value as Json;

use super::loaded::LoadedConfig;
use super::schema::DEFAULTS;

/// Keys outside of components, and when they have no effect.
const IDLE: &[IdleKeys] = &[
    IdleKeys {
        keys: &["training.num_train_epochs"],
        when: When::IsNot("steps", &["null"]),
        because: "`steps` says how long the run is",
    },
    IdleKeys {
        keys: &["training.warmup_steps"],
        when: When::Is("training.lr_scheduler_type", &["constant"]),
        because: "`training.lr_scheduler_type` is `constant`; `constant_with_warmup` warms up",
    },
    only_for(&["training.lr_scheduler_kwargs.num_cycles"], &["cosine", "cosine_with_restarts"]),
    only_for(&["training.lr_scheduler_kwargs.power", "training.lr_scheduler_kwargs.lr_end"], &["polynomial"]),
    only_for(&["training.lr_scheduler_kwargs.timescale"], &["inverse_sqrt"]),
];

/// Options that only the learning-rate schedules `schedules` read.
const fn only_for(keys: &'static [&'static str], schedules: &'static [&'static str]) -> IdleKeys {
    let because = "`training.lr_scheduler_type` is of another shape";
    IdleKeys { keys, when: When::IsNot("training.lr_scheduler_type", schedules), because }
}

impl LoadedConfig {
    /// A sentence for each key that is set and has no effect because of other keys. Fails on a value that can only be a
    /// mistake.
    pub fn without_effect(&self, registry: &Registry) -> Result<Vec<String>> {
        let config = object(self.tree()?);
        let mut defaults = object(DEFAULTS.clone());
        let mut components = BTreeSet::new();
        for kind in Kind::ALL {
            let section = config.get(kind.section());
            match section.and_then(Json::as_array) {
                // Components in a list have no defaults in `defaults`, whose keys have no indices.
                Some(list) => components.extend(list.iter().filter_map(component_name).map(|name| (kind, name))),
                None => {
                    let Some(name) = section.and_then(component_name) else { continue };
                    let mut options = registry.find(kind, name)?.options();
                    options.insert("name".into(), name.into());
                    defaults.insert(kind.section().into(), options.into());
                    components.insert((kind, name));
                }
            }
        }
        let configured = ConfiguredOptions::new(&config, &defaults);
        let mut notes = configured.idle(IDLE);
        for (kind, name) in components {
            // The tables of linked components do not apply to a plugin's component of the same name.
            if registry.find(kind, name)?.is_linked {
                notes.extend(OptionNotes::of(kind, name, &configured)?);
            }
        }
        Ok(notes)
    }
}

/// The name of a component.
fn component_name(component: &Json) -> Option<&str> {
    component.get("name")?.as_str()
}

/// The keys and values of a JSON object; none for any other JSON value.
fn object(tree: Json) -> Options {
    match tree {
        Json::Object(map) => map,
        _ => Options::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::ConfigLayers;
    use super::*;

    roll_core::inventory::submit! {
        OptionNotes {
            kind: Kind::Strategy,
            name: "single",
            idle: &[IdleKeys { keys: &["noise_seed"], when: When::Always, because: "a test says so" }],
            more: Some(|config| match config.value("exp_name") {
                Some(name) if name == "a mistake" => Err(roll_core::Error::config("exp_name", "that is one")),
                _ => Ok(Vec::new()),
            }),
        }
    }

    fn notes(set: &[&str]) -> Result<Vec<String>> {
        let registry = Registry::linked()?;
        let layers = set.iter().try_fold(ConfigLayers::new(), |layers, one| layers.set(one))?;
        layers.set("reward=[]")?.load(Some(&registry))?.without_effect(&registry)
    }

    #[test]
    fn defaults_have_no_idle_keys() {
        assert_eq!(notes(&[]).unwrap(), Vec::<String>::new());
        assert_eq!(notes(&["training.num_train_epochs=1", "steps=3"]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn notes_each_idle_key_once_and_fails_on_mistakes() {
        let found = notes(&["noise_seed=3", "steps=3", "training.num_train_epochs=2"]).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("`training.num_train_epochs: 2` has no effect"), "{found:?}");
        assert_eq!(found[1], "`noise_seed: 3` has no effect: a test says so");
        assert!(notes(&["training.num_train_epochs=2"]).unwrap().is_empty());
        let found = notes(&["training.lr_scheduler_kwargs.power=2", "training.lr_scheduler_type=cosine"]).unwrap();
        assert!(found.len() == 1 && found[0].contains("`training.lr_scheduler_kwargs.power: 2"), "{found:?}");
        let polynomial = "training.lr_scheduler_type=polynomial";
        assert!(notes(&["training.lr_scheduler_kwargs.power=2", polynomial]).unwrap().is_empty());
        let end = notes(&["training.lr_scheduler_kwargs.lr_end=1", polynomial]).unwrap_err().to_string();
        assert!(end.contains("must be below `training.learning_rate`"), "{end}");
        let found = notes(&["training.warmup_steps=3"]).unwrap();
        assert!(found.len() == 1 && found[0].contains("`constant_with_warmup` warms up"), "{found:?}");
        assert!(notes(&["training.warmup_steps=3", "training.lr_scheduler_type=cosine"]).unwrap().is_empty());
        assert!(notes(&["exp_name=a mistake"]).unwrap_err().to_string().contains("`exp_name`"));
    }
}
