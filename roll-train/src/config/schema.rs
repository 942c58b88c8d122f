//! The known keys, their defaults and types. Fills in defaults, and checks the options of components with a registry.

use std::sync::LazyLock;

use serde_json::{Map, Value as Json};

use super::declared::DECLARED;
use super::provenance::Provenance;
use super::{RunConfig, TrainingConfig};
use roll_core::{
    Error, Kind, Registration, Registry, Result, inventory,
    keys::{self, Key},
};

/// Every key but the options of components, as the structs of the configuration describe them.
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

/// The default configuration, without options of components.
pub(super) static DEFAULTS: LazyLock<Json> = LazyLock::new(|| {
    let mut defaults = serde_json::to_value(RunConfig::default()).unwrap_or_default();
    for section in DECLARED.iter() {
        defaults[section.name] = (section.default)();
    }
    defaults
});

/// The keys of declared sections that hold lists of components, each with the kind of component.
fn component_lists() -> impl Iterator<Item = (String, Kind)> {
    DECLARED.iter().flat_map(|section| {
        section.components.iter().map(move |(key, kind)| (format!("{}.{key}", section.name), *kind))
    })
}

/// The names of the top-level keys.
pub(super) fn top_level() -> impl Iterator<Item = &'static str> + Clone {
    DEFAULTS.as_object().into_iter().flatten().map(|(name, _)| name.as_str())
}

/// Whether `key` takes text alone: `exp_name=2026` means the text.
pub(super) fn is_text(key: &str) -> bool {
    let key = general(key);
    KEYS.iter().any(|known| known.name == key && known.is_text())
}

/// The key with `N` for each index: `reward.0.align` and `reward[0].align` become `reward.N.align`.
pub fn general(key: &str) -> String {
    let dotted = key.replace('[', ".").replace(']', "");
    let general_name = |name: &str| if name.parse::<usize>().is_ok() { "N".to_string() } else { name.to_string() };
    dotted.split('.').map(general_name).collect::<Vec<_>>().join(".")
}

/// The options of each linked component, with the section of its kind.
static OPTIONS: LazyLock<Vec<(&str, Vec<Key>)>> = LazyLock::new(|| {
    let linked = inventory::iter::<Registration>.into_iter();
    linked.map(|component| (component.factory.kind().section(), component.keys())).collect()
});

/// Whether the value of `key` is a choice among maps of one word, see `merge.rs`, and both `words` are among the words
/// to choose from. Options of plugins are never choices, because they have no schema.
pub(super) fn are_choices(key: &str, words: [&str; 2]) -> bool {
    let in_linked_component = || {
        let (section, option) = component_and_rest(key)?;
        let of_section = OPTIONS.iter().filter(|(other, _)| *other == section);
        let mut options = of_section.flat_map(|(_, options)| options);
        Some(options.any(|known| known.are_tags_of_one_enum(option, words)))
    };
    let in_sections = || KEYS.iter().any(|known| known.are_tags_of_one_enum(key, words));
    !key.is_empty() && (in_sections() || in_linked_component().unwrap_or(false))
}

/// Whether the value of `key` is a component: a map with a name, and with options that depend on the name.
pub(super) fn is_component(key: &str) -> bool {
    component_and_rest(key).is_some_and(|(_, rest)| rest.is_empty())
}

/// Splits the key of a component, or of one of its options, into the section of its kind and the rest: `reward.0.align`
/// into `reward` and `align`. The rest is empty for the component itself. `None` for other keys.
fn component_and_rest(key: &str) -> Option<(&'static str, &str)> {
    // A component in a list of a declared section, such as `evaluation.check.0`, has the section of its kind.
    let in_list = |(list, kind): (String, Kind)| Some((kind.section(), key.strip_prefix(&list)?.strip_prefix('.')?));
    let in_own_section = || {
        let (name, rest) = key.split_once('.').unwrap_or((key, ""));
        let section = Kind::ALL.iter().map(|kind| kind.section()).find(|section| *section == name)?;
        Some((section, rest))
    };
    let (section, index_and_rest) = component_lists().find_map(in_list).or_else(in_own_section)?;
    let (first, rest) = index_and_rest.split_once('.').unwrap_or((index_and_rest, ""));
    let has_index = first.parse::<usize>().is_ok();
    Some((section, if has_index { rest } else { index_and_rest }))
}

/// Replaces `null` by the default, unless the default itself is `null`. So `training: null` and `--unset seed` undo
/// what lower layers set. Components are left out, because [`check_components`] fills in the defaults of their options.
pub(super) fn fill_nulls(tree: &mut Json) {
    let is_component = |name: &String| Kind::ALL.iter().any(|kind| kind.section() == name);
    for (name, default) in DEFAULTS.as_object().into_iter().flatten() {
        match tree.get_mut(name) {
            Some(Json::Object(_)) | None if is_component(name) => {}
            Some(value) => fill(name, value, default, &KEYS),
            None => {}
        }
    }
}

/// Sets the learning rate, unless a layer sets it. It becomes the default of the algorithm, or else the default of all
/// runs. If all weights are trained (`model.lora_rank: 0`), it becomes a tenth of this default.
pub(super) fn fill_learning_rate(tree: &mut Json, registry: &Registry, provenance: &Provenance) {
    let is_null = tree.pointer("/training/learning_rate").is_none_or(Json::is_null);
    if !is_null && provenance.is_set("training.learning_rate") {
        return;
    }
    let name = tree.pointer("/algo/name").and_then(Json::as_str).unwrap_or_default();
    let rate_of_algorithm =
        registry.find(Kind::Algorithm, name).ok().and_then(|registration| registration.learning_rate);
    let default_rate = rate_of_algorithm.unwrap_or_else(|| TrainingConfig::default().learning_rate);
    let trains_all_weights = tree.pointer("/model/lora_rank").and_then(Json::as_u64) == Some(0);
    // By way of a decimal, because 1e-5 / 10 differs from 1e-6 in its last bit.
    let tenth = |rate: f64| format!("{:.6e}", rate / 10.0).parse().unwrap_or(rate);
    let rate = if trains_all_weights { tenth(default_rate) } else { default_rate };
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
            // An optional section that is missing.
            _ => {}
        }
    }
    Ok(notes)
}

/// Checks the component at `key`, and fills in the defaults of its options. Returns a note if options were left out,
/// because they belong to a component that an argument replaced (see [`Provenance::is_renamed`]).
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
    let keys_of_kind: &[&str] = if kind == Kind::Reward { &["name", "weight", "device"] } else { &["name"] };
    let is_known = |option: &str| keys_of_kind.contains(&option) || defaults.contains_key(option);
    let unknown: Vec<String> = map.keys().filter(|option| !is_known(option)).cloned().collect();
    for option in &unknown {
        let option_key = format!("{key}.{option}");
        if !provenance.is_renamed(&name_key, &option_key) {
            let siblings = defaults.keys().map(String::as_str).chain(keys_of_kind.iter().copied());
            let of_kind = registry.entries().iter().filter(|entry| entry.factory.kind() == kind);
            let with_option: Vec<String> = of_kind
                .filter(|component| component.options().contains_key(option))
                .map(|component| format!("`{name_key}={}`", component.name))
                .collect();
            let is_misspelt = keys::suggest(&option_key, siblings.clone(), &[]).is_some();
            if !is_misspelt && !with_option.is_empty() {
                let problem = format!("`{name}` has no such key; it belongs to {}", with_option.join(", "));
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
    let keys = registration.keys();
    for (option, default) in defaults {
        fill(&option.clone(), map.entry(option).or_insert(Json::Null), &default, &keys);
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

/// Replaces `null` in the value of the key `path` by what `default` has there. A map of fields is filled field by field.
/// A map of `keys` that has no fields, a choice (`{uniform: 8}`) or a map whose keys are data (`{VQ: 1}`), is replaced
/// as a whole: an entry of the default beside those of the user would be another choice, or data of nobody.
fn fill(path: &str, value: &mut Json, default: &Json, keys: &[Key]) {
    // The keys of a map of fields are listed in its place.
    let has_no_fields = || keys.iter().any(|key| key.name == path && !key.schema.is_null());
    match (value, default) {
        (Json::Object(_), Json::Object(_)) if has_no_fields() => {}
        (Json::Object(map), Json::Object(defaults)) => {
            for (name, default) in defaults {
                fill(&format!("{path}.{name}"), map.entry(name).or_insert(Json::Null), default, keys);
            }
        }
        (value @ Json::Null, default) => *value = default.clone(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_and_maps_of_data_are_not_mixed_with_the_default() {
        let key = |name: &str| Key {
            name: name.into(),
            about: String::new(),
            values: String::new(),
            choices: Vec::new(),
            default: None,
            schema: serde_json::json!({"type": "object"}),
        };
        // `inner` is a map of fields: its fields are listed.
        let keys = [key("frames"), key("inner.depth"), key("inner.weights")];
        let default = serde_json::json!({"uniform": 8});
        let mut value = serde_json::json!({"every": 2});
        fill("frames", &mut value, &default, &keys);
        assert_eq!(value, serde_json::json!({"every": 2}));
        let mut absent = Json::Null;
        fill("frames", &mut absent, &default, &keys);
        assert_eq!(absent, default);
        let default = serde_json::json!({"depth": 2, "weights": {"a": 1}});
        let mut value = serde_json::json!({"weights": {"b": 3}});
        fill("inner", &mut value, &default, &keys);
        assert_eq!(value, serde_json::json!({"depth": 2, "weights": {"b": 3}}));
    }
}
