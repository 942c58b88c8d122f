//! Options of agentic PPO that have no effect in combination with others.

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Result, When};

use super::NAME;
use super::correction::CorrectionConfig;
use super::engine::config::needs_lora;
use crate::notes::{DATA, VIDEOS, refuse_clips};

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Algorithm, name: NAME, idle: IDLE, more: Some(notes) }
}

const IDLE: &[IdleKeys] = &[
    DATA,
    VIDEOS,
    IdleKeys {
        keys: &["algo.init_kl_coef", "algo.target_kl", "algo.kl_horizon", "algo.kl_penalty"],
        when: When::IsNot("algo.add_token_level_kl", &["true"]),
        because: "no KL is subtracted from rewards; `algo.add_token_level_kl: true` subtracts it, `algo.use_kl_loss` has its own \
         coefficient",
    },
    IdleKeys {
        keys: &["algo.kl_horizon"],
        when: When::Is("algo.target_kl", &["null"]),
        because: "without `algo.target_kl` the coefficient is constant",
    },
    IdleKeys {
        keys: &[
            "algo.lambd",
            "algo.critic_warmup",
            "algo.critic_learning_rate",
            "algo.critic_epochs",
            "algo.value_clip",
        ],
        when: When::IsNot("algo.adv_estimator", &["gae"]),
        because: "only the estimator `gae` reads it, which has a critic",
    },
    IdleKeys {
        keys: &["algo.episode_reward_weight", "algo.step_reward_weight"],
        when: When::IsNot("algo.adv_estimator", &["gigpo"]),
        because: "only the estimator `gigpo` reads it",
    },
    IdleKeys {
        keys: &["algo.step_reward_gamma"],
        when: When::IsNot("algo.adv_estimator", &["gigpo", "step_reinforce"]),
        because: "only the estimators `gigpo` and `step_reinforce` read it",
    },
    IdleKeys {
        keys: &["algo.val_temperature", "algo.val_group_size", "algo.val_tags", "algo.val_num_groups_partition"],
        when: When::Is("algo.val_batch_size", &["0"]),
        because: "`algo.val_batch_size: 0` turns validation off",
    },
    IdleKeys {
        keys: &["algo.refill_rounds"],
        when: When::IsNot("algo.group_filter", &["varied"]),
        because: "no group is left out; `algo.group_filter: varied` leaves out groups of equal scores",
    },
    IdleKeys {
        keys: &["algo.length_penalty_tokens"],
        when: When::Is("algo.length_penalty", &["0"]),
        because: "`algo.length_penalty: 0` punishes nothing",
    },
    IdleKeys {
        keys: &[
            "algo.rollout.urls",
            "algo.rollout.adapters",
            "algo.rollout.token_env",
            "algo.rollout.timeout",
            "algo.rollout.retries",
        ],
        when: When::Is("algo.rollout.name", &["model"]),
        because: "`algo.rollout.name: model` asks no server",
    },
    IdleKeys {
        keys: &["algo.history_length", "algo.tools"],
        when: When::Is("env.name", &["agent"]),
        because: "the program of `env.name: agent` writes the prompts and runs the tools itself",
    },
    IdleKeys {
        keys: &["algo.max_tool_calls"],
        when: When::Is("algo.tools", &["[]"]),
        because: "there are no `algo.tools`",
    },
    IdleKeys {
        keys: &["algo.kl_loss_coef"],
        when: When::IsNot("algo.use_kl_loss", &["true"]),
        because: "`algo.use_kl_loss` is off",
    },
    IdleKeys {
        keys: &[
            "algo.pg_clip",
            "algo.use_pg_clip_range",
            "algo.pg_clip_low",
            "algo.pg_clip_high",
            "algo.dual_clip_loss",
            "algo.dual_clip",
        ],
        when: When::IsNot("algo.pg_variant", &["ppo"]),
        because: "only `algo.pg_variant: ppo` clips with it",
    },
    IdleKeys {
        keys: &["algo.ratio_type"],
        when: When::Is("algo.pg_variant", &["vanilla", "kimi15"]),
        because: "the loss of this `algo.pg_variant` has no ratio",
    },
    IdleKeys {
        keys: &[
            "algo.train_infer_correction.is_weight.weight_type",
            "algo.train_infer_correction.is_weight.upper_bound",
        ],
        when: When::IsNot("algo.train_infer_correction.is_weight.enabled", &["true"]),
        because: "`algo.train_infer_correction.is_weight.enabled` is off",
    },
    IdleKeys {
        keys: &["algo.pg_clip_low", "algo.pg_clip_high"],
        when: When::IsNot("algo.use_pg_clip_range", &["true"]),
        because: "`algo.use_pg_clip_range` is off",
    },
    IdleKeys {
        keys: &["algo.dual_clip"],
        when: When::IsNot("algo.dual_clip_loss", &["true"]),
        because: "`algo.dual_clip_loss` is off",
    },
    IdleKeys {
        keys: &["algo.tis_lower_bound", "algo.tis_upper_bound"],
        when: When::IsNot("algo.pg_variant", &["tis"]),
        because: "`algo.pg_variant` is not `tis`",
    },
    IdleKeys {
        keys: &["algo.topr_positive_weight", "algo.topr_negative_weight"],
        when: When::IsNot("algo.pg_variant", &["topr"]),
        because: "`algo.pg_variant` is not `topr`",
    },
    IdleKeys {
        keys: &["algo.cispo_epsilon_low", "algo.cispo_epsilon_high", "algo.cispo_use_unified_mask"],
        when: When::IsNot("algo.pg_variant", &["cispo"]),
        because: "`algo.pg_variant` is not `cispo`",
    },
    IdleKeys {
        keys: &["algo.kimi15_tau"],
        when: When::IsNot("algo.pg_variant", &["kimi15"]),
        because: "`algo.pg_variant` is not `kimi15`",
    },
];

/// Notes that depend on several options, or on more than their values. Fails if the configuration has clips, or an
/// engine for a model whose weights are trained.
fn notes(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let episodes = "an agent learns from the episodes that it plays in `env`";
    let validation = "an agent is validated on episodes, `algo.val_batch_size` of them";
    refuse_clips(config, [episodes, validation])?;
    let number = |key: &str| config.value(key).and_then(|value| value.as_u64());
    let is = |key: &str, value: &str| config.value(key).and_then(|found| found.as_str()) == Some(value);
    // A check of the configuration alone opens no model that could tell.
    let has_engine = config.value("algo.rollout.name").is_some_and(|name| name != "model");
    if has_engine && number("model.lora_rank") == Some(0) {
        return Err(needs_lora());
    }
    let mut notes: Vec<String> = note_on_reference(config).into_iter().collect();
    let correction =
        config.value("algo.train_infer_correction").cloned().map(serde_json::from_value::<CorrectionConfig>);
    // An invalid value is reported elsewhere, where options are read.
    if let Some(Ok(correction)) = correction
        && !correction.is_active()
    {
        if let Some(named) = config.named(&["algo.infer_log_probs"]) {
            notes.push(format!("{named} no effect: only `algo.train_infer_correction` reads it, which is off"));
        }
        let recompute = config.named(&["algo.enable_old_logprobs_recompute"]);
        let is_asynchronous = number("algo.async_generation_ratio") == Some(1);
        if is_asynchronous && let Some(named) = recompute {
            notes.push(format!(
                "{named} no effect: with `algo.async_generation_ratio: 1` and without `algo.train_infer_correction` old \
                 log-probabilities are those that the episodes were written with"
            ));
        }
    }
    let subtracts_kl = config.value("algo.add_token_level_kl").and_then(|value| value.as_bool()) == Some(true);
    if subtracts_kl && is("algo.adv_estimator", "agentic_reinforce") {
        notes.push(
            "`algo.adv_estimator: agentic_reinforce` reads rewards at the last token of each turn: of the KL that \
             `algo.add_token_level_kl` subtracts, that of the other tokens has no effect (as in ROLL); \
             `algo.use_kl_loss` counts all tokens"
                .into(),
        );
    }
    let rows = number("model.rows_at_once").filter(|_| config.changed("model.rows_at_once"));
    if let Some((rows, prompts)) = rows.zip(number("algo.infer_batch_size"))
        && rows > prompts
    {
        notes.push(format!(
            "`model.rows_at_once: {rows}` bounds nothing: at most `algo.infer_batch_size: {prompts}` prompts are continued \
             at once"
        ));
    }
    if let Some((answer, episode)) = number("algo.max_tokens_per_step").zip(number("algo.sequence_length"))
        && answer >= episode
    {
        notes.push(format!(
            "`algo.max_tokens_per_step: {answer}` bounds nothing: an episode has at most `algo.sequence_length: \
             {episode}` tokens, its prompts included"
        ));
    }
    Ok(notes)
}

/// The note on the reference policy of a KL, if that is not the policy that the run starts from: the reference is the
/// model without its adapter, and `model.lora_checkpoint` names an adapter to start from.
fn note_on_reference(config: &ConfiguredOptions<'_>) -> Option<String> {
    config.value("model.lora_checkpoint")?;
    let is_on = |key: &&str| config.value(key).is_some_and(|value| value == true);
    let key = ["algo.use_kl_loss", "algo.add_token_level_kl"].into_iter().find(is_on)?;
    Some(format!(
        "`{key}` pulls towards the model without `model.lora_checkpoint`, not towards the policy that the run starts \
         from: for that one, merge the adapter into the model (`roll merge-lora`)"
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Options;
    use serde_json::json;

    use super::*;
    use crate::agentic_ppo::AgenticPpoConfig;

    fn noted(changes: serde_json::Value) -> Vec<String> {
        let defaults = json!({"algo": AgenticPpoConfig::default(), "data": {"fps": null}, "sample_steps": 25, "model": {"rows_at_once": 256}});
        let mut config = defaults.clone();
        for (key, value) in changes.as_object().unwrap() {
            let place = key.split('.').fold(&mut config, |tree, part| &mut tree[part]);
            *place = value.clone();
        }
        let [config, defaults]: [Options; 2] = [config, defaults].map(|tree| tree.as_object().unwrap().clone());
        OptionNotes::of(Kind::Algorithm, NAME, &ConfiguredOptions::new(&config, &defaults)).unwrap()
    }

    #[test]
    fn every_rule_names_options_that_there_are() {
        let options = json!(AgenticPpoConfig::default());
        for key in IDLE.iter().flat_map(|row| row.keys).filter(|key| key.starts_with("algo.")) {
            let found = key.split('.').skip(1).try_fold(&options, |tree, part| tree.get(part));
            assert!(found.is_some(), "{key}");
        }
    }

    #[test]
    fn idle_options_are_noted_with_their_values() {
        assert_eq!(noted(json!({})), Vec::<String>::new());
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
            (json!({"algo.adv_estimator": "agentic_reinforce", "algo.add_token_level_kl": true}), "other tokens"),
            (
                json!({"algo.pg_variant": "cispo", "algo.pg_clip": 0.3, "algo.dual_clip_loss": true}),
                "`algo.pg_clip: 0.3`",
            ),
            (json!({"algo.pg_variant": "tis", "algo.use_pg_clip_range": true, "algo.pg_clip_low": 0.1}), "ppo"),
            (json!({"algo.pg_variant": "vanilla", "algo.ratio_type": "segment"}), "has no ratio"),
            (json!({"algo.infer_log_probs": "raw"}), "only `algo.train_infer_correction`"),
            (json!({"algo.train_infer_correction.is_weight.upper_bound": 3.0}), "is_weight.enabled` is off"),
            (json!({"algo.val_batch_size": 0, "algo.val_temperature": 0.5}), "turns validation off"),
            (
                json!({"algo.async_generation_ratio": 1, "algo.enable_old_logprobs_recompute": true}),
                "were written with",
            ),
            (json!({"algo.refill_rounds": 2}), "`algo.group_filter: varied`"),
            (json!({"algo.length_penalty_tokens": 4}), "punishes nothing"),
            (json!({"algo.val_batch_size": 0, "algo.val_group_size": 8}), "turns validation off"),
            (json!({"algo.rollout.urls": ["http://a"], "algo.rollout.timeout": 5.0}), "asks no server"),
            (json!({"model.rows_at_once": 300}), "`algo.infer_batch_size: 256`"),
            (json!({"data.fps": 8.0, "sample_steps": 0}), "`data.fps: 8.0` has no effect"),
            (json!({"sample_steps": 5}), "`sample_steps: 5` has no effect"),
        ] {
            let notes = noted(changes);
            assert_eq!(notes.len(), 1, "{notes:?}");
            assert!(notes[0].contains(word), "{notes:?}");
        }
    }

    #[test]
    fn an_engine_without_a_lora_is_refused() {
        let refused = |rank: u64| {
            let config = json!({"algo": {"rollout": {"name": "sglang"}}, "model": {"lora_rank": rank}});
            let config = config.as_object().unwrap().clone();
            OptionNotes::of(Kind::Algorithm, NAME, &ConfiguredOptions::new(&config, &Options::new()))
        };
        assert!(refused(0).unwrap_err().to_string().contains("model.lora_rank"));
        assert!(refused(8).is_ok());
    }

    #[test]
    fn clips_are_refused() {
        for key in ["data.metadata", "evaluation.metadata"] {
            let (section, _) = key.split_once('.').unwrap();
            let config = json!({"algo": AgenticPpoConfig::default(), section: {"metadata": "talk.jsonl"}});
            let config = config.as_object().unwrap().clone();
            let configured = ConfiguredOptions::new(&config, &config);
            let message = OptionNotes::of(Kind::Algorithm, NAME, &configured).unwrap_err().to_string();
            assert!(message.contains(&format!("`{key}`")) && message.contains("episodes"), "{message}");
        }
    }

    #[test]
    fn options_in_use_are_not_noted() {
        for changes in [
            json!({"algo.add_token_level_kl": true, "algo.init_kl_coef": 0.5, "algo.target_kl": 0.1}),
            json!({"algo.adv_estimator": "gigpo", "algo.step_reward_weight": 0.5, "algo.step_reward_gamma": 0.5}),
            json!({"algo.adv_estimator": "gae", "algo.critic_epochs": 3, "algo.value_clip": 0.5}),
            json!({"algo.use_kl_loss": true, "algo.kl_loss_coef": 0.5, "sample_steps": 0}),
            json!({"algo.tools": [{"name": "add"}], "algo.max_tool_calls": 9}),
            json!({"algo.group_filter": "varied", "algo.refill_rounds": 2}),
            json!({"algo.length_penalty": 1.0, "algo.length_penalty_tokens": 4, "algo.val_group_size": 8}),
            json!({"algo.train_infer_correction.is_weight.enabled": true, "algo.infer_log_probs": "raw",
                "algo.async_generation_ratio": 1, "algo.enable_old_logprobs_recompute": true}),
            json!({"algo.pg_variant": "kimi15", "algo.kimi15_tau": 0.5}),
            json!({"algo.pg_variant": "tis", "algo.ratio_type": "segment", "model.rows_at_once": 64}),
        ] {
            assert_eq!(noted(changes), Vec::<String>::new());
        }
    }

    #[test]
    fn the_reference_of_an_agent_that_starts_from_an_adapter_is_named() {
        let noted = |use_kl_loss: bool, adapter: Option<&str>| {
            let config = json!({"algo": {"use_kl_loss": use_kl_loss}, "model": {"lora_checkpoint": adapter}});
            let config = config.as_object().unwrap().clone();
            OptionNotes::of(Kind::Algorithm, "agentic_ppo", &ConfiguredOptions::new(&config, &Options::new())).unwrap()
        };
        assert!(noted(false, Some("run")).is_empty() && noted(true, None).is_empty());
        let notes = noted(true, Some("run"));
        assert!(notes.len() == 1 && notes[0].contains("`algo.use_kl_loss`"), "{notes:?}");
    }
}
