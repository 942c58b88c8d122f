//! A checked configuration, which knows the origin of each value.

use serde_json::{Map, Value as Json};

use super::declared;
use super::provenance::Provenance;
use super::secrets::{self, AsWritten};
use super::yaml::child;
use super::{DeclaredSection, RunConfig};
use roll_core::{BuildContext, Error, Result};

/// One value of a configuration, for listings.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Dotted key: `training.learning_rate`, `reward.0.weight`.
    pub key: String,
    /// The value, as one line of YAML (and JSON).
    pub value: String,
    /// As [`Provenance::of`].
    pub origin: String,
}

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// The values, apart from declared sections.
    pub config: RunConfig,
    /// The declared sections, by name; checked.
    pub(super) sections: Map<String, Json>,
    /// The origin of each value.
    pub provenance: Provenance,
    /// Notes for the user that are not errors.
    pub notes: Vec<String>,
    /// The values that files interpolate from the environment, with the texts of the files. Listings and files have
    /// these texts instead of the values.
    pub(super) from_environment: Vec<AsWritten>,
}

impl LoadedConfig {
    /// The context in which components are made, on one rank: relative paths start from the working directory.
    pub fn build_context(&self) -> BuildContext {
        BuildContext { seed: self.config.seed, ..BuildContext::new(&self.config.backend) }
    }

    /// The values of a declared section.
    pub fn section<S: DeclaredSection>(&self) -> Result<S> {
        match self.sections.get(S::NAME) {
            Some(section) => declared::read(section),
            None => Ok(S::default()),
        }
    }

    /// The value of a key in a declared section; `None` if no section of this name is declared.
    pub(crate) fn declared_value(&self, section: &str, key: &str) -> Option<&Json> {
        self.sections.get(section)?.get(key)
    }

    /// All values as JSON, in the order of the structs' fields.
    pub fn tree(&self) -> Result<Json> {
        let mut tree =
            serde_json::to_value(&self.config).map_err(Error::failed("the configuration cannot be serialised"))?;
        if let Json::Object(tree) = &mut tree {
            tree.extend(self.sections.clone());
        }
        Ok(tree)
    }

    /// All values as YAML, for `config.yaml` of the run directory. Loading it yields the same configuration. A value
    /// that came from an environment variable is written as the interpolation of the variable.
    pub fn resolved_yaml(&self) -> Result<String> {
        serde_saphyr::to_string(&self.tree_as_written()?)
            .map_err(Error::failed("the configuration cannot be written as YAML"))
    }

    /// Every value with its origin, as `roll config` prints them, in the order of the structs' fields. A list of plain
    /// values is one entry.
    pub fn listing(&self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.list("", &self.tree_as_written()?, &mut entries);
        Ok(entries)
    }

    /// All values as JSON, without secrets: see [`secrets::hide`].
    fn tree_as_written(&self) -> Result<Json> {
        let mut tree = self.tree()?;
        let variables =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        secrets::hide(&mut tree, &self.provenance, &self.from_environment, variables);
        Ok(tree)
    }

    /// Adds the entries of `value`, which is the value of `key`, to `entries`.
    fn list(&self, key: &str, value: &Json, entries: &mut Vec<Entry>) {
        match value {
            Json::Object(map) if !map.is_empty() => {
                for (name, value) in map {
                    self.list(&child(key, name), value, entries);
                }
            }
            Json::Array(items) if items.iter().any(Json::is_object) => {
                for (i, value) in items.iter().enumerate() {
                    self.list(&child(key, i), value, entries);
                }
            }
            leaf => {
                let origin = self.origin_of_leaf(key, leaf);
                entries.push(Entry { key: key.into(), value: leaf.to_string(), origin: origin.into() });
            }
        }
    }

    /// The origin of a value that is one entry. For a list, it is the origin of the first item that has one, or else
    /// the origin of the list itself.
    fn origin_of_leaf(&self, key: &str, leaf: &Json) -> &str {
        let items = leaf.as_array().map(Vec::as_slice).unwrap_or_default();
        let origin_of_item = (0..items.len()).find_map(|i| self.provenance.explicit(&child(key, i)));
        origin_of_item.unwrap_or(self.provenance.of(key))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{ConfigLayers, schema};
    use super::*;
    use roll_core::{Factory, OnMissing, Options, Registration, Registry};

    #[derive(Default, serde::Serialize, serde::Deserialize)]
    #[serde(default)]
    struct TestOptions {
        mid_timestep: usize,
        trainable_models: Option<String>,
        on_missing: OnMissing,
    }
    fn options() -> Options {
        roll_core::default_options::<TestOptions>()
    }
    macro_rules! register {
        ($kind:ident, $name:literal) => {
            register!($kind, $name, None);
        };
        ($kind:ident, $name:literal, $rate:expr) => {
            roll_core::inventory::submit! {
                Registration {
                    name: $name, summary: "", origin: "tests", version: "0", is_linked: true, defaults: &options,
                    keys: &roll_core::keys::of_defaults::<TestOptions>,
                    factory: Factory::$kind(&|_, _| Err(Error::Interrupted)),
                    planner: None,
                    learning_rate: $rate,
                    is_default_check: false,
                }
            }
        };
    }
    // The components that the default configuration names are linked in.
    register!(Model, "wan2_1");
    register!(Algorithm, "texts", Some(1e-4));
    register!(Reward, "face_identity");

    fn load(layers: Result<ConfigLayers>) -> Result<LoadedConfig> {
        layers?.load(Some(&Registry::linked()?))
    }
    fn from_file(dir: &Path, text: &str) -> Result<ConfigLayers> {
        let path = dir.join("train.yaml");
        std::fs::write(&path, text).unwrap();
        ConfigLayers::new().file(path)
    }
    fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn an_algorithm_may_have_a_default_learning_rate() {
        let layers = || ConfigLayers::new().set("algo.name=texts").unwrap().set("training.warmup_steps=3").unwrap();
        let rate = |layers| load(Ok(layers)).unwrap().config.training.learning_rate;
        assert_eq!(rate(layers()), 1e-4);
        assert_eq!(rate(ConfigLayers::new().set("algo.name=texts").unwrap()), 1e-4);
        assert_eq!(rate(layers().set("training.learning_rate=0.5").unwrap()), 0.5);
        assert_eq!(rate(ConfigLayers::new()), 1e-5);
    }

    #[test]
    fn whole_weights_have_a_tenth_of_the_learning_rate_of_an_adapter() {
        let rate = |settings: &[&str]| {
            let layers = settings.iter().fold(ConfigLayers::new(), |layers, setting| layers.set(setting).unwrap());
            load(Ok(layers)).unwrap().config.training.learning_rate
        };
        assert_eq!(rate(&["model.lora_rank=0"]), 1e-6);
        assert_eq!(rate(&["algo.name=texts", "model.lora_rank=0"]), 1e-5);
        assert_eq!(rate(&["model.lora_rank=0", "training.learning_rate=3e-5"]), 3e-5);
    }

    #[test]
    fn defaults_load_to_the_default_configuration() {
        let loaded = load(Ok(ConfigLayers::new())).unwrap();
        let mut config = loaded.config.clone();
        config.algo.options.clear();
        config.model.options.clear();
        config.strategy.options.clear();
        assert_eq!(config, RunConfig::default());
        assert_eq!(loaded.sections["data"], schema::DEFAULTS["data"]);
        assert_eq!(loaded.config.algo.options["mid_timestep"], 4);
        assert!(loaded.listing().unwrap().iter().all(|e| e.origin == "default"));
    }

    #[test]
    fn later_layers_override_earlier_ones_and_provenance_names_them() {
        let dir = tempfile::tempdir().unwrap();
        let layers = from_file(dir.path(), "seed: 1\nsteps: 5\ntraining:\n  learning_rate: 1e-3\n  warmup_steps: 3\n");
        let env = [("ROLL_SEED", "2"), ("ROLL_TRAINING__LEARNING_RATE", "1e-4"), ("ROLL_FIXTURES", "x"), ("HOME", "y")];
        let env = env.map(|(k, v)| (k.to_string(), v.to_string()));
        let layers = layers.unwrap().environment(env).unwrap().set("seed=3").unwrap().set("data.fps = 8").unwrap();
        let loaded = load(layers.set("seed=4")).unwrap();
        assert_eq!(loaded.config.seed, 4);
        assert_eq!(loaded.config.steps, Some(5));
        assert_eq!(loaded.config.training.learning_rate, 1e-4);
        assert_eq!(loaded.config.training.warmup_steps, 3);
        assert_eq!(loaded.declared_value("data", "fps"), Some(&8.0.into()));
        assert_eq!(loaded.provenance.of("seed"), "--set");
        assert_eq!(loaded.provenance.of("training.learning_rate"), "environment variable ROLL_TRAINING__LEARNING_RATE");
        assert!(loaded.provenance.of("training.warmup_steps").ends_with("train.yaml:5"));
        assert_eq!(loaded.provenance.of("training.eps"), "default");
        assert!(loaded.provenance.is_set("training") && !loaded.provenance.is_set("strategy"));
    }

    #[test]
    fn over_puts_layers_above_the_given_ones() {
        let own = ConfigLayers::new().set("seed=3").unwrap();
        assert_eq!(own.merge().unwrap().peek("seed"), Some(&3.into()));
        assert_eq!(own.merge().unwrap().peek("steps"), None, "null is not set");
        let lowest = ConfigLayers::new().text("below", "seed: 1\nsteps: 5\nplugins: [a.so]\n").unwrap();
        let merged = own.over(lowest).merge().unwrap();
        assert_eq!(merged.plugins().unwrap(), (vec!["a.so".into()], false));
        let loaded = merged.load(Some(&Registry::linked().unwrap())).unwrap();
        assert_eq!((loaded.config.seed, loaded.config.steps), (3, Some(5)));
        assert_eq!((loaded.provenance.of("seed"), loaded.provenance.of("steps")), ("--set", "below:2"));
    }

    #[test]
    fn rejects_unknown_keys_with_their_place_and_the_nearest_known_key() {
        let dir = tempfile::tempdir().unwrap();
        let found = message(load(from_file(dir.path(), "seed: 1\ntraining:\n  learnin_rate: 1\n")));
        assert!(found.contains("training.learning_rate") && found.contains("train.yaml:3"), "{found}");
        let found = message(load(from_file(dir.path(), "learning_rate: 1\n")));
        assert!(found.contains("`training.learning_rate`"), "{found}");
        let found = message(load(from_file(dir.path(), "algo:\n  name: reward_fl\n  mid_timestp: 1\n")));
        assert!(found.contains("`algo.mid_timestep`") && found.contains("train.yaml:3"), "{found}");
        let found = message(load(ConfigLayers::new().set("sed=1")));
        assert!(found.contains("`seed`") && found.contains("--set"), "{found}");
        let found = message(load(ConfigLayers::new().set("model.name=wan22")));
        assert!(found.contains("`model.name`") && found.contains("wan2_2"), "{found}");
        let env = |name: &str| ConfigLayers::new().environment([(name.to_string(), "1".to_string())]);
        assert!(message(load(env("ROLL_SEEED"))).contains("`seed`"));
        assert!(message(load(env("ROLL_TRAINING__LR"))).contains("training.lr"));
        assert_eq!(load(env("ROLL_SOMETHING_ELSE_ENTIRELY")).unwrap().notes.len(), 1);
    }

    #[test]
    fn errors_of_types_name_key_and_place() {
        let dir = tempfile::tempdir().unwrap();
        for (text, key) in [
            ("training:\n  learning_rate: fast\n", "training.learning_rate"),
            ("seed: -1\n", "seed"),
            ("training: 3\n", "training"),
            ("data:\n  on_bad_sample: ignore\n", "data.on_bad_sample"),
            ("reward:\n  - weight: 2\n", "reward.0.name"),
            ("reward: 7\n", "reward"),
            ("data:\n  height: 0\n  width: 64\n", "data.height"),
            ("data:\n  height: 64\n", "data.height"),
            ("data:\n  metadata: {a: b}\n", "data.metadata"),
            ("training:\n  betas: [0.9]\n", "training.betas"),
            ("training:\n  per_device_train_batch_size: 0\n", "training.per_device_train_batch_size"),
            ("algo: 3\n", "algo"),
        ] {
            let found = message(load(from_file(dir.path(), text)));
            assert!(found.contains(&format!("`{key}`")) && found.contains("train.yaml:"), "{text}: {found}");
        }
    }

    #[test]
    fn all_wrong_keys_and_values_are_listed() {
        let layers =
            ["seed=a", "steps=-1", "data.fps=x", "data.height=0", "algo.mid_timestp=1", "model.mid_timestep=y"];
        let layers = layers.iter().try_fold(ConfigLayers::new(), |layers, set| layers.set(set));
        let Err(Error::Several(errors)) = load(layers) else { panic!("expected several errors") };
        let keys = errors.iter().map(|e| match e {
            Error::Config { key, .. } => key.as_str(),
            other => panic!("{other}"),
        });
        let mut keys: Vec<_> = keys.collect();
        keys.sort();
        assert_eq!(keys, ["algo.mid_timestp", "data.fps", "data.height", "model.mid_timestep", "seed", "steps"]);
    }

    #[test]
    fn a_single_reward_is_a_list_of_one() {
        let dir = tempfile::tempdir().unwrap();
        let layers = from_file(dir.path(), "reward:\n  name: face_identity\n  mid_timestep: 3\n").unwrap();
        let layers = layers.set("reward.weight=0.5").unwrap().set("reward.0.trainable_models=dit").unwrap();
        let loaded = load(layers.set("reward[0].mid_timestep=4")).unwrap();
        let [reward] = &loaded.config.reward[..] else { panic!("{:?}", loaded.config.reward) };
        assert_eq!((reward.name.as_str(), reward.weight), ("face_identity", 0.5));
        assert_eq!(reward.options["mid_timestep"], 4);
        assert_eq!(reward.options["trainable_models"], "dit");
        assert_eq!(reward.options["on_missing"], "skip");
        assert!(loaded.provenance.of("reward.0.name").ends_with("train.yaml:2"));
        assert!(message(ConfigLayers::new().set("reward[4000000000].weight=1")).contains("4000000000"));
    }

    #[test]
    fn resolved_yaml_loads_to_the_same_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let layers = ConfigLayers::new().set("reward={name: face_identity, weight: 2}").unwrap();
        let layers = layers.set("exp_name=2026").unwrap().set("training.learning_rate=2.5e-6").unwrap();
        let layers = layers.set("algo.negative_prompt=yes").unwrap();
        let loaded = load(layers.set("data.metadata=a b/c: d.csv")).unwrap();
        let again = load(from_file(dir.path(), &loaded.resolved_yaml().unwrap())).unwrap();
        assert_eq!((&again.config, &again.sections), (&loaded.config, &loaded.sections));
        let listing = loaded.listing().unwrap();
        assert_eq!(listing[0].key, "seed");
        assert!(listing.iter().any(|e| e.key == "training.betas" && e.value == "[0.9,0.999]"));
    }

    #[test]
    fn a_listing_loads_to_the_same_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let text = "exp_name: '2026'\nsteps: 5\nreward:\n  - {name: face_identity, weight: 2}\n  - name: face_identity\n\
                    training: {learning_rate: 2.5e-6}\nalgo: {name: reward_fl, negative_prompt: 'a: b # c'}\n";
        let loaded = load(from_file(dir.path(), text)).unwrap();
        let lines = loaded.listing().unwrap().into_iter().map(|e| format!("{}: {} # {}\n", e.key, e.value, e.origin));
        let again = load(from_file(dir.path(), &lines.collect::<String>())).unwrap();
        assert_eq!((again.config, again.sections), (loaded.config, loaded.sections));
        let found = message(load(from_file(dir.path(), "training.learnin_rate: 1\n")));
        assert!(found.contains("`training.learning_rate`") && found.contains("train.yaml:1"), "{found}");
        assert!(message(from_file(dir.path(), "training..x: 1\n")).contains("no configuration key"));
    }

    #[test]
    fn null_and_empty_variables_reset_to_the_default() {
        let dir = tempfile::tempdir().unwrap();
        let text = "seed: 1\nsteps: 5\ntraining:\n  learning_rate: 1e-3\n  warmup_steps: 3\nenv: {name: wan2_1}\n";
        let unset = |keys: &[&str]| {
            let layers = from_file(dir.path(), text).unwrap();
            let layers = keys.iter().try_fold(layers, |layers, key| layers.set_text(key, "null", "--unset"));
            load(layers).unwrap().config
        };
        let config = unset(&["seed", "steps", "training.learning_rate", "env"]);
        assert_eq!((config.seed, config.steps, config.env), (42, None, None));
        assert_eq!((config.training.learning_rate, config.training.warmup_steps), (1e-5, 3));
        let config = unset(&["training", "env", "reward", "algo.mid_timestep"]);
        assert_eq!(config.training, super::super::TrainingConfig::default());
        let empty = [("ROLL_STEPS".to_string(), String::new()), ("ROLL_SEED".to_string(), " ".to_string())];
        let layers = from_file(dir.path(), text).unwrap().environment(empty).unwrap();
        let config = load(layers.set_text("env", "null", "--unset")).unwrap().config;
        assert_eq!((config.seed, config.steps), (1, Some(5)));
    }

    #[test]
    fn renaming_a_component_drops_the_options_of_the_file_with_a_note() {
        let dir = tempfile::tempdir().unwrap();
        let text = "reward:\n  - name: face_identity\n    align: 3\n    mid_timestep: 7\n    weight: 2\n";
        let found = message(load(from_file(dir.path(), text)));
        assert!(found.contains("`reward.0.align`"), "{found}");
        let renamed = from_file(dir.path(), text).unwrap().set("reward.name=face_identity").unwrap();
        let loaded = load(Ok(renamed.clone())).unwrap();
        assert!(loaded.notes.len() == 1 && loaded.notes[0].contains("align"), "{:?}", loaded.notes);
        let reward = &loaded.config.reward[0];
        assert_eq!((reward.weight, &reward.options["mid_timestep"]), (2.0, &7.into()));
        assert!(message(load(renamed.set("reward.algin=3"))).contains("algin"));
    }

    #[test]
    fn values_of_text_keys_stay_text() {
        let loaded = load(ConfigLayers::new().set("exp_name=2026")).unwrap();
        assert_eq!(loaded.config.exp_name.as_deref(), Some("2026"));
        let loaded = load(ConfigLayers::new().set_text("model.name", "wan2_1", "--model")).unwrap();
        assert_eq!((loaded.config.model.name.as_str(), loaded.provenance.of("model.name")), ("wan2_1", "--model"));
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(load(from_file(dir.path(), "training:\n  # learning_rate: 1\nalgo:\n")).unwrap().config.seed, 42);
        assert!(message(ConfigLayers::new().set("seed")).contains("key=value"));
        assert!(message(ConfigLayers::new().set("a..b=1")).contains("not a key"));
        let deep = format!("{}=1", "a.".repeat(1_000_000));
        assert!(message(ConfigLayers::new().set(&deep)).len() < 200);
    }
}
