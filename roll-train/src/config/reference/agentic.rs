//! Translates ROLL's configurations of its agentic pipeline (`agent_val_frozen_lake.yaml`, `agentic_val_sokoban.yaml`
//! and others like them) into this project's keys.
//!
//! Each function takes some of ROLL's keys `from` one tree and puts this project's keys into the other. Keys that no
//! function takes are listed in a note, with the reason why they have no effect.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use config::{Value, ValueKind};

use super::super::yaml::{Map, place};
use super::agentic_table::{
    AGENT_KEYS, ALGORITHM, ALGORITHM_OPTIONS, DEFAULT_TAG, DEFAULTS, ENVIRONMENTS, HISTORY_LENGTH, LORA_RANK,
    MAX_CONCURRENT, MIXED, MODEL, OWN_MESSAGES_ENV, POLICY_GRADIENT, PPO_WORKER, ROLLOUT_BATCH_SIZE, SAMPLING,
    SECTIONS, STEP_MANAGER, UNCHANGED, WITHOUT_EFFECT, matches_pattern,
};
use super::tree::{ReferenceTree, TranslatedTree};
use super::{
    ORIGIN, betas, checkpoints_to_keep, constant, copy_keys, devices, fill_defaults, origin, origin_or_roll, precision,
    strategy, whole,
};
use roll_core::{Error, Result};

/// ROLL's block of the model's options.
const MODEL_ARGS: &str = "actor_train.model_args";

/// Whether a configuration of ROLL is for its agentic pipeline.
pub fn is_agentic(from: &ReferenceTree) -> bool {
    SECTIONS.iter().all(|key| from.get(key).is_some())
}

/// The configuration in this project's keys, and notes for the user.
pub fn translate(path: &Path, mut from: ReferenceTree) -> Result<(Map, Vec<String>)> {
    let (mut to, mut notes) = (TranslatedTree::new(), Vec::new());
    copy_keys(&mut from, &mut to, UNCHANGED);
    for key in ALGORITHM_OPTIONS.split_whitespace() {
        copy_keys(&mut from, &mut to, &[(key, &format!("algo.{key}"))]);
    }
    policy_gradient(&mut from, &mut to);
    disable_filters_by_default(&mut to);
    steps(path, &mut from, &mut to)?;
    model(path, &mut from, &mut to)?;
    betas(&mut from, &mut to);
    precision(&mut from, &mut to);
    sampling(&mut from, &mut to);
    environments(path, &mut from, &mut to, &mut notes)?;
    fill_defaults(&mut to, DEFAULTS);
    groups(path, &mut from, &mut to)?;
    mini_batch(path, &mut from, &mut to)?;
    generation_ahead(path, &mut from, &mut to, &mut notes);
    warmup(&mut from, &mut to);
    train_strategy(&mut from, &mut to);
    to.put("algo.name", constant(ALGORITHM));
    to.put("model.name", constant(MODEL));
    // ROLL's correction compares the log-probabilities that vLLM reports, which are raw: before temperature and top-p.
    if to.has("algo.train_infer_correction") {
        to.put("algo.infer_log_probs", constant("raw"));
    }
    // ROLL sets this for every chat template.
    to.put("model.chat_template_args.enable_thinking", constant(false));
    notes.extend(without_effect(path, &from));
    Ok((to.into_map(), notes))
}

/// Translates the form of the policy gradient if the configuration names a worker that reads it: any but ROLL's usual
/// one.
fn policy_gradient(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let class = from.get("actor_train.worker_cls").and_then(|class| class.clone().into_string().ok());
    if class.is_some_and(|class| !class.ends_with(PPO_WORKER)) {
        copy_keys(from, to, POLICY_GRADIENT);
    }
}

/// Turns off the filters of `train_infer_correction` that have no `enabled`, as in ROLL.
fn disable_filters_by_default(to: &mut TranslatedTree) {
    let key = "algo.train_infer_correction.filters";
    let Some(mut value) = to.get(key).cloned() else { return };
    if let ValueKind::Array(filters) = &mut value.kind {
        for filter in filters {
            if let ValueKind::Table(filter) = &mut filter.kind {
                filter.entry("enabled".into()).or_insert_with(|| constant(false));
            }
        }
    }
    to.put(key, value);
}

/// Translates the number of steps and of kept checkpoints.
fn steps(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree) -> Result<()> {
    if let Some(steps) = from.take("max_steps") {
        match whole(&steps) {
            Some(_) => to.put("steps", steps),
            None => {
                let problem = format!("`max_steps: {steps}`: expected the number of steps, above 0{}", place(&steps));
                return Err(Error::bad_file(path, problem));
            }
        }
    }
    checkpoints_to_keep(from, to);
    Ok(())
}

/// Translates which weights of the model are trained, and whether gradients are checkpointed. Fails for a model of text
/// and pictures.
fn model(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree) -> Result<()> {
    refuse_vision(path, to)?;
    trained_weights(from, to);
    if let Some(disable) = from.take(&format!("{MODEL_ARGS}.disable_gradient_checkpointing")) {
        let is_checkpointing = !matches!(disable.kind, ValueKind::Boolean(true));
        to.put("model.use_gradient_checkpointing", Value::new(origin(&disable).as_ref(), is_checkpointing));
    }
    Ok(())
}

/// Fails if the name of the model says that it is a vision-language model.
fn refuse_vision(path: &Path, to: &TranslatedTree) -> Result<()> {
    // `UNCHANGED` has copied ROLL's `pretrain` to this key.
    let pretrain = to.get("model.model_path").and_then(|name| name.clone().into_string().ok()).unwrap_or_default();
    // The names of vision-language models have a part `VL`: `Qwen2.5-VL-3B-Instruct`.
    if pretrain.split(['-', '_', '/']).any(|part| part.eq_ignore_ascii_case("vl")) {
        let problem = format!(
            "`pretrain: {pretrain}` is a model of text and pictures; models of text alone are here (docs/src/agents.md)"
        );
        return Err(Error::bad_file(path, problem));
    }
    Ok(())
}

/// Translates what is trained: adapters if their targets are named, all weights otherwise, as in ROLL.
fn trained_weights(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    match from.take(&format!("{MODEL_ARGS}.lora_target")).filter(|targets| targets.kind != ValueKind::Nil) {
        Some(targets) => {
            // All linear layers are the default here.
            if !matches!(&targets.kind, ValueKind::String(text) if text == "all-linear") {
                to.put("model.lora_target_modules", targets);
            }
            let rank = from.take(&format!("{MODEL_ARGS}.lora_rank")).unwrap_or_else(|| constant(LORA_RANK));
            if !to.has("model.lora_alpha") {
                // ROLL's default: twice the rank.
                to.put("model.lora_alpha", constant(2 * whole(&rank).unwrap_or(LORA_RANK)));
            }
            to.put("model.lora_rank", rank);
        }
        // Rank 0: all weights are trained.
        None => to.put("model.lora_rank", constant(0u64)),
    }
}

/// Translates how answers are sampled. If `actor_infer` has `generating_args`, these hold for training and validation,
/// as in ROLL.
fn sampling(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let shared = "actor_infer.generating_args";
    let has_shared = from.get(shared).is_some();
    let [training, validation] = ["train_env_manager", "val_env_manager"]
        .map(|section| if has_shared { shared.to_string() } else { format!("{section}.generating_args") });
    for (theirs, ours_in_training, ours_in_validation) in SAMPLING {
        if let Some(value) = from.take(&format!("{training}.{theirs}")) {
            // vLLM's `top_k: -1` means all tokens, which is 0 here.
            let is_all = matches!(value.kind, ValueKind::I64(-1)) && *theirs == "top_k";
            to.put(ours_in_training, if is_all { Value::new(origin(&value).as_ref(), 0u64) } else { value });
        }
        if let Some(ours_in_validation) = ours_in_validation
            && let Some(value) = from.take(&format!("{validation}.{theirs}"))
        {
            to.put(ours_in_validation, value);
        }
    }
    if let Some(limit) = from.take(&format!("{training}.max_new_tokens")) {
        to.put("algo.max_tokens_per_step", limit);
    }
}

/// Translates the entries of `custom_envs` that the tags of training and validation name. One environment becomes
/// `env`; several become the worlds of the environment `mixed`.
fn environments(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree, notes: &mut Vec<String>) -> Result<()> {
    let training_tags = tags(path, from, "train_env_manager")?;
    let validation_tags = tags(path, from, "val_env_manager")?;
    let mut played: Vec<String> = Vec::new();
    for tag in training_tags.iter().chain(&validation_tags) {
        if !played.contains(tag) {
            played.push(tag.clone());
        }
    }
    if let [only_tag] = played.as_slice() {
        let only_environment = environment(path, from, only_tag)?;
        to.put("env", only_environment);
    } else {
        let mut worlds = Map::new();
        for tag in &played {
            worlds.insert(tag.clone(), environment(path, from, tag)?);
        }
        to.put("env.name", constant(MIXED));
        to.put("env.worlds", constant(ValueKind::Table(worlds)));
        mixture(from, to, "train_env_manager", &training_tags, "algo.");
        mixture(from, to, "val_env_manager", &validation_tags, "algo.val_");
    }
    agent_keys(path, from, to, &played, notes);
    Ok(())
}

/// Translates which worlds of a mixed environment a section of ROLL plays, and in which shares. Our keys begin with
/// `prefix`.
fn mixture(from: &mut ReferenceTree, to: &mut TranslatedTree, section: &str, tags: &[String], prefix: &str) {
    let list = tags.iter().map(|tag| Value::from(tag.as_str())).collect();
    to.put(&format!("{prefix}tags"), constant(ValueKind::Array(list)));
    if let Some(shares) = from.take(&format!("{section}.num_groups_partition")) {
        to.put(&format!("{prefix}num_groups_partition"), shares);
    }
}

/// Translates the agent's keys in the entries of the environments `played`. Here such a key has one value for all
/// environments: the first one counts, and a note says if others differ.
fn agent_keys(
    path: &Path,
    from: &mut ReferenceTree,
    to: &mut TranslatedTree,
    played: &[String],
    notes: &mut Vec<String>,
) {
    for (theirs, ours) in AGENT_KEYS {
        let mut values: Vec<Value> = Vec::new();
        for tag in played {
            if is_read(from, tag, theirs) {
                values.extend(from.take(&format!("custom_envs.{tag}.{theirs}")));
            }
        }
        if *theirs == MAX_CONCURRENT {
            // ROLL's 0 means no limit, which is the default here.
            values.retain(|value| !matches!(value.clone().into_uint(), Ok(0)));
        }
        let Some(first) = values.first().cloned() else { continue };
        if values.iter().any(|value| value.kind != first.kind) {
            notes.push(format!(
                "{}: `{theirs}` differs between the environments {}; that of `{}` holds for all",
                path.display(),
                played.join(", "),
                played[0]
            ));
        }
        // ROLL limits the tokens of an answer twice. `sampling` has set one limit; the smaller of both holds.
        let earlier_is_smaller =
            to.get(ours).and_then(whole).zip(whole(&first)).is_some_and(|(earlier, first)| earlier < first);
        if !earlier_is_smaller {
            to.put(ours, first);
        }
    }
    for tag in played {
        if prompts_each_turn(from, tag) {
            from.take(&format!("custom_envs.{tag}.env_manager_cls"));
            if !to.has(HISTORY_LENGTH) {
                to.put(HISTORY_LENGTH, constant(1u64));
            }
        }
    }
}

/// Whether each turn of the environment `tag` has a prompt of its own in ROLL.
fn prompts_each_turn(from: &ReferenceTree, tag: &str) -> bool {
    let class = from.get(&format!("custom_envs.{tag}.env_manager_cls"));
    class.and_then(|class| class.clone().into_string().ok()).is_some_and(|class| class.ends_with(STEP_MANAGER))
}

/// Whether ROLL reads the key `name` of the environment `tag`.
fn is_read(from: &ReferenceTree, tag: &str, name: &str) -> bool {
    let kind = from.get(&format!("custom_envs.{tag}.env_type")).and_then(|kind| kind.clone().into_string().ok());
    match name {
        "history_length" => prompts_each_turn(from, tag),
        "agent_template" | "agent_system_template" => kind.as_deref() != Some(OWN_MESSAGES_ENV),
        _ => true,
    }
}

/// The names of the environments that a section plays.
fn tags(path: &Path, from: &mut ReferenceTree, section: &str) -> Result<Vec<String>> {
    let key = format!("{section}.tags");
    let Some(value) = from.take(&key) else { return Ok(vec![DEFAULT_TAG.into()]) };
    let found = match &value.kind {
        ValueKind::Array(items) => items.iter().map(|item| item.clone().into_string().ok()).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    found.filter(|tags| !tags.is_empty()).ok_or_else(|| {
        Error::bad_file(path, format!("`{key}`: expected a list of names, found {value}{}", place(&value)))
    })
}

/// Our environment, with its options, for the entry `tag` of `custom_envs`.
fn environment(path: &Path, from: &mut ReferenceTree, tag: &str) -> Result<Value> {
    let key = format!("custom_envs.{tag}");
    let Some(kind) = from.take(&format!("{key}.env_type")) else {
        return Err(Error::bad_file(path, format!("`{key}.env_type` is missing: which environment is `{tag}`?")));
    };
    let text = kind.clone().into_string().unwrap_or_default();
    let Some((_, our_name, options)) = ENVIRONMENTS.iter().find(|(theirs, ..)| *theirs == text) else {
        let known = ENVIRONMENTS.iter().map(|(theirs, ..)| *theirs).collect::<Vec<_>>().join(", ");
        let problem = format!(
            "`{key}.env_type: {text}` is not here{}; there are {known}, and with `env.name: process` any program of \
             your own (docs/src/agents.md)",
            place(&kind)
        );
        return Err(Error::bad_file(path, problem));
    };
    let mut component = Map::from([("name".to_string(), Value::new(origin(&kind).as_ref(), *our_name))]);
    for option in options.split_whitespace() {
        if let Some(value) = from.take(&format!("{key}.env_config.{option}")) {
            component.insert(option.to_string(), value);
        }
    }
    Ok(Value::new(origin(&kind).as_ref(), ValueKind::Table(component)))
}

/// Translates the number of episodes in a step, which is `rollout_batch_size`. ROLL's numbers of environments only say
/// how many episodes it plays at the same time.
fn groups(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree) -> Result<()> {
    let size = to.get("algo.group_size").and_then(whole).unwrap_or(1);
    let episodes = from.take("rollout_batch_size").unwrap_or_else(|| constant(ROLLOUT_BATCH_SIZE));
    // Taken, so that they are not listed as keys without effect.
    from.take("train_env_manager.num_env_groups");
    from.take("train_env_manager.num_groups_partition");
    from.take("val_env_manager.num_groups_partition");
    match whole(&episodes).filter(|n| n % size == 0) {
        Some(n) => {
            to.put("algo.num_env_groups", Value::new(origin(&episodes).as_ref(), n / size));
            Ok(())
        }
        None => {
            let expected = format!("expected a multiple of train_env_manager.group_size, {size}{}", place(&episodes));
            Err(Error::bad_file(path, format!("`rollout_batch_size: {episodes}`: {expected}")))
        }
    }
}

/// Translates the number of samples in an update. An update of ROLL takes `per_device_train_batch_size *
/// gradient_accumulation_steps` samples on each group of devices that holds one copy of the model. An update here takes
/// the same number in all, on any number of ranks.
fn mini_batch(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree) -> Result<()> {
    let accumulation = from.take("actor_train.training_args.gradient_accumulation_steps");
    let accumulated = accumulation.as_ref().and_then(whole).unwrap_or(1);
    let per_device = to.get("algo.micro_batch_size").and_then(whole).unwrap_or(1);
    let (devices, mapping) = devices(path, from)?;
    let config = "actor_train.strategy_args.strategy_config";
    let mut devices_per_copy = 1;
    for kind in ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"] {
        devices_per_copy *= from.take(&format!("{config}.{kind}")).and_then(|v| whole(&v)).unwrap_or(1);
    }
    let copies = (devices / devices_per_copy.max(1)).max(1);
    let mini_batch = per_device.saturating_mul(accumulated).saturating_mul(copies);
    to.put("algo.mini_batch_size", Value::new(Some(&mapping.unwrap_or_else(|| ORIGIN.to_string())), mini_batch));
    Ok(())
}

/// Translates how many steps ahead episodes are played: any number in ROLL, one or none here.
fn generation_ahead(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree, notes: &mut Vec<String>) {
    let Some(ratio) = from.take("async_generation_ratio") else { return };
    let ratio_origin = origin_or_roll(&ratio);
    let steps_ahead = ratio.into_float().unwrap_or(0.0);
    if steps_ahead > 0.0 && steps_ahead != 1.0 {
        notes.push(format!(
            "{}: `async_generation_ratio: {steps_ahead}` counts as 1: episodes are played one step ahead",
            path.display()
        ));
    }
    to.put("algo.async_generation_ratio", Value::new(Some(&ratio_origin), u64::from(steps_ahead > 0.0)));
}

/// Translates the warm-up of the learning rate. ROLL's schedule counts updates, ours counts steps of several updates.
fn warmup(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let number = |key: &str| to.get(key).and_then(whole).unwrap_or(1);
    let episodes = number("algo.num_env_groups") * number("algo.group_size");
    let updates_per_step = (number("algo.ppo_epochs") * episodes.div_ceil(number("algo.mini_batch_size"))).max(1);
    let steps = number("steps");
    let ratio = from.take("actor_train.training_args.warmup_ratio");
    let warmup = from.take("actor_train.training_args.warmup_steps");
    let warmup_updates = warmup.as_ref().and_then(whole);
    if let (Some(warmup), Some(updates)) = (warmup, warmup_updates) {
        let warmup_steps = Value::new(Some(&origin_or_roll(&warmup)), updates.div_ceil(updates_per_step));
        to.put("training.warmup_steps", warmup_steps);
    } else if let Some(ratio) = ratio.and_then(|ratio| ratio.into_float().ok()).filter(|ratio| *ratio > 0.0) {
        let warmup_steps = (steps as f64 * ratio).ceil() as u64;
        to.put("training.warmup_steps", constant(warmup_steps));
    }
}

/// Translates the strategy. DeepSpeed's options keep their meaning. Megatron's distributed optimizer becomes ZeRO stage
/// 1, FSDP stage 3, which shard the same things.
fn train_strategy(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let name = from.take("actor_train.strategy_args.strategy_name").and_then(|v| v.into_string().ok());
    strategy(from, to);
    let stage = match name.unwrap_or_default() {
        name if name.contains("megatron") => 1u64,
        name if name.contains("fsdp") => 3,
        _ => return,
    };
    from.take("actor_train.strategy_args.strategy_config.use_distributed_optimizer");
    to.put("strategy.stage", constant(stage));
}

/// A note that lists the keys without effect by the reason, and says how many keys have an effect.
fn without_effect(path: &Path, from: &ReferenceTree) -> Option<String> {
    let unused = from.unused(path);
    if unused.is_empty() {
        return None;
    }
    let mut by_reason: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for key in &unused {
        by_reason.entry(reason_without_effect(key)).or_default().insert(of_all_tags(key));
    }
    let joined = |keys: BTreeSet<String>| keys.into_iter().collect::<Vec<_>>().join(", ");
    let listed = by_reason.into_iter().map(|(reason, keys)| format!("{} ({reason})", joined(keys)));
    let (with, without) = from.counts(path, &unused);
    Some(format!(
        "{}: an agentic configuration of ROLL; {with} keys have an effect here, {without} have none: {}",
        path.display(),
        listed.collect::<Vec<_>>().join("; ")
    ))
}

/// The reason why a key has no effect here.
fn reason_without_effect(key: &str) -> &'static str {
    let is_entry_of_custom_envs = key.strip_prefix("custom_envs.").is_some_and(|rest| !rest.contains('.'));
    if is_entry_of_custom_envs {
        return "no tag names it";
    }
    let known = WITHOUT_EFFECT.iter().find(|(pattern, _)| matches_pattern(pattern, key));
    known.map_or("there is nothing like it", |(_, reason)| *reason)
}

/// A key in one entry of `custom_envs` with `*` for the entry's name, since most entries have the same keys.
fn of_all_tags(key: &str) -> String {
    match key.strip_prefix("custom_envs.").and_then(|rest| rest.split_once('.')) {
        Some((_, rest)) => format!("custom_envs.*.{rest}"),
        None => key.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::ConfigLayers;
    use super::*;
    use crate::config::LoadedConfig;

    /// Environments in ROLL's words, in a file of their own.
    const ENVIRONMENTS: &str = "\
max_actions_per_traj: 7
max_tokens_per_step: 99
penalty: -0.15
manager: some.python.Class
system: Be good.
custom_env:
  Room:
    env_type: sokoban
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_manager_cls: ${manager}
    use_thread_lock: true
    agent_system_template: ${system}
    agent_template: \"{observation}\"
    env_config:
      max_steps: ${max_actions_per_traj}
      format_penalty: ${penalty}
      dim_room: [6, 6]
      num_boxes: 1
      grid_lookup: {0: \"W\"}
      grid_vocab: {\"W\": \"wall\"}
  Lake:
    env_type: frozen_lake
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_config:
      max_steps: ${max_actions_per_traj}
      is_slippery: false
  Shop:
    env_type: webshop
";

    const CONFIG: &str = "\
defaults:
  - ../config/own_envs@_here_
hydra: {run: {dir: .}}
exp_name: agents
seed: 7
logging_dir: logs
checkpoint_config: {type: file_system}
max_steps: 100
save_steps: 1000
eval_steps: 20
rollout_batch_size: 64
val_batch_size: 32
sequence_length: 512
async_generation_ratio: 1
batch_adjust_mode: copy
dirty_data_mask: true
adv_estimator: grpo
advantage_clip: 0.2
whiten_advantages: true
critic_warmup: 3
pretrain: tiny
reward_pretrain: tiny
actor_train:
  pg_variant: topr
  worker_cls: some.Worker
  model_args: {dtype: bf16, attn_implementation: fa2, disable_gradient_checkpointing: false}
  training_args:
    learning_rate: 1.0e-6
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 4
    warmup_steps: 10
    lr_scheduler_type: cosine
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, use_distributed_optimizer: true, recompute_granularity: full}
  device_mapping: list(range(0,8))
  infer_batch_size: 2
actor_infer:
  strategy_args: {strategy_name: vllm}
reference:
  infer_batch_size: 2
reward_normalization: {grouping: tags, method: mean_std}
train_env_manager:
  format_penalty: -0.1
  max_env_num_per_worker: 16
  num_env_groups: 16
  group_size: 4
  group_size_redundancy: 1
  tags: [Room]
  num_groups_partition: [16]
  generating_args: {max_new_tokens: 128, top_p: 0.99, top_k: 100, temperature: 0.9, num_return_sequences: 1}
val_env_manager:
  num_env_groups: 32
  group_size: 1
  tags: [Lake, Room]
  num_groups_partition: [8, 24]
  generating_args: {max_new_tokens: 128, top_p: 0.99, top_k: 100, temperature: 0.2}
max_tokens_per_step: 64
custom_envs:
  Room: ${custom_env.Room}
  Lake: ${custom_env.Lake}
  Shop: ${custom_env.Shop}
";

    fn load(change: impl Fn(String) -> String) -> Result<LoadedConfig> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in
            [("config/own_envs.yaml", ENVIRONMENTS.to_string()), ("run/agents.yaml", change(CONFIG.into()))]
        {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        ConfigLayers::new().file(dir.path().join("run/agents.yaml"))?.load(None)
    }

    #[test]
    fn translates_an_agentic_configuration() {
        let loaded = load(|text| text).unwrap();
        let c = &loaded.config;
        assert_eq!((c.seed, c.steps, c.save_steps), (7, Some(100), 1000));
        assert_eq!(loaded.declared_value("evaluation", "every"), Some(&20.into()));
        assert_eq!(
            (c.algo.name.as_str(), c.model.name.as_str(), c.strategy.name.as_str()),
            ("agentic_ppo", "causal_lm", "zero")
        );
        let algo = |key: &str| c.algo.options[key].clone();
        for (key, value) in [
            ("num_env_groups", 16.into()),
            ("group_size", 4.into()),
            ("group_size_redundancy", 1.into()),
            ("val_batch_size", 32.into()),
            ("sequence_length", 512.into()),
            ("max_actions_per_traj", 7.into()),
            // The least of the two limits.
            ("max_tokens_per_step", 64.into()),
            ("temperature", 0.9.into()),
            ("val_temperature", 0.2.into()),
            ("top_k", 100.into()),
            ("async_generation_ratio", 1.into()),
            ("adv_estimator", serde_json::json!("grpo")),
            ("pg_variant", serde_json::json!("topr")),
            // Two of eight devices hold a copy: four copies, eight samples each.
            ("mini_batch_size", 32.into()),
            ("micro_batch_size", 2.into()),
            ("agent_system_template", serde_json::json!("Be good.")),
            ("tags", serde_json::json!(["Room"])),
            ("num_groups_partition", serde_json::json!([16])),
            ("val_tags", serde_json::json!(["Lake", "Room"])),
            ("val_num_groups_partition", serde_json::json!([8, 24])),
            ("reward_normalization", serde_json::json!({"grouping": "tags", "method": "mean_std"})),
        ] {
            assert_eq!(algo(key), value, "{key}");
        }
        // Two updates a step.
        assert_eq!(
            (c.training.warmup_steps, c.training.lr_scheduler_type),
            (5, roll_backends::optimizer::LrSchedulerType::Cosine)
        );
        assert_eq!((&c.model.options["lora_rank"], &c.model.options["weights_dtype"]), (&0.into(), &"bf16".into()));
        assert_eq!(c.strategy.options["stage"], 1);
        let env = c.env.as_ref().unwrap();
        assert_eq!(env.name, "mixed");
        let room = &env.options["worlds"]["Room"];
        assert_eq!(
            (&room["name"], &room["dim_room"], &room["grid_lookup"]["0"]),
            (&"sokoban".into(), &serde_json::json!([6, 6]), &"W".into())
        );
        assert_eq!(env.options["worlds"]["Lake"], serde_json::json!({"name": "frozen_lake", "is_slippery": false}));
        assert!(loaded.provenance.of("algo.sequence_length").contains("agents.yaml:"));

        let [note] = &loaded.notes[..] else { panic!("{:?}", loaded.notes) };
        for key in [
            "hydra",
            "batch_adjust_mode",
            "reference",
            "actor_train.data_args",
            "train_env_manager.format_penalty",
            "custom_envs.Shop",
            "val_env_manager.generating_args.top_p",
        ] {
            let places = note.split(['(', ')', ',', ';', ' ']).filter(|word| *word == key).count();
            assert_eq!(places, 1, "{key}: {note}");
        }
        assert!(!note.contains("there is nothing like it"), "every key has its reason: {note}");
        assert!(!note.contains("learning_rate,") && note.contains("keys have an effect here"), "{note}");
    }

    #[test]
    fn a_single_environment_is_not_mixed() {
        let loaded = load(|text| text.replace("[Lake, Room]", "[Room]").replace("[8, 24]", "[32]")).unwrap();
        let env = loaded.config.env.unwrap();
        assert_eq!((env.name.as_str(), &env.options["num_boxes"]), ("sokoban", &1.into()));
        assert!(!loaded.config.algo.options.contains_key("tags"));
    }

    #[test]
    fn step_env_manager_sets_history_length() {
        let class = "manager: roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager";
        let manager = |history: &'static str| {
            move |text: String| {
                let text = text.replace("manager: some.python.Class", class);
                text.replace("    use_thread_lock: true\n", history)
            }
        };
        let load = |change: &dyn Fn(String) -> String| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("own_envs.yaml"), change(ENVIRONMENTS.into())).unwrap();
            let file = dir.path().join("agents.yaml");
            std::fs::write(&file, CONFIG.replace("../config/", "").replace("grpo", "gigpo")).unwrap();
            ConfigLayers::new().file(file).unwrap().load(None).unwrap()
        };
        let history = |loaded: &LoadedConfig| loaded.config.algo.options.get("history_length").cloned();
        let loaded = load(&manager("    history_length: 5\n"));
        assert_eq!(history(&loaded), Some(5.into()));
        assert!(!loaded.notes[0].contains("env_manager_cls"), "{}", loaded.notes[0]);
        assert_eq!(history(&load(&manager(""))), Some(1.into()));
        let other = load(&|text| text.replace("use_thread_lock: true", "history_length: 5"));
        assert_eq!(history(&other), None);
        assert!(other.notes[0].contains("custom_envs.*.history_length (only ROLL's"), "{}", other.notes[0]);
    }

    #[test]
    fn thinking_is_off_as_in_roll() {
        let loaded = load(|text| text).unwrap();
        let args = loaded.config.model.options.get("chat_template_args").cloned();
        assert_eq!(args, Some(serde_json::json!({"enable_thinking": false})));
        // Without the correction nothing reads it.
        assert!(!loaded.config.algo.options.contains_key("infer_log_probs"));
        let corrected = load(|text| text + "train_infer_correction: {is_weight: {enabled: true}}\n").unwrap();
        assert_eq!(corrected.config.algo.options["infer_log_probs"], "raw");
    }

    #[test]
    fn filters_without_enabled_are_off_as_in_roll() {
        let filters = "train_infer_correction: {filters: [{ratio_low: 0.5}, {enabled: true}]}\n";
        let loaded = load(|text| text + filters).unwrap();
        let found = &loaded.config.algo.options["train_infer_correction"]["filters"];
        assert_eq!((&found[0]["enabled"], &found[1]["enabled"]), (&false.into(), &true.into()));
        assert_eq!(found[0]["ratio_low"], 0.5);
    }

    #[test]
    fn forms_of_the_policy_gradient_need_the_worker_that_reads_them() {
        for (class, read) in [
            ("  worker_cls: roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker\n", true),
            ("  worker_cls: roll.pipeline.agentic.agentic_actor_worker.ActorWorker\n", false),
            ("", false),
        ] {
            let loaded = load(|text| text.replace("  worker_cls: some.Worker\n", class)).unwrap();
            let variant = loaded.config.algo.options.get("pg_variant");
            assert_eq!(variant.is_some_and(|variant| variant == "topr"), read, "{class}");
            let noted = loaded.notes[0].contains("actor_train.pg_variant (ROLL's usual `worker_cls`");
            assert_eq!(noted, !read, "{}", loaded.notes[0]);
        }
    }

    #[test]
    fn other_numbers_of_steps_ahead_are_noted() {
        for (ratio, steps) in [("2", 1), ("0.5", 1), ("0", 0), ("1", 1)] {
            let loaded =
                load(|text| text.replace("generation_ratio: 1", &format!("generation_ratio: {ratio}"))).unwrap();
            assert_eq!(loaded.config.algo.options["async_generation_ratio"], steps, "{ratio}");
            let noted =
                loaded.notes.iter().any(|note| note.contains(&format!("`async_generation_ratio: {ratio}` counts")));
            assert_eq!(noted, ["2", "0.5"].contains(&ratio), "{:?}", loaded.notes);
        }
    }

    #[test]
    fn options_of_sampling_without_effect_have_their_reason() {
        let args = "actor_infer:\n  generating_args: {min_p: 0.1, repetition_penalty: 1.1, max_new_tokens: 64}";
        let loaded = load(|text| text.replace("actor_infer:", args)).unwrap();
        let note = &loaded.notes[0];
        let reason =
            "generating_args.min_p, actor_infer.generating_args.repetition_penalty (answers are drawn otherwise";
        assert!(note.contains(reason), "{note}");
    }

    #[test]
    fn limits_of_environments_at_once_hold() {
        let limit = |entry: &str| {
            let dir = tempfile::tempdir().unwrap();
            let environments =
                ENVIRONMENTS.replace("use_thread_lock: true", &format!("max_env_step_concurrent: {entry}"));
            std::fs::write(dir.path().join("own_envs.yaml"), environments).unwrap();
            let file = dir.path().join("agents.yaml");
            std::fs::write(&file, CONFIG.replace("../config/", "")).unwrap();
            let loaded = ConfigLayers::new().file(file).unwrap().load(None).unwrap();
            loaded.config.algo.options.get("max_env_step_concurrent").cloned()
        };
        assert_eq!((limit("5"), limit("0")), (Some(5.into()), None));
    }

    #[test]
    fn models_of_pictures_are_refused() {
        let message = load(|text| text.replace("pretrain: tiny", "pretrain: Qwen/Qwen2.5-VL-3B-Instruct"))
            .unwrap_err()
            .to_string();
        assert!(message.contains("Qwen2.5-VL-3B-Instruct") && message.contains("text"), "{message}");
    }

    #[test]
    fn translates_lora_options() {
        let lora = "lora_target: all-linear, lora_rank: 16, dtype: bf16";
        let loaded = load(|text| text.replace("dtype: bf16", lora)).unwrap();
        let model = &loaded.config.model.options;
        assert_eq!((&model["lora_rank"], &model["lora_alpha"]), (&16.into(), &32.into()));
        let some = load(|text| text.replace("dtype: bf16", "lora_target: \"q_proj,v_proj\"")).unwrap();
        assert_eq!(some.config.model.options["lora_target_modules"], "q_proj,v_proj");
    }

    #[test]
    fn rejects_environments_and_batch_sizes_that_cannot_be_translated() {
        let error = |change: &dyn Fn(String) -> String| load(change).unwrap_err().to_string();
        let message = error(&|t| t.replace("tags: [Room]", "tags: [Shop]"));
        assert!(message.contains("webshop") && message.contains("frozen_lake, sokoban"), "{message}");
        let message = error(&|t| t.replace("tags: [Room]", "tags: [Nowhere]"));
        assert!(message.contains("custom_envs.Nowhere"), "{message}");
        let message = error(&|t| t.replace("rollout_batch_size: 64", "rollout_batch_size: 66"));
        assert!(message.contains("multiple of") && message.contains("agents.yaml:"), "{message}");
        let message = error(&|t| t.replace("max_steps: 100", "max_steps: -1"));
        assert!(message.contains("max_steps"), "{message}");
    }
}
