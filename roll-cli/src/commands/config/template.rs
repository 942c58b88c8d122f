//! A configuration to begin with: every key after a comment with its meaning. Keys that have their default are
//! commented out, so that the file changes nothing until a person uncomments one.

use std::collections::BTreeMap;

use roll_core::serde_json::{Map, Value as Json};
use roll_core::{Key, Kind, Result};
use roll_train::config::{LoadedConfig, Section, general};

use super::reference::wrapped;

/// Columns of a line.
const COLUMNS: usize = 100;
/// Columns of indentation of each level of keys.
const INDENT: usize = 2;
/// The beginning of a comment.
const COMMENT_MARK: &str = "# ";

/// The configuration as YAML, which `--config` takes.
pub fn template(loaded: &LoadedConfig, sections: &[Section]) -> Result<String> {
    let tree = loaded.tree()?;
    let set_keys =
        loaded.listing()?.into_iter().filter(|entry| entry.origin != "default").map(|entry| entry.key).collect();
    let mut text = String::from(
        "# `roll run --config FILE` takes this file, `roll check --config FILE` looks at all that it names.\n\
         # Keys that are commented out show their defaults.\n",
    );
    let mut writer = Writer { sections, set_keys, text: &mut text };
    let whole = tree.as_object().cloned().unwrap_or_default();
    let (plain, nested): (Map<_, _>, Map<_, _>) = whole.into_iter().partition(|(_, value)| !is_nested(value));
    // Plain values come before sections: after one, a person would take them for keys of the section.
    let top = MapContext { key: "", indent: 0, component: None };
    writer.write_map(&top, &plain);
    writer.write_map(&top, &nested);
    Ok(text)
}

/// Whether the value is written on lines of its own below its key.
fn is_nested(value: &Json) -> bool {
    match value {
        Json::Object(map) => !map.is_empty(),
        Json::Array(items) => items.iter().any(Json::is_object),
        _ => false,
    }
}

/// Writes the template.
struct Writer<'a> {
    sections: &'a [Section],
    /// Keys of values that are not left at their default.
    set_keys: Vec<String>,
    text: &'a mut String,
}

/// A map that is being written.
struct MapContext<'a> {
    /// The key of the map, such as `algo`; empty for the whole configuration.
    key: &'a str,
    indent: usize,
    /// The component whose options the map has, directly or in a nested map.
    component: Option<ComponentAt<'a>>,
}

/// A component of the configuration.
#[derive(Clone, Copy)]
struct ComponentAt<'a> {
    kind: Kind,
    name: &'a str,
    /// The key of its section: `algo`, or `reward.0` for the first of several.
    key: &'a str,
}

impl<'a> Writer<'a> {
    /// Writes the keys of a map, each after its documentation.
    fn write_map(&mut self, context: &MapContext<'_>, map: &Map<String, Json>) {
        let mut entries: Vec<_> = map.iter().collect();
        if context.component.is_some() {
            // In the tree the keys that were set come first. Here `name` comes first, and then all options in the order
            // of the component's documentation.
            entries.sort_by_key(|(name, _)| (*name != "name", self.position(context, name)));
        }
        for (name, value) in entries {
            let key = if context.key.is_empty() { name.clone() } else { format!("{}.{name}", context.key) };
            let sections = self.sections;
            let documentation = self.documentation(context, &key);
            if context.indent == 0 {
                self.text.push('\n');
            }
            if let Some(documentation) = documentation {
                self.write_documentation(context.indent, documentation);
            } else if let Some(section) = sections.iter().find(|s| s.name == *name && s.component.is_none()) {
                self.write_comment(context.indent, &section.about);
            }
            let is_name_of_component = context.component.is_some_and(|c| c.key == context.key) && name == "name";
            // A key that is not active is commented out. A component needs its name.
            let is_active = self.is_set(&key) || is_name_of_component;
            let own_component = component(&key, value);
            let mark = if is_active { "" } else { "#" };
            match value {
                // A map whose keys are listed one by one.
                Json::Object(inner) if !inner.is_empty() && (documentation.is_none() || own_component.is_some()) => {
                    // A section is not commented out: with all of its keys commented out, it has no effect.
                    let mark = if context.indent == 0 { "" } else { mark };
                    self.write_line(context.indent, &format!("{mark}{name}:"));
                    let component = own_component.or(context.component);
                    self.write_map(&MapContext { key: &key, indent: context.indent + INDENT, component }, inner);
                }
                // A list whose entries are maps.
                Json::Array(items) if items.iter().any(Json::is_object) && is_active => {
                    self.write_line(context.indent, &format!("{name}:"));
                    for (i, item) in items.iter().enumerate() {
                        self.write_item(&format!("{key}.{i}"), context.indent + INDENT, item);
                    }
                }
                // Any other value, on the line of its key.
                value => self.write_line(context.indent, &format!("{mark}{name}: {}", inline(value))),
            }
        }
    }

    /// Writes an entry of a list: a component with its options, or any other value on one line.
    fn write_item(&mut self, key: &str, indent: usize, item: &Json) {
        let (Json::Object(map), component @ Some(_)) = (item, component(key, item)) else {
            return self.write_line(indent, &format!("- {}", inline(item)));
        };
        let name = map.get("name").map(inline).unwrap_or_default();
        self.write_line(indent, &format!("- name: {name}"));
        let mut options = map.clone();
        options.retain(|name, _| name != "name");
        self.write_map(&MapContext { key, indent: indent + INDENT, component }, &options);
    }

    /// The position of an option among those of its component.
    fn position(&self, context: &MapContext<'_>, name: &str) -> usize {
        let Some(ComponentAt { kind, name: component, .. }) = context.component else { return 0 };
        let section = self.sections.iter().find(|s| s.component == Some((kind, component)));
        let has_name = |key: &Key| key.name.split('.').any(|part| part == name);
        section.and_then(|s| s.keys.iter().position(has_name)).unwrap_or(usize::MAX)
    }

    /// The documentation of a key: that of the component around it, if the key is one of its options, or else that of
    /// the sections which every configuration has.
    fn documentation(&self, context: &MapContext<'_>, key: &str) -> Option<&'a Key> {
        let sections: &'a [Section] = self.sections;
        let of_component = context.component.and_then(|component| {
            let option = general(key.strip_prefix(component.key)?.trim_start_matches('.'));
            let section = sections.iter().find(|s| s.component == Some((component.kind, component.name)))?;
            section.keys.iter().find(|documented| {
                // `reward.N.scale` documents the option `scale`.
                let name = documented.name.strip_prefix(component.kind.section()).unwrap_or(&documented.name);
                name.trim_start_matches(".N").trim_start_matches('.') == option
            })
        });
        let general_key = general(key);
        let of_sections = sections.iter().filter(|s| s.component.is_none()).flat_map(|s| &s.keys);
        of_component.or_else(|| of_sections.into_iter().find(|documented| documented.name == general_key))
    }

    /// Writes the documentation of a key.
    fn write_documentation(&mut self, indent: usize, key: &Key) {
        self.write_comment(indent, &key.about);
        self.write_comment(indent, &format!("({})", key.values));
        for (value, about) in &key.choices {
            self.write_comment(indent, &format!("- {value}: {about}"));
        }
    }

    fn write_comment(&mut self, indent: usize, text: &str) {
        for line in wrapped(text, COLUMNS - indent - COMMENT_MARK.len()) {
            self.write_line(indent, format!("{COMMENT_MARK}{line}").trim_end());
        }
    }

    fn write_line(&mut self, indent: usize, text: &str) {
        *self.text += &format!("{:indent$}{text}\n", "");
    }

    /// Whether a layer sets this key or one below it.
    fn is_set(&self, key: &str) -> bool {
        let below = format!("{key}.");
        self.set_keys.iter().any(|set| set == key || set.starts_with(&below))
    }
}

/// The component that `value` describes, if `key` is that of a component or of one in a list.
fn component<'a>(key: &'a str, value: &'a Json) -> Option<ComponentAt<'a>> {
    let name = value.get("name")?.as_str()?;
    let kind = match general(key).as_str() {
        "evaluation.check.N" => Kind::Reward,
        key => Kind::ALL.into_iter().find(|kind| key == kind.section() || key == format!("{}.N", kind.section()))?,
    };
    Some(ComponentAt { kind, name, key })
}

/// A value on one line: JSON, which is YAML too; without quotes where plain words need none.
pub fn inline(value: &Json) -> String {
    // Words that YAML reads as a value other than a text.
    const RESERVED: [&str; 9] = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"];
    let plain = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c))
            && !RESERVED.contains(&text.to_lowercase().as_str())
    };
    match value {
        Json::String(text) if plain(text) => text.clone(),
        Json::Array(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        Json::Object(map) if !map.is_empty() => {
            let entries: BTreeMap<_, _> = map.iter().collect();
            let entries = entries.into_iter().map(|(key, value)| format!("{key}: {}", inline(value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}
