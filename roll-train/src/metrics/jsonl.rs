//! One JSON object per line and step.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use roll_core::{Error, Result};
use roll_external::files::{self, write_atomically};

/// Appends lines; each is in the file when [`JsonlWriter::write`] returns.
#[derive(Debug)]
pub struct JsonlWriter {
    path: PathBuf,
    file: File,
}

impl JsonlWriter {
    /// Opens or makes the file. Lines of steps from `from_step` on, and a line cut short by a crash, are removed; so
    /// are, with a warning, lines that hold no step: a power cut may leave anything at the end of a file.
    ///
    /// Warns if lines of earlier steps are missing: each `every`-th step has one.
    pub fn resume(path: &Path, from_step: u64, every: u64) -> Result<Self> {
        let mut steps = 0;
        if path.exists() {
            let bytes = files::read(path, u64::MAX).map_err(Error::file("read", path))?;
            let mut kept = Vec::with_capacity(bytes.len());
            for line in bytes.split_inclusive(|&b| b == b'\n').filter(|line| line.ends_with(b"\n")) {
                let object: Option<Map<String, Value>> = serde_json::from_slice(line).ok();
                match object.and_then(|object| object.get("step")?.as_u64()) {
                    Some(step) if step < from_step => {
                        steps += u64::from(step > 0);
                        kept.extend(line);
                    }
                    Some(_) => {}
                    None => tracing::warn!("a line of {} holds no step and is removed", path.display()),
                }
            }
            if kept != bytes {
                write_atomically(path, &kept)?;
            }
        }
        let expected = from_step.saturating_sub(1) / every.max(1);
        if steps < expected {
            let path = path.display();
            tracing::warn!("{path} holds {steps} of {expected} steps of before: curves and report lack the others");
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

    /// Makes the lines written so far last over a power cut.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync_data().map_err(Error::file("sync", &self.path))
    }
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

/// Reads the objects of a file, one a line. A last line without its end is left out; anything else that is no object
/// is an error that names the line.
pub fn read_jsonl(path: &Path) -> Result<Vec<Map<String, Value>>> {
    let file = files::open(path).map_err(Error::file("read", path))?;
    let mut reader = BufReader::new(file);
    let mut objects = Vec::new();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let n = reader.read_until(b'\n', &mut line).map_err(Error::file("read", path))?;
        if n == 0 || !line.ends_with(b"\n") {
            break;
        }
        let object = serde_json::from_slice(&line)
            .map_err(|e| Error::bad_file(path, format!("line {number} is no JSON object: {e}")))?;
        objects.push(object);
    }
    Ok(objects)
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
}
