//! Translates ROLL's own configurations into this project's keys: configurations of Reward-FL
//! (`reward_fl_config.yaml`) here, configurations of the agentic pipeline in `agentic`.
//!
//! A key keeps its meaning. A key that is missing gets ROLL's default if that default differs from ours. Keys that have
//! no effect here are listed in a note.
//!
//! Apart from the defaults of [`RunConfig`](super::RunConfig), this is the only module of this crate that knows
//! components by name, because a configuration of ROLL does not name them as ours do. The names and keys are in
//! `table.rs` and `agentic_table.rs`.

mod agentic;
mod agentic_table;
mod table;
mod tree;

use std::path::Path;

use config::{Value, ValueKind};

use super::yaml::{Map, parse_value, place};
use roll_core::{Error, Result};
use table::{
    ALGORITHM, CONFIG_KWARGS, DEFAULTS, LORA_KEYS, NETWORK, REWARD, REWARD_CHANNELS, REWARD_PATH, SECTIONS, STRATEGY,
    UNCHANGED, ZERO_BLOCK, ZERO_KEYS,
};
use tree::{ReferenceTree, TranslatedTree};

/// Origin of values that ROLL's code implies.
const ORIGIN: &str = "as in ROLL";
/// Origin of values that are defaults of ROLL's options.
const ROLL_DEFAULT: &str = "ROLL's default";
/// Bound of the numbers of epochs that are converted from a float, far below the integers that a float rounds.
const MAX_EPOCHS: f64 = 1e9;

/// Whether a mapping is a configuration of ROLL.
pub(super) fn is_reference(map: &Map) -> bool {
    SECTIONS.iter().any(|key| map.contains_key(*key))
}

/// Translates the mapping of the file `path`, for a job of `ranks` ranks. Also returns notes for the user.
pub(super) fn translate(path: &Path, map: Map, ranks: usize) -> Result<(Map, Vec<String>)> {
    let mut from = ReferenceTree::new(map);
    if agentic::is_agentic(&from) {
        return agentic::translate(path, from);
    }
    if from.get(CONFIG_KWARGS).is_none() {
        let problem = format!(
            "a configuration of ROLL, but not of Reward-FL (there is no `{CONFIG_KWARGS}`) nor of its agentic pipeline \
             (`custom_envs`, `train_env_manager`); others are not read"
        );
        return Err(Error::bad_file(path, problem));
    }
    let mut to = TranslatedTree::new();
    let mut notes = Vec::new();
    copy_keys(&mut from, &mut to, UNCHANGED);
    network(&mut from, &mut to);
    limits(path, &mut from, &mut to)?;
    betas(&mut from, &mut to);
    // DeepSpeed clips to this norm if it is a number; `auto` means `max_grad_norm`.
    if let Some(value) = from.take("actor_train.strategy_args.strategy_config.gradient_clipping")
        && !is_auto(&value)
    {
        to.put("training.max_grad_norm", value);
    }
    precision(&mut from, &mut to);
    reward(&mut from, &mut to);
    strategy(&mut from, &mut to);
    fill_defaults(&mut to, DEFAULTS);
    batch(path, ranks as u64, &mut from, &mut to, &mut notes)?;
    to.put("algo.name", constant(ALGORITHM));
    let unused = from.unused(path);
    if !unused.is_empty() {
        notes.push(format!(
            "{}: a configuration of ROLL's Reward-FL; without effect here: {}",
            path.display(),
            unused.join(", ")
        ));
    }
    Ok((to.into_map(), notes))
}

/// Copies the values of `keys` (ROLL's, ours) unchanged.
fn copy_keys(from: &mut ReferenceTree, to: &mut TranslatedTree, keys: &[(&str, &str)]) {
    for (theirs, ours) in keys {
        if let Some(value) = from.take(theirs) {
            to.put(ours, value);
        }
    }
}

/// Sets the keys that are missing to ROLL's defaults.
fn fill_defaults(to: &mut TranslatedTree, defaults: &[(&str, &str)]) {
    for (key, default) in defaults {
        if !to.has(key) {
            // The defaults in the tables are valid YAML. A text that is not would be taken as it is.
            let value = parse_value(default, ROLL_DEFAULT)
                .unwrap_or_else(|_| Value::new(Some(&ROLL_DEFAULT.to_string()), *default));
            to.put(key, value);
        }
    }
}

/// Translates network, trajectory and LoRA. Without `lora_base_model` ROLL trains every weight of `trainable_models`,
/// and reads none of the keys about LoRA.
fn network(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let base_key = format!("{CONFIG_KWARGS}.lora_base_model");
    let is_empty = |value: &Value| match &value.kind {
        ValueKind::Nil => true,
        ValueKind::String(text) => text.is_empty(),
        _ => false,
    };
    let has_lora = from.get(&base_key).is_some_and(|value| !is_empty(value));
    if !has_lora {
        // Taken, so that the empty key is not listed as one without effect.
        from.take(&base_key);
        to.put("model.lora_rank", Value::new(Some(&"as in ROLL without `lora_base_model`".to_string()), 0));
    }
    for (theirs, ours) in NETWORK {
        if (has_lora || !LORA_KEYS.contains(theirs))
            && let Some(value) = from.take(&format!("{CONFIG_KWARGS}.{theirs}"))
        {
            to.put(ours, value);
        }
    }
}

/// Translates the length of a run and the number of kept checkpoints. Fails if the configuration names a checkpoint to
/// resume from.
fn limits(path: &Path, from: &mut ReferenceTree, to: &mut TranslatedTree) -> Result<()> {
    copy_keys(from, to, &[("max_steps", "max_steps")]);
    checkpoints_to_keep(from, to);
    if let Some(value) = from.take("actor_train.training_args.num_train_epochs") {
        let epochs = match value.kind {
            // ROLL's number of epochs may be written `2.0`; ours is an integer.
            ValueKind::Float(epochs) if epochs.fract() == 0.0 && (0.0..MAX_EPOCHS).contains(&epochs) => {
                Value::new(origin(&value).as_ref(), epochs as u64)
            }
            _ => value,
        };
        to.put("training.num_train_epochs", epochs);
    }
    match from.get("resume_from_checkpoint") {
        None | Some(Value { kind: ValueKind::Boolean(false) | ValueKind::Nil, .. }) => Ok(()),
        Some(resume) => {
            let remedy = "go on with `roll run --resume RUN`, whose directory is named there";
            Err(Error::bad_file(path, format!("`resume_from_checkpoint: {resume}`: {remedy}")))
        }
    }
}

/// Translates the number of kept checkpoints. ROLL's 0 keeps all, which is our default, so it is left out.
fn checkpoints_to_keep(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    if let Some(value) = from.take("max_ckpt_to_keep")
        && !matches!(value.kind, ValueKind::I64(0) | ValueKind::U64(0))
    {
        to.put("max_ckpt_to_keep", value);
    }
}

/// Translates the two decay rates of Adam into a list. A rate that is missing gets ROLL's default.
fn betas(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let [beta1, beta2] = ["adam_beta1", "adam_beta2"].map(|key| from.take(&format!("actor_train.training_args.{key}")));
    let Some(first) = beta1.as_ref().or(beta2.as_ref()) else { return };
    let list_origin = origin(first);
    let list = vec![beta1.unwrap_or_else(|| constant(0.9)), beta2.unwrap_or_else(|| constant(0.999))];
    to.put("training.betas", Value::new(list_origin.as_ref(), ValueKind::Array(list)));
}

/// Translates the dtype of the frozen weights if it is bf16 or f32. Other dtypes have no effect.
fn precision(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let key = "actor_train.model_args.dtype";
    let text = from.get(key).and_then(|value| value.clone().into_string().ok()).unwrap_or_default();
    let ours = match text.as_str() {
        "bf16" | "bfloat16" => "bf16",
        "fp32" | "float32" => "f32",
        _ => return,
    };
    if let Some(value) = from.take(key) {
        to.put("model.weights_dtype", Value::new(origin(&value).as_ref(), ours));
    }
}

/// Translates the path of the reward's networks. ROLL's pipeline has one reward, which it does not name.
fn reward(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    let Some(path) = from.take(&format!("{CONFIG_KWARGS}.{REWARD_PATH}")) else { return };
    let (channels_option, channel_order) = REWARD_CHANNELS;
    let options = [("name", constant(REWARD)), (REWARD_PATH, path), (channels_option, constant(channel_order))];
    let options: Map = options.into_iter().map(|(key, value)| (key.to_string(), value)).collect();
    to.put("reward", constant(ValueKind::Array(vec![constant(ValueKind::Table(options))])));
}

/// Translates DeepSpeed's options of ZeRO. A value of `auto` leaves our default.
fn strategy(from: &mut ReferenceTree, to: &mut TranslatedTree) {
    // Taken, so that it is not listed as a key without effect: whatever ROLL's strategy, ours is `zero`.
    from.take("actor_train.strategy_args.strategy_name");
    to.put("strategy.name", constant(STRATEGY));
    for key in ZERO_KEYS {
        let theirs = format!("{ZERO_BLOCK}.{key}");
        if from.get(&theirs).is_some_and(|value| !is_auto(value))
            && let Some(value) = from.take(&theirs)
        {
            to.put(&format!("strategy.{key}"), value);
        }
    }
}

/// Translates the number of accumulation steps, and `max_steps`, which depends on the batch size.
///
/// An update of ROLL takes `per_device_train_batch_size * gradient_accumulation_steps` samples on each device of
/// `device_mapping`. An update here takes the same number in all, divided among `ranks` ranks.
fn batch(
    path: &Path,
    ranks: u64,
    from: &mut ReferenceTree,
    to: &mut TranslatedTree,
    notes: &mut Vec<String>,
) -> Result<()> {
    let accumulation_key = "actor_train.training_args.gradient_accumulation_steps";
    let accumulation_value =
        from.take(accumulation_key).unwrap_or_else(|| Value::new(Some(&ROLL_DEFAULT.to_string()), 1u64));
    let (devices, mapping_origin) = devices(path, from)?;
    let per_device = to.get("training.per_device_train_batch_size").and_then(whole);
    let (Some(accumulation), Some(per_device)) = (whole(&accumulation_value), per_device) else {
        // Not a number above 0: the check of our own key reports it with its place.
        to.put("training.gradient_accumulation_steps", accumulation_value);
        return Ok(());
    };
    // Numbers in a file may be so large that their product does not fit.
    let accumulation_of_all = accumulation.saturating_mul(devices);
    let samples_per_update = accumulation_of_all.saturating_mul(per_device);
    let accumulation_here = match accumulation_of_all.checked_rem(ranks) {
        Some(0) => accumulation_of_all / ranks,
        _ => {
            notes.push(format!(
                "{}: an update of {samples_per_update} samples cannot be divided among {ranks} ranks; each takes {}",
                path.display(),
                accumulation.saturating_mul(per_device)
            ));
            accumulation
        }
    };
    let origin_here = match mapping_origin {
        Some(place) if accumulation_here != accumulation => {
            format!("the {devices} devices at {place}, on {ranks} ranks")
        }
        _ => origin_or_roll(&accumulation_value),
    };
    to.put("training.gradient_accumulation_steps", Value::new(Some(&origin_here), accumulation_here));
    steps_to_updates(samples_per_update, from, to);
    Ok(())
}

/// Translates `max_steps`. A step of ROLL takes `train_batch_size` samples, which may be several updates. Here a step
/// is one update.
fn steps_to_updates(samples_per_update: u64, from: &mut ReferenceTree, to: &mut TranslatedTree) {
    if let Some(samples_per_step) = from.take("train_batch_size").as_ref().and_then(whole)
        && samples_per_step > samples_per_update
        && let Some(max_steps) = to.get("max_steps").cloned()
        && let Some(steps) = whole(&max_steps)
    {
        let updates = steps.saturating_mul(samples_per_step.div_ceil(samples_per_update));
        to.put("max_steps", Value::new(Some(&origin_or_roll(&max_steps)), updates));
    }
}

/// The number of devices in `device_mapping`, and the place of that key in the file. Without the key, 1 device.
fn devices(path: &Path, from: &mut ReferenceTree) -> Result<(u64, Option<String>)> {
    let key = "actor_train.device_mapping";
    let Some(mapping) = from.take(key).filter(|mapping| mapping.kind != ValueKind::Nil) else { return Ok((1, None)) };
    let count = count_devices(&mapping).ok_or_else(|| {
        let expected = "expected a list of devices such as list(range(0,8))";
        Error::bad_file(path, format!("`{key}`: {expected}, found {mapping}{}", place(&mapping)))
    })?;
    Ok((count, origin(&mapping)))
}

/// The number of devices in a list, or in the text of a Python expression: `list(range(0,8))`, `[0,1]`, or a sum of
/// such lists. `None` if the value is neither, or has no device.
fn count_devices(value: &Value) -> Option<u64> {
    if let ValueKind::Array(items) = &value.kind {
        return u64::try_from(items.len()).ok().filter(|n| *n > 0);
    }
    let text: String = value.clone().into_string().ok()?.chars().filter(|c| !c.is_whitespace()).collect();
    let mut count = 0u64;
    for list in text.split('+') {
        let length = match list.strip_prefix("list(") {
            Some(range) => length_of_range(range.strip_suffix(')')?)?,
            None => length_of_list(list)?,
        };
        count = count.checked_add(length)?;
    }
    (count > 0).then_some(count)
}

/// The number of integers in Python's `range(end)`, `range(start,end)` or `range(start,end,step)`; `None` for any other
/// text.
fn length_of_range(text: &str) -> Option<u64> {
    let arguments = text.strip_prefix("range(")?.strip_suffix(')')?.split(',');
    let arguments = arguments.map(|n| n.parse::<u32>().ok().map(u64::from)).collect::<Option<Vec<u64>>>()?;
    match arguments[..] {
        [end] => Some(end),
        [start, end] => Some(end.saturating_sub(start)),
        [start, end, step] if step > 0 => Some(end.saturating_sub(start).div_ceil(step)),
        _ => None,
    }
}

/// The number of integers in Python's `[0,1]`; `None` for any other text.
fn length_of_list(text: &str) -> Option<u64> {
    let items = text.strip_prefix('[')?.strip_suffix(']')?.split(',').filter(|item| !item.is_empty());
    let items = items.map(|item| item.parse::<u32>().ok()).collect::<Option<Vec<u32>>>()?;
    Some(items.len() as u64)
}

/// A value that ROLL's code implies.
fn constant(value: impl Into<ValueKind>) -> Value {
    Value::new(Some(&ORIGIN.to_string()), value)
}

/// Whether the value is `auto`, with which DeepSpeed chooses the value itself.
fn is_auto(value: &Value) -> bool {
    matches!(&value.kind, ValueKind::String(text) if text == "auto")
}

/// The value as a whole number above 0.
fn whole(value: &Value) -> Option<u64> {
    value.clone().into_uint().ok().filter(|n| *n > 0)
}

/// The origin of a value; `None` for a value that is in no file.
fn origin(value: &Value) -> Option<String> {
    value.origin().map(String::from)
}

/// The origin of a value; [`ORIGIN`] for a value that is in no file.
fn origin_or_roll(value: &Value) -> String {
    value.origin().unwrap_or(ORIGIN).to_string()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::ConfigLayers;
    use super::*;
    use crate::config::LoadedConfig;

    /// A configuration in ROLL's words, with the DeepSpeed block in a file of its own.
    fn write(dir: &Path, change: impl Fn(String) -> String) -> PathBuf {
        let text = "defaults:\n  - ../config/zero2@_here_\n  - ../config/zero3@_here_\n\
             hydra:\n  run:\n    dir: .\nexp_name: first\nseed: 7\nlogging_dir: logs\noutput_dir: out\n\
             checkpoint_config:\n  type: file_system\nsave_steps: 25\nresume_from_checkpoint: false\n\
             train_batch_size: 8\nmax_grad_norm: 0.5\n\
             actor_train:\n  model_args:\n    model_type: diffusion_module\n    dtype: bf16\n    model_config_kwargs:\n      \
             model_name: wan2_2\n      model_paths: paths.json\n      reward_model_path: faces/\n      \
             model_id_with_origin_paths: null\n      trainable_models: dit2\n      min_timestep_boundary: 0.9\n      \
             mid_timestep: 4\n      lora_base_model: dit2\n      lora_rank: 16\n  training_args:\n    learning_rate: 2.5e-6\n    \
             per_device_train_batch_size: 1\n    num_train_epochs: 2.0\n  data_args:\n    file_name: data/m.csv\n    \
             preprocessing_num_workers: 2\n  strategy_args:\n    strategy_name: diffusion_deepspeed_train\n    \
             strategy_config: ${zero2}\n  device_mapping: list(range(0,8))\nsystem_envs:\n  A: '0'\n";
        std::fs::create_dir_all(dir.join("config")).unwrap();
        std::fs::create_dir_all(dir.join("example")).unwrap();
        let block = "  train_micro_batch_size_per_gpu: auto\n  zero_optimization:\n    stage: STAGE\n    \
             reduce_bucket_size: 5.0e+8\n    allgather_partitions: true\n    sub_group_size: auto\n    \
             offload_param:\n      device: cpu\n      pin_memory: true\n";
        for stage in ["2", "3"] {
            let text = format!("zero{stage}:\n{}", block.replace("STAGE", stage));
            std::fs::write(dir.join(format!("config/zero{stage}.yaml")), text).unwrap();
        }
        let path = dir.join("example/reward_fl_config.yaml");
        std::fs::write(&path, change(text.to_string())).unwrap();
        path
    }

    fn load(change: impl Fn(String) -> String) -> Result<LoadedConfig> {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), change);
        ConfigLayers::new().file(path)?.set("seed=8")?.load(None)
    }

    #[test]
    fn translates_options_of_the_schedule() {
        let rate = "    learning_rate: 2.5e-6\n";
        let schedule =
            format!("{rate}    lr_scheduler_type: polynomial\n    lr_scheduler_kwargs: {{power: 2, lr_end: 1.0e-7}}\n");
        let training = load(|text| text.replace(rate, &schedule)).unwrap().config.training;
        assert_eq!(training.lr_scheduler_type, roll_backends::optimizer::LrSchedulerType::Polynomial);
        assert_eq!((training.lr_scheduler_kwargs.power, training.lr_scheduler_kwargs.lr_end), (2.0, 1e-7));
    }

    #[test]
    fn translates_reward_fl_and_lists_keys_without_effect_once() {
        let loaded = load(|text| text).unwrap();
        let c = &loaded.config;
        assert_eq!((c.exp_name.as_deref(), c.seed, c.save_steps, c.steps), (Some("first"), 8, 25, None));
        assert_eq!((c.max_steps, c.training.num_train_epochs), (Some(500), 2));
        let data = |key| loaded.declared_value("data", key).unwrap();
        assert_eq!((data("repeat"), data("metadata")), (&100.into(), &"data/m.csv".into()));
        assert_eq!((c.training.learning_rate, c.training.max_grad_norm), (2.5e-6, 0.5));
        assert_eq!(c.training.lr_scheduler_type, roll_backends::optimizer::LrSchedulerType::Linear, "ROLL's default");
        assert_eq!(c.training.gradient_accumulation_steps, 8, "eight devices' samples on one rank");
        assert_eq!((c.model.name.as_str(), &c.model.options["lora_rank"]), ("wan2_2", &16.into()));
        assert_eq!(c.model.options["weights_dtype"], "bf16");
        assert_eq!((c.algo.name.as_str(), &c.algo.options["mid_timestep"]), ("reward_fl", &4.into()));
        assert_eq!(c.algo.options["shift"], 5.0, "whatever the model's own is");
        let reward = &c.reward[0];
        assert_eq!((reward.name.as_str(), &reward.options["channel_order"]), ("insightface", &"bgr".into()));
        assert_eq!(reward.options["reward_model_path"], "faces/");
        assert_eq!((c.strategy.name.as_str(), &c.strategy.options["stage"]), ("zero", &2.into()));
        assert_eq!(c.strategy.options["offload_param"]["device"], "cpu");
        assert!(!c.strategy.options.contains_key("sub_group_size"), "auto is our default");
        assert!(loaded.provenance.of("training.learning_rate").contains("reward_fl_config.yaml:"));
        assert!(loaded.provenance.of("strategy.stage").contains("zero2.yaml:"));
        assert_eq!(loaded.provenance.of("max_steps"), "ROLL's default");

        let [note] = &loaded.notes[..] else { panic!("{:?}", loaded.notes) };
        let listed = note.split("without effect here: ").nth(1).unwrap();
        for key in [
            "hydra",
            "logging_dir",
            "checkpoint_config",
            "system_envs",
            "actor_train.model_args.model_type",
            "actor_train.model_args.model_config_kwargs.min_timestep_boundary",
            "actor_train.data_args.preprocessing_num_workers",
            "actor_train.strategy_args.strategy_config.zero_optimization.allgather_partitions",
        ] {
            assert_eq!(listed.split(", ").filter(|k| *k == key).count(), 1, "{key}: {note}");
        }
        assert!(!listed.contains("zero3") && !listed.contains("learning_rate"), "{note}");
    }

    #[test]
    fn trains_every_weight_without_lora_base_model() {
        for instead in ["", "lora_base_model: null\n      ", "lora_base_model: ''\n      "] {
            let loaded = load(|text| text.replace("lora_base_model: dit2\n      ", instead)).unwrap();
            assert_eq!(loaded.config.model.options["lora_rank"], 0);
            assert!(loaded.provenance.of("model.lora_rank").contains("as in ROLL"));
            let listed = loaded.notes[0].split("without effect here: ").nth(1).unwrap();
            assert!(listed.contains("model_config_kwargs.lora_rank"), "{listed}");
            assert!(!listed.contains("lora_base_model"), "{listed}");
        }
    }

    #[test]
    fn rejects_values_that_cannot_be_translated() {
        let error = |change: &dyn Fn(String) -> String| load(change).unwrap_err().to_string();
        let message = error(&|t| t.replace("list(range(0,8))", "everything"));
        assert!(message.contains("device_mapping") && message.contains("everything"), "{message}");
        let message = error(&|t| t.replace("resume_from_checkpoint: false", "resume_from_checkpoint: true"));
        assert!(message.contains("--resume"), "{message}");
        let message = error(&|t| t.replace("model_config_kwargs", "something_else"));
        assert!(message.contains("not of Reward-FL"), "{message}");
        let message = error(&|t| t.replace("learning_rate: 2.5e-6", "learning_rate: fast"));
        assert!(message.contains("training.learning_rate") && message.contains("yaml:"), "{message}");
        let message = error(&|t| t.replace("per_device_train_batch_size: 1", "per_device_train_batch_size: 0"));
        assert!(message.contains("per_device_train_batch_size"), "{message}");
    }

    #[test]
    fn device_mappings_are_counted_as_in_python() {
        for (text, count) in [
            ("list(range(0,8))", Some(8)),
            ("list(range(4))", Some(4)),
            ("list(range(0, 16, 2))", Some(8)),
            ("[0, 1,2]", Some(3)),
            ("list(range(0,2)) + list(range(4,6))", Some(4)),
            ("list(range(8,0))", None),
            ("os.system('x')", None),
            ("list(range(0,8,0))", None),
            ("", None),
        ] {
            assert_eq!(count_devices(&Value::new(None, text)), count, "{text}");
        }
    }
}
