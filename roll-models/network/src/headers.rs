//! Checks of weight files by their headers alone, without reading tensors.

use roll_core::{Error, Result, plan};

use crate::weights::Checkpoint;

/// Fails unless the file has every tensor of `wanted` (pairs of name and shape). The error names the first tensor that
/// is missing or has another shape.
pub fn check_tensors(file: &Checkpoint, wanted: &[(String, Vec<usize>)]) -> Result<()> {
    for (name, shape) in wanted {
        match file.info(name) {
            None => {
                let problem = format!("the tensor `{name}` is missing (shape {shape:?})");
                return Err(Error::bad_file(file.path(), problem));
            }
            Some(info) if info.shape != *shape => {
                return Err(Error::shape(
                    format!("{}: {name}", file.path().display()),
                    format!("{shape:?}"),
                    &info.shape,
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Returns a summary in one line: "transformer: 6 files, 28.58 GB, 1095 tensors of bf16".
pub fn summary(what: &str, file: &Checkpoint) -> String {
    let bytes: usize = file.keys().filter_map(|key| file.stored_bytes(key)).sum();
    let files = match file.paths().count() {
        1 => "1 file".to_string(),
        n => format!("{n} files"),
    };
    let mut types: Vec<&str> = file.keys().filter_map(|key| Some(file.info(key)?.stored.as_str())).collect();
    types.sort_unstable();
    types.dedup();
    format!("{what}: {files}, {}, {} tensors of {}", plan::in_words(bytes), file.len(), types.join(", "))
}
