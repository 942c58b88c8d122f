//! Backends whose kernels are the default ones, in the operations that every backend has. Attention is tiled, see
//! [`super::tiled`].

use super::{
    ActivationKernel, AttentionKernel, ChannelNormKernel, ConvKernel, GateKernel, LinearKernel, NormKernel, RopeKernel,
};

macro_rules! defaults {
    ($backend:ty: $($kernel:ident),*) => {
        $(impl $kernel for $backend {})*
    };
    ($backend:ty) => {
        defaults!(
            $backend: ActivationKernel, AttentionKernel, ChannelNormKernel, ConvKernel, GateKernel, LinearKernel,
            NormKernel, RopeKernel
        );
    };
}

#[cfg(feature = "cuda")]
defaults!(burn::backend::Cube);

#[cfg(feature = "portable-kernels")]
defaults!(burn::backend::Flex);
