//! Flex with the default kernels instead of its own, so that they are tested: backends use them for what they have no
//! better kernel for.

use burn::backend::Flex;

use super::{
    ActivationKernel, AttentionKernel, ChannelNormKernel, ConvKernel, GateKernel, LinearKernel, NormKernel, RopeKernel,
};

impl ActivationKernel for Flex {}
impl AttentionKernel for Flex {}
impl ChannelNormKernel for Flex {}
impl ConvKernel for Flex {}
impl GateKernel for Flex {}
impl LinearKernel for Flex {}
impl NormKernel for Flex {}
impl RopeKernel for Flex {}
