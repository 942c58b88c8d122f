//! Which keys there are, and what to say about the others.

use serde_json::{Map, Value as Json};

use super::RunConfig;
use super::loaded::Provenance;
use roll_core::error::nearest;
use roll_core::registry::Registry;
use roll_core::{Error, Kind, Result};

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

/// Checks names and options of components, and fills in the defaults of options.
pub(super) fn check_components(tree: &mut Json, registry: &Registry, provenance: &Provenance) -> Result<()> {
    for kind in Kind::ALL {
        let section = kind.section();
        match tree.get_mut(section) {
            Some(Json::Array(items)) => {
                for (i, item) in items.iter_mut().enumerate() {
                    check_component(&format!("{section}.{i}"), kind, item, registry, provenance)?;
                }
            }
            // A section that may be left out.
            Some(Json::Null) | None => {}
            Some(item) => check_component(section, kind, item, registry, provenance)?,
        }
    }
    let checks = tree.get_mut("evaluation").and_then(|section| section.get_mut("check")).and_then(Json::as_array_mut);
    for (i, item) in checks.into_iter().flatten().enumerate() {
        check_component(&format!("evaluation.check.{i}"), Kind::Reward, item, registry, provenance)?;
    }
    Ok(())
}

fn check_component(
    key: &str,
    kind: Kind,
    component: &mut Json,
    registry: &Registry,
    provenance: &Provenance,
) -> Result<()> {
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
    if let Some(option) = map.keys().find(|k| !own(k) && !defaults.contains_key(*k)) {
        return Err(unknown(&format!("{key}.{option}"), &known, provenance));
    }
    for (option, default) in defaults {
        fill(map.entry(option).or_insert(Json::Null), default);
    }
    Ok(())
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
