//! Translates the numbers of a step: its episodes, the samples of an update, the number of steps that episodes are
//! played ahead, and the warm-up.

use std::path::Path;

use config::Value;

use super::super::agentic_table::ROLLOUT_BATCH_SIZE;
use super::super::tree::{ReferenceTree, TranslatedTree};
use super::super::{ORIGIN, constant, devices, origin, origin_or_roll, whole};
use crate::config::yaml::place;
use roll_core::{Error, Result};

/// Translates the number of episodes in a step, which is `rollout_batch_size`. ROLL's numbers of environments only say
/// how many episodes it plays at the same time.
pub fn groups(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree) -> Result<()> {
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
pub fn mini_batch(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree) -> Result<()> {
    let accumulation = from.take("actor_train.training_args.gradient_accumulation_steps");
    let accumulated = accumulation.as_ref().and_then(whole).unwrap_or(1);
    let per_device = to.get("algo.micro_batch_size").and_then(whole).unwrap_or(1);
    let (devices, mapping) = devices(path, from)?;
    let config = "actor_train.strategy_args.strategy_config";
    let mut devices_per_copy = 1_u64;
    for kind in ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"] {
        let split = from.take(&format!("{config}.{kind}")).and_then(|v| whole(&v)).unwrap_or(1);
        devices_per_copy = devices_per_copy.saturating_mul(split);
    }
    let copies = (devices / devices_per_copy.max(1)).max(1);
    let mini_batch = per_device.saturating_mul(accumulated).saturating_mul(copies);
    to.put("algo.mini_batch_size", Value::new(Some(&mapping.unwrap_or_else(|| ORIGIN.to_string())), mini_batch));
    Ok(())
}

/// Translates how many steps ahead episodes are played: any number in ROLL, one or none here.
pub fn generation_ahead(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree, notes: &mut Vec<String>) {
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
pub fn warmup(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let number = |key: &str| to.get(key).and_then(whole).unwrap_or(1);
    let episodes = number("algo.num_env_groups").saturating_mul(number("algo.group_size"));
    let mini_batches = episodes.div_ceil(number("algo.mini_batch_size").max(1));
    let updates_per_step = number("algo.ppo_epochs").saturating_mul(mini_batches).max(1);
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
