//! Rows of metadata with all their columns, for programs that copy metadata.

use std::path::{Path, PathBuf};

use roll_core::{
    Error, Result,
    serde_json::{self, Map, Value},
};

use super::{IMAGES, MASK, VIDEO, folder, has_prompt_lines, json, table, text_of};

/// Largest table in bytes. All of its rows are in memory, each as an object.
const MAX_BYTES: u64 = 64 << 20;

/// A row of metadata with all its columns.
#[derive(Clone, Debug, PartialEq)]
pub struct RowColumns {
    /// Line of the file, or number of the object in a JSON list, from 1; 0 for a clip of a directory.
    pub line: u64,
    /// The values by column; paths of clips and pictures are resolved.
    pub values: Map<String, Value>,
}

impl RowColumns {
    /// Reads a table or a directory of clips as [`Metadata::read`](super::Metadata::read) does, with all columns. No
    /// column is required, and values are not checked here, because they are checked when the copy is read. An object
    /// with several clips becomes one row per clip.
    pub fn read(path: &Path, base: Option<&Path>) -> Result<Vec<Self>> {
        if path.is_dir() {
            return folder::videos(path)?.into_iter().map(of_clip).collect();
        }
        let text = text_of(path, MAX_BYTES, "metadata that is copied")?;
        let text = text.trim_start_matches('\u{feff}');
        let bad = |problem: String| Error::bad_file(path, problem);
        let objects = match text.trim_start().as_bytes().first() {
            _ if has_prompt_lines(path, text.trim_start()) => {
                return Err(bad("expected a table or a directory of clips, found one prompt per line".into()));
            }
            Some(b'{') => json::objects(path, text).collect::<Result<Vec<_>>>()?,
            Some(b'[') => {
                let objects: Vec<_> =
                    serde_json::from_str(text).map_err(|e| bad(format!("expected a JSON list of objects: {e}")))?;
                (1..).zip(objects).collect()
            }
            _ => table::objects(path, text)?,
        };
        let base = base.or(path.parent()).unwrap_or(Path::new(""));
        Ok(objects.into_iter().flat_map(|(line, values)| rows(line, values, base)).collect())
    }

    /// The file to show for the row: its clip or, without a clip, its picture.
    pub fn shown(&self) -> Option<&Path> {
        let files = [VIDEO].into_iter().chain(IMAGES).filter_map(|column| self.values.get(column)?.as_str());
        files.map(Path::new).next()
    }

    /// The values for a metadata file in `directory`, an absolute path. Files below `directory` get relative paths, all
    /// other files absolute paths.
    pub fn values_relative_to(&self, directory: &Path) -> Map<String, Value> {
        let mut row = self.clone();
        row.change_paths(|file| {
            let file = std::path::absolute(file).unwrap_or_else(|_| file.into());
            file.strip_prefix(directory).map(PathBuf::from).unwrap_or(file)
        });
        row.values
    }

    fn change_paths(&mut self, change: impl Fn(&Path) -> PathBuf) {
        for (column, value) in &mut self.values {
            let is_path = [VIDEO, MASK].contains(&column.as_str()) || IMAGES.contains(&column.as_str());
            if let Some(file) = value.as_str().filter(|file| is_path && !file.is_empty()) {
                *value = change(Path::new(file)).to_string_lossy().into();
            }
        }
    }
}

/// The rows of an object: one for each of its clips, or one without a clip.
fn rows(line: u64, values: Map<String, Value>, base: &Path) -> Vec<RowColumns> {
    let clips = match values.get(VIDEO) {
        Some(Value::Array(clips)) if !clips.is_empty() => clips.clone(),
        Some(clip) => vec![clip.clone()],
        None => vec![Value::Null],
    };
    let row = |clip: Value| {
        let mut values = values.clone();
        if !clip.is_null() {
            values.insert(VIDEO.into(), clip);
        }
        let mut row = RowColumns { line, values };
        row.change_paths(|file| base.join(file));
        row
    };
    clips.into_iter().map(row).collect()
}

/// The row of a clip of a directory, with the prompt in the `.txt` of the same name if there is one.
fn of_clip(clip: PathBuf) -> Result<RowColumns> {
    let file = clip.with_extension("txt");
    let prompt = if file.is_file() { folder::prompt_in(&file)? } else { String::new() };
    let columns = [(VIDEO, clip.to_string_lossy().into_owned()), ("prompt", prompt)];
    let values = columns.into_iter().map(|(column, value)| (column.to_string(), value.into())).collect();
    Ok(RowColumns { line: 0, values })
}
