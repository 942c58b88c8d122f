//! Merges the value of a higher layer over the value of a lower layer: maps merge, everything else is replaced.
//!
//! Two kinds of map are *choices*, and are replaced if the higher layer makes another choice: a component with another
//! `name`, and a map of one *word* with its value, such as `{last: 1}` over `{leap: {discount: 0.3}}`.

use config::{Value, ValueKind};

use super::schema;
use super::yaml::{Map, child};

/// A step from a value to one within it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Part {
    /// An entry of a map.
    Name(String),
    /// An entry of a list, which is lengthened if it is shorter.
    Index(usize),
}

/// Merges `value` over the value at `path` within `into`. `key` is the dotted key of `into`.
pub(super) fn put(into: &mut Value, key: &str, path: &[Part], value: Value) {
    let Some((first, rest)) = path.split_first() else { return merge(into, key, value) };
    match first {
        Part::Name(name) => {
            let is_word = schema::are_choices(key, [name, name]);
            let map = map_of(into);
            if is_word && rest.is_empty() && value.kind == ValueKind::Nil {
                // `null` removes the word, if it is the chosen one. Then nothing is chosen: the map becomes `null`.
                if map.remove(name).is_some() && map.is_empty() {
                    *into = value;
                }
                return;
            }
            if is_word {
                // The word replaces another word of the same choice.
                map.retain(|other, _| other == name || !schema::are_choices(key, [other, name]));
            }
            put(map.entry(name.clone()).or_insert_with(nothing), &child(key, name), rest, value);
        }
        Part::Index(index) => {
            let list = list_of(into);
            if list.len() <= *index {
                list.resize_with(index + 1, nothing);
            }
            put(&mut list[*index], &child(key, index), rest, value);
        }
    }
}

/// Merges `from` over `into`. Both are values of the dotted `key`.
pub(super) fn merge(into: &mut Value, key: &str, from: Value) {
    match (&mut into.kind, from) {
        (ValueKind::Table(old), Value { kind: ValueKind::Table(new), .. }) if !is_other_choice(key, old, &new) => {
            for (name, value) in new {
                match old.get_mut(&name) {
                    Some(old) => merge(old, &child(key, &name), value),
                    None => drop(old.insert(name, value)),
                }
            }
        }
        (_, from) => *into = from,
    }
}

/// Whether both maps are choices, and `new` chooses something else than `old`.
fn is_other_choice(key: &str, old: &Map, new: &Map) -> bool {
    let component_name = |map: &Map| map.get("name").map(|name| name.kind.clone());
    let has_other_name = || match (component_name(old), component_name(new)) {
        (Some(ValueKind::String(old)), Some(ValueKind::String(new))) => old != new,
        _ => false,
    };
    let has_other_word = || match (old.keys().next(), new.keys().next()) {
        (Some(word), Some(other)) if old.len() == 1 && new.len() == 1 => {
            word != other && schema::are_choices(key, [word, other])
        }
        _ => false,
    };
    (schema::is_component(key) && has_other_name()) || has_other_word()
}

/// The map in a value. A value that is no map becomes an empty one.
fn map_of(value: &mut Value) -> &mut Map {
    if !matches!(value.kind, ValueKind::Table(_)) {
        value.kind = ValueKind::Table(Map::new());
    }
    match &mut value.kind {
        ValueKind::Table(map) => map,
        _ => unreachable!("any other kind was replaced by a map above"),
    }
}

/// The list in a value. A value that is no list becomes an empty one.
fn list_of(value: &mut Value) -> &mut Vec<Value> {
    if !matches!(value.kind, ValueKind::Array(_)) {
        value.kind = ValueKind::Array(Vec::new());
    }
    match &mut value.kind {
        ValueKind::Array(list) => list,
        _ => unreachable!("any other kind was replaced by a list above"),
    }
}

/// A value that is not set yet.
fn nothing() -> Value {
    Value::new(None, ValueKind::Nil)
}
