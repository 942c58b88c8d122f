//! `metrics.jsonl`: one line for each logged step, which is a JSON object.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use roll_core::{Error, Result};
use roll_external::files::{self, write_atomically_with};

/// Length of the longest line that is read: many times the length of a line with a thousand metrics.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Appends lines to the file. A line is in the file when [`JsonlWriter::write`] returns.
#[derive(Debug)]
pub struct JsonlWriter {
    path: PathBuf,
    file: File,
}

impl JsonlWriter {
    /// Opens or makes the file of a run that begins or continues with step `from_step`.
    ///
    /// Lines of this step and of later steps are removed, since the run takes these steps again. A last line that a
    /// crash has cut short is removed, too. Every line without a step is removed with a warning, because a power cut
    /// may leave anything at the end of a file. Warns if lines of earlier steps are missing: every `log_interval`-th
    /// step should have one.
    pub fn resume(path: &Path, from_step: u64, log_interval: u64) -> Result<Self> {
        let earlier_steps = if path.exists() { remove_lines_from(path, from_step)? } else { 0 };
        let expected = from_step.saturating_sub(1) / log_interval.max(1);
        if earlier_steps < expected {
            let path = path.display();
            tracing::warn!(
                "{path} holds {earlier_steps} of {expected} steps of before: curves and report lack the others"
            );
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(Error::file("open", path))?;
        Ok(Self { path: path.into(), file })
    }

    /// Writes `{"step": step, ...metrics}`, sorted by name.
    pub fn write(&mut self, step: u64, metrics: &BTreeMap<String, f64>) -> Result<()> {
        for (name, value) in metrics.iter().filter(|(_, value)| !value.is_finite()) {
            tracing::warn!(step, "{name} is not finite ({value}): written as null");
        }
        self.file.write_all(line(step, metrics).as_bytes()).map_err(Error::file("write", &self.path))
    }

    /// Syncs the file, so that the lines written so far survive a power cut.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync_data().map_err(Error::file("sync", &self.path))
    }
}

/// Removes the lines of the step `from_step` and of later steps, and the lines without a step. Returns the number of
/// remaining lines, apart from step 0, which is measured before training.
fn remove_lines_from(path: &Path, from_step: u64) -> Result<u64> {
    // The step of a line that is kept; `None` for a line that is removed.
    let kept_step = |line: &Line| match line {
        Line::Row(row) => step_of(row).filter(|step| *step < from_step),
        Line::Invalid(_) | Line::Cut => None,
    };
    let (mut earlier_steps, mut is_changed) = (0, false);
    each_line(path, |_, line, _| {
        let has_step = matches!(&line, Line::Row(row) if step_of(row).is_some());
        if !has_step && !matches!(line, Line::Cut) {
            tracing::warn!("a line of {} holds no step and is removed", path.display());
        }
        match kept_step(&line) {
            Some(0) => {}
            Some(_) => earlier_steps += 1,
            None => is_changed = true,
        }
        Ok(())
    })?;
    if is_changed {
        write_atomically_with(path, |file| {
            let mut out = BufWriter::new(file);
            let copied = each_line(path, |_, line, text| match kept_step(&line) {
                Some(_) => out.write_all(text).map_err(Error::file("write", path)),
                None => Ok(()),
            });
            copied.map_err(io::Error::other)?;
            out.flush()
        })?;
    }
    Ok(earlier_steps)
}

/// The line of a step: `{"step": step, ...metrics}`, sorted by name, and a line break. A value that is not finite is
/// `null`.
pub fn line(step: u64, metrics: &BTreeMap<String, f64>) -> String {
    let mut object = Map::new();
    object.insert("step".into(), step.into());
    let values = metrics.iter().filter(|(name, _)| *name != "step");
    object.extend(values.map(|(name, value)| (name.clone(), Value::from(*value))));
    Value::Object(object).to_string() + "\n"
}

/// Reads the objects of a file, one for each line. If several lines have the same step, only the last of them is
/// returned. A last line without a line break is left out. Any other line that is no object, or is longer than 1 MiB,
/// is an error that names it.
pub fn read_jsonl(path: &Path) -> Result<Vec<Map<String, Value>>> {
    let mut rows = Vec::new();
    let mut row_of_step: HashMap<u64, usize> = HashMap::new();
    each_line(path, |number, line, _| {
        let row = match line {
            Line::Row(row) => row,
            Line::Invalid(problem) => return Err(Error::bad_file(path, format!("line {number} {problem}"))),
            Line::Cut => return Ok(()),
        };
        let step = step_of(&row);
        let earlier_row = step.and_then(|step| row_of_step.get(&step).copied());
        if let Some(index) = earlier_row {
            rows[index] = row;
        } else {
            row_of_step.extend(step.map(|step| (step, rows.len())));
            rows.push(row);
        }
        Ok(())
    })?;
    Ok(rows)
}

/// The contents of a line.
enum Line {
    /// A JSON object.
    Row(Map<String, Value>),
    /// Not a JSON object, with the reason in words.
    Invalid(String),
    /// The last line, without a line break: the process was killed while it wrote the line.
    Cut,
}

/// The step of a row; `None` for an object that is no row of metrics.
fn step_of(row: &Map<String, Value>) -> Option<u64> {
    row.get("step")?.as_u64()
}

/// Calls `f` with each line of a file: its number from 1, its contents and its bytes. Only [`MAX_LINE_BYTES`] of a
/// longer line are held in memory.
fn each_line(path: &Path, mut f: impl FnMut(u64, Line, &[u8]) -> Result<()>) -> Result<()> {
    let mut reader = BufReader::new(files::open(path).map_err(Error::file("read", path))?);
    let mut text = Vec::new();
    for number in 1.. {
        text.clear();
        let mut limited_reader = reader.by_ref().take(MAX_LINE_BYTES);
        limited_reader.read_until(b'\n', &mut text).map_err(Error::file("read", path))?;
        let is_too_long = text.len() as u64 == MAX_LINE_BYTES && !text.ends_with(b"\n");
        let line = if text.ends_with(b"\n") {
            match serde_json::from_slice(&text) {
                Ok(row) => Line::Row(row),
                Err(error) => Line::Invalid(format!("is no JSON object: {error}")),
            }
        } else if is_too_long && skip_line(&mut reader).map_err(Error::file("read", path))? {
            Line::Invalid(format!("has more than {MAX_LINE_BYTES} bytes: it is no row of metrics; delete it"))
        } else {
            Line::Cut
        };
        let is_last = matches!(line, Line::Cut);
        // The text after the last line break may be empty.
        if !text.is_empty() {
            f(number, line, &text)?;
        }
        if is_last {
            break;
        }
    }
    Ok(())
}

/// Skips the rest of a line. Returns false if the file ends without a line break.
fn skip_line(reader: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let bytes = reader.fill_buf()?;
        let (length, is_whole) = match bytes.iter().position(|byte| *byte == b'\n') {
            Some(end) => (end + 1, true),
            None => (bytes.len(), false),
        };
        reader.consume(length);
        let is_end_of_file = length == 0;
        if is_whole || is_end_of_file {
            return Ok(is_whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(pairs: &[(&str, f64)]) -> BTreeMap<String, f64> {
        pairs.iter().map(|(k, v)| (k.to_string(), *v)).collect()
    }

    #[test]
    fn values_read_back_exactly_and_nonfinite_ones_are_null() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut writer = JsonlWriter::resume(&path, 0, 1).unwrap();
        writer.write(0, &metrics(&[("actor/loss", 0.1 + 0.2), ("lr", 2.5e-6), ("bad", f64::NAN)])).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"step\":0,\"actor/loss\":0.30000000000000004,\"bad\":null,\"lr\":2.5e-6}\n");
        assert_eq!(read_jsonl(&path).unwrap()[0]["actor/loss"].as_f64(), Some(0.1 + 0.2));
    }

    #[test]
    fn a_resumed_run_replaces_repeated_steps() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut writer = JsonlWriter::resume(&path, 0, 1).unwrap();
        for step in 0..5 {
            writer.write(step, &metrics(&[("x", step as f64)])).unwrap();
        }
        writer.file.write_all(b"{\"step\":5,\"x\":").unwrap();
        let mut writer = JsonlWriter::resume(&path, 3, 1).unwrap();
        writer.write(3, &metrics(&[("x", 33.0)])).unwrap();
        let lines = read_jsonl(&path).unwrap();
        assert_eq!(lines.iter().map(|l| l["x"].as_f64().unwrap()).collect::<Vec<_>>(), [0.0, 1.0, 2.0, 33.0]);
        writer.file.write_all(b"\0\0\0\n{\"step\":4,\"x\":1}\n").unwrap();
        JsonlWriter::resume(&path, 5, 1).unwrap();
        assert_eq!(read_jsonl(&path).unwrap().len(), 5);
        std::fs::write(&path, "no json\n").unwrap();
        assert!(read_jsonl(&path).unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn the_last_row_of_a_step_counts_and_long_lines_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut text: String = (0..1000).map(|i| format!("{{\"step\":{},\"x\":{i}}}\n", 1 + i % 2)).collect();
        text += "{\"y\":1}\n{\"y\":2}\n";
        std::fs::write(&path, &text).unwrap();
        let rows = read_jsonl(&path).unwrap();
        let values = rows.iter().map(|row| row.get("x").map_or(-1.0, |x| x.as_f64().unwrap())).collect::<Vec<_>>();
        assert_eq!(values, [998.0, 999.0, -1.0, -1.0]);

        let long = format!("{{\"step\":3,\"x\":\"{}\"}}\n", "x".repeat(3 << 20));
        std::fs::write(&path, format!("{{\"step\":1}}\n{long}{{\"step\":2}}\n")).unwrap();
        let problem = read_jsonl(&path).unwrap_err().to_string();
        assert!(problem.contains("line 2 has more than 1048576 bytes"), "{problem}");
        JsonlWriter::resume(&path, 9, 1).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":1}\n{\"step\":2}\n");
        // A long line without its end is left out as a short one is.
        std::fs::write(&path, format!("{{\"step\":1}}\n{}", long.trim_end())).unwrap();
        assert_eq!(read_jsonl(&path).unwrap().len(), 1);
        JsonlWriter::resume(&path, 9, 1).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":1}\n");
    }
}
