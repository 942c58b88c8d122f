//! Values of templates as Python writes them (`str`, `repr` and `json.dumps`), because templates were written for
//! Jinja2 in Python.

use std::fmt::Write;
use std::sync::Arc;

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};
use roll_external::json;

/// `str(value)`.
pub(super) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.into(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            repr(value, &mut out);
            out
        }
    }
}

/// Appends `repr(value)`.
fn repr(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::Seq | ValueKind::Iterable if value.as_object().is_some_and(|object| object.try_iter().is_some()) => {
            out.push('[');
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(&item, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(&key, out);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), out);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_escaped(c) => {
                let code = u32::from(c);
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Whether Python's `repr` escapes the character by its code. Rust's `Debug` escapes the same characters, except blanks
/// and the zero. It also escapes a combining mark, but only at the beginning of a text, so the character is tested
/// after an `a`.
fn is_escaped(c: char) -> bool {
    let is_blank = c.is_whitespace() && c != ' ';
    is_blank || c == '\0' || format!("{:?}", format!("a{c}")).contains("\\u{")
}

/// A number as Python writes it.
fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(x) if !value.is_integer() => json::float(x),
        _ => value.to_string(),
    }
}

/// An integer beyond 128 bits, which minijinja has no number for.
#[derive(Debug)]
struct WideInteger(String);

impl Object for WideInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

/// Whether a value is an integer of any size. Python's booleans are integers too, but Jinja's test `integer` is false
/// for them.
pub(super) fn is_integer(value: &Value) -> bool {
    value.is_integer() || value.downcast_object_ref::<WideInteger>().is_some()
}

/// Converts a JSON value that [`json::parse`] has read.
pub(super) fn value(from: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match (from, json::integer(from)) {
        (_, Some(digits)) => match (digits.parse::<i128>(), digits.parse::<u128>()) {
            (Ok(integer), _) => integer.into(),
            (_, Ok(integer)) => integer.into(),
            _ => Value::from_object(WideInteger(digits.into())),
        },
        (Json::Array(items), _) => items.iter().map(value).collect(),
        (Json::Object(fields), _) => fields.iter().map(|(key, field)| (key.as_str(), value(field))).collect(),
        (scalar, _) => Value::from_serialize(scalar),
    }
}

/// Options of `json.dumps`.
struct Dumps {
    ensure_ascii: bool,
    indent: Option<String>,
    /// Between items.
    item_separator: String,
    /// After keys.
    key_separator: String,
    sort_keys: bool,
}

/// The filter `tojson` of transformers: `json.dumps` with its arguments, in the same order.
pub(super) fn tojson(value: &Value, arguments: Rest<Value>) -> Result<Value, Error> {
    let (positional, named): (&[Value], Kwargs) = from_args(&arguments)?;
    // The argument at a position or with a name; `None` if it is missing or none.
    let argument = |position: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.get(position) {
            Some(value) => Some(value.clone()),
            None => named.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    };
    let invalid = |problem: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {problem}"));
    let indent = match argument(1, "indent")? {
        None => None,
        Some(text) if text.as_str().is_some() => Some(text.to_string()),
        Some(width) => {
            let width = usize::try_from(width.clone()).ok().filter(|width| *width <= 64);
            Some(" ".repeat(width.ok_or_else(|| invalid("`indent`: expected a text or at most 64 blanks".into()))?))
        }
    };
    let default_item_separator = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = match argument(2, "separators")? {
        None => (default_item_separator.to_string(), ": ".to_string()),
        Some(pair) => {
            let texts: Vec<String> = pair.try_iter()?.map(|text| text.to_string()).collect();
            let [item, key] = <[String; 2]>::try_from(texts).map_err(|_| {
                invalid("`separators`: expected two texts, one between items and one after keys".into())
            })?;
            (item, key)
        }
    };
    let flag = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let (ensure_ascii, sort_keys) = (flag(argument(0, "ensure_ascii")?), flag(argument(3, "sort_keys")?));
    named.assert_all_used()?;
    let mut out = String::new();
    let dumps = Dumps { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    dumps.write(value, 0, &mut out).map_err(invalid)?;
    Ok(out.into())
}

impl Dumps {
    /// Appends a value that is inside `depth` lists and objects.
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), String> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(match number(value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                number => number,
            }),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter().map_err(|e| e.to_string())?;
                self.write_items('[', ']', depth, items, out, |item, out| self.write(&item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter().map_err(|e| e.to_string())?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_items('{', '}', depth, keys.into_iter(), out, |key, out| {
                    let name = match key.kind() {
                        ValueKind::String => key.to_string(),
                        ValueKind::None => "null".into(),
                        ValueKind::Bool => key.to_string().to_lowercase(),
                        _ => number(&key),
                    };
                    self.write_text(&name, out);
                    out.push_str(&self.key_separator);
                    self.write(&value.get_item(&key).map_err(|e| e.to_string())?, depth + 1, out)
                })?;
            }
            _ if is_integer(value) => out.push_str(&value.to_string()),
            kind => return Err(format!("a value of type {kind} cannot be written as JSON")),
        }
        Ok(())
    }

    /// Appends a list or an object: `open`, each of `items` by `write_item`, `close`.
    fn write_items(
        &self,
        open: char,
        close: char,
        depth: usize,
        items: impl Iterator<Item = Value>,
        out: &mut String,
        mut write_item: impl FnMut(Value, &mut String) -> Result<(), String>,
    ) -> Result<(), String> {
        let begin_line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        out.push(open);
        let mut is_empty = true;
        for item in items {
            out.push_str(if is_empty { "" } else { &self.item_separator });
            is_empty = false;
            begin_line(depth + 1, out);
            write_item(item, out)?;
        }
        if !is_empty {
            begin_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && c > '~' => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}
