//! Writing files.

use std::path::Path;

use roll_core::{Error, Result};

/// Writes `bytes` to `path` and prints the path. Creates the directory if it does not exist.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(Error::file("create the directory", parent))?;
    }
    std::fs::write(path, bytes).map_err(Error::file("write", path))?;
    println!("wrote {} ({} KB)", path.display(), bytes.len().div_ceil(1000));
    Ok(())
}
