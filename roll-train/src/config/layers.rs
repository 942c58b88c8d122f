//! The layers of a configuration: files, environment, arguments.

use std::path::Path;

use config::{Value, ValueKind};
use serde_json::Value as Json;

use super::compose::compose;
use super::consent::named_outside;
use super::loaded::LoadedConfig;
use super::merge::{Part, put};
use super::merged::MergedConfig;
use super::reference;
use super::schema::{self, DEFAULTS, KEYS};
use super::secrets::AsWritten;
use super::yaml::{Document, Map, parse_value};
use crate::{on_finish, signature};
use roll_core::keys::suggest;
use roll_core::{Error, Registry, Result, Variable, inventory};

/// Environment variables of this repository's tests and scripts, which are no configuration keys. Components declare
/// theirs as [`Variable`]s.
const TEST_VARIABLES: [&str; 7] = [
    "ROLL_FIXTURES",
    "ROLL_REFERENCE",
    "ROLL_REQUIRE",
    "ROLL_TARGET_DIR",
    "ROLL_TEST_BACKENDS",
    "ROLL_TEST_DATA",
    "ROLL_TEST_GGUF",
];

/// Beginning of the names of environment variables that set configuration keys.
const VARIABLE_PREFIX: &str = "ROLL_";

/// Largest index in a key such as `reward[3]`, which lengthens the list to hold that index.
const MAX_INDEX: usize = 63;

/// Number of characters to which messages shorten a key that is too long.
const SHORTENED_LENGTH: usize = 60;

/// Maximum number of names in a key. The deepest option has five.
const MAX_DEPTH: usize = 16;

/// Collects layers, lowest first. [`ConfigLayers::merge`] merges the layers, and [`ConfigLayers::load`] also checks the
/// result.
#[derive(Clone, Debug, Default)]
pub struct ConfigLayers {
    /// Assignments of all layers, lowest first: a later assignment to the same key wins.
    assignments: Vec<Assignment>,
    /// Notes for the user.
    notes: Vec<String>,
    /// The values that files interpolate from the environment.
    from_environment: Vec<AsWritten>,
    /// Number of ranks of the job, see [`ConfigLayers::for_ranks`]. `None` counts as 1.
    ranks: Option<usize>,
}

/// A key and its value, which knows its origin.
#[derive(Clone, Debug)]
struct Assignment {
    /// The parts of the key; empty for a whole file.
    path: Vec<Part>,
    value: Value,
}

impl ConfigLayers {
    /// The defaults alone.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of ranks of the job, on which the translation of ROLL's files depends. Must be called before
    /// files are added.
    pub fn for_ranks(self, ranks: usize) -> Self {
        Self { ranks: Some(ranks), ..self }
    }

    /// Adds a YAML file, with the files that its `defaults` name. A configuration of ROLL is translated. Fails if the
    /// file cannot be read or is no mapping.
    pub fn file(self, path: impl AsRef<Path>) -> Result<Self> {
        self.add_document(Document::read(path.as_ref())?)
    }

    /// Adds the `config.yaml` of a run directory. A file that a run of this user wrote, and that was not changed, is
    /// accepted. Any other file is refused if it names something outside of its directory, before anything that it
    /// names is read or loaded. With `is_trusted`, such a file is accepted with a warning.
    pub fn file_of_run(self, path: impl AsRef<Path>, is_trusted: bool) -> Result<Self> {
        let path = path.as_ref();
        let document = Document::read(path)?;
        let named = if signature::is_own(&document.text) { Vec::new() } else { named_outside(&document.map) };
        if !named.is_empty() && !is_trusted {
            let problem = format!(
                "no run of yours wrote it as it is, and it names things outside of its directory; `--trust` takes it \
                 if you trust all of them:\n{}",
                named.join("\n")
            );
            return Err(Error::bad_file(path, problem));
        }
        if !named.is_empty() {
            tracing::warn!("{} is trusted; it {}", path.display(), named.join("; "));
        }
        self.add_document(document)
    }

    /// Adds the mapping of a file, composed, interpolated and translated.
    fn add_document(mut self, document: Document) -> Result<Self> {
        let path = document.path.clone();
        let (mut map, from_environment) = compose(document)?;
        if map.is_empty() {
            return Err(Error::bad_file(path, "the file is empty: there is nothing in it to run"));
        }
        self.from_environment.extend(from_environment);
        if reference::is_reference(&map) {
            let ranks = self.ranks.unwrap_or(1);
            let (translated, notes) = reference::translate(&path, map, ranks)?;
            map = translated;
            self.notes.extend(notes);
        }
        self.add_map(&path, map)
    }

    /// Adds YAML that comes with the program; `name` replaces the file's name in messages and listings.
    pub fn text(self, name: &str, yaml: &str) -> Result<Self> {
        let path = Path::new(name);
        let document = Document::parse(path, yaml.to_string())?;
        self.add_map(path, document.map)
    }

    /// Adds the mapping of a file as one layer.
    fn add_map(mut self, path: &Path, mut map: Map) -> Result<Self> {
        let is_key = |key: &str| key.split(['.', '[']).all(|part| is_plain(part.trim_end_matches(']')));
        if let Some(key) = map.keys().find(|key| !is_key(key)) {
            let problem = format!("`{key}` is no configuration key; write nested keys as nested maps, or with dots");
            return Err(Error::bad_file(path, problem));
        }
        // An empty section, such as one whose keys are all commented out, has no effect.
        let is_section = |key: &str| matches!(DEFAULTS.get(key), Some(Json::Object(_) | Json::Array(_)));
        map.retain(|key, value| value.kind != ValueKind::Nil || !is_section(key));
        // One reward may be written without a list.
        if let Some(reward) = map.get_mut("reward")
            && let ValueKind::Table(_) = reward.kind
        {
            let origin = reward.origin().map(String::from);
            *reward = Value::new(origin.as_ref(), ValueKind::Array(vec![reward.clone()]));
        }
        let mut entries: Vec<(String, Value)> = map.into_iter().collect();
        entries.sort_by(|(key, _), (other_key, _)| key.cmp(other_key));
        // A file may have dotted keys, such as `training.learning_rate: 1e-5`, which is what `roll config` prints. All
        // keys are put into one nested map, so that the file is one layer.
        let origin = path.display().to_string();
        let mut nested = Value::new(None, ValueKind::Table(Map::new()));
        for (key, value) in entries {
            let path = if is_plain(&key) { vec![Part::Name(key)] } else { path_of(&key, &origin)? };
            put(&mut nested, "", &path, value);
        }
        self.assignments.push(Assignment { path: Vec::new(), value: nested });
        Ok(self)
    }

    /// Adds the environment variables whose name begins with `ROLL_`: `ROLL_TRAINING__LEARNING_RATE` sets
    /// `training.learning_rate`. Values are YAML. Empty variables are ignored, and so are variables with a meaning of
    /// their own (see [`Variable`]).
    pub fn environment(mut self, variables: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let of_components = inventory::iter::<Variable>.into_iter().map(|Variable(name)| *name);
        let reserved: Vec<&str> = of_components.chain(TEST_VARIABLES).chain(on_finish::VARIABLES).collect();
        let mut variables: Vec<_> = variables
            .into_iter()
            .filter(|(name, _)| name.starts_with(VARIABLE_PREFIX) && !reserved.contains(&name.as_str()))
            .filter(|(_, text)| !text.trim().is_empty())
            .collect();
        variables.sort();
        for (name, text) in variables {
            let key = name[VARIABLE_PREFIX.len()..].to_lowercase().replace("__", ".");
            if !key.contains('.') && suggest(&key, schema::top_level(), &KEYS).is_none() {
                // Such a variable may be another program's, so it is noted only. A name near a known key is taken for a
                // misspelt key, and is an error later.
                self.notes.push(format!("the environment variable {name} is no configuration key and has no effect"));
                continue;
            }
            let origin = format!("environment variable {name}");
            self = self.set_text(&key, &text, &origin)?;
        }
        Ok(self)
    }

    /// Adds one `--set` argument, `a.b=value`; the value is YAML.
    pub fn set(self, assignment: &str) -> Result<Self> {
        let Some((key, text)) = assignment.split_once('=') else {
            return Err(Error::config(assignment, "expected key=value after --set"));
        };
        self.set_text(key.trim(), text, "--set")
    }

    /// Sets `key` to the YAML `text`. `origin`, such as "--model", names the source in messages and listings.
    pub fn set_text(mut self, key: &str, text: &str, origin: &str) -> Result<Self> {
        self.assignments.push(Assignment { path: path_of(key, origin)?, value: value_for(key, text, origin)? });
        Ok(self)
    }

    /// Sets `key` to a value that a Rust program passes.
    pub(crate) fn json(mut self, key: &str, value: Json) -> Result<Self> {
        let origin = "the program".to_string();
        self.assignments.push(Assignment { path: path_of(key, &origin)?, value: from_json(value, Some(&origin)) });
        Ok(self)
    }

    /// These layers above the layers of `lower`.
    pub fn over(self, lower: Self) -> Self {
        let assignments = [lower.assignments, self.assignments].concat();
        let from_environment = [lower.from_environment, self.from_environment].concat();
        Self { assignments, notes: [lower.notes, self.notes].concat(), from_environment, ranks: self.ranks }
    }

    /// The layers merged. Values are not checked yet.
    pub fn merge(&self) -> Result<MergedConfig> {
        let mut merged = from_json(DEFAULTS.clone(), None);
        for Assignment { path, value } in &self.assignments {
            put(&mut merged, "", path, value.clone());
        }
        Ok(MergedConfig::new(merged, self.notes.clone(), self.from_environment.clone()))
    }

    /// Merges the layers and checks them, as [`MergedConfig::load`].
    pub fn load(self, registry: Option<&Registry>) -> Result<LoadedConfig> {
        self.merge()?.load(registry)
    }
}

/// Whether `key` is a single name, without dots and brackets.
fn is_plain(key: &str) -> bool {
    !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

/// The names and indices of a key. `reward.0.weight`, `reward[0].weight` and `reward.weight` are the same key: without
/// an index, the first reward is meant.
fn path_of(key: &str, origin: &str) -> Result<Vec<Part>> {
    let dotted = key.replace('[', ".").replace(']', "");
    if dotted.split('.').count() > MAX_DEPTH {
        return Err(Error::config(shortened(key), format!("more than {MAX_DEPTH} names in one key ({origin})")));
    }
    let mut parts = dotted.split('.').peekable();
    let mut path = Vec::new();
    while let Some(part) = parts.next() {
        let is_first = path.is_empty();
        if !is_plain(part) {
            let problem = format!("not a key ({origin}); write it as training.learning_rate or reward.0.weight");
            return Err(Error::config(key, problem));
        }
        path.push(match part.parse::<usize>() {
            Ok(index) if !is_first => {
                if index > MAX_INDEX {
                    let problem = format!("index {index} is beyond {MAX_INDEX} ({origin})");
                    return Err(Error::config(key, problem));
                }
                Part::Index(index)
            }
            _ => Part::Name(part.into()),
        });
        if is_first && part == "reward" && parts.peek().is_some_and(|next| next.parse::<usize>().is_err()) {
            path.push(Part::Index(0));
        }
    }
    Ok(path)
}

/// The beginning of a key that is too long for a message.
fn shortened(key: &str) -> String {
    key.chars().take(SHORTENED_LENGTH).chain("...".chars()).collect()
}

/// The value of `key` that the YAML `text` means.
fn value_for(key: &str, text: &str, origin: &str) -> Result<Value> {
    let origin_name = origin.to_string();
    let value = parse_value(text, origin)
        .map_err(|problem| Error::config(key, format!("`{text}` is not a value ({origin}): {problem}")))?;
    let is_empty_text = text.trim().is_empty();
    Ok(match value.kind {
        // One reward without a list.
        ValueKind::Table(_) if key == "reward" => Value::new(Some(&origin_name), ValueKind::Array(vec![value])),
        ValueKind::String(_) => value,
        // `null`, in one of its forms in YAML.
        ValueKind::Nil if !is_empty_text => value,
        // A key that takes only text takes `2026` as the text, too, and an empty text.
        _ if schema::is_text(key) => Value::new(Some(&origin_name), text.trim()),
        _ => value,
    })
}

/// The JSON as a value of this origin.
fn from_json(json: Json, origin: Option<&String>) -> Value {
    let kind = match json {
        Json::Null => ValueKind::Nil,
        Json::Bool(b) => b.into(),
        Json::Number(n) => match (n.as_u64(), n.as_i64()) {
            (Some(u), _) => u.into(),
            (None, Some(i)) => i.into(),
            (None, None) => n.as_f64().unwrap_or(f64::NAN).into(),
        },
        Json::String(s) => s.into(),
        Json::Array(items) => ValueKind::Array(items.into_iter().map(|item| from_json(item, origin)).collect()),
        Json::Object(map) => ValueKind::Table(map.into_iter().map(|(k, v)| (k, from_json(v, origin))).collect()),
    };
    Value::new(origin, kind)
}
