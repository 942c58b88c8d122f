//! Notes on options around questions.

use roll_core::{ConfiguredOptions, Error, Kind, OptionNotes, Result};

use super::NAME;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Environment, name: NAME, idle: &[], more: Some(notes) }
}

/// Keys of the agent's messages, whose defaults are those of a game.
const MESSAGES: [&str; 2] = ["algo.agent_template", "algo.agent_system_template"];

/// Notes messages that speak of a game. Fails if a validation would have no question.
fn notes(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let number = |key: &str| config.value(key).and_then(|value| value.as_f64());
    let is_one_file = config.value("env.path").and_then(|path| path.as_str()).is_none_or(|path| path.contains(".json"));
    let holds_out_nothing =
        number("env.validation_share") == Some(0.0) && config.value("env.validation_path").is_none();
    if holds_out_nothing && is_one_file && number("algo.val_batch_size").is_some_and(|episodes| episodes > 0.0) {
        let problem = "0 holds out no question to validate on: raise it, name `env.validation_path`, or set \
                       `algo.val_batch_size: 0`";
        return Err(Error::config("env.validation_share", problem));
    }
    let unchanged: Vec<&str> =
        MESSAGES.into_iter().filter(|key| config.value(key).is_some() && !config.changed(key)).collect();
    Ok(match unchanged[..] {
        [] => Vec::new(),
        _ => vec![format!(
            "questions are asked in the words of a game, the default of `{}`: `algo.agent_template: \"{{observation}}\"` \
             shows the question alone, and `algo.agent_system_template` says how to answer",
            unchanged.join("` and `")
        )],
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Options;
    use serde_json::{Value, json};

    use super::*;

    fn noted(config: Value) -> Result<Vec<String>> {
        let defaults = json!({"algo": {"agent_template": "Turn", "agent_system_template": "Play."}});
        let [config, defaults]: [Options; 2] = [config, defaults].map(|tree| tree.as_object().unwrap().clone());
        OptionNotes::of(Kind::Environment, NAME, &ConfiguredOptions::new(&config, &defaults))
    }

    #[test]
    fn words_of_a_game_are_noted() {
        let algo = |template: &str, system: &str| {
            noted(json!({"algo": {"agent_template": template, "agent_system_template": system}})).unwrap()
        };
        assert!(algo("Turn", "Play.")[0].contains("`algo.agent_template` and `algo.agent_system_template`:"));
        assert!(algo("{observation}", "Play.")[0].contains("default of `algo.agent_system_template`:"));
        assert_eq!(algo("{observation}", ""), Vec::<String>::new());
    }

    #[test]
    fn a_validation_without_questions_is_refused() {
        let refused =
            |env: Value, episodes: u64| noted(json!({"env": env, "algo": {"val_batch_size": episodes}})).is_err();
        let none = json!({"path": "a.jsonl", "validation_share": 0.0});
        assert!(refused(none.clone(), 100) && !refused(none, 0));
        assert!(refused(json!({"source": "sums", "validation_share": 0.0}), 100));
        assert!(!refused(json!({"path": "data", "validation_share": 0.0}), 100));
        assert!(!refused(json!({"path": "a.jsonl", "validation_share": 0.0, "validation_path": "b.jsonl"}), 100));
    }
}
