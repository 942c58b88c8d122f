//! Atomic writes, and bounded reads of untrusted files.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use roll_core::{Error, Result};

/// Default limit in bytes of a file that is read whole as text, JSON or YAML: the largest published `tokenizer.json`
/// has some 30 MB.
pub const MAX_TEXT: u64 = 256 << 20;

/// Opens the file at `path` to read it. Fails on a directory, on a named pipe or a device, whose bytes need not end,
/// and on a file that is a stand-in for its contents: a Git LFS pointer, or the page that a server sent instead.
pub fn open(path: &Path) -> io::Result<File> {
    // The kind is checked first, because opening a named pipe waits for its other end.
    let kind = fs::metadata(path)?.file_type();
    if !kind.is_file() {
        let found = if kind.is_dir() { "a directory" } else { "a named pipe, a socket or a device" };
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("expected a file, found {found}")));
    }
    let mut file = File::open(path)?;
    match stand_in(&head(&mut file)?) {
        Some(found) => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("expected its own contents, found {found}")))
        }
        None => Ok(file),
    }
}

/// As [`open`], for weights, clips and other files that are not text: fails also on an empty file, and on one that
/// begins with zeros.
pub fn open_binary(path: &Path) -> io::Result<File> {
    let mut file = open(path)?;
    let head = head(&mut file)?;
    let found = if head.is_empty() {
        EMPTY
    } else if head.len() == HEAD_LEN && head.iter().all(|byte| *byte == 0) {
        "zeros: a download or a copy that was not finished; fetch the file again"
    } else {
        return Ok(file);
    };
    Err(io::Error::new(io::ErrorKind::InvalidData, format!("expected its contents, found {found}")))
}

/// Number of bytes at the beginning of a file that [`stand_in`] looks at.
const HEAD_LEN: usize = 512;

/// The description of a file without contents, with a remedy.
const EMPTY: &str = "an empty file: a download or a copy that was not finished; fetch the file again";

/// The first [`HEAD_LEN`] bytes of a file. Rewinds the file.
fn head(file: &mut File) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(HEAD_LEN);
    Read::by_ref(file).take(HEAD_LEN as u64).read_to_end(&mut head)?;
    file.rewind()?;
    Ok(head)
}

/// Complete texts that servers send in place of a file.
const SERVER_ERRORS: [&str; 6] = [
    "404: Not Found",
    "Not Found",
    "Entry not found",
    "Repository not found",
    "Invalid username or password.",
    "Forbidden",
];

/// The tag in the XML document that a storage service sends in place of a file.
const ERROR_TAG: &[u8] = b"<Error>";

/// Recognises a file that is only a stand-in for its contents, by its first bytes `head`. Returns the kind of the
/// stand-in, with a remedy, for an error message; `None` if it is no known stand-in.
pub fn stand_in(head: &[u8]) -> Option<&'static str> {
    let head = head.strip_prefix(BYTE_ORDER_MARK.as_bytes()).unwrap_or(head).trim_ascii();
    let begins = |text: &str| head.get(..text.len()).is_some_and(|start| start.eq_ignore_ascii_case(text.as_bytes()));
    let web_page =
        "a web page: a server sent it instead of the file, which may need a log-in or another address; fetch it again";
    if begins("version https://git-lfs") || begins("version https://hawser") {
        Some("a Git LFS pointer: fetch the contents (`git lfs pull`), or download the file")
    } else if begins("# xet version") {
        Some("a Xet pointer: fetch the contents (`git xet checkout`), or download the file")
    } else if begins("/annex/objects/") {
        Some("a git-annex pointer: fetch the contents (`git annex get`)")
    } else if begins("<!doctype html")
        || begins("<html")
        || SERVER_ERRORS.iter().any(|answer| head == answer.as_bytes())
    {
        Some(web_page)
    } else if begins("<?xml") && head.windows(ERROR_TAG.len()).any(|bytes| bytes == ERROR_TAG) {
        Some("a server's message of an error instead of the file: fetch it again")
    } else {
        None
    }
}

/// The bytes of the file at `path`. Fails as [`open`] does, and if there are more than `max_bytes`.
pub fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let too_long =
        |bytes: u64| io::Error::new(io::ErrorKind::InvalidData, format!("{bytes} bytes, more than {max_bytes}"));
    let length = file.metadata()?.len();
    if length > max_bytes {
        return Err(too_long(length));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // The reported length is not relied on: the file may grow meanwhile, and files of `/proc` report 0. Reading one
    // byte more than `max_bytes` shows whether the file is longer.
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes { Err(too_long(bytes.len() as u64)) } else { Ok(bytes) }
}

/// The byte order mark that editors and shells under Windows write before UTF-8 text.
pub const BYTE_ORDER_MARK: &str = "\u{feff}";

/// As [`read`], for JSON and other text: a byte order mark is left out. The parser of the text checks that it is UTF-8.
pub fn read_text_bytes(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = read(path, max_bytes)?;
    if bytes.starts_with(BYTE_ORDER_MARK.as_bytes()) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    Ok(bytes)
}

/// As [`read_text_bytes`]; fails also on a file without text.
pub fn read_filled(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let bytes = read_text_bytes(path, max_bytes)?;
    if bytes.trim_ascii().is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("expected its contents, found {EMPTY}")));
    }
    Ok(bytes)
}

/// As [`read_text_bytes`]; fails if the file is not UTF-8.
pub fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read_text_bytes(path, max_bytes)?)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("not UTF-8: {}", e.utf8_error())))
}

/// Fails if `path`, or a directory between `root` and `path`, is a symbolic link. Such a link may lead out of `root`,
/// whose contents may come from another person. `root` itself may be a link. Accepts every path outside `root`.
pub fn refuse_links(root: &Path, path: &Path) -> Result<()> {
    let Ok(below_root) = path.strip_prefix(root) else { return Ok(()) };
    let mut checked = root.to_path_buf();
    for part in below_root.components() {
        checked.push(part);
        if checked.is_symlink() {
            let problem = "is a symbolic link, which is not followed: it may lead out of the directory. Put the file \
                           or directory that it names in its place";
            return Err(Error::bad_file(checked, problem));
        }
    }
    Ok(())
}

/// Fails if a directory cannot be created at `path`, or if it exists and cannot be written to. Creates nothing.
pub fn check_directory(path: &Path) -> Result<()> {
    let existing = nearest_existing(path);
    if !existing.is_dir() {
        let problem = "is in the way of a directory that is to be written: name another, or move it away";
        return Err(Error::bad_file(existing, problem));
    }
    #[cfg(unix)]
    rustix::fs::access(&existing, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
        .map_err(|error| Error::file("write to the directory", &existing)(error.into()))?;
    Ok(())
}

/// Free bytes of the file system on which `path` is, or would be. `None` where they are not known.
pub fn free_bytes(path: &Path) -> Option<u64> {
    #[cfg(unix)]
    return rustix::fs::statvfs(nearest_existing(path)).ok().map(|fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    #[cfg(not(unix))]
    {
        let _ = path;
        None
    }
}

/// The absolute `path` if it exists, otherwise its nearest ancestor that does.
fn nearest_existing(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    path.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(&path).into()
}

/// Replaces the file at `path` by one that holds `bytes`, as [`write_atomically_with`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically_with(path, |file| file.write_all(bytes))
}

/// Replaces the file at `path` by the output of `write`. At every instant the path holds the old file or the whole new
/// one, also after a power cut: the bytes go to a new file beside it, which is synced and then renamed to `path`. If
/// that fails, the old file stays and the new one is removed.
///
/// Not promised: that the new file has the old one's permissions, or that a symbolic link stays a link.
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

/// Whether a file with this name was created by [`temporary_beside`]. A killed process leaves such files.
pub fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".tmp")
}

/// A name beside `path` that no other thread or process uses.
pub fn temporary_beside(path: &Path) -> PathBuf {
    static NAMES_MADE: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let number = NAMES_MADE.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{name}.{}-{number}.tmp", std::process::id()))
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

/// The path as an argument in a command line for a shell, quoted if it has special characters.
pub fn shell_quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@".contains(c);
    if text.chars().all(is_plain) && !text.is_empty() { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
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
    fn a_directory_that_cannot_be_made_is_refused_and_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below/it")] {
            let problem = check_directory(&path).unwrap_err().to_string();
            assert!(problem.contains("file") && problem.contains("in the way"), "{problem}");
        }
        for path in [dir.path().to_path_buf(), dir.path().join("new/run")] {
            check_directory(&path).unwrap();
            assert!(free_bytes(&path).is_none_or(|bytes| bytes > 0));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        #[cfg(target_os = "linux")]
        {
            std::os::unix::fs::symlink("nowhere", dir.path().join("link")).unwrap();
            assert!(check_directory(&dir.path().join("link")).is_err(), "a link to nothing");
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

    #[test]
    fn stand_ins_and_empty_files_are_named_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12345\n";
        for (contents, words) in [
            (pointer, ["Git LFS pointer", "git lfs pull"]),
            ("# xet version 0\nfilesize = 3\n", ["Xet pointer", "download"]),
            ("/annex/objects/SHA256E-s3--ab.safetensors\n", ["git-annex", "git annex get"]),
            ("\n<!DOCTYPE html><html><body>Sign in</body></html>", ["a web page", "fetch it again"]),
            ("\u{feff}<HTML><head>", ["a web page", "log-in"]),
            ("Entry not found\n", ["a web page", "another address"]),
            ("<?xml version=\"1.0\"?>\n<Error><Code>AccessDenied</Code></Error>", ["a server's message", "again"]),
        ] {
            fs::write(&path, contents).unwrap();
            for error in [open(&path).err(), read(&path, MAX_TEXT).err(), read_text(&path, MAX_TEXT).err()] {
                let error = error.unwrap().to_string();
                words.iter().for_each(|word| assert!(error.contains(word), "no {word}: {error}"));
            }
        }
        for contents in ["Not Found, a novel", "a <html> tag", "version: 3", "", "<?xml version=\"1.0\"?><svg/>"] {
            fs::write(&path, contents).unwrap();
            assert_eq!(read_text(&path, MAX_TEXT).unwrap(), contents);
        }
        for (contents, words) in [(&[][..], "an empty file"), (&[0; 600], "zeros")] {
            fs::write(&path, contents).unwrap();
            let error = open_binary(&path).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("fetch the file again"), "{error}");
        }
        fs::write(&path, " \n").unwrap();
        assert!(read_filled(&path, MAX_TEXT).unwrap_err().to_string().contains("an empty file"));
        fs::write(&path, [&[0; 600][..], b"x"].concat()).unwrap();
        assert!(open(&path).is_ok() && open_binary(&path).is_err());
        fs::write(&path, [0; 16]).unwrap();
        let mut bytes = Vec::new();
        open_binary(&path).unwrap().read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, [0; 16], "from its beginning");
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
