//! Loads and launches the fused kernels through NVIDIA's driver API.
//!
//! The declarations follow `cuda.h`, which keeps these functions stable.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::launch::{Kernel, Launch, LaunchShape, Launcher};
use super::nvrtc::{Nvrtc, SOURCE};
use crate::device::memory::DRIVER;
use crate::library::{functions, open_first, text};
use crate::sync::lock;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
const CAPABILITY: [c_int; 2] = [75, 76];
/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES` (spilled registers) and `CU_FUNC_ATTRIBUTE_NUM_REGS`.
#[cfg(test)]
const FOOTPRINT: [c_int; 2] = [3, 4];
/// `CUDA_SUCCESS`.
const SUCCESS: c_int = 0;
/// The only value that `cuInit` accepts.
const NO_FLAGS: c_uint = 0;
/// Environment variable that disables the fused kernels if it is `0`.
const SWITCH: &str = "ROLL_FUSED";

roll_core::inventory::submit! { roll_core::Variable(SWITCH) }

type Handle = *mut c_void;
type Pointers = *mut *mut c_void;

functions! {
    /// Functions of `cuda.h`. A suffix `_v2` is the version that the header's name maps to.
    Driver {
        init: "cuInit" (c_uint) -> c_int,
        device: "cuDeviceGet" (*mut c_int, c_int) -> c_int,
        attribute: "cuDeviceGetAttribute" (*mut c_int, c_int, c_int) -> c_int,
        retain: "cuDevicePrimaryCtxRetain" (*mut Handle, c_int) -> c_int,
        current: "cuCtxGetCurrent" (*mut Handle) -> c_int,
        push: "cuCtxPushCurrent_v2" (Handle) -> c_int,
        pop: "cuCtxPopCurrent_v2" (*mut Handle) -> c_int,
        load: "cuModuleLoadData" (*mut Handle, *const c_void) -> c_int,
        function: "cuModuleGetFunction" (*mut Handle, Handle, *const c_char) -> c_int,
        #[cfg(test)]
        footprint: "cuFuncGetAttribute" (*mut c_int, c_int, Handle) -> c_int,
        launch: "cuLaunchKernel"
            (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, Pointers, Pointers) -> c_int,
        error: "cuGetErrorString" (c_int, *mut *const c_char) -> c_int,
    }
}

impl Driver {
    fn load() -> Result<Self, String> {
        let (library, _) =
            open_first(&DRIVER).map_err(|reasons| format!("NVIDIA's driver is not found ({reasons})"))?;
        Ok(Self::find(library)?)
    }

    /// Fails with the driver's message unless `code`, which `call` returned, is [`SUCCESS`].
    fn check(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut at = std::ptr::null();
        // SAFETY: returns a constant string for known codes, and null for others.
        let text = unsafe {
            (self.error)(code, &mut at);
            text(at)
        };
        Err(format!("{call} failed with {code} ({text})"))
    }

    /// Runs `call` with `context` as this thread's current context, and restores the previous context.
    fn within<T>(&self, context: Handle, call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let mut current = null_mut();
        // SAFETY: the driver is initialised, and the context is never released.
        self.check("cuCtxGetCurrent", unsafe { (self.current)(&mut current) })?;
        if current == context {
            return call();
        }
        // SAFETY: as above.
        self.check("cuCtxPushCurrent", unsafe { (self.push)(context) })?;
        let result = call();
        // SAFETY: pushed above.
        let popped = self.check("cuCtxPopCurrent", unsafe { (self.pop)(&mut current) });
        result.and_then(|result| popped.map(|()| result))
    }
}

/// One GPU with the fused kernels loaded.
pub struct Gpu {
    number: usize,
    driver: Driver,
    /// The primary context, which torch uses: its tensors are memory of this context.
    context: Handle,
    kernels: Vec<(Kernel, Handle)>,
    has_failed: AtomicBool,
}

// SAFETY: handles of contexts and functions are valid in all threads.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for Gpu {}

/// Returns GPU `number` in torch's numbering. The kernels are compiled at the first call. `None` if they cannot be used
/// there; the first call logs why.
pub(super) fn gpu(number: usize) -> Option<Arc<Gpu>> {
    static GPUS: Mutex<BTreeMap<usize, Option<Arc<Gpu>>>> = Mutex::new(BTreeMap::new());
    // Locked while compiling, so that other threads wait instead of compiling too. A panic leaves the map consistent.
    let mut gpus = lock(&GPUS);
    let found = gpus.entry(number).or_insert_with(|| match std::env::var(SWITCH).as_deref() {
        Ok("0") => {
            tracing::info!("{SWITCH}=0: GPU {number} runs ATen's operators in place of the fused kernels");
            None
        }
        _ => Gpu::open(number).map(Arc::new).map_err(|reason| warn(number, &reason)).ok(),
    });
    found.clone()
}

fn warn(number: usize, reason: &str) {
    tracing::warn!(
        "GPU {number} runs ATen's operators in place of the fused kernels, which take fewer passes over memory: {reason}"
    );
}

impl Gpu {
    /// Compiles and loads the kernels on GPU `number`.
    fn open(number: usize) -> Result<Self, String> {
        let driver = Driver::load()?;
        let ordinal = c_int::try_from(number).map_err(|e| e.to_string())?;
        let (mut device, mut capability, mut context) = (0, [0; 2], null_mut());
        // SAFETY: the written variables are alive; the driver may be initialised repeatedly.
        unsafe {
            driver.check("cuInit", (driver.init)(NO_FLAGS))?;
            driver.check("cuDeviceGet", (driver.device)(&mut device, ordinal))?;
            for (value, attribute) in capability.iter_mut().zip(CAPABILITY) {
                driver.check("cuDeviceGetAttribute", (driver.attribute)(value, attribute, device))?;
            }
            driver.check("cuDevicePrimaryCtxRetain", (driver.retain)(&mut context, device))?;
        }
        let architecture = format!("sm_{}{}", capability[0], capability[1]);
        let code = Nvrtc::load()?.compile(SOURCE, &architecture)?;
        let kernels = driver.within(context, || {
            let mut module = null_mut();
            // SAFETY: an ELF image contains its own size.
            driver.check("cuModuleLoadData", unsafe { (driver.load)(&mut module, code.as_ptr().cast()) })?;
            let mut kernels = Vec::new();
            for kernel in Kernel::ALL {
                let mut function = null_mut();
                // SAFETY: the module stays loaded.
                let code = unsafe { (driver.function)(&mut function, module, kernel.0.as_ptr()) };
                driver.check("cuModuleGetFunction", code)?;
                kernels.push((kernel, function));
            }
            Ok(kernels)
        })?;
        tracing::debug!("fused kernels compiled for GPU {number}, {architecture}");
        Ok(Self { number, driver, context, kernels, has_failed: AtomicBool::new(false) })
    }

    /// Returns the bytes per thread that a kernel spills to local memory, and its number of registers.
    #[cfg(test)]
    pub(super) fn footprint(&self, kernel: Kernel) -> Result<[c_int; 2], String> {
        let function = self.function(kernel)?;
        self.driver.within(self.context, || {
            let mut found = [0; 2];
            for (value, attribute) in found.iter_mut().zip(FOOTPRINT) {
                // SAFETY: the function is loaded.
                let code = unsafe { (self.driver.footprint)(value, attribute, function) };
                self.driver.check("cuFuncGetAttribute", code)?;
            }
            Ok(found)
        })
    }

    fn function(&self, kernel: Kernel) -> Result<Handle, String> {
        let found = self.kernels.iter().find(|(found, _)| *found == kernel);
        found.map(|(_, function)| *function).ok_or_else(|| format!("{:?} is not loaded", kernel.0))
    }

    /// Queues a launch on the default stream.
    fn queue(&self, launch: &mut Launch) -> Result<(), String> {
        let function = self.function(launch.kernel)?;
        let LaunchShape { grid, block: [block_x, block_y] } = launch.shape;
        let (grid_y, grid_z, block_z, shared_bytes) = (1, 1, 1, 0);
        let (default_stream, no_options) = (null_mut(), null_mut());
        let mut parameters = launch.parameters();
        self.driver.within(self.context, || {
            // SAFETY: number and types of the parameters are those of the kernel; they are copied before the call
            // returns. The null stream is the default one, which `tch` always uses.
            let code = unsafe {
                (self.driver.launch)(
                    function,
                    grid,
                    grid_y,
                    grid_z,
                    block_x,
                    block_y,
                    block_z,
                    shared_bytes,
                    default_stream,
                    parameters.as_mut_ptr(),
                    no_options,
                )
            };
            self.driver.check("cuLaunchKernel", code)
        })
    }
}

impl Launcher for Arc<Gpu> {
    fn launch(&self, launch: &mut Launch) -> Result<(), String> {
        let result = self.queue(launch);
        if let Err(reason) = &result
            && !self.has_failed.swap(true, Ordering::Relaxed)
        {
            warn(self.number, &format!("{:?}: {reason}", launch.kernel.0));
        }
        result
    }
}
