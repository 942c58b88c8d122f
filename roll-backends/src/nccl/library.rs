//! The functions of NCCL and the CUDA runtime that are used here, loaded at run time.
//!
//! The declarations follow `nccl.h` of NCCL 2 and CUDA's `cuda_runtime_api.h`; both are stable within a major version.
//!
//! The crate `cudarc` declares them too, but cudarc 0.19 looks for `libnccl.so` and never for `libnccl.so.2`, the only
//! name that NVIDIA's wheel and Debian's `libnccl2` install, nor for a CUDA runtime newer than the version it is built
//! against; it also panics if a library lacks a function.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::NcclError;
use crate::library::{Missing, functions, open_first, text};

/// `ncclUniqueId`, which identifies a job to its ranks. Passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; UniqueId::BYTES]);

impl UniqueId {
    pub(super) const BYTES: usize = 128;
}

/// `ncclConfig_t` of NCCL 2.14, which later versions complete with their defaults.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    padding: c_int,
}

impl Config {
    /// The configuration in which no call waits for other ranks: calls return [`IN_PROGRESS`], and
    /// `ncclCommGetAsyncError` returns their result later.
    pub(super) fn non_blocking() -> Self {
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking: 0, padding: 0 }
    }
}

/// `ncclComm_t` and `cudaStream_t`.
pub(super) type Handle = *mut c_void;

pub(super) const NCCL_FLOAT32: c_int = 7;
pub(super) const NCCL_SUM: c_int = 0;
/// `ncclInProgress`.
pub(super) const IN_PROGRESS: c_int = 7;
/// `cudaStreamNonBlocking`: the stream does not wait for the default stream, nor the default stream for it.
pub(super) const NON_BLOCKING: c_uint = 1;
/// `cudaSuccess` and `ncclSuccess`.
pub(super) const SUCCESS: c_int = 0;
/// `cudaErrorNotReady`.
pub(super) const NOT_READY: c_int = 600;
/// `cudaMemcpyHostToDevice`, `cudaMemcpyDeviceToHost`.
pub(super) const TO_DEVICE: c_int = 1;
pub(super) const TO_HOST: c_int = 2;

const NCCL: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const CUDART: [&str; 4] = ["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"];

functions! {
    Nccl {
        get_unique_id: "ncclGetUniqueId" (*mut UniqueId) -> c_int,
        comm_init_rank_config: "ncclCommInitRankConfig" (*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int,
        comm_get_async_error: "ncclCommGetAsyncError" (Handle, *mut c_int) -> c_int,
        comm_abort: "ncclCommAbort" (Handle) -> c_int,
        comm_destroy: "ncclCommDestroy" (Handle) -> c_int,
        all_reduce: "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int,
        reduce_scatter: "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int,
        all_gather: "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, Handle) -> c_int,
        broadcast: "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int,
        group_start: "ncclGroupStart" () -> c_int,
        group_end: "ncclGroupEnd" () -> c_int,
        get_error_string: "ncclGetErrorString" (c_int) -> *const c_char,
    }
}

functions! {
    Cuda {
        get_device_count: "cudaGetDeviceCount" (*mut c_int) -> c_int,
        set_device: "cudaSetDevice" (c_int) -> c_int,
        device_get_pci_bus_id: "cudaDeviceGetPCIBusId" (*mut c_char, c_int, c_int) -> c_int,
        malloc: "cudaMalloc" (*mut *mut c_void, usize) -> c_int,
        free: "cudaFree" (*mut c_void) -> c_int,
        malloc_host: "cudaMallocHost" (*mut *mut c_void, usize) -> c_int,
        free_host: "cudaFreeHost" (*mut c_void) -> c_int,
        memcpy_async: "cudaMemcpyAsync" (*mut c_void, *const c_void, usize, c_int, Handle) -> c_int,
        stream_create_with_flags: "cudaStreamCreateWithFlags" (*mut Handle, c_uint) -> c_int,
        stream_query: "cudaStreamQuery" (Handle) -> c_int,
        stream_destroy: "cudaStreamDestroy" (Handle) -> c_int,
        get_error_string: "cudaGetErrorString" (c_int) -> *const c_char,
    }
}

impl Nccl {
    /// Loads NCCL from the system's library search path.
    pub(super) fn load() -> Result<Self, NcclError> {
        let (library, file) = open(&NCCL, "NCCL", "the package `libnccl2`, or `nvidia-nccl-cu12` of PyPI")?;
        Self::find(library).map_err(|missing| lacks(file, missing))
    }

    /// Fails unless `code` is `ncclSuccess`, or `ncclInProgress`, which calls on a non-blocking communicator return.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        match code {
            IN_PROGRESS => Ok(()),
            _ => check("NCCL", self.get_error_string, call, code),
        }
    }
}

impl Cuda {
    /// Loads the CUDA runtime from the system's library search path.
    pub(super) fn load() -> Result<Self, NcclError> {
        let (library, file) = open(&CUDART, "the CUDA runtime", "`nvidia-cuda-runtime-cu12` of PyPI, or CUDA itself")?;
        Self::find(library).map_err(|missing| lacks(file, missing))
    }

    /// Fails unless `code` is `cudaSuccess`.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        check("CUDA", self.get_error_string, call, code)
    }
}

type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

fn check(library: &'static str, error_string: ErrorString, call: &'static str, code: c_int) -> Result<(), NcclError> {
    if code == SUCCESS {
        return Ok(());
    }
    // SAFETY: the library returns null or a constant text for every code.
    let text = unsafe { text(error_string(code)) };
    Err(NcclError::Call { library, call, code, text })
}

fn lacks(file: &'static str, Missing { symbol, source }: Missing) -> NcclError {
    NcclError::Symbol { file, symbol, source }
}

fn open(
    files: &[&'static str],
    what: &'static str,
    install: &'static str,
) -> Result<(Library, &'static str), NcclError> {
    open_first(files).map_err(|reason| NcclError::Library { what, tried: files.join(", "), install, reason })
}
