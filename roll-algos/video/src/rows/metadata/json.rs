//! Metadata in JSON: one object per line, or a list of objects.

use std::path::Path;
use std::sync::Arc;

use roll_core::{
    Columns, Error, Result,
    serde::de::{Deserializer, Error as _, SeqAccess, Visitor},
    serde_json::{self, Map, Value},
};

use super::{COLUMNS, MASK, MetadataRow, VIDEO, checked_weight, listed, misspelt_video};

/// Maximum size of an object in bytes. Parsed, it may take thirty times as much memory.
const MAX_OBJECT: usize = 4 << 20;
/// Maximum size of a list in bytes. A single object may be almost the whole list.
const MAX_LIST: usize = 64 << 20;

/// Reads one object per line.
pub(super) fn lines(path: &Path, text: &str, base: &Path) -> Result<Vec<MetadataRow>> {
    let mut all_rows = Vec::new();
    for object in objects(path, text) {
        let (line, object) = object?;
        all_rows.extend(rows(&object, line, base).map_err(|problem| bad_line(path, line, problem))?);
    }
    Ok(all_rows)
}

/// The objects of a text with one object per line, each with the number of its line.
pub(super) fn objects(path: &Path, text: &str) -> impl Iterator<Item = Result<(u64, Map<String, Value>)>> {
    (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()).map(move |(line, text)| {
        let bad = |problem: String| bad_line(path, line, problem);
        if text.len() > MAX_OBJECT {
            return Err(bad(format!("{} bytes are too many for one object (at most {MAX_OBJECT})", text.len())));
        }
        let object = serde_json::from_str(text).map_err(|e| {
            bad(format!("expected a JSON object (one a line; several lines of one need a list, [...]): {e}"))
        })?;
        Ok((line, object))
    })
}

fn bad_line(path: &Path, line: u64, problem: String) -> Error {
    Error::bad_file(path, format!("line {line}: {problem}"))
}

/// Reads a list of objects. The field `line` of a row is the object's number in the list.
pub(super) fn list(path: &Path, text: &str, base: &Path) -> Result<Vec<MetadataRow>> {
    if text.len() > MAX_LIST {
        let problem =
            format!("{} bytes are too many for a list (at most {MAX_LIST}); write its objects one a line", text.len());
        return Err(Error::bad_file(path, problem));
    }
    // Objects are parsed one at a time, because parsed values take many times as much memory as their text.
    let mut collected = ListVisitor { found: Vec::new(), problem: None, base };
    let mut reader = serde_json::Deserializer::from_str(text);
    let read = reader.deserialize_seq(&mut collected).and_then(|()| reader.end());
    let ListVisitor { found, problem, .. } = collected;
    if let Some(problem) = problem {
        return Err(Error::bad_file(path, problem));
    }
    read.map_err(|e| Error::bad_file(path, format!("expected a JSON list of objects with `prompt`: {e}")))?;
    match found.is_empty() {
        true => Err(Error::bad_file(path, "an empty list")),
        false => Ok(found),
    }
}

/// Collects the rows of a list, up to the first invalid object.
struct ListVisitor<'a> {
    found: Vec<MetadataRow>,
    /// The problem of the invalid object.
    problem: Option<String>,
    /// The directory that relative paths start at.
    base: &'a Path,
}

impl<'de> Visitor<'de> for &mut ListVisitor<'_> {
    type Value = ();

    fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("a list of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<(), A::Error> {
        for number in 1.. {
            let Some(object) = list.next_element::<Map<String, Value>>()? else { break };
            match rows(&object, number, self.base) {
                Ok(rows) => self.found.extend(rows),
                Err(problem) => {
                    self.problem = Some(format!("object {number}: {problem}"));
                    return Err(A::Error::custom("an object has a problem"));
                }
            }
        }
        Ok(())
    }
}

/// The rows of one object: one row per clip, or one without a clip.
fn rows(object: &Map<String, Value>, line: u64, base: &Path) -> Result<Vec<MetadataRow>, String> {
    let missing = |name: &str| {
        let found: Vec<_> = object.keys().map(String::as_str).collect();
        format!("no key `{name}`; the object has {}", listed(&found, name))
    };
    let text_of = |name: &str| match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
        Some(other) => Err(format!("`{name}`: expected a string, found {other}")),
    };
    let mut videos: Vec<Option<String>> = match object.get(VIDEO) {
        Some(Value::Array(list)) => {
            let mut names = Vec::new();
            for value in list {
                match value.as_str() {
                    Some(name) if !name.is_empty() => names.push(Some(name.to_string())),
                    _ => return Err("`video`: expected strings in the list".into()),
                }
            }
            names
        }
        _ => vec![text_of(VIDEO)?],
    };
    if videos.is_empty() {
        videos.push(None);
    }
    if !object.contains_key(VIDEO) && misspelt_video(object.keys().map(String::as_str)).is_some() {
        return Err(missing(VIDEO));
    }
    if !object.contains_key("prompt") {
        return Err(missing("prompt"));
    }
    let prompt = text_of("prompt")?.unwrap_or_default();
    let image = text_of("image")?.or(text_of("input_image")?).map(|s| base.join(s));
    let end_image = text_of("end_image")?.map(|s| base.join(s));
    let mask = text_of(MASK)?.map(|s| base.join(s));
    let weight = match object.get("weight") {
        None | Some(Value::Null) => None,
        Some(value) => Some(checked_weight(value.as_f64(), value)?),
    };
    let others = object.iter().filter(|(name, value)| !COLUMNS.contains(&name.as_str()) && !value.is_null());
    let columns: Columns = Arc::new(others.map(|(name, value)| (name.clone(), value.clone())).collect());
    let row = |video: Option<String>| MetadataRow {
        line,
        prompt: prompt.clone(),
        no_prompt: None,
        video: video.map(|video| base.join(video)),
        image: image.clone(),
        end_image: end_image.clone(),
        weight,
        mask: mask.clone(),
        columns: columns.clone(),
        window: None,
    };
    Ok(videos.into_iter().map(row).collect())
}
