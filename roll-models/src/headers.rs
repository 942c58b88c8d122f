//! Weight files by their headers alone: their tensors, compared with the needs of a network.

use roll_core::{Error, Result, plan};

use crate::weights::Checkpoint;

/// Fails unless the file has every tensor of `wanted` in its shape; names the first that is not right.
pub(crate) fn has_all(file: &Checkpoint, wanted: &[(String, Vec<usize>)]) -> Result<()> {
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

/// "transformer: 6 files, 28.58 GB, 1095 tensors of bf16".
pub(crate) fn told(what: &str, file: &Checkpoint) -> String {
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
