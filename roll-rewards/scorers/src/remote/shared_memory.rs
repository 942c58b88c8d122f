//! Memory that roll shares with a program on the same machine, so that the frames of a video need not pass through a
//! pipe.
//!
//! The memory is an unnamed file (memfd), which the program opens by its path in `/proc`. The size is sealed, so that a
//! program cannot shorten the file and thereby crash this process. A program that writes to the memory at the wrong
//! time only falsifies numbers, and it could return false numbers in its answer anyway.

use std::fs::File;
use std::io::Result;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapRaw;
use rayon::prelude::*;
use roll_core::Tensor;

/// Alignment of tensors in bytes.
const ALIGNMENT: usize = 64;
/// Number of bytes per task of a copying thread.
const CHUNK: usize = 1 << 20;

/// A region of shared memory. It is freed when no process maps it any longer.
#[derive(Debug)]
pub struct SharedMemory {
    map: MmapRaw,
    file: File,
    /// A number that no other region of this process has.
    id: u64,
}

impl SharedMemory {
    /// Creates a region of at least one byte. Fails if the system has no memfd or too little memory.
    #[cfg(target_os = "linux")]
    pub fn new(bytes: usize) -> Result<Self> {
        use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
        static CREATED: AtomicU64 = AtomicU64::new(0);
        let file = File::from(memfd_create("roll", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        // Memory is allocated now, because missing memory would otherwise raise SIGBUS during a copy.
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { map: MmapRaw::map_raw(&file)?, file, id: CREATED.fetch_add(1, Ordering::Relaxed) })
    }

    /// Fails, because this system has no memfd.
    #[cfg(not(target_os = "linux"))]
    pub fn new(_: usize) -> Result<Self> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// The region's path, for the program. It may be reused once this region is gone.
    #[cfg(unix)]
    pub fn path(&self) -> PathBuf {
        use std::os::fd::AsRawFd;
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    /// An empty path.
    #[cfg(not(unix))]
    pub fn path(&self) -> PathBuf {
        PathBuf::new()
    }

    /// A number that is unique among this process's regions.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Number of bytes that `tensors` need, including alignment.
    pub fn needed(tensors: &[(String, Tensor)]) -> usize {
        tensors.iter().map(|(_, tensor)| tensor.as_bytes().len().next_multiple_of(ALIGNMENT)).sum()
    }

    /// Copies `tensors` into the region and returns their offsets. The region must be large enough; see
    /// [`SharedMemory::needed`].
    pub fn copy_in(&mut self, tensors: &[(String, Tensor)]) -> Vec<u64> {
        // SAFETY: the map is readable and writable for its whole length, which is sealed; the borrow is exclusive in
        // this process, and all byte values are valid.
        let whole = unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.map.len()) };
        let mut start = 0;
        let mut offsets = Vec::with_capacity(tensors.len());
        for (_, tensor) in tensors {
            let bytes = tensor.as_bytes();
            let target = whole[start..][..bytes.len()].par_chunks_mut(CHUNK);
            target.zip(bytes.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
            offsets.push(start as u64);
            start += bytes.len().next_multiple_of(ALIGNMENT);
        }
        offsets
    }

    /// Returns `bytes` bytes from offset `at` on, without a copy. As long as the result lives, the region is not
    /// written to.
    pub fn slice(self: &Arc<Self>, at: u64, bytes: usize) -> Result<SharedBytes> {
        let start =
            usize::try_from(at).ok().filter(|start| start.checked_add(bytes).is_some_and(|e| e <= self.bytes()));
        match start {
            Some(start) => Ok(SharedBytes { shared_memory: Arc::clone(self), start, bytes }),
            None => Err(std::io::Error::other(format!("{bytes} bytes from {at} on, of {}", self.bytes()))),
        }
    }
}

/// Part of a region.
#[derive(Debug)]
pub struct SharedBytes {
    shared_memory: Arc<SharedMemory>,
    start: usize,
    bytes: usize,
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `SharedMemory::slice` checked that these bytes are within the map, whose size is sealed. The map
        // lives as long as this value, and this process does not write to it meanwhile, because
        // `SharedMemory::copy_in` needs exclusive access.
        unsafe { std::slice::from_raw_parts(self.shared_memory.map.as_mut_ptr().add(self.start), self.bytes) }
    }
}
