//! Several worlds in one environment. Each group of episodes plays in one of them.

use std::collections::BTreeMap;

use roll_core::{
    BuildContext, ChatRequest, Environment, Error, Observation, Options, Registry, Result, ResultExt, Split, Transition,
};

const NAME: &str = "mixed";

/// Options of the environment `mixed`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MixedOptions {
    /// The worlds by the names that `algo.tags` and metrics use. A world is a map of `name`, the name of an environment,
    /// and the options of that environment.
    #[schemars(extend("x-required" = true))]
    pub worlds: BTreeMap<String, Options>,
}

/// The environment. An episode plays in the world whose index is the seed modulo the number of worlds; see
/// [`Environment::kinds`].
pub struct Mixed {
    names: Vec<String>,
    worlds: Vec<Box<dyn Environment>>,
    /// Index of the world of the current episode.
    current: usize,
}

impl Mixed {
    /// Creates the environment. Its worlds must be environments that are linked into the program.
    pub fn new(options: MixedOptions, context: &BuildContext) -> Result<Self> {
        let registry = Registry::linked()?;
        let (mut names, mut worlds) = (Vec::new(), Vec::new());
        for (tag, mut options) in options.worlds {
            let key = format!("env.worlds.{tag}.name");
            let name = match options.remove("name") {
                Some(serde_json::Value::String(name)) if name != NAME => name,
                Some(other) => {
                    return Err(Error::config(key, format!("expected the name of an environment, found {other}")));
                }
                None => return Err(Error::config(key, "missing: which environment?")),
            };
            let world = registry.environment(&name, &options, context);
            worlds.push(world.while_doing(|| format!("making the world `{tag}` (`env.worlds.{tag}`)"))?);
            names.push(tag);
        }
        if worlds.is_empty() {
            return Err(Error::config("env.worlds", "there is no world; name at least one"));
        }
        Ok(Self { names, worlds, current: 0 })
    }
}

impl Environment for Mixed {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        self.current = (seed % self.worlds.len() as u64) as usize;
        self.worlds[self.current].reset(seed)
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        self.worlds[self.current].step(action)
    }

    fn instructions(&self) -> String {
        self.worlds[self.current].instructions()
    }

    fn kinds(&self) -> Vec<String> {
        self.names.clone()
    }

    fn solved(&self) -> Option<bool> {
        self.worlds[self.current].solved()
    }

    fn enter(&mut self, split: Split, number: u64) -> Result<()> {
        self.worlds.iter_mut().try_for_each(|world| world.enter(split, number))
    }

    fn leave(&mut self) -> Result<()> {
        self.worlds[self.current].leave()
    }

    fn action(&self) -> String {
        self.worlds[self.current].action()
    }

    fn chat(&self) -> Option<ChatRequest> {
        self.worlds[self.current].chat()
    }
}

roll_core::register! {
    Environment, NAME, MixedOptions,
    "Several environments; each group of episodes plays in one of them",
    Mixed::new,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn mixed(worlds: serde_json::Value) -> Result<Mixed> {
        let context = BuildContext::new("flex");
        let options = json!({"worlds": worlds});
        Mixed::new(roll_core::parse_options("env", options.as_object().unwrap())?, &context)
    }

    #[test]
    fn the_seed_says_which_world_it_is() {
        let lake = json!({"name": "frozen_lake", "is_slippery": false});
        let room = json!({"name": "sokoban", "dim_room": [6, 6], "num_boxes": 1});
        let mut mixed = mixed(json!({"Lake": lake, "Room": room})).unwrap();
        assert_eq!(mixed.kinds(), ["Lake", "Room"]);
        for (seed, word) in [(6, "FrozenLake"), (9, "Sokoban"), (8, "FrozenLake")] {
            let text = mixed.reset(seed).unwrap().text;
            assert!(mixed.instructions().contains(word) && text.contains('P'), "{text}");
            assert!(mixed.step("<answer>Up</answer>").unwrap().valid);
        }
    }

    #[test]
    fn invalid_worlds_are_named() {
        let message = |worlds| mixed(worlds).err().unwrap().chain();
        assert!(message(json!({})).contains("env.worlds"));
        assert!(message(json!({"A": {}})).contains("env.worlds.A.name"));
        assert!(message(json!({"A": {"name": "frozen_lak"}})).contains("frozen_lake"));
        assert!(message(json!({"A": {"name": "frozen_lake", "sise": 3}})).contains("`A`"));
        assert!(message(json!({"A": {"name": "mixed"}})).contains("env.worlds.A.name"));
    }
}
