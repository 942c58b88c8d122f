//! Translates ROLL's configurations of its agentic pipeline (`agent_val_frozen_lake.yaml`, `agentic_val_sokoban.yaml`
//! and others like them) into this project's keys.
//!
//! Each function takes some of ROLL's keys `from` one tree and puts this project's keys into the other. Keys that no
//! function takes are listed in a note, with the reason why they have no effect.

mod environments;
mod unused_keys;
mod updates;

use std::path::Path;

use config::{Value, ValueKind};

use self::environments::environments;
use self::unused_keys::without_effect;
use self::updates::{generation_ahead, groups, mini_batch, warmup};
use super::super::yaml::{Map, place};
use super::agentic_table::{
    ALGORITHM, ALGORITHM_OPTIONS, DEFAULTS, LORA_RANK, MODEL, POLICY_GRADIENT, PPO_WORKER, SAMPLING, SECTIONS,
    UNCHANGED,
};
use super::tree::{ReferenceTree, TranslatedTree};
use super::{betas, checkpoints_to_keep, constant, copy_keys, fill_defaults, origin, precision, strategy, whole};
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
                to.put("model.lora_alpha", constant(whole(&rank).unwrap_or(LORA_RANK).saturating_mul(2)));
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

#[cfg(test)]
mod tests;
