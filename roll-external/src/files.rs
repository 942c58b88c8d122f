//! Atomic writes, and bounded reads of untrusted files.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use roll_core::{Error, Result};

/// Default limit in bytes of a file that is read whole as text, JSON or YAML: the largest published `tokenizer.json`
/// has some 30 MB.
pub const MAX_TEXT: u64 = 256 << 20;

/// Opens the file at `path` to read it. Fails on directories, and on named pipes and devices, which need not end.
pub fn open(path: &Path) -> io::Result<File> {
    // Checked before it is opened: opening a named pipe waits for its other end.
    let kind = fs::metadata(path)?.file_type();
    match kind.is_file() {
        true => File::open(path),
        false => {
            let found = if kind.is_dir() { "a directory" } else { "a named pipe, a socket or a device" };
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("expected a file, found {found}")))
        }
    }
}

/// The bytes of the file at `path`; fails as [`open`], and when there are more than `most`.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let too_long = |bytes: u64| io::Error::new(io::ErrorKind::InvalidData, format!("{bytes} bytes, more than {most}"));
    let length = file.metadata()?.len();
    if length > most {
        return Err(too_long(length));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // The file may grow meanwhile, and files of `/proc` report length 0.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(too_long(bytes.len() as u64)) } else { Ok(bytes) }
}

/// The byte order mark that editors and shells under Windows write before UTF-8 text.
pub const BYTE_ORDER_MARK: &str = "\u{feff}";

/// As [`read`], for JSON and other text: without the byte order mark.
pub fn read_utf8(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = read(path, most)?;
    if bytes.starts_with(BYTE_ORDER_MARK.as_bytes()) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    Ok(bytes)
}

/// As [`read_utf8`]; fails if the file is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read_utf8(path, most)?)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("not UTF-8: {}", e.utf8_error())))
}

/// Fails if `path`, or a directory between `root` and it, is a symbolic link: it may lead out of `root`, which can be
/// another person's. `root` itself may be one.
pub fn refuse_links(root: &Path, path: &Path) -> Result<()> {
    let Ok(below) = path.strip_prefix(root) else { return Ok(()) };
    let mut at = root.to_path_buf();
    for part in below.components() {
        at.push(part);
        if at.is_symlink() {
            let problem = "is a symbolic link, which is not followed: it may lead out of the directory. Put the file or \
                           directory that it names in its place";
            return Err(Error::bad_file(at, problem));
        }
    }
    Ok(())
}

/// Replaces the file at `path` by one that holds `bytes`, as [`write_atomically_with`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically_with(path, |file| file.write_all(bytes))
}

/// Replaces the file at `path` by the output of `write`. At every instant the path holds the old file or the whole new
/// one, also after a power cut: the bytes go to a new file beside it, are synced, and renamed into place. If that
/// fails, the old file stays and the new one is removed.
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

/// Whether `name` is one that [`temporary_beside`] makes: a file that a killed process left.
pub fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".tmp")
}

/// A name beside `path` that no other thread or process uses.
pub fn temporary_beside(path: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let n = COUNTER.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{name}.{}-{n}.tmp", std::process::id()))
}

/// Makes renames and new names in `directory` durable over a power cut. Has no effect where directories cannot be
/// opened (Windows).
pub fn sync_directory(directory: &Path) -> Result<()> {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    if cfg!(unix) {
        File::open(directory).and_then(|d| d.sync_all()).map_err(Error::file("sync the directory", directory))?;
    }
    Ok(())
}

/// The path as an argument in a command line for a shell.
pub fn shell_quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:,@".contains(c);
    match text.chars().all(plain) && !text.is_empty() {
        true => text,
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_paths_for_a_shell() {
        for (path, expected) in [
            ("runs/my-2", "runs/my-2"),
            ("my d\u{e4}t\u{e4} \u{6587}/run 2", "'my d\u{e4}t\u{e4} \u{6587}/run 2'"),
            ("it's", "'it'\\''s'"),
            ("a$b", "'a$b'"),
        ] {
            assert_eq!(shell_quoted(Path::new(path)), expected);
        }
    }

    #[test]
    fn a_failed_write_leaves_only_the_old_file() {
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

    #[test]
    fn rejects_long_files_and_what_is_not_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        assert_eq!(read_text(&path, 4).unwrap(), "four");
        fs::write(&path, "\u{feff}a\u{feff}").unwrap();
        assert_eq!(read_text(&path, 9).unwrap(), "a\u{feff}");
        assert_eq!(read(&path, 9).unwrap().len(), 7);
        fs::write(&path, "four").unwrap();
        assert!(read(&path, 3).unwrap_err().to_string().contains("4 bytes, more than 3"));
        fs::write(&path, [0xff]).unwrap();
        assert!(read_text(&path, 4).unwrap_err().to_string().contains("UTF-8"));
        assert!(read(dir.path(), 9).unwrap_err().to_string().contains("found a directory"));
        assert_eq!(read(&dir.path().join("none"), 9).unwrap_err().kind(), io::ErrorKind::NotFound);
        // A file of 1 TB that takes no room on the disk.
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(read(&path, MAX_TEXT).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn devices_and_named_pipes_are_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [Path::new("/dev/zero"), &pipe] {
            assert!(open(path).unwrap_err().to_string().contains("expected a file, found a named pipe"));
        }
    }
}
