//! Files that are whole or not there.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// Replaces the file at `path` by one that holds `bytes`, as [`write_atomically_with`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically_with(path, |file| file.write_all(bytes))
}

/// Replaces the file at `path` by what `write` writes. At every instant the path holds the old file or the whole new
/// one, also after a power cut: the bytes go to a new file beside it, are synced, and renamed into place. On error the
/// old file stays and the new one is removed.
///
/// Not promised: the permissions of the old file; that a symbolic link stays one.
pub fn write_atomically_with(path: &Path, write: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<()> {
    let temporary = temporary_beside(path);
    let written = File::create(&temporary).and_then(|mut file| {
        write(&mut file)?;
        file.sync_all()
    });
    let placed = written.and_then(|()| fs::rename(&temporary, path));
    placed.map_err(|e| {
        let _ = fs::remove_file(&temporary); // the error that counts is `e`
        Error::file("write", path)(e)
    })?;
    sync_directory(path.parent().unwrap_or(Path::new(".")))
}

/// A name beside `path` that no other thread or process uses.
pub fn temporary_beside(path: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let n = COUNTER.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{name}.{}-{n}.tmp", std::process::id()))
}

/// Makes renames and new names in `directory` last over a power cut. Where directories cannot be opened (Windows),
/// nothing can be done about it.
pub fn sync_directory(directory: &Path) -> Result<()> {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    if cfg!(unix) {
        File::open(directory).and_then(|d| d.sync_all()).map_err(Error::file("sync the directory", directory))?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        write_atomically(&path, b"old").unwrap();
        let failed = write_atomically_with(&path, |file| {
            file.write_all(b"half")?;
            Err(std::io::Error::other("full"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(write_atomically(&dir.path().join("none/f"), b"").is_err());
    }
}
