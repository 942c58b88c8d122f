//! A file in memory that roll and a program on the same machine both open: frames of a video need not go through a pipe.
//!
//! It is read and written here, not mapped: a program that shortens it cannot take this process down.

use std::fs::{File, OpenOptions};
use std::io::{Read, Result, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use roll_core::Tensor;

/// Where files are memory, on Linux.
const SHARED_MEMORY: &str = "/dev/shm";
/// Tensors begin at multiples of this.
const ALIGNMENT: u64 = 64;

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
        let name = format!("roll-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
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
