//! Reads YAML into values that remember their file and line.
//!
//! This reader is stricter than the `config` crate's own: duplicate keys, YAML 1.1 booleans (`yes`, `on`), several
//! documents, and documents whose aliases unfold beyond the size of a configuration are errors.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use config::{Value, ValueKind};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Location, Spanned};

use roll_core::{Error, Result};
use roll_external::files;

/// Largest file that is read. No configuration is as large. A wrong path, such as the path of a checkpoint, is an error
/// before much of the file is read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Maximum number of nodes after aliases are unfolded. This bounds the memory of "billion laughs" documents.
const MAX_NODES: usize = 20_000;
/// Maximum number of events of the parser, several for each node.
const MAX_EVENTS: usize = 4 * MAX_NODES;
/// Maximum number of anchors (`&name`), and of aliases (`*name`).
const MAX_ANCHORS: usize = 1000;
/// Maximum number of bytes of text after aliases are unfolded.
const MAX_TEXT_BYTES: usize = 4 << 20;
/// Largest depth of nested lists and maps.
const MAX_DEPTH: usize = 32;

/// The values of a mapping by their keys.
pub(super) type Map = HashMap<String, Value>;

/// A YAML file, read and parsed once.
pub(super) struct Document {
    /// The file, as the user named it.
    pub path: PathBuf,
    /// The text, comments included.
    pub text: String,
    /// The mapping. Values remember their origin as `file:line`.
    pub map: Map,
}

impl Document {
    /// Reads the mapping in a file, or in a pipe: `--config <(...)`.
    pub fn read(path: &Path) -> Result<Self> {
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes));
        read.map_err(Error::file("read the configuration", path))?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            let problem = format!("more than {MAX_FILE_BYTES} bytes are too many for a configuration");
            return Err(Error::bad_file(path, problem));
        }
        if let Some(found) = files::stand_in(&bytes) {
            return Err(Error::bad_file(path, format!("expected a configuration, found {found}")));
        }
        let text =
            String::from_utf8(bytes).map_err(|e| Error::bad_file(path, format!("not text: {}", e.utf8_error())))?;
        Self::parse(path, text)
    }

    /// Parses the text of the file `path`, which names it in messages and origins.
    pub fn parse(path: &Path, text: String) -> Result<Self> {
        let document = parse(&text).map_err(|problem| Error::bad_file(path, problem))?;
        let name = path.display();
        let origin = |line: u64| match line {
            0 => name.to_string(),
            line => format!("{name}:{line}"),
        };
        let map = match document.value {
            Node::Map(map) => map.into_iter().map(|(key, value)| (key, to_value(value, &origin))).collect(),
            Node::Scalar(ValueKind::Nil) => Map::new(),
            Node::Scalar(found) => {
                let found = match found {
                    ValueKind::String(text) if text.contains(':') => {
                        format!("the text `{}`: write a space after the colon of a key", first_word(&text))
                    }
                    _ => "a single value".into(),
                };
                return Err(Error::bad_file(path, format!("expected a mapping of configuration keys, found {found}")));
            }
            Node::List(_) => {
                return Err(Error::bad_file(path, "expected a mapping of configuration keys, found a list"));
            }
        };
        Ok(Self { path: path.to_path_buf(), text, map })
    }
}

/// Reads the value of an environment variable or `--set`: a YAML scalar, list or map on one line.
pub(super) fn parse_value(text: &str, origin: &str) -> std::result::Result<Value, String> {
    Ok(to_value(parse(text)?, &|_| origin.to_string()))
}

/// The first word of a text; empty for an empty text.
fn first_word(text: &str) -> &str {
    text.split_whitespace().next().unwrap_or_default()
}

/// Parses one document within the limits on its size.
fn parse(text: &str) -> std::result::Result<Spanned<Node>, String> {
    if text.trim().is_empty() {
        return Ok(Spanned::new(Node::Scalar(ValueKind::Nil), Location::UNKNOWN, Location::UNKNOWN));
    }
    let options = serde_saphyr::options! {
        strict_booleans: true,
        with_snippet: false,
        budget: serde_saphyr::budget! {
            max_nodes: MAX_NODES,
            max_events: MAX_EVENTS,
            max_aliases: MAX_ANCHORS,
            max_anchors: MAX_ANCHORS,
            max_recorded_anchor_events: MAX_EVENTS,
            max_recorded_anchor_bytes: MAX_TEXT_BYTES,
            max_documents: 1,
            max_total_scalar_bytes: MAX_TEXT_BYTES,
            max_depth: MAX_DEPTH,
        },
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|e| {
        let message = e.to_string();
        // The parser's messages name options of its Rust interface, which a user cannot set.
        let message = message.replace(", set DuplicateKeyPolicy in Options if acceptable", "");
        let message = message.replace(" rejected by the configured policy", ", expected a finite number");
        match e.location() {
            // Some messages have their place already.
            Some(at) if !message.contains("line ") => {
                format!("line {}, column {}: {message}", at.line(), at.column())
            }
            _ => message,
        }
    })
}

/// A YAML value, before it gets its origin. Map keys keep their order. The parser refuses duplicate keys.
enum Node {
    Scalar(ValueKind),
    List(Vec<Spanned<Node>>),
    Map(Vec<(String, Spanned<Node>)>),
}

/// The node as a value that remembers its origin. `origin` words the origin of a line; line 0 is unknown.
fn to_value(node: Spanned<Node>, origin: &dyn Fn(u64) -> String) -> Value {
    let at = origin(node.referenced.line());
    let kind = match node.value {
        Node::Scalar(kind) => kind,
        Node::List(items) => ValueKind::Array(items.into_iter().map(|item| to_value(item, origin)).collect()),
        Node::Map(items) => {
            ValueKind::Table(items.into_iter().map(|(key, item)| (key, to_value(item, origin))).collect())
        }
    };
    Value::new(Some(&at), kind)
}

/// The value at a dotted key. The key of a list's entry is its index.
pub(super) fn find<'a>(root: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(root, |value, name| match &value.kind {
        ValueKind::Table(map) => map.get(name),
        ValueKind::Array(items) => items.get(name.parse::<usize>().ok()?),
        _ => None,
    })
}

/// " (file:line)" for the end of a message; empty if the origin is unknown.
pub(super) fn place(value: &Value) -> String {
    value.origin().map(|origin| format!(" ({origin})")).unwrap_or_default()
}

/// The name of a key below `key`, which is empty at the top level.
pub(super) fn child(key: &str, name: impl std::fmt::Display) -> String {
    if key.is_empty() { name.to_string() } else { format!("{key}.{name}") }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// Makes a [`Node`] of each kind of YAML value.
struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a YAML value")
    }
    fn visit_unit<E>(self) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(ValueKind::Nil))
    }
    fn visit_none<E>(self) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(ValueKind::Nil))
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }
    fn visit_bool<E>(self, value: bool) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }
    fn visit_i64<E>(self, value: i64) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }
    fn visit_u64<E>(self, value: u64) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }
    fn visit_f64<E>(self, value: f64) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }
    fn visit_str<E>(self, value: &str) -> std::result::Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            let item = map.next_value::<Spanned<Node>>()?;
            // To YAML, `{last:1}` is a key `last:1` without a value.
            if let (Some((word, rest)), Node::Scalar(ValueKind::Nil)) = (key.split_once(':'), &item.value)
                && !rest.is_empty()
            {
                return Err(A::Error::custom(format!("`{key}`: write a space after the colon, `{word}: {rest}`")));
            }
            items.push((key, item));
        }
        Ok(Node::Map(items))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Map> {
        Document::parse(Path::new("a.yaml"), text.into()).map(|document| document.map)
    }
    fn problem(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }

    #[test]
    fn values_keep_their_type_and_line() {
        let map = read("x: 2.5e-6\ny:\n  - no\n  - 007x\n  - 8\nz: ''\n").unwrap();
        assert_eq!(map["x"].kind, ValueKind::Float(2.5e-6));
        assert_eq!(map["x"].origin(), Some("a.yaml:1"));
        let ValueKind::Array(list) = &map["y"].kind else { panic!("{map:?}") };
        assert_eq!(list[0].kind, ValueKind::String("no".into()));
        assert_eq!(list[1].origin(), Some("a.yaml:4"));
        assert_eq!(list[2].kind, ValueKind::U64(8));
        assert_eq!(map["z"].kind, ValueKind::String(String::new()));
    }

    #[test]
    fn rejects_duplicate_keys_with_their_line() {
        let message = problem("a: 1\nb: 2\na: 3\n");
        assert!(message.contains("line 3") && message.contains("duplicate"), "{message}");
        assert!(!message.contains("Policy"), "{message}");
    }

    #[test]
    fn names_a_colon_without_a_space() {
        for text in ["algo: {name: reward_fl, trained_steps: {last:1}}", "{a: [{level:0.5}]}", "{level:0.5: }"] {
            let message = problem(text);
            assert!(message.contains("write a space after the colon"), "{text}: {message}");
        }
        let message = parse_value("{last:1}", "--set").unwrap_err();
        assert!(message.contains("`last: 1`"), "{message}");
        assert!(problem("algo:reward_fl\nsteps:5\n").contains("write a space after the colon"));
        assert!(read("a: 'x:y'\nb: {c: }\nd: http://x\n").is_ok());
    }

    #[test]
    fn messages_omit_the_options_of_the_parser() {
        let message = parse_value("1e400", "--set").unwrap_err();
        assert!(message.contains("finite number") && !message.contains("policy"), "{message}");
    }

    #[test]
    fn rejects_other_documents_than_mappings() {
        assert!(problem("- 1\n- 2\n").contains("mapping"));
        assert!(problem("just text").contains("mapping"));
        assert!(problem("a: [1, 2\nb: 3").contains("line "), "{}", problem("a: [1, 2\nb: 3"));
        assert!(read("# nothing\n").unwrap().is_empty());
    }

    #[test]
    fn rejects_aliases_that_unfold_beyond_the_budget() {
        let mut text = String::from("a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n");
        for i in 1..12 {
            let list = vec![format!("*a{}", i - 1); 10].join(",");
            text += &format!("a{i}: &a{i} [{list}]\n");
        }
        // 10^12 numbers, of which no more are made than the budget has.
        let message = problem(&text);
        assert!(message.contains(&format!("nodes: {}", MAX_NODES + 1)), "{message}");
        for deep in ["[".repeat(100_000), format!("a: {}1", "{x: ".repeat(1000))] {
            let message = problem(&deep);
            // The scanner's limit comes before that of the budget where it is a list within a list.
            assert!(message.contains("recursion limit exceeded") || message.contains("Depth"), "{message}");
        }
    }

    #[test]
    fn rejects_large_and_binary_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("big.yaml");
        std::fs::write(&path, vec![b'#'; MAX_FILE_BYTES as usize + 1]).unwrap();
        let problem = |path: &Path| Document::read(path).err().unwrap().to_string();
        assert!(problem(&path).contains("too many"));
        std::fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
        assert!(problem(&path).contains("not text"));
        problem(&dir.path().join("none.yaml"));
        problem(dir.path());
        #[cfg(unix)]
        assert!(problem(Path::new("/dev/zero")).contains("too many"));
    }
}
