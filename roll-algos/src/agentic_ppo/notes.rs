//! Options of agentic PPO that do nothing beside others.

use roll_core::{ConfiguredOptions, Kind, OptionNotes, Result};

use super::NAME;
use crate::notes::own_data;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, notes }
}

/// Keys that only one value of another key reads: (the keys, when they are read, why they are not).
type Rule = (&'static [&'static str], fn(&ConfiguredOptions<'_>) -> bool, &'static str);

const RULES: &[Rule] = &[
    (
        &["algo.init_kl_coef", "algo.target_kl", "algo.kl_horizon", "algo.kl_penalty"],
        |said| said.is_on("algo.add_token_level_kl"),
        "no KL is subtracted from rewards; `algo.add_token_level_kl: true` subtracts it, `algo.use_kl_loss` has its own \
         coefficient",
    ),
    (
        &["algo.kl_horizon"],
        |said| !said.is_on("algo.add_token_level_kl") || said.value("algo.target_kl").is_some(),
        "without `algo.target_kl` the coefficient is constant",
    ),
    (
        &["algo.lambd", "algo.critic_warmup", "algo.critic_learning_rate", "algo.critic_epochs", "algo.value_clip"],
        |said| said.is("algo.adv_estimator", "gae"),
        "only the estimator `gae` reads it, which has a critic",
    ),
    (
        &["algo.episode_reward_weight", "algo.step_reward_weight", "algo.states_across_groups"],
        |said| said.is("algo.adv_estimator", "gigpo"),
        "only the estimator `gigpo` reads it",
    ),
    (
        &["algo.step_reward_gamma"],
        |said| ["gigpo", "step_reinforce"].iter().any(|name| said.is("algo.adv_estimator", name)),
        "only the estimators `gigpo` and `step_reinforce` read it",
    ),
    (
        &["algo.enable_old_logprobs_recompute"],
        |said| said.value("algo.async_generation_ratio").and_then(|ratio| ratio.as_u64()) != Some(1),
        "with `algo.async_generation_ratio: 1` old log-probabilities are those that the episodes were written with",
    ),
    (
        &["algo.max_tool_calls"],
        |said| said.value("algo.tools").and_then(|tools| tools.as_array()).is_some_and(|tools| !tools.is_empty()),
        "there are no `algo.tools`",
    ),
    (&["algo.kl_loss_coef"], |said| said.is_on("algo.use_kl_loss"), "`algo.use_kl_loss` is off"),
    (
        &["algo.pg_clip_low", "algo.pg_clip_high"],
        |said| said.is_on("algo.use_pg_clip_range"),
        "`algo.use_pg_clip_range` is off",
    ),
    (&["algo.dual_clip"], |said| said.is_on("algo.dual_clip_loss"), "`algo.dual_clip_loss` is off"),
    (
        &["algo.tis_lower_bound", "algo.tis_upper_bound"],
        |said| said.is("algo.pg_variant", "tis"),
        "`algo.pg_variant` is not `tis`",
    ),
    (
        &["algo.topr_positive_weight", "algo.topr_negative_weight"],
        |said| said.is("algo.pg_variant", "topr"),
        "`algo.pg_variant` is not `topr`",
    ),
    (
        &["algo.cispo_epsilon_low", "algo.cispo_epsilon_high", "algo.cispo_use_unified_mask"],
        |said| said.is("algo.pg_variant", "cispo"),
        "`algo.pg_variant` is not `cispo`",
    ),
    (&["algo.kimi15_tau"], |said| said.is("algo.pg_variant", "kimi15"), "`algo.pg_variant` is not `kimi15`"),
];

fn notes(said: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let unread = RULES.iter().filter(|(_, is_read, _)| !is_read(said));
    let mut notes: Vec<String> = unread.filter_map(|(keys, _, because)| said.idle(keys, because)).collect();
    let number = |key: &str| said.value(key).and_then(|value| value.as_u64());
    if let (Some(answer), Some(episode)) = (number("algo.max_tokens_per_step"), number("algo.sequence_length"))
        && answer >= episode
    {
        notes.push(format!(
            "`algo.max_tokens_per_step: {answer}` bounds nothing: an episode has at most `algo.sequence_length: \
             {episode}` tokens, its prompts included"
        ));
    }
    notes.extend(own_data(said));
    Ok(notes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Options;
    use serde_json::json;

    use super::*;
    use crate::agentic_ppo::AgenticPpoConfig;

    fn told(changes: serde_json::Value) -> Vec<String> {
        let defaults = json!({"algo": AgenticPpoConfig::default(), "data": {"fps": null}, "sample_steps": 25});
        let mut config = defaults.clone();
        for (key, value) in changes.as_object().unwrap() {
            let place = key.split('.').fold(&mut config, |tree, part| &mut tree[part]);
            *place = value.clone();
        }
        let [config, defaults]: [Options; 2] = [config, defaults].map(|tree| tree.as_object().unwrap().clone());
        notes(&ConfiguredOptions::new(&config, &defaults)).unwrap()
    }

    #[test]
    fn every_rule_names_options_that_there_are() {
        let options = json!(AgenticPpoConfig::default());
        for key in RULES.iter().flat_map(|(keys, ..)| keys.iter()) {
            let found = key.split('.').skip(1).try_fold(&options, |tree, part| tree.get(part));
            assert!(key.starts_with("algo.") && found.is_some(), "{key}");
        }
    }

    #[test]
    fn options_that_another_one_turns_off_are_told_with_their_values() {
        assert_eq!(told(json!({})), Vec::<String>::new());
        for (changes, word) in [
            (json!({"algo.init_kl_coef": 0.5}), "`algo.init_kl_coef: 0.5` has no effect"),
            (
                json!({"algo.target_kl": 0.1, "algo.kl_penalty": "k3"}),
                "`algo.target_kl: 0.1` and `algo.kl_penalty: k3`",
            ),
            (json!({"algo.add_token_level_kl": true, "algo.kl_horizon": 3.0}), "without `algo.target_kl`"),
            (json!({"algo.lambd": 0.9}), "only the estimator `gae`"),
            (json!({"algo.value_clip": 0.5, "algo.critic_warmup": 3}), "`algo.value_clip: 0.5`"),
            (json!({"algo.kl_loss_coef": 0.9}), "`algo.use_kl_loss` is off"),
            (json!({"algo.cispo_epsilon_low": 0.9}), "`cispo`"),
            (json!({"algo.max_tool_calls": 9}), "there are no `algo.tools`"),
            (json!({"algo.max_tokens_per_step": 5000}), "bounds nothing"),
            (json!({"data.fps": 8.0, "sample_steps": 5}), "`data.fps: 8.0` and `sample_steps: 5` have no effect"),
        ] {
            let notes = told(changes);
            assert_eq!(notes.len(), 1, "{notes:?}");
            assert!(notes[0].contains(word), "{notes:?}");
        }
    }

    #[test]
    fn options_that_are_read_are_not_told() {
        for changes in [
            json!({"algo.add_token_level_kl": true, "algo.init_kl_coef": 0.5, "algo.target_kl": 0.1}),
            json!({"algo.adv_estimator": "gigpo", "algo.step_reward_weight": 0.5, "algo.step_reward_gamma": 0.5}),
            json!({"algo.adv_estimator": "gae", "algo.critic_epochs": 3, "algo.value_clip": 0.5}),
            json!({"algo.use_kl_loss": true, "algo.kl_loss_coef": 0.5, "sample_steps": 0}),
            json!({"algo.tools": [{"name": "add"}], "algo.max_tool_calls": 9}),
        ] {
            assert_eq!(told(changes), Vec::<String>::new());
        }
    }
}
