//! A file in memory that roll and a program on the same machine both open: frames of a video need not go through a pipe.
//!
//! It is read and written here, not mapped: a program that shortens it cannot take this process down. What a process
//! that was killed left is removed by the next one.

use std::fs::{File, OpenOptions};
use std::io::{Read, Result, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use roll_core::Tensor;

/// Where files are memory, on Linux.
const SHARED_MEMORY: &str = "/dev/shm";
/// Tensors begin at multiples of this.
const ALIGNMENT: u64 = 64;
/// What the names of such files begin with; the number of the process follows.
const NAME: &str = "roll-";
/// A file that was not written for so long, and whose process is not there, has no owner. Processes of other containers
/// cannot be seen; those that work write more often.
const LEFT: Duration = Duration::from_secs(24 * 3600);

/// The file. It is removed when this is dropped.
pub struct Region {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Region {
    /// A new one, empty; an error where the system has none.
    pub fn new() -> Result<Self> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| remove_left(Path::new(SHARED_MEMORY)));
        let name = format!("{NAME}{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(SHARED_MEMORY).join(name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        Ok(Self { file: options.open(&path)?, path, bytes: 0 })
    }

    /// Its path, for the program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes `tensors` into it; where each begins. An error where there is not enough memory for them.
    pub fn hold(&mut self, tensors: &[(String, Tensor)]) -> Result<Vec<u64>> {
        let mut places = Vec::with_capacity(tensors.len());
        let mut end = 0u64;
        for (_, tensor) in tensors {
            places.push(end);
            self.file.seek(SeekFrom::Start(end))?;
            self.file.write_all(tensor.as_bytes())?;
            end = (end + tensor.as_bytes().len() as u64).next_multiple_of(ALIGNMENT);
        }
        if end > self.bytes {
            self.file.set_len(end)?;
            self.bytes = end;
        }
        Ok(places)
    }

    /// The bytes from `at` on.
    pub fn read(&self, at: u64, bytes: usize) -> Result<Vec<u8>> {
        if at.checked_add(bytes as u64).is_none_or(|end| end > self.bytes) {
            return Err(std::io::Error::other(format!("{bytes} bytes from {at} on, of {}", self.bytes)));
        }
        let mut file = &self.file;
        file.seek(SeekFrom::Start(at))?;
        let mut data = vec![0; bytes];
        file.read_exact(&mut data)?;
        Ok(data)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Removes files of processes that were killed. Errors do not matter: those of other users stay.
fn remove_left(directory: &Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(NAME)?.split_once('-')?.0.parse::<u32>().ok());
        let is_old = || entry.metadata().ok()?.modified().ok()?.elapsed().ok().map(|age| age > LEFT);
        if process.is_some_and(|id| !Path::new("/proc").join(id.to_string()).exists()) && is_old() == Some(true) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        // Numbers of processes end at 2^22.
        let own = format!("{NAME}{}-0", std::process::id());
        let files = ["roll-4194999-0", "roll-4194999-1", &own, "roll-4194999", "roll-x-0", "other"];
        for (i, name) in files.into_iter().enumerate() {
            let file = File::create(dir.path().join(name)).unwrap();
            if i != 1 {
                file.set_modified(SystemTime::now() - 2 * LEFT).unwrap();
            }
        }
        remove_left(dir.path());
        let left: Vec<bool> = files.iter().map(|name| dir.path().join(name).exists()).collect();
        assert_eq!(left, [false, true, true, true, true, true]);
    }
}
