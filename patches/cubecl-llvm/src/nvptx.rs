//! What belongs to NVIDIA GPUs.

pub mod ptx_version {
    //! The version of the instruction set.

    use std::fmt;

    /// A version of the instruction set that LLVM would write. NVRTC chooses its own, so none is ever given.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum PtxVersion {}

    impl PtxVersion {
        /// The newest that a driver loads: never known here.
        pub fn for_driver(_: i32) -> Option<Self> {
            None
        }
    }

    impl fmt::Display for PtxVersion {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            match *self {}
        }
    }
}
