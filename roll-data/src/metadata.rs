//! `metadata.csv` or `metadata.jsonl`: which clip goes with which prompt.

use std::path::{Path, PathBuf};

use roll_core::error::nearest;
use roll_core::serde_json::{self, Map, Value};
use roll_core::{Error, Result};

/// Larger files are refused: at a few hundred bytes a row this is a million rows.
const MAX_BYTES: u64 = 512 << 20;

/// One row; paths are resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Line of the file, from 1.
    pub line: u64,
    /// Text prompt.
    pub prompt: String,
    /// The clip: a video file, a picture, or a directory of pictures.
    pub video: PathBuf,
    /// Column `image` or `input_image`.
    pub image: Option<PathBuf>,
    /// Column `end_image`.
    pub end_image: Option<PathBuf>,
}

/// A metadata file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// The file.
    pub path: PathBuf,
    /// Its rows, in order; at least one.
    pub rows: Vec<Row>,
}

impl Metadata {
    /// Reads the file at `path`: CSV, or JSON objects one a line. Paths in it start from `base`, or from the directory
    /// of the file.
    ///
    /// Needs the columns (keys) `video` and `prompt`; knows `image` (or `input_image`) and `end_image`; others are
    /// ignored. In JSON `video` may be a list: several clips of one prompt, each a row.
    pub fn read(path: impl AsRef<Path>, base: Option<&Path>) -> Result<Self> {
        let path = path.as_ref();
        let size = std::fs::metadata(path).map_err(Error::file("read the metadata", path))?.len();
        if size > MAX_BYTES {
            return Err(Error::bad_file(path, format!("{size} bytes are too many for metadata (at most {MAX_BYTES})")));
        }
        let bytes = std::fs::read(path).map_err(Error::file("read the metadata", path))?;
        let text = std::str::from_utf8(&bytes).map_err(|e| Error::bad_file(path, format!("not UTF-8: {e}")))?;
        let text = text.trim_start_matches('\u{feff}'); // spreadsheets put it there
        let base = base.map(Path::to_path_buf).unwrap_or_else(|| path.parent().unwrap_or(Path::new("")).to_path_buf());
        let rows = match text.trim_start().starts_with('{') {
            true => json_rows(path, text, &base)?,
            false => csv_rows(path, text, &base)?,
        };
        Ok(Self { path: path.into(), rows })
    }

    /// "metadata.csv line 3 (clips/a.mp4)", for messages.
    pub fn place(&self, row: &Row) -> String {
        format!("{} line {} ({})", self.path.display(), row.line, row.video.display())
    }
}

fn csv_rows(path: &Path, text: &str, base: &Path) -> Result<Vec<Row>> {
    let bad = |problem: String| Error::bad_file(path, problem);
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
    let headers = reader.headers().map_err(|e| bad(problem(&e)))?.clone();
    let find = |name: &str| headers.iter().position(|h| h == name);
    let need = |name: &str| {
        find(name).ok_or_else(|| {
            let found: Vec<_> = headers.iter().collect();
            let hint = nearest(name, found.iter().copied());
            let hint = hint.map(|h| format!("; is `{h}` meant?")).unwrap_or_default();
            bad(format!("no column `{name}`; the first line names {}{hint}", list(&found)))
        })
    };
    let (video, prompt) = (need("video")?, need("prompt")?);
    let (image, end_image) = (find("image").or(find("input_image")), find("end_image"));

    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|e| bad(problem(&e)))?;
        let line = record.position().map_or(0, |p| p.line());
        let path_in =
            |column: Option<usize>| column.and_then(|c| record.get(c)).filter(|s| !s.is_empty()).map(|s| base.join(s));
        let video = path_in(Some(video)).ok_or_else(|| bad(format!("line {line}: the column `video` is empty")))?;
        rows.push(Row {
            line,
            prompt: record.get(prompt).unwrap_or("").into(),
            video,
            image: path_in(image),
            end_image: path_in(end_image),
        });
    }
    if rows.is_empty() {
        return Err(bad("no rows after the first line, which names the columns".into()));
    }
    Ok(rows)
}

fn json_rows(path: &Path, text: &str, base: &Path) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (i, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let line = i as u64 + 1;
        let bad = |problem: String| Error::bad_file(path, format!("line {line}: {problem}"));
        let object: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| bad(format!("expected a JSON object: {e}")))?;
        let missing = |name: &str| {
            let found: Vec<_> = object.keys().map(String::as_str).collect();
            let hint = nearest(name, found.iter().copied()).map(|h| format!("; is `{h}` meant?")).unwrap_or_default();
            bad(format!("no key `{name}`; the object has {}{hint}", list(&found)))
        };
        let text_of = |name: &str| match object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
            Some(other) => Err(bad(format!("`{name}`: expected a string, found {other}"))),
        };
        let videos: Vec<String> = match object.get("video") {
            Some(Value::Array(list)) => {
                let names = list.iter().map(|v| v.as_str().filter(|s| !s.is_empty()).map(String::from));
                names.collect::<Option<_>>().ok_or_else(|| bad("`video`: expected strings in the list".into()))?
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
        rows.extend(videos.into_iter().map(|video| Row {
            line,
            prompt: prompt.clone(),
            video: base.join(video),
            image: image.clone(),
            end_image: end_image.clone(),
        }));
    }
    Ok(rows)
}

fn list(names: &[&str]) -> String {
    match names {
        [] => "no columns".into(),
        names => names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", "),
    }
}

fn problem(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let line = pos.as_ref().map_or(0, csv::Position::line);
            format!("line {line}: expected {expected_len} fields, found {len}; put prompts with commas in quotes")
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Metadata> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metadata.csv");
        std::fs::write(&path, text).unwrap();
        Metadata::read(&path, Some(Path::new("base")))
    }

    #[test]
    fn rows_are_read_with_paths_from_the_base() {
        let metadata =
            read("\u{feff}prompt, video,end_image,score\n\"a man, talking\",a/b.mp4,,1\nx,/c.gif,e.png,2\n").unwrap();
        assert_eq!(metadata.rows[0].prompt, "a man, talking");
        assert_eq!(metadata.rows[0].video, Path::new("base/a/b.mp4"));
        assert_eq!((metadata.rows[0].end_image.as_ref(), metadata.rows[0].line), (None, 2));
        assert_eq!(metadata.rows[1].video, Path::new("/c.gif"));
        assert_eq!(metadata.rows[1].end_image.as_deref(), Some(Path::new("base/e.png")));
        let metadata = read("video,prompt,input_image\na,b,c.png\n").unwrap();
        assert_eq!(metadata.rows[0].image.as_deref(), Some(Path::new("base/c.png")));
    }

    #[test]
    fn what_is_missing_is_named() {
        let told = |text: &str| read(text).unwrap_err().to_string();
        let message = told("video,promt\na,b\n");
        assert!(message.contains("no column `prompt`") && message.contains("`promt`"), "{message}");
        assert!(told("path,prompt\na,b\n").contains("no column `video`"));
        assert!(told("").contains("no columns") || told("").contains("no column"));
        assert!(told("video,prompt\n").contains("no rows"));
        assert!(told("video,prompt\na,b\n,c\n").contains("line 3"));
        assert!(told("video,prompt\na,b, c\n").contains("quotes"));
        assert!(Metadata::read("/nowhere/metadata.csv", None).is_err());
    }

    #[test]
    fn json_lines_are_read_and_may_name_several_clips_of_a_prompt() {
        let metadata = read(
            "{\"prompt\": \"a man\\nand a dog\", \"video\": [\"a.mp4\", \"/b.mp4\"], \"image\": \"i.png\", \"score\": 1}\n\n\
             {\"video\": \"c.gif\", \"prompt\": \"\", \"image\": null, \"end_image\": \"e.png\"}\n",
        )
        .unwrap();
        let videos: Vec<_> = metadata.rows.iter().map(|r| (r.line, r.video.to_str().unwrap())).collect();
        assert_eq!(videos, [(1, "base/a.mp4"), (1, "/b.mp4"), (3, "base/c.gif")]);
        assert_eq!((metadata.rows[1].prompt.as_str(), metadata.rows[2].prompt.as_str()), ("a man\nand a dog", ""));
        assert_eq!(metadata.rows[1].image.as_deref(), Some(Path::new("base/i.png")));
        assert_eq!((&metadata.rows[2].image, metadata.rows[2].end_image.is_some()), (&None, true));
        let told = |text: &str| read(text).unwrap_err().to_string();
        assert!(told("{\"video\": \"a\", \"promt\": \"b\"}").contains("is `promt` meant?"));
        assert!(told("{\"video\": [], \"prompt\": \"b\"}").contains("no key `video`"));
        assert!(told("{\"video\": 3, \"prompt\": \"b\"}").contains("expected a string, found 3"));
        assert!(told("{\"video\": \"a\", \"prompt\": \"b\"}\n{\"video\"").contains("line 2"));
    }
}
