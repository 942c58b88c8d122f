//! The known keys, their defaults, and messages about the others.

use std::sync::LazyLock;

use serde_json::{Map, Value as Json};

use super::declared::DECLARED;
use super::provenance::Provenance;
use super::{RunConfig, TrainingConfig};
use roll_core::{
    Error, Kind, Registration, Registry, Result, inventory,
    keys::{self, Key},
};

/// Every key but the options of components, as the types describe them.
pub(super) static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
    let declared = DECLARED.iter().flat_map(|section| section.full_keys());
    keys::of::<RunConfig>().into_iter().chain(declared).collect()
});

/// The JSON schema of a configuration.
pub(super) static SCHEMA: LazyLock<Json> = LazyLock::new(|| {
    let mut schema = keys::schema_of::<RunConfig>();
    for section in DECLARED.iter() {
        schema["properties"][section.name] = (section.schema)();
    }
    schema
});

pub(super) static DEFAULTS: LazyLock<Json> = LazyLock::new(|| {
    let mut defaults = serde_json::to_value(RunConfig::default()).unwrap_or_default();
    for section in DECLARED.iter() {
        defaults[section.name] = (section.default)();
    }
    defaults
});

/// The lists of components within declared sections: full key and kind.
fn component_lists() -> impl Iterator<Item = (String, Kind)> {
    let lists = DECLARED.iter().flat_map(|section| section.components.iter().map(|list| (section.name, *list)));
    lists.map(|(section, (key, kind))| (format!("{section}.{key}"), kind))
}

pub(super) fn top_level() -> impl Iterator<Item = &'static str> + Clone {
    DEFAULTS.as_object().into_iter().flatten().map(|(name, _)| name.as_str())
}

/// Whether `key` takes text alone: `exp_name=2026` means the text.
pub(super) fn is_text(key: &str) -> bool {
    let key = general(key);
    KEYS.iter().any(|known| known.name == key && known.is_text())
}

/// `reward.0.align` and `reward[0].align` are `reward.N.align`.
pub fn general(key: &str) -> String {
    let dotted = key.replace('[', ".").replace(']', "");
    let part = |part: &str| if part.parse::<usize>().is_ok() { "N".to_string() } else { part.to_string() };
    dotted.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// The options of the linked components, by section.
static OPTIONS: LazyLock<Vec<(&str, Vec<Key>)>> = LazyLock::new(|| {
    let linked = inventory::iter::<Registration>.into_iter();
    linked.map(|component| (component.factory.kind().section(), component.keys())).collect()
});

/// Whether the value of `key` is a choice among maps of one word, and `words` are two of these words. Options of
/// plugins have no schema.
pub(super) fn are_choices(key: &str, words: [&str; 2]) -> bool {
    let of_linked = |key: &str| {
        let (section, option) = component_and_rest(key)?;
        let mut own = OPTIONS.iter().filter(|(of, _)| *of == section).flat_map(|(_, keys)| keys);
        Some(own.any(|known| known.are_choices(option, words)))
    };
    !key.is_empty() && (KEYS.iter().any(|known| known.are_choices(key, words)) || of_linked(key).unwrap_or(false))
}

/// Whether the value of `key` is a component: a name, and options of their own for each name.
pub(super) fn is_component(key: &str) -> bool {
    component_and_rest(key).is_some_and(|(_, rest)| rest.is_empty())
}

/// The section of the component in the value of which `key` is, and the key within the component.
fn component_and_rest(key: &str) -> Option<(&'static str, &str)> {
    let entry = |(list, kind): (String, Kind)| Some((kind.section(), key.strip_prefix(&list)?.strip_prefix('.')?));
    let (section, rest) = match component_lists().find_map(entry) {
        Some(entry) => entry,
        None => {
            let (name, rest) = key.split_once('.').unwrap_or((key, ""));
            (Kind::ALL.iter().map(|kind| kind.section()).find(|section| *section == name)?, rest)
        }
    };
    let (first, within) = rest.split_once('.').unwrap_or((rest, ""));
    Some((section, if first.parse::<usize>().is_ok() { within } else { rest }))
}

/// Replaces `null`, where it is not a value, by the default: `training: null` and `--unset seed` take back what lower
/// layers set. Options of components have their defaults in the registry.
pub(super) fn fill_nulls(tree: &mut Json) {
    let is_component = |name: &String| Kind::ALL.iter().any(|kind| kind.section() == name);
    for (name, default) in DEFAULTS.as_object().into_iter().flatten() {
        match tree.get_mut(name) {
            Some(Json::Object(_)) | None if is_component(name) => {}
            Some(value) => fill(value, default),
            None => {}
        }
    }
}

/// Sets the default learning rate, that of the algorithm if it has one of its own, unless a layer sets another: a tenth of
/// it where all weights are trained (`model.lora_rank: 0`).
pub(super) fn fill_learning_rate(tree: &mut Json, registry: &Registry, provenance: &Provenance) {
    let is_null = tree.pointer("/training/learning_rate").is_none_or(Json::is_null);
    if !is_null && provenance.is_set("training.learning_rate") {
        return;
    }
    let name = tree.pointer("/algo/name").and_then(Json::as_str).unwrap_or_default();
    let rate = registry.find(Kind::Algorithm, name).ok().and_then(|registration| registration.learning_rate);
    let is_whole = tree.pointer("/model/lora_rank").and_then(Json::as_u64) == Some(0);
    // The quotient of 1e-5 has another last bit than 1e-6.
    let tenth = |rate: f64| format!("{:.6e}", rate / 10.0).parse().unwrap_or(rate);
    let rate = rate.unwrap_or_else(|| TrainingConfig::default().learning_rate);
    let rate = if is_whole { tenth(rate) } else { rate };
    let training = tree.as_object_mut().map(|tree| tree.entry("training").or_insert(Json::Null));
    if let Some(training @ (Json::Null | Json::Object(_))) = training {
        training["learning_rate"] = rate.into();
    }
}

/// Checks names and options of components, and fills in the defaults of options. Returns notes for the user.
pub(super) fn check_components(tree: &mut Json, registry: &Registry, provenance: &Provenance) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    let sections = Kind::ALL.map(|kind| (kind.section().to_string(), kind));
    for (section, kind) in sections.into_iter().chain(component_lists()) {
        match tree.pointer_mut(&format!("/{}", section.replace('.', "/"))) {
            Some(Json::Array(items)) => {
                for (i, item) in items.iter_mut().enumerate() {
                    notes.extend(check_component(&format!("{section}.{i}"), kind, item, registry, provenance)?);
                }
            }
            Some(item @ Json::Object(_)) => {
                notes.extend(check_component(&section, kind, item, registry, provenance)?);
            }
            // A section that may be left out.
            _ => {}
        }
    }
    Ok(notes)
}

fn check_component(
    key: &str,
    kind: Kind,
    component: &mut Json,
    registry: &Registry,
    provenance: &Provenance,
) -> Result<Option<String>> {
    let name_key = format!("{key}.name");
    let name = component.get("name").and_then(Json::as_str).map(String::from);
    let (Some(name), Json::Object(map)) = (name, component) else {
        return Err(Error::config(name_key, format!("missing: which {kind}?{}", provenance.place(key))));
    };
    let registration = registry
        .find(kind, &name)
        .map_err(|e| Error::config(&name_key, format!("{e}{}", provenance.place(&name_key))))?;
    let defaults = registration.options();
    let common: &[&str] = if kind == Kind::Reward { &["name", "weight"] } else { &["name"] };
    let unknown: Vec<String> =
        map.keys().filter(|k| !common.contains(&k.as_str()) && !defaults.contains_key(*k)).cloned().collect();
    for option in &unknown {
        let option_key = format!("{key}.{option}");
        if !provenance.is_renamed(&name_key, &option_key) {
            let siblings = defaults.keys().map(String::as_str).chain(common.iter().copied());
            let others = registry.entries().iter().filter(|r| r.factory.kind() == kind);
            let others: Vec<String> = others
                .filter(|other| other.options().contains_key(option))
                .map(|other| format!("`{name_key}={}`", other.name))
                .collect();
            if keys::suggest(&option_key, siblings.clone(), &[]).is_none() && !others.is_empty() {
                let problem = format!("`{name}` has no such key; it belongs to {}", others.join(", "));
                return Err(provenance.with_place(Error::config(option_key, problem)));
            }
            return Err(provenance.with_place(keys::unknown(&option_key, siblings, &KEYS)));
        }
        map.shift_remove(option);
    }
    for option in registration.keys() {
        if let Some(value) = at(map, &option.name) {
            option.check(&format!("{key}.{}", option.name), value).map_err(|e| provenance.with_place(e))?;
        }
    }
    for (option, default) in defaults {
        fill(map.entry(option).or_insert(Json::Null), &default);
    }
    Ok((!unknown.is_empty()).then(|| {
        format!(
            "`{key}` is `{name}` now{}: what a file says for another {kind} is left out: {}",
            provenance.place(&name_key),
            unknown.join(", ")
        )
    }))
}

/// The value at a dotted path.
fn at<'a>(map: &'a mut Map<String, Json>, path: &str) -> Option<&'a mut Json> {
    let mut parts = path.split('.');
    let first = map.get_mut(parts.next()?)?;
    parts.try_fold(first, |value, part| value.get_mut(part))
}

/// Puts `default` where nothing was set; maps merge. A `null` that was set remains only where the default is `null` or
/// a scalar: for a component both mean "not set".
fn fill(value: &mut Json, default: &Json) {
    match (value, default) {
        (Json::Object(map), Json::Object(defaults)) => {
            for (key, default) in defaults {
                fill(map.entry(key).or_insert(Json::Null), default);
            }
        }
        (value @ Json::Null, default) => *value = default.clone(),
        _ => {}
    }
}
