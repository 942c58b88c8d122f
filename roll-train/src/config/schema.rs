//! The known keys, and messages about the others.

use serde_json::{Map, Value as Json};

use super::RunConfig;
use super::loaded::Provenance;
use roll_core::{Error, Kind, Registry, Result, nearest};

fn defaults() -> Json {
    serde_json::to_value(RunConfig::default()).unwrap_or(Json::Null)
}

/// The default at a dotted path.
pub(super) fn find(key: &str) -> Option<Json> {
    key.split('.').try_fold(defaults(), |tree, part| match tree {
        Json::Object(mut map) => map.remove(part),
        _ => None,
    })
}

/// Names at a dotted path, in the order they should be shown.
pub(super) fn order(key: &str) -> Vec<String> {
    match if key.is_empty() { Some(defaults()) } else { find(key) } {
        Some(Json::Object(map)) => map.keys().cloned().collect(),
        _ => vec!["name".into(), "weight".into()],
    }
}

/// The known key that `key` may have meant: the nearest at its level, or one of the same name at another.
pub(super) fn suggest(key: &str) -> Option<String> {
    let (parent, name) = key.rsplit_once('.').unwrap_or(("", key));
    let siblings = if parent.is_empty() { order("") } else { order(parent) };
    let prefix = if parent.is_empty() { String::new() } else { format!("{parent}.") };
    let near = nearest(name, siblings.iter().map(String::as_str)).map(|n| format!("{prefix}{n}"));
    near.or_else(|| {
        let paths = paths();
        let same = paths.iter().find(|p| p.rsplit('.').next() == Some(name)).cloned();
        same.or_else(|| {
            let near = nearest(name, paths.iter().filter_map(|p| p.rsplit('.').next()))?;
            paths.iter().find(|p| p.rsplit('.').next() == Some(near)).cloned()
        })
    })
}

/// Dotted paths of all keys of the typed sections.
fn paths() -> Vec<String> {
    let mut paths = Vec::new();
    if let Json::Object(map) = defaults() {
        for (name, value) in map {
            if let (Json::Object(inner), false) = (&value, is_component(&name)) {
                paths.extend(inner.keys().map(|k| format!("{name}.{k}")));
            }
            paths.push(name);
        }
    }
    paths
}

fn is_component(name: &str) -> bool {
    Kind::ALL.iter().any(|kind| kind.section() == name)
}

/// Fails on the first unknown key outside the options of components.
pub(super) fn check_keys(tree: &Json, provenance: &Provenance) -> Result<()> {
    let (Json::Object(tree), Json::Object(known)) = (tree, defaults()) else { return Ok(()) };
    for (name, value) in tree {
        let Some(default) = known.get(name) else { return Err(unknown(name, &known, provenance)) };
        if is_component(name) {
            continue;
        }
        if let Json::Object(known) = default {
            let Json::Object(section) = value else {
                return Err(not_a_map(name, value, provenance));
            };
            if let Some(key) = section.keys().find(|k| !known.contains_key(*k)) {
                return Err(unknown(&format!("{name}.{key}"), known, provenance));
            }
        }
    }
    Ok(())
}

/// Puts the default where `null` was said and is no value: `training: null` and `--unset seed` take back what other layers
/// said. Options of components have their defaults in the registry.
pub(super) fn fill_nulls(tree: &mut Json) {
    let (Json::Object(tree), Json::Object(defaults)) = (tree, defaults()) else { return };
    for (name, default) in defaults {
        match tree.get_mut(&name) {
            Some(Json::Object(_)) | None if is_component(&name) => {}
            Some(value) => fill(value, default),
            None => {}
        }
    }
}

/// Checks names and options of components, and fills in the defaults of options. Returns notes for the user.
pub(super) fn check_components(tree: &mut Json, registry: &Registry, provenance: &Provenance) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for kind in Kind::ALL {
        let section = kind.section();
        match tree.get_mut(section) {
            Some(Json::Array(items)) => {
                for (i, item) in items.iter_mut().enumerate() {
                    notes.extend(check_component(&format!("{section}.{i}"), kind, item, registry, provenance)?);
                }
            }
            // A section that may be left out.
            Some(Json::Null) | None => {}
            Some(item) => notes.extend(check_component(section, kind, item, registry, provenance)?),
        }
    }
    let checks = tree.get_mut("evaluation").and_then(|section| section.get_mut("check")).and_then(Json::as_array_mut);
    for (i, item) in checks.into_iter().flatten().enumerate() {
        let key = format!("evaluation.check.{i}");
        notes.extend(check_component(&key, Kind::Reward, item, registry, provenance)?);
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
    let Json::Object(map) = component else {
        return Err(not_a_map(key, component, provenance));
    };
    let name = match map.get("name") {
        Some(Json::String(name)) => name.clone(),
        Some(other) => {
            let place = provenance.place(&format!("{key}.name"));
            return Err(Error::config(format!("{key}.name"), format!("expected a name, found {other}{place}")));
        }
        None => {
            let place = provenance.place(key);
            return Err(Error::config(format!("{key}.name"), format!("missing: which {kind}?{place}")));
        }
    };
    let registration = registry.find(kind, &name).map_err(|e| {
        let name_key = format!("{key}.name");
        let place = provenance.place(&name_key);
        Error::config(name_key, format!("{e}{place}"))
    })?;
    let defaults = registration.options();
    let weighted = kind == Kind::Reward;
    let own = |k: &str| k == "name" || (weighted && k == "weight");
    let mut known = defaults.clone();
    known.insert("name".into(), Json::Null);
    if weighted {
        known.insert("weight".into(), Json::Null);
    }
    let mut left_out = Vec::new();
    let unknown_options: Vec<String> = map.keys().filter(|k| !own(k) && !defaults.contains_key(*k)).cloned().collect();
    for option in unknown_options {
        let option_key = format!("{key}.{option}");
        if !provenance.is_renamed(&format!("{key}.name"), &option_key) {
            return Err(unknown(&option_key, &known, provenance));
        }
        map.shift_remove(&option);
        left_out.push(option);
    }
    for option in registration.keys() {
        if let Some(value) = at(map, &option.name) {
            option.check(&format!("{key}.{}", option.name), value).map_err(|e| provenance.placed(e))?;
        }
    }
    for (option, default) in defaults {
        fill(map.entry(option).or_insert(Json::Null), default);
    }
    Ok((!left_out.is_empty()).then(|| {
        let place = provenance.place(&format!("{key}.name"));
        format!(
            "`{key}` is `{name}` now{place}: what a file says for another {kind} is left out: {}",
            left_out.join(", ")
        )
    }))
}

/// The value at a dotted path.
fn at<'a>(map: &'a Map<String, Json>, path: &str) -> Option<&'a Json> {
    let mut parts = path.split('.');
    let first = map.get(parts.next()?)?;
    parts.try_fold(first, |value, part| value.get(part))
}

/// Puts `default` where nothing was said; maps merge. A `null` that was said stays only where the default is `null`
/// or a scalar: for a component both mean "not set".
fn fill(value: &mut Json, default: Json) {
    match (value, default) {
        (Json::Object(map), Json::Object(defaults)) => {
            for (key, default) in defaults {
                fill(map.entry(key).or_insert(Json::Null), default);
            }
        }
        (value @ Json::Null, default) => *value = default,
        _ => {}
    }
}

fn unknown(key: &str, siblings: &Map<String, Json>, provenance: &Provenance) -> Error {
    let (parent, name) = key.rsplit_once('.').unwrap_or(("", key));
    let prefix = if parent.is_empty() { String::new() } else { format!("{parent}.") };
    let near = nearest(name, siblings.keys().map(String::as_str)).map(|n| format!("{prefix}{n}"));
    let hint = match near.or_else(|| suggest(key)) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("known keys: {}", siblings.keys().cloned().collect::<Vec<_>>().join(", ")),
    };
    Error::config(key, format!("unknown key; {hint}{}", provenance.place(key)))
}

fn not_a_map(key: &str, found: &Json, provenance: &Provenance) -> Error {
    Error::config(key, format!("expected a map, found {found}{}", provenance.place(key)))
}
