//! Stands in for `cubecl-llvm`, whose build script downloads an LLVM bundle of several hundred megabytes.
//!
//! CubeCL compiles kernels for CUDA in two ways: through LLVM, or as CUDA C++ through NVRTC, which comes with CUDA.
//! roll takes the second (feature `cuda-cpp` of cubecl), but cubecl-cuda names types of the first in any build. They
//! are here, and nothing else; a compiler that is asked for says that it is not there.

pub mod nvptx;
pub mod shared;

use std::ffi::c_char;
use std::fmt;

use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::prelude::KernelDefinition;
use cubecl_runtime::compiler::CompilationError;
use cubecl_runtime::kernel::BufferIOAttr;

use nvptx::ptx_version::PtxVersion;

/// What kernels would be compiled for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    /// The processor.
    #[default]
    Cpu,
    /// NVIDIA GPUs.
    Nvptx,
}

/// The compiler that is not here.
#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    /// What it would compile for.
    pub target: LlvmTarget,
}

/// Names an AMD architecture in the crate this one stands in for.
#[derive(Clone, Copy, Debug)]
pub enum GfxArch {}

/// Options of a compilation.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// AMD architecture.
    pub arch: Option<GfxArch>,
    /// NVIDIA architecture.
    pub sm_arch: Option<SmArch>,
    /// Version of the instruction set.
    pub ptx_version: Option<PtxVersion>,
    /// Whether launch parameters are grid constants.
    pub grid_constants: bool,
}

/// A compiled kernel.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// Its code.
    pub ptx: Vec<c_char>,
    /// The function to launch.
    pub entrypoint: String,
    /// Its text.
    pub ir: String,
    /// Bytes of shared memory.
    pub shared_memory_size: usize,
    /// How buffers are used.
    pub io: Vec<BufferIOAttr>,
}

/// What a compilation gives.
#[derive(Clone, Debug)]
pub enum PlironArtifact {
    /// Code for the processor.
    Jit,
    /// Code for NVIDIA GPUs.
    NvptxCode(NvptxModule),
}

impl fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Jit => f.write_str("code for the processor"),
            Self::NvptxCode(module) => f.write_str(&module.ir),
        }
    }
}

impl PlironCompiler {
    /// Name of the language that kernels are lowered to.
    pub fn lang_tag(&self) -> &'static str {
        "ll"
    }

    /// Fails: nothing is compiled here.
    pub fn compile(&mut self, _: KernelDefinition, _: &PlironOptions) -> Result<PlironArtifact, CompilationError> {
        panic!("LLVM is not part of this build: enable the feature `cuda-cpp` of cubecl")
    }
}
