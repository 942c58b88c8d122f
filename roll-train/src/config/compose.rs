//! Hydra's composition of configuration files: a `defaults` list names other files, whose mappings merge.
//!
//! The *package* of a file is the key below which its mapping is put. By default, it is the directory of the file as
//! the list names it: `optimizer/adam` sets keys below `optimizer`.
//!
//! Supported: entries `name`, `dir/name`, `/absolute`, `group: option`, `optional`, `null`, lists of options,
//! `_self_` (the file's own keys; last when it is not in the list), packages (`@_here_`, `@_global_`, `@a.b`, a
//! `# @package` line). Any other entry is an error that names it. The number of files is bounded.

use std::path::{Component, Path, PathBuf};

use config::{Value, ValueKind};

use super::interpolate::{has_interpolation, interpolate};
use super::merge::merge;
use super::secrets::AsWritten;
use super::yaml::{Document, Map};
use roll_core::{Error, Result};

/// Most files of one configuration.
const MAX_FILES: usize = 100;
/// Longest chain of files that name one another.
const MAX_DEPTH: usize = 32;

/// The mapping of a document, with other files merged if it has a `defaults` list, and with interpolations resolved if
/// it has any. Also returns the values that came from environment variables.
pub(super) fn compose(document: Document) -> Result<(Map, Vec<AsWritten>)> {
    let path = document.path.clone();
    let has_defaults = document.map.contains_key("defaults");
    if !has_defaults && !document.map.values().any(has_interpolation) {
        return Ok((document.map, Vec::new()));
    }
    let composed = match has_defaults {
        true => Composer { root: directory(&path), stack: Vec::new(), file_count: 0 }.compose(document, &[])?,
        false => Value::new(None, ValueKind::Table(document.map)),
    };
    interpolate(&path, &composed)
}

/// The composition of one file, with the files that it leads to.
struct Composer {
    /// The directory of the first file, where absolute entries start.
    root: PathBuf,
    /// The files that are being composed, each named by the `defaults` of the one before it.
    stack: Vec<PathBuf>,
    /// Number of files so far.
    file_count: usize,
}

/// A file that a `defaults` list names.
struct DefaultsEntry {
    /// The path, usually without extension, relative to the directory of the list's file. A path with a root is
    /// relative to [`Composer::root`].
    file: PathBuf,
    /// The directory in `file`: the package of the contents, unless one is named.
    group: Vec<String>,
    /// The package that the entry names after `@`.
    package: Option<String>,
    /// Whether the file may be missing.
    is_optional: bool,
}

impl Composer {
    /// Merges a document and the files that its `defaults` name. The document's own keys are put below `package`.
    fn compose(&mut self, document: Document, package: &[String]) -> Result<Value> {
        let file = document.path.as_path();
        let identity = file.canonicalize().map_err(Error::file("read the configuration", file))?;
        if self.stack.contains(&identity) {
            return Err(Error::bad_file(file, "its `defaults` lead back to it"));
        }
        self.file_count += 1;
        if self.file_count > MAX_FILES {
            return Err(Error::bad_file(file, format!("`defaults` lead to more than {MAX_FILES} files")));
        }
        if self.stack.len() > MAX_DEPTH {
            let problem = format!("`defaults` lead to it through a chain of more than {MAX_DEPTH} files");
            return Err(Error::bad_file(file, problem));
        }
        self.stack.push(identity);
        let mut map = document.map;
        let list = map.remove("defaults").map(|list| list.kind);
        let mut result = Value::new(None, ValueKind::Table(Map::new()));
        // The document's own keys, until they are merged: at `_self_`, or after the list.
        let mut own_keys = Some(map);
        let merge_own_keys = |result: &mut Value, own_keys: &mut Option<Map>| {
            if let Some(own_keys) = own_keys.take() {
                merge(result, "", wrap(package, own_keys));
            }
        };
        match list {
            Some(ValueKind::Array(entries)) => {
                for entry in entries {
                    if matches!(&entry.kind, ValueKind::String(text) if text == "_self_") {
                        merge_own_keys(&mut result, &mut own_keys);
                        continue;
                    }
                    for included in entries_of(file, entry)? {
                        if let Some(value) = self.include(file, &included, package)? {
                            merge(&mut result, "", value);
                        }
                    }
                }
            }
            None | Some(ValueKind::Nil) => {}
            Some(other) => return Err(Error::bad_file(file, format!("`defaults`: expected a list, found {other}"))),
        }
        merge_own_keys(&mut result, &mut own_keys);
        self.stack.pop();
        Ok(result)
    }

    /// Composes the file of an entry in the list of the file `from`, whose own package is `package`. `None` if the file
    /// is optional and missing.
    fn include(&mut self, from: &Path, entry: &DefaultsEntry, package: &[String]) -> Result<Option<Value>> {
        let base = if entry.file.has_root() { self.root.clone() } else { directory(from) };
        let relative: PathBuf = entry.file.components().filter(|part| !matches!(part, Component::RootDir)).collect();
        let mut name = base.join(relative).into_os_string();
        if !entry.file.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
            name.push(".yaml");
        }
        let file = PathBuf::from(name);
        if !file.is_file() {
            return match entry.is_optional {
                true => Ok(None),
                false => Err(Error::bad_file(from, format!("`defaults` name {}, which is not there", file.display()))),
            };
        }
        let document = Document::read(&file)?;
        let package_of_file = package_of(entry, &document, package);
        self.compose(document, &package_of_file).map(Some)
    }
}

/// The package of the file `document`, which `entry` names in the list of a file whose own package is `package`.
fn package_of(entry: &DefaultsEntry, document: &Document, package: &[String]) -> Vec<String> {
    let Some(named_package) = entry.package.clone().or_else(|| package_line(&document.text)) else {
        return [package, &entry.group].concat();
    };
    let mut names = named_package.split('.');
    let mut package_of_file = match names.next().unwrap_or_default() {
        "_global_" => Vec::new(),
        "_here_" => package.to_vec(),
        "_group_" => [package, &entry.group].concat(),
        name => [package, &[name.to_string()]].concat(),
    };
    package_of_file.extend(names.filter(|name| !name.is_empty()).map(String::from));
    package_of_file
}

/// The files that an entry of a `defaults` list in `file` names.
fn entries_of(file: &Path, entry: Value) -> Result<Vec<DefaultsEntry>> {
    match entry.kind {
        // `dir/name` or `dir/name@package`.
        ValueKind::String(text) => {
            let (name, package) = split_package(&text);
            let path = PathBuf::from(name);
            if name.is_empty() || path.file_name().is_none() {
                return Err(bad_entry(file, &text));
            }
            let group = directory_names(path.parent().unwrap_or(Path::new("")));
            Ok(vec![DefaultsEntry { file: path, group, package, is_optional: false }])
        }
        ValueKind::Table(map) if map.len() == 1 => {
            let Some((key, options)) = map.into_iter().next() else { return Ok(Vec::new()) };
            entries_of_group(file, &key, options)
        }
        other => Err(bad_entry(file, &other)),
    }
}

/// The files that an entry `group: option` or `optional group@package: [option, option]` names. `key` is the part
/// before the colon.
fn entries_of_group(file: &Path, key: &str, options: Value) -> Result<Vec<DefaultsEntry>> {
    if let Some(overridden) = key.strip_prefix("override ") {
        // Hydra's own logging and launchers have no meaning here.
        return match overridden.trim().starts_with("hydra/") {
            true => Ok(Vec::new()),
            false => Err(bad_entry(file, &format!("`{key}`: overriding another list is not supported"))),
        };
    }
    let (is_optional, group) = match key.strip_prefix("optional ") {
        Some(group) => (true, group.trim()),
        None => (false, key),
    };
    let (group, package) = split_package(group);
    let options = match options.kind {
        ValueKind::String(option) => vec![option],
        ValueKind::Nil => Vec::new(),
        ValueKind::Array(items) => items
            .into_iter()
            .map(|item| item.into_string())
            .collect::<std::result::Result<_, _>>()
            .map_err(|e| bad_entry(file, &e))?,
        other => return Err(bad_entry(file, &format!("`{key}: {other}`"))),
    };
    let entry = |option: String| DefaultsEntry {
        file: Path::new(group).join(option),
        group: directory_names(Path::new(group)),
        package: package.clone(),
        is_optional,
    };
    Ok(options.into_iter().map(entry).collect())
}

/// The error for an entry of a `defaults` list in `file` that cannot be read.
fn bad_entry(file: &Path, found: &dyn std::fmt::Display) -> Error {
    Error::bad_file(file, format!("`defaults`: expected a file or `group: option`, found {found}"))
}

/// The names in a path, without `/`, `.` and `..`.
fn directory_names(path: &Path) -> Vec<String> {
    let names = path.components().filter(|part| matches!(part, Component::Normal(_)));
    names.map(|name| name.as_os_str().to_string_lossy().into_owned()).collect()
}

/// Splits `name@package`.
fn split_package(text: &str) -> (&str, Option<String>) {
    match text.split_once('@') {
        Some((name, package)) => (name, Some(package.to_string())),
        None => (text, None),
    }
}

/// The package that a file names for itself in a comment above its first key.
fn package_line(text: &str) -> Option<String> {
    let comments = text.lines().map(str::trim).take_while(|line| line.is_empty() || line.starts_with('#'));
    let mut comments = comments.map(|line| line.trim_start_matches('#').trim());
    let package = comments.find_map(|comment| comment.strip_prefix("@package"))?;
    Some(package.trim().to_string())
}

/// The mapping nested below the names of `package`.
fn wrap(package: &[String], map: Map) -> Value {
    package.iter().rev().fold(Value::new(None, ValueKind::Table(map)), |inner, name| {
        Value::new(None, ValueKind::Table(Map::from([(name.clone(), inner)])))
    })
}

/// The directory of a file; empty for a bare file name.
fn directory(file: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new("")).to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes `files`, and composes the first.
    fn read(files: &[(&str, &str)]) -> Result<Map> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        compose(Document::read(&dir.path().join(files[0].0))?).map(|(map, _)| map)
    }

    #[test]
    fn defaults_merge_in_order_and_the_file_itself_comes_last() {
        let map = read(&[
            (
                "conf/main.yaml",
                "defaults:\n  - ../shared/zero@_here_\n  - base\n  - optional gone: x\n  - db: small\n  - db@other: small\n  - nothing: null\na: main\n",
            ),
            ("shared/zero.yaml", "zero:\n  stage: 2\na: zero\n"),
            ("conf/base.yaml", "a: base\nb: base\n"),
            ("conf/db/small.yaml", "defaults:\n  - common\n  - _self_\n  - late@_here_\nsize: 1\n"),
            ("conf/db/common.yaml", "# @package _global_\nglobal: yes\n"),
            ("conf/db/late.yaml", "size: 2\n"),
        ])
        .unwrap();
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
    fn errors_in_defaults_name_the_entry_and_the_file() {
        for (main, named) in [
            ("defaults: 3\n", "`defaults`"),
            ("defaults:\n  - nowhere\n", "nowhere.yaml"),
            ("defaults:\n  - a: {b: c}\n", "`defaults`"),
            ("defaults:\n  - main\n", "lead back"),
            ("defaults:\n  - override x: y\n", "override"),
            ("defaults: []\na: ???\nb: {c: '???'}\n", "b.c"),
        ] {
            let message = read(&[("main.yaml", main)]).unwrap_err().to_string();
            assert!(message.contains(named) && message.contains("main.yaml"), "{main}: {message}");
        }
    }

    #[test]
    fn the_first_file_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("main.yaml");
        std::fs::write(&path, "defaults: [base]\nx: read\n").unwrap();
        std::fs::write(dir.path().join("base.yaml"), "x: base\ny: ${x}\n").unwrap();
        let document = Document::read(&path).unwrap();
        std::fs::write(&path, "x: written since\n").unwrap();
        let map = compose(document).unwrap().0;
        assert_eq!(map["y"].kind, ValueKind::String("read".into()));
    }
}
