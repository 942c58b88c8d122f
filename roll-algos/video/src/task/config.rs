//! The sections of runs on clips: `data`, and `evaluation`, whose clips are generated and scored before and after
//! training.

use std::path::PathBuf;

use roll_core::{Error, Kind, Registration, Registry, Result, RewardComponent, inventory};
use roll_train::config::{DeclaredSection, LoadedConfig, SectionType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::rows::DataConfig;

inventory::submit!(SectionType::of::<DataConfig>());
inventory::submit!(SectionType::of::<EvaluationConfig>());

/// The settings of a run on clips.
#[derive(Clone, Debug)]
pub struct ClipConfig {
    /// The section `data`.
    pub data: DataConfig,
    /// The section `evaluation`.
    pub evaluation: EvaluationConfig,
}

impl ClipConfig {
    /// The sections of a configuration.
    pub fn of(loaded: &LoadedConfig) -> Result<Self> {
        Ok(Self { data: loaded.section()?, evaluation: loaded.section()? })
    }
}

impl DeclaredSection for DataConfig {
    const NAME: &'static str = "data";

    fn check_values(&self) -> Result<()> {
        self.check()
    }
}

/// Clips that the model generates before and after training, each time from the same noise. Frame size, length and
/// frame rate are those of the section `data`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluationConfig {
    /// CSV or JSONL file of clips that are not trained on, in the format of `data.metadata`. `null`: no such clips.
    pub metadata: Option<PathBuf>,
    /// Directory that the file names in `evaluation.metadata` are relative to. `null`: the directory of that file.
    pub base_path: Option<PathBuf>,
    /// Upper limit on the number of clips taken from `evaluation.metadata`; the first rows are taken. `null`: all rows.
    #[schemars(range(min = 1))]
    pub samples: Option<usize>,
    /// Number of training clips that are evaluated as well; the first rows of `data.metadata` are taken.
    pub train_samples: usize,
    /// Evaluate also during training, every this many optimizer steps. 0: only before and after training.
    pub every: u64,
    /// Rewards that are measured but never optimised, each with its options. The run warns when the trained reward
    /// rises while one of these falls: suspect reward hacking. `[]` or `null`: none.
    pub check: CheckRewards,
    /// Conditions that end the run before its last step, checked after each evaluation. `null`: none.
    pub stop_when: Option<StopWhen>,
    /// Prompts whose videos are generated before and after training and at every evaluation, each time from the same
    /// noise, for people to look at: texts, or maps with the keys below. Their size and length are those of the section
    /// `data`. If `data` has no size, videos have at most `data.max_pixels`, and the ratio of their picture or, without
    /// a picture, 16:9.
    pub prompts: Vec<SamplePrompt>,
    /// Greatest number of evaluated clips for which a reward that compares videos (`vote`), if it is the only reward,
    /// compares the video before training with the video after training at the end of the run. 0: none.
    pub compare: usize,
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self {
            metadata: None,
            base_path: None,
            samples: None,
            train_samples: 0,
            every: 0,
            check: CheckRewards::default(),
            stop_when: None,
            prompts: Vec::new(),
            compare: 20,
        }
    }
}

/// The rewards of `evaluation.check`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckRewards {
    /// The rewards that are checks by default, apart from those that are trained: `motion`, `sharpness`, and
    /// `first_frame` where each evaluated row and the model have a first frame.
    #[default]
    Auto,
    /// These rewards.
    #[serde(untagged)]
    Listed(Vec<RewardComponent>),
}

impl CheckRewards {
    /// Whether rewards are listed.
    pub(crate) fn are_listed(&self) -> bool {
        matches!(self, Self::Listed(rewards) if !rewards.is_empty())
    }
}

/// Conditions that end a run before its last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StopWhen {
    /// Number of evaluations in a row in which the trained reward rises while a check falls.
    #[schemars(range(min = 1))]
    pub checks_fall: u64,
}

impl EvaluationConfig {
    /// Fails on a condition that could never stop a run; errors name the key.
    pub fn check(&self) -> Result<()> {
        let problem = match self.stop_when {
            None => return Ok(()),
            _ if self.check == CheckRewards::Listed(Vec::new()) => {
                "no check is configured that could fall: name one in `evaluation.check`"
            }
            _ if self.every == 0 => "nothing is evaluated before the last step: say how often with `evaluation.every`",
            _ if !self.names_clips() => "no clip is evaluated: name some with `evaluation.metadata`",
            _ => return Ok(()),
        };
        Err(Error::config("evaluation.stop_when", problem))
    }

    /// The rewards that check the rewards `trained`. There are default checks only where a reward is trained and clips
    /// are evaluated.
    pub(crate) fn checks(&self, trained: &[RewardComponent], registry: &Registry) -> Vec<RewardComponent> {
        match &self.check {
            CheckRewards::Listed(rewards) => rewards.clone(),
            CheckRewards::Auto if trained.is_empty() || !self.names_clips() => Vec::new(),
            CheckRewards::Auto => {
                let rewards = registry.entries().iter().filter(|r| r.factory.kind() == Kind::Reward);
                let checks = rewards.filter(|r| r.is_default_check && trained.iter().all(|other| other.name != r.name));
                let component =
                    |r: &&Registration| RewardComponent { options: r.options(), ..RewardComponent::named(r.name) };
                checks.map(component).collect()
            }
        }
    }

    /// Whether clips are evaluated.
    pub(crate) fn names_clips(&self) -> bool {
        self.metadata.is_some() || self.train_samples > 0
    }
}

/// A prompt whose videos show the progress of a training.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SamplePrompt {
    /// The prompt: a description of the video.
    pub prompt: String,
    /// Picture that the video begins with, for models that take one.
    #[serde(default)]
    pub image: Option<PathBuf>,
    /// Picture that it ends with, likewise (`model.extra_inputs`).
    #[serde(default)]
    pub end_image: Option<PathBuf>,
    /// Key of its noise: `roll generate --seed` with the run's configuration and adapter makes the same video.
    #[serde(default)]
    pub seed: u64,
}

impl DeclaredSection for EvaluationConfig {
    const NAME: &'static str = "evaluation";
    const COMPONENTS: &'static [(&'static str, Kind)] = &[("check", Kind::Reward)];

    /// Turns each text in `evaluation.prompts` into a map with the key `prompt`. `evaluation.check: null` becomes the
    /// empty list.
    fn normalize(section: &mut Json) {
        if let Some(check @ Json::Null) = section.get_mut("check") {
            *check = Json::Array(Vec::new());
        }
        let prompts = section.get_mut("prompts").and_then(Json::as_array_mut);
        for prompt in prompts.into_iter().flatten().filter(|prompt| prompt.is_string()) {
            *prompt = serde_json::json!({ "prompt": prompt.take() });
        }
    }

    fn check_values(&self) -> Result<()> {
        self.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roll_train::config::ConfigLayers;

    fn read(json: serde_json::Value) -> std::result::Result<EvaluationConfig, String> {
        let config: EvaluationConfig = serde_json::from_value(json).map_err(|e| e.to_string())?;
        config.check().map_err(|e| e.to_string()).map(|()| config)
    }

    #[test]
    fn rejects_stop_conditions_that_can_never_hold() {
        let whole = serde_json::json!({
            "metadata": "unseen.csv", "every": 5, "check": [{"name": "motion"}], "stop_when": {"checks_fall": 2},
        });
        assert_eq!(read(whole.clone()).unwrap().stop_when, Some(StopWhen { checks_fall: 2 }));
        for (key, value, part) in [
            ("check", serde_json::json!([]), "`evaluation.check`"),
            ("every", 0.into(), "`evaluation.every`"),
            ("metadata", serde_json::Value::Null, "`evaluation.metadata`"),
            ("stop_when", serde_json::json!({"checks_fall": -1}), "invalid value"),
            ("stop_when", serde_json::json!({}), "checks_fall"),
            ("stop_when", serde_json::json!({"checks_fal": 1}), "unknown field"),
            ("stop_when", 3.into(), "invalid type"),
        ] {
            let mut config = whole.clone();
            config[key] = value;
            let message = read(config).unwrap_err();
            assert!(message.contains(part), "no {part} in: {message}");
        }
    }

    #[test]
    fn checks_are_the_default_ones_that_are_not_trained_or_the_listed_ones() {
        let registry = Registry::linked().unwrap();
        let names = |settings: &[&str], trained: &[&str]| {
            let set = |layers: ConfigLayers, setting: &&str| layers.set(&format!("evaluation.{setting}")).unwrap();
            let loaded = settings.iter().fold(ConfigLayers::new(), set).load(Some(&registry)).unwrap();
            let ClipConfig { evaluation, .. } = ClipConfig::of(&loaded).unwrap();
            let reward = |name: &&str| RewardComponent::named(name);
            let checks = evaluation.checks(&trained.iter().map(reward).collect::<Vec<_>>(), &registry);
            checks.into_iter().map(|check| check.name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&["metadata=a.csv"], &["brightness"]), "first_frame motion sharpness");
        assert_eq!(names(&["train_samples=1", "check=auto"], &["brightness", "motion"]), "first_frame sharpness");
        // Without a reward, and without clips, there is nothing to check.
        assert_eq!(names(&["metadata=a.csv"], &[]), "");
        assert_eq!(names(&["every=2"], &["brightness"]), "");
        for none in ["check=[]", "check=null"] {
            assert_eq!(names(&["metadata=a.csv", none], &["brightness"]), "", "{none}");
        }
        assert_eq!(names(&["check=[{name: motion}]"], &["motion"]), "motion");
        assert_eq!(names(&["check.0.name=flicker"], &[]), "flicker");
        let error = ConfigLayers::new().set("evaluation.check=motion").unwrap().load(Some(&registry)).unwrap_err();
        assert!(error.to_string().contains("expected `auto` or a list, each a map, found `motion`"), "{error}");
    }

    /// `roll-train/src/own_data.rs` reads these by name.
    #[test]
    fn the_section_has_the_keys_that_other_tasks_read() {
        let section = serde_json::to_value(EvaluationConfig::default()).unwrap();
        for key in ["every", "prompts", "train_samples", "check", "stop_when"] {
            assert!(section.get(key).is_some(), "`evaluation.{key}`");
        }
    }

    #[test]
    fn a_prompt_is_a_text_or_a_map() {
        let load = |text: &str| {
            let loaded = ConfigLayers::new().set_text("evaluation.prompts", text, "--set").and_then(|l| l.load(None));
            let section = loaded.and_then(|loaded| loaded.section::<EvaluationConfig>());
            section.map(|section| section.prompts).map_err(|e| e.to_string())
        };
        let found = load("[a cat, {prompt: a dog, seed: 3, image: dog.png}]").unwrap();
        assert_eq!(found[0], SamplePrompt { prompt: "a cat".into(), ..SamplePrompt::default() });
        assert_eq!((found[1].seed, found[1].image.as_deref()), (3, Some("dog.png".as_ref())));
        assert!(load("[{seed: 3}]").unwrap_err().contains("prompt"));
        assert!(load("[{prompt: a, sed: 3}]").unwrap_err().contains("sed"));
        assert!(load("[3]").unwrap_err().contains("found 3"));
    }
}
