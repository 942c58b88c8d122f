//! What belongs to all GPUs.

pub mod lowered_features {
    //! Which features of a device LLVM can use.

    use cubecl_core::ir::DeviceProperties;

    /// The target whose features are meant.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum GpuTarget {
        /// NVIDIA GPUs.
        Nvptx,
    }

    /// Leaves the properties as they are: it is asked for only when LLVM compiles.
    pub fn restrict_features(_: &mut DeviceProperties, _: GpuTarget) {}
}
