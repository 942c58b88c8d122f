//! What a step does with the model, for `roll plan`.

use roll_core::{
    Options, Result, parse_options,
    plan::{CriticWork, LanguageWork, Passes, RolloutWork},
};

use super::advantages::Estimator;
use super::config::AgenticPpoConfig;

/// The most that a step of a run with these options comes to.
pub(super) fn passes(options: &Options) -> Result<Passes> {
    let config: AgenticPpoConfig = parse_options("algo", options)?;
    config.check()?;
    let calls = if config.tools.is_empty() { 0 } else { config.max_tool_calls };
    let answers = config.max_actions_per_traj.saturating_mul(calls.saturating_add(1));
    let episodes = config.num_env_groups.saturating_mul(config.group_size);
    let samples = if config.adv_estimator.is_stepwise() {
        episodes.saturating_mul(config.max_actions_per_traj)
    } else {
        episodes
    };
    // Turns of one conversation are evaluated as one sequence, unless each has a prompt of its own.
    let sequences = if config.history_length.is_some() { samples } else { episodes };
    let length = config.sequence_length;
    let critic = (config.adv_estimator == Estimator::Gae).then(|| CriticWork {
        tokens: match config.observation_steps {
            true => length,
            false => answers.saturating_mul(config.max_tokens_per_step).min(length),
        },
    });
    let rollout = RolloutWork {
        groups: config.num_env_groups,
        group_size: config.played_group_size(),
        // Every episode of a validation has a start of its own.
        shared_prompts: answers == 1 && config.val_batch_size == 0,
        at_once: config.infer_batch_size,
        new_tokens: config.max_tokens_per_step,
        answers,
        ahead: config.is_asynchronous(),
    };
    let language = LanguageWork {
        rollout: Some(rollout),
        sequence_length: Some(length),
        samples,
        update: config.mini_batch(samples).min(sequences),
        micro_batch: config.micro_batch_size,
        reference: config.needs_reference(),
        critic,
    };
    Ok(Passes { language: Some(language), ..Passes::default() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Error;
    use serde_json::{Value, json};

    use super::*;

    fn planned(options: Value) -> Result<LanguageWork> {
        passes(options.as_object().unwrap()).map(|passes| passes.language.unwrap())
    }

    #[test]
    fn a_step_writes_what_all_groups_play_and_learns_from_what_they_keep() {
        let work = planned(json!({"num_env_groups": 4, "group_size": 8, "group_size_redundancy": 2})).unwrap();
        assert_eq!((work.samples, work.update, work.micro_batch), (32, 32, 8));
        assert_eq!((work.sequence_length, work.reference, work.critic), (Some(2048), false, None));
        let rollout = work.rollout.unwrap();
        assert_eq!((rollout.groups, rollout.group_size, rollout.answers), (4, 10, 10));
        assert!(!rollout.shared_prompts && !rollout.ahead);
    }

    #[test]
    fn turns_of_a_conversation_are_one_sequence_unless_each_has_its_own_prompt() {
        let base = json!({"num_env_groups": 2, "group_size": 4, "max_actions_per_traj": 5, "adv_estimator": "gigpo"});
        let work = planned(base.clone()).unwrap();
        assert_eq!((work.samples, work.update), (40, 8));
        let mut alone = base;
        alone["history_length"] = json!(2);
        let work = planned(alone).unwrap();
        assert_eq!((work.samples, work.update), (40, 40));
    }

    #[test]
    fn one_answer_from_shared_starts_reads_one_prompt_a_group_and_calls_of_tools_are_answers() {
        let once = json!({"max_actions_per_traj": 1, "val_batch_size": 0});
        assert!(planned(once).unwrap().rollout.unwrap().shared_prompts);
        let tool = json!({"name": "add", "description": "adds", "command": ["true"]});
        let with_tools = json!({"max_actions_per_traj": 1, "val_batch_size": 0, "max_tool_calls": 3, "tools": [tool]});
        let rollout = planned(with_tools).unwrap().rollout.unwrap();
        assert_eq!((rollout.answers, rollout.shared_prompts), (4, false));
    }

    #[test]
    fn a_critic_values_what_was_written_or_all_tokens() {
        let gae = |more: Value| {
            let mut options = json!({"adv_estimator": "gae", "max_actions_per_traj": 3, "max_tokens_per_step": 20});
            options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            planned(options).unwrap().critic.unwrap()
        };
        assert_eq!(gae(json!({})).tokens, 60);
        assert_eq!(gae(json!({"observation_steps": true})).tokens, 2048);
    }

    #[test]
    fn options_that_a_run_refuses_are_refused() {
        let error = planned(json!({"history_length": 2})).unwrap_err();
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("history_length"), "{error}");
    }
}
