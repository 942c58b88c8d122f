//! Calls of the CUDA runtime that libtorch has loaded.
//!
//! The declarations follow `cuda_runtime_api.h`; the functions used here are the same in CUDA 11 to 13. The library is
//! looked up in this process and never loaded again: libtorch's CUDA library needs it, and a second copy must not
//! exist.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, OnceLock};

use libloading::Library;

use super::{CopyStreams, Runtime, RuntimeError, Stream};
use crate::library::{functions, text};
use crate::sync::lock;

/// `cudaStream_t` and `cudaEvent_t`.
type Handle = *mut c_void;

/// `cudaMemcpyHostToDevice`, `cudaMemcpyDeviceToHost`.
const TO_DEVICE: c_int = 1;
const TO_HOST: c_int = 2;
/// `cudaStreamNonBlocking`: no implicit synchronisation with the legacy default stream.
const NON_BLOCKING: c_uint = 1;
/// `cudaEventDisableTiming`.
const WITHOUT_TIMING: c_uint = 2;
/// `cudaHostAllocDefault`.
const ALLOC_DEFAULT: c_uint = 0;
/// `cudaEventWaitDefault`.
const WAIT_DEFAULT: c_uint = 0;
/// `cudaSuccess`.
const SUCCESS: c_int = 0;
/// Bytes that the pool of pinned memory ([`super::pool::Pool`]) may hold beyond its peak use. With this room, buffers
/// for copies of parameters do not evict the buffers of offloaded segment inputs.
const SPARE: usize = 1 << 29;

functions! {
    Functions {
        get_device: "cudaGetDevice" (*mut c_int) -> c_int,
        set_device: "cudaSetDevice" (c_int) -> c_int,
        stream_create: "cudaStreamCreateWithFlags" (*mut Handle, c_uint) -> c_int,
        stream_wait_event: "cudaStreamWaitEvent" (Handle, Handle, c_uint) -> c_int,
        stream_synchronize: "cudaStreamSynchronize" (Handle) -> c_int,
        event_create: "cudaEventCreateWithFlags" (*mut Handle, c_uint) -> c_int,
        event_record: "cudaEventRecord" (Handle, Handle) -> c_int,
        event_synchronize: "cudaEventSynchronize" (Handle) -> c_int,
        event_destroy: "cudaEventDestroy" (Handle) -> c_int,
        memcpy_async: "cudaMemcpyAsync" (*mut c_void, *const c_void, usize, c_int, Handle) -> c_int,
        host_alloc: "cudaHostAlloc" (*mut *mut c_void, usize, c_uint) -> c_int,
        free_host: "cudaFreeHost" (*mut c_void) -> c_int,
        get_last_error: "cudaGetLastError" () -> c_int,
        get_error_string: "cudaGetErrorString" (c_int) -> *const c_char,
    }
}

/// The runtime for one GPU. Its streams live as long as the process.
pub(crate) struct Cuda {
    functions: &'static Functions,
    device: c_int,
    /// The handle of [`Stream::ToHost`], as a number.
    to_host: usize,
    /// The handle of [`Stream::ToDevice`], as a number.
    to_device: usize,
}

/// `cudaEvent_t`.
pub(crate) struct Event {
    functions: &'static Functions,
    handle: usize,
}

impl Functions {
    /// The functions of this process's runtime, looked up once.
    fn of_process() -> Result<&'static Self, String> {
        static FOUND: OnceLock<Result<Functions, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let library = loaded_runtime().ok_or("libtorch has loaded no libcudart")?;
            Ok(Self::find(library)?)
        });
        found.as_ref().map_err(String::clone)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), RuntimeError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the first call clears the error, which libtorch would otherwise report as its own; the second returns
        // a constant string.
        let text = unsafe {
            (self.get_last_error)();
            text((self.get_error_string)(code))
        };
        Err(RuntimeError { call, reason: format!("{text} (error {code})") })
    }
}

/// Finds the runtime that is loaded in this process: by its usual names, or, because libtorch's archives rename the
/// file, by the paths in the process's memory map.
#[cfg(target_os = "linux")]
fn loaded_runtime() -> Option<Library> {
    use libloading::os::unix::{Library as Unix, RTLD_NOW};
    /// `RTLD_NOLOAD` of `dlfcn.h`: fails unless the library is loaded.
    const RTLD_NOLOAD: c_int = 4;
    const NAMES: [&str; 4] = ["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"];
    // SAFETY: nothing is loaded, so no initialiser runs.
    let open = |name: &str| unsafe { Unix::open(Some(name), RTLD_NOW | RTLD_NOLOAD) }.ok();
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let library = NAMES.into_iter().find_map(open).or_else(|| mapped_runtimes(&maps()).into_iter().find_map(open));
    library.map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn loaded_runtime() -> Option<Library> {
    None
}

/// Paths of CUDA runtimes in Linux's memory map of a process: `address permissions offset device inode path`.
#[cfg(target_os = "linux")]
fn mapped_runtimes(maps: &str) -> Vec<&str> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let is_runtime = |path: &&str| {
        let name = path.rsplit('/').next().unwrap_or(path);
        name.starts_with("libcudart") && name.contains(".so")
    };
    let mut paths: Vec<_> = paths.filter(is_runtime).collect();
    paths.dedup();
    paths
}

impl Cuda {
    fn new(device: usize) -> Result<Self, RuntimeError> {
        let unusable = |reason| RuntimeError { call: "looking for the CUDA runtime", reason };
        let functions = Functions::of_process().map_err(unusable)?;
        let device = c_int::try_from(device).map_err(|e| unusable(e.to_string()))?;
        let mut cuda = Self { functions, device, to_host: 0, to_device: 0 };
        [cuda.to_host, cuda.to_device] = cuda.on_device(|| {
            let mut streams: [Handle; 2] = [std::ptr::null_mut(); 2];
            for stream in &mut streams {
                // SAFETY: writes a handle.
                let code = unsafe { (functions.stream_create)(stream, NON_BLOCKING) };
                functions.check("cudaStreamCreateWithFlags", code)?;
            }
            Ok(streams.map(|stream| stream.expose_provenance()))
        })?;
        Ok(cuda)
    }

    /// Runs `call` with this GPU as the thread's current device, and restores the previous device.
    fn on_device<T>(&self, call: impl FnOnce() -> Result<T, RuntimeError>) -> Result<T, RuntimeError> {
        let mut previous = self.device;
        // SAFETY: writes a number.
        self.functions.check("cudaGetDevice", unsafe { (self.functions.get_device)(&mut previous) })?;
        if previous == self.device {
            return call();
        }
        self.set_device(self.device)?;
        let result = call();
        self.set_device(previous)?;
        result
    }

    fn set_device(&self, device: c_int) -> Result<(), RuntimeError> {
        // SAFETY: takes any number.
        self.functions.check("cudaSetDevice", unsafe { (self.functions.set_device)(device) })
    }

    fn handle(&self, stream: Stream) -> Handle {
        match stream {
            // The legacy default stream.
            Stream::Compute => std::ptr::null_mut(),
            Stream::ToHost => std::ptr::with_exposed_provenance_mut(self.to_host),
            Stream::ToDevice => std::ptr::with_exposed_provenance_mut(self.to_device),
        }
    }
}

impl Event {
    fn handle(&self) -> Handle {
        std::ptr::with_exposed_provenance_mut(self.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is not shared. CUDA frees a pending event when it is reached.
        let code = unsafe { (self.functions.event_destroy)(self.handle()) };
        let _ = self.functions.check("cudaEventDestroy", code);
    }
}

impl Runtime for Cuda {
    type Event = Event;

    fn record_event(&self, stream: Stream) -> Result<Event, RuntimeError> {
        self.on_device(|| {
            let mut handle: Handle = std::ptr::null_mut();
            // SAFETY: writes a handle.
            let code = unsafe { (self.functions.event_create)(&mut handle, WITHOUT_TIMING) };
            self.functions.check("cudaEventCreateWithFlags", code)?;
            let event = Event { functions: self.functions, handle: handle.expose_provenance() };
            // SAFETY: both handles are alive.
            let code = unsafe { (self.functions.event_record)(handle, self.handle(stream)) };
            self.functions.check("cudaEventRecord", code)?;
            Ok(event)
        })
    }

    fn stream_wait_event(&self, stream: Stream, event: &Event) -> Result<(), RuntimeError> {
        self.on_device(|| {
            // SAFETY: both handles are alive; the stream keeps the event's state, not the handle.
            let code = unsafe { (self.functions.stream_wait_event)(self.handle(stream), event.handle(), WAIT_DEFAULT) };
            self.functions.check("cudaStreamWaitEvent", code)
        })
    }

    unsafe fn copy(&self, stream: Stream, to: usize, from: usize, bytes: usize) -> Result<(), RuntimeError> {
        let kind = if stream == Stream::ToHost { TO_HOST } else { TO_DEVICE };
        self.on_device(|| {
            let (to, from) = (std::ptr::with_exposed_provenance_mut(to), std::ptr::with_exposed_provenance(from));
            // SAFETY: as the caller promises.
            let code = unsafe { (self.functions.memcpy_async)(to, from, bytes, kind, self.handle(stream)) };
            self.functions.check("cudaMemcpyAsync", code)
        })
    }

    fn synchronize_event(&self, event: &Event) -> Result<(), RuntimeError> {
        // SAFETY: the handle is alive.
        let code = unsafe { (self.functions.event_synchronize)(event.handle()) };
        self.functions.check("cudaEventSynchronize", code)
    }

    fn synchronize_stream(&self, stream: Stream) -> Result<(), RuntimeError> {
        self.on_device(|| {
            // SAFETY: the handle is alive.
            let code = unsafe { (self.functions.stream_synchronize)(self.handle(stream)) };
            self.functions.check("cudaStreamSynchronize", code)
        })
    }

    fn pin(&self, bytes: usize) -> Result<usize, RuntimeError> {
        self.on_device(|| {
            let mut at: *mut c_void = std::ptr::null_mut();
            // SAFETY: writes an address.
            let code = unsafe { (self.functions.host_alloc)(&mut at, bytes, ALLOC_DEFAULT) };
            self.functions.check("cudaHostAlloc", code)?;
            Ok(at.expose_provenance())
        })
    }

    unsafe fn unpin(&self, at: usize, _bytes: usize) {
        // SAFETY: as the caller promises.
        let code = unsafe { (self.functions.free_host)(std::ptr::with_exposed_provenance_mut(at)) };
        if let Err(error) = self.functions.check("cudaFreeHost", code) {
            tracing::warn!("page-locked memory could not be freed: {error}");
        }
    }
}

/// The copy streams of each GPU that was requested; `None` if they cannot be used.
static STREAMS_BY_GPU: Mutex<Vec<(usize, Option<Arc<CopyStreams<Cuda>>>)>> = Mutex::new(Vec::new());

/// The copy streams of a GPU, in libtorch's numbering. `None` if they cannot be used, which was logged.
pub(crate) fn copy_streams_of(device: usize) -> Option<Arc<CopyStreams<Cuda>>> {
    let mut streams_by_gpu = lock(&STREAMS_BY_GPU);
    if let Some((_, copy_streams)) = streams_by_gpu.iter().find(|(number, _)| *number == device) {
        return copy_streams.clone();
    }
    let copy_streams =
        Cuda::new(device).map(|cuda| CopyStreams::new(cuda, SPARE)).map_err(|error| warn_unusable(&error)).ok();
    streams_by_gpu.push((device, copy_streams.clone()));
    copy_streams
}

/// Disables the copy streams of this GPU after a failure.
pub(crate) fn disable(device: usize, error: &RuntimeError) {
    let mut streams_by_gpu = lock(&STREAMS_BY_GPU);
    if let Some((_, copy_streams)) = streams_by_gpu.iter_mut().find(|(number, _)| *number == device)
        && copy_streams.take().is_some()
    {
        warn_unusable(error);
    }
}

fn warn_unusable(error: &RuntimeError) {
    tracing::warn!(
        "copies between GPU and host go through libtorch's own stream, and kernels wait for them: a separate \
         stream cannot be used ({error})"
    );
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_runtimes_are_found_under_any_file_name() {
        let maps = "7f00-7f01 r--p 00000000 fe:00 12   /opt/torch/lib/libcudart-d0da41ae.so.11.0\n\
                    7f01-7f02 r-xp 00001000 fe:00 12   /opt/torch/lib/libcudart-d0da41ae.so.11.0\n\
                    7f02-7f03 r--p 00000000 fe:00 13   /opt/torch lib/libcudart.so.13\n\
                    7f03-7f04 r--p 00000000 fe:00 14   /opt/libcudart/libc10.so\n\
                    7ffc-7ffd rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(
            mapped_runtimes(maps),
            ["/opt/torch/lib/libcudart-d0da41ae.so.11.0", "/opt/torch lib/libcudart.so.13"]
        );
    }
}
