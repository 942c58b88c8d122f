//! Passes of a step, for `roll plan`.

use roll_core::parse_options;
use roll_core::plan::{Passes, TextPass};
use roll_core::{Options, Result};

use super::config::{AgenticPpoConfig, Estimator};

/// The largest passes of a step of a run with these options.
pub(super) fn passes(options: &Options) -> Result<Passes> {
    let config: AgenticPpoConfig = parse_options("algo", options)?;
    config.check()?;
    let calls = if config.tools.is_empty() { 0 } else { config.max_tool_calls };
    // Answers of an episode: in each turn one answer to the environment, after the answers with calls of tools.
    let answers = config.max_actions_per_traj.saturating_mul(calls.saturating_add(1));
    let episodes = config.num_env_groups.saturating_mul(config.group_size);
    let samples = if config.adv_estimator.is_stepwise() {
        episodes.saturating_mul(config.max_actions_per_traj)
    } else {
        episodes
    };
    // The turns of an episode are evaluated as one sequence, unless each turn has a prompt of its own.
    let sequences = if config.history_length.is_some() { samples } else { episodes };
    let length = config.sequence_length;
    // A validation plays at most as many episodes at a time as a step, but at least those of one start.
    let validated = if config.val_batch_size > 0 { config.val_group_size } else { 0 };
    let rollout = TextPass {
        phase: "rollout".into(),
        rows: config.num_env_groups.saturating_mul(config.played_group_size()).max(validated),
        group: config.played_group_size(),
        at_once: config.infer_batch_size,
        tokens: Some(length),
        generated: config.max_tokens_per_step,
        // In a validation all episodes start differently, so that no two of them share a prompt.
        shared_prompt: answers == 1 && config.val_batch_size == 0,
        continues: answers > 1,
        ahead: config.is_asynchronous(),
        ..TextPass::default()
    };
    let update = TextPass {
        phase: "update".into(),
        rows: config.mini_batch(samples).min(sequences),
        at_once: config.micro_batch_size,
        tokens: Some(length),
        grad: true,
        reference: config.needs_reference(),
        ..TextPass::default()
    };
    // An engine writes the answers in memory of its own, which this program does not know.
    let mut texts = if config.rollout.is_external() { vec![update] } else { vec![rollout, update] };
    if config.adv_estimator == Estimator::Gae {
        let tokens = answers.saturating_mul(config.max_tokens_per_step).min(length);
        // Per token, the critic stores two vectors: the hidden state, and the mean of the hidden states before it.
        let critic =
            TextPass { rows: samples, at_once: config.micro_batch_size, hidden_states: 2, ..TextPass::default() };
        texts.push(TextPass { phase: "update".into(), tokens: Some(tokens), ..critic });
    }
    Ok(Passes { texts, ..Passes::default() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Error;
    use serde_json::{Value, json};

    use super::*;

    fn planned(options: Value) -> Result<Vec<TextPass>> {
        passes(options.as_object().unwrap()).map(|passes| passes.texts)
    }

    #[test]
    fn plan_counts_generated_and_trained_episodes() {
        let passes = planned(json!({"num_env_groups": 4, "group_size": 8, "group_size_redundancy": 2})).unwrap();
        let [rollout, update] = &passes[..] else { panic!("{passes:?}") };
        assert_eq!((rollout.rows, rollout.group, rollout.tokens), (40, 10, Some(2048)));
        assert!(rollout.continues && !rollout.shared_prompt && !rollout.ahead && !rollout.grad);
        assert_eq!((update.rows, update.at_once, update.grad), (32, 8, true));
    }

    #[test]
    fn plan_has_a_reference_where_a_kl_is_computed() {
        let reference = |options: Value| planned(options).unwrap()[1].reference;
        assert!(!reference(json!({"use_kl_loss": false, "add_token_level_kl": false})));
        assert!(reference(json!({"use_kl_loss": true})));
        assert!(reference(json!({"use_kl_loss": false, "add_token_level_kl": true})));
    }

    #[test]
    fn plan_counts_one_sequence_per_conversation() {
        let mut options =
            json!({"num_env_groups": 2, "group_size": 4, "max_actions_per_traj": 5, "adv_estimator": "gigpo"});
        assert_eq!(planned(options.clone()).unwrap()[1].rows, 8);
        options["history_length"] = json!(2);
        assert_eq!(planned(options).unwrap()[1].rows, 40);
    }

    #[test]
    fn plan_shares_the_prompt_of_single_answers_without_tools() {
        let once = json!({"max_actions_per_traj": 1, "val_batch_size": 0});
        assert!(planned(once.clone()).unwrap()[0].shared_prompt);
        let tool = json!({"name": "add", "description": "adds", "command": ["true"]});
        let with_tools = json!({"max_actions_per_traj": 1, "val_batch_size": 0, "max_tool_calls": 3, "tools": [tool]});
        let rollout = &planned(with_tools).unwrap()[0];
        assert!(rollout.continues && !rollout.shared_prompt);
    }

    #[test]
    fn plan_counts_the_tokens_that_the_critic_values() {
        let mut options = json!({"adv_estimator": "gae", "max_actions_per_traj": 3, "max_tokens_per_step": 20});
        assert_eq!(planned(options.clone()).unwrap()[2].tokens, Some(60));
        options["max_actions_per_traj"] = json!(1000);
        assert_eq!(planned(options).unwrap()[2].tokens, Some(2048));
    }

    #[test]
    fn an_engine_writes_in_memory_of_its_own() {
        let rollout = json!({"name": "vllm", "urls": ["http://127.0.0.1:8000"], "adapters": "adapters"});
        let passes = planned(json!({ "rollout": rollout })).unwrap();
        assert_eq!(passes.iter().map(|pass| pass.phase.as_str()).collect::<Vec<_>>(), ["update"]);
    }

    #[test]
    fn options_that_a_run_refuses_are_refused() {
        let error = planned(json!({"history_length": 2})).unwrap_err();
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("history_length"), "{error}");
    }
}
