//! How much memory a phase takes at most.

use burn_tensor::Device;
use roll_backends::device::{is_gpu, memory};

/// Reads the peak memory of a phase.
pub enum Meter {
    /// Peak of this process in host memory: the kernel's high-water mark.
    Host,
    /// Peak of GPU memory by the driver's count, less the bytes that were in use when the meter was made. The
    /// allocators of libtorch and CubeCL keep all memory that they once took, so the use after a phase is the peak of
    /// that phase or of an earlier one.
    Gpu { number: usize, used_before: u64 },
}

impl Meter {
    /// Watches the device that `backend` names. Make it before the first tensor on that device: GPU memory that is
    /// already in use is not counted.
    pub fn new(device: &Device, backend: &str) -> Self {
        // Text after the colon that is not a number was refused when the device was opened.
        let number = backend.split_once(':').and_then(|(_, number)| number.parse().ok()).unwrap_or(0);
        match is_gpu(device) {
            true => Self::Gpu { number, used_before: memory::used(number).unwrap_or(0) },
            false => Self::Host,
        }
    }

    /// Starts a phase.
    pub fn reset(&self) {
        if matches!(self, Self::Host) {
            // 5 resets the kernel's high-water mark. If this fails, the mark is that of the whole run; nothing else
            // depends on it.
            let _ = std::fs::write("/proc/self/clear_refs", "5");
        }
    }

    /// Peak in bytes since [`Meter::reset`], on a GPU since [`Meter::new`]; `None` where it cannot be read.
    pub fn peak(&self) -> Option<u64> {
        match self {
            Self::Host => memory::host_peak(),
            Self::Gpu { number, used_before } => Some(memory::used(*number)?.saturating_sub(*used_before)),
        }
    }

    /// The kind of memory that is counted.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu { .. } => "device",
        }
    }
}
