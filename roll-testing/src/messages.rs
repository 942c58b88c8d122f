//! The wording of messages, compared with one file.
//!
//! A test compares the kind of an error, its key or its path by itself, and leaves the sentence to [`check`]. The
//! sentences of all tests are in `tests/messages.txt` of this repository. After a change of wording,
//! `ROLL_BLESS=1 cargo test` writes the new sentence there, and the change of that file shows it to a reviewer. To
//! remove entries that no test checks any more, delete the file before that run, which then writes it anew.
//!
//! Only messages that are the same on every machine and for every set of Cargo features belong there.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::fs::File;
use std::io::{Read, Seek, Write as _};
use std::path::Path;

/// Compares `message` with the entry `id`, a path of crate, module and case. Names of temporary directories in
/// `message` are replaced first.
///
/// # Panics
/// If the entry is missing or differs, unless `ROLL_BLESS` is set.
#[track_caller]
pub fn check(id: &str, message: impl Display) {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/messages.txt");
    let should_write = std::env::var_os("ROLL_BLESS").is_some_and(|value| !value.is_empty());
    let message = without_temporary_names(&message.to_string(), &std::env::temp_dir());
    if let Err(problem) = compare(Path::new(file), should_write, id, &message) {
        panic!("{problem}");
    }
}

/// Compares `message` with the entry `id` of the file. If the entry differs, writes it if `should_write`, and otherwise
/// returns the problem.
fn compare(path: &Path, should_write: bool, id: &str, message: &str) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", path.display());
    let mut file = File::options()
        .read(true)
        .write(should_write)
        .create(should_write)
        .truncate(false)
        .open(path)
        .map_err(failed)?;
    // Tests are threads and processes; the lock lets them write one after the other.
    if should_write {
        file.lock().map_err(failed)?;
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(failed)?;
    let mut entries = parse(&text);
    let entry = entries.get(id);
    if entry.is_some_and(|entry| entry == message) {
        return Ok(());
    }
    if !should_write {
        let expected = entry.map_or("no entry", String::as_str);
        return Err(format!(
            "`{id}` of {}\nexpected: {expected}\nfound:    {message}\nIf the new wording is right, write it there with \
             ROLL_BLESS=1.",
            path.display()
        ));
    }
    entries.insert(id.to_owned(), message.to_owned());
    let mut text = String::new();
    for (id, message) in &entries {
        let _ = writeln!(text, "{id}\n    {}", message.replace('\n', "\n    "));
    }
    file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(text.as_bytes())).map_err(failed)
}

/// Parses the file into messages by id. A line without indentation is an id, the indented lines after it its message.
fn parse(text: &str) -> BTreeMap<String, String> {
    let mut entries = BTreeMap::new();
    let mut id = String::new();
    for line in text.lines() {
        match line.strip_prefix("    ") {
            None => id = line.to_owned(),
            Some(line) => {
                let message = entries.entry(id.clone()).and_modify(|message: &mut String| message.push('\n'));
                message.or_default().push_str(line);
            }
        }
    }
    entries
}

/// Replaces the directories of the crate `tempfile`, `.tmp` and six random characters, by `TEMP`.
fn without_temporary_names(message: &str, directory: &Path) -> String {
    const RANDOM_CHARACTERS: usize = 6;
    let begin = format!("{}/.tmp", directory.display().to_string().trim_end_matches('/'));
    let mut parts = message.split(&begin);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + "TEMP" + part.get(RANDOM_CHARACTERS..).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wording_is_compared_and_blessed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("messages.txt");
        assert!(compare(&path, false, "a/b", "one").is_err());
        compare(&path, true, "a/b", "one").unwrap();
        compare(&path, true, "a/a", "two\n\n  lines").unwrap();
        compare(&path, true, "a/b", "a word").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a/a\n    two\n    \n      lines\na/b\n    a word\n");
        compare(&path, false, "a/a", "two\n\n  lines").unwrap();
        let problem = compare(&path, false, "a/b", "one").unwrap_err();
        assert!(problem.contains("expected: a word\nfound:    one"), "{problem}");
    }

    #[test]
    fn temporary_directories_have_no_name() {
        let message = "/tmp/.tmpA1b2C3/x.mp4 and /tmp/.tmpZZZZZZ: no";
        assert_eq!(without_temporary_names(message, Path::new("/tmp/")), "TEMP/x.mp4 and TEMP: no");
        assert_eq!(without_temporary_names("none", Path::new("/tmp")), "none");
    }
}
