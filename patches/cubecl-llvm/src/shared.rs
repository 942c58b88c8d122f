//! Stub of `cubecl-llvm`'s module for code that all GPU targets share.

pub mod lowered_features {
    //! Which features of a device LLVM can use.

    use cubecl_core::ir::DeviceProperties;

    /// The GPU target that LLVM would compile for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum GpuTarget {
        /// NVIDIA GPUs.
        Nvptx,
    }

    /// Leaves the properties as they are: it is asked for only when LLVM compiles.
    pub fn restrict_features(_: &mut DeviceProperties, _: GpuTarget) {}
}
