//! Memory that roll and a program on the same machine both map: frames of a video need not go through a pipe.
//!
//! It is a file without a name that the program opens by its path below `/proc`. Its size is sealed: a program that
//! tries to shorten it is refused, and cannot take this process down. A program that writes into it while it should not
//! makes numbers without sense, which it could have answered anyway.

use std::fs::File;
use std::io::Result;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapRaw;
use rayon::prelude::*;
use roll_core::Tensor;

/// Tensors begin at multiples of this.
const ALIGNMENT: usize = 64;
/// Bytes that a thread copies at once.
const CHUNK: usize = 1 << 20;

/// The memory. It goes when no process has it mapped.
#[derive(Debug)]
pub struct Region {
    map: MmapRaw,
    file: File,
    id: u64,
}

impl Region {
    /// A new one, of at least one byte. An error where the system has none, or too little memory.
    #[cfg(target_os = "linux")]
    pub fn new(bytes: usize) -> Result<Self> {
        use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
        static MADE: AtomicU64 = AtomicU64::new(0);
        let file = File::from(memfd_create("roll", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        // All of it now: memory that is missing later would be a signal in the middle of a copy.
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { map: MmapRaw::map_raw(&file)?, file, id: MADE.fetch_add(1, Ordering::Relaxed) })
    }

    /// A new one: there is none on this system.
    #[cfg(not(target_os = "linux"))]
    pub fn new(_: usize) -> Result<Self> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Its path, for the program. Another region may have it when this one is gone.
    #[cfg(unix)]
    pub fn path(&self) -> PathBuf {
        use std::os::fd::AsRawFd;
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    /// Its path.
    #[cfg(not(unix))]
    pub fn path(&self) -> PathBuf {
        PathBuf::new()
    }

    /// Tells it from every other region of this process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// The bytes that `tensors` take.
    pub fn needed(tensors: &[(String, Tensor)]) -> usize {
        tensors.iter().map(|(_, tensor)| tensor.as_bytes().len().next_multiple_of(ALIGNMENT)).sum()
    }

    /// Writes `tensors` into it; where each begins. The region has the bytes that they need.
    pub fn hold(&mut self, tensors: &[(String, Tensor)]) -> Vec<u64> {
        // SAFETY: the map is readable and writable for its whole length, which is sealed; the borrow is exclusive in
        // this process, and any bytes are valid ones.
        let whole = unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.map.len()) };
        let mut start = 0;
        let mut places = Vec::with_capacity(tensors.len());
        for (_, tensor) in tensors {
            let bytes = tensor.as_bytes();
            let target = whole[start..][..bytes.len()].par_chunks_mut(CHUNK);
            target.zip(bytes.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
            places.push(start as u64);
            start += bytes.len().next_multiple_of(ALIGNMENT);
        }
        places
    }

    /// The `bytes` from `at` on, which keep the region from being written to.
    pub fn piece(self: &Arc<Self>, at: u64, bytes: usize) -> Result<Piece> {
        let start =
            usize::try_from(at).ok().filter(|start| start.checked_add(bytes).is_some_and(|e| e <= self.bytes()));
        match start {
            Some(start) => Ok(Piece { region: Arc::clone(self), start, bytes }),
            None => Err(std::io::Error::other(format!("{bytes} bytes from {at} on, of {}", self.bytes()))),
        }
    }
}

/// A part of a region.
#[derive(Debug)]
pub struct Piece {
    region: Arc<Region>,
    start: usize,
    bytes: usize,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `Region::piece` found these bytes within the map, whose size is sealed; it lives as long as this, and
        // is not written to elsewhere in this process, since `Region::hold` needs it alone.
        unsafe { std::slice::from_raw_parts(self.region.map.as_mut_ptr().add(self.start), self.bytes) }
    }
}
