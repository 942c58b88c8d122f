//! The functions of NCCL and the CUDA runtime that are used here, loaded at run time.
//!
//! The declarations follow `nccl.h` of NCCL 2 and CUDA's `cuda_runtime_api.h`; both are stable within a major version.
//!
//! The crate `cudarc` declares them too, but cudarc 0.19 looks for `libnccl.so` and never for `libnccl.so.2`, the only
//! name that NVIDIA's wheel and Debian's `libnccl2` install, nor for a CUDA runtime newer than the version it is built
//! against; it also panics if a library lacks a function.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use libloading::Library;

use super::NcclError;

/// `ncclUniqueId`, which identifies a job to its ranks. Passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; UniqueId::BYTES]);

impl UniqueId {
    pub(super) const BYTES: usize = 128;
}

/// `ncclComm_t` and `cudaStream_t`.
pub(super) type Handle = *mut c_void;

pub(super) const NCCL_FLOAT32: c_int = 7;
pub(super) const NCCL_SUM: c_int = 0;
/// `cudaErrorNotReady`.
pub(super) const NOT_READY: c_int = 600;
/// `cudaMemcpyHostToDevice`, `cudaMemcpyDeviceToHost`.
pub(super) const TO_DEVICE: c_int = 1;
pub(super) const TO_HOST: c_int = 2;

const NCCL: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const CUDART: [&str; 4] = ["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"];

/// A table of function pointers, loaded from the library that messages call `$library`.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident, $library:literal { $($field:ident: $symbol:literal ($($argument:ty),*) -> $result:ty,)* }) => {
        $(#[$doc])*
        pub(super) struct $name {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            // Never unloaded: the library may have threads of its own.
            _library: Arc<Library>,
        }

        impl $name {
            fn find(library: Library, file: &'static str) -> Result<Self, NcclError> {
                let library = Arc::new(library);
                $(
                    // SAFETY: the signature is that of the library's header.
                    let $field = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol) };
                    let $field = *$field.map_err(|source| NcclError::Symbol { file, symbol: stringify!($field), source })?;
                )*
                std::mem::forget(library.clone());
                Ok(Self { $($field,)* _library: library })
            }

            /// Fails unless `code` is 0: `ncclSuccess`, `cudaSuccess`.
            pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
                if code == 0 {
                    return Ok(());
                }
                // SAFETY: the library returns null or a constant text for every code.
                let text = unsafe {
                    let text = (self.get_error_string)(code);
                    if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
                };
                Err(NcclError::Call { library: $library, call, code, text })
            }
        }
    };
}

functions! {
    /// Functions of NCCL.
    Nccl, "NCCL" {
        get_unique_id: b"ncclGetUniqueId\0" (*mut UniqueId) -> c_int,
        comm_init_rank: b"ncclCommInitRank\0" (*mut Handle, c_int, UniqueId, c_int) -> c_int,
        comm_destroy: b"ncclCommDestroy\0" (Handle) -> c_int,
        all_reduce: b"ncclAllReduce\0" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int,
        reduce_scatter: b"ncclReduceScatter\0" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int,
        all_gather: b"ncclAllGather\0" (*const c_void, *mut c_void, usize, c_int, Handle, Handle) -> c_int,
        broadcast: b"ncclBroadcast\0" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int,
        group_start: b"ncclGroupStart\0" () -> c_int,
        group_end: b"ncclGroupEnd\0" () -> c_int,
        get_error_string: b"ncclGetErrorString\0" (c_int) -> *const c_char,
    }
}

functions! {
    /// Functions of the CUDA runtime.
    Cuda, "CUDA" {
        get_device_count: b"cudaGetDeviceCount\0" (*mut c_int) -> c_int,
        set_device: b"cudaSetDevice\0" (c_int) -> c_int,
        malloc: b"cudaMalloc\0" (*mut *mut c_void, usize) -> c_int,
        free: b"cudaFree\0" (*mut c_void) -> c_int,
        memcpy: b"cudaMemcpy\0" (*mut c_void, *const c_void, usize, c_int) -> c_int,
        stream_create: b"cudaStreamCreate\0" (*mut Handle) -> c_int,
        stream_query: b"cudaStreamQuery\0" (Handle) -> c_int,
        stream_destroy: b"cudaStreamDestroy\0" (Handle) -> c_int,
        get_error_string: b"cudaGetErrorString\0" (c_int) -> *const c_char,
    }
}

impl Nccl {
    /// Loads NCCL from the system's library search path.
    pub(super) fn load() -> Result<Self, NcclError> {
        let (library, file) = open(&NCCL, "NCCL", "the package `libnccl2`, or `nvidia-nccl-cu12` of PyPI")?;
        Self::find(library, file)
    }
}

impl Cuda {
    /// Loads the CUDA runtime from the system's library search path.
    pub(super) fn load() -> Result<Self, NcclError> {
        let (library, file) = open(&CUDART, "the CUDA runtime", "`nvidia-cuda-runtime-cu12` of PyPI, or CUDA itself")?;
        Self::find(library, file)
    }
}

/// The first of `files` that can be loaded.
fn open(
    files: &[&'static str],
    what: &'static str,
    install: &'static str,
) -> Result<(Library, &'static str), NcclError> {
    let mut reason = String::new();
    for file in files {
        // SAFETY: the initialisers of NVIDIA's libraries have no effect outside of the libraries.
        match unsafe { Library::new(*file) } {
            Ok(library) => return Ok((library, file)),
            Err(e) if reason.is_empty() => reason = e.to_string(),
            Err(_) => {}
        }
    }
    Err(NcclError::Library { what, tried: files.join(", "), install, reason })
}
