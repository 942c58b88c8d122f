//! Translates the environments that an agent plays: the tags of training and validation, and the entries of
//! `custom_envs` that they name.

use std::path::Path;

use config::{Value, ValueKind};

use super::super::agentic_table::{
    AGENT_KEYS, DEFAULT_TAG, ENVIRONMENTS, HISTORY_LENGTH, MAX_CONCURRENT, MIXED, OWN_MESSAGES_ENV, STEP_MANAGER,
};
use super::super::tree::{ReferenceTree, TranslatedTree};
use super::super::{constant, origin, whole};
use crate::config::yaml::{Map, place};
use roll_core::{Error, Result};

/// Translates the entries of `custom_envs` that the tags of training and validation name. One environment becomes
/// `env`; several become the worlds of the environment `mixed`.
pub fn environments(
    path: &Path,
    from: &mut ReferenceTree,
    to: &mut TranslatedTree,
    notes: &mut Vec<String>,
) -> Result<()> {
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
