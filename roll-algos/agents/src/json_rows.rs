//! Rows of a data set in a file: JSON lines, or a JSON list.

use std::path::Path;

use roll_core::{Error, Result};
use roll_external::json;
use serde_json::Value;

/// Greatest size of a file, which is held in memory.
pub(crate) const MAX_BYTES: u64 = 4 << 30;

/// A row of a file.
pub(crate) struct Row {
    /// Place of the row: `line 3`, or `entry 3` of a JSON list.
    pub place: String,
    /// The row; an error if its line is not JSON.
    pub value: serde_json::Result<Value>,
}

/// The rows of `text`, the contents of `file`. Empty lines are skipped. Fails on a JSON list that cannot be read, which
/// the error calls a JSON list of `what`.
pub(crate) fn rows<'a>(file: &Path, text: &'a str, what: &str) -> Result<Box<dyn Iterator<Item = Row> + 'a>> {
    if text.trim_start().starts_with('[') {
        let list: Vec<Value> =
            json::parse(text).map_err(|e| Error::bad_file(file, format!("expected a JSON list of {what}: {e}")))?;
        let entries = list.into_iter().enumerate();
        return Ok(Box::new(entries.map(|(i, entry)| Row { place: format!("entry {}", i + 1), value: Ok(entry) })));
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    Ok(Box::new(lines.map(|(i, line)| Row { place: format!("line {}", i + 1), value: json::parse(line) })))
}
