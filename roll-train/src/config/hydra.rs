//! Hydra's composition in configuration files: a `defaults` list of other files, `${a.b}` and `${oc.env:NAME,default}`,
//! and `???` for what must be given.
//!
//! What is understood: entries `name`, `dir/name`, `/absolute`, `group: option`, `optional`, `null`, lists of options,
//! `_self_` (last when it does not stand there), packages (`@_here_`, `@_global_`, `@a.b`, a `# @package` line);
//! relative interpolation (`${.a}`), nested interpolation, `oc.env`, `oc.select`. Anything else is an error that names
//! it. Files, nodes and text are bounded, so that a small file cannot unfold into much memory.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use config::{Value, ValueKind};

use super::yaml::{YamlFormat, parse_value};
use roll_core::{Error, Result};

/// Files that one configuration may be composed of.
const MAX_FILES: usize = 100;
/// Values after interpolation.
const MAX_VALUES: usize = 20_000;
/// Bytes of text after interpolation.
const MAX_TEXT: usize = 4 << 20;
/// Depth of values and of interpolations.
const MAX_DEPTH: usize = 32;

type Map = HashMap<String, Value>;

/// Reads the mapping in a file, composed and interpolated where it asks for that.
pub(super) fn read(path: &Path) -> Result<Map> {
    let map = YamlFormat::read(path)?;
    let composed = map.contains_key("defaults");
    if !composed && !map.values().any(has_interpolation) {
        return Ok(map);
    }
    let mut composer = Composer { root: directory(path), stack: Vec::new(), files: 0 };
    let root = match composed {
        true => composer.compose(path, &[])?,
        false => Value::new(None, ValueKind::Table(map)),
    };
    let mut resolver = Resolver { root: &root, following: Vec::new(), values: MAX_VALUES, text: MAX_TEXT };
    let resolved = resolver.resolve(&root, &mut Vec::new());
    let resolved = resolved.map_err(|problem| Error::bad_file(path, problem))?;
    let mut missing = Vec::new();
    find_missing(&resolved, "", &mut missing);
    match (missing.is_empty(), resolved.kind) {
        (true, ValueKind::Table(map)) => Ok(map),
        (false, _) => Err(Error::bad_file(path, format!("values that must be given (`???`): {}", missing.join(", ")))),
        (true, _) => Ok(Map::new()),
    }
}

/// `from` over `into`: maps merge, everything else is replaced.
pub(super) fn merge(into: &mut Value, from: Value) {
    match (&mut into.kind, from) {
        (ValueKind::Table(into), Value { kind: ValueKind::Table(from), .. }) => {
            for (key, value) in from {
                match into.get_mut(&key) {
                    Some(old) => merge(old, value),
                    None => drop(into.insert(key, value)),
                }
            }
        }
        (_, from) => *into = from,
    }
}

struct Composer {
    /// What absolute entries start from: the directory of the first file.
    root: PathBuf,
    stack: Vec<PathBuf>,
    files: usize,
}

/// One entry of a `defaults` list.
struct Entry {
    /// The file, without extension, from the directory of the list.
    file: PathBuf,
    /// Directory of the file as written: what its contents are put under, unless a package is named.
    group: Vec<String>,
    package: Option<String>,
    optional: bool,
}

impl Composer {
    /// The contents of `file` and its defaults, under `package`.
    fn compose(&mut self, file: &Path, package: &[String]) -> Result<Value> {
        let identity = file.canonicalize().map_err(Error::file("read the configuration", file))?;
        if self.stack.contains(&identity) {
            return Err(Error::bad_file(file, "its `defaults` lead back to it"));
        }
        self.files += 1;
        if self.files > MAX_FILES || self.stack.len() > MAX_DEPTH {
            return Err(Error::bad_file(file, format!("`defaults` lead to more than {MAX_FILES} files")));
        }
        self.stack.push(identity);
        let mut own = YamlFormat::read(file)?;
        let list = own.remove("defaults").map(|list| list.kind);
        let mut result = Value::new(None, ValueKind::Table(Map::new()));
        let mut own = Some(own);
        let put_own = |result: &mut Value, own: &mut Option<Map>| {
            if let Some(own) = own.take() {
                merge(result, wrap(package, own));
            }
        };
        match list {
            Some(ValueKind::Array(entries)) => {
                for entry in entries {
                    if matches!(&entry.kind, ValueKind::String(text) if text == "_self_") {
                        put_own(&mut result, &mut own);
                        continue;
                    }
                    for entry in entries_of(file, entry)? {
                        if let Some(value) = self.include(file, &entry, package)? {
                            merge(&mut result, value);
                        }
                    }
                }
            }
            None | Some(ValueKind::Nil) => {}
            Some(other) => return Err(Error::bad_file(file, format!("`defaults`: expected a list, found {other}"))),
        }
        put_own(&mut result, &mut own);
        self.stack.pop();
        Ok(result)
    }

    fn include(&mut self, from: &Path, entry: &Entry, package: &[String]) -> Result<Option<Value>> {
        let base = if entry.file.has_root() { self.root.clone() } else { directory(from) };
        let relative: PathBuf = entry.file.components().filter(|c| !matches!(c, Component::RootDir)).collect();
        let mut name = base.join(relative).into_os_string();
        if !entry.file.extension().is_some_and(|e| e == "yaml" || e == "yml") {
            name.push(".yaml");
        }
        let file = PathBuf::from(name);
        if !file.is_file() {
            return match entry.optional {
                true => Ok(None),
                false => Err(Error::bad_file(from, format!("`defaults` name {}, which is not there", file.display()))),
            };
        }
        let named = match &entry.package {
            Some(package) => Some(package.clone()),
            None => package_line(&file),
        };
        let parts = |text: &str| text.split('.').filter(|p| !p.is_empty()).map(String::from).collect::<Vec<_>>();
        let package: Vec<String> = match named.as_deref() {
            Some(text) => {
                let (first, rest) = text.split_once('.').unwrap_or((text, ""));
                let start: Vec<String> = match first {
                    "_global_" => Vec::new(),
                    "_here_" => package.to_vec(),
                    "_group_" => [package, &entry.group].concat(),
                    name => [package, &[name.to_string()]].concat(),
                };
                [start, parts(rest)].concat()
            }
            None => [package, &entry.group].concat(),
        };
        self.compose(&file, &package).map(Some)
    }
}

/// The files that an entry of a `defaults` list names.
fn entries_of(file: &Path, entry: Value) -> Result<Vec<Entry>> {
    let bad = |found: &dyn std::fmt::Display| {
        Error::bad_file(file, format!("`defaults`: expected a file or `group: option`, found {found}"))
    };
    let normal = |path: &Path| -> Vec<String> {
        let parts = path.components().filter(|c| matches!(c, Component::Normal(_)));
        parts.map(|c| c.as_os_str().to_string_lossy().into_owned()).collect()
    };
    match entry.kind {
        ValueKind::String(text) => {
            let (name, package) = split_package(&text);
            let path = PathBuf::from(name);
            if name.is_empty() || path.file_name().is_none() {
                return Err(bad(&text));
            }
            let group = normal(path.parent().unwrap_or(Path::new("")));
            Ok(vec![Entry { file: path, group, package, optional: false }])
        }
        ValueKind::Table(map) if map.len() == 1 => {
            let Some((key, option)) = map.into_iter().next() else { return Ok(Vec::new()) };
            if let Some(rest) = key.strip_prefix("override ") {
                // Hydra's own logging and launchers have no meaning here.
                return match rest.trim().starts_with("hydra/") {
                    true => Ok(Vec::new()),
                    false => Err(bad(&format!("`{key}`: overriding another list is not supported"))),
                };
            }
            let (optional, group) = match key.strip_prefix("optional ") {
                Some(group) => (true, group.trim()),
                None => (false, key.as_str()),
            };
            let (group, package) = split_package(group);
            let options = match option.kind {
                ValueKind::String(option) => vec![option],
                ValueKind::Nil => Vec::new(),
                ValueKind::Array(items) => items
                    .into_iter()
                    .map(|item| item.into_string())
                    .collect::<std::result::Result<_, _>>()
                    .map_err(|e| bad(&e))?,
                other => return Err(bad(&format!("`{key}: {other}`"))),
            };
            let entry = |option: String| Entry {
                file: Path::new(group).join(option),
                group: normal(Path::new(group)),
                package: package.clone(),
                optional,
            };
            Ok(options.into_iter().map(entry).collect())
        }
        other => Err(bad(&other)),
    }
}

fn split_package(text: &str) -> (&str, Option<String>) {
    match text.split_once('@') {
        Some((name, package)) => (name, Some(package.to_string())),
        None => (text, None),
    }
}

/// The package that a file names for itself in a comment above its first key.
fn package_line(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let mut comments = text.lines().map(str::trim).take_while(|line| line.is_empty() || line.starts_with('#'));
    comments.find_map(|line| line.trim_start_matches('#').trim().strip_prefix("@package").map(|p| p.trim().to_string()))
}

fn wrap(package: &[String], own: Map) -> Value {
    package.iter().rev().fold(Value::new(None, ValueKind::Table(own)), |inner, name| {
        Value::new(None, ValueKind::Table(Map::from([(name.clone(), inner)])))
    })
}

fn directory(file: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new("")).to_path_buf()
}

fn has_interpolation(value: &Value) -> bool {
    match &value.kind {
        ValueKind::String(text) => text.contains("${"),
        ValueKind::Array(items) => items.iter().any(has_interpolation),
        ValueKind::Table(map) => map.values().any(has_interpolation),
        _ => false,
    }
}

fn find_missing(value: &Value, key: &str, missing: &mut Vec<String>) {
    let child = |name: &str| if key.is_empty() { name.to_string() } else { format!("{key}.{name}") };
    match &value.kind {
        ValueKind::String(text) if text == "???" => {
            let place = value.origin().map(|o| format!(" ({o})")).unwrap_or_default();
            missing.push(format!("{key}{place}"));
        }
        ValueKind::Array(items) => {
            items.iter().enumerate().for_each(|(i, item)| find_missing(item, &child(&i.to_string()), missing));
        }
        ValueKind::Table(map) => {
            let mut names: Vec<&String> = map.keys().collect();
            names.sort();
            names.iter().for_each(|name| find_missing(&map[*name], &child(name), missing));
        }
        _ => {}
    }
}

struct Resolver<'a> {
    root: &'a Value,
    /// The keys whose values are being found out.
    following: Vec<String>,
    /// What may still be made.
    values: usize,
    text: usize,
}

type Problem = String;

impl Resolver<'_> {
    /// `value`, which stands at `path`, with everything in it resolved.
    fn resolve(&mut self, value: &Value, path: &mut Vec<String>) -> std::result::Result<Value, Problem> {
        self.values =
            self.values.checked_sub(1).ok_or_else(|| format!("more than {MAX_VALUES} values after interpolation"))?;
        if path.len() > MAX_DEPTH {
            return Err(format!("nested more than {MAX_DEPTH} deep after interpolation"));
        }
        let origin = value.origin().map(String::from);
        let kind = match &value.kind {
            ValueKind::String(text) if text.contains("${") => {
                return self.text(text, path, origin.as_ref()).map_err(|problem| match &origin {
                    // The innermost place is the one to look at.
                    Some(at) if !problem.contains(" (at ") => format!("{problem} (at {at})"),
                    _ => problem,
                });
            }
            ValueKind::Array(items) => {
                let mut resolved = Vec::with_capacity(items.len());
                for (i, item) in items.iter().enumerate() {
                    path.push(i.to_string());
                    resolved.push(self.resolve(item, path)?);
                    path.pop();
                }
                ValueKind::Array(resolved)
            }
            ValueKind::Table(map) => {
                let mut resolved = Map::with_capacity(map.len());
                for (name, item) in map {
                    path.push(name.clone());
                    resolved.insert(name.clone(), self.resolve(item, path)?);
                    path.pop();
                }
                ValueKind::Table(resolved)
            }
            other => other.clone(),
        };
        Ok(Value::new(origin.as_ref(), kind))
    }

    /// Text with interpolations. Text that is nothing but one interpolation becomes its value, of whatever type.
    fn text(
        &mut self,
        text: &str,
        path: &mut Vec<String>,
        origin: Option<&String>,
    ) -> std::result::Result<Value, Problem> {
        let mut result = String::new();
        let mut rest = text;
        while let Some(start) = rest.find("${") {
            if let Some(escaped) = rest[..start].strip_suffix('\\') {
                result += escaped;
                result += "${";
                rest = &rest[start + 2..];
                continue;
            }
            let end = closing(&rest[start + 2..]).ok_or_else(|| format!("`{text}`: a `${{` without its `}}`"))?;
            let inner = &rest[start + 2..start + 2 + end];
            let after = &rest[start + 2 + end + 1..];
            let value = self.expression(inner, path)?;
            if start == 0 && after.is_empty() && result.is_empty() {
                // A value says where it is used; what is in a map, where it was written.
                return Ok(Value::new(origin, value.kind));
            }
            result += &rest[..start];
            result += &value.clone().into_string().map_err(|_| format!("`${{{inner}}}` is no text within `{text}`"))?;
            self.text = self
                .text
                .checked_sub(result.len())
                .ok_or_else(|| format!("more than {MAX_TEXT} bytes of text after interpolation"))?;
            rest = after;
        }
        result += rest;
        Ok(Value::new(origin, result))
    }

    /// The value of what stands between `${` and `}`.
    fn expression(&mut self, inner: &str, path: &mut Vec<String>) -> std::result::Result<Value, Problem> {
        if path.len() + self.following.len() > 2 * MAX_DEPTH {
            return Err(format!("`${{{inner}}}`: interpolations more than {MAX_DEPTH} deep"));
        }
        let inner = match inner.contains("${") {
            true => {
                self.following.push("${}".into());
                let text = self.text(inner, path, None);
                self.following.pop();
                text?.into_string().map_err(|e| format!("`${{{inner}}}`: {e}"))?
            }
            false => inner.to_string(),
        };
        let inner = inner.trim();
        let Some((resolver, arguments)) = inner.split_once(':') else {
            let key = absolute(inner, path)?;
            return self.look_up(&key)?.ok_or_else(|| format!("`${{{inner}}}`: there is no `{key}`"));
        };
        let (first, default) = match arguments.split_once(',') {
            Some((first, default)) => (first.trim(), Some(default.trim())),
            None => (arguments.trim(), None),
        };
        let literal = |text: &str| parse_value(text, "default of an interpolation");
        match (resolver.trim(), default) {
            ("oc.env" | "env", default) => match (std::env::var(first), default) {
                (Ok(value), _) => literal(&value).or_else(|_| Ok(Value::new(None, value))),
                (Err(_), Some(default)) => literal(default),
                (Err(_), None) => Err(format!("`${{{inner}}}`: the environment variable {first} is not set")),
            },
            ("oc.select", default) => match (self.look_up(&absolute(first, path)?)?, default) {
                (Some(value), _) => Ok(value),
                (None, default) => literal(default.unwrap_or("null")),
            },
            (other, _) => {
                Err(format!("`${{{inner}}}`: the resolver `{other}` is not known; there are oc.env, oc.select"))
            }
        }
    }

    fn look_up(&mut self, key: &str) -> std::result::Result<Option<Value>, Problem> {
        if self.following.iter().any(|k| k == key) {
            return Err(format!("`{key}` is defined by itself: {} -> {key}", self.following.join(" -> ")));
        }
        let mut path: Vec<String> = key.split('.').map(String::from).collect();
        let found = path.iter().try_fold(self.root, |value, name| match &value.kind {
            ValueKind::Table(map) => map.get(name),
            ValueKind::Array(items) => items.get(name.parse::<usize>().ok()?),
            _ => None,
        });
        let Some(value) = found else { return Ok(None) };
        self.following.push(key.to_string());
        let resolved = self.resolve(value, &mut path);
        self.following.pop();
        resolved.map(Some)
    }
}

/// `a.b[0]` as `a.b.0`; `.a` beside the value at `path`, `..a` one level up.
fn absolute(key: &str, path: &[String]) -> std::result::Result<String, Problem> {
    let dots = key.bytes().take_while(|b| *b == b'.').count();
    let own = key[dots..].replace('[', ".").replace(']', "");
    let valid = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || "_-@/ ".contains(c));
    if own.is_empty() || !own.split('.').all(valid) {
        return Err(format!("`${{{key}}}` is no key"));
    }
    match dots {
        0 => Ok(own),
        _ => {
            let up =
                path.len().checked_sub(dots).ok_or_else(|| format!("`${{{key}}}` leads above the configuration"))?;
            Ok([&path[..up], &[own]].concat().join("."))
        }
    }
}

/// Where the `}` of an interpolation stands, whose `${` was taken off.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(at),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    struct Files(tempfile::TempDir);

    impl Files {
        fn new(files: &[(&str, &str)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                let path = dir.path().join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Self(dir)
        }
        fn read(&self, name: &str) -> Result<Map> {
            read(&self.0.path().join(name))
        }
        fn get(&self, key: &str) -> String {
            let map = self.read("main.yaml").unwrap();
            let root = Value::new(None, ValueKind::Table(map));
            let value = key.split('.').fold(&root, |value, name| match &value.kind {
                ValueKind::Table(map) => &map[name],
                ValueKind::Array(items) => &items[name.parse::<usize>().unwrap()],
                other => panic!("{other}"),
            });
            value.clone().into_string().unwrap()
        }
        fn problem(&self) -> String {
            self.read("main.yaml").unwrap_err().to_string()
        }
    }

    fn problem(main: &str) -> String {
        Files::new(&[("main.yaml", main)]).problem()
    }

    #[test]
    fn defaults_are_composed_in_their_order_and_the_file_itself_comes_last() {
        let files = Files::new(&[
            (
                "conf/main.yaml",
                "defaults:\n  - ../shared/zero@_here_\n  - base\n  - optional gone: x\n  - db: small\n  - db@other: small\n  - nothing: null\na: main\n",
            ),
            ("shared/zero.yaml", "zero:\n  stage: 2\na: zero\n"),
            ("conf/base.yaml", "a: base\nb: base\n"),
            ("conf/db/small.yaml", "defaults:\n  - common\n  - _self_\n  - late@_here_\nsize: 1\n"),
            ("conf/db/common.yaml", "# @package _global_\nglobal: yes\n"),
            ("conf/db/late.yaml", "size: 2\n"),
        ]);
        let map = files.read("conf/main.yaml").unwrap();
        let text = |key: &str| map[key].clone().into_string().unwrap();
        assert_eq!((text("a"), text("b"), text("global")), ("main".into(), "base".into(), "yes".into()));
        let table = |key: &str, name: &str| map[key].clone().into_table().unwrap()[name].clone().into_string().unwrap();
        assert_eq!(
            (table("zero", "stage"), table("db", "size"), table("other", "size")),
            ("2".into(), "2".into(), "2".into())
        );
        assert!(map["a"].origin().unwrap().ends_with("main.yaml:8"), "{:?}", map["a"].origin());
    }

    #[test]
    fn interpolation_keeps_types_and_finds_keys_from_where_it_stands() {
        let files = Files::new(&[(
            "main.yaml",
            "n: 3\nlist: [1, {x: '${n}'}]\nwhole: ${list}\ntext: a${n}b${list[0]}\nin:\n  here: ${.beside}\n  beside: ${..n}\n\
             which: n\nnested: ${${which}}\nenv: ${oc.env:ROLL_TEST_SURELY_UNSET,7}\nselect: ${oc.select:gone,null}\nliteral: \\${n}\n",
        )]);
        let map = files.read("main.yaml").unwrap();
        assert_eq!(map["nested"].kind, ValueKind::U64(3));
        assert_eq!(map["env"].kind, ValueKind::U64(7));
        assert_eq!(map["select"].kind, ValueKind::Nil);
        assert_eq!((files.get("whole.1.x"), files.get("text")), ("3".into(), "a3b1".into()));
        assert_eq!((files.get("in.here"), files.get("literal")), ("3".into(), "${n}".into()));
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        for (main, named) in [
            ("a: ${b}\n", "`b`"),
            ("x: 1\na: ${b}\n", "main.yaml:2"),
            ("a: ${b}\nb: ${a}\n", "defined by itself"),
            ("a: ${a}\n", "defined by itself"),
            ("a: ${oc.env:ROLL_TEST_SURELY_UNSET}\n", "ROLL_TEST_SURELY_UNSET"),
            ("a: ${now:x}\n", "`now`"),
            ("a: ${b\n", "without its"),
            ("a: ${}\n", "is no key"),
            ("a: ${....b}\n", "above"),
            ("a: x${b}\nb: [1]\n", "is no text"),
            ("defaults: 3\n", "`defaults`"),
            ("defaults:\n  - nowhere\n", "nowhere.yaml"),
            ("defaults:\n  - a: {b: c}\n", "`defaults`"),
            ("defaults:\n  - main\n", "lead back"),
            ("defaults:\n  - override x: y\n", "override"),
            ("defaults: []\na: ???\nb: {c: '???'}\n", "b.c"),
        ] {
            let told = problem(main);
            assert!(told.contains(named) && told.contains("main.yaml"), "{main}: {told}");
        }
    }

    #[test]
    fn a_small_file_does_not_unfold_into_much() {
        let mut doubling = "x0: [1]\nt0: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n".to_string();
        for i in 1..60 {
            doubling += &format!("x{i}: ['${{x{0}}}', '${{x{0}}}']\nt{i}: ${{t{0}}}${{t{0}}}\n", i - 1);
        }
        // 2^59 values: an error that came after they were made would never come.
        assert!(problem(&doubling).contains("interpolation"));
        let chain: String = (0..5000).map(|i| format!("k{i}: ${{k{}}}\n", i + 1)).collect();
        let told = problem(&(chain + "k5000: 1\n"));
        assert!(told.contains("deep"), "{told}");
        let told = problem(&format!("a: {}b{}\n", "${".repeat(20_000), "}".repeat(20_000)));
        assert!(told.contains("deep"), "{told}");
    }
}
