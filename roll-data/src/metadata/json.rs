//! JSON: objects one a line, or a list of them.

use std::path::Path;

use roll_core::error::nearest;
use roll_core::serde_json::{self, Map, Value};
use roll_core::{Error, Result};

use super::{Row, named};

/// Objects one a line.
pub(super) fn lines(path: &Path, text: &str, base: &Path) -> Result<Vec<Row>> {
    let mut found = Vec::new();
    for (i, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let line = i as u64 + 1;
        let bad = |problem: String| Error::bad_file(path, format!("line {line}: {problem}"));
        let object = serde_json::from_str(text).map_err(|e| {
            bad(format!("expected a JSON object (one a line; several lines of one need a list, [...]): {e}"))
        })?;
        found.extend(rows(&object, line, base).map_err(bad)?);
    }
    Ok(found)
}

/// A list of objects; rows have their numbers in it.
pub(super) fn list(path: &Path, text: &str, base: &Path) -> Result<Vec<Row>> {
    let objects: Vec<Map<String, Value>> = serde_json::from_str(text).map_err(|e| {
        Error::bad_file(path, format!("expected a JSON list of objects with `video` and `prompt`: {e}"))
    })?;
    let mut found = Vec::new();
    for (number, object) in (1..).zip(&objects) {
        let bad = |problem| Error::bad_file(path, format!("object {number}: {problem}"));
        found.extend(rows(object, number, base).map_err(bad)?);
    }
    match found.is_empty() {
        true => Err(Error::bad_file(path, "an empty list")),
        false => Ok(found),
    }
}

/// The rows of one object: one, or one for each of its clips.
fn rows(object: &Map<String, Value>, line: u64, base: &Path) -> Result<Vec<Row>, String> {
    let missing = |name: &str| {
        let found: Vec<_> = object.keys().map(String::as_str).collect();
        let hint = nearest(name, found.iter().copied()).map(|h| format!("; is `{h}` meant?")).unwrap_or_default();
        format!("no key `{name}`; the object has {}{hint}", named(&found))
    };
    let text_of = |name: &str| match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
        Some(other) => Err(format!("`{name}`: expected a string, found {other}")),
    };
    let videos: Vec<String> = match object.get("video") {
        Some(Value::Array(list)) => {
            let names = list.iter().map(|v| v.as_str().filter(|s| !s.is_empty()).map(String::from));
            names.collect::<Option<_>>().ok_or("`video`: expected strings in the list")?
        }
        _ => text_of("video")?.into_iter().collect(),
    };
    if videos.is_empty() {
        return Err(missing("video"));
    }
    if !object.contains_key("prompt") {
        return Err(missing("prompt"));
    }
    let prompt = text_of("prompt")?.unwrap_or_default();
    let image = text_of("image")?.or(text_of("input_image")?).map(|s| base.join(s));
    let end_image = text_of("end_image")?.map(|s| base.join(s));
    let row = |video: String| Row {
        line,
        prompt: prompt.clone(),
        video: base.join(video),
        image: image.clone(),
        end_image: end_image.clone(),
    };
    Ok(videos.into_iter().map(row).collect())
}
