//! Devices: their names on the command line, whether they can be used on this machine, and the dtypes they compute in.
//!
//! [`Backend`] lists the kinds of device, and [`device()`] opens one by its name. The modules `cuda`, `wgpu` and `cube`
//! configure CubeCL's devices; [`memory`] reads the sizes of memory.

#[cfg(any(feature = "cuda", all(feature = "wgpu", feature = "kernel-cache")))]
mod cube;
#[cfg(feature = "cuda")]
mod cuda;
pub mod memory;
#[cfg(feature = "wgpu")]
mod wgpu;

use std::fmt;

use burn_tensor::{DType, Device};
use roll_core::Result;

use crate::BackendError;
#[cfg(any(feature = "flex", feature = "libtorch", feature = "cube"))]
use crate::backend::DispatchDevice;
#[cfg(feature = "libtorch")]
use crate::backend::LibTorchDevice;

/// A kind of device, as `--backend` names it (without the device number).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Burn's CPU backend (`burn-flex`) with this project's kernels.
    Flex,
    /// libtorch on the CPU.
    LibTorch,
    /// libtorch on NVIDIA GPUs.
    LibTorchCuda,
    /// CubeCL's kernels on NVIDIA GPUs.
    Cuda,
    /// CubeCL's kernels through Vulkan, Metal or Direct3D 12. Computes in f32 only if the device lacks bf16.
    Wgpu,
}

impl Backend {
    /// All backends, whether or not this build contains them.
    pub const ALL: [Self; 5] = [Self::Flex, Self::LibTorch, Self::LibTorchCuda, Self::Cuda, Self::Wgpu];

    /// The name on the command line and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::LibTorch => "libtorch",
            Self::LibTorchCuda => "libtorch-cuda",
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
        }
    }

    /// The cargo feature that compiles the backend.
    pub fn feature(self) -> &'static str {
        match self {
            Self::LibTorchCuda => Self::LibTorch.name(),
            _ => self.name(),
        }
    }

    /// Whether this build contains the backend.
    pub fn is_compiled(self) -> bool {
        match self {
            Self::Flex => cfg!(feature = "flex"),
            Self::LibTorch | Self::LibTorchCuda => cfg!(feature = "libtorch"),
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Wgpu => cfg!(feature = "wgpu"),
        }
    }

    /// Parses `name` and returns its backend, ignoring the device number. Fails if `name` is invalid.
    pub fn of(name: &str) -> Result<Self> {
        Ok(parse(name)?.0)
    }

    /// Returns the number of the NVIDIA GPU that `name` names. Fails with the reason if `name` names no NVIDIA GPU.
    pub fn nvidia_gpu(name: &str) -> std::result::Result<usize, String> {
        match parse(name) {
            Ok((Self::LibTorchCuda | Self::Cuda, number)) => Ok(number),
            Ok((backend, _)) => Err(format!("`{backend}` computes on no NVIDIA GPU")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Whether the backend's devices have numbers.
    pub fn is_numbered(self) -> bool {
        matches!(self, Self::LibTorchCuda | Self::Cuda | Self::Wgpu)
    }

    /// Whether `name` is exactly the name of a backend with numbered devices, i.e. has no number.
    pub fn is_numbered_name(name: &str) -> bool {
        Self::ALL.into_iter().any(|b| b.is_numbered() && b.name() == name)
    }

    /// A backend of this build that computes on the CPU.
    pub fn on_the_cpu() -> Self {
        [Self::Flex, Self::LibTorch].into_iter().find(|backend| backend.is_compiled()).unwrap_or(Self::Flex)
    }

    /// The shell command that builds `roll` with the backend.
    pub fn build_command(self) -> String {
        let prepare = match self {
            Self::LibTorch => "eval \"$(scripts/setup-libtorch)\" && ",
            Self::LibTorchCuda => "eval \"$(scripts/setup-libtorch --cuda)\" && ",
            _ => "",
        };
        format!("`{prepare}cargo build --release --features {}`", self.feature())
    }

    /// Fails, with the reason and a remedy, if device `number` cannot be used on this machine. Looks for libraries and
    /// hardware without starting Burn, which would panic.
    pub fn check_usable(self, number: usize) -> std::result::Result<(), String> {
        if !self.is_compiled() {
            let built = names(Self::is_compiled);
            return Err(format!(
                "it is not part of this build, which has {built}: build it with {}",
                self.build_command()
            ));
        }
        let _ = number; // unused in a build without numbered devices
        match self {
            #[cfg(feature = "libtorch")]
            Self::LibTorchCuda => check_libtorch_cuda(number),
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::check_usable(number),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => wgpu::open(number).map(drop),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The names of some backends, separated by commas.
fn names(include: impl Fn(Backend) -> bool) -> String {
    let names: Vec<_> = Backend::ALL.into_iter().filter(|b| include(*b)).map(Backend::name).collect();
    names.join(", ")
}

/// Opens the device that `--backend` names: `flex` (or `cpu`), `libtorch`, `libtorch-cuda[:N]`, `cuda[:N]` or
/// `wgpu[:N]`; the number N defaults to 0.
///
/// Fails if the backend is not compiled in or its library or hardware is missing; the error names the missing part and
/// the remedy.
pub fn device(name: &str) -> Result<Device> {
    let (backend, number) = parse(name)?;
    backend.check_usable(number).map_err(|reason| backend_error(name, reason))?;
    open(backend, number).ok_or_else(|| backend_error(name, "it is not part of this build".into()))
}

/// Splits a device's name into backend and number, which is 0 if it is left out.
fn parse(name: &str) -> Result<(Backend, usize)> {
    let (backend_name, number) = match name.split_once(':') {
        Some((backend_name, number)) => (backend_name, Some(number)),
        None => (name, None),
    };
    let backend_name = if backend_name == "cpu" { "flex" } else { backend_name };
    let found = Backend::ALL.into_iter().find(|backend| backend.name() == backend_name);
    let all = |_: Backend| true;
    let backend = found.ok_or_else(|| backend_error(name, format!("the backends are {}", names(all))))?;
    let Some(number) = number else { return Ok((backend, 0)) };
    if !backend.is_numbered() {
        return Err(backend_error(name, format!("`{backend}` has one device, without a number")));
    }
    let number = number.parse().map_err(|_| backend_error(name, format!("expected {backend}:N, N from 0 on")))?;
    Ok((backend, number))
}

fn backend_error(name: &str, reason: String) -> roll_core::Error {
    BackendError::Backend { name: name.into(), reason }.into()
}

#[cfg_attr(
    not(any(feature = "libtorch", feature = "cube")),
    expect(unused_variables, reason = "only devices with a number read it")
)]
fn open(backend: Backend, number: usize) -> Option<Device> {
    match backend {
        #[cfg(feature = "flex")]
        Backend::Flex => Some(Device::flex()),
        #[cfg(feature = "libtorch")]
        Backend::LibTorch => {
            set_libtorch_threads();
            Some(Device::libtorch())
        }
        #[cfg(feature = "libtorch")]
        Backend::LibTorchCuda => Some(Device::libtorch_cuda(number)),
        #[cfg(feature = "cuda")]
        Backend::Cuda => {
            cuda::set_up();
            Some(Device::cuda(number))
        }
        #[cfg(feature = "wgpu")]
        Backend::Wgpu => wgpu::open(number).ok(),
        #[allow(unreachable_patterns, reason = "unreachable when all are compiled in")]
        _ => None,
    }
}

/// Makes libtorch use the same number of threads as rayon, so that `RAYON_NUM_THREADS` applies to both.
#[cfg(feature = "libtorch")]
fn set_libtorch_threads() {
    tch::set_num_threads(i32::try_from(rayon::current_num_threads()).unwrap_or(i32::MAX));
}

/// Fails, with the reason, unless libtorch can use GPU `number`.
#[cfg(feature = "libtorch")]
fn check_libtorch_cuda(number: usize) -> std::result::Result<(), String> {
    if !tch::Cuda::is_available() {
        let has_cuda = std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("/libtorch_cuda"));
        let problem = if has_cuda {
            "libtorch finds no GPU: `nvidia-smi` must list one (in a container, started with `--gpus all`)"
        } else {
            "this build's libtorch has no CUDA: `scripts/setup-libtorch --cuda`, then build anew"
        };
        return Err(problem.into());
    }
    match usize::try_from(tch::Cuda::device_count()).unwrap_or(0) {
        count if number < count => Ok(()),
        count => Err(no_such_device(number, count)),
    }
}

#[cfg(any(feature = "libtorch", feature = "cuda"))]
fn no_such_device(number: usize, count: usize) -> String {
    format!("there is no device {number}: {count} found, numbered from 0 (CUDA_VISIBLE_DEVICES hides some)")
}

/// The default dtype of matrix products with weights of `dtype`: bf16 if the weights are bf16 and the device is a GPU
/// that supports it (with tensor cores), f32 otherwise.
pub fn product_dtype(device: &Device, dtype: DType) -> DType {
    if dtype == DType::BF16 && is_gpu(device) && device.supports_dtype(dtype) { DType::BF16 } else { DType::F32 }
}

/// The dtype of activations between operators, if matrix products are taken in the dtype `products`: bf16 for bf16
/// products on a GPU of libtorch, whose operators read and write bf16 natively; f32 otherwise. Residual streams and
/// parameters are always f32.
pub fn activation_dtype(device: &Device, products: DType) -> DType {
    if products == DType::BF16 && libtorch_gpu(device).is_some() { DType::BF16 } else { DType::F32 }
}

/// The device number, if the device is a GPU of libtorch.
#[cfg(feature = "libtorch")]
pub(crate) fn libtorch_gpu(device: &Device) -> Option<usize> {
    match device.clone().without_autodiff().as_dispatch() {
        DispatchDevice::LibTorch(LibTorchDevice::Cuda(number)) => Some(*number),
        _ => None,
    }
}

#[cfg(not(feature = "libtorch"))]
fn libtorch_gpu(_: &Device) -> Option<usize> {
    None
}

/// Whether the device stores integers of eight bits. Devices of libtorch do, although Burn reports that they do not,
/// because its casts on libtorch lack these integers.
pub fn has_bytes(device: &Device) -> bool {
    #[cfg(feature = "libtorch")]
    if let DispatchDevice::LibTorch(_) = device.clone().without_autodiff().as_dispatch() {
        return true;
    }
    device.supports_dtype(DType::U8)
}

/// Whether the device is a GPU.
pub fn is_gpu(device: &Device) -> bool {
    if libtorch_gpu(device).is_some() {
        return true;
    }
    #[cfg(feature = "cube")]
    if let DispatchDevice::Cube(_) = device.clone().without_autodiff().as_dispatch() {
        return true;
    }
    false
}

/// Whether the device is the CPU with this project's kernels (`flex`).
pub fn is_flex(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    if let DispatchDevice::Flex(_) = device.clone().without_autodiff().as_dispatch() {
        return true;
    }
    let _ = device;
    false
}

/// Whether tensors on the device are in host memory: `flex` and the CPU of libtorch.
pub fn is_host(device: &Device) -> bool {
    ["flex", "libtorch"].iter().any(|name| self::device(name).is_ok_and(|host| host == *device))
}

/// Whether convolutions on the device are fastest with channels innermost (channels-last). True for libtorch's GPUs.
pub fn prefers_channels_innermost(device: &Device) -> bool {
    libtorch_gpu(device).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(name: &str) -> String {
        device(name).err().unwrap().to_string()
    }

    #[test]
    fn parses_names_and_numbers() {
        assert_eq!(parse("cpu").unwrap(), (Backend::Flex, 0));
        assert_eq!(parse("cuda").unwrap(), (Backend::Cuda, 0));
        assert_eq!(parse("libtorch-cuda:3").unwrap(), (Backend::LibTorchCuda, 3));
        assert_eq!(Backend::of("libtorch-cuda:3").unwrap(), Backend::LibTorchCuda);
        assert_eq!(Backend::nvidia_gpu("cuda:2"), Ok(2));
        assert_eq!(Backend::nvidia_gpu("wgpu:1").unwrap_err(), "`wgpu` computes on no NVIDIA GPU");
        assert!(refusal("rocm").contains("flex, libtorch, libtorch-cuda, cuda, wgpu"));
        assert!(refusal("flex:1").contains("without a number"));
        assert!(refusal("cuda:one").contains("expected cuda:N"));
    }

    #[test]
    fn missing_backends_name_their_feature() {
        for backend in Backend::ALL.into_iter().filter(|b| !b.is_compiled()) {
            let message = refusal(backend.name());
            assert!(message.contains(&format!("--features {}", backend.feature())), "{message}");
            assert!(message.contains("this build, which has flex"), "{message}");
        }
    }

    #[test]
    fn compiled_backends_work_or_name_what_is_missing() {
        for backend in Backend::ALL.into_iter().filter(|b| b.is_compiled()) {
            match (device(backend.name()), backend.check_usable(0)) {
                (Ok(device), Ok(())) => {
                    assert_eq!(is_gpu(&device), backend.is_numbered());
                    let found = [DType::F32, DType::BF16].map(|products| activation_dtype(&device, products));
                    let bf16 = if backend == Backend::LibTorchCuda { DType::BF16 } else { DType::F32 };
                    assert_eq!(found, [DType::F32, bf16]);
                    let two = burn_tensor::Tensor::<1>::ones([2], &device).sum();
                    assert_eq!(crate::to_host(two).unwrap().to_f32_vec(), [2.0]);
                }
                (Err(error), Err(reason)) => assert!(error.to_string().contains(&reason)),
                (found, usable) => panic!("{backend}: {:?}, {usable:?}", found.is_ok()),
            }
        }
    }

    #[cfg(any(feature = "libtorch", feature = "cube"))]
    #[test]
    fn rejects_device_numbers_beyond_the_last() {
        for backend in Backend::ALL.into_iter().filter(|b| b.is_compiled() && b.is_numbered()) {
            assert!(device(&format!("{backend}:4096")).is_err());
        }
    }
}
