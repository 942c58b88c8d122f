//! The section `evaluation`: clips that are generated and scored before and after training.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::weighted_sum::numbered;
use roll_core::{Error, Result, RewardComponent};

/// Clips that the model generates before and after training, each time from the same noise. Frame size, length and
/// frame rate are those of the section `data`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
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
    /// rises while one of these falls: suspect reward hacking.
    pub check: Vec<RewardComponent>,
    /// Conditions that end the run before its last step, checked after each evaluation. `null`: none.
    pub stop_when: Option<StopWhen>,
    /// Prompts whose videos are generated before and after training and at every evaluation, each time from the same
    /// noise, for people to look at: texts, or maps with the keys below. Their size and length are those of the section
    /// `data`; without a size there the picture's, or 16:9, of at most `data.max_pixels`.
    pub prompts: Vec<SamplePrompt>,
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
            _ if self.check.is_empty() => "no check is configured that could fall: name one in `evaluation.check`",
            _ if self.every == 0 => "nothing is evaluated before the last step: say how often with `evaluation.every`",
            _ if self.metadata.is_none() && self.train_samples == 0 => {
                "no clip is evaluated: name some with `evaluation.metadata`"
            }
            _ => return Ok(()),
        };
        Err(Error::config("evaluation.stop_when", problem))
    }

    /// Names of the checks in metrics and figures; a name that occurs twice is numbered.
    pub fn check_labels(&self) -> Vec<String> {
        numbered(self.check.iter().map(|check| check.name.as_str()))
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

/// Makes maps of the texts among `evaluation.prompts`: prompts without pictures.
pub(super) fn normalize(tree: &mut Json) {
    let prompts = tree.pointer_mut("/evaluation/prompts").and_then(Json::as_array_mut);
    for prompt in prompts.into_iter().flatten().filter(|prompt| prompt.is_string()) {
        *prompt = serde_json::json!({ "prompt": prompt.take() });
    }
}

#[cfg(test)]
mod tests {
    use super::super::ConfigLayers;
    use super::*;

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
    fn check_labels_number_repeated_names() {
        let check = serde_json::json!([{"name": "motion"}, {"name": "flicker"}, {"name": "motion"}]);
        let config = read(serde_json::json!({ "check": check })).unwrap();
        assert_eq!(config.check_labels(), ["motion", "flicker", "motion_2"]);
    }

    #[test]
    fn a_prompt_is_a_text_or_a_map() {
        let load = |text: &str| {
            let loaded = ConfigLayers::new().set_text("evaluation.prompts", text, "--set").and_then(|l| l.load(None));
            loaded.map(|loaded| loaded.config.evaluation.prompts).map_err(|e| e.to_string())
        };
        let found = load("[a cat, {prompt: a dog, seed: 3, image: dog.png}]").unwrap();
        assert_eq!(found[0], SamplePrompt { prompt: "a cat".into(), ..SamplePrompt::default() });
        assert_eq!((found[1].seed, found[1].image.as_deref()), (3, Some("dog.png".as_ref())));
        assert!(load("[{seed: 3}]").unwrap_err().contains("prompt"));
        assert!(load("[{prompt: a, sed: 3}]").unwrap_err().contains("sed"));
        assert!(load("[3]").unwrap_err().contains("found 3"));
    }
}
